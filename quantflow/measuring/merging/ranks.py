"""Many ranks' statistics merged into those of fewer: measured on many cards, deployed on fewer.

Statistics are merged, never scales: maxima, counts and histograms exactly, sums in a fixed tree,
the shares of sharded tensors by the rules of one_statistic.py. Every way in which the ranks can
disagree is an error that names the rank.

`unified` of a group's measurement records the merge:

    world, mesh     number and mesh, {tp, dp, ep}, of the ranks that measured
    ranks, digests  the ranks of this group
    missing         ranks of this group that were not there, which somebody allowed
    merged          [{statistic, rule, count}]: number of statistics that were merged by each rule
    maxima          {key: rank}: the rank that set each amax
    outliers        [{key, rank, amax, median}]: ranks that saw eight times the median of the group,
                    or more
    bounds          keys that bound a maximum that was not measured
    unseen          experts that got no token on any rank; quantize treats them as its recipe says
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantflow.distributed.placement import channels, joined, shares, sharing, spans_of
from quantflow.errors import InputError, StatisticsError
from quantflow.measuring.merging.agreement import by_rank, check_agreement
from quantflow.measuring.merging.contributions import Outlier, contributor, outliers
from quantflow.measuring.merging.grouping import arrange, check_groups, some
from quantflow.measuring.merging.one_statistic import BOUNDED, RankValue, Runs, merge
from quantflow.measuring.record import Measurement
from quantflow.measuring.routing import routed_key
from quantflow.measuring.stored import Deferred, Later, spec_of
from quantflow.observers.amax import AMAX
from quantflow.observers.keys import Key, by_site, is_matrix
from quantflow.process_memory import give_back_holes

_SITES = 64  # so many are merged between two calls, each of which takes milliseconds
RankMesh = Sequence[Sequence[Measurement]]  # one row per replica, cards in order


@dataclass(kw_only=True)
class _Account:
    """The record of a merge beside its statistics."""

    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    maxima: dict[str, int] = field(default_factory=dict)
    outliers: list[Outlier] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The account as `unified` has it."""
        return {
            "merged": [
                {"statistic": statistic, "rule": rule, "count": count}
                for (statistic, rule), count in sorted(self.rules.items())
            ],
            "maxima": self.maxima,
            "outliers": [asdict(outlier) for outlier in self.outliers],
            "bounds": self.bounds,
        }


def unify(
    measurements: Iterable[Measurement],
    groups: Sequence[Sequence[int]],
    *,
    allow_missing: bool = False,
) -> list[Measurement]:
    """Merge the measurements of each group of ranks into one; see `unify_each`."""
    return list(unify_each(measurements, groups, allow_missing=allow_missing))


def unify_each(
    measurements: Iterable[Measurement],
    groups: Sequence[Sequence[int]],
    *,
    allow_missing: bool = False,
) -> Iterator[Measurement]:
    """Yield the measurement of one group of ranks after the other.

    Args:
        measurements: every rank's, in any order; statistics are read one at a time.
        groups: groups of ranks, see `parse_groups`; group i becomes rank i.
        allow_missing: replicas may be missing as a whole; `unified.missing` then names their ranks.

    Yields:
        One measurement a group, with the group's samples in the order of the calibration set.

    Raises:
        UsageError: the groups do not hold every rank exactly once, or are no ranks of a smaller
            mesh.
        InputError: a rank is missing, appears twice, or measured another model, calibration set,
            dtype or seed, or on another device.
        StatisticsError: ranks have different statistics, or statistics that cannot be merged.
    """
    ranks = by_rank(measurements, allow_missing=allow_missing)
    mesh = next(iter(ranks.values())).meta["mesh"]
    check_groups(groups, mesh["world"])
    check_agreement(ranks)
    arrangement = arrange(groups, tp=mesh["tp"])
    grids: list[RankMesh] = []
    for index, rows in enumerate(arrangement.groups):
        grids.append([[ranks[rank] for rank in row] for row in rows if row[0] in ranks])
        if not grids[-1]:
            raise InputError(
                f"group {index} ({some(groups[index])}): none of its ranks is there", "measure them"
            )
    tensors = [_tensors(grid) for grid in grids]
    shape = {
        "world": len(grids),
        "tp": arrangement.tp,
        "dp": arrangement.dp,
        "ep": _expert_ranks(tensors),
    }
    for rank, grid in enumerate(grids):
        about = {"missing": sorted(number for number in groups[rank] if number not in ranks)}
        yield _merge_group(grid, tensors[rank], mesh={"rank": rank, **shape}, about=about)


def _tensors(grid: RankMesh) -> dict[str, dict[str, Any]]:
    """The placements of the tensors that a group holds together."""
    members = [member for row in grid for member in row]
    return {
        name: joined(member.meta["tensors"][name] for member in members)
        for name in members[0].meta["tensors"]
    }


def _expert_ranks(groups: Sequence[Mapping[str, Mapping[str, Any]]]) -> int:
    """The number of ranks that experts are spread over: of different sets of them in the groups."""
    held = {
        frozenset(
            name
            for name, placement in tensors.items()
            if placement["kind"] == "expert" and placement["length"]
        )
        for tensors in groups
    }
    return max(1, len(held - {frozenset()}))


def _merge_group(
    grid: RankMesh,
    tensors: dict[str, dict[str, Any]],
    *,
    mesh: dict[str, int],
    about: Mapping[str, Any],
) -> Measurement:
    members = [member for row in grid for member in row]
    samples = sorted(
        (
            (index, sequence)
            for first, *_ in grid
            for index, sequence in zip(first.indices, first.sequences, strict=True)
        ),
        key=lambda sample: sample[0],
    )
    statistics, account = _merge_statistics(grid)
    first = members[0].meta
    meta = {
        key: value for key, value in first.items() if key not in ("files", "digest", "expanded")
    }
    meta |= {"mesh": mesh, "tensors": tensors}
    meta["counts"] = {
        "samples": len(samples),
        "tokens": sum(sequence.numel() for _, sequence in samples),
    }
    meta["unified"] = {
        "world": first["mesh"]["world"],
        "mesh": {key: first["mesh"][key] for key in ("tp", "dp", "ep")},
        "ranks": [member.meta["mesh"]["rank"] for member in members],
        "digests": [member.meta.get("digest") for member in members],
        **about,
        **account.as_json(),
        "unseen": _unseen(tensors, statistics),
    }
    return Measurement(
        meta=meta,
        statistics=statistics,
        sequences=[sequence for _, sequence in samples],
        indices=[index for index, _ in samples],
    )


def _merge_statistics(grid: RankMesh) -> tuple[Deferred, _Account]:
    """The statistics of a group's ranks together; matrices are merged one by one, on demand."""
    account = _Account()
    merged = dict[str, Tensor]()
    later = dict[str, Later]()
    texts: set[str] = set().union(*(member.statistics for row in grid for member in row))
    for number, ((name, site), statistics) in enumerate(by_site(dict.fromkeys(texts)).items()):
        if number % _SITES == 0:  # what the parts of a statistic leave between merged ones
            give_back_holes()
        first = grid[0][0].meta["tensors"][name]
        rows = [
            [member for member in row if _is_at(member, name, site, statistics)] for row in grid
        ]
        rows = [row for row in rows if row]
        placements = [[member.meta["tensors"][name] for member in row] for row in rows]
        stacks = [shares(parts, site) for parts in placements]
        cells = [
            [(channels(part, site), _runs(part, site)) for part in parts] for parts in placements
        ]
        for statistic in statistics:
            key = Key(name, site, statistic)
            text = str(key)
            merging = partial(
                _merged, key, rows, cells, sharing=sharing(first, site), stacks=stacks
            )
            merged[text], rule = merging()
            if is_matrix(text):  # checked now, and merged again when it is written
                later[text] = Later(spec_of(merged, text), partial(_first, merging))
                del merged[text]
            account.rules[statistic, rule] += 1
            if BOUNDED in rule or (site == "output" and first.get("bound")):
                account.bounds.append(text)
            if statistic == AMAX.name:
                members = [member for row in rows for member in row]
                seen = {
                    member.meta["mesh"]["rank"]: member.statistics[text].item()
                    for member in members
                }
                account.maxima[text] = contributor(seen)
                account.outliers += outliers(text, seen)
    return Deferred(merged, later), account


def _merged(
    key: Key, rows: RankMesh, held: Sequence[Sequence[tuple[int, Runs]]], **shared: Any
) -> tuple[Tensor, str]:
    """A statistic of every rank merged, and by which rule.

    Args:
        key: key of the statistic.
        rows: the ranks.
        held: number of channels of each rank, and where they lie.
        shared: see `merge`.
    """
    values = [
        [
            RankValue(member.who, member.statistics[str(key)], width, runs)
            for member, (width, runs) in zip(*cells, strict=True)
        ]
        for cells in zip(rows, held, strict=True)
    ]
    return merge(key, values, **shared)


def _runs(placement: Mapping[str, Any], site: str) -> Runs:
    """Where the channels of a rank's share lie among all, if shares are apart; else nothing."""
    apart = "parts" in placement and sharing(placement, site) == "channels"
    return spans_of(placement) if apart else ()


def _first(merging: Callable[[], tuple[Tensor, str]]) -> Tensor:
    return merging()[0]


def _is_at(member: Measurement, name: str, site: str, statistics: Iterable[str]) -> bool:
    """Whether a rank saw a site at all; the experts of other ranks it did not."""
    if member.meta["tensors"][name]["kind"] != "expert":
        return True
    keys = [str(Key(name, site, statistic)) for statistic in statistics]
    absent = [key for key in keys if key not in member.statistics]
    if absent and len(absent) < len(keys):
        raise StatisticsError(
            f"{member.who}: {absent[0]} is missing, other ranks have it",
            "measure with the same --stats",
        )
    return not absent


def _unseen(
    tensors: Mapping[str, Mapping[str, Any]], statistics: Mapping[str, Tensor]
) -> list[str]:
    """The experts of a group that got no token, or whose input has no statistics or empty ones."""
    experts = {
        name
        for name, placement in tensors.items()
        if placement["kind"] == "expert" and placement["length"]
    }
    counted = {key.partition("|")[0]: key for key in map(routed_key, tensors) if key in statistics}
    sites = by_site(
        {text: statistics[text] for text in statistics if text.partition("|")[0] in experts}
    )
    seen = {
        name
        for (name, site), values in sites.items()
        if site == "input" and any(map(torch.any, values.values()))
    }
    return sorted((experts - seen) | {name for name, key in counted.items() if not statistics[key]})
