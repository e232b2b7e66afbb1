"""Bit packing: rows of small integers into rows of 32-bit words, as pack-quantized stores them.

Element i of a row stands at bits i * num_bits of the row, lowest bits first, as the unsigned number
qvalue + 2 ** (num_bits - 1). The last word of a row is filled up with zero bits.

    num_bits 2:   word = e0 | e1 << 2 | e2 << 4 | ... | e15 << 30
    num_bits 3:   word = e0 | e1 << 3 | e2 << 6 | ... | e10 << 30
                  (e10's top bit is the next word's lowest)
    num_bits 4:   word = e0 | e1 << 4 | e2 << 8 | ... | e7 << 28
    num_bits 5:   word = e0 | e1 << 5 | e2 << 10 | ... | e6 << 30
                  (e6's top three bits are the next word's lowest)
    num_bits 6:   word = e0 | e1 << 6 | e2 << 12 | ... | e5 << 30
                  (e5's top four bits are the next word's lowest)
    num_bits 8:   word = e0 | e1 << 8 | e2 << 16 | e3 << 24

Bytes are put side by side and read as words, lowest byte first: torch runs on little-endian
machines only.
"""

import math

import torch
from torch import Tensor

from quantflow.core.scheme import INT_BITS
from quantflow.errors import SchemeError


def elements_of_whole_words(num_bits: int) -> int:
    """The fewest elements that fill whole words: 32 of 3 bits fill three.

    Raises:
        SchemeError: num_bits is none of 2, 3, 4, 5, 6 and 8.
    """
    if num_bits not in INT_BITS:
        raise SchemeError(f"num_bits={num_bits}", "words hold elements of 2, 3, 4, 5, 6 or 8 bits")
    return 32 // math.gcd(32, num_bits)


def pack(qvalue: Tensor, num_bits: int) -> Tensor:
    """The rows of qvalues, packed into words.

    Args:
        qvalue: [O, I] int8 in the range of num_bits.
        num_bits: 2, 3, 4, 5, 6 or 8.

    Returns:
        [O, ceil(I * num_bits / 32)] int32.

    Raises:
        SchemeError: num_bits is none of 2, 3, 4, 5, 6 and 8, or a qvalue does not fit.
    """
    count = elements_of_whole_words(num_bits)
    offset = 1 << (num_bits - 1)
    if num_bits < 8 and qvalue.numel():
        low, high = (end.item() for end in torch.aminmax(qvalue))
        if low < -offset or high >= offset:
            raise SchemeError(
                f"qvalue spans {low}..{high}, {num_bits} bits hold {-offset}..{offset - 1}",
                "quantize with the same num_bits",
            )
    rows, columns = qvalue.shape
    width = columns + -columns % count
    # one dimension, since a view as words needs contiguous bytes
    unsigned = torch.zeros(rows * width, dtype=torch.int8, device=qvalue.device)
    filled = unsigned.view(rows, width)[:, :columns]
    if num_bits == 8:
        # int8 has no 128; adding -128 wraps to the same byte
        torch.add(qvalue, -128, out=filled)
        return unsigned.view(torch.int32).view(rows, width // count)  # [O, words]
    torch.add(qvalue, offset, out=filled)
    if num_bits == 4:
        pairs = unsigned.view(torch.int16)  # [O * I / 2], element 2i in the low byte
        words = pairs >> 4  # changed in place: a weight's qvalues are large
        words |= pairs
        return words.to(torch.uint8).view(torch.int32).view(rows, width // count)  # [O, words]
    eights = unsigned.view(torch.int64)  # [O * I / 8], element 8i in the low byte
    _squeeze_(eights, num_bits)
    words = eights.view(torch.uint8).view(-1, 8)[:, :num_bits].flatten().view(torch.int32)
    needed = -(-columns * num_bits // 32)
    return words.view(rows, width * num_bits // 32)[:, :needed].contiguous()  # [O, words]


def unpack(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Undo `pack`: words [O, W] int32 to qvalues [O, in_features] int8.

    Raises:
        SchemeError: num_bits is none of 2, 3, 4, 5, 6 and 8, or W words do not hold in_features
            elements.
    """
    count = elements_of_whole_words(num_bits)
    needed = -(-in_features * num_bits // 32)
    if words.shape[1] != needed:
        raise SchemeError(
            f"{words.shape[1]} words, in_features={in_features} of {num_bits} bits need {needed}",
            "the packed tensor and its recorded shape disagree; the file is damaged",
        )
    rows = words.shape[0]
    width = in_features + -in_features % count
    if num_bits == 8:
        stored = words.flatten().view(torch.int8)
    elif num_bits == 4:
        pairs = words.flatten().view(torch.uint8).to(torch.int16)  # two elements each
        pairs |= pairs << 4
        pairs &= 0x0F0F
        stored = pairs.view(torch.int8)
    else:
        stored = _eights(words, num_bits, width).view(torch.int8)
    offset = -128 if num_bits == 8 else -(1 << (num_bits - 1))
    return (stored.view(rows, width)[:, :in_features] + offset).contiguous()  # [O, I]


def _eights(words: Tensor, num_bits: int, width: int) -> Tensor:
    """The unsigned elements of rows of `width`, one a byte, as flat int64.

    num_bits is at most 6.
    """
    rows = words.shape[0]
    whole = torch.zeros(rows, width * num_bits // 32, dtype=torch.int32, device=words.device)
    whole[:, : words.shape[1]] = words
    eights = torch.zeros(rows * width // 8, dtype=torch.int64, device=words.device)
    eights.view(torch.uint8).view(-1, 8)[:, :num_bits] = (
        whole.flatten().view(torch.uint8).view(-1, num_bits)
    )
    _spread_(eights, num_bits)
    return eights


def _squeeze_(eights: Tensor, num_bits: int) -> None:
    """Move eight elements of at most 6 bits, one a byte of an int64, to its lowest bits.

    Neighbours are joined first, then pairs, then fours.
    """
    for half in (8, 16, 32):
        used = half // 8 * num_bits
        upper = eights & _mask(2 * half, used) << half
        eights ^= upper
        eights |= upper.bitwise_right_shift_(half - used)


def _spread_(eights: Tensor, num_bits: int) -> None:
    """Undo `_squeeze_`."""
    for half in (32, 16, 8):
        used = half // 8 * num_bits
        upper = eights & _mask(2 * half, used) << used
        eights ^= upper
        eights |= upper.bitwise_left_shift_(half - used)


def _mask(lane: int, used: int) -> int:
    """A mask of 64 bits in which the lowest `used` of every `lane` are set."""
    return sum(((1 << used) - 1) << start for start in range(0, 64, lane))
