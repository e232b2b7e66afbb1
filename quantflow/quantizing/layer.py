"""Quantization of one decoder layer, from its weights to the tensors that the artifact will hold.

The steps have a fixed order, since each reads what the one before left:

1. Collect statistics of the calibration text (quantflow/quantizing/layer_traffic.py).
2. Smooth (quantflow/quantizing/smoothing.py), and prove on the canary that the layer is still the
   same function.
3. Treat experts that got too few tokens (quantflow/planning/experts.py).
4. Quantize the linears, group by group: `_quantize_groups`. Where weights are refitted, each group
   is first fitted to the inputs that the groups before it left
   (quantflow/quantizing/refitting.py).
5. Learn rounding from there, where the plan says so (quantflow/quantizing/learned_rounding.py).
6. Put the quantized linears in place, for the error of each output and for the next layer.

The result names every tensor of the layer as the artifact does, so a layer's file is all that a
resumed run needs.

Cards share step 4 (quantflow/distributed/team.py): each collects the Hessians of its own groups,
those of an expert together, and quantizes these, then all exchange the results. Every card does all
other steps.

Peak memory has three candidates. While sequences run: the layer and half a Hessian per group. While
a fold is searched: one whole Hessian beside these. While a group is quantized: its whole Hessian,
which its algorithm overwrites, and the weights and half Hessians of the groups still to come.
Refitting and learned rounding keep all weights until the end. Weights are as stored, or float32
where a transform may change them.

All of this lies on the layer's device (quantflow/core/device.py). Host memory has the tensors of
the layer's file, the statistics of static inputs, the sums of gradients' products, and the group
under way of an algorithm that does not compute on a device (`Algorithm.ON_DEVICE`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantflow.algorithms import ALGORITHMS, NEAREST, REFIT
from quantflow.algorithms.refit import Refitted
from quantflow.core.cast import WIDER_MODEL, cast
from quantflow.core.device import HOST, Device, fetched
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.distributed.team import Team
from quantflow.errors import StatisticsError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer, LinearGroup
from quantflow.models.hooks import watch
from quantflow.models.parameters import materialize_, release_
from quantflow.numerics import output_blocks
from quantflow.numerics.output_errors import SecondMoment, compared
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver, shrink_
from quantflow.planning.experts import ROUTED, SIDE_BY_SIDE
from quantflow.planning.plan import Plan
from quantflow.planning.requirements import GRADIENT_SUM
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.layer_error import error_from, relative_error, weight_sums
from quantflow.quantizing.layer_traffic import Traffic, collect_traffic
from quantflow.quantizing.learned_rounding import learn
from quantflow.quantizing.open_layer import (
    Execution,
    LayerMeasurement,
    LayerText,
    OpenLayer,
    RoundedLinear,
    reference_linear,
)
from quantflow.quantizing.refitting import LayerRefit, writers_of
from quantflow.quantizing.rotated import Rotated
from quantflow.quantizing.smoothing import smooth_
from quantflow.quantizing.static_inputs import input_of
from quantflow.quantizing.undercalibrated import (
    Short,
    Treatment,
    left_alone,
    record_of,
    refuse,
    short_of_tokens,
    treat,
)
from quantflow.transforms import awq

FORMAT = FORMATS[DEFAULT]
# ||change||^2 / ||output||^2 of the canary: a float32 reordering, not another function
SMOOTHING_TOLERANCE = 1e-6
AHEAD = 4  # groups for each worker that are begun, or encoded and not yet taken

Decision = TypeVar("Decision")
Gradient = Callable[[str], Tensor]  # linear -> `gradient_sum` of its smoothed weight, read now


@dataclass(frozen=True, kw_only=True)
class EncodedLinear:
    """A linear as the layer's file holds it.

    Attributes:
        tensors: tensors by their names in the file, in host memory.
        error: relative squared error of its weight.
        decisions: notes of the algorithm, of its input, and of ranges that were cut.
    """

    tensors: Mapping[str, Tensor]
    error: float
    decisions: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """Everything that a layer's file and record hold.

    Attributes:
        tensors: name in the artifact -> tensor, for the whole layer.
        errors: linear -> {"weight", "output"}: relative squared error, output on the canary, where
            it reaches the linear.
        decisions: linear -> notes of the transforms and the algorithm.
        changed: source names of tensors that are not quantized and not as in the source.
        factors: see `Smoothed.factors`.
        experts: the record's entry on the layer's experts; None where it has none.
    """

    tensors: Mapping[str, Tensor]
    errors: Mapping[str, Mapping[str, float]]
    decisions: Mapping[str, Mapping[str, Any]]
    changed: frozenset[str]
    factors: Mapping[str, Tensor]
    experts: Mapping[str, Any] | None

    def record(self) -> dict[str, Any]:
        """The layer's record of its quantization."""
        found = {
            "errors": self.errors,
            "decisions": self.decisions,
            "changed": sorted(self.changed),
        }
        return found if self.experts is None else {**found, "experts": self.experts}


def quantize_layer(
    opened: OpenLayer, text: LayerText, *, measured: LayerMeasurement, execution: Execution
) -> QuantizedLayer:
    """Quantize a layer and leave its module quantized.

    Args:
        opened: the layer in memory; its module is modified.
        text: the sequences that run through it.
        measured: the measurement's share of it.
        execution: workers, progress and the other cards.

    Raises:
        StatisticsError: a statistic is missing, or smoothing changed the layer's function.
    """
    plan = opened.plan
    # 1. statistics; the original layer's answer to the canary comes first, for the proof of step 2
    original = opened.stream.run(opened.module, text.canary) if plan.smoothings else None
    collects = plan.collects(experts=opened.layer.experts > 0)
    traffic = collect_traffic(opened, text, execution=execution) if collects else Traffic()
    hessians = traffic.hessians
    routed = measured.routed if traffic.routed is None else traffic.routed
    # 2. smoothing changes weights, Hessians and the other statistics alike
    smoothed = smooth_(
        opened,
        _merge_decisions(measured.statistics, traffic.statistics),
        hessians=hessians,
        execution=execution,
    )
    del traffic  # the rows, which searches have read
    inputs, outputs, canary = canary_traffic(
        opened.stream, opened.module, opened.layer, text.canary
    )
    _refuse_changed(opened, original, canary)
    # 3. experts
    treatment, experts = _treat_experts(
        opened, smoothed.statistics, routed=routed, fed=measured.fed
    )
    # 4 and 5. groups, and learned rounding; each card its own groups
    refit = None
    if plan.refit:
        writers = writers_of(opened, text.canary, outputs=outputs, output=canary)
        refit = LayerRefit(opened, text, writers=writers)
    own = _quantize_groups(
        opened,
        text,
        hessians=hessians,
        treatment=treatment,
        gradient=partial(_gradient, opened, measured, smoothed.factors),
        refit=refit,
        execution=execution,
    )
    if refit is not None:
        refit.end(workers=execution.workers)
        _release(opened, list(own))
    linears = _exchange(opened.layer, own, team=execution.team)
    give_back_holes()
    # 6. quantized linears in place; `inputs` and `outputs` are those of the smoothed layer before
    tensors = {key: tensor for linear in linears.values() for key, tensor in linear.tensors.items()}
    install_all(opened.module, opened.layer, plan, tensors, device=opened.device)
    errors = {name: {"weight": linear.error} for name, linear in linears.items()}
    for name in errors.keys() & outputs.keys():  # the canary does not reach every expert
        errors[name]["output"] = relative_error(
            outputs[name], opened.child(name)(inputs[name].float()), name=name
        )
    changed = frozenset([*opened.rotated, *smoothed.changed])
    # The file holds the whole layer: norms, biases and linears that stay as well.
    for name in opened.stored:
        if name.removesuffix(".weight") not in linears:
            kept = opened.read(name)
            tensors[name] = (
                opened.device.fetch(
                    cast(name, opened.current(name), kept.dtype, remedy=WIDER_MODEL)
                )
                if name in changed
                else kept
            )
    of_experts = {name: {"experts": note} for name, note in treatment.decisions.items()}
    of_linears = {name: linear.decisions for name, linear in linears.items()}
    return QuantizedLayer(
        tensors=tensors,
        errors=errors,
        decisions=_merge_decisions(_merge_decisions(smoothed.decisions, of_experts), of_linears),
        changed=changed,
        factors=smoothed.factors,
        experts=experts,
    )


def install_all(
    module: nn.Module,
    layer: Layer,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    *,
    device: Device = HOST,
) -> None:
    """Put a layer's quantized linears in place from its file's tensors.

    The other linears get float32 weights.

    Args:
        module: the layer's module, on `device`.
        layer: its names.
        plan: the scheme of each linear.
        tensors: the file's tensors, in host memory.
        device: the device of the quantized linears.
    """
    for name in layer.linears:
        scheme = plan.schemes[name]
        old: Any = module.get_submodule(layer.relative(name))
        if scheme is not None:
            quantized = FORMAT.decode(name, tensors, scheme).to(device.kind)
            module.set_submodule(layer.relative(name), reference_linear(quantized, old.bias))
            give_back_holes()
        else:
            # In one product from float32, as export's proof runs it: equal bits then do not depend
            # on the BLAS.
            materialize_(old, {"weight": old.weight.detach()}, dtype=torch.float32)


def canary_traffic(
    stream: LayerStream, module: nn.Module, layer: Layer, canary: State
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Each linear's input and output on the canary, and the layer's output, [1, S, H]."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def remember(name: str, x: Tensor, y: Tensor) -> None:
        inputs[name], outputs[name] = x, y

    with watch(module, {layer.relative(name): partial(remember, name) for name in layer.linears}):
        return inputs, outputs, stream.run(module, canary)


def _merge_decisions(
    first: Mapping[str, Mapping[str, Decision]], second: Mapping[str, Mapping[str, Decision]]
) -> dict[str, dict[str, Decision]]:
    """Two tables of each linear in one; the second is right where both have an entry."""
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in {**first, **second}}


def _refuse_changed(opened: OpenLayer, original: Tensor | None, smoothed: Tensor) -> None:
    """Refuse transforms after which the layer is another function.

    Args:
        opened: the layer.
        original: its output on the canary before transforms; None where nothing smooths.
        smoothed: its output after them.
    """
    prefix = opened.layer.prefix
    alone = opened.stream.alone
    change = (
        0.0 if original is None else relative_error(alone(original), alone(smoothed), name=prefix)
    )
    if change > SMOOTHING_TOLERANCE:
        raise StatisticsError(
            f"{prefix}: transforms changed the layer's output by {change:.3g} (relative, squared)",
            "this family's norms and linears do not fit together as its graph says; leave "
            "transforms out",
        )


def _treat_experts(
    opened: OpenLayer,
    statistics: Mapping[str, Mapping[str, Tensor]],
    *,
    routed: Mapping[str, int] | None,
    fed: str | None,
) -> tuple[Treatment, dict[str, Any] | None]:
    """Apply the policy for experts that got too few tokens.

    Args:
        opened: the layer.
        statistics: statistics of each linear's input.
        routed: expert -> tokens that the router sent to it; None where nobody counted.
        fed: the tokens that the measurement's statistics show each expert.

    Returns:
        The treatment of the layer's statistics and linears; the record's entry on its experts.

    Raises:
        StatisticsError: there are such experts, and the policy is `error`.
    """
    layer = opened.layer
    policy = opened.plan.experts
    few = list[Short]()
    if policy is None or not layer.experts:
        untouched = Treatment(
            statistics=statistics, rounded=frozenset(), damped=frozenset(), decisions={}
        )
        return untouched, record_of(layer, routed, fed=fed, shorts=()) if routed else None
    if routed is not None and (policy.weights or fed == ROUTED):
        shapes = {name: info.shape for name, info in opened.source.checkpoint.infos.items()}
        few = short_of_tokens(layer, policy, routed, schemes=opened.plan.schemes, shapes=shapes)
    shorts = [] if policy.name == "all" else few
    if policy.name == "error":
        refuse(layer.prefix, shorts)
    shown = opened.plan.fed if policy.weights else fed
    note = None
    if opened.plan.learned is not None:
        note = "its rounding is not learned"
    elif opened.plan.needs_gradients and policy.name == "all":
        note = "its gradients' sum damped by its mean diagonal"
    treatment = left_alone(treat(layer, policy, statistics, shorts), few, note=note)
    tokens = {
        name: routed[group.expert]
        for group in layer.groups
        if routed is not None and group.expert is not None
        for name in group.linears
    }
    return replace(treatment, tokens=tokens), record_of(layer, routed, fed=shown, shorts=shorts)


def _gradient(
    opened: OpenLayer, measured: LayerMeasurement, factors: Mapping[str, Tensor], name: str
) -> Tensor:
    """The `gradient_sum` of a linear's smoothed weight, in host memory, read on demand."""
    gradient_sum = measured.gradient(name)
    if gradient_sum is None:
        raise StatisticsError(
            f"{name}|gradient|{GRADIENT_SUM}: the measurement does not hold it",
            f"measure again with --stats gradient, or --for with {opened.plan.algorithm} as the "
            "algorithm",
        )
    if isinstance(opened.source, Rotated):
        gradient_sum = opened.source.gradient_sum(name, gradient_sum)
    divisors = factors.get(f"{name}|divisors")
    return (
        gradient_sum
        if divisors is None
        else output_blocks.scale_(gradient_sum, opened.device.fetch(divisors))
    )


def _shrunk(gradient: Gradient, treatment: Treatment, name: str) -> Tensor:
    """The `gradient_sum` of a linear; an expert's is shrunk, the more the fewer its tokens.

    A sum over n tokens of gradients by O outputs gets O / n of its mean on top: that is better at 2
    to 8 tokens per feature, and the same at 16 (benchmarks/expert_gradients.py). Of experts with
    too few tokens it gets its mean, as their Hessians do.
    """
    sums = gradient(name)
    tokens = treatment.tokens.get(name)
    if tokens is None:
        return sums
    noise = output_blocks.width(sums.shape[0]) / max(1, tokens)
    return output_blocks.shrink_(sums, share=1.0 if name in treatment.few else min(1.0, noise))


def _quantize_groups(
    opened: OpenLayer,
    text: LayerText,
    *,
    hessians: dict[int, HessianObserver],
    treatment: Treatment,
    gradient: Gradient,
    refit: LayerRefit | None,
    execution: Execution,
) -> dict[str, EncodedLinear]:
    """Quantize the linears of this card's groups.

    Each weight is let go of once it is encoded, unless later groups are refitted with it.

    Args:
        opened: the layer.
        text: the sequences from which rounding is learned, where the plan says so.
        hessians: group's number -> Hessian; each is taken out where its group is quantized.
        treatment: the statistics of each linear's input, and experts that got too few tokens.
        gradient: reader of `gradient_sum`, for algorithms that need it.
        refit: fits each group to the inputs that the quantized model hands it; None where weights
            stay.
        execution: workers, progress and the other cards.
    """
    plan = opened.plan
    owns = execution.team.owns
    # Other cards' weights go first: no card then holds more than one that quantizes all groups.
    for number, group in enumerate(opened.layer.groups):
        if not owns(number):
            _release(opened, group.linears)
    owned = [number for number in range(len(opened.layer.groups)) if owns(number)]
    encoded: dict[str, EncodedLinear] = {}
    waiting: dict[str, RoundedLinear] = {}
    alone = replace(execution, workers=SEQUENTIAL, host_workers=SEQUENTIAL)
    groups = opened.layer.groups

    def turn(number: int) -> int:
        return 0 if refit is None else opened.layer.turn(groups[number])

    turns = [
        numbers
        for _, same in itertools.groupby(sorted(owned, key=turn), turn)
        for numbers in _side_by_side(opened, list(same), workers=execution.workers)
    ]
    for numbers in turns:
        if refit is not None:
            refit.begin(groups[numbers[0]], execution=execution)
        quantize = partial(
            _quantize_group,
            opened,
            hessians=hessians,
            treatment=treatment,
            gradient=gradient,
            refit=refit,
            execution=execution if len(numbers) == 1 else alone,
        )
        workers = SEQUENTIAL if len(numbers) == 1 else execution.workers
        # groups of an expert differ in size: a worker takes the next one before its turn comes
        results = workers.stream(quantize, numbers, ahead=AHEAD * workers.count)
        for number in numbers:
            names = map(opened.layer.relative, groups[number].linears)
            execution.progress.doing(", ".join(names))
            rounded = next(results)
            encoded |= rounded.encoded
            waiting |= rounded.waiting
            if refit is not None:
                tensors = {name: linear.tensors for name, linear in rounded.encoded.items()}
                refit.put(groups[number], tensors)
            del rounded  # before the next group is quantized
    if plan.learned is not None and waiting:
        waiting = learn(
            opened,
            text,
            rounded=waiting,
            fixed=treatment.few,
            learned=plan.learned,
            execution=execution,
        )
        encoded = _encode(opened, waiting, workers=execution.workers)
    return encoded


def _side_by_side(opened: OpenLayer, owned: Sequence[int], *, workers: Workers) -> list[list[int]]:
    """Numbers of groups, in order; those of one list are quantized at once, each by one worker.

    Experts are many, alike and small, so they go side by side where there are at least twice as
    many groups of them as workers. The others go one by one, each by all workers.

    Args:
        opened: the layer.
        owned: this card's groups, in order.
        workers: workers that run them.
    """
    if not opened.device.is_host or workers.count == 1:
        return [[number] for number in owned]
    layer = opened.layer

    def small(number: int) -> bool:
        group = layer.groups[number]
        features = opened.weight(group.linears[0]).shape[1]
        return (
            group.expert is not None and layer.chosen < layer.experts and features <= SIDE_BY_SIDE
        )

    turns: list[list[int]] = []
    for side_by_side, run in itertools.groupby(owned, small):
        numbers = list(run)
        if side_by_side and len(numbers) >= 2 * workers.count:
            turns.append(numbers)
        else:
            turns += [[number] for number in numbers]
    return turns


@dataclass(frozen=True, kw_only=True)
class _RoundedGroup:
    """The linears of a group.

    Attributes:
        encoded: linears as the layer's file holds them.
        waiting: linears whose rounding is still to be learned, instead.
    """

    encoded: Mapping[str, EncodedLinear]
    waiting: Mapping[str, RoundedLinear]


def _quantize_group(
    opened: OpenLayer,
    number: int,
    *,
    hessians: dict[int, HessianObserver],
    treatment: Treatment,
    gradient: Gradient,
    refit: LayerRefit | None,
    execution: Execution,
) -> _RoundedGroup:
    """Quantize the linears of a group, scheme by scheme; arguments are `_quantize_groups`'."""
    plan, group = opened.plan, opened.layer.groups[number]
    encoded: dict[str, EncodedLinear] = {}
    waiting: dict[str, RoundedLinear] = {}
    few = group.linears[0] in treatment.few
    refitted = None if refit is None or few else refit.refit(group, execution=execution)
    statistics = _input_statistics(group, hessians.pop(number, None), treatment)
    if refitted is not None:
        statistics |= refitted.statistics
    by_scheme: dict[LinearScheme, list[str]] = {}
    for name in group.linears:
        scheme = plan.schemes[name]
        if scheme is not None:
            by_scheme.setdefault(scheme, []).append(name)
    schemes = list(by_scheme)
    for scheme, members in by_scheme.items():
        nearest = members[0] in treatment.rounded
        rounded = _quantize_members(
            opened,
            members,
            scheme=scheme,
            algorithm=NEAREST if nearest else plan.algorithm,
            clips=plan.clips and not nearest,
            statistics=statistics,
            gradient=partial(_shrunk, gradient, treatment),
            refitted=refitted,
            last=scheme is schemes[-1],
            execution=execution,
        )
        # Learning reads all weights of the layer, so nothing is encoded before it.
        if plan.learned is None:
            encoded |= _encode(opened, rounded, workers=execution.workers)
        else:
            waiting |= rounded
        del rounded  # before the next linears are rounded
    return _RoundedGroup(encoded=encoded, waiting=waiting)


def _input_statistics(
    group: LinearGroup, hessian: HessianObserver | None, treatment: Treatment
) -> dict[str, Tensor]:
    """The statistics of a group's input with its whole Hessian; the observer is emptied.

    Linears of one group are of one expert, so the policy for experts treats them alike.
    """
    first = group.linears[0]
    give_back_holes()  # what the group before left
    statistics = {
        **treatment.statistics.get(first, {}),
        **({} if hessian is None else hessian.take()),
    }
    give_back_holes()  # the strips of the Hessian
    if first in treatment.damped and HESSIAN_SUM.name in statistics:
        shrink_(statistics[HESSIAN_SUM.name])
    return statistics


def _quantize_members(
    opened: OpenLayer,
    members: Sequence[str],
    *,
    scheme: LinearScheme,
    algorithm: str,
    clips: bool,
    statistics: dict[str, Tensor],
    gradient: Gradient,
    refitted: Refitted | None,
    last: bool,
    execution: Execution,
) -> dict[str, RoundedLinear]:
    """Quantize linears that share an input and a scheme.

    Args:
        opened: the layer.
        members: names of the linears.
        scheme: their scheme.
        algorithm: a key of ALGORITHMS.
        clips: a transform cuts the ranges of their groups before.
        statistics: statistics of their input; the `last` linears of a group may overwrite its
            Hessian, which is then removed.
        gradient: reader of `gradient_sum`, for algorithms that need it.
        refitted: weights to round in the place of the linears' own.
        last: no other linears read the statistics afterwards.
        execution: workers that run linears.

    Raises:
        StatisticsError: a statistic is missing.
    """
    gradients = {}
    device = opened.device
    place = device if ALGORITHMS[algorithm].ON_DEVICE else HOST
    workers = execution.workers if place is device else execution.host_workers
    for statistic in ALGORITHMS[algorithm].NEEDS:
        if statistic == GRADIENT_SUM:
            gradients = {f"{name}|{statistic}": place.put(gradient(name)) for name in members}
        else:
            _required(statistics, members[0], statistic)
    weights: Mapping[str, Tensor] = {
        name: opened.weight(name) if refitted is None else refitted.weights[name]
        for name in members
    }
    scale_dtype = FORMAT.scale_dtype(scheme, opened.dtype_of(f"{members[0]}.weight"))
    shares: Mapping[str, float] = {}
    if clips:
        hessian_sum = _required(statistics, members[0], HESSIAN_SUM.name)
        weights, shares = awq.clipped(
            weights,
            scheme.weights,
            hessian_sum=hessian_sum,
            scale_dtype=scale_dtype,
            workers=execution.workers,
        )
        del hessian_sum  # the statistics alone hold it
    # An algorithm that does not compute on the device gets copies in host memory.
    there, moved = (
        (weights, statistics)
        if place is device
        else (fetched(weights, device), fetched(statistics, device))
    )
    results = ALGORITHMS[algorithm].quantize_group(
        there,
        scheme,
        statistics={**moved, **gradients},
        scale_dtype=scale_dtype,
        workers=workers,
        in_place=last,
    )
    results = {
        name: replace(result, weight=result.weight.to(device.kind))
        for name, result in results.items()
    }
    comparison: Mapping[str, Mapping[str, Any]] = {}
    if (
        algorithm != NEAREST
        and HESSIAN_SUM.name not in ALGORITHMS[algorithm].NEEDS
        and HESSIAN_SUM.name in statistics
    ):
        comparison = _compare_outputs(
            weights, results, statistics[HESSIAN_SUM.name], scale_dtype=scale_dtype, workers=workers
        )
    if last:
        statistics.pop(HESSIAN_SUM.name, None)

    def change(name: str) -> float:
        return relative_error(opened.weight(name), weights[name], name=name)

    vectors = {
        name: statistic for name, statistic in statistics.items() if name != HESSIAN_SUM.name
    }
    seen = input_of(members[0], scheme, fetched(vectors, device))
    return {
        name: RoundedLinear(
            result=replace(
                result,
                decisions={
                    **result.decisions,
                    **comparison.get(name, {}),
                    **({} if refitted is None else {REFIT: change(name)}),
                },
            ),
            scheme=scheme,
            scale_dtype=scale_dtype,
            input=seen,
            clipped_groups=shares.get(name),
        )
        for name, result in results.items()
    }


def _compare_outputs(
    weights: Mapping[str, Tensor],
    results: Mapping[str, GroupResult],
    hessian_sum: Tensor,
    *,
    scale_dtype: torch.dtype,
    workers: Workers,
) -> Mapping[str, Mapping[str, Any]]:
    """The notes that compare an algorithm's results with plain round to nearest, by a Hessian.

    It is for algorithms that read no Hessian, where a transform needed one. Algorithms that read
    Hessians compare themselves, since they overwrite them.
    """
    moment = SecondMoment(upper=hessian_sum, diagonal=hessian_sum.diagonal())
    quantized = {name: result.weight for name, result in results.items()}
    return compared(weights, quantized, moment, scale_dtype=scale_dtype, workers=workers)


def _required(statistics: Mapping[str, Tensor], name: str, statistic: str) -> Tensor:
    tensor = statistics.get(statistic)
    if tensor is None:
        raise StatisticsError(
            f"{name}|input|{statistic}: the measurement does not hold it",
            f"measure again with --stats that include {statistic}",
        )
    return tensor


def _encode(
    opened: OpenLayer, rounded: Mapping[str, RoundedLinear], *, workers: Workers
) -> dict[str, EncodedLinear]:
    """Linears as the layer's file holds them.

    Their weights are let go of, but where later groups are refitted with them.
    """
    encoded = {}
    errors = workers.map(
        lambda name: weight_sums(opened.weight(name), rounded[name].result.weight), list(rounded)
    )
    for (name, linear), sums in zip(rounded.items(), errors, strict=True):
        result = linear.result
        seen = linear.input
        quantized = QuantizedLinear(
            weight=result.weight,
            scheme=linear.scheme,
            input_scale=seen.scale,
            input_zero_point=seen.zero_point,
        )
        clipped = {} if linear.clipped_groups is None else {"clipped_groups": linear.clipped_groups}
        encoded[name] = EncodedLinear(
            tensors=fetched(
                FORMAT.encode(name, quantized, scale_dtype=linear.scale_dtype), opened.device
            ),
            error=error_from(*sums, name=name),
            decisions={**clipped, **result.decisions, **seen.decisions},
        )
    if not opened.plan.refit:
        _release(opened, list(rounded))
    return encoded


def _release(opened: OpenLayer, names: Sequence[str]) -> None:
    """Let go of the weights of linears that are quantized."""
    for name in names:
        if opened.plan.schemes[name] is not None:
            release_(opened.child(name), ["weight"])


def _exchange(
    layer: Layer, own: Mapping[str, EncodedLinear], *, team: Team
) -> dict[str, EncodedLinear]:
    """The linears of all cards' groups, in the order of one card; `own` are this card's."""
    everyone: dict[str, EncodedLinear] = {}
    for number, group in enumerate(layer.groups):
        mine = {name: linear for name, linear in own.items() if name in group.linears}
        tensors, records = team.broadcast(
            {key: tensor for linear in mine.values() for key, tensor in linear.tensors.items()},
            {
                name: {"error": linear.error, "decisions": linear.decisions}
                for name, linear in mine.items()
            },
            number=number,
        )
        for name, record in records.items():
            parts = {
                key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name
            }
            everyone[name] = EncodedLinear(
                tensors=parts, error=record["error"], decisions=record["decisions"]
            )
    return everyone
