"""Round-to-nearest (RTN): the baseline that every other algorithm must beat.

Uses the weights alone and reads no statistics.
Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.grid import weight_grids
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme

NEEDS: tuple[str, ...] = ()
VERSION: int = 1


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
) -> dict[str, GroupResult]:
    """Round every weight to the nearest point of its grid.

    Args:
        weights: name -> [O, I], any float dtype, the linears that share an input; not modified.
        scheme: any; its `weights` are read.
        statistics: not read.
        scale_dtype: the dtype in which the layout stores scales.

    Returns:
        name -> the quantized weight; decisions: `zero_groups`, how many scales stand for zeros only.

    Raises:
        InputError: a weight is empty or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    del statistics  # the signature is every algorithm's
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype)
    results = {}
    for name, weight in weights.items():
        grid, columns = grids[name], weight.shape[1]
        scale = groups.expand(grid.scale, columns)  # [O or 1, I]
        zero_point = None if grid.zero_point is None else groups.expand(grid.zero_point, columns)
        qvalue = affine.quantize(weight, scale, zero_point, scheme.weights)
        results[name] = GroupResult(
            weight=QTensor(qvalue=qvalue, scale=grid.scale, zero_point=grid.zero_point, scheme=scheme.weights),
            decisions={"zero_groups": grid.zero_groups},
        )
    return results
