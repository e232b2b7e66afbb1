"""Layouts of quantized checkpoints, as their own programs write them.

Each takes tensors by name, and writes the linears whose weights match `linears` and not `but` as
its program would: rounded to nearest, with its names, its shapes and its bytes. None of quantflow's
code is used, so that what is read is not what was written by the same hand.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
E4M3 = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs a word's bits hold
NF4 = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    + [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
)


def _rounded(encode: Callable[..., Tensors], tensors: Tensors, how: Mapping[str, Any]) -> Tensors:
    """Every linear that was named, encoded; every other tensor as it is."""
    found: Tensors = {}
    for name, value in tensors.items():
        but = how.get("but")
        chosen = re.search(how["linears"], name) and not (but and re.search(but, name))
        if chosen:
            parts = encode(value.float(), **how.get("options", {}))
            stem = name.removesuffix("weight")
            found |= {f"{stem}{part}": each for part, each in parts.items()}
        else:
            found[name] = value
    return found


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, eight of the last axis in one int32, the first in the lowest bits."""
    shifts = torch.arange(8, dtype=torch.int64) * 4
    words = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)  # [..., n / 8]
    return (words - (words >= 2**31).long() * 2**32).int()


def _fp8_block(weight: torch.Tensor, *, block: int = 128, powers: bool = False) -> Tensors:
    """float8 with a scale per block, the last blocks ragged; scales may be powers of two."""
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    amax = padded.reshape(rows, block, columns, block).abs().amax((1, 3)).clamp(min=1e-8)
    scale = amax / E4M3  # [rows, columns]
    if powers:
        scale = scale.log2().ceil().exp2()
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    divided = weight / spread[: weight.shape[0], : weight.shape[1]]
    return {"weight": divided.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def _fp8_row(weight: torch.Tensor) -> Tensors:
    """float8 with a scale per row: compressed-tensors' float-quantized."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / E4M3
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.to(torch.bfloat16)}


def _fp8_tensor(weight: torch.Tensor) -> Tensors:
    """float8 with a scale of the whole weight and one of the inputs: ModelOpt's FP8."""
    scale = weight.abs().amax().clamp(min=1e-8) / E4M3
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.05)}


def _grouped(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 to 15 with a zero point of 8 [O, I], and a float16 scale per group [O, G]."""
    groups = weight.unflatten(1, (-1, group))  # [O, G, g]
    scale = (groups.abs().amax(-1).clamp(min=1e-6) / 7.0).half().float()
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.flatten(1), scale


def _gptq(weight: torch.Tensor, *, group: int = 32, bias: bool = False) -> Tensors:
    """AutoGPTQ's first version, whose zero points are one too small."""
    codes, scale = _grouped(weight, group)  # [O, I], [O, G]
    zeros = torch.full((scale.shape[1], scale.shape[0]), 7.0)  # [G, O]
    more = {"bias": torch.zeros(len(weight), dtype=torch.float16)} if bias else {}
    return {
        "qweight": _words(codes).T.contiguous(),  # [I / 8, O]
        "qzeros": _words(zeros),
        "scales": scale.T.contiguous().half(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
        **more,
    }


def _awq(weight: torch.Tensor, *, group: int = 32) -> Tensors:
    """AutoAWQ's GEMM layout."""
    codes, scale = _grouped(weight, group)
    places = torch.tensor(AWQ_ORDER)

    def packed(values: torch.Tensor) -> torch.Tensor:
        eight = values.unflatten(1, (-1, 8))[..., places]  # [n, O / 8, 8]
        return _words(eight.flatten(1))

    return {
        "qweight": packed(codes.T),  # [I, O / 8]
        "qzeros": packed(torch.full((scale.shape[1], scale.shape[0]), 8.0)),
        "scales": scale.T.contiguous().half(),
    }


def _pack_quantized(weight: torch.Tensor, *, group: int = 32) -> Tensors:
    """compressed-tensors' pack-quantized, 4 bits, symmetric."""
    codes, scale = _grouped(weight, group)
    return {
        "weight_packed": _words(codes),  # [O, I / 8]
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits: sign, two bits of exponent, one of mantissa."""
    code = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return code + 8 * (values < 0)


def _nvfp4(weight: torch.Tensor) -> Tensors:
    """ModelOpt's NVFP4: groups of 16 with a float8 scale, and a float32 scale of all."""
    groups = weight.unflatten(1, (-1, 16))  # [O, I / 16, 16]
    amax = groups.abs().amax(-1)
    whole = (weight.abs().amax() / (6.0 * E4M3)).clamp(min=1e-12)
    scale = (amax / 6.0 / whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
    divided = groups / (scale.float() * whole).unsqueeze(-1)
    codes = _nearest_e2m1(divided).flatten(1)  # [O, I]
    pairs = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    whole = whole.float()
    return {
        "weight": pairs,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }


def _mxfp4(tensors: Tensors, how: Mapping[str, Any]) -> Tensors:
    """gpt-oss: stacked experts [E, inputs, outputs] as blocks of 32 inputs with an exponent."""
    found: Tensors = {}
    for name, value in tensors.items():
        if not re.search(how["linears"], name):
            found[name] = value
            continue
        groups = value.float().transpose(1, 2).unflatten(-1, (-1, 32))  # [E, O, I / 32, 32]
        amax = groups.abs().amax(-1).clamp(min=1e-30)
        exponent = (amax / 6.0).log2().ceil()
        codes = _nearest_e2m1(groups / exponent.exp2().unsqueeze(-1))
        found[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        found[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    return found


def _nf4(weight: torch.Tensor) -> Tensors:
    """NF4 of bitsandbytes with double quantization; the state is no valid one."""
    blocks = weight.reshape(-1, 64)
    amax = blocks.abs().amax(1).clamp(min=1e-8)
    codes = ((blocks / amax[:, None]).unsqueeze(-1) - NF4).abs().argmin(-1).flatten()
    return {
        "weight": (16 * codes[0::2] + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": (amax / amax.max() * 255).to(torch.uint8),
        "weight.nested_absmax": amax.max()[None],
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(96, dtype=torch.uint8),
    }


LAYOUTS: dict[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "fp8_block": partial(_rounded, _fp8_block),
    "fp8_row": partial(_rounded, _fp8_row),
    "fp8_tensor": partial(_rounded, _fp8_tensor),
    "gptq": partial(_rounded, _gptq),
    "awq": partial(_rounded, _awq),
    "pack-quantized": partial(_rounded, _pack_quantized),
    "nvfp4": partial(_rounded, _nvfp4),
    "nf4": partial(_rounded, _nf4),
    "mxfp4": _mxfp4,
}
