"""What goes with what: one checker of the `SUPPORTS` of algorithms and transforms.

It runs before a weight is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantflow.algorithms import ALGORITHMS, TUNE, supports_of
from quantflow.core.scheme import LinearScheme
from quantflow.core.support import Supports
from quantflow.errors import UnsupportedError
from quantflow.models.family import FAMILIES
from quantflow.models.graph import Graph
from quantflow.models.residual import residual_of
from quantflow.planning.recipe import CHOICE
from quantflow.transforms import ROTATIONS, TRANSFORMS, HadamardTransform, Transform

KNOWN: Mapping[str, Transform | HadamardTransform] = {**ROTATIONS, **TRANSFORMS}
Transforms = Sequence[tuple[str, Mapping[str, Any]]]  # name and options of each


def goes_with(scheme: LinearScheme) -> str:
    """Algorithms that go with a scheme, as a sentence lists them: `rtn, rtn_mse or gptq`."""
    names = [
        name for name, algorithm in ALGORITHMS.items() if algorithm.SUPPORTS.scheme(scheme) is None
    ]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def check_algorithm(name: str, algorithm: str, scheme: LinearScheme) -> None:
    """Refuse a scheme that an algorithm cannot do.

    Args:
        name: name of the artifact, for the message.
        algorithm: name of the algorithm in recipes; `tune` too.
        scheme: scheme of some linears.

    Raises:
        UsageError: the algorithm cannot do the scheme; the message names both.
    """
    words = algorithm if algorithm == TUNE else f"algorithm {algorithm}"
    if refusal := supports_of(algorithm).scheme(scheme):
        raise refusal.error(f"{name}: {words} with scheme {scheme.name}", others=goes_with(scheme))


def check_model(name: str, method: str, supports: Supports, *, graph: Graph, ranks: int) -> None:
    """Refuse a model, or several ranks, that a method does not go with.

    Args:
        name: name of the artifact, for the message.
        method: name of an algorithm or a transform.
        supports: what the method declares about itself.
        graph: graph of the model.
        ranks: number of ranks that share the model.

    Raises:
        UsageError: the method does not go with several ranks.
        UnsupportedError: the method does not go with mixtures, or with the family's norms and
            linears.
    """
    family = graph.family
    if graph.sparse and supports.mixtures is not None:
        raise supports.mixtures.error(
            f"{name}: {method} of a {family.model_type}", family=family.model_type
        )
    if supports.centred_norms is not None:
        row = FAMILIES.get(family.model_type)
        if row is not None and row.centered:
            raise supports.centred_norms.error(
                f"{name}: {method} of a {family.model_type}", family=family.model_type
            )
        try:
            residual_of(graph)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {method}: {error.cause}", error.remedy) from error
    if ranks > 1 and supports.ranks is not None:
        raise supports.ranks.error(f"{name}: {method} with --ranks {ranks}")


def check_tuning(name: str, scheme: LinearScheme, *, transforms: Transforms) -> None:
    """Refuse a scheme or a rotation with which scales cannot be tuned end to end.

    Raises:
        UsageError: the scheme cannot be tuned, or a transform is a rotation.
    """
    check_algorithm(name, TUNE, scheme)
    refusal = supports_of(TUNE).rotations
    for transform, _ in transforms:
        if refusal is not None and transform in ROTATIONS:
            raise refusal.error(f"{name}: {TUNE} with {transform}")


def check_transforms(
    name: str,
    transforms: Transforms,
    *,
    observer: str | None,
    histograms: bool,
    chosen: bool,
) -> None:
    """Refuse transforms that do not go with how static inputs and schemes are chosen.

    Args:
        name: name of the artifact, for the message.
        transforms: transforms in the order in which they run.
        observer: the recipe's `input_observer`.
        histograms: whether a histogram cuts the range of a static input.
        chosen: whether schemes are chosen for each linear.

    Raises:
        UsageError: a transform does not go with them; the message names the first.
    """
    for transform, _ in transforms:
        supports = KNOWN[transform].SUPPORTS
        if histograms and supports.histograms is not None:
            raise supports.histograms.error(
                f"{name}: input_observer={observer!r} with transform {transform}"
            )
        if chosen and supports.chosen_schemes is not None:
            raise supports.chosen_schemes.error(f"{name}: {CHOICE} with transform {transform}")


def mixing_inputs(
    name: str,
    schemes: Mapping[str, LinearScheme | None],
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    transforms: Transforms,
    algorithm: str,
) -> dict[str, LinearScheme | None]:
    """Schemes with rotated inputs of down projections, as `hadamard: {down: true}` asks.

    Args:
        name: name of the artifact, for the message.
        schemes: scheme of each linear; None is not quantized.
        graph: graph of the model.
        shapes: source tensor name -> shape.
        transforms: (name, options) of each transform.
        algorithm: name of the algorithm in recipes.

    Raises:
        UsageError: another transform stands beside it, whose factors do not pass through the
            rotation, or rounding is learned.
        UnsupportedError: the model is a mixture, whose experts' inputs no runtime mixes.
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
    if graph.sparse:
        raise UnsupportedError(
            f"{name}: {rotation} with {turn.MIXES_INPUTS}: true of a {graph.family.model_type}; "
            "the experts of a layer are one module in other programs, of which transform_config "
            "names no part",
            f"write {turn.MIXES_INPUTS}: false",
        )
    methods = [(transform, KNOWN[transform].SUPPORTS) for transform, _ in transforms] + [
        (algorithm, supports_of(algorithm))
    ]
    for method, supports in methods:
        if supports.mixed_inputs is not None:
            raise supports.mixed_inputs.error(
                f"{name}: {rotation} with {turn.MIXES_INPUTS}: true and {method}"
            )
    changed = dict(schemes)
    for linear in (
        one
        for layer in graph.layers
        for group in layer.groups
        if group.gated
        for one in group.linears
    ):
        scheme = schemes[linear]
        block = turn.block_of(shapes[f"{linear}.weight"][1])
        if scheme is not None and block > 1:
            changed[linear] = replace(scheme, rotation=block)
    return changed
