"""Round-to-nearest (RTN): the baseline that every other algorithm must beat.

It uses the weights alone and reads no statistics. Source: Jacob et al. 2018, arXiv:1712.05877,
section 2.1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.core.support import EVERYTHING
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded

NAME: str = "rtn"
NEEDS: tuple[str, ...] = ()
BY_ROW: bool = True
VERSION: int = 1
TO_NEAREST: bool = True
ON_DEVICE: bool = True
SUPPORTS = EVERYTHING


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """The most memory that `quantize_group` takes, in bytes: a unit for each worker.

    Weights and results are not counted.

    Args:
        features: in_features of the group.
        rows: not read; the signature is every algorithm's.
        workers: number of workers.
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
        scale_dtype: dtype in which the layout stores scales.
        workers: run units of rows; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: `zero_groups`, the number of scales that stand for
        zeros only.

    Raises:
        InputError: a weight is empty or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    del statistics, in_place  # the signature is every algorithm's
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, workers=workers)
    return {
        name: GroupResult(weight=weight, decisions={"zero_groups": grids[name].zero_groups})
        for name, weight in rounded(weights, grids, scheme.weights, workers=workers).items()
    }
