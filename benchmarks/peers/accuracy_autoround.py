"""AutoRound for accuracy.py; see _shared.py for the arguments. SETTINGS: bits, group_size, symmetric, iterations.

Its own defaults otherwise, but for the length and the number of the calibration sequences.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _shared import Report, Saved, arrays, awq_weight, gptq_weight, main, stored_bytes
from auto_round import AutoRound
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

# packing_format of the saved config -> the zero points are stored one too small; AWQ's layout is its own
LAYOUTS = {"auto_round:auto_gptq": True, "auto_round:gptqmodel": False, "auto_round": False}


def quantize(model: str, rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize with the given token ids, save."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype="auto"), AutoTokenizer.from_pretrained(model)
    begin = time.monotonic()
    rounder = AutoRound(
        loaded,
        tokenizer,
        scheme="W4A16",
        bits=settings["bits"],
        group_size=settings["group_size"],
        sym=settings["symmetric"],
        iters=settings["iterations"],
        dataset=[{"input_ids": torch.tensor([row])} for row in rows],
        nsamples=len(rows),
        seqlen=len(rows[0]),
        device_map="cpu",
    )
    rounder.quantize_and_save(str(output), format="auto_round")
    return Report(version=version("auto-round"), seconds=time.monotonic() - begin)


def dequantize(_model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """Read the saved files, from the folder that it makes below the one it is given."""
    (config,) = folder.rglob("config.json")
    kind = json.loads(config.read_text())["quantization_config"]["packing_format"]
    tensors = {name: tensor for path in config.parent.glob("*.safetensors") for name, tensor in load_file(path).items()}
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if kind == "auto_round:auto_awq":
        weights = {name: awq_weight(arrays(tensors), name) for name in names}
    elif kind in LAYOUTS:
        told = {"bits": settings["bits"], "minus_one": LAYOUTS[kind]}
        weights = {name: gptq_weight(arrays(tensors), name, **told) for name in names}
    else:
        raise SystemExit(f"{folder}: packing_format {kind!r} is not known here")
    return Saved(weights=weights, stored=sum(stored_bytes(tensors, name) for name in names))


if __name__ == "__main__":
    main(quantize, dequantize)
