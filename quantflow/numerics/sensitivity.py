"""Expected KL divergence of the whole model from rounding one weight, by Fisher information.

Near the original model a change e [O, I] of a weight changes the output of token t by e x_t, and
the divergence of all tokens by about 1/2 sum_t sum_o g_to^2 (e_o x_t)^2, where g is the gradient of
the model's own loss by the output. Two assumptions follow. Rounding errors of different columns are
independent. The sum over tokens of g_o^2 x_i^2 is the product of a factor per row and one per
column, whose sums over rows and columns were measured (`quantflow.observers.fisher`). Then

    divergence  ~  1/2 sum_oi e_oi^2 F_o A_i / mean(F)      in nats, over all tokens

Source: LeCun et al. 1990, "Optimal brain damage"; Dong et al. 2019, arXiv:1911.03852 (HAWQ-V2),
which chooses bits of layers by second derivatives times squared rounding errors.
"""

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.scheme import TensorScheme
from quantflow.errors import StatisticsError
from quantflow.numerics.block_grids import positive
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded

# Evenly spaced rows that stand for all: enough for a sum over rows; part of the result.
ROWS = 512


def sampled_rows(count: int, *, most: int = ROWS, device: torch.device | None = None) -> Tensor:
    """Indices of the rows that stand for all `count`, int64 [at most `most`], ascending.

    They lie on `device`; None is the host.
    """
    number = min(count, most)
    return torch.arange(number, device=device) * count // number


def predicted_divergence(
    weight: Tensor,
    scheme: TensorScheme,
    *,
    name: str,
    row_factors: Tensor,
    column_factors: Tensor,
    scale_dtype: torch.dtype,
    either_sign: bool = False,
    most: int = ROWS,
) -> float:
    """The expected divergence over all tokens from rounding a weight to nearest, in nats.

    Args:
        weight: [R, I], the `sampled_rows` of a weight [O, I], any float dtype.
        scheme: int, per channel or per group.
        name: linear's name, for messages.
        row_factors: [O], the sum over tokens of the squared gradient by each output.
        column_factors: [I], the sum over tokens of each squared input times the mean squared
            gradient of the token.
        scale_dtype: dtype in which the layout stores scales.
        either_sign: whether scales may be negative (`quantflow.numerics.grid.either_sign`).
        most: rows that stand for all, as `sampled_rows` has it.

    Raises:
        StatisticsError: the factors do not belong to the weight.
        InputError: the weight is empty or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    rows = sampled_rows(row_factors.numel(), most=most)
    if weight.shape != (rows.numel(), column_factors.numel()):
        raise StatisticsError(
            f"{name}: weight is {list(weight.shape)}, its factors are [{row_factors.numel()}] "
            f"and [{column_factors.numel()}]",
            "measure this model",
        )
    chosen = row_factors[rows]
    if not chosen.sum() > 0 or not column_factors.sum() > 0:
        return 0.0
    # damped, as in gptq: an unseen channel still matters a little
    importance = column_factors / column_factors.mean() + 0.01
    grids = weight_grids(
        {name: weight},
        scheme,
        scale_dtype=scale_dtype,
        importance=importance,
        either_sign=either_sign,
    )
    nearest = rounded({name: weight}, grids, scheme, importance=positive(importance))[name]
    error = nearest.dequantize() - weight.float()  # [R, I]
    total = torch.zeros((), dtype=torch.float64)
    for part in groups.row_units(error):
        total += (error[part].double().square() @ column_factors.double()) @ chosen[part].double()
    whole = row_factors.sum() / chosen.sum()  # from the sampled rows to all rows
    return float(0.5 * total * whole / row_factors.mean())
