"""The range of each input feature, widened to hold zero, from which an asymmetric scale follows.

It is per feature and not per tensor, so that smoothing can still be applied to it; the tensor's
range is its reduction.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.numerics import statistics
from quantflow.numerics.statistics import JOINED, LARGER, SMALLER, Statistic, part_of, per_channel

MIN_VAL = Statistic(
    name="min_val", fold=SMALLER, cards=JOINED, shape=per_channel, cut=part_of, negative=True
)
MAX_VAL = Statistic(name="max_val", fold=LARGER, cards=JOINED, shape=per_channel, cut=part_of)


class MinMaxObserver:
    """Smallest and largest x seen in each feature, never above and never below zero respectively.

    Quantization widens a range to hold zero anyway (zero must be exact); doing it here makes an
    unseen observer neutral.

    Algebra: merge is associative, commutative and idempotent, exactly; an unseen observer (zeros)
    is neutral.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "min_max"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(MIN_VAL, MAX_VAL)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int) -> None:
        """Begin without samples."""
        self._min_val = torch.zeros(features, dtype=torch.float32)
        self._max_val = torch.zeros(features, dtype=torch.float32)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., C], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._min_val.numel(), observer=self.NAME)
        if rows.numel():
            # torch.aminmax(dim=0) is ten times slower than both
            low, high = rows.amin(dim=0), rows.amax(dim=0)
            # + 0.0 makes -0.0 into 0.0: which of the two a minimum returns depends on the order,
            # and files are compared.
            self._min_val = torch.minimum(self._min_val, low) + 0.0
            self._max_val = torch.maximum(self._max_val, high) + 0.0

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(self._min_val.shape, other._min_val.shape, observer=self.NAME)
        self._min_val = torch.minimum(self._min_val, other._min_val)
        self._max_val = torch.maximum(self._max_val, other._max_val)

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return statistics.update_bytes(features, samples)

    def state(self) -> dict[str, Tensor]:
        """{"min_val": [C] float32, at most 0, "max_val": [C] float32, at least 0}."""
        return {"min_val": self._min_val, "max_val": self._max_val}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"min_val": (torch.float32, (None,)), "max_val": (torch.float32, (None,))}
        min_val, max_val = statistics.checked_state(state, expected, observer=cls.NAME)
        if (min_val > 0).any() or (max_val < 0).any():
            raise StatisticsError(
                f"{cls.NAME}: min_val up to {min_val.max().item()}, max_val down to "
                f"{max_val.min().item()}, the range holds 0",
                "measure again",
            )
        observer = cls(min_val.numel())
        observer._min_val, observer._max_val = min_val, max_val
        return observer
