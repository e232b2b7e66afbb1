"""How the kernels' operands lie in memory, and how a product is cut into programs."""

import torch
from torch import Tensor

PROGRAMS = 256  # about two for each multiprocessor of a large card
WARPS = 4
STAGES = (
    2 if torch.version.hip else 3
)  # loads under way at once; an AMD card has less memory for it


def packed(codes: Tensor, block: int) -> Tensor:
    """Codes two to a byte, as the kernel reads them.

    Args:
        codes: [O, I] uint8, 0..15.
        block: columns of a step, which divides I.

    Returns:
        [O, I / 2] uint8.
    """
    halves = codes.view(codes.shape[0], -1, 2, block // 2)  # [O, steps, 2, block / 2]
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)  # [O, I / 2]


def unpacked(words: Tensor, block: int) -> Tensor:
    """The codes of `packed`, [O, I] uint8."""
    halves = words.view(words.shape[0], -1, block // 2)  # [O, steps, block / 2]
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)  # [O, I]


def sizes(tokens: int, rows: int, steps: int) -> tuple[int, int, int]:
    """(tokens, outputs of a program, shares of the columns) of a shape."""
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_n = 32 if tokens <= 32 else 64
    programs = -(-rows // block_n) * -(-tokens // block_m)
    return block_m, block_n, max(1, min(steps, PROGRAMS // programs))
