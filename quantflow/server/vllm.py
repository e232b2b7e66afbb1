"""`serve --engine vllm`: vLLM's own server, started with what the artifact's manifest and config.json say.

Nothing of vLLM is imported. Its command is looked for on PATH, and replaces this process, so
signals and exit codes are vLLM's.
"""

import dataclasses
import os
import shutil
import sys
from typing import Any

from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.manifest import read_manifest
from quantflow.server.settings import ServeJob
from quantflow.settings import KEY as SETTING

COMMAND = "vllm"
# Settings that vLLM's command line says in its own words, or that are done with before it starts.
_TOLD = {
    "revision",
    "name",
    "adapters",
    "chat_template",
    "host",
    "port",
    "api_key",
    "cors_allow_origin",
    "engine",
}
_TOLD |= {"tensor_parallel", "device"}
_TOLD_LIMITS = {"max_total_tokens", "max_batch_size", "max_batch_prefill_tokens"}


def command_of(job: ServeJob) -> list[str]:
    """Return vLLM's command line for an artifact.

    Raises:
        InputError: the folder is no artifact.
        UsageError: an option that vLLM has no word for.
        UnsupportedError: the artifact holds what vLLM does not read.
    """
    for record, known in ((job, _TOLD), (job.limits, _TOLD_LIMITS)):
        for field in dataclasses.fields(record):
            declared = field.metadata.get(SETTING)
            if (
                declared is not None
                and field.name not in known
                and getattr(record, field.name) != field.default
            ):
                raise UsageError(
                    f"{declared.flag} with --engine vllm", "leave it out: vLLM is not told of it"
                )
    job.signature.check(job.artifact)
    read_manifest(job.artifact)  # an artifact, and no other folder
    config = read_json(job.artifact / "config.json")
    assert isinstance(config, dict)
    scheme: dict[str, Any] = config.get("quantization_config", {})
    weights = [group.get("weights") or {} for group in scheme.get("config_groups", {}).values()]
    if scheme.get("format") == "pack-quantized" and not all(
        one.get("symmetric", True) for one in weights
    ):
        told = f"{job.artifact}: packed weights with zero points, which compressed-tensors does not reload"
        raise UnsupportedError(told, "quantize with a symmetric scheme, such as W4A16")
    words = [COMMAND, "serve", str(job.artifact), "--served-model-name", job.first_name]
    words += ["--host", job.host, "--port", str(job.port)]
    words += ["--dtype", str(config.get("dtype") or config.get("torch_dtype") or "auto")]
    kv = scheme.get("kv_cache_scheme")
    if kv and kv.get("type") == "float":
        words += ["--kv-cache-dtype", "fp8"]
    tensor_parallel = job.tensor_parallel or 1
    heads = int(config["num_attention_heads"])
    if heads % tensor_parallel:
        raise UsageError(
            f"tensor_parallel={tensor_parallel}: the model has {heads} heads",
            "use a number that divides them",
        )
    if tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(tensor_parallel)]
    if job.adapters:
        words += ["--enable-lora", "--lora-modules", *job.adapters]
    limits = job.limits
    if limits.max_total_tokens is not None:
        words += ["--max-model-len", str(limits.max_total_tokens)]
    if limits.max_batch_size is not None:
        words += ["--max-num-seqs", str(limits.max_batch_size)]
    if limits.max_batch_prefill_tokens is not None:
        words += ["--max-num-batched-tokens", str(limits.max_batch_prefill_tokens)]
    if job.chat_template is not None:
        words += ["--chat-template", str(job.chat_template)]
    if job.cors_allow_origin:
        words += [
            "--allowed-origins",
            "[" + ", ".join(f'"{origin}"' for origin in job.cors_allow_origin) + "]",
        ]
    return words


def start(job: ServeJob) -> None:
    """Become vLLM.

    Raises:
        UnsupportedError: it is not installed.
        QuantflowError: as `command_of`.
    """
    words = command_of(job)
    path = shutil.which(words[0])
    if path is None:
        raise UnsupportedError(
            f"--engine vllm: no `{COMMAND}` on PATH", "install vllm, in an environment of its own"
        )
    # not on the command line, where others see it
    key = {} if job.api_key is None else {"VLLM_API_KEY": job.api_key}
    sys.stdout.flush()
    os.execve(path, words, {**os.environ, **key})
