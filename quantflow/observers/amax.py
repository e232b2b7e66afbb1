"""The largest magnitude of a whole tensor, from which a static symmetric scale follows."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.numerics import statistics
from quantflow.numerics.statistics import FOLDED, LARGER, Statistic

AMAX = Statistic(name="amax", fold=LARGER, cards=FOLDED, maximum_of="channel_amax")


class AmaxObserver:
    """Largest |x| seen.

    Algebra: merge is associative, commutative and idempotent, exactly; an unseen observer (amax 0)
    is neutral.

    Args:
        features: size of the last dimension of every x, or None for any.
    """

    NAME: ClassVar[str] = "amax"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(AMAX)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int | None = None) -> None:
        """Begin without samples."""
        self._features = features
        self._amax = torch.zeros((), dtype=torch.float32)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., features], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._features, observer=self.NAME)
        if rows.numel():
            self._amax = torch.maximum(self._amax, rows.abs().max())

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`."""
        self._amax = torch.maximum(self._amax, other._amax)

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return statistics.update_bytes(features, samples)

    def state(self) -> dict[str, Tensor]:
        """{"amax": [] float32}."""
        return {"amax": self._amax}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        observer = cls()
        (observer._amax,) = statistics.checked_state(
            state, {"amax": (torch.float32, ())}, observer=cls.NAME
        )
        statistics.refuse_negative(observer._amax, "amax", observer=cls.NAME)
        return observer
