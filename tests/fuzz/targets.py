"""Readers of foreign files, each with an input that it reads and a function that reads another one.

A function may raise `QuantflowError` with a promised exit code, and nothing else.
"""

import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from socket import socket
from typing import Any, cast
from unittest import mock

import asgi
import mutations
import numpy as np
import torch
from safetensors.torch import save_file

from quantflow.errors import QuantflowError
from quantflow.files import torch_file
from quantflow.files.canonical import digest_of, parse_json, readable_json
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.inspect import summarize
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import read_manifest
from quantflow.files.safetensors_header import TensorInfo, read_header
from quantflow.formats import compressed_tensors, layout_of
from quantflow.formats.gaudi import restricted_npz
from quantflow.formats.gaudi.quant_config import quant_config
from quantflow.formats.gaudi.triple import _parse
from quantflow.formats.llama_cpp import gguf
from quantflow.measuring.record import META_NAME, read_meta
from quantflow.measuring.text import read_documents
from quantflow.models.token_ids import tokens_of
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import apply_settings, read_yaml, recipe_from
from quantflow.runtime import remote_partner
from quantflow.runtime.adapters import read_adapter
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.packed import Pack
from quantflow.runtime.prompt_files import read_prompts
from quantflow.server import process
from quantflow.server.app import application
from quantflow.server.models import Models, open_model
from quantflow.server.settings import ServeJob
from quantflow.validating.gate import check_gate
from quantflow.validating.job import GateJob
from quantflow.validating.junit import write_junit
from quantflow.validating.recorded import run as run_gate


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader.

    Attributes:
        seeds: inputs that it reads; empty for one that takes values.
        value: a JSON value that it reads, None for one that takes bytes.
        read: reads bytes, in a folder of its own.
        make: returns an input, in place of a changed seed or value.
    """

    seeds: tuple[bytes, ...]
    read: Callable[[bytes, Path], Any]
    value: Any = None
    make: Callable[[random.Random], bytes] | None = None

    def input(self, chance: random.Random) -> bytes:
        """Return another input."""
        if self.make is not None:
            return self.make(chance)
        if self.value is not None and chance.random() < 0.8:
            return mutations.as_json(
                mutations.changed_value(chance, self.value, changes=chance.choice((1, 1, 2, 5)))
            )
        return mutations.changed_bytes(chance, chance.choice(self.seeds), self.seeds)


ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    b'data: {"choices": [{"index": 0, "delta": {"content": "a", "reasoning_content": "b"}}]}\n\n'
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)
REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'3f\r\n{"error": {"message": "no", "code": "context_length_exceeded"}}\r\n0\r\n\r\n'
)
NAMES = b'HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n{"data": [{"id": "name"}]}'


def talked(data: bytes, _: Path) -> Any:
    """Read a response of a server as `chat --url` does, once as a list of models."""

    class Connection(HTTPConnection):
        def connect(self) -> None:
            self.sock = cast("socket", FakeSocket(data))

    with mock.patch.object(remote_partner, "HTTPConnection", Connection):
        job = ChatJob(url="http://127.0.0.1:1", model="m")
        question = [{"role": "user", "content": "hi"}]
        with suppress(QuantflowError):
            list(remote_partner.RemotePartner(job).answer(question))
        return remote_partner.RemotePartner(ChatJob(url="http://127.0.0.1:1")).name


class FakeSocket:
    """A socket that receives some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any, **__: Any) -> BytesIO:
        return BytesIO(self._data)

    def sendall(self, _: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def written(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """Return a reader of bytes that are put into a file first."""

    def work(data: bytes, folder: Path) -> Any:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return work


def sealed(data: bytes, folder: Path) -> Any:
    """Read a manifest whose digest is right whatever it says.

    Whoever makes an artifact could write it.
    """
    body = parse_json(data, "quantflow.json")
    if isinstance(body, dict):
        body.pop("digest", None)
        data = readable_json({**body, "digest": digest_of(body)})
    (folder / "quantflow.json").write_bytes(data)
    return Ledger.from_json(read_manifest(folder)["ledger"]), summarize(folder)


def measurement(data: bytes, folder: Path) -> Any:
    """Read the record of a measurement whose digest is right whatever it says."""
    body = parse_json(data, META_NAME)
    if isinstance(body, dict):
        body.pop("digest", None)
        data = readable_json({**body, "digest": digest_of(body)})
    (folder / META_NAME).write_bytes(data)
    return read_meta(folder), summarize(folder)


def archive(pickled: bytes) -> bytes:
    """Return an npz around a pickle."""
    text = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n"
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(
            restricted_npz.MEMBER,
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + pickled,
        )
    return buffer.getvalue()


def saved() -> tuple[bytes, bytes]:
    """Return a file of torch.save as we write it, and one that torch wrote of a module."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.pt"
        specs = {
            "a.packed_weight": ("I32", (4, 2)),
            "a.scale": ("F16", (4, 1)),
            "b": ("BF16", (3,)),
        }
        torch_file.write_torch_file(path, specs, [bytes(32), bytes(8), bytes(6)])
        ours = path.read_bytes()
        torch.save(torch.nn.Linear(3, 2).state_dict(), path)
        return ours, path.read_bytes()


def packed() -> bytes:
    """Return a pack of two linears."""
    with tempfile.TemporaryDirectory() as name:
        pack = Pack(Path(name) / "packed" / "a.safetensors", verify=True)
        pack.get(
            "q",
            lambda: {
                "words": torch.arange(64, dtype=torch.int32).view(8, 8),
                "scale": torch.ones(8),
            },
        )
        pack.get(
            "k",
            lambda: {
                "words": torch.zeros(4096, 4, dtype=torch.int64),
                "shape": torch.tensor([3, 5]),
            },
        )
        pack.save()
        return pack.path.read_bytes()


def request(chance: random.Random) -> bytes:
    """Return a request: a line with method, path and query, and a body."""
    path, body = chance.choice(BODIES)
    kind = chance.random()
    if kind < 0.1:
        return (
            chance.choice((b"GET ", b"POST ", b"PUT ", b"OPTIONS "))
            + chance.choice(PATHS)
            + b"\n"
            + mutations.as_json(body)
        )
    data = mutations.as_json(
        mutations.changed_value(chance, body, changes=chance.choice((1, 1, 2, 3)))
    )
    return f"POST {path}\n".encode() + (
        data if kind < 0.8 else mutations.changed_bytes(chance, data)
    )


def answered(artifact: Path) -> Callable[[bytes, Path], Any]:
    """A target that asks a server's application.

    Each process makes the application for itself: its engine is a thread.
    """

    @cache
    def app() -> Any:
        template = Path(tempfile.mkdtemp()) / "chat.jinja"
        template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}{{ tools }}")
        job = ServeJob(artifact=artifact, port=0, chat_template=template)
        return application(process.site_of(job, Models(job, open_model(artifact, job))))

    def ask(data: bytes, folder: Path) -> Any:
        line, _, body = data.partition(b"\n")
        method, _, path = line.decode().partition(" ")
        status, answer = asgi.asked(app(), method, path, body)
        if status == 500 or not 200 <= status < 600:
            raise AssertionError(f"status {status}: {answer[:100]!r}")
        if status >= 400 and b"Traceback" in answer:
            raise AssertionError("a traceback")
        return status

    return ask


def of_other_programs(chance: random.Random) -> bytes:
    """Return the quantization_config of a folder that another program quantized."""
    config = chance.choice(OTHER_PROGRAMS)
    return mutations.as_json(
        mutations.changed_value(chance, config, changes=chance.choice((1, 1, 2, 3)))
    )


WORDS = {"bits": 4, "group_size": 32, "sym": True}
LINEARS = ("model.layers.0.mlp.up_proj", "lm_head")
PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_g_idx",
)
OTHER_PROGRAMS: list[dict[str, Any]] = [
    {
        "quant_method": "gptq",
        **WORDS,
        "dynamic": {"+:.*up_proj": {"bits": 8, "group_size": 64}, "-:.*x": {}},
        "desc_act": True,
    },
    {
        "quant_method": "gptq",
        **WORDS,
        "checkpoint_format": "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:5"]},
        "lm_head": True,
    },
    {
        "quant_method": "auto-round",
        **WORDS,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {LINEARS[0]: {"bits": 8}},
    },
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["x"],
    },
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "config_groups": {
            "group_0": {
                "input_activations": {"num_bits": 4, "type": "float"},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head"],
    },
    {
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        "format": "naive-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*up_proj"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 32,
                    "actorder": "group",
                },
            }
        },
        "ignore": ["lm_head"],
    },
]
PARAMETERS = {
    "max_new_tokens": 3,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "typical_p": 0.9,
    "seed": 1,
    "stop": ["x"],
}
PARAMETERS |= {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "truncate": 8,
    "details": True,
    "top_n_tokens": 2,
}
OPENAI = {
    "model": "tgi",
    "max_tokens": 3,
    "temperature": 0.7,
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
}
CHAT = {
    **OPENAI,
    "messages": [{"role": "user", "content": "w10 w27"}],
    "logprobs": True,
    "top_logprobs": 2,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "null"}}},
    },
}
BODIES: list[tuple[str, Any]] = [
    (
        "/generate",
        {"inputs": "w10 w27", "parameters": {**PARAMETERS, "decoder_input_details": True}},
    ),
    (
        "/generate",
        {
            "inputs": "w10",
            "parameters": {"max_new_tokens": 2, "grammar": {"type": "regex", "value": "(w1 )+"}},
        },
    ),
    ("/generate_stream", {"inputs": "w10", "parameters": PARAMETERS}),
    ("/", {"inputs": "w10", "parameters": PARAMETERS, "stream": True}),
    ("/tokenize", {"inputs": "w10 w27"}),
    ("/vertex", {"instances": [{"inputs": "w10", "parameters": PARAMETERS}]}),
    ("/invocations", {"inputs": "w10", "parameters": PARAMETERS}),
    ("/v1/completions", {**OPENAI, "prompt": ["w10", "w27"], "echo": True, "logprobs": 2}),
    (
        "/v1/completions",
        {
            **OPENAI,
            "prompt": [[1, 2, 3], [4]],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"a": 1}},
    ),
    ("/chat_tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}),
]
PATHS = (
    b"/",
    b"/info",
    b"/health",
    b"/ping",
    b"/metrics",
    b"/v1/models",
    b"/card",
    b"/openapi.json",
    b"/generate",
    b"/nothing",
)


def targets(artifact: Path, measured: Path) -> dict[str, Target]:
    """Return every target, its seeds taken from an artifact and a measurement."""
    config, manifest, meta = (
        (artifact / "config.json").read_bytes(),
        (artifact / "quantflow.json").read_bytes(),
        (measured / META_NAME).read_bytes(),
    )
    weights = (artifact / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", weights[:8])[0]
    header = weights[:length] + weights[length : length + 64]
    small = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}'
    tiny = struct.pack("<Q", len(small)) + small + bytes(8)
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    recipe = {
        "model": "m",
        "seed": 0,
        "calibration": {"source": "t.jsonl", "samples": 3, "sequence_length": 32, "pack": None},
        "measure": {"ranks": 1, "stats": ["amax"]},
        "quantize": [
            {
                "name": "a",
                "scheme": "W4A16",
                "group_size": 32,
                "overrides": [{"match": "re:.*", "scheme": "FP8"}],
            }
        ],
        "export": {"shard_size": "4GiB"},
        "validate": {"text": "h.jsonl", "tokens": 64, "gate": "auto"},
        "resources": {"max_memory": "4GiB"},
    }
    gaudi = {
        "mode": "MEASURE",
        "observer": "maxabs",
        "allowlist": {"types": [], "names": ["a.*"]},
        "blocklist": {"types": [], "names": ["lm_head"]},
        "scale_method": "maxabs_hw",
        "fp8_config": "E4M3",
        "dump_stats_path": "./x",
        "use_qdq": "True",
    }
    nodes = {
        "Mode": "DynamicRange",
        "LocalRank": None,
        "Nodes": {"a": {"inputs": [[[1.0]]], "params": {"weight": [[2.0]]}}},
    }
    pickled = restricted_npz.dumps(
        {"Nodes": {"a": {"inputs": [np.ones((1, 1), np.float32)]}}, "Mode": "DynamicRange"}
    )
    specs = {"t": ("F32", (2, 3)), "u": ("BF16", (4,))}
    fields = {
        "general.name": ("string", "x"),
        "n": ("u32", 7),
        "tokens": ("[string]", ["a", "b"]),
        "f": ("[f32]", [0.5]),
    }
    planned = gguf.layout(fields, specs)
    gguf_file = planned.header + bytes(planned.nbytes - len(planned.header))
    quantization = json.loads(config)["quantization_config"]

    tensors = tuple(
        zipped.read(next(name for name in zipped.namelist() if name.endswith("data.pkl")))
        for zipped in map(zipfile.ZipFile, map(BytesIO, saved()))
    )

    def checkpoint(data: bytes, folder: Path) -> Any:
        (folder / "config.json").write_bytes(data)
        (folder / "model.safetensors").write_bytes(tiny)
        return open_checkpoint(folder)

    def indexed(data: bytes, folder: Path) -> Any:
        (folder / "config.json").write_bytes(b"{}")
        (folder / "model-00001-of-00001.safetensors").write_bytes(tiny)
        (folder / "model.safetensors.index.json").write_bytes(data)
        return open_checkpoint(folder)

    def as_table(data: bytes) -> Any:
        value = parse_json(data, "x.json")
        return value if isinstance(value, dict) else {}

    def tokenized(data: bytes, folder: Path) -> Any:
        (folder / "tokenizer.json").write_bytes(data)
        (folder / "tokenizer_config.json").write_bytes(words)
        tokenizer = load_tokenizer(folder)
        return tokenizer.decode(tokens_of(tokenizer, "w10 w27 \u00e9\n", where="text"))

    def configured(data: bytes, folder: Path) -> Any:
        (folder / "tokenizer.json").write_bytes(vocabulary)
        (folder / "tokenizer_config.json").write_bytes(data)
        tokenizer = load_tokenizer(folder)
        return tokenizer.decode(tokens_of(tokenizer, "w10 w27 \u00e9\n", where="text"))

    def mapped(data: bytes, folder: Path) -> Any:
        place = folder / "packed" / "a.safetensors"
        place.parent.mkdir(mode=0o755, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o644)
        try:
            # whoever may write it can make its hash right
            kept = Pack(place, verify=bool(len(data) % 2))
        finally:
            place.unlink()  # so that the next input does not shorten what is mapped
        return [tensor.sum() for key in kept._kept for tensor in kept.get(key, dict).values()]

    infos = {
        f"{name}.{part}": TensorInfo(
            name=f"{name}.{part}", dtype="F8_E4M3", shape=(64, 64), offset=0, nbytes=4096
        )
        for name in LINEARS
        for part in PARTS
    }

    def foreign(data: bytes, _folder: Path) -> Any:
        config = as_table(data)
        return layout_of(config, infos).schemes(config, dict.fromkeys(LINEARS, (64, 64)), infos)

    adapter = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 16,
        "alpha_pattern": {"q_proj": 8, "layers.(0|1).x": 4.5},
    }
    adapter |= {
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "target_modules": ["q_proj"],
        "modules_to_save": None,
    }
    factors = {
        f"base_model.model.model.q_proj.lora_{side}.weight": torch.ones(1, 1) for side in "AB"
    }

    def adapted(data: bytes, folder: Path) -> Any:
        (folder / "adapter_config.json").write_bytes(data)
        save_file(factors, folder / "adapter_model.safetensors")
        return read_adapter(folder)

    gate = {
        "thresholds": {"ppl_ratio": 1.1, "mean_kld": 0.1, "kld_p999": 1.0, "top1_agreement": 0.9},
        "lower_top1_by_noise": True,
    }
    gate |= {"max_regression": {"mean_kld": 0.1}, "min_recovery": {"all": 95.0, "arc": 90}}
    bounds = {
        name: {"value": value, "lower": value, "upper": value}
        for name, value in gate["thresholds"].items()
    }
    change = {
        "previous": 0.1,
        "current": 0.1,
        "worse": 0.0,
        "lower": 0.0,
        "upper": 0.0,
        "max_regression": 0.1,
        "outcome": "pass",
    }
    answers = {"baseline": "1101", "artifact": "1001"}
    validation = {
        "artifact": "a",
        "digest": "d",
        "baseline": "m",
        "scheme": "W4A16",
        "algorithm": "gptq",
        "parameters": 1000,
        "outcome": "pass",
        "reasons": [],
        "expect": "pass",
        "allow_inconclusive": False,
        "metrics": bounds,
        "noise_floor": {"top1_agreement": {"value": 0.99}},
        "gate": {
            "name": "g",
            "thresholds": gate["thresholds"],
            "note": "",
            "max_regression": {},
            "min_recovery": {"arc": 90.0},
        },
        "protocol": {
            "text": "t",
            "windows": 2,
            "tokens": 8,
            "sequence_length": 4,
            "dtype": "float32",
            "seed": 0,
        },
        "windows": {
            "tokens": [4, 4],
            "kld": [0.1, 0.2],
            "agreements": [3, 4],
            "nll_difference": [0.0, 0.1],
            "kld_tail": [[0.1], [0.2]],
        },
        "tasks": {
            "protocol": {},
            "scores": {
                "arc": {
                    "metric": "acc",
                    "version": 1,
                    "samples": 4,
                    "recovery": 99.0,
                    "answers": answers,
                }
            },
        },
        "regression": {
            "previous": {"artifact": "b", "digest": "e"},
            "outcome": "pass",
            "reasons": [],
            "metrics": {"mean_kld": change},
        },
    }

    def judged(data: bytes, folder: Path) -> Any:
        given, other = folder / "validation.json", folder / "other.json"
        given.write_bytes(data)
        other.write_text(json.dumps(validation))
        result = run_gate(GateJob(validation=given))
        write_junit(folder / "junit.xml", result)
        return run_gate(GateJob(validation=other, previous=given)), run_gate(
            GateJob(validation=given, gate="int4")
        )

    tokenizer = cache(lambda: load_tokenizer(artifact))
    rows = [
        {"text": "w10 w27"},
        {"input_ids": [3, 4, 5]},
        {"messages": [{"role": "user", "content": "w1"}]},
        {"prompt": "w3"},
    ]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    words, vocabulary = (
        (artifact / "tokenizer_config.json").read_bytes(),
        (artifact / "tokenizer.json").read_bytes(),
    )
    return {
        "json": Target(
            seeds=(config, manifest, b"[1,2.5e3,null,true]"),
            read=lambda data, _: parse_json(data, "x"),
        ),
        "safetensors header": Target(
            seeds=(tiny, header), read=written("a.safetensors", read_header)
        ),
        "manifest": Target(seeds=(manifest,), value=json.loads(manifest), read=sealed),
        "index": Target(seeds=(json.dumps(index).encode(),), value=index, read=indexed),
        "config": Target(seeds=(config,), value=json.loads(config), read=checkpoint),
        "quantization_config": Target(
            seeds=(json.dumps(quantization).encode(),),
            value=quantization,
            read=lambda data, _: compressed_tensors.schemes_from_config(as_table(data), LINEARS),
        ),
        "quantization_config of others": Target(seeds=(), make=of_other_programs, read=foreign),
        "recipe": Target(
            seeds=(
                json.dumps(recipe, indent=1).encode(),
                b"model: m\nquantize:\n  - {name: a, scheme: W4A16}\n",
            ),
            value=recipe,
            read=written("recipe.yaml", lambda path: recipe_from(read_yaml(path))),
        ),
        "--set": Target(
            seeds=(b"quantize.0.group_size=64", b"calibration={samples: 3}"),
            read=lambda data, _: recipe_from(
                apply_settings(json.loads(json.dumps(recipe)), [data.decode(errors="replace")])
            ),
        ),
        "QUANT_CONFIG": Target(
            seeds=(json.dumps(gaudi).encode(),),
            value=gaudi,
            read=lambda data, _: quant_config(as_table(data)),
        ),
        "Gaudi's json": Target(
            seeds=(json.dumps(nodes).encode(),),
            value=nodes,
            read=lambda data, _: _parse(parse_json(data, "x"), Path("x")),
        ),
        "npz": Target(seeds=(archive(pickled),), read=written("a.npz", restricted_npz.read_npz)),
        "pickle": Target(
            seeds=(pickled,), read=lambda data, _: restricted_npz.loads(data, name="x")
        ),
        "torch.save": Target(seeds=saved(), read=written("a.pt", torch_file.read_torch_header)),
        "pickle of tensors": Target(
            seeds=tensors, read=lambda data, _: torch_file._loads(data, path=Path("x"))
        ),
        "gguf": Target(seeds=(gguf_file,), read=written("a.gguf", gguf.read_header)),
        "measurement": Target(seeds=(meta,), value=json.loads(meta), read=measurement),
        "tokenizer.json": Target(seeds=(vocabulary,), value=json.loads(vocabulary), read=tokenized),
        "tokenizer_config.json": Target(seeds=(words,), value=json.loads(words), read=configured),
        "adapter_config.json": Target(
            seeds=(json.dumps(adapter).encode(),), value=adapter, read=adapted
        ),
        "gate": Target(
            seeds=(json.dumps(gate, indent=1).encode(),),
            value=gate,
            read=written("gate.yaml", lambda path: check_gate(str(path))),
        ),
        "validation.json": Target(
            seeds=(json.dumps(validation).encode(),), value=validation, read=judged
        ),
        "documents": Target(
            seeds=(lines, *lines.split(b"\n")[:-1]),
            read=written("t.jsonl", lambda path: read_documents(path, tokenizer())),
        ),
        "prompts of .jsonl": Target(
            seeds=(lines, b'"w10"\n'), read=written("p.jsonl", lambda path: read_prompts(str(path)))
        ),
        "prompts of .csv": Target(
            seeds=(b'text,n\n"w10, w3",1\nw4,2\n', b"a\n"),
            read=written("p.csv", lambda path: read_prompts(str(path))),
        ),
        "pack": Target(seeds=(packed(),), read=mapped),
        "answers of a server": Target(seeds=(ANSWER, REFUSAL, NAMES), read=talked),
        "HTTP": Target(seeds=(), make=request, read=answered(artifact)),
    }
