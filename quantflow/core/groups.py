"""Groups of input features that share a scale, and units of rows that are processed at once."""

import torch
from torch import Tensor

from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

# elements of a unit of elementwise work: 1 MiB of float32, which a core's cache holds
UNIT_ELEMENTS = 1 << 18
# Units that a device other than the CPU takes as one. It is parallel inside, and a small unit
# leaves it idle.
AT_ONCE = 16


def spans(stop: int, length: int, *, start: int = 0) -> list[slice]:
    """The range start..stop in pieces of `length`, the last one shorter."""
    return [slice(first, min(first + length, stop)) for first in range(start, stop, length)]


def row_units(weight: Tensor, *, multiple: int = 1) -> list[slice]:
    """The rows of a weight [O, I] in units of about UNIT_ELEMENTS elements.

    A unit has at least `multiple` rows. Off the CPU it is as large as `AT_ONCE` of these.
    """
    elements = UNIT_ELEMENTS * at_once(weight.device)
    return spans(weight.shape[0], max(1, elements // weight.shape[1] // multiple) * multiple)


def at_once(device: torch.device) -> int:
    """The number of units that a device takes as one.

    It is AT_ONCE, and 1 on the CPU, whose workers take one each.
    """
    return 1 if device.type == "cpu" else AT_ONCE


def unit_bytes(columns: int) -> int:
    """The bytes of one unit of elementwise work: its float32 values, and five copies of them."""
    return 6 * 4 * max(UNIT_ELEMENTS, columns)


COMMON_SIZES = (128, 64, 32)  # group sizes that runtimes have kernels for


def group_size_for(scheme: TensorScheme, in_features: int, *, name: str = "weight") -> int:
    """The number of input features of a row that share a scale.

    Raises:
        SchemeError: the scheme's group_size does not divide in_features.
    """
    if scheme.group_size is None:
        return in_features
    if in_features % scheme.group_size:
        fitting = [str(size) for size in COMMON_SIZES if in_features % size == 0]
        choice = f"use {' or '.join(fitting)}" if fitting else f"choose a divisor of {in_features}"
        why = ""
        if scheme.granularity == "per_block":
            why = (
                "; a last block may have fewer rows, but not fewer columns: compressed-tensors and "
                "vLLM round inputs in whole groups"
            )
            choice = "choose a scheme without blocks, such as FP8_DYNAMIC"
        raise SchemeError(
            f"{name}: in_features={in_features} is not a multiple of "
            f"group_size={scheme.group_size}{why}",
            f"{choice}, or list the layer under `ignore`",
        )
    if scheme.block is not None and in_features % scheme.block.elements:
        raise SchemeError(
            f"{name}: in_features={in_features} is not a multiple of {scheme.block.elements}, a "
            f"block of {scheme.block_type}",
            "choose a type of smaller blocks, such as Q4_0, or list the layer under `ignore`",
        )
    return scheme.group_size


def to_groups(weight: Tensor, group_size: int) -> Tensor:
    """The columns of a weight [O, I] in groups, [O, G, g]; a view."""
    return weight.reshape(weight.shape[0], weight.shape[1] // group_size, group_size)  # [O, G, g]


def expand_rows(per_block: Tensor, block_rows: int, rows: int) -> Tensor:
    """A value per block, repeated over the block's rows: [ceil(O / block_rows), G] -> [O, G].

    The last block may have fewer rows.
    """
    return per_block.repeat_interleave(block_rows, dim=0)[:rows]  # [O, G]


def expand(per_group: Tensor, in_features: int) -> Tensor:
    """A value per group, repeated over the columns of its group.

    Args:
        per_group: [O or 1, G].
        in_features: I, a multiple of G.

    Returns:
        [O or 1, I].
    """
    return per_group.repeat_interleave(in_features // per_group.shape[1], dim=1)  # [O, I]
