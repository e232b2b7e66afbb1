"""Measured on many cards, deployed on fewer: which ranks belong together, and their statistics merged into one.

Statistics are merged, never scales. Maxima, counts and histograms merge exactly; sums are folded in rank order. Every
way in which the ranks can disagree is an error that names the rank: a merge of the wrong measurements looks right.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.measurements.keys import Key, by_site, observers_at
from quantflow.measurements.record import Measurement

_SAME_ON_EVERY_RANK = ("model.fingerprint", "model.family", "calibration", "dtype", "seed", "observers", "tensors")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_groups(text: Sequence[str], world: int) -> list[list[int]]:
    """Read which ranks are merged, from the way people write it.

    A group is a list of ranks and ranges, `0,1,2,3` or `4-7`. With at most ten ranks also digits alone: `0123` is ranks
    0, 1, 2 and 3. With more than ten ranks `12` is rank 12, and `01` is refused.

    Args:
        text: one group each; a string may also hold several, separated by spaces.
        world: number of ranks that measured.

    Returns:
        Groups in the order given, each sorted.

    Raises:
        UsageError: a group cannot be read; a rank is missing, named twice or unknown; groups differ in size.
    """
    words = [word for part in text for word in part.split()]
    groups = [_parse_group(word, world) for word in words]
    check_groups(groups, world)
    return [sorted(group) for group in groups]


def _parse_group(word: str, world: int) -> list[int]:
    if world <= 10 and re.fullmatch("[0-9]+", word):
        return [int(digit) for digit in word]
    ranks: list[int] = []
    for item in word.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if not match or any(len(number) > 1 and number[0] == "0" for number in (first, last)) or int(last) < int(first):
            raise UsageError(
                f"group {word!r}: {item!r} is neither a rank nor a range of ranks",
                "write ranks as 0,1,2,3 or 0-3" + (", and digits alone as 0123" if world <= 10 else ""),
            )
        if int(last) >= world:
            raise UsageError(f"group {word!r}: rank {last} does not exist", f"ranks are 0..{world - 1}")
        ranks += range(int(first), int(last) + 1)
    return ranks


def check_groups(groups: Sequence[Sequence[int]], world: int) -> None:
    """Check that groups are of one size and hold every rank exactly once.

    Raises:
        UsageError: naming the ranks that are missing, named twice or unknown.
    """
    times = Counter(rank for group in groups for rank in group)
    faults = {
        "missing": [rank for rank in range(world) if rank not in times],
        "named twice": sorted(rank for rank, count in times.items() if count > 1),
        "unknown": sorted(rank for rank in times if not 0 <= rank < world),
    }
    found = "; ".join(f"{fault} {_some(ranks)}" for fault, ranks in faults.items() if ranks)
    if found:
        raise UsageError(f"groups of {world} ranks: {found}", "name every rank in exactly one group")
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1 or not sizes[0]:
        raise UsageError(f"groups of {' and '.join(map(str, sizes)) or 'no'} ranks", "give every group as many ranks")


def unify(measurements: Iterable[Measurement], groups: Sequence[Sequence[int]]) -> list[Measurement]:
    """Merge the measurements of each group of ranks into one.

    Args:
        measurements: every rank's, in any order.
        groups: ranks, as `parse_groups` returns them; group i becomes rank i.

    Returns:
        One measurement a group, with the group's samples in the order of the calibration set.

    Raises:
        UsageError: the groups do not hold every rank exactly once.
        InputError: a rank is missing, appears twice, or measured another model, calibration set, dtype or seed.
        StatisticsError: ranks have different statistics, or statistics of different shapes.
        UnsupportedError: a tensor was sharded over the ranks.
    """
    ranks = _by_rank(measurements)
    check_groups(groups, len(ranks))
    _check_agreement(ranks)
    _check_samples(ranks)
    return [
        _merge_group([ranks[rank] for rank in sorted(group)], rank=index, world=len(groups))
        for index, group in enumerate(groups)
    ]


def _by_rank(measurements: Iterable[Measurement]) -> list[Measurement]:
    found = list(measurements)
    if not found:
        raise InputError("measurements: none was given", "give the folder that holds rank-000-of-... folders")
    worlds = {measurement.meta["mesh"]["world"] for measurement in found}
    if len(worlds) > 1:
        raise InputError(f"measurements: made by {_some(worlds)} ranks", "give the ranks of one measurement")
    (world,) = worlds
    times = Counter(measurement.meta["mesh"]["rank"] for measurement in found)
    missing, twice = sorted(set(range(world)) - set(times)), sorted(rank for rank, n in times.items() if n > 1)
    if missing or twice:
        raise InputError(
            f"measurements of {world} ranks: missing {_some(missing)}, twice {_some(twice)}", "give every rank's once"
        )
    return sorted(found, key=lambda measurement: int(measurement.meta["mesh"]["rank"]))


def _check_agreement(ranks: Sequence[Measurement]) -> None:
    first = ranks[0]
    for rank, measurement in enumerate(ranks):
        for field in _SAME_ON_EVERY_RANK:
            ours, theirs = _field(first.meta, field), _field(measurement.meta, field)
            if ours != theirs:
                raise InputError(f"rank {rank}: {_difference(field, ours, theirs)}", "give the ranks of one measurement")
        differing = sorted(set(measurement.statistics) ^ set(first.statistics))
        if differing:
            raise StatisticsError(
                f"rank {rank}: {differing[0]} is on {'rank 0' if differing[0] in first.statistics else f'rank {rank}'} "
                f"alone ({len(differing)} such statistics)",
                "measure every rank with the same --stats",
            )
    mesh = first.meta["mesh"]
    sharded = [name for name, placement in first.meta["tensors"].items() if placement["kind"] != "replicated"]
    if sharded or mesh["tp"] != 1 or mesh["ep"] != 1:
        where = f"{sharded[0]} is {first.meta['tensors'][sharded[0]]['kind']}" if sharded else "the model was sharded"
        raise UnsupportedError(
            f"{where} (tp={mesh['tp']}, ep={mesh['ep']}): sharded statistics are not unified yet",
            "measure with dp only",
        )


def _field(meta: Mapping[str, Any], path: str) -> Any:
    value: Any = meta
    for part in path.split("."):
        value = value[part]
    return value


def _difference(field: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        name = min(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        return f"{field}.{name} is {theirs.get(name)!r}, on rank 0 {ours.get(name)!r}"
    return f"{field} is {theirs!r}, on rank 0 {ours!r}"


def _check_samples(ranks: Sequence[Measurement]) -> None:
    calibration = ranks[0].meta["calibration"]
    times = Counter(index for measurement in ranks for index in measurement.indices)
    twice = sorted(index for index, count in times.items() if count > 1)
    missing = [index for index in range(calibration["samples"]) if index not in times]
    if twice or missing:
        raise InputError(
            f"samples of the calibration set: on no rank {_some(missing)}, on two ranks {_some(twice)}", "measure again"
        )
    tokens = sum(measurement.meta["counts"]["tokens"] for measurement in ranks)
    if tokens != calibration["tokens"]:
        raise InputError(f"the ranks saw {tokens} tokens, the calibration set has {calibration['tokens']}", "measure again")


def _merge_group(members: Sequence[Measurement], *, rank: int, world: int) -> Measurement:
    samples = sorted(
        ((index, sequence) for member in members for index, sequence in zip(member.indices, member.sequences, strict=True)),
        key=lambda sample: sample[0],
    )
    first = members[0].meta
    meta = {key: value for key, value in first.items() if key not in ("files", "digest")}
    meta["mesh"] = {**first["mesh"], "rank": rank, "world": world, "dp": world}
    meta["counts"] = {
        "samples": len(samples),
        "tokens": sum(sequence.numel() for _, sequence in samples),
    }
    meta["unified"] = {
        "world": first["mesh"]["world"],
        "ranks": [member.meta["mesh"]["rank"] for member in members],
        "digests": [member.meta.get("digest") for member in members],
    }
    return Measurement(
        meta=meta,
        statistics=_merge_statistics([member.statistics for member in members]),
        sequences=[sequence for _, sequence in samples],
        indices=[index for index, _ in samples],
    )


def _merge_statistics(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    per_rank = [by_site(statistics) for statistics in ranks]
    for name, site in per_rank[0]:
        states = [sites[name, site] for sites in per_rank]
        if site == "weight":  # every rank saw the same weight: nothing to add up
            _refuse_different(name, states)
            values = states[0]
        else:
            values = _fold(name, site, states)
        merged.update((str(Key(name, site, part)), value) for part, value in values.items())
    return merged


def _fold(name: str, site: str, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total = observers_at(name, site, statistics=states[0])
    for state in states[1:]:
        for mine, other in zip(total, observers_at(name, site, statistics=state), strict=True):
            try:
                mine.merge(other)
            except StatisticsError as error:
                raise StatisticsError(f"{name}|{site}: {error.cause}", error.remedy) from error
    return {part: value for observer in total for part, value in observer.state().items()}


def _refuse_different(name: str, states: Sequence[Mapping[str, Tensor]]) -> None:
    for state in states[1:]:
        for part, value in state.items():
            if not torch.equal(value, states[0][part]):
                raise StatisticsError(
                    f"{name}|weight: {part} differs between ranks that hold the same weight",
                    "give the ranks of one measurement",
                )


def _some(values: Iterable[int]) -> str:
    """Return up to eight values, for a message."""
    listed = sorted(values)
    return (", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")) or "none"
