"""Whether the codes of a quantized weight and its zero points stand in one order.

Codes and zero points in different orders are damage that no tensor's shape or range shows.
"""

import torch
from torch import Tensor

from quantflow.core.groups import to_groups
from quantflow.core.qtensor import QuantizedLinear
from quantflow.errors import InputError

LEAST_GROUPS = 256  # groups that a weight needs before their correlation says anything
# The correlation of mean codes and zero points is above 0.5 for a rounded weight, near 0 for
# shuffled groups.
LEAST_CORRELATION = 0.2


def require_one_order(name: str, linear: QuantizedLinear) -> None:
    """Refuse a weight whose codes and zero points stand in different orders.

    A group's zero point is where 0 lies among its codes, and a weight's groups have means near 0:
    over many groups mean codes follow zero points.

    Raises:
        InputError: they do not.
    """
    weight = linear.weight
    if (
        weight.zero_point is None
        or weight.scheme.minima
        or weight.zero_point.numel() < LEAST_GROUPS
    ):
        return
    split = to_groups(weight.qvalue, weight.qvalue.shape[1] // weight.scale.shape[1])  # [O, G, g]
    means = split.mean(dim=-1, dtype=torch.float32).flatten()  # [O * G]
    zeros = weight.zero_point.float().flatten()  # [O * G]
    if float(zeros.std()) < 0.5 or float(means.std()) == 0:  # nearly symmetric: they say nothing
        return
    correlation = _correlation(means, zeros)
    if correlation < LEAST_CORRELATION:
        cause = (
            f"{name}: codes and zero points of {zeros.numel()} groups do not belong together "
            f"(correlation {correlation:.2f})"
        )
        raise InputError(
            cause,
            "its nibbles are in another order, or its tensors of two models: download the folder "
            "again",
        )


def _correlation(left: Tensor, right: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1])
