"""GPTQModel for accuracy.py; see _shared.py for the arguments.

SETTINGS: bits, group_size, symmetric.

Its own defaults otherwise: no act order, columns in an order that keeps groups in place
(act_group_aware) where there are groups, lm_head left alone.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _shared import Report, Saved, arrays, gptq_weight, main, stored_bytes
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file


def quantize(model: str, rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize with the given token ids, save."""
    chosen = QuantizeConfig(
        bits=settings["bits"], group_size=settings["group_size"], sym=settings["symmetric"]
    )
    # it refuses its own default without groups
    chosen.act_group_aware = chosen.act_group_aware and chosen.group_size > 0
    loaded = GPTQModel.load(model, chosen, device="cpu")
    begin = time.monotonic()
    loaded.quantize(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1
    )
    seconds = time.monotonic() - begin
    loaded.save(str(output))
    said = {
        key: getattr(chosen, key) for key in ("desc_act", "act_group_aware", "damp_percent", "mse")
    }
    return Report(version=version("gptqmodel"), seconds=seconds, settings=said)


def dequantize(_model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """Read the saved file."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "quantize_config.json").read_text())
    kind = config.get("checkpoint_format") or config.get("format")
    if kind not in ("gptq", "gptq_v2"):
        raise SystemExit(f"{folder}: checkpoint_format {kind!r} is not known here")
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    told = {"bits": settings["bits"], "minus_one": kind == "gptq"}
    weights = {name: gptq_weight(arrays(tensors), name, **told) for name in names}
    return Saved(weights=weights, stored=sum(stored_bytes(tensors, name) for name in names))


if __name__ == "__main__":
    main(quantize, dequantize)
