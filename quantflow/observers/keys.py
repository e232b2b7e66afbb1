"""Names of statistics in a file, `<source name>|<site>|<statistic>`, and their observers.

Statistics with one value per channel are of the last dimension of the site's tensor. A weight's are
of its rows, its output features; those at HEADS are of each kv head.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.observers import OBSERVERS, STATISTICS, Observer

Item = TypeVar("Item")
# the tensors of k_cache and v_cache again, with heads in the place of features
HEADS = ("k_heads", "v_heads")
# query and k_cache: after RoPE. routed: the tokens that a router sent to an expert, whatever other
# tokens the expert ran on. gradient: that of the loss by the output. guided_input: the input, each
# token of it times the root mean square of that gradient.
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

# statistics that may be too large for a copy
MATRICES = frozenset(name for name, statistic in STATISTICS.items() if statistic.is_matrix)


class Key(NamedTuple):
    """The name of one statistic of one tensor.

    Attributes:
        name: source name of the weight.
        site: place of the tensor, one of SITES.
        statistic: name in the observer's state.
    """

    name: str
    site: str
    statistic: str

    def __str__(self) -> str:
        """The key in files."""
        return "|".join(self)


def is_matrix(text: str) -> bool:
    """Whether a key is that of a matrix."""
    return text.rpartition("|")[2] in MATRICES


def parse_key(text: str) -> Key:
    """The parts of a key.

    Raises:
        StatisticsError: the key has not three parts, or the site is unknown.
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
    """(source name, site) -> statistic name -> value of its key, in sorted order.

    Raises:
        StatisticsError: a key has another form.
    """
    sites: dict[tuple[str, str], dict[str, Item]] = {}
    for (name, site, statistic), text in sorted((parse_key(text), text) for text in statistics):
        sites.setdefault((name, site), {})[statistic] = statistics[text]
    return sites


def observer_kinds(name: str, site: str, *, statistics: Collection[str]) -> list[type[Observer]]:
    """The classes of the observers that have these statistics.

    Args:
        name: source name, for the message.
        site: site, for the message.
        statistics: statistic names, all of one site.

    Raises:
        StatisticsError: a statistic belongs to no observer, or not all of its observer's are there.
    """
    kinds = [kind for kind in OBSERVERS.values() if set(kind.STATISTICS) <= set(statistics)]
    foreign = set(statistics) - {statistic for kind in kinds for statistic in kind.STATISTICS}
    if foreign:
        raise StatisticsError(
            f"{name}|{site}: no observer has the state {sorted(foreign)}", "measure again"
        )
    return kinds


def observers_at(name: str, site: str, *, statistics: Mapping[str, Tensor]) -> list[Observer]:
    """The observers whose states these statistics are; two of them may share a `count`.

    Args:
        name: source name, for the message.
        site: site, for the message.
        statistics: statistic name -> tensor, all of one site.

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
    """Whether `observers_at` takes each of several sites.

    A no may also mean that each site has to be checked by itself. Observers compare single values
    with bounds, so it is enough to check the smallest and the largest of all sites, which takes
    less than half the time. Matrices are left to a check one by one, since no copy of them may be
    made.

    Args:
        alike: statistic name -> tensor, for each site; names, dtypes and shapes are the same at
            all.
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
