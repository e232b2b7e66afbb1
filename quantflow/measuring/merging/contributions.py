"""The rank that set a merged maximum, and ranks that look unlike the others of their group."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

OUTLIER_RATIO = 8.0


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A rank that saw far larger values than the others of its group.

    Attributes:
        key: `<source name>|<site>|amax`.
        rank: number of the rank.
        amax: its maximum.
        median: the lower median over the group.
    """

    key: str
    rank: int
    amax: float
    median: float


def contributor(seen: Mapping[int, float]) -> int:
    """The rank that saw the largest value, the lowest where several did.

    Args:
        seen: rank -> amax.
    """
    return min(seen, key=lambda rank: (-seen[rank], rank))


def outliers(key: str, seen: Mapping[int, float]) -> list[Outlier]:
    """The ranks whose amax is OUTLIER_RATIO times the group's median or more.

    Such a rank decides the scale of its whole group. A tensor that half of the ranks or more never
    saw (median 0) has no scale to compare with and is left out.

    Args:
        key: `<source name>|<site>|amax`.
        seen: rank -> amax, of one group.
    """
    middle = median_low(seen.values())
    return [
        Outlier(key=key, rank=rank, amax=amax, median=middle)
        for rank, amax in sorted(seen.items())
        if middle > 0 and amax >= OUTLIER_RATIO * middle
    ]
