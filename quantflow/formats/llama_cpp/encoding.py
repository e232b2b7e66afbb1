"""A quantized weight as llama.cpp's blocks, byte for byte: no value changes on the way.

A block has `elements` elements e_0, e_1, ... of a row; those of symmetric types are raised to begin
at 0. d, m and dmin are float16.

| type   | bytes of a block                                            | bytes | elements |
|--------|-------------------------------------------------------------|-------|----------|
| Q4_0   | d, nibbles                                                  | 18    | 32       |
| Q4_1   | d, m, nibbles                                               | 20    | 32       |
| Q5_0   | d, fifths, nibbles                                          | 22    | 32       |
| Q5_1   | d, m, fifths, nibbles                                       | 24    | 32       |
| Q8_0   | d, signed bytes                                             | 34    | 32       |
| IQ4_NL | d, nibbles                                                  | 18    | 32       |
| Q2_K   | steps, quarters, d, dmin                                    | 84    | 256      |
| Q3_K   | thirds, quarters of the low bits, steps, d                  | 110   | 256      |
| Q4_K   | d, dmin, steps, nibbles of 64                               | 144   | 256      |
| Q5_K   | d, dmin, steps, fifths in the order of thirds, nibbles of 64 | 176   | 256      |
| Q6_K   | nibbles of 128, quarters of the high bits, steps, d         | 210   | 256      |
| IQ4_XS | d, high bits of steps, nibbles of steps, nibbles            | 136   | 256      |
| IQ3_S  | d, low bytes, ninth bits, signs, pairs of steps             | 110   | 256      |
| IQ3_XXS | d, low bytes, words                                        | 98    | 256      |
| IQ2_S  | d, low bytes, signs, high pairs, pairs of steps             | 82    | 256      |
| IQ2_XS | d, entries with signs, pairs of steps                       | 74    | 256      |
| IQ2_XXS | d, low bytes and words in turns: four bytes, then a word   | 66    | 256      |
| TQ1_0  | fives of 32, fives of 16, fives of 4, d                     | 54    | 256      |
| TQ2_0  | quarters, d                                                 | 66    | 256      |
| MXFP4  | exponent of the scale, nibbles of e2m1 codes                | 17    | 32       |

| part                    | content                                                             |
|-------------------------|---------------------------------------------------------------------|
| m                       | the negative of the minimum                                         |
| nibbles                 | e_i low, e_(i+16) high, 16 bytes; of IQ4 numbers of points from 0 |
| nibbles of 64 or of 128 | e_i and the element half as far on                                  |
| quarters                | four elements of 2 bits that stand 32 apart in 128, the first lowest |
| fifths                  | the fifth bit of e_i at bit i, 4 bytes                              |
| thirds                  | bit k of byte i is of e_(32 k + i)                                  |
| fives of n              | five elements of 3 values that stand n apart, the first highest: the |
|                         | number in base 3, times 256 / 243 rounded up; of 4 the last one is 0 |
| low bytes               | the low 8 bits of an entry's number, a byte each                    |
| ninth bits, high pairs  | one bit or two above them, of neighbouring entries, the first lowest |
| signs                   | bit j of byte i is 1 where e_(8 i + j) is negative                  |
| words                   | of 32 elements 4 bytes: 7 signs of each 8, above them the step      |
| entries with signs      | of 8 elements 2 bytes: an entry's number, above it 7 signs          |
| pairs of steps          | (step - 1) / 2 of neighbouring groups, the first low                |
| steps of Q2_K           | the scale's low, the minimum's high, 16 bytes                       |
| steps of 6 bits         | `_steps_q3`, `_steps_and_minima` and `_steps_iq4`                   |

The way back is `gguf`'s own dequantization (quantflow/formats/llama_cpp/blocks.py).

Source: github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import blocks, codebooks, microscaling
from quantflow.core.block_types import BLOCK_TYPES, BlockType
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import PRESETS, TensorScheme
from quantflow.errors import SchemeError

MXFP4, _MXFP4_SCHEME = "MXFP4", "MXFP4A16"


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A weight that becomes blocks.

    Attributes:
        name: name of the linear, for messages.
        weight: the weight.
        kind: type of its blocks.
        unsigned: qvalues from 0 on, [O, B, elements] uint8.
    """

    name: str
    weight: QTensor
    kind: BlockType
    unsigned: Tensor


def block_type_of(scheme: TensorScheme) -> str | None:
    """Type that holds weights of a scheme as they are, a key of gguf.BLOCKS; None where none does.

    MXFP4 is a scheme of microscaling, whose blocks llama.cpp takes with codes and exponents as
    they are.
    """
    if scheme == PRESETS[_MXFP4_SCHEME].weights:
        return MXFP4
    return scheme.block_type


def encode(name: str, weight: QTensor) -> Tensor:
    """Blocks of a weight, [O, bytes of a row] uint8.

    Args:
        name: name of the linear, for messages.
        weight: weight of a scheme with a `block_type`, or of MXFP4.

    Raises:
        SchemeError: the scheme has no block type, or the type does not hold a scale.
    """
    kind = weight.scheme.block
    if block_type_of(weight.scheme) == MXFP4:
        weight.validate(name)
        return _mxfp4(weight)
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


def _mxfp4(weight: QTensor) -> Tensor:
    """Blocks of MXFP4, [O, B * 17] uint8: of 32 codes the first half low."""
    pairs = microscaling.pack_e2m1(weight.qvalue)  # [O, I / 2], neighbours in a byte
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(len(pairs), -1, 32)  # [O, B, 32]
    exponents = microscaling.pack_e8m0(weight.scale)[..., None]  # [O, B, 1]
    return torch.cat([exponents, _halves(codes)], dim=-1).flatten(1)


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def _float16(name: str, values: Tensor) -> Tensor:
    """Values as float16, which has to hold them exactly."""
    halves = values.half()
    if not torch.equal(halves.float(), values):
        raise SchemeError(f"{name}: a scale is no float16", "quantize the weight again")
    return halves


def _halves(unsigned: Tensor, length: int = 32) -> Tensor:
    """Elements of 4 bits, two in a byte: of every `length` the first half low.

    [O, B, e] -> [O, B, e / 2] uint8.
    """
    low, high = unsigned.view(*unsigned.shape[:-1], -1, 2, length // 2).unbind(-2)
    return (low | high << 4).flatten(-2)


def _quarters(unsigned: Tensor) -> Tensor:
    """Elements of 2 bits, four in a byte. [O, B, 256] -> [O, B, 64] uint8."""
    parts = unsigned.view(*unsigned.shape[:-1], 2, 4, 32).unbind(-2)
    return (parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6).flatten(-2)


def _bits(ones: Tensor) -> Tensor:
    """Elements of one bit, eight that stand 32 apart in a byte. [O, B, 256] -> [O, B, 32] uint8."""
    parts = ones.view(*ones.shape[:-1], 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    return parts.sum(dim=-2, dtype=torch.uint8)


def _fifths(ones: Tensor) -> Tensor:
    """Elements of one bit, eight neighbours in a byte. [O, B, 32] -> [O, B, 4] uint8."""
    parts = ones.view(*ones.shape[:-1], 4, 8) << torch.arange(8, dtype=torch.uint8)
    return parts.sum(dim=-1, dtype=torch.uint8)


def _own(block: _Block) -> list[Tensor]:
    """float16 of each block that is its scale, and of its minimum if it has one."""
    parts = [_float16(block.name, block.weight.scale)[..., None]]
    minimum = block.weight.minimum
    return parts if minimum is None else [*parts, _float16(block.name, -minimum)[..., None]]


def _steps(block: _Block) -> tuple[Tensor, Tensor]:
    """d, [O, B, 1] float16, and the integers of scales, [O, B, groups] int16.

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
    return _float16(block.name, d * (block.kind.divisor or 1))[..., None], steps.short()


def _minimum_steps(block: _Block) -> tuple[Tensor, Tensor]:
    """dmin, [O, B, 1] float16, and the integers of minima, [O, B, groups] int16."""
    minimum = block.weight.minimum
    assert minimum is not None
    d, steps = blocks.minimum_steps_of(minimum, block.kind)
    return _float16(block.name, d)[..., None], steps.short()


def _steps_q3(steps: Tensor) -> Tensor:
    """16 signed integers of 6 bits in 12 bytes. [O, B, 16] -> uint8.

    Eight bytes have the low halves, four what is above.
    """
    unsigned = (steps + 32).to(torch.uint8)
    low, high = unsigned & 15, (unsigned >> 4).view(*steps.shape[:-1], 4, 4).unbind(-2)
    above = high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6
    return torch.cat([low[..., :8] | low[..., 8:] << 4, above], dim=-1)


def _steps_and_minima(steps: Tensor, minima: Tensor) -> Tensor:
    """8 integers of 6 bits of scales and 8 of minima in 12 bytes, [O, B, 12] uint8."""
    scale, minimum = steps.to(torch.uint8), minima.to(torch.uint8)
    (first, last), (first_m, last_m) = scale.chunk(2, dim=-1), minimum.chunk(2, dim=-1)
    return torch.cat(
        [first | last >> 4 << 6, first_m | last_m >> 4 << 6, last & 15 | (last_m & 15) << 4], dim=-1
    )


def _steps_iq4(steps: Tensor) -> list[Tensor]:
    """8 signed integers of 6 bits in 6 bytes. [O, B, 8] -> [O, B, 2] and [O, B, 4] uint8.

    Two bytes have the two high bits of each, the first lowest; four have the nibbles below.
    """
    unsigned = (steps + 32).to(torch.uint8)
    pairs = (unsigned & 15).view(*steps.shape[:-1], 4, 2)
    high = (unsigned >> 4).view(*steps.shape[:-1], 2, 4).unbind(-1)
    return [
        high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6,
        pairs[..., 0] | pairs[..., 1] << 4,
    ]


def _q4(block: _Block) -> list[Tensor]:
    return [*_own(block), _halves(block.unsigned)]


def _numbers(block: _Block) -> Tensor:
    """The numbers of a block's points in nibbles, [O, B, elements / 2] uint8."""
    return _halves(blocks.codes(block.weight.qvalue, block.kind).view_as(block.unsigned))


def _iq4_nl(block: _Block) -> list[Tensor]:
    return [*_own(block), _numbers(block)]


def _iq4_xs(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    return [d, *_steps_iq4(steps), _numbers(block)]


def _numbers_of_entries(block: _Block) -> Tensor:
    """The numbers of a block's entries, [O, B, entries] int32."""
    return (
        codebooks.numbers(block.weight.qvalue, block.kind).int().view(*block.unsigned.shape[:2], -1)
    )


def _signs(block: _Block) -> Tensor:
    """The signs of eight neighbours in a byte, 1 where one is negative. [O, B, 32] uint8."""
    negative = (block.weight.qvalue < 0).view(*block.unsigned.shape[:2], -1).to(torch.uint8)
    return _packed(negative, bits=1)


def _packed(values: Tensor, *, bits: int) -> Tensor:
    """Neighbours of so many bits in a byte, the first lowest. [O, B, n] -> uint8."""
    parts = values.to(torch.uint8).view(*values.shape[:-1], -1, 8 // bits)
    return (parts << torch.arange(0, 8, bits, dtype=torch.uint8)).sum(dim=-1, dtype=torch.uint8)


def _halved(steps: Tensor) -> Tensor:
    """What a block stores of odd steps, int16."""
    return (steps - 1) // 2


def _words(block: _Block, steps: Tensor) -> Tensor:
    """Seven signs of each 8 and the step of 32 elements, [O, B, 32] uint8 of 8 words."""
    sevens = (_signs(block) & 127).long().view(*steps.shape[:-1], 8, 4)
    words = (sevens << torch.arange(0, 28, 7)).sum(dim=-1) | _halved(steps).long() << 28
    return _little_endian(words, nbytes=4)


def _little_endian(numbers: Tensor, *, nbytes: int) -> Tensor:
    """The bytes of numbers, the lowest first. [O, B, n] -> [O, B, n nbytes] uint8."""
    return (
        ((numbers[..., None] >> torch.arange(0, 8 * nbytes, 8)) & 255).to(torch.uint8).flatten(-2)
    )


def _iq3_s(block: _Block) -> list[Tensor]:
    (d, steps), numbers = _steps(block), _numbers_of_entries(block)
    low, ninth = (numbers & 255).to(torch.uint8), _packed(numbers >> 8, bits=1)
    return [d, low, ninth, _signs(block), _packed(_halved(steps), bits=4)]


def _iq3_xxs(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    return [d, _numbers_of_entries(block).to(torch.uint8), _words(block, steps)]


def _iq2_s(block: _Block) -> list[Tensor]:
    (d, steps), numbers = _steps(block), _numbers_of_entries(block)
    low, high = (numbers & 255).to(torch.uint8), _packed(numbers >> 8, bits=2)
    return [d, low, _signs(block), high, _packed(_halved(steps), bits=4)]


def _iq2_xs(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    sevens = (_signs(block) & 127).int()
    with_signs = _little_endian(_numbers_of_entries(block) | sevens << 9, nbytes=2)
    return [d, with_signs, _packed(_halved(steps), bits=4)]


def _iq2_xxs(block: _Block) -> list[Tensor]:
    d, steps = _steps(block)
    shape = (*steps.shape[:-1], 8, 4)
    fours = _numbers_of_entries(block).to(torch.uint8).view(shape)
    words = _words(block, steps).view(shape)
    return [d, torch.stack([fours, words], dim=-2).flatten(-3)]


def _q5(block: _Block) -> list[Tensor]:
    return [*_own(block), _fifths(block.unsigned >> 4), _halves(block.unsigned & 15)]


def _q8(block: _Block) -> list[Tensor]:
    return [*_own(block), (block.unsigned ^ 128).view(torch.int8)]


def _fives(unsigned: Tensor, apart: int) -> Tensor:
    """Elements of 3 values, up to five that stand `apart` in a byte. [O, B, e] -> uint8.

    A reader multiplies a byte by a power of 3 and finds an element above its 8 bits.
    """
    parts = unsigned.view(*unsigned.shape[:2], -1, apart).int()  # [O, B, elements of a byte, apart]
    powers = torch.tensor([81, 27, 9, 3, 1], dtype=torch.int32)[: parts.shape[-2]]
    number = (parts * powers[:, None]).sum(dim=-2)
    return ((number * 256 + 242) // 243).to(torch.uint8)


def _tq1_0(block: _Block) -> list[Tensor]:
    elements = block.unsigned
    wide = _fives(elements[..., :160], 32)
    narrow, rest = _fives(elements[..., 160:240], 16), _fives(elements[..., 240:], 4)
    return [wide, narrow, rest, *_own(block)]


def _tq2_0(block: _Block) -> list[Tensor]:
    return [_quarters(block.unsigned), *_own(block)]


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
        "IQ4_XS": _iq4_xs,
        "IQ3_S": _iq3_s,
        "IQ3_XXS": _iq3_xxs,
        "IQ2_S": _iq2_s,
        "IQ2_XS": _iq2_xs,
        "IQ2_XXS": _iq2_xxs,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
