"""HQQ for accuracy.py; see _shared.py for the arguments. SETTINGS: bits, group_size.

Groups along the inputs (axis 1), scales and zero points in float16, its defaults otherwise; no
data. Linears of the decoder layers alone: it takes a linear at a time, and the caller says which.
"""

import time
from pathlib import Path
from typing import Any

import torch
from _shared import Report, Saved, main
from hqq import __version__
from hqq.core.quantize import HQQLinear, Quantizer, hqq_base_quant_config
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

FILE = "model.safetensors"
HEAD = ("lm_head", "embed_out")


def quantize(model: str, _rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Load, quantize, save what each linear's state holds."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    config = hqq_base_quant_config(
        nbits=settings["bits"], group_size=settings["group_size"], axis=1
    )
    begin, found = time.monotonic(), {}
    for name, module in loaded.named_modules():
        if isinstance(module, nn.Linear) and name not in HEAD:
            made = HQQLinear(
                module, config, compute_dtype=torch.float16, device="cpu", del_orig=False
            )
            found |= {
                f"{name}.W_q": made.W_q.data,
                f"{name}.scale": made.meta["scale"],
                f"{name}.zero": made.meta["zero"],
            }
    seconds = time.monotonic() - begin
    output.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, output / FILE)
    said = {
        key: value for key, value in config["weight_quant_params"].items() if key not in settings
    }
    return Report(version=__version__, seconds=seconds, settings=said)


def dequantize(model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """Unpack as its Quantizer does, in float32."""
    tensors, source = load_file(folder / FILE), load_file(model / "model.safetensors")
    names = [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]
    weights = {}
    for name in names:
        shape, kind = source[f"{name}.weight"].shape, Quantizer.bit_to_packing[settings["bits"]]
        value = Quantizer.unpack[kind](tensors[f"{name}.W_q"], dtype=torch.float32)
        # [groups, group_size]; 3 bits are padded to ten in a word
        value = value[: shape.numel() // settings["group_size"]]
        real = (value - tensors[f"{name}.zero"].float()) * tensors[f"{name}.scale"].float()
        weights[name] = real.reshape(shape).numpy()
    return Saved(weights=weights, stored=sum(tensor.nbytes for tensor in tensors.values()))


if __name__ == "__main__":
    main(quantize, dequantize)
