"""Which algorithm goes with which scheme and model: what is refused before a weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantflow.core.scheme import LinearScheme
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.graph import Graph
from quantflow.transforms import ROTATIONS, hadamard

LEARNING = "signround"  # a key of BLOCK_ALGORITHMS
_INTEGERS = ("hqq", "yaqa", LEARNING)  # algorithms that have nothing to choose of float8
_BY_ROW = ("rtn_mse", LEARNING)  # and that have nothing to do where all rows share a scale


def check_algorithm(name: str, algorithm: str, scheme: LinearScheme) -> None:
    """Refuse a scheme that an algorithm cannot do.

    Args:
        name: of the artifact.
        algorithm: as recipes name it.
        scheme: of some of its linears.

    Raises:
        UsageError: naming both.
    """
    if algorithm in _INTEGERS and scheme.weights.kind != "int":
        raise UsageError(
            f"{name}: algorithm {algorithm} with scheme {scheme.name}",
            f"{algorithm} chooses integers; use rtn, rtn_mse or gptq for float8",
        )
    if algorithm in _BY_ROW and scheme.weights.granularity == "per_tensor":
        raise UsageError(
            f"{name}: algorithm {algorithm} with scheme {scheme.name}, whose weights share one scale",
            "use rtn or gptq, or a scale per channel or block such as FP8_DYNAMIC's",
        )


def check_learning(name: str, scheme: LinearScheme, graph: Graph, *, ranks: int) -> None:
    """Refuse what rounding cannot be learned for.

    Args:
        name: of the artifact.
        scheme: of some of its linears.
        graph: the model's.
        ranks: how many cards share it.

    Raises:
        UsageError: the scheme is float8, or there are several cards.
        UnsupportedError: a mixture of experts.
    """
    check_algorithm(name, LEARNING, scheme)
    if graph.sparse:
        raise UnsupportedError(
            f"{name}: {LEARNING} of a {graph.family.model_type}; experts' rounding is not learned", "use gptq for mixtures"
        )
    if ranks > 1:
        raise UsageError(f"{name}: {LEARNING} with --ranks {ranks}", "quantize with one process, or use gptq")


def check_tuning(name: str, scheme: LinearScheme, graph: Graph, *, transforms: Sequence[str], ranks: int) -> None:
    """Refuse what scales cannot be tuned end to end for.

    Args:
        name: of the artifact.
        scheme: of some of its linears.
        graph: the model's.
        transforms: by name.
        ranks: how many cards share it.

    Raises:
        UsageError: the scheme is float8, has one scale for all rows, or quantizes inputs; a rotation; several cards.
        UnsupportedError: a mixture of experts.
    """
    how = "leave `tune` out, or give `--tune 0`"
    if scheme.weights.kind != "int" or scheme.weights.granularity == "per_tensor" or scheme.input is not None:
        words = "it tunes scales per channel or group of integer weights, inputs as they are"
        raise UsageError(f"{name}: tune with scheme {scheme.name}; {words}", how)
    if rotations := [transform for transform in transforms if transform in ROTATIONS]:
        raise UsageError(f"{name}: tune with {rotations[0]}; it runs the layers of the model as it is", how)
    if graph.sparse:
        raise UnsupportedError(f"{name}: tune of a {graph.family.model_type}; experts' scales are not tuned", how)
    if ranks > 1:
        raise UsageError(f"{name}: tune with --ranks {ranks}; it runs in one process", f"{how}, or quantize with one process")


def mixing_inputs(
    name: str,
    schemes: Mapping[str, LinearScheme | None],
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    transforms: Sequence[tuple[str, Mapping[str, Any]]],
    learned: bool,
) -> dict[str, LinearScheme | None]:
    """Return the schemes with the inputs of the down projections mixed, where a recipe says `hadamard: {down: true}`.

    Args:
        name: of the artifact.
        schemes: of each linear.
        graph: the model's.
        shapes: source tensor name -> shape.
        transforms: (name, options) of each.
        learned: whether rounding is learned.

    Raises:
        UsageError: together with another transform, whose factors do not go through what is mixed, or with learned rounding.
    """
    if not any(transform == "hadamard" and options["down"] for transform, options in transforms):
        return dict(schemes)
    others = [transform for transform, _ in transforms if transform != "hadamard"] + ([LEARNING] if learned else [])
    if others:
        raise UsageError(f"{name}: hadamard with down: true and {others[0]}", f"leave {others[0]} out, or write down: false")
    found = dict(schemes)
    for linear in (one for layer in graph.layers for group in layer.groups if group.gated for one in group.linears):
        scheme, block = schemes[linear], hadamard.block_of(shapes[f"{linear}.weight"][1])
        if scheme is not None and block > 1:
            found[linear] = replace(scheme, rotation=block)
    return found
