"""Counts of each magnitude, from which a scale that clips outliers follows.

The edges are fixed: every binade from 2^-40 to 2^24 is cut into 8 equal parts, so edge k is 2^(k //
8 - 40) * (1 + (k % 8) / 8). Bin 0 holds everything below 2^-40, zero included; the last bin
everything from 2^24 on. A value on an edge belongs to the bin above it. The bin of a float32 is
then its exponent and the top three bits of its mantissa: no logarithm, hence no rounding, and the
same bin on every machine.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics import statistics
from quantflow.numerics.statistics import ADDED, FOLDED, Statistic

LOWEST_EXPONENT = -40
HIGHEST_EXPONENT = 24
PARTS_PER_BINADE = 8
BINS = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * PARTS_PER_BINADE + 2

# Elements at once, which a core's cache holds; counts are exact, so it changes only the time.
_AT_ONCE = 1 << 17
_MANTISSA_BITS_DROPPED = 23 - PARTS_PER_BINADE.bit_length() + 1
_FIRST_CODE = (127 + LOWEST_EXPONENT) * PARTS_PER_BINADE  # exponent and top mantissa bits of 2^-40


def upper_edge(index: int) -> float:
    """The upper edge of bin `index`, exactly; inf for the last bin."""
    if index == BINS - 1:
        return math.inf
    binade, part = divmod(index, PARTS_PER_BINADE)
    return math.ldexp(1 + part / PARTS_PER_BINADE, LOWEST_EXPONENT + binade)


COUNTS = Statistic(
    name="counts", fold=ADDED, cards=FOLDED, dtype=torch.int64, shape=lambda _: (BINS,)
)


class HistogramObserver:
    """Counts of |x| of a whole tensor in fixed bins.

    Algebra: merge is associative and commutative, exactly; an unseen observer (zeros) is neutral.
    Not idempotent: samples merged twice count twice.

    Args:
        features: size of the last dimension of every x, or None for any.
    """

    NAME: ClassVar[str] = "histogram"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(COUNTS)
    SITES: ClassVar[tuple[str, ...]] = ("input",)

    def __init__(self, features: int | None = None) -> None:
        """Begin without samples."""
        self._features = features
        self._counts = torch.zeros(BINS, dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., features], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._features, observer=self.NAME)
        values = rows.flatten()
        for part in groups.spans(values.numel(), _AT_ONCE * groups.at_once(values.device)):
            bins = values[part].abs().view(torch.int32)
            bins >>= _MANTISSA_BITS_DROPPED
            bins.sub_(_FIRST_CODE - 1).clamp_(0, BINS - 1)
            self._counts = self._counts + torch.bincount(bins, minlength=BINS)

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`."""
        self._counts = self._counts + other._counts

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return statistics.update_bytes(features, samples)

    def state(self) -> dict[str, Tensor]:
        """{"counts": [BINS] int64}."""
        return {"counts": self._counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        observer = cls()
        (observer._counts,) = statistics.checked_state(
            state, {"counts": (torch.int64, (BINS,))}, observer=cls.NAME
        )
        statistics.refuse_negative(observer._counts, "counts", observer=cls.NAME)
        return observer

    def points(self) -> tuple[Tensor, Tensor]:
        """Magnitudes that stand for the samples, ascending, and the number that each stands for.

        There are four at equal distances in every bin, [4 * (BINS - 2) + 1] float32 and float64
        each. Values below the first edge count as zero; values beyond the last edge are left out.
        """
        edges = torch.tensor([upper_edge(index) for index in range(BINS - 1)])
        low, width = edges[:-1, None], edges.diff()[:, None]
        inside = (low + width * (torch.arange(4) + 0.5) / 4).flatten()
        counts = self._counts[1:-1].double().repeat_interleave(4) / 4
        return torch.cat([torch.zeros(1), inside]), torch.cat([self._counts[:1].double(), counts])

    def percentile(self, q: float) -> float:
        """A magnitude that at least q percent of the values do not exceed; 0 when unseen.

        It is the upper edge of the bin that holds the exact percentile p (the smallest value with
        at least q percent of all values at or below it): p < result <= 9/8 * p for p of 2^-40 or
        more, and result = 2^-40 for a smaller p.

        Args:
            q: percent, 0 to 100.

        Raises:
            UsageError: q is not between 0 and 100.
            StatisticsError: the percentile lies beyond the last edge, 2^24.
        """
        if not 0 <= q <= 100:
            raise UsageError(
                f"percentile {q} is not within 0..100", "give it in percent, such as 99.9"
            )
        total = int(self._counts.sum())
        if total == 0:
            return 0.0
        # the decimal number as written: 99.9 is no exact float
        rank = max(1, math.ceil(total * Fraction(str(q)) / 100))
        edge = upper_edge(int((self._counts.cumsum(0) < rank).sum()))
        if math.isinf(edge):
            raise StatisticsError(
                f"{self.NAME}: percentile {q} lies beyond the last edge, 2^{HIGHEST_EXPONENT}",
                "use amax, or a smaller q",
            )
        return edge
