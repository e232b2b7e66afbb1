"""What goes with what: one checker of what algorithms and transforms say of themselves, before a weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantflow.algorithms import ALGORITHMS, TUNE, supports_of
from quantflow.core.scheme import LinearScheme
from quantflow.core.support import Supports
from quantflow.errors import UnsupportedError
from quantflow.models.graph import Graph
from quantflow.transforms import ROTATIONS, TRANSFORMS, Transform, Turn

KNOWN: Mapping[str, Transform | Turn] = {**ROTATIONS, **TRANSFORMS}
Transforms = Sequence[tuple[str, Mapping[str, Any]]]  # name and options of each


def goes_with(scheme: LinearScheme) -> str:
    """Return the algorithms that go with a scheme, as a sentence has them: `rtn, rtn_mse or gptq`."""
    names = [
        name for name, algorithm in ALGORITHMS.items() if algorithm.SUPPORTS.scheme(scheme) is None
    ]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def check_algorithm(name: str, algorithm: str, scheme: LinearScheme) -> None:
    """Refuse a scheme that an algorithm cannot do.

    Args:
        name: of the artifact.
        algorithm: as recipes name it, `tune` too.
        scheme: of some of its linears.

    Raises:
        UsageError: naming both.
    """
    words = algorithm if algorithm == TUNE else f"algorithm {algorithm}"
    if refusal := supports_of(algorithm).scheme(scheme):
        raise refusal.error(f"{name}: {words} with scheme {scheme.name}", others=goes_with(scheme))


def check_model(name: str, method: str, supports: Supports, *, graph: Graph, ranks: int) -> None:
    """Refuse a model, or cards that share it, that a method does not go with.

    Args:
        name: of the artifact.
        method: an algorithm or a transform, by name.
        supports: what it says of itself.
        graph: the model's.
        ranks: how many cards share it.

    Raises:
        UsageError: it does not go with several cards.
        UnsupportedError: it does not go with mixtures, or with norms that subtract the mean.
    """
    family = graph.family
    if graph.sparse and supports.mixtures is not None:
        raise supports.mixtures.error(
            f"{name}: {method} of a {family.model_type}", family=family.model_type
        )
    if family.discovered and supports.centred_norms is not None:
        told = f"{name}: {method} of a {family.model_type}, whose norms are not known to commute with rotations"
        raise UnsupportedError(told, "leave it out; smoothquant and awq go with every family")
    if family.residual is None and family.mixture is None and supports.centred_norms is not None:
        raise supports.centred_norms.error(
            f"{name}: {method} of a {family.model_type}", family=family.model_type
        )
    if ranks > 1 and supports.ranks is not None:
        raise supports.ranks.error(f"{name}: {method} with --ranks {ranks}")


def check_tuning(name: str, scheme: LinearScheme, *, transforms: Transforms) -> None:
    """Refuse what scales cannot be tuned end to end for.

    Raises:
        UsageError: the scheme, or a rotation.
    """
    check_algorithm(name, TUNE, scheme)
    refusal = supports_of(TUNE).rotations
    for transform, _ in transforms:
        if refusal is not None and transform in ROTATIONS:
            raise refusal.error(f"{name}: {TUNE} with {transform}")


def check_transforms(
    name: str,
    algorithm: str,
    transforms: Transforms,
    *,
    observer: str | None,
    histograms: bool,
    chosen: bool,
) -> None:
    """Refuse transforms that do not go with how weights and static inputs are quantized.

    Args:
        name: of the artifact.
        algorithm: of linears that share an input.
        transforms: in the order in which they run.
        observer: the recipe's word on the ranges of static inputs.
        histograms: whether a histogram cuts such a range short.
        chosen: whether the schemes are chosen for each linear.

    Raises:
        UsageError: naming the first of them that does not.
    """
    for transform, _ in transforms:
        supports = KNOWN[transform].SUPPORTS
        if histograms and supports.histograms is not None:
            raise supports.histograms.error(
                f"{name}: input_observer={observer!r} with transform {transform}"
            )
        rotating = supports_of(algorithm).rotations
        if rotating is not None and transform in ROTATIONS:
            raise rotating.error(f"{name}: {algorithm} with transform {transform}")
        if chosen and supports.chosen_schemes is not None:
            raise supports.chosen_schemes.error(
                f"{name}: target_bpw or max_kld with transform {transform}"
            )


def mixing_inputs(
    name: str,
    schemes: Mapping[str, LinearScheme | None],
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    transforms: Transforms,
    algorithm: str,
) -> dict[str, LinearScheme | None]:
    """Return the schemes with the inputs of the down projections mixed, where a recipe says `hadamard: {down: true}`.

    Args:
        name: of the artifact.
        schemes: of each linear.
        graph: the model's.
        shapes: source tensor name -> shape.
        transforms: (name, options) of each.
        algorithm: as recipes name it.

    Raises:
        UsageError: together with another transform, whose factors do not go through what is mixed,
            or with learned rounding.
    """
    turns = [
        (transform, ROTATIONS[transform], options)
        for transform, options in transforms
        if transform in ROTATIONS
    ]
    mixing = [(transform, turn) for transform, turn, options in turns if options[turn.MIXES_INPUTS]]
    if not mixing:
        return dict(schemes)
    (rotation, turn), *_ = mixing
    methods = [(transform, KNOWN[transform].SUPPORTS) for transform, _ in transforms] + [
        (algorithm, supports_of(algorithm))
    ]
    for method, supports in methods:
        if supports.mixed_inputs is not None:
            raise supports.mixed_inputs.error(
                f"{name}: {rotation} with {turn.MIXES_INPUTS}: true and {method}"
            )
    found = dict(schemes)
    for linear in (
        one
        for layer in graph.layers
        for group in layer.groups
        if group.gated
        for one in group.linears
    ):
        scheme, block = schemes[linear], turn.block_of(shapes[f"{linear}.weight"][1])
        if scheme is not None and block > 1:
            found[linear] = replace(scheme, rotation=block)
    return found
