"""The largest magnitude of each input feature, which SmoothQuant balances against the weights."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.numerics import statistics
from quantflow.numerics.statistics import JOINED, LARGER, Statistic, part_of, per_channel

CHANNEL_AMAX = Statistic(
    name="channel_amax", fold=LARGER, cards=JOINED, shape=per_channel, cut=part_of
)


class ChannelAmaxObserver:
    """Largest |x| seen in each feature.

    Algebra: merge is associative, commutative and idempotent, exactly; an unseen observer (zeros)
    is neutral.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "channel_amax"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(CHANNEL_AMAX)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int) -> None:
        """Begin without samples."""
        self._channel_amax = torch.zeros(features, dtype=torch.float32)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., C], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._channel_amax.numel(), observer=self.NAME)
        if rows.numel():
            self._channel_amax = torch.maximum(self._channel_amax, rows.abs().amax(dim=0))

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(
            self._channel_amax.shape, other._channel_amax.shape, observer=self.NAME
        )
        self._channel_amax = torch.maximum(self._channel_amax, other._channel_amax)

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return statistics.update_bytes(features, samples)

    def state(self) -> dict[str, Tensor]:
        """{"channel_amax": [C] float32}."""
        return {"channel_amax": self._channel_amax}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"channel_amax": (torch.float32, (None,))}
        (channel_amax,) = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(channel_amax, "channel_amax", observer=cls.NAME)
        observer = cls(channel_amax.numel())
        observer._channel_amax = channel_amax
        return observer
