"""llm-compressor for accuracy.py; see _shared.py for the arguments.

SETTINGS: algorithm (rtn, gptq, awq), smoothing (of SmoothQuant, alpha), and either scheme (a
preset) or bits, group_size (-1 is a scale per output) and symmetric. Its own defaults otherwise;
lm_head left alone.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _shared import Report, Saved, main, microscaled_weight
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_global_scale")
GRANULARITY = {"token": "per_token", "tensor": "per_tensor"}
GROUPS = {"group": "e8m0", "tensor_group": "e4m3"}  # strategies of inputs with scales in such codes
NEOX = (
    ("re:.*input_layernorm", ["re:.*query_key_value"]),
    ("re:.*post_attention_layernorm", ["re:.*dense_h_to_4h"]),
)


def quantize(model: str, rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize with the given token ids, save compressed."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    begin = time.monotonic()
    oneshot(
        model=loaded,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=recipe(settings, family=loaded.config.model_type),
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
        shuffle_calibration_samples=False,
    )
    seconds = time.monotonic() - begin
    loaded.save_pretrained(output, save_compressed=True)
    return Report(version=version("llmcompressor"), seconds=seconds)


def recipe(settings: dict[str, Any], *, family: str) -> list[Modifier]:
    """The modifiers in the order in which they run.

    It knows no norms of GPT-NeoX, so those are named.
    """
    told: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head", "embed_out"]}
    if "scheme" in settings:
        told["scheme"] = settings["scheme"]
    else:
        size = settings["group_size"]
        grouping = (
            {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
        )
        weights = QuantizationArgs(
            num_bits=settings["bits"], type="int", symmetric=settings["symmetric"], **grouping
        )
        told["config_groups"] = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
        del told["targets"]
    found: list[Modifier] = []
    if settings.get("smoothing") is not None:
        named = (
            {"mappings": [[linears, norm] for norm, linears in NEOX]}
            if family == "gpt_neox"
            else {}
        )
        found.append(SmoothQuantModifier(smoothing_strength=settings["smoothing"], **named))
    if settings["algorithm"] == "awq":
        if not torch.accelerator.is_available():  # pinned memory is for transfers to one
            IntermediatesCache.pin_memory = lambda *_: None
        mappings = (
            [AWQMapping(norm, linears) for norm, linears in NEOX] if family == "gpt_neox" else None
        )
        found.append(AWQModifier(mappings=mappings))
    modifier = GPTQModifier if settings["algorithm"] == "gptq" else QuantizationModifier
    return [*found, modifier(**told)]


def dequantize(model: Path, folder: Path, _settings: dict[str, Any]) -> Saved:
    """Read the saved file."""
    tensors, source = (
        load_file(folder / "model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    config = json.loads((folder / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]["group_0"]
    names = [
        name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")
    ]
    weights, stored = {}, 0
    for name in names:
        parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
        weights[name] = weight_of(
            parts, source[f"{name}.weight"].shape, config["weights"]["num_bits"]
        ).numpy()
        stored += sum(part.nbytes for part in parts.values())
    quantized = {f"{name}.weight" for name in names}
    both = [name for name in source if name in tensors and name not in quantized]
    changed = {
        name: tensors[name].float().numpy()
        for name in both
        if not torch.equal(tensors[name], source[name])
    }
    inputs, scales = config["input_activations"], {}
    if inputs is not None:
        kind = "float" if inputs["type"] == "float" else "int"
        granularity, dynamic = (
            GRANULARITY.get(inputs["strategy"], "per_group"),
            bool(inputs["dynamic"]),
        )
        part = "input_scale" if granularity != "per_group" else "input_global_scale"
        scales = {
            name: tensors[f"{name}.{part}"].float().item()
            for name in names
            if f"{name}.{part}" in tensors
        }
        words = {
            "kind": kind,
            "num_bits": inputs["num_bits"],
            "granularity": granularity,
            "dynamic": dynamic,
        }
        if granularity == "per_group":
            flavour = "e2m1" if inputs["num_bits"] == 4 else "e4m3fn"
            words |= {
                "group_size": inputs["group_size"],
                "float8": flavour,
                "scale_format": GROUPS[inputs["strategy"]],
            }
        inputs = words
    return Saved(weights=weights, stored=stored, changed=changed, input=inputs, scales=scales)


def weight_of(parts: dict[str, Tensor], shape: torch.Size, bits: int) -> Tensor:
    """Return scale * (qvalue - zero_point) in float32, [O, I]."""
    if parts["weight_scale"].dtype in (torch.uint8, torch.float8_e4m3fn):
        whole = {
            name: part if part.dtype == torch.uint8 else part.float()
            for name, part in parts.items()
        }
        return torch.from_numpy(
            microscaled_weight({name: part.numpy() for name, part in whole.items()})
        )
    scale, zero_point = parts["weight_scale"].float(), parts.get("weight_zero_point")
    value = (
        unpack_from_int32(parts["weight_packed"], bits, shape)
        if "weight_packed" in parts
        else parts["weight"]
    )
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    step = shape[1] // scale.shape[1]
    real = value.float()
    if zero_point is not None:
        if zero_point.dtype == torch.int32:
            zero_point = unpack_from_int32(
                zero_point, bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0
            )
        real = real - zero_point.float().repeat_interleave(step, dim=1)
    return real * scale.repeat_interleave(step, dim=1)


if __name__ == "__main__":
    main(quantize, dequantize)
