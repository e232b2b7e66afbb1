"""Bit packing: rows of small integers into rows of 32-bit words, as the pack-quantized layout stores them.

Element i of a row stands at bits i * num_bits of the row, lowest bits first, as the unsigned number
qvalue + 2 ** (num_bits - 1). The last word of a row is filled up with zero bits.

    num_bits 4:   word = e0 | e1 << 4 | e2 << 8 | ... | e7 << 28
    num_bits 8:   word = e0 | e1 << 8 | e2 << 16 | e3 << 24

Bytes are put side by side and read as words, lowest byte first: torch runs on little-endian machines only.
"""

import torch
from torch import Tensor

from quantflow.errors import SchemeError


def _elements_per_word(num_bits: int) -> int:
    if num_bits not in (4, 8):
        raise SchemeError(f"num_bits={num_bits}", "words hold 4 or 8 bit elements")
    return 32 // num_bits


def pack(qvalue: Tensor, num_bits: int) -> Tensor:
    """Pack each row.  qvalue: [O, I] int8 in the range of num_bits; returns [O, ceil(I * num_bits / 32)] int32.

    Raises:
        SchemeError: num_bits is not 4 or 8, or a qvalue does not fit.
    """
    count = _elements_per_word(num_bits)
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
    unsigned = torch.zeros(rows * width, dtype=torch.int8, device=qvalue.device)  # flat: bytes of any shape read as words
    # In 8 bits, adding 128 wraps to the same byte as adding -128, and no int8 holds 128.
    torch.add(qvalue, -128 if num_bits == 8 else offset, out=unsigned.view(rows, width)[:, :columns])  # [O, I]
    if num_bits == 8:
        return unsigned.view(torch.int32).view(rows, width // count)  # [O, words]
    pairs = unsigned.view(torch.int16)  # [O * I / 2], element 2i in the low byte
    words = pairs >> 4  # changed in place: a weight's qvalues are large
    words |= pairs
    return words.to(torch.uint8).view(torch.int32).view(rows, width // count)  # [O, words]


def unpack(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Undo `pack`.  words: [O, W] int32; returns [O, in_features] int8.

    Raises:
        SchemeError: num_bits is not 4 or 8, or W words do not hold in_features elements.
    """
    count = _elements_per_word(num_bits)
    if words.shape[1] != -(-in_features // count):
        raise SchemeError(
            f"{words.shape[1]} words of {count} elements, in_features={in_features}",
            "the packed tensor and its recorded shape disagree; the file is damaged",
        )
    rows, width = words.shape[0], words.shape[1] * count
    stored = words.flatten().view(torch.int8)
    if num_bits == 4:
        pairs = stored.view(torch.uint8).to(torch.int16)  # two elements each
        pairs |= pairs << 4
        pairs &= 0x0F0F
        stored = pairs.view(torch.int8)
    return (stored.view(rows, width)[:, :in_features] + (-128 if num_bits == 8 else -8)).contiguous()  # [O, I]
