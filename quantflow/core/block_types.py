"""Records of llama.cpp's block types; quantflow/core/blocks.py rounds scales to their values.

A block is a number of neighbouring elements of a row. In the types of 32 elements a scale, and a
minimum where there is one, is a float16 of its own. In the types of 256 elements a block has one
float16 d, and each scale is d times a small integer; a minimum is likewise dmin times a small
integer.

    real = scale * qvalue                        qvalue from -2^(b-1) to 2^(b-1) - 1
    real = scale * qvalue - minimum              qvalue from 0 to 2^b - 1
                                                 minimum = scale * zero_point, zero_point a float32

The points of IQ4_NL and IQ4_XS lie unevenly, closer around zero, and zero is none of them. A qvalue
there is the point itself, an int8; a block stores the point's number. The points of TQ1_0 and TQ2_0
are -1, 0 and 1.

IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS and IQ2_XXS have a codebook: the magnitudes of 4 or 8 neighbours are
one entry of a table, and their signs stand beside its number (quantflow/core/codebooks.py). Zero is
no magnitude. A scale is d times an odd integer, divided by a power of two.

Source: github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`, which define the bytes of a
block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """How a block stores the magnitudes and signs of neighbours.

    Attributes:
        length: neighbours whose magnitudes are one entry.
        entries: number of entries.
        even_signs: whether of 8 neighbours an even number is negative: 7 signs are stored then, and
            the eighth follows.
    """

    length: int
    entries: int
    even_signs: bool = False

    @property
    def bits(self) -> float:
        """Bits of an element, without its scale."""
        signs = 7 / 8 if self.even_signs else 1.0
        return (self.entries.bit_length() - 1) / self.length + signs


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """The layout of a block.

    Attributes:
        name: llama.cpp's name.
        num_bits: bits of a qvalue, as an artifact holds it.
        group_size: elements that share a scale.
        elements: elements of a block.
        minima: whether a group has a minimum too.
        scale_bits: bits of the integers that scales are multiples of d by; None where a scale is a
            float16 itself.
        signed: whether these integers may be negative; the largest magnitude is then the most
            negative one.
        points: values of a qvalue, ascending, where these are not all integers of its bits; else
            empty.
        codebook: record of the codebook that neighbours are entries of; None without one.
        divisor: power of two by which d times an odd integer is divided; None where the integers of
            scales need not be odd.
    """

    name: str
    num_bits: int
    group_size: int
    elements: int
    minima: bool = False
    scale_bits: int | None = None
    signed: bool = False
    points: tuple[int, ...] = ()
    codebook: Codebook | None = None
    divisor: int | None = None

    @property
    def groups(self) -> int:
        """Scales of a block."""
        return self.elements // self.group_size

    @property
    def dependent(self) -> bool:
        """Whether a group's grid is more than the multiples of a float16."""
        return self.minima or self.scale_bits is not None or bool(self.points)

    @property
    def scale_dtype(self) -> str:
        """The dtype that holds every scale of the type exactly, by safetensors' name."""
        return "F16" if self.scale_bits is None else "F32"

    @property
    def steps(self) -> tuple[int, int]:
        """The smallest and the largest integer by which a scale is a multiple of d.

        Only types whose blocks have a d have one.
        """
        assert self.scale_bits is not None
        if self.divisor is not None:
            return 1, (2 << self.scale_bits) - 1
        if self.signed:
            return -(1 << (self.scale_bits - 1)), (1 << (self.scale_bits - 1)) - 1
        return 0, (1 << self.scale_bits) - 1


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TERNARY = (-1, 0, 1)


def _of_entries(
    name: str,
    magnitudes: tuple[int, ...],
    codebook: Codebook,
    *,
    group_size: int,
    divisor: int,
) -> BlockType:
    """A type with a codebook of these magnitudes, of either sign."""
    return BlockType(
        name=name,
        num_bits=8,
        group_size=group_size,
        elements=256,
        scale_bits=4,
        points=(*(-magnitude for magnitude in reversed(magnitudes)), *magnitudes),
        codebook=codebook,
        divisor=divisor,
    )


_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ2 = (8, 25, 43)

BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType(name="Q4_0", num_bits=4, group_size=32, elements=32),
            BlockType(name="Q4_1", num_bits=4, group_size=32, elements=32, minima=True),
            BlockType(name="Q5_0", num_bits=5, group_size=32, elements=32),
            BlockType(name="Q5_1", num_bits=5, group_size=32, elements=32, minima=True),
            BlockType(name="Q8_0", num_bits=8, group_size=32, elements=32),
            BlockType(name="IQ4_NL", num_bits=8, group_size=32, elements=32, points=_IQ4),
            BlockType(
                name="Q2_K", num_bits=2, group_size=16, elements=256, minima=True, scale_bits=4
            ),
            BlockType(
                name="Q3_K", num_bits=3, group_size=16, elements=256, scale_bits=6, signed=True
            ),
            BlockType(
                name="Q4_K", num_bits=4, group_size=32, elements=256, minima=True, scale_bits=6
            ),
            BlockType(
                name="Q5_K", num_bits=5, group_size=32, elements=256, minima=True, scale_bits=6
            ),
            BlockType(
                name="Q6_K", num_bits=6, group_size=16, elements=256, scale_bits=8, signed=True
            ),
            BlockType(
                name="IQ4_XS",
                num_bits=8,
                group_size=32,
                elements=256,
                scale_bits=6,
                signed=True,
                points=_IQ4,
            ),
            _of_entries("IQ3_S", _IQ3_S, Codebook(length=4, entries=512), group_size=32, divisor=1),
            _of_entries(
                "IQ3_XXS",
                _IQ3_XXS,
                Codebook(length=4, entries=256, even_signs=True),
                group_size=32,
                divisor=4,
            ),
            _of_entries("IQ2_S", _IQ2, Codebook(length=8, entries=1024), group_size=16, divisor=8),
            _of_entries(
                "IQ2_XS",
                _IQ2,
                Codebook(length=8, entries=512, even_signs=True),
                group_size=16,
                divisor=8,
            ),
            _of_entries(
                "IQ2_XXS",
                _IQ2,
                Codebook(length=8, entries=256, even_signs=True),
                group_size=32,
                divisor=8,
            ),
            BlockType(name="TQ1_0", num_bits=2, group_size=256, elements=256, points=_TERNARY),
            BlockType(name="TQ2_0", num_bits=2, group_size=256, elements=256, points=_TERNARY),
        )
    }
)

# The type that llama.cpp's quantizer takes instead for rows that are no whole blocks of 256.
SMALLER: Mapping[str, str] = MappingProxyType(
    {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
        "IQ4_XS": "IQ4_NL",
        "IQ3_S": "IQ4_NL",
        "IQ3_XXS": "IQ4_NL",
        "IQ2_S": "IQ4_NL",
        "IQ2_XS": "IQ4_NL",
        "IQ2_XXS": "IQ4_NL",
        "TQ1_0": "Q4_0",
        "TQ2_0": "Q4_0",
    }
)
