"""A quantized weight as llama.cpp's blocks, byte for byte: no value changes on the way.

A block's bytes, for elements e_0, e_1, ... of a row, those of symmetric types raised to begin at 0;
d, m, dmin float16:

    Q4_0   d | nibbles                                           18 of 32     nibbles: e_i low, e_(i+16) high, 16 bytes
    Q4_1   d | m | nibbles                                       20 of 32     m: the negative of the minimum
    Q5_0   d | fifths | nibbles                                  22 of 32     fifths: the fifth bit of e_i at bit i, 4 bytes
    Q5_1   d | m | fifths | nibbles                              24 of 32
    Q8_0   d | signed bytes                                      34 of 32
    IQ4_NL d | nibbles                                           18 of 32     the numbers of the points, from 0 on
    Q2_K   steps | quarters | d | dmin                           84 of 256    steps: scale's low, minimum's high, 16 bytes
    Q3_K   thirds | quarters of the low bits | steps | d         110 of 256   thirds: bit k of byte i is of e_(32k+i)
    Q4_K   d | dmin | steps | nibbles of 64                      144 of 256
    Q5_K   d | dmin | steps | fifths, as thirds | nibbles of 64  176 of 256
    Q6_K   nibbles of 128 | quarters of the high bits | steps | d    210 of 256

Quarters are four elements of 2 bits that stand 32 apart in 128, the first lowest. Nibbles of 64 or
of 128 are those of e_i and of the element half as far on. How steps of 6 bits are packed say
`_steps_q3` and `_steps_and_minima`.

The way back is `gguf`'s own dequantization (quantflow/formats/llama_cpp/blocks.py).
Source: github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import blocks
from quantflow.core.block_types import BLOCK_TYPES, BlockType
from quantflow.core.qtensor import QTensor
from quantflow.errors import SchemeError


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A weight that becomes blocks.

    Attributes:
        name: whose it is, for messages.
        weight: the weight.
        kind: of its blocks.
        unsigned: its qvalues from 0 on, [O, B, elements] uint8.
    """

    name: str
    weight: QTensor
    kind: BlockType
    unsigned: Tensor


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
        raise SchemeError(
            f"{name}: weights of no type of llama.cpp's",
            f"quantize with one of {', '.join(BLOCK_TYPES)}",
        )
    weight.validate(name)
    unsigned = (weight.qvalue - weight.scheme.qmin).view(torch.uint8)  # int8 wraps where it has to
    unsigned = unsigned.view(len(unsigned), -1, kind.elements)  # [O, B, e]
    parts = _PARTS[kind.name](_Block(name=name, weight=weight, kind=kind, unsigned=unsigned))
    return torch.cat([_bytes(part) for part in parts], dim=-1).flatten(1)  # [O, B * bytes]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def _float16(name: str, values: Tensor) -> Tensor:
    """Return values as float16, which holds them."""
    found = values.half()
    if not torch.equal(found.float(), values):
        raise SchemeError(f"{name}: a scale is no float16", "quantize the weight again")
    return found


def _halves(unsigned: Tensor, length: int = 32) -> Tensor:
    """Return elements of 4 bits, two in a byte: of every `length` the first half low.  [O, B, e] -> [O, B, e / 2] uint8."""
    low, high = unsigned.view(*unsigned.shape[:-1], -1, 2, length // 2).unbind(-2)
    return (low | high << 4).flatten(-2)


def _quarters(unsigned: Tensor) -> Tensor:
    """Return elements of 2 bits, four in a byte.  [O, B, 256] -> [O, B, 64] uint8."""
    parts = unsigned.view(*unsigned.shape[:-1], 2, 4, 32).unbind(-2)
    return (parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6).flatten(-2)


def _bits(ones: Tensor) -> Tensor:
    """Return elements of one bit, eight in a byte, those that stand 32 apart.  [O, B, 256] -> [O, B, 32] uint8."""
    parts = ones.view(*ones.shape[:-1], 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    return parts.sum(dim=-2, dtype=torch.uint8)


def _fifths(ones: Tensor) -> Tensor:
    """Return elements of one bit, eight neighbours in a byte.  [O, B, 32] -> [O, B, 4] uint8."""
    parts = ones.view(*ones.shape[:-1], 4, 8) << torch.arange(8, dtype=torch.uint8)
    return parts.sum(dim=-1, dtype=torch.uint8)


def _own(block: _Block) -> list[Tensor]:
    """Return the float16 of each block that is its scale, and that of its minimum if it has one."""
    parts = [_float16(block.name, block.weight.scale)[..., None]]
    minimum = block.weight.minimum
    return parts if minimum is None else [*parts, _float16(block.name, -minimum)[..., None]]


def _steps(block: _Block) -> tuple[Tensor, Tensor]:
    """Return d, [O, B, 1] float16, and the integers of scales, [O, B, groups] int16.

    Raises:
        SchemeError: the scales are no multiples of a float16.
    """
    d, steps = blocks.steps_of(block.weight.scale, block.kind)
    if not torch.equal((steps * d[..., None]).flatten(1), block.weight.scale):
        cause = (
            f"{block.name}: the scales of a block are no multiples of a float16 by integers of "
            f"{block.kind.scale_bits} bits"
        )
        raise SchemeError(cause, "quantize the weight again")
    return _float16(block.name, d)[..., None], steps.short()


def _minimum_steps(block: _Block) -> tuple[Tensor, Tensor]:
    """Return dmin, [O, B, 1] float16, and the integers of minima, [O, B, groups] int16."""
    minimum = block.weight.minimum
    assert minimum is not None
    d, steps = blocks.minimum_steps_of(minimum, block.kind)
    return _float16(block.name, d)[..., None], steps.short()


def _steps_q3(steps: Tensor) -> Tensor:
    """Return 16 signed integers of 6 bits in 12 bytes: eight of low halves, four of what is above.  [O, B, 16] -> uint8."""
    unsigned = (steps + 32).to(torch.uint8)
    low, high = unsigned & 15, (unsigned >> 4).view(*steps.shape[:-1], 4, 4).unbind(-2)
    above = high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6
    return torch.cat([low[..., :8] | low[..., 8:] << 4, above], dim=-1)


def _steps_and_minima(steps: Tensor, minima: Tensor) -> Tensor:
    """Return 8 integers of 6 bits of scales and 8 of minima in 12 bytes, [O, B, 12] uint8."""
    scale, minimum = steps.to(torch.uint8), minima.to(torch.uint8)
    (first, last), (first_m, last_m) = scale.chunk(2, dim=-1), minimum.chunk(2, dim=-1)
    return torch.cat(
        [first | last >> 4 << 6, first_m | last_m >> 4 << 6, last & 15 | (last_m & 15) << 4], dim=-1
    )


def _q4(block: _Block) -> list[Tensor]:
    return [*_own(block), _halves(block.unsigned)]


def _iq4_nl(block: _Block) -> list[Tensor]:
    return [
        *_own(block),
        _halves(blocks.codes(block.weight.qvalue, block.kind).view_as(block.unsigned)),
    ]


def _q5(block: _Block) -> list[Tensor]:
    return [*_own(block), _fifths(block.unsigned >> 4), _halves(block.unsigned & 15)]


def _q8(block: _Block) -> list[Tensor]:
    return [*_own(block), (block.unsigned ^ 128).view(torch.int8)]


def _q2_k(block: _Block) -> list[Tensor]:
    (d, steps), (dmin, minima) = _steps(block), _minimum_steps(block)
    return [(steps | minima << 4).to(torch.uint8), _quarters(block.unsigned), d, dmin]


def _q3_k(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    return [_bits(block.unsigned >> 2), _quarters(block.unsigned & 3), _steps_q3(steps), d]


def _q4_k(block: _Block) -> list[Tensor]:
    (d, steps), (dmin, minima) = _steps(block), _minimum_steps(block)
    return [d, dmin, _steps_and_minima(steps, minima), _halves(block.unsigned, 64)]


def _q5_k(block: _Block) -> list[Tensor]:
    (d, steps), (dmin, minima) = _steps(block), _minimum_steps(block)
    parts = [
        _steps_and_minima(steps, minima),
        _bits(block.unsigned >> 4),
        _halves(block.unsigned & 15, 64),
    ]
    return [d, dmin, *parts]


def _q6_k(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    return [
        _halves(block.unsigned & 15, 128),
        _quarters(block.unsigned >> 4),
        steps.to(torch.int8),
        d,
    ]


_PARTS: Mapping[str, Callable[[_Block], list[Tensor]]] = MappingProxyType(
    {
        "Q4_0": _q4,
        "Q4_1": _q4,
        "Q5_0": _q5,
        "Q5_1": _q5,
        "Q8_0": _q8,
        "IQ4_NL": _iq4_nl,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
