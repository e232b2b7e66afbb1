"""`serve --engine vllm`: vLLM's own server, started by the artifact's manifest and config.json.

Nothing of vLLM is imported. Its command is searched on PATH and replaces this process, so signals
and exit codes are vLLM's.
"""

import dataclasses
import os
import shutil
import sys
from typing import Any

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.files import disk
from quantflow.files.canonical import read_json
from quantflow.files.folder import list_files
from quantflow.files.manifest import read_manifest
from quantflow.server.parsers import AUTO, NONE
from quantflow.server.settings import ServeJob
from quantflow.settings import KEY as SETTING

COMMAND = "vllm"
# Settings that vLLM's command line has too, or that have an effect before it starts.
_PASSED_ON = {
    *("revision", "name", "adapters", "chat_template", "host", "port", "api_key"),
    "generation_config",
    *("cors_allow_origin", "engine", "tensor_parallel", "device"),
    *("tool_parser", "reasoning_parser"),
}
# vLLM's names of our parsers, where they differ
_TOOL_PARSERS = {
    "harmony": "openai",
    "deepseek": "deepseek_v3",
    "qwen_coder": "qwen3_coder",
    "dsml": "deepseek_v32",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "gemma": "gemma4",
    "glm": "glm45",
    "llama": "llama3_json",
}
_REASONING_PARSERS = {"think": "qwen3", "harmony": "openai_gptoss", "gemma": "gemma4"}
_LIMITS_PASSED_ON = {"max_total_tokens", "max_batch_size", "max_batch_prefill_tokens"}


def command_of(job: ServeJob) -> list[str]:
    """Command line of vLLM for an artifact.

    Raises:
        InputError: the folder is no artifact.
        UsageError: vLLM has no counterpart for an option.
        UnsupportedError: vLLM does not read the artifact's format.
    """
    for record, passed in ((job, _PASSED_ON), (job.limits, _LIMITS_PASSED_ON)):
        for field in dataclasses.fields(record):
            declared = field.metadata.get(SETTING)
            if (
                declared is not None
                and field.name not in passed
                and getattr(record, field.name) != field.default
            ):
                raise UsageError(
                    f"{declared.flag} with --engine vllm", "leave it out: vLLM has no such option"
                )
    # variables are vLLM's too, where it runs on a Gaudi; options of this command line are not
    for inner in (job.buckets, job.gaudi):
        for field in dataclasses.fields(inner):
            if (flag := job.origins.get(field.name, "")).startswith("--"):
                raise UsageError(
                    f"{flag} with --engine vllm", "leave it out: vLLM has no such option"
                )
    _require_signed(job)
    read_manifest(job.artifact)  # an artifact, and no other folder
    config = read_json(job.artifact / "config.json")
    assert isinstance(config, dict)
    scheme: dict[str, Any] = config.get("quantization_config", {})
    weights = [group.get("weights") or {} for group in scheme.get("config_groups", {}).values()]
    if scheme.get("format") == "pack-quantized" and not all(
        one.get("symmetric", True) for one in weights
    ):
        raise UnsupportedError(
            f"{job.artifact}: packed weights with zero points, which compressed-tensors does not "
            "reload",
            "quantize with a symmetric scheme, such as W4A16",
        )
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
    if job.generation_config != "auto":
        words += ["--generation-config", "vllm"]
    if job.chat_template is not None:
        words += ["--chat-template", str(job.chat_template)]
    if job.tool_parser not in (AUTO, NONE):
        name = _TOOL_PARSERS.get(job.tool_parser, job.tool_parser)
        words += ["--enable-auto-tool-choice", "--tool-call-parser", name]
    if job.reasoning_parser not in (AUTO, NONE):
        name = _REASONING_PARSERS.get(job.reasoning_parser, job.reasoning_parser)
        words += ["--reasoning-parser", name]
    if job.cors_allow_origin:
        words += [
            "--allowed-origins",
            "[" + ", ".join(f'"{origin}"' for origin in job.cors_allow_origin) + "]",
        ]
    return words


def _require_signed(job: ServeJob) -> None:
    """Check a required signature, where nobody can change what vLLM opens by name afterwards.

    Raises:
        InputError: another user may write to the artifact, or exchange it.
        QuantflowError: see `RequiredSignature.check`.
    """
    if not job.signature:
        return
    job.signature.check(job.artifact)
    places = (
        job.artifact,
        *(job.artifact / name for name in list_files(job.artifact, follow_links=True).files),
    )
    open_to = next(filter(disk.writable_by_others, places), disk.replaceable(job.artifact))
    if open_to is not None:
        raise InputError(
            f"{open_to}: others may write to it, and vLLM opens the artifact again after its "
            "signature was checked",
            "copy the artifact to a folder of your own, or leave --engine vllm out",
        )


def start(job: ServeJob) -> None:
    """Become vLLM.

    Raises:
        UnsupportedError: vLLM is not installed.
        QuantflowError: see `command_of`.
    """
    command = command_of(job)
    path = shutil.which(command[0])
    if path is None:
        raise UnsupportedError(
            f"--engine vllm: no `{COMMAND}` on PATH", "install vllm, in an environment of its own"
        )
    # the key is not on the command line, where others see it
    key = {} if job.api_key is None else {"VLLM_API_KEY": job.api_key}
    sys.stdout.flush()
    os.execve(path, command, {**os.environ, **key})
