"""Bit packing: rows of small integers into rows of 32-bit words, as the pack-quantized layout stores them.

Element i of a row stands at bits i * num_bits of the row, lowest bits first, as the unsigned number
qvalue + 2 ** (num_bits - 1). The last word of a row is filled up with zero bits.

    num_bits 4:   word = e0 | e1 << 4 | e2 << 8 | ... | e7 << 28
    num_bits 8:   word = e0 | e1 << 8 | e2 << 16 | e3 << 24
"""

import torch
from torch import Tensor
from torch.nn import functional

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
    # Python integers: compared with an int8 tensor, 128 itself would wrap to -128.
    low, high = (qvalue.min().item(), qvalue.max().item()) if qvalue.numel() else (0, 0)
    if low < -offset or high >= offset:
        raise SchemeError(
            f"qvalue spans {low}..{high}, {num_bits} bits hold {-offset}..{offset - 1}",
            "quantize with the same num_bits",
        )
    unsigned = qvalue.to(torch.int64) + offset
    unsigned = functional.pad(unsigned, (0, -unsigned.shape[1] % count))
    elements = unsigned.reshape(unsigned.shape[0], unsigned.shape[1] // count, count)  # [O, words, elements]
    shifts = torch.arange(count, dtype=torch.int64, device=qvalue.device) * num_bits
    words = (elements << shifts).sum(dim=-1)  # disjoint bits, so the sum is their union
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)  # [O, words]


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
    shifts = torch.arange(count, dtype=torch.int32, device=words.device) * num_bits
    unsigned = (words[..., None] >> shifts) & ((1 << num_bits) - 1)  # [O, W, elements]
    rows = unsigned.flatten(1)[:, :in_features]
    return (rows - (1 << (num_bits - 1))).to(torch.int8)  # [O, I]
