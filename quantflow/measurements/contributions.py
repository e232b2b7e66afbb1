"""Which rank decided each merged maximum, and which rank looks unlike the others."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from quantflow.measurements.keys import parse_key
from quantflow.measurements.record import Measurement

OUTLIER_RATIO = 8.0


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A rank that saw far larger values than the others of its group.

    Attributes:
        key: `<source name>|<site>|amax`.
        rank: the rank.
        amax: what it saw.
        median: the lower median over the group.
    """

    key: str
    rank: int
    amax: float
    median: float


def contributions(measurements: Iterable[Measurement]) -> dict[str, int]:
    """Return which rank set each amax: `<source name>|<site>|amax` -> rank, the lowest where several did."""
    return {key: min(seen, key=lambda rank: (-seen[rank], rank)) for key, seen in _amax(measurements).items()}


def outliers(measurements: Iterable[Measurement]) -> list[Outlier]:
    """Return the ranks whose amax is OUTLIER_RATIO times the median of these measurements or more.

    Such a rank decides the scale of its whole group. A tensor that half of the ranks or more never saw (median 0) has
    no scale to compare with and is left out.

    Args:
        measurements: those of one group.
    """
    found: list[Outlier] = []
    for key, seen in _amax(measurements).items():
        middle = median_low(seen.values())
        found += [
            Outlier(key=key, rank=rank, amax=amax, median=middle)
            for rank, amax in seen.items()
            if middle > 0 and amax >= OUTLIER_RATIO * middle
        ]
    return found


def _amax(measurements: Iterable[Measurement]) -> dict[str, dict[int, float]]:
    """Return `<source name>|<site>|amax` -> rank -> amax, both sorted."""
    seen: dict[str, dict[int, float]] = {}
    for measurement in sorted(measurements, key=lambda one: int(one.meta["mesh"]["rank"])):
        for key, value in sorted(measurement.statistics.items()):
            if parse_key(key).statistic == "amax":
                seen.setdefault(key, {})[measurement.meta["mesh"]["rank"]] = value.item()
    return seen
