"""Round-to-nearest on the multiple of each range that has the least squared error.

A few large weights make the step of a whole group coarse. A clip, a range cut a little short, costs
them something and gives all others a finer step; with float8, a wider range moves the points
towards the weights. The multiple that makes the sum of squared errors smallest is searched for each
scale by itself (quantflow/numerics/grid.py). It uses the weights alone and needs no statistics;
gptq does the same with errors weighted by the inputs. Where an importance matrix is given, errors
here are weighted by it too, as llama.cpp's quantizer has it. Source: Choukroun et al. 2019,
arXiv:1902.06822, which chooses ranges by the mean squared error.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.core.support import SHARED_SCALE, Supports
from quantflow.errors import SchemeError
from quantflow.numerics.block_grids import positive
from quantflow.numerics.grid import either_sign, weight_grids
from quantflow.numerics.rounding import rounded

IMPORTANCE = "importance"  # of each input, [I]; given by an importance matrix, never measured

NAME: str = "rtn_mse"
NEEDS: tuple[str, ...] = ()
BY_ROW: bool = True
VERSION: int = 2
TO_NEAREST: bool = False
ON_DEVICE: bool = True
SUPPORTS = Supports(shared_scale=SHARED_SCALE)


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
    """Round every weight to the nearest point of the grid that loses least.

    Args:
        weights: name -> [O, I], any float dtype, the linears that share an input; not modified.
        scheme: its `weights` are per channel, per group or per block.
        statistics: IMPORTANCE alone is read, [I] at least zero; without it all inputs count alike.
        scale_dtype: dtype in which the layout stores scales.
        workers: run units of rows; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: `zero_groups`, the number of scales that stand for
        zeros only.

    Raises:
        InputError: a weight is empty or holds NaN or Inf.
        SchemeError: the scheme's weights share one scale, or group_size does not divide
            in_features.
    """
    del in_place  # the signature is every algorithm's
    if scheme.weights.granularity == "per_tensor":
        raise SchemeError(
            f"scheme {scheme.name}: rtn_mse with one scale per tensor",
            "use rtn, or a scale per channel, group or block",
        )
    if not weights:
        return {}
    first = next(iter(weights.values()))
    alike = torch.ones(first.shape[-1], device=first.device)
    importance = statistics.get(IMPORTANCE, alike).to(first.device)
    sign = either_sign(scheme)
    grids = weight_grids(
        weights,
        scheme.weights,
        scale_dtype=scale_dtype,
        importance=importance,
        either_sign=sign,
        workers=workers,
    )
    return {
        name: GroupResult(weight=weight, decisions={"zero_groups": grids[name].zero_groups})
        for name, weight in rounded(
            weights, grids, scheme.weights, importance=positive(importance), workers=workers
        ).items()
    }
