"""The mean square of each channel; of a gradient it is the diagonal of the Fisher information.

The gradient is that of the loss by a linear's output.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.numerics import statistics
from quantflow.numerics.statistics import ADDED, COUNT, JOINED, Statistic, part_of, per_channel

# Rows whose float64 copy a core's cache holds. Part of the result's last digits, because it orders
# the sum.
_ROWS_AT_ONCE = 32


SQUARE_SUM = Statistic(
    name="square_sum", fold=ADDED, cards=JOINED, dtype=torch.float64, shape=per_channel, cut=part_of
)


class FisherObserver:
    """Sum of squares of each channel, in float64, and the number of samples.

    It takes two tensors of a linear: the gradient of the loss by its output, [..., O], and its
    input, each token of it times the root mean square of that gradient, [..., I]. Rounding errors e
    [O, I] of the weight then cost, summed over the tokens, about 1/2 sum_oi e_oi^2 F_o A_i /
    mean(F) nats, with F and A the two sums. This takes the mean of g_o^2 x_i^2 over tokens to be a
    product of one factor per row and one per column, which the sums over rows and over columns
    determine.

    Algebra: merge is commutative, and associative up to rounding in float64: fold in a fixed tree.
    The count is exact. An unseen observer is neutral. Not idempotent: samples merged twice count
    twice. Source: the diagonal of the Fisher information as a weight of squared errors is Optimal
    Brain Damage's (LeCun et al. 1990); one factor per row and one per column is K-FAC's (Martens,
    Grosse 2015, arXiv:1503.05671), here of diagonals.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "fisher"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(SQUARE_SUM, COUNT)
    SITES: ClassVar[tuple[str, ...]] = ("gradient", "guided_input")

    def __init__(self, features: int) -> None:
        """Begin without samples."""
        self._square_sum = torch.zeros(features, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., C], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._square_sum.numel(), observer=self.NAME)
        for part in groups.spans(rows.shape[0], _ROWS_AT_ONCE * groups.at_once(rows.device)):
            self._square_sum = self._square_sum + rows[part].double().square().sum(dim=0)
        self._count = self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(
            self._square_sum.shape, other._square_sum.shape, observer=self.NAME
        )
        self._square_sum = self._square_sum + other._square_sum
        self._count = self._count + other._count

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return statistics.update_bytes(features, samples)

    def state(self) -> dict[str, Tensor]:
        """{"square_sum": [C] float64, "count": [] int64}."""
        return {"square_sum": self._square_sum, "count": self._count}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"square_sum": (torch.float64, (None,)), "count": (torch.int64, ())}
        square_sum, count = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(square_sum, "square_sum", observer=cls.NAME)
        statistics.refuse_negative(count, "count", observer=cls.NAME)
        observer = cls(square_sum.numel())
        observer._square_sum, observer._count = square_sum, count
        return observer
