"""The number of samples: for an expert of a mixture, of tokens that the router sent to it."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.numerics import statistics
from quantflow.numerics.statistics import COUNT, Statistic


class CountObserver:
    """The number of rows, whatever they hold.

    Algebra: merge is associative and commutative, exactly; an unseen observer (0) is neutral. Not
    idempotent: samples merged twice count twice.

    Args:
        features: size of the last dimension of every x, or None for any.
    """

    NAME: ClassVar[str] = "count"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(COUNT)
    SITES: ClassVar[tuple[str, ...]] = ("routed",)

    def __init__(self, features: int | None = None) -> None:
        """Begin without samples."""
        self._features = features
        self._count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., features], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        self._count = (
            self._count + statistics.finite_rows(x, self._features, observer=self.NAME).shape[0]
        )

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`."""
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
        """{"count": [] int64}."""
        return {"count": self._count}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        observer = cls()
        (observer._count,) = statistics.checked_state(
            state, {"count": (torch.int64, ())}, observer=cls.NAME
        )
        statistics.refuse_negative(observer._count, "count", observer=cls.NAME)
        return observer
