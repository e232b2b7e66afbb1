"""Names of statistics in a file, `<source name>|<site>|<statistic>`, and the observers they belong to.

Statistics with one value per channel are of the last dimension of what flowed at the site, and of a
weight's rows, its output features; at HEADS they are of each key/value head.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.observers import OBSERVERS, STATISTICS, Observer

Item = TypeVar("Item")
# what the caches store once more, with heads in the place of features
HEADS = ("k_heads", "v_heads")
# query and k_cache after RoPE; routed: the tokens that a router sent to an expert, whatever else
# the expert was shown; gradient: of the loss, by the output; guided_input: the input, each token of
# it times the root mean square of that gradient.
SITES = (
    "input",
    "output",
    "weight",
    "query",
    "k_cache",
    "v_cache",
    *HEADS,
    "routed",
    "gradient",
    "guided_input",
)

# too large for a copy, perhaps
MATRICES = frozenset(name for name, statistic in STATISTICS.items() if statistic.is_matrix)


class Key(NamedTuple):
    """Which statistic of which tensor.

    Attributes:
        name: the source name of the weight.
        site: one of SITES: where the data flowed.
        statistic: the name that an observer's state gives it.
    """

    name: str
    site: str
    statistic: str

    def __str__(self) -> str:
        """Return the key as files have it."""
        return "|".join(self)


def is_matrix(text: str) -> bool:
    """Return whether a key is that of a matrix."""
    return text.rpartition("|")[2] in MATRICES


def parse_key(text: str) -> Key:
    """Split a key into its parts.

    Raises:
        StatisticsError: it has not three parts, or the site is unknown.
    """
    parts = text.split("|")
    if len(parts) != 3 or not all(parts) or parts[1] not in SITES:
        raise StatisticsError(
            f"statistic {text!r} is not <source name>|<site>|<statistic> with a site of "
            f"{', '.join(SITES)}",
            "measure again",
        )
    return Key(*parts)


def by_site(statistics: Mapping[str, Item]) -> dict[tuple[str, str], dict[str, Item]]:
    """Return (source name, site) -> statistic name -> what the key stands for, in sorted order.

    Raises:
        StatisticsError: a key is not one.
    """
    sites: dict[tuple[str, str], dict[str, Item]] = {}
    for (name, site, statistic), text in sorted((parse_key(text), text) for text in statistics):
        sites.setdefault((name, site), {})[statistic] = statistics[text]
    return sites


def observer_kinds(name: str, site: str, *, statistics: Collection[str]) -> list[type[Observer]]:
    """Return the classes of observers whose states have these names.

    Args:
        name: source name, for the message.
        site: for the message.
        statistics: statistic names, of one site.

    Raises:
        StatisticsError: a statistic belongs to no observer, or not all of its observer's are there.
    """
    found = [kind for kind in OBSERVERS.values() if set(kind.STATISTICS) <= set(statistics)]
    foreign = set(statistics) - {statistic for kind in found for statistic in kind.STATISTICS}
    if foreign:
        raise StatisticsError(
            f"{name}|{site}: no observer has the state {sorted(foreign)}", "measure again"
        )
    return found


def observers_at(name: str, site: str, *, statistics: Mapping[str, Tensor]) -> list[Observer]:
    """Make the observers whose states these statistics are; two observers may share a `count`.

    Args:
        name: source name, for the message.
        site: for the message.
        statistics: statistic name -> tensor, of one site.

    Raises:
        StatisticsError: a statistic belongs to no observer, or is not one of its states (NaN,
            negative, shape, dtype).
    """
    kinds = observer_kinds(name, site, statistics=statistics)
    try:
        return [
            kind.from_state({part: statistics[part] for part in kind.STATISTICS}) for kind in kinds
        ]
    except StatisticsError as error:
        raise StatisticsError(f"{name}|{site}: {error.cause}", error.remedy) from error


def are_states(alike: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether `observers_at` takes each of several sites; a no may also mean that they have to be asked one by one.

    Observers compare single values with bounds. So it is enough to show them the smallest and the
    largest of all sites, which takes less than half the time. Matrices are left to be asked for one
    by one: there is to be no copy of them.

    Args:
        alike: statistic name -> tensor, of each site; the same names, dtypes and shapes at all of
            them.
    """
    if not alike[0].keys().isdisjoint(MATRICES):
        return False
    ends = {
        key: torch.aminmax(torch.stack([site[key] for site in alike]), dim=0) for key in alike[0]
    }
    try:
        observers_at("", "", statistics={key: end.min for key, end in ends.items()})
        observers_at("", "", statistics={key: end.max for key, end in ends.items()})
    except StatisticsError:
        return False
    return True
