"""AutoRound for accuracy.py; see _shared.py for the arguments.

SETTINGS: iterations, device (default cpu), extended (its newest algorithm, SignRound's second), and
one of

    bits, group_size, symmetric   integers for weights alone
    scheme, act_bits              a preset of 4-bit floats
    average_bits                  schemes that its search chooses from OPTIONS

Its own defaults otherwise, but for the length and the number of the calibration sequences. Its
search takes text and no token ids, so it is given the text of the sequences.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _shared import (
    Report,
    Saved,
    arrays,
    awq_weight,
    gptq_weight,
    main,
    microscaled_weight,
    stored_bytes,
)
from auto_round import AutoRound, AutoScheme
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
_FLOAT4 = {
    "kind": "float",
    "num_bits": 4,
    "granularity": "per_group",
    "float8": "e2m1",
    "dynamic": True,
}
INPUTS = {
    "NVFP4": {**_FLOAT4, "group_size": 16, "scale_format": "e4m3"},
    "MXFP4": {**_FLOAT4, "group_size": 32, "scale_format": "e8m0"},
}
# what the search chooses from: the integers that quantflow's does
OPTIONS = [
    *(f"W{bits}A16{group}" for bits in (2, 3, 4, 5, 6) for group in ("", "G64", "G32")),
    "W8A16",
]
# packing_format of the saved config -> the zero points are stored one too small; AWQ's layout is
# its own
LAYOUTS = {"auto_round:auto_gptq": True, "auto_round:gptqmodel": False, "auto_round": False}


def quantize(model: str, rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize with the given token ids, save."""
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
    )
    begin = time.monotonic()
    told = {
        "scheme": settings.get("scheme", "W4A16"),
        "enable_alg_ext": settings.get("extended", False),
    }
    if "scheme" in settings:
        told["act_bits"] = settings["act_bits"]
    elif "average_bits" in settings:
        told["layer_config"] = _searched(model, rows, output.with_suffix(".jsonl"), settings)
    else:
        told |= {
            "bits": settings["bits"],
            "group_size": settings["group_size"],
            "sym": settings["symmetric"],
        }
    rounder = AutoRound(
        loaded,
        tokenizer,
        **told,
        iters=settings["iterations"],
        dataset=[{"input_ids": torch.tensor([row])} for row in rows],
        nsamples=len(rows),
        seqlen=len(rows[0]),
        device_map=settings.get("device", "cpu"),
    )
    rounder.quantize_and_save(
        str(output), format="llm_compressor" if "scheme" in settings else "auto_round"
    )
    return Report(version=version("auto-round"), seconds=time.monotonic() - begin)


def _searched(
    model: str, rows: list[list[int]], text: Path, settings: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Bits and group size of each linear, as AutoRound's search of schemes chooses them.

    Args:
        model: folder of the model; the search leaves the one that it is given without weights.
        rows: calibration sequences.
        text: file to write their text into.
        settings: `average_bits`, and `device`.
    """
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
    )
    lines = [json.dumps({"text": tokenizer.decode(row, skip_special_tokens=True)}) for row in rows]
    text.write_text("\n".join(lines) + "\n")
    search = AutoScheme(avg_bits=settings["average_bits"], options=OPTIONS)
    rounder = AutoRound(
        loaded,
        tokenizer,
        scheme=search,
        dataset=str(text),
        device_map=settings.get("device", "cpu"),
    )
    rounder.post_init()
    keys = ("bits", "group_size", "sym", "data_type", "act_bits")
    return {
        name: {key: chosen[key] for key in keys}
        for name, chosen in rounder.layer_config.items()
        if chosen["bits"] <= 8
    }


def dequantize(_model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """Read the saved files, from the folder that it makes below the one it is given."""
    (config,) = folder.rglob("config.json")
    tensors = {
        name: tensor
        for path in config.parent.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    if "scheme" in settings:
        return _microscaled(tensors, settings)
    saved = json.loads(config.read_text())["quantization_config"]
    kind, others = saved["packing_format"], saved.get("extra_config", {})
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if kind == "auto_round:auto_awq":
        weights = {name: awq_weight(arrays(tensors), name) for name in names}
    elif kind in LAYOUTS:
        bits = {name: others.get(name, saved).get("bits", saved["bits"]) for name in names}
        told = {"minus_one": LAYOUTS[kind]}
        weights = {
            name: gptq_weight(arrays(tensors), name, bits=bits[name], **told) for name in names
        }
    else:
        raise SystemExit(f"{folder}: packing_format {kind!r} is not known here")
    each = {name: stored_bytes(tensors, name) for name in names}
    return Saved(weights=weights, stored=sum(each.values()), each=each)


def _microscaled(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Saved:
    """Return what is in files that compressed-tensors reads."""
    weights, scales, stored = {}, {}, 0
    for name in [
        name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")
    ]:
        parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
        stored += sum(part.nbytes for part in parts.values())
        whole = {
            part: one if one.dtype == torch.uint8 else one.float() for part, one in parts.items()
        }
        weights[name] = microscaled_weight({part: one.numpy() for part, one in whole.items()})
        if f"{name}.input_global_scale" in tensors:
            scales[name] = tensors[f"{name}.input_global_scale"].float().item()
    inputs = INPUTS[settings["scheme"]] if settings["act_bits"] == 4 else None
    return Saved(
        weights=weights, stored=stored, input=inputs, scales=scales if inputs is not None else {}
    )


if __name__ == "__main__":
    main(quantize, dequantize)
