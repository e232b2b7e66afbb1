"""llama.cpp's types of blocks as grids: what the scales of a weight can be where one of them holds it.

A block has so many neighbouring elements of a row. In the types of 32 elements a scale, and a minimum where there is one, is a
float16 of its own. In the types of 256 elements a block has one float16 d, and each scale is d times a small integer; a
minimum is likewise dmin times a small integer.

    real = scale * qvalue                        qvalue from -2^(b-1) to 2^(b-1) - 1
    real = scale * qvalue - minimum              qvalue from 0 to 2^b - 1; minimum = scale * zero_point, zero_point a float32

`stored` rounds the scales of a row to such as a block can have, and leaves those that are. The largest magnitude of a block
gets the largest integer, so that d follows from the scales: a weight holds scales alone.
Source: github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`, which say what the bytes of a block mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

_LEAST = 2.0**-24  # float16's smallest number


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """How a block is laid out.

    Attributes:
        name: llama.cpp's.
        num_bits: of a qvalue.
        group_size: elements that share a scale.
        elements: of a block.
        minima: whether a group has a minimum too.
        scale_bits: of the integers that scales are multiples of d by; None where a scale is a float16 itself.
        signed: whether these integers may be negative; the largest magnitude is then the most negative one.
    """

    name: str
    num_bits: int
    group_size: int
    elements: int
    minima: bool = False
    scale_bits: int | None = None
    signed: bool = False

    @property
    def groups(self) -> int:
        """Scales of a block."""
        return self.elements // self.group_size

    @property
    def dependent(self) -> bool:
        """Whether more than a float16 for each group says what its points are."""
        return self.minima or self.scale_bits is not None

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype that holds every scale of the type exactly."""
        return torch.float16 if self.scale_bits is None else torch.float32


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType(name="Q4_0", num_bits=4, group_size=32, elements=32),
            BlockType(name="Q4_1", num_bits=4, group_size=32, elements=32, minima=True),
            BlockType(name="Q5_0", num_bits=5, group_size=32, elements=32),
            BlockType(name="Q5_1", num_bits=5, group_size=32, elements=32, minima=True),
            BlockType(name="Q8_0", num_bits=8, group_size=32, elements=32),
            BlockType(name="Q2_K", num_bits=2, group_size=16, elements=256, minima=True, scale_bits=4),
            BlockType(name="Q3_K", num_bits=3, group_size=16, elements=256, scale_bits=6, signed=True),
            BlockType(name="Q4_K", num_bits=4, group_size=32, elements=256, minima=True, scale_bits=6),
            BlockType(name="Q5_K", num_bits=5, group_size=32, elements=256, minima=True, scale_bits=6),
            BlockType(name="Q6_K", num_bits=6, group_size=16, elements=256, scale_bits=8, signed=True),
        )
    }
)

# What llama.cpp's quantizer takes for rows that are no whole blocks of 256; for 2 and 3 bits it has IQ4_NL, as large as Q4_0.
SMALLER: Mapping[str, str] = MappingProxyType({"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})


def stored(scale: Tensor, kind: BlockType) -> Tensor:
    """Return scales as a block of the type holds them, float32, their sign kept; those that it holds are returned as they are.

    Args:
        scale: [O, G] float32, not zero; G is a multiple of `kind.groups`.
        kind: of the blocks.

    Returns:
        [O, G], no zeros; Inf where d or a scale is too large for float16, which `QTensor.validate` refuses.
    """
    if kind.scale_bits is None:
        return scale.abs().half().float().clamp_min(_LEAST).copysign(scale)
    d, steps = steps_of(scale, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def steps_of(scale: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """Return d, [O, B] float32 as float16 holds it, and the integer of each scale, [O, B, groups] float32, none of them zero.

    Args:
        scale: [O, G] float32.
        kind: a type whose blocks have a d.
    """
    split = scale.view(len(scale), -1, kind.groups)  # [O, B, groups]
    lowest, highest = steps_range(kind)
    largest = lowest if kind.signed else highest
    place = split.abs().argmax(dim=-1, keepdim=True)  # [O, B, 1]
    d = split.gather(-1, place) / largest
    d = d.abs().half().float().clamp_min(_LEAST).copysign(d)
    steps = (split / d).round_()
    smallest = torch.ones_like(steps).copysign_(split * d)
    steps = torch.where(steps == 0, smallest, steps).clamp_(lowest, highest)
    return d[..., 0], _with_largest(steps, place, largest, d)


def _with_largest(steps: Tensor, place: Tensor, largest: int, d: Tensor) -> Tensor:
    """Return steps of which that at `place` is the largest, from which d follows; a d that could not be smaller is no such.

    Small d are coarse, float16 has no more: the step there may have been rounded to another.
    """
    there = torch.where(d.abs() > _LEAST, float(largest), steps.gather(-1, place))
    return steps.scatter_(-1, place, there)


def stored_minima(minimum: Tensor, kind: BlockType) -> Tensor:
    """Return minima as a block of the type holds them; those that it holds are returned as they are.

    Args:
        minimum: [O, G] float32, at least zero where the type has integers for it.
        kind: of the blocks; it has minima.
    """
    if kind.scale_bits is None:
        return minimum.half().float()
    d, steps = minimum_steps_of(minimum, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def minimum_steps_of(minimum: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """Return dmin, [O, B] float32 as float16 holds it, and the integer of each minimum, [O, B, groups] float32."""
    split = minimum.view(len(minimum), -1, kind.groups)  # [O, B, groups]
    _, highest = steps_range(kind)
    top, place = split.max(dim=-1, keepdim=True)  # [O, B, 1]
    d = torch.where(top > 0, (top / highest).half().float().clamp_min(_LEAST), 0.0)
    steps = torch.where(d > 0, (split / d).round(), 0.0).clamp_(0, highest)
    return d[..., 0], _with_largest(steps, place, highest, d)


def steps_range(kind: BlockType) -> tuple[int, int]:
    """Return the smallest and the largest integer that a scale is a multiple of d by."""
    assert kind.scale_bits is not None
    if kind.signed:
        return -(1 << (kind.scale_bits - 1)), (1 << (kind.scale_bits - 1)) - 1
    return 0, (1 << kind.scale_bits) - 1
