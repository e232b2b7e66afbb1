"""Whether the given ranks are one measurement, each of them once: a merge of others looks right."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from quantflow.distributed.placement import Placement, check_cover
from quantflow.errors import InputError, StatisticsError
from quantflow.measuring.merging.grouping import some
from quantflow.measuring.record import Measurement
from quantflow.observers.keys import by_site, observer_kinds

_SAME_ON_EVERY_RANK = (
    *(
        "model.fingerprint",
        "model.family",
        "calibration",
        "dtype",
        "seed",
        "observers",
        "experts",
        "tools",
        "device",
    ),
)
_OF_A_SHARE = ("offset", "length", "spans")  # what may differ between the cards of a replica
_ONE = "give the ranks of one measurement"
_NAMED = 9  # of what is missing: a message names eight, and a record may declare any number


def by_rank(measurements: Iterable[Measurement], *, allow_missing: bool) -> dict[int, Measurement]:
    """Rank -> measurement, in rank order.

    Args:
        measurements: measurements in any order.
        allow_missing: whole replicas may be missing.

    Raises:
        InputError: none was given, ranks of several worlds, a rank twice, or one is missing that
            may not be.
    """
    listed = list(measurements)
    if not listed:
        raise InputError(
            "measurements: none was given", "give the folder that holds rank-000-of-... folders"
        )
    worlds: dict[int, str] = {}
    for measurement in listed:
        worlds.setdefault(measurement.meta["mesh"]["world"], measurement.who)
    if len(worlds) > 1:
        counts = ", ".join(f"{who} of {world}" for world, who in sorted(worlds.items()))
        raise InputError(f"measurements: made by {some(worlds)} ranks ({counts})", _ONE)
    (world,) = worlds
    times = Counter(measurement.meta["mesh"]["rank"] for measurement in listed)
    missing = sorted(set(range(world)) - set(times))
    twice = sorted(rank for rank, n in times.items() if n > 1)
    if twice or (missing and not allow_missing):
        doubled = [m.origin for m in listed if times[m.meta["mesh"]["rank"]] > 1 and m.origin]
        raise InputError(
            f"measurements of {world} ranks: missing {some(missing)}, twice {some(twice)}"
            + (f" ({', '.join(doubled[:4])})" if doubled else ""),
            "give every rank's once"
            + ("" if twice else ", or pass --allow-missing to go on without those replicas"),
        )
    return {
        m.meta["mesh"]["rank"]: m for m in sorted(listed, key=lambda m: int(m.meta["mesh"]["rank"]))
    }


def check_agreement(ranks: Mapping[int, Measurement]) -> None:
    """Check that ranks measured one model with one set of calibration samples in one way.

    Args:
        ranks: rank -> measurement, as `by_rank` returns them.

    Raises:
        InputError: naming the rank, the field and both values; a replica of which only some cards
            are there.
        StatisticsError: ranks have different statistics, or shares of a tensor that do not make it
            up.
    """
    first = next(iter(ranks.values()))
    for measurement in ranks.values():
        for field in _SAME_ON_EVERY_RANK:
            ours = _field(first.meta, field)
            theirs = _field(measurement.meta, field)
            if ours != theirs:
                raise InputError(
                    f"{measurement.who}: {_difference(field, ours, theirs, first)}", _ONE
                )
    mesh = first.meta["mesh"]
    for measurement in ranks.values():
        if (
            _shape(measurement.meta["mesh"]) != _shape(mesh)
            or mesh["tp"] * mesh["dp"] != mesh["world"]
        ):
            raise InputError(
                f"{measurement.who}: mesh is {measurement.meta['mesh']}, on {first.who} {mesh}; "
                "world is tp * dp",
                _ONE,
            )
    replicas = _replicas(ranks, mesh["tp"])
    _check_tensors(replicas)
    _check_statistics(ranks)
    _check_samples(replicas)


def _replicas(ranks: Mapping[int, Measurement], tp: int) -> list[list[Measurement]]:
    """The measurements of each replica that is there, in card order."""
    rows: dict[int, list[Measurement]] = {}
    for rank, measurement in ranks.items():
        rows.setdefault(rank // tp, []).append(measurement)
    for replica, row in rows.items():
        missing = [rank for rank in range(replica * tp, replica * tp + tp) if rank not in ranks]
        if missing:
            raise InputError(
                f"replica {replica} (ranks {replica * tp} to {replica * tp + tp - 1}): "
                f"{some(missing)} missing beside "
                f"{row[0].who}, whose tensors are then without their other shares",
                "measure the missing ranks, or take away the other ranks of that replica too",
            )
    return list(rows.values())


def _check_tensors(replicas: Sequence[Sequence[Measurement]]) -> None:
    first = replicas[0][0]
    for row in replicas:
        for card, measurement in enumerate(row):
            beside = replicas[0][card].meta["tensors"]
            mine = measurement.meta["tensors"]
            for name in sorted({*first.meta["tensors"], *mine}):
                ours = first.meta["tensors"].get(name)
                theirs = mine.get(name)
                if ours != theirs and (
                    ours is None or theirs is None or _common(ours) != _common(theirs)
                ):
                    raise InputError(
                        f"{measurement.who}: tensors.{name} is {theirs}, on {first.who} {ours}",
                        _ONE,
                    )
                if theirs != beside[name] and theirs["kind"] != "expert":
                    raise InputError(
                        f"{measurement.who}: tensors.{name} is {theirs}, on the same card of "
                        f"another replica {beside[name]}",
                        _ONE,
                    )
    for name, placement in first.meta["tensors"].items():
        check_cover(name, [measurement.meta["tensors"][name] for measurement in replicas[0]])
        if placement["kind"] == "expert":
            everywhere = [
                measurement.meta["tensors"][name]["length"]
                for row in replicas
                for measurement in row
            ]
            if not any(everywhere):
                raise InputError(
                    f"{name}: an expert that none of {len(everywhere)} ranks holds",
                    "give the rank that does",
                )


def _check_statistics(ranks: Mapping[int, Measurement]) -> None:
    """Refuse ranks with different statistics, but for experts, which may be on some ranks alone."""
    first = next(iter(ranks.values()))
    tensors: Mapping[str, Placement] = first.meta["tensors"]
    experts = {name for name, placement in tensors.items() if placement["kind"] == "expert"}
    reference = {key for key in first.statistics if key.partition("|")[0] not in experts}
    seen: set[str] = set()
    for measurement in ranks.values():
        keys = set(measurement.statistics)
        if experts:
            held = {name for name in experts if measurement.meta["tensors"][name]["length"]}
            elsewhere = sorted(key for key in keys if key.partition("|")[0] in experts - held)
            if elsewhere:
                raise StatisticsError(
                    f"{measurement.who}: {elsewhere[0]} of an expert that is on other ranks", _ONE
                )
        differing = sorted(
            {key for key in keys if key.partition("|")[0] not in experts} ^ reference
        )
        if differing:
            alone = first if differing[0] in reference else measurement
            raise StatisticsError(
                f"{measurement.who}: {differing[0]} is on {alone.who} alone ({len(differing)} "
                "such statistics)",
                "measure every rank with the same --stats",
            )
        if keys - seen:
            _check_keys(measurement)
            seen |= keys


def _check_keys(measurement: Measurement) -> None:
    for (name, site), statistics in by_site(dict.fromkeys(measurement.statistics)).items():
        if name not in measurement.meta["tensors"]:
            raise StatisticsError(
                f"{measurement.who}: {name}|{site} was measured, `tensors` does not list it",
                "measure again",
            )
        observer_kinds(name, site, statistics=statistics)


def _check_samples(replicas: Sequence[Sequence[Measurement]]) -> None:
    for first, *others in replicas:
        for card in others:
            if card.indices != first.indices:
                raise InputError(
                    f"{card.who}: samples {some(card.indices)}, on {first.who} "
                    f"{some(first.indices)}",
                    "give the ranks of one measurement; cards of a replica run the same samples",
                )
            if not all(
                torch.equal(mine, its)
                for mine, its in zip(card.sequences, first.sequences, strict=True)
            ):
                raise InputError(f"{card.who}: other token ids than on {first.who}", _ONE)
    firsts = [row[0] for row in replicas]
    calibration = firsts[0].meta["calibration"]
    times = Counter(index for measurement in firsts for index in measurement.indices)
    twice = sorted(index for index, count in times.items() if count > 1)
    declared = calibration["samples"]
    missing = (
        list(islice((index for index in range(declared) if index not in times), _NAMED))
        if len(times) < declared
        else []
    )
    mesh = firsts[0].meta["mesh"]
    incomplete = len(firsts) < mesh["dp"] or any(
        m.meta.get("unified", {}).get("missing") for m in firsts
    )
    if twice or (missing and not incomplete):
        raise InputError(
            f"samples of the calibration set: on no rank {some(missing)}, on two ranks "
            f"{some(twice)}",
            "measure again",
        )
    tokens = sum(measurement.meta["counts"]["tokens"] for measurement in firsts)
    if tokens > calibration["tokens"] or (tokens < calibration["tokens"] and not incomplete):
        raise InputError(
            f"the ranks saw {tokens} tokens, the calibration set has {calibration['tokens']}",
            "measure again",
        )


def _shape(mesh: Mapping[str, int]) -> tuple[int, ...]:
    return mesh["world"], mesh["tp"], mesh["dp"], mesh["ep"]


def _common(placement: Placement) -> dict[str, Any]:
    return {key: value for key, value in placement.items() if key not in _OF_A_SHARE}


def _field(meta: Mapping[str, Any], path: str) -> Any:
    value: Any = meta
    for part in path.split("."):
        value = value.get(part)
    return value


def _difference(field: str, ours: Any, theirs: Any, first: Measurement) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        name = min(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        return f"{field}.{name} is {theirs.get(name)!r}, on {first.who} {ours.get(name)!r}"
    return f"{field} is {theirs!r}, on {first.who} {ours!r}"
