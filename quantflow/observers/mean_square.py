"""The mean square of each input feature: the Hessian's diagonal, C values in place of C x C."""

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


POWER_SUM = Statistic(
    name="power_sum", fold=ADDED, cards=JOINED, dtype=torch.float64, shape=per_channel, cut=part_of
)


class MeanSquareObserver:
    """Sum of x^2 in each feature, in float64, and the number of samples.

    It is llama.cpp's importance of an input.

    Algebra: merge is commutative, and associative up to rounding in float64: fold in a fixed tree.
    The count is exact. An unseen observer is neutral. Not idempotent: samples merged twice count
    twice.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "mean_square"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(POWER_SUM, COUNT)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int) -> None:
        """Begin without samples."""
        self._power_sum = torch.zeros(features, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., C], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._power_sum.numel(), observer=self.NAME)
        for part in groups.spans(rows.shape[0], _ROWS_AT_ONCE * groups.at_once(rows.device)):
            self._power_sum = self._power_sum + rows[part].double().square().sum(dim=0)
        self._count = self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(
            self._power_sum.shape, other._power_sum.shape, observer=self.NAME
        )
        self._power_sum = self._power_sum + other._power_sum
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
        """{"power_sum": [C] float64, "count": [] int64}."""
        return {"power_sum": self._power_sum, "count": self._count}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"power_sum": (torch.float64, (None,)), "count": (torch.int64, ())}
        power_sum, count = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(power_sum, "power_sum", observer=cls.NAME)
        statistics.refuse_negative(count, "count", observer=cls.NAME)
        observer = cls(power_sum.numel())
        observer._power_sum, observer._count = power_sum, count
        return observer
