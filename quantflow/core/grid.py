"""The grid that a weight is rounded to: its scales and zero points, from the range of the original weight.

Linears that share an input share their per-tensor scale, so that an engine may fuse them (q/k/v, gate/up).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.scheme import TensorScheme
from quantflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The scale and zero_point of one weight, as `QTensor` holds them.

    Attributes:
        scale: [O or 1, G] float32, as it reads back from the dtype that its layout stores.
        zero_point: as scale, int8; None when symmetric.
        zero_groups: how many scales stand for zeros only; these scales are 1.
    """

    scale: Tensor
    zero_point: Tensor | None
    zero_groups: int


def weight_grids(weights: Mapping[str, Tensor], scheme: TensorScheme, *, scale_dtype: torch.dtype) -> dict[str, Grid]:
    """Return the grid of every weight of a group.

    Args:
        weights: name -> [O, I], any float dtype; not modified.
        scheme: per_tensor, per_channel or per_group.
        scale_dtype: the dtype in which the layout stores scales.

    Raises:
        InputError: a weight is empty, not two-dimensional, or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    ranges = {name: _range(name, weight, scheme=scheme) for name, weight in weights.items()}
    if scheme.granularity == "per_tensor" and ranges:
        low = torch.stack([low.min() for low, _ in ranges.values()]).min().reshape(1, 1)
        high = torch.stack([high.max() for _, high in ranges.values()]).max().reshape(1, 1)
        ranges = dict.fromkeys(ranges, (low, high))
    return {name: _grid(low, high, scheme=scheme, scale_dtype=scale_dtype) for name, (low, high) in ranges.items()}


def _range(name: str, weight: Tensor, *, scheme: TensorScheme) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each group, each [O, G] float32."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise InputError(f"{name}: weight is {list(weight.shape)}, [O, I] is needed", "list the layer under `ignore`")
    size = groups.group_size_for(scheme, weight.shape[1], name=name)
    low, high = torch.aminmax(groups.to_groups(weight.float(), size), dim=-1)
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise InputError(f"{name}: weight holds NaN or Inf", "the checkpoint is damaged; download it again")
    return low, high


def _grid(low: Tensor, high: Tensor, *, scheme: TensorScheme, scale_dtype: torch.dtype) -> Grid:
    amax = torch.maximum(high, -low)
    zero_groups = int((amax == 0).sum())
    if scheme.symmetric:
        scale = affine.stored(affine.scale_from_amax(amax, scheme), scale_dtype)
        return Grid(scale=scale, zero_point=None, zero_groups=zero_groups)
    scale, _ = affine.scale_and_zero_point_from_range(low, high, scheme)
    scale = affine.stored(scale, scale_dtype)
    # The zero_point follows the scale that a loader will see, not the one before its rounding.
    zero_point = affine.zero_point_for(low.clamp_max(0), scale, scheme)
    return Grid(scale=scale, zero_point=zero_point, zero_groups=zero_groups)
