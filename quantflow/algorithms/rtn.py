"""Round-to-nearest (RTN): the baseline that every other algorithm must beat.

Uses the weights alone and reads no statistics.
Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import affine, float8, groups
from quantflow.core.grid import weight_grids
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme

NEEDS: tuple[str, ...] = ()
VERSION: int = 1


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """Return the most memory that `quantize_group` takes beyond weights and results, in bytes: a unit for each worker.

    Args:
        features: in_features of the group.
        rows: not read; the signature is every algorithm's.
        workers: how many.
        in_place: not read.
    """
    del rows, in_place
    return workers * groups.unit_bytes(features)


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> dict[str, GroupResult]:
    """Round every weight to the nearest point of its grid.

    Args:
        weights: name -> [O, I], any float dtype, the linears that share an input; not modified.
        scheme: any; its `weights` are read.
        statistics: not read.
        scale_dtype: the dtype in which the layout stores scales.
        workers: run units of rows; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: `zero_groups`, how many scales stand for zeros only.

    Raises:
        InputError: a weight is empty or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    del statistics, in_place  # the signature is every algorithm's
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, workers=workers)
    dtype = float8.FLAVOURS[scheme.weights.float8].dtype if scheme.weights.kind == "float" else torch.int8
    qvalues = {
        name: torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format) for name, weight in weights.items()
    }

    def quantize(unit: tuple[str, slice]) -> None:
        name, rows = unit
        scale, zero_point = grids[name].rows(rows)
        split = groups.to_groups(weights[name][rows].float(), weights[name].shape[1] // scale.shape[1])  # [O, G, g]
        zero_point = None if zero_point is None else zero_point[..., None]
        qvalues[name][rows] = affine.quantize(split, scale[..., None], zero_point, scheme.weights).flatten(1)

    workers.map(quantize, [(name, rows) for name, weight in weights.items() for rows in groups.row_units(weight)])
    return {
        name: GroupResult(
            weight=QTensor(qvalue=qvalues[name], scale=grid.scale, zero_point=grid.zero_point, scheme=scheme.weights),
            decisions={"zero_groups": grid.zero_groups},
        )
        for name, grid in grids.items()
    }
