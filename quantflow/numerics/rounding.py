"""Weights rounded to the nearest points of their grids, a few rows at a time."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor, qvalue_dtype
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.grid import Grid


def rounded(
    weights: Mapping[str, Tensor],
    grids: Mapping[str, Grid],
    scheme: TensorScheme,
    *,
    importance: Tensor | None = None,
    workers: Workers = SEQUENTIAL,
) -> dict[str, QTensor]:
    """The weights of a group, rounded to nearest.

    Args:
        weights: name -> [O, I], any float dtype, finite; not modified. `groups.row_units` of them
            are converted at a time.
        grids: name -> grid of the weight for this scheme, from `weight_grids`.
        scheme: any.
        importance: [I], positive; it matters to the entries of a codebook alone. None counts all
            inputs alike.
        workers: run units of rows; how many there are changes nothing but the time.
    """
    dtype = qvalue_dtype(scheme)
    qvalues = {
        name: torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        for name, weight in weights.items()
    }

    def quantize(unit: tuple[str, slice]) -> None:
        name, rows = unit
        scale, zero_point = grids[name].rows(rows)
        # [O, G, g]
        split = groups.to_groups(
            weights[name][rows].float(), weights[name].shape[1] // scale.shape[1]
        )
        zero_point = None if zero_point is None else zero_point[..., None]
        matters = None if importance is None else importance.view(split.shape[1:])  # [G, g]
        qvalues[name][rows] = affine.quantize(
            split, scale[..., None], zero_point, scheme, importance=matters
        ).flatten(1)

    workers.map(
        quantize,
        [(name, rows) for name, weight in weights.items() for rows in groups.row_units(weight)],
    )
    return {
        name: QTensor(
            qvalue=qvalues[name],
            scale=grid.scale,
            zero_point=grid.zero_point,
            scheme=scheme,
            global_scale=grid.global_scale,
        )
        for name, grid in grids.items()
    }
