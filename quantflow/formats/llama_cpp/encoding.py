"""A quantized weight as llama.cpp's blocks, byte for byte: no value changes on the way.

A block's bytes, for elements e_0, e_1, ... of a row, d the float16 of its scale:

    Q4_0   d | 16 bytes: e_i + 8 in the low half, e_(i+16) + 8 in the high half                                18 of 32
    Q5_0   d | uint32 of the fifth bits, that of e_i at bit i | 16 bytes of the others, as Q4_0; e_i + 16      22 of 32
    Q8_0   d | 32 signed bytes                                                                                 34 of 32

The way back is `gguf`'s own dequantization (quantflow/formats/llama_cpp/blocks.py).
Source: github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core.blocks import BLOCK_TYPES, BlockType
from quantflow.core.qtensor import QTensor
from quantflow.errors import SchemeError


def encode(name: str, weight: QTensor) -> Tensor:
    """Return the blocks of a weight, [O, bytes of a row] uint8.

    Args:
        name: whose it is, for messages.
        weight: its scheme has a `block_type`.

    Raises:
        SchemeError: the scheme has none, or a scale is none that the type holds.
    """
    kind = weight.scheme.block
    if kind is None:
        raise SchemeError(f"{name}: weights of no type of llama.cpp's", f"quantize with one of {', '.join(BLOCK_TYPES)}")
    weight.validate(name)
    blocks = weight.qvalue.view(len(weight.qvalue), -1, kind.elements)  # [O, B, e]
    parts = _PARTS[kind.name](name, weight, blocks, kind)
    return torch.cat([_bytes(part) for part in parts], dim=-1).flatten(1)  # [O, B * bytes]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def _float16(name: str, values: Tensor) -> Tensor:
    """Return values as float16, which holds them."""
    found = values.half()
    if not torch.equal(found.float(), values):
        raise SchemeError(f"{name}: a scale is no float16", "quantize the weight again")
    return found


def _halves(unsigned: Tensor) -> Tensor:
    """Return bytes that hold elements of 4 bits, the first half of a block in the low bits.  [O, B, e] -> [O, B, e / 2]."""
    low, high = unsigned.chunk(2, dim=-1)
    return low | high << 4


def _q4_0(name: str, weight: QTensor, blocks: Tensor, kind: BlockType) -> list[Tensor]:
    del kind
    return [_float16(name, weight.scale)[..., None], _halves((blocks + 8).to(torch.uint8))]


def _q5_0(name: str, weight: QTensor, blocks: Tensor, kind: BlockType) -> list[Tensor]:
    del kind
    unsigned = (blocks + 16).to(torch.uint8)
    return [_float16(name, weight.scale)[..., None], _fifth_bits(unsigned), _halves(unsigned & 15)]


def _fifth_bits(unsigned: Tensor) -> Tensor:
    """Return the bits of 16 of 32 elements, four bytes of a block."""
    bits = (unsigned >> 4).view(*unsigned.shape[:-1], 4, 8)  # [O, B, 4, 8]
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=-1, dtype=torch.uint8)


def _q8_0(name: str, weight: QTensor, blocks: Tensor, kind: BlockType) -> list[Tensor]:
    del kind
    return [_float16(name, weight.scale)[..., None], blocks]


_PARTS: Mapping[str, Callable[[str, QTensor, Tensor, BlockType], list[Tensor]]] = MappingProxyType(
    {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0}
)
