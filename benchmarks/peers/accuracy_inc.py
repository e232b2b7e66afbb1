"""neural-compressor's round to nearest for accuracy.py; see _shared.py for the arguments.

SETTINGS: bits, group_size, symmetric. Its own defaults otherwise; lm_head left alone.
"""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _shared import Report, Saved, main, stored_bytes
from neural_compressor.torch.quantization import RTNConfig, convert, load, prepare
from torch import Tensor
from transformers import AutoModelForCausalLM


def quantize(model: str, _rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize, save."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    begin = time.monotonic()
    told = {
        "bits": settings["bits"],
        "group_size": settings["group_size"],
        "use_sym": settings["symmetric"],
    }
    made = convert(prepare(loaded, RTNConfig(**told)))
    seconds = time.monotonic() - begin
    made.save(str(output))
    return Report(version=version("neural-compressor-pt"), seconds=seconds)


def dequantize(model: Path, folder: Path, _settings: dict[str, Any]) -> Saved:
    """Load what was saved and let each linear unpack itself."""
    made = load(
        str(folder), original_model=AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    )
    linears = {name: module for name, module in made.named_modules() if hasattr(module, "unpack")}
    weights = {name: weight_of(module).numpy() for name, module in linears.items()}
    tensors = {
        f"{name}.{key}": value
        for name, module in linears.items()
        for key, value in module.state_dict().items()
    }
    return Saved(weights=weights, stored=sum(stored_bytes(tensors, name) for name in linears))


def weight_of(module: Any) -> Tensor:
    """Weight of scale * (qvalue - zero_point) in float32, [O, I].

    Its own `recover` rounds to float16.
    """
    found = module.unpack()
    value, size = found["int_weight"].float(), module.in_features // found["scales"].shape[1]
    if found["zp"] is not None:
        value = value - found["zp"].float().repeat_interleave(size, dim=1)
    return value * found["scales"].float().repeat_interleave(size, dim=1)


if __name__ == "__main__":
    main(quantize, dequantize)
