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
    def scale_dtype(self) -> torch.dtype:
        """The dtype that holds every scale of the type exactly."""
        return torch.float16 if self.scale_bits is None else torch.float32


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType(name="Q4_0", num_bits=4, group_size=32, elements=32),
            BlockType(name="Q5_0", num_bits=5, group_size=32, elements=32),
            BlockType(name="Q8_0", num_bits=8, group_size=32, elements=32),
        )
    }
)


def stored(scale: Tensor, kind: BlockType) -> Tensor:
    """Return scales as a block of the type holds them, float32, their sign kept; those that it holds are returned as they are.

    Args:
        scale: [O, G] float32, not zero; G is a multiple of `kind.groups`.
        kind: of the blocks.

    Returns:
        [O, G]; Inf where d or a scale is too large for float16, which `QTensor.validate` refuses.
    """
    return scale.abs().half().float().clamp_min(_LEAST).copysign(scale)
