"""One card's measurement made into those of the cards of a mesh.

A share's own channels are cut out of the whole's, and its amax is then that of its channels. Where
there are none to cut (`amax` alone, the heads of a cache, the columns of a weight) a share keeps
the whole's maximum, which bounds its own; sums, counts and histograms of sites that are not cut by
channel would be those of other values, and are left out. `unify` of all shares gives every maximum
of the measurement again.

With `expert_parallel` each card of a mixture gets some of the experts and all of the rest, as
`measure --ep` writes them: nothing is cut, and `unify` gives every statistic again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantflow.distributed.placement import Placement, share, sharing, spans_of
from quantflow.distributed.sharding import whole_experts
from quantflow.errors import InputError, UsageError
from quantflow.measuring.record import Measurement
from quantflow.numerics.statistics import ONCE, part_of
from quantflow.observers import statistic_named
from quantflow.observers.keys import Key, by_site

_CUT, _KEPT, _BOUND, _LEFT_OUT = "cut", "kept", "the whole's, which bounds it", "left out"


def planned(
    tensors: Mapping[str, Placement], *, ranks: int, expert_parallel: bool | None = None
) -> list[dict[str, dict[str, Any]]]:
    """The placements of every tensor on each of `ranks` cards, as its `plan` says.

    Args:
        tensors: placements of a measurement of one rank.
        ranks: number of cards.
        expert_parallel: whether each card gets some of the experts, and all of the rest whole; None
            where the measurement says it.

    Raises:
        UsageError: no tensor has a plan, or one does not divide; names it and the numbers. Or there
            are no experts to spread, or they were measured whole and are to be cut.
    """
    if ranks < 2:
        raise UsageError(f"expand to {ranks} ranks", "give 2 or more")
    if expert_parallel:
        return _spread(tensors, ranks=ranks)
    if expert_parallel is not None and any(of["kind"] == "expert" for of in tensors.values()):
        raise UsageError(
            f"expand to {ranks} ranks: --no-expert-parallel, and each expert was measured whole by "
            "one of several ranks",
            "leave it out; how cards would cut an expert is not in this measurement",
        )
    if not any(whole.get("plan") or whole["kind"] == "expert" for whole in tensors.values()):
        raise UsageError(
            f"expand to {ranks} ranks: none of {len(tensors)} tensors has a plan, so it is not "
            "known how cards share them",
            "measure again with this version of quantflow",
        )
    return [
        {name: share(name, whole, cards=ranks, card=card) for name, whole in tensors.items()}
        for card in range(ranks)
    ]


def _spread(tensors: Mapping[str, Placement], *, ranks: int) -> list[dict[str, dict[str, Any]]]:
    """The placements on cards that have some of the experts each, and all of the rest."""
    experts = whole_experts(tensors)
    if not experts:
        raise UsageError(
            f"expand to {ranks} ranks: --expert-parallel, and none of {len(tensors)} tensors is an "
            "expert's",
            "leave it out",
        )
    return [
        {
            name: share(name, experts[name], cards=ranks, card=card)
            if name in experts
            else dict(whole)
            for name, whole in tensors.items()
        }
        for card in range(ranks)
    ]


def expand(
    measurement: Measurement, *, placements: Sequence[Mapping[str, Placement]]
) -> Iterator[Measurement]:
    """Yield the measurement of one card after the other.

    `expanded` of each records the measurement that it was made from, and the number of statistics
    by each rule.

    Args:
        measurement: measurement of one rank.
        placements: placements of every tensor, on each card.

    Raises:
        InputError: the measurement is one of several ranks.
    """
    mesh = measurement.meta["mesh"]
    if mesh["world"] != 1:
        raise InputError(
            f"{measurement.who}: one of {mesh['world']} ranks, one alone is expanded",
            "unify them first",
        )
    experts = any(placement["kind"] == "expert" for placement in placements[0].values())
    world = len(placements)
    for rank, tensors in enumerate(placements):
        rules: Counter[tuple[str, str]] = Counter()
        statistics: dict[str, Tensor] = {}
        for (name, site), values in by_site(measurement.statistics).items():
            placement = tensors[name]
            if placement["kind"] == "expert" and not placement["length"]:
                continue
            kept = _cut(values, placement, site, rules)
            statistics |= {
                str(Key(name, site, statistic)): value for statistic, value in kept.items()
            }
        meta = {
            key: value
            for key, value in measurement.meta.items()
            if key not in ("files", "digest", "unified")
        }
        meta |= {"tensors": dict(tensors)}
        meta["mesh"] = {
            "rank": rank,
            "world": world,
            "tp": world,
            "dp": 1,
            "ep": world if experts else 1,
        }
        meta["expanded"] = {
            "digest": measurement.meta.get("digest"),
            "rules": [
                {"statistic": s, "rule": rule, "count": count}
                for (s, rule), count in sorted(rules.items())
            ],
        }
        if missing := measurement.meta.get("unified", {}).get("missing"):
            meta["unified"] = {"missing": missing}
        yield Measurement(
            meta=meta,
            statistics=statistics,
            sequences=measurement.sequences,
            indices=measurement.indices,
        )


def _cut(
    values: Mapping[str, Tensor], placement: Placement, site: str, rules: Counter[tuple[str, str]]
) -> dict[str, Tensor]:
    """A share's statistics of one site; `rules` counts the rules that made them."""
    how = sharing(placement, site)
    if how == "same" or placement["kind"] == "expert":
        rules.update((statistic, _KEPT) for statistic in values)
        return dict(values)
    kept: dict[str, Tensor] = {}
    parts = [slice(offset, offset + length) for offset, length in spans_of(placement)]
    for name, value in values.items():
        statistic = statistic_named(name)
        if how == "channels" and statistic.cut is not None and len(parts) == 1:
            rule, kept[name] = _CUT, statistic.cut(value, parts[0])
        elif how == "channels" and statistic.cut is part_of:
            rule, kept[name] = _CUT, torch.cat([part_of(value, part) for part in parts])
        elif how == "channels" and statistic.cards == ONCE:
            rule, kept[name] = _KEPT, value
        elif (
            how == "channels"
            and statistic.maximum_of is not None
            and statistic.maximum_of in values
        ):
            whole = values[statistic.maximum_of]
            channels = torch.cat([whole[part] for part in parts])
            rule, kept[name] = _CUT, channels.max() if channels.numel() else value.new_zeros(())
        elif not statistic.is_sum:
            rule, kept[name] = _BOUND, value
        else:
            rule = _LEFT_OUT
        rules[name, rule] += 1
    return kept
