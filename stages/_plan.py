"""What quantize will do to each linear, worked out from the recipe, the graph and the shard headers alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantflow.algorithms import ALGORITHMS
from quantflow.core.groups import group_size_for
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_float8, with_group_size
from quantflow.errors import UsageError
from quantflow.models.graph import Graph
from quantflow.observers import observers_for
from quantflow.observers.fisher import FisherObserver
from quantflow.transforms import TRANSFORMS
from stages._config import Quantize, nearest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One entry of the recipe, resolved.

    Attributes:
        schemes: every linear of the decoder layers, in model order; None is left as it is.
        algorithm: a key of ALGORITHMS.
        transforms: (name, options) in the order in which they run.
        needs: the statistics of a linear's input that have to be there.
        file_to_file: whether weights go from file to file and the model never runs: one process does that where rows are
            quantized by themselves and no measurement is given, several cards where they are rounded to nearest.
    """

    name: str
    schemes: Mapping[str, LinearScheme | None]
    algorithm: str
    transforms: tuple[tuple[str, Mapping[str, Any]], ...]
    needs: frozenset[str]
    file_to_file: bool = False

    @property
    def needs_hessian(self) -> bool:
        """Whether the calibration text runs through the model again, layer by layer."""
        return "hessian_sum" in self.needs

    @property
    def needs_measurement(self) -> bool:
        """Whether a measurement has to be given."""
        return bool(self.needs)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data, for state keys and manifests."""
        schemes = {name: None if scheme is None else asdict(scheme) for name, scheme in self.schemes.items()}
        transforms = [{name: dict(options)} for name, options in self.transforms]
        return {"schemes": schemes, "algorithm": self.algorithm, "transforms": transforms}


def resolve(
    entry: Quantize, graph: Graph, shapes: Mapping[str, Sequence[int]], *, measured: bool = True, ranks: int = 1
) -> Plan:
    """Return the plan for one entry of the recipe.

    Args:
        entry: the recipe's words.
        graph: the model's linears.
        shapes: source tensor name -> shape, from the shard headers.
        measured: whether a measurement will be given; with one the artifact of one process is proven by running its first
            tokens.
        ranks: how many cards share the model.

    Raises:
        UsageError: a pattern matches nothing, an algorithm or transform is unknown or does not fit, a group size does
            not divide a linear's input, or nothing is left to quantize.
    """
    base = scheme_of(entry.scheme, entry.group_size, entry.float8)
    algorithm = entry.algorithm or base.algorithm
    if algorithm not in ALGORITHMS:
        raise UsageError(f"{entry.name}: algorithm {algorithm!r} is unknown", nearest(algorithm, list(ALGORITHMS)))
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    ignored = {name for pattern in entry.ignore for name in _matches(pattern, modules, f"{entry.name}: ignore")}
    schemes: dict[str, LinearScheme | None] = {name: None if name in ignored else base for name in graph.linears}
    for override in entry.overrides:
        for name in _matches(override.match, list(graph.linears), f"{entry.name}: overrides"):
            flavour = entry.float8 if preset(override.scheme).weights.kind == "float" else None
            schemes[name] = None if name in ignored else scheme_of(override.scheme, override.group_size, flavour)
    for name, scheme in schemes.items():
        if scheme is not None and (not entry.mixed or name in overridden(entry, graph)):  # others get one that fits
            group_size_for(scheme.weights, shapes[f"{name}.weight"][1], name=name)
        if scheme is not None:
            _check_algorithm(entry.name, algorithm, scheme)
    if not any(schemes.values()):
        raise UsageError(f"{entry.name}: ignore leaves none of {len(schemes)} linears to quantize", "ignore fewer")
    transforms = _transforms(entry, base)
    used = [scheme for scheme in schemes.values() if scheme is not None]
    needs = _needs(algorithm, [name for name, _ in transforms], used) | _needs_of_choice(entry, transforms)
    alone = ALGORITHMS[algorithm].BY_ROW and not transforms
    by_row = all(scheme.weights.granularity in ("per_channel", "per_group", "per_block") for scheme in used)
    return Plan(
        name=entry.name,
        schemes=schemes,
        algorithm=algorithm,
        transforms=transforms,
        needs=needs,
        file_to_file=alone and (by_row and not (measured or needs) if ranks == 1 else algorithm == "rtn"),
    )


def plan_from(summary: Mapping[str, Any]) -> Plan:
    """Return the plan that a finished quantize folder followed, without what it asked of a measurement.

    Args:
        summary: the content of quantize.json.
    """
    plan = summary["plan"]
    return Plan(
        name=summary["recipe"]["name"],
        schemes={name: None if data is None else scheme_from(data) for name, data in plan["schemes"].items()},
        algorithm=plan["algorithm"],
        transforms=(),
        needs=frozenset(),
        file_to_file=summary["proof"] == "tensors",
    )


def scheme_from(data: Mapping[str, Any]) -> LinearScheme:
    """Return the scheme that quantize.json spells."""
    inputs = data["input"]
    return LinearScheme(
        **{
            **data,
            "weights": TensorScheme(**data["weights"]),
            "input": None if inputs is None else TensorScheme(**inputs),
            "transforms": tuple(data["transforms"]),
        }
    )


def needs_of(entry: Quantize) -> frozenset[str]:
    """Return the statistics that one entry of the recipe asks for, whatever the model.

    Raises:
        UsageError: the scheme, algorithm or a transform is unknown.
    """
    schemes = [scheme_of(entry.scheme, entry.group_size)]
    schemes += [scheme_of(override.scheme, override.group_size) for override in entry.overrides]
    algorithm = entry.algorithm or schemes[0].algorithm
    if algorithm not in ALGORITHMS:
        raise UsageError(f"{entry.name}: algorithm {algorithm!r} is unknown", nearest(algorithm, list(ALGORITHMS)))
    transforms = _transforms(entry, schemes[0])
    return _needs(algorithm, [name for name, _ in transforms], schemes) | _needs_of_choice(entry, transforms)


def overridden(entry: Quantize, graph: Graph) -> frozenset[str]:
    """Return the linears that an override names.

    Raises:
        UsageError: a pattern matches nothing.
    """
    linears = list(graph.linears)
    return frozenset(n for each in entry.overrides for n in _matches(each.match, linears, f"{entry.name}: overrides"))


def entries_of(text: str) -> tuple[Quantize, ...]:
    """Return the artifacts that `W4A16:gptq,W4A16@4.25,FP8` means.

    After a colon stands the algorithm, where it is not the scheme's usual one. With @ schemes are chosen for so many bits per
    weight, with zero points where the named scheme has them.

    Raises:
        UsageError: a scheme is unknown, one stands twice, or what follows @ is no number.
    """
    entries = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        rest, at, target = word.partition("@")
        scheme, _, algorithm = rest.partition(":")
        try:
            bits = float(target) if at else None
        except ValueError as error:
            raise UsageError(f"schemes {text!r}: {target!r} is no number of bits", "write W4A16@4.25") from error
        name = word.lower().replace(":", "-").replace("@", "-at-")
        entries.append(Quantize(name=name, scheme=scheme, algorithm=algorithm or None, target_bpw=bits))
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"schemes {text!r}: {len(names)} of them, {len(set(names))} different", "name each scheme once")
    return tuple(entries)


def statistics_for(entries: Sequence[Quantize]) -> tuple[str, ...]:
    """Return the observers that measure has to run for all of these artifacts, possibly none.

    Hessians are not among them: each lives for one layer, inside quantize, which needs the token ids alone.

    Raises:
        UsageError: a scheme, algorithm or transform is unknown.
    """
    needs = frozenset().union(*(needs_of(entry) for entry in entries))
    return tuple(name for name in observers_for(needs) if name != "hessian")


def scheme_of(name: str, group_size: int | None, flavour: str | None = None) -> LinearScheme:
    """Return the scheme that a recipe means by a name, a group size and a flavour of float8; None is the preset's.

    Raises:
        SchemeError: no preset has that name, or it has no groups or no float8.
    """
    scheme = preset(name)
    if group_size is not None:
        scheme = with_group_size(scheme, group_size)
    return scheme if flavour is None else with_float8(scheme, flavour)


def _check_algorithm(name: str, algorithm: str, scheme: LinearScheme) -> None:
    if algorithm != "rtn" and scheme.weights.kind != "int":
        raise UsageError(
            f"{name}: algorithm {algorithm} with scheme {scheme.name}",
            f"{algorithm} chooses integers; use algorithm rtn for float8",
        )


def _needs_of_choice(entry: Quantize, transforms: Sequence[tuple[str, Mapping[str, Any]]]) -> frozenset[str]:
    """Return the statistics that schemes are chosen by, none where they are given.

    Raises:
        UsageError: a transform would change the weights whose sensitivity was measured.
    """
    if not entry.mixed:
        return frozenset()
    if transforms:
        raise UsageError(
            f"{entry.name}: target_bpw or max_kld with transform {transforms[0][0]}",
            "sensitivities are those of the weights as they are: leave transforms out",
        )
    return frozenset(FisherObserver.STATISTICS) - {"count"}


def _matches(pattern: str, names: Sequence[str], where: str) -> list[str]:
    """Return the names that an exact name or a `re:` pattern matches, at least one."""
    match: Callable[[str], object] = pattern.__eq__
    if pattern.startswith("re:"):
        try:
            match = re.compile(pattern[3:]).match
        except re.error as error:
            raise UsageError(f"{where}: {pattern!r} is no regular expression: {error}", "mend the pattern") from error
    found = [name for name in names if match(name) not in (None, False)]
    if not found:
        raise UsageError(f"{where}: {pattern!r} matches none of {len(names)} modules", f"{nearest(pattern, names[:7])}, ...")
    return found


def _transforms(entry: Quantize, base: LinearScheme) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    given = entry.transforms if entry.transforms is not None else tuple({name: {}} for name in base.transforms)
    result = []
    for item in given:
        for name, options in item.items():
            if name not in TRANSFORMS:
                raise UsageError(f"{entry.name}: transform {name!r} is unknown", nearest(str(name), list(TRANSFORMS)))
            if not isinstance(options, Mapping | None):
                raise UsageError(f"{entry.name}: {name}: {options!r} is not a mapping", f"write {{{name}: {{alpha: 0.5}}}}")
            merged = {"alpha": 0.5, **(options or {})}
            for key in merged:
                if key != "alpha":
                    raise UsageError(f"{entry.name}: {name} has no option {key!r}", nearest(str(key), ["alpha"]))
            if not isinstance(merged["alpha"], float | int) or not 0 <= merged["alpha"] <= 1:
                raise UsageError(f"{entry.name}: {name} alpha={merged['alpha']!r}", "give a number from 0 to 1")
            result.append((name, {"alpha": float(merged["alpha"])}))
    return tuple(result)


def _needs(algorithm: str, transforms: Sequence[str], schemes: Sequence[LinearScheme]) -> frozenset[str]:
    needs = set(ALGORITHMS[algorithm].NEEDS)
    for name in transforms:
        needs |= set(TRANSFORMS[name].NEEDS)
    for scheme in schemes:
        if scheme.input is not None and not scheme.input.dynamic:
            needs |= {"amax"} if scheme.input.symmetric else {"min_val", "max_val"}
    return frozenset(needs)
