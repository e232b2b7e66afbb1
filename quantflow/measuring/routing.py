"""The ledger of tokens: how many of them the router of each mixture sent to each of its experts.

It is in the statistics, as `<first linear of the expert>|routed|count`, and merges over ranks like
any other count.
"""

import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.numerics.statistics import COUNT
from quantflow.observers.keys import Key

SITE, STATISTIC = "routed", COUNT.name
_LINEAR = re.compile(r"(?P<experts>.+)\.(?P<number>[0-9]+)\.[^.]+")
_MOST = 1 << 16  # experts of a mixture


def routed_key(linear: str) -> str:
    """The key of an expert's number of tokens; `linear` is its first linear, the gate."""
    return str(Key(linear, SITE, STATISTIC))


def ledger_of(statistics: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The number of tokens of each expert, the least and the median, for each mixture.

    Args:
        statistics: `<source name>|<site>|<statistic>` -> tensor; only counts of routed tokens are
            read.

    Returns:
        `model.layers.0.mlp.experts` -> {"tokens": [by number; None for one that is on another
        rank], "least", "median"}.

    Raises:
        StatisticsError: the number of an expert is beyond any mixture.
    """
    by_experts: dict[str, dict[int, int]] = {}
    for key in statistics:
        name, _, rest = key.partition("|")
        match = _LINEAR.fullmatch(name) if rest == f"{SITE}|{STATISTIC}" else None
        if match is not None:
            number = int(match["number"]) if len(match["number"]) < 9 else _MOST
            if number >= _MOST:
                raise StatisticsError(
                    f"{name}: an expert of a number beyond {_MOST}", "measure again"
                )
            by_experts.setdefault(match["experts"], {})[number] = int(statistics[key])
    return {
        experts: summary(counts.get(number) for number in range(max(counts) + 1))
        for experts, counts in sorted(by_experts.items())
    }


def summary(tokens: Iterable[int | None]) -> dict[str, Any]:
    """{"tokens", "least", "median"} of the tokens of each expert of a layer."""
    listed = list(tokens)
    known = [count for count in listed if count is not None]
    return {"tokens": listed, "least": min(known), "median": median(known)}
