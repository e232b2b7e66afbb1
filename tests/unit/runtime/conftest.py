"""Artifacts made in the test: a random model, its linears rounded, and a manifest of the files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from quantflow.algorithms import rtn
from quantflow.core.qtensor import QuantizedLinear
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.ledger import FileEntry, Ledger, LedgerEntry
from quantflow.files.manifest import build_manifest, write_manifest
from quantflow.formats import compressed_tensors as layout
from quantflow.models.open import graph_for
from quantflow.models.reading import read_tensors

BODY = {
    "kind": "artifact",
    "source": {"name": "tiny", "revision": None, "files": {}},
    "recipe": {
        "name": "a",
        "scheme": "W8A16",
        "resolved": {"algorithm": "rtn", "transforms": [], "schemes": {}},
    },
    "measurement": None,
    "float8": None,
    "layers": [],
    "proof": {"kind": "canary", "layers": 0, "digest": "0" * 64},
    "tools": {},
    "made_from": "0" * 64,
}


def random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.data += torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += torch.randn_like(buffer) * 0.3
    return model.eval().requires_grad_(False)


def _quantize(name: str, weight: torch.Tensor, scheme) -> QuantizedLinear:
    results = rtn.quantize_group({name: weight}, scheme, statistics={}, scale_dtype=torch.float32)
    static = scheme.input is not None and scheme.input.measured
    return QuantizedLinear(
        weight=results[name].weight,
        scheme=scheme,
        input_scale=torch.tensor([0.02]) if static else None,
        input_zero_point=torch.tensor([7], dtype=torch.int8)
        if static and not scheme.input.symmetric
        else None,
    )


def seal(folder: Path, ledger: Ledger) -> None:
    """Write quantflow.json over the files as they are."""
    write_manifest(folder, build_manifest(folder, body={**BODY, "ledger": ledger.to_json()}))


def _make_artifact(folder: Path, config, schemes, *, model=None) -> AutoModelForCausalLM:
    """Write an artifact of a model, a random one by default.

    `schemes` is one scheme, or a function of a linear's name.

    Returns:
        transformers' model with the dequantized weights, whose linears fake-quantize their inputs;
        experts are as they were.
    """
    model = random_model(config) if model is None else model
    model.save_pretrained(folder)
    graph, modules = graph_for(config), dict(model.named_modules())
    checkpoint = open_checkpoint(folder).in_parts(graph.split)
    source = read_tensors(checkpoint, checkpoint.tensors)
    scheme_of = schemes if callable(schemes) else lambda name: schemes
    chosen = {name: scheme_of(name) for name in graph.linears}
    chosen = {name: scheme for name, scheme in chosen.items() if scheme is not None}
    headers = checkpoint.infos
    tensors, entries = {}, []
    for name, tensor in source.items():
        linear_name = name.removesuffix(".weight")
        made = {name: tensor}
        if linear_name in chosen:
            linear = _quantize(linear_name, tensor, chosen[linear_name])
            made = layout.encode(linear_name, linear)
            module = modules.get(linear_name)
        if linear_name in chosen and module is not None:  # transformers has experts in one tensor
            weight = linear.weight.dequantize()
            module.weight.data = weight.T if isinstance(module, Conv1D) else weight
            module.register_forward_pre_hook(
                lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]),)
            )
        tensors |= made
        entries.append(
            LedgerEntry(
                name=name,
                dtype=headers[name].dtype,
                shape=headers[name].shape,
                nbytes=headers[name].nbytes,
                action="quantized" if linear_name in chosen else "copied",
                reason="test",
                becomes=tuple(made),
            )
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    outside = ["lm_head", "embed_out", "model.decoder.project_in", "model.decoder.project_out"]
    ignore = [
        *(name for name in outside if f"{name}.weight" in source),
        *graph.routers,
        *graph.idle,
        *(name for name in graph.linears if name not in chosen),
    ]
    _edit_config(
        folder,
        quantization_config=layout.quantization_config(
            chosen, ignore=ignore, model_type=config.model_type
        ),
    )
    file = FileEntry(name="model.safetensors", nbytes=1, action="rewritten", reason="test")
    seal(folder, Ledger(tensors=tuple(entries), files=(file,)))
    return model


def _edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_tensors(folder: Path, change) -> None:
    """Rewrite the weights without sealing them again; load with verify=False."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def quantize():
    """Return `_quantize`."""
    return _quantize


@pytest.fixture(scope="session")
def make_artifact():
    """Return `_make_artifact`."""
    return _make_artifact


@pytest.fixture(scope="session")
def edit_config():
    """Return `_edit_config`."""
    return _edit_config


@pytest.fixture(scope="session")
def edit_tensors():
    """Return `_edit_tensors`."""
    return _edit_tensors
