"""One decoder layer of stage 2: transforms, statistics, algorithm, and what the artifact will hold for it.

The order is fixed: collect what the calibration text shows (quantflow/quantization/layer_traffic.py), smooth
(quantflow/quantization/smoothing.py), prove on the canary that smoothing changed nothing, look which experts got too few
tokens (quantflow/planning/experts.py), quantize group by group, learn from there on where the plan says so
(quantflow/quantization/learned_rounding.py), put the quantized linears in place. What comes out holds every tensor of the
layer under its name in the artifact, so the file of a layer is all that a resumed run needs.

Cards that quantize a layer together (quantflow/distributed/team.py) each collect the Hessians of their groups, quantize these,
and tell the others what they became; all else every card does.

In memory at once: while sequences run, the layer and half a Hessian per group; while a fold is searched, its whole Hessian
beside them; while a group is quantized, its Hessian, which its algorithm overwrites, and the weights and half Hessians of
the groups that are still to come; while rounding is learned all weights. They are as stored, or in float32 where a transform
may change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.algorithms import ALGORITHMS
from quantflow.backends import BACKENDS
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.errors import StatisticsError
from quantflow.formats import FORMATS
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer, LinearGroup
from quantflow.models.hooks import watch
from quantflow.models.load import materialize_, release_
from quantflow.numerics import output_blocks
from quantflow.numerics.layer_error import error_from, relative_error, weight_sums
from quantflow.numerics.output_errors import SecondMoment, compared
from quantflow.observers.hessian import HessianObserver, shrink_
from quantflow.planning.experts import ROUTED, Short, fed_by, record_of, refuse, short_of_tokens, treat
from quantflow.planning.plan import Plan
from quantflow.planning.requirements import GRADIENT_SUM
from quantflow.process_memory import give_back_holes
from quantflow.quantization.layer_traffic import collect
from quantflow.quantization.layer_work import LayerWork, Made
from quantflow.quantization.learned_rounding import learn
from quantflow.quantization.smoothing import smooth
from quantflow.quantization.static_inputs import input_of
from quantflow.runtime.linear import QuantLinear
from quantflow.transforms import awq

FORMAT = FORMATS["compressed-tensors"]
SMOOTHING_TOLERANCE = 1e-6  # ||change||^2 / ||output||^2 of the canary: a float32 reordering, not another function


def quantize_layer(work: LayerWork) -> None:
    """Fill `work` with the layer's tensors, errors and decisions, and leave its module quantized.

    Raises:
        StatisticsError: a statistic is missing, or smoothing changed the layer's function.
    """
    original = work.stream.run(work.module, work.canary) if work.plan.smoothings else None
    hessians = collect(work) if work.plan.needs_text else {}
    smooth(work, hessians)
    inputs, outputs, smoothed = canary_traffic(work.stream, work.module, work.layer, work.canary)
    _refuse_changed(work, original, smoothed)
    _treat_experts(work)
    numbered = list(enumerate(work.layer.groups))
    for number, group in numbered:
        if not work.team.owns(number):  # first, so that no card has more in memory than one that quantizes all groups
            _release(work, group.linears)
    for number, group in numbered:
        if work.team.owns(number):
            _quantize_group(work, group, hessians.pop(number, None))
    if work.plan.learned is not None:
        learn(work)
        _encode(work, list(work.made))
    _exchange(work)
    give_back_holes()
    install_all(work.module, work.layer, work.plan, work.tensors)
    for name in work.errors.keys() & outputs.keys():  # the canary does not reach every expert
        work.errors[name]["output"] = relative_error(outputs[name], work.child(name)(inputs[name]), name=name)
    for name in work.stored:
        if name.removesuffix(".weight") not in work.errors:
            kept = work.read(name)
            work.tensors[name] = work.current(name).to(kept.dtype) if name in work.changed else kept


def install_all(module: nn.Module, layer: Layer, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Put the quantized linears of a layer in place, from the tensors that its file holds; the others get float32 weights."""
    for name in layer.linears:
        scheme = plan.schemes[name]
        old: Any = module.get_submodule(layer.relative(name))
        if scheme is not None:
            bias = None if old.bias is None else old.bias.detach().float()
            quantized = FORMAT.decode(name, tensors, scheme)
            linear = QuantLinear(quantized, bias=bias, backend=BACKENDS["reference"], dtype=torch.float32)
            module.set_submodule(layer.relative(name), linear)
            give_back_holes()
        else:  # in one product from float32, as export's proof runs it: equal bits are then no matter of the BLAS
            materialize_(old, {"weight": old.weight.detach()}, dtype=torch.float32)


def canary_traffic(
    stream: LayerStream, module: nn.Module, layer: Layer, canary: State
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Run the canary through a layer; return each linear's input and output there, and what leaves the layer, [1, S, H]."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def remember(name: str, x: Tensor, y: Tensor) -> None:
        inputs[name], outputs[name] = x, y

    with watch(module, {layer.relative(name): partial(remember, name) for name in layer.linears}):
        return inputs, outputs, stream.run(module, canary)


def _refuse_changed(work: LayerWork, original: Tensor | None, smoothed: Tensor) -> None:
    """Refuse transforms after which the layer puts out something else; `original` is None where nothing smooths."""
    change = 0.0 if original is None else relative_error(original, smoothed, name=work.layer.prefix)
    if change > SMOOTHING_TOLERANCE:
        raise StatisticsError(
            f"{work.layer.prefix}: transforms changed the layer's output by {change:.3g} (relative, squared)",
            "this family's norms and linears do not fit together as its graph says; leave transforms out",
        )


def _treat_experts(work: LayerWork) -> None:
    """Let the policy decide what becomes of experts that got too few tokens.

    Raises:
        StatisticsError: there are such experts, and the policy is `error`.
    """
    policy, shorts = work.plan.experts, list[Short]()
    if policy is None or not work.layer.experts:
        work.experts = record_of(work.layer, work.routed, fed=work.fed, shorts=()) if work.routed else None
        return
    if policy.name != "all" and work.routed is not None and (policy.weights or work.fed == ROUTED):
        shapes = {name: info.shape for name, info in work.source.checkpoint.infos.items()}
        shorts = short_of_tokens(work.layer, policy, work.routed, schemes=work.plan.schemes, shapes=shapes)
    if policy.name == "error":
        refuse(work.layer.prefix, shorts)
    treatment = treat(work.layer, policy, work.statistics, shorts)
    work.statistics, work.rounded, work.damped = dict(treatment.statistics), treatment.rounded, treatment.damped
    for name, told in treatment.decisions.items():
        work.decisions.setdefault(name, {})["experts"] = told
    fed = fed_by(policy) if policy.weights else work.fed
    work.experts = record_of(work.layer, work.routed, fed=fed, shorts=shorts)


def _quantize_group(work: LayerWork, group: LinearGroup, hessian: HessianObserver | None) -> None:
    """Quantize the linears that share an input, one scheme after the other, and let go of their weights."""
    give_back_holes()  # what the group before left
    statistics = {**work.statistics.get(group.linears[0], {}), **({} if hessian is None else hessian.take())}
    give_back_holes()  # the strips of the Hessian
    if group.linears[0] in work.damped and "hessian_sum" in statistics:
        shrink_(statistics["hessian_sum"])
    schemes = list(dict.fromkeys(scheme for scheme in map(work.plan.schemes.get, group.linears) if scheme is not None))
    for scheme in schemes:
        members = [name for name in group.linears if work.plan.schemes[name] == scheme]
        work.progress.doing(", ".join(work.layer.relative(name) for name in members))
        _quantize_members(work, members, scheme, statistics=statistics, last=scheme is schemes[-1])
        if work.plan.learned is None:
            _encode(work, members)


def _release(work: LayerWork, names: Sequence[str]) -> None:
    """Let go of the weights of linears that are quantized."""
    for name in names:
        if work.plan.schemes[name] is not None:
            release_(work.child(name), ["weight"])


def _exchange(work: LayerWork) -> None:
    """Give every card what each group became, in the order in which one card finds it."""
    tensors, work.tensors = work.tensors, {}
    for number, group in enumerate(work.layer.groups):
        mine = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in group.linears}
        about = [{name: of[name] for name in group.linears if name in of} for of in (work.errors, work.decisions)]
        made, (errors, decisions) = work.team.broadcast(mine, about, number=number)
        work.tensors |= made
        work.errors |= errors
        work.decisions |= decisions


def _quantize_members(
    work: LayerWork,
    members: Sequence[str],
    scheme: LinearScheme,
    *,
    statistics: dict[str, Tensor],
    last: bool,
) -> None:
    """Quantize linears that share an input and a scheme.

    The `last` of a group may overwrite the Hessian, and lets go of it.
    """
    algorithm = ALGORITHMS["rtn" if members[0] in work.rounded else work.plan.algorithm]
    gradients = {}
    for statistic in algorithm.NEEDS:
        if statistic == GRADIENT_SUM:
            gradients = {f"{name}|{statistic}": _gradient(work, name) for name in members}
        else:
            _required(statistics, members[0], statistic)
    weights = {name: work.child(name).weight.detach() for name in members}
    scale_dtype = FORMAT.scale_dtype(scheme, work.dtype_of(f"{members[0]}.weight"))
    given = _clipped(work, weights, scheme, statistics=statistics)
    results = algorithm.quantize_group(
        given,
        scheme,
        statistics={**statistics, **gradients},
        scale_dtype=scale_dtype,
        workers=work.workers,
        in_place=last,
    )
    told = _compared(work, given, results, statistics=statistics, scale_dtype=scale_dtype)
    if last:
        statistics.pop("hessian_sum", None)
    seen = input_of(members[0], scheme, statistics)
    for name, result in results.items():
        result = replace(result, decisions={**result.decisions, **told.get(name, {})})
        work.made[name] = Made(result=result, scheme=scheme, scale_dtype=scale_dtype, seen=seen)


def _encode(work: LayerWork, names: Sequence[str]) -> None:
    """Keep what the layer's file will hold of linears that are quantized, and let go of their weights."""
    made = {name: work.made.pop(name) for name in names}
    errors = work.workers.map(lambda name: weight_sums(work.child(name).weight.detach(), made[name].result.weight), made)
    for (name, found), sums in zip(made.items(), errors, strict=True):
        result, seen = found.result, found.seen
        quantized = QuantizedLinear(
            weight=result.weight, scheme=found.scheme, input_scale=seen.scale, input_zero_point=seen.zero_point
        )
        work.tensors |= FORMAT.encode(name, quantized, scale_dtype=found.scale_dtype)
        work.errors[name] = {"weight": error_from(*sums, name=name)}
        work.decisions.setdefault(name, {}).update({**result.decisions, **seen.decisions})
    _release(work, names)


def _clipped(
    work: LayerWork, weights: Mapping[str, Tensor], scheme: LinearScheme, *, statistics: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return what the algorithm is given of the weights: their groups cut, where a transform of the plan does that.

    Those of an expert that is rounded to nearest for want of tokens stay whole.
    """
    if not work.plan.clips or next(iter(weights)) in work.rounded:
        return weights
    hessian_sum = _required(statistics, next(iter(weights)), "hessian_sum")
    scale_dtype = FORMAT.scale_dtype(scheme, work.dtype_of(f"{next(iter(weights))}.weight"))
    found, shares = awq.clipped(weights, scheme.weights, hessian_sum=hessian_sum, scale_dtype=scale_dtype, workers=work.workers)
    for name, share in shares.items():
        work.decisions.setdefault(name, {})["clipped_groups"] = share
    return found


def _compared(
    work: LayerWork,
    weights: Mapping[str, Tensor],
    results: Mapping[str, GroupResult],
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
) -> Mapping[str, Mapping[str, Any]]:
    """Compare what an algorithm that reads no Hessian made, where a transform needed one, with plain round to nearest.

    Algorithms that read Hessians do so themselves, since they overwrite them.
    """
    rounded = work.plan.algorithm == "rtn" or next(iter(weights)) in work.rounded
    if rounded or "hessian_sum" in ALGORITHMS[work.plan.algorithm].NEEDS or "hessian_sum" not in statistics:
        return {}
    made = {name: result.weight for name, result in results.items()}
    moment = SecondMoment(upper=statistics["hessian_sum"], diagonal=statistics["hessian_sum"].diagonal())
    return compared(weights, made, moment, scale_dtype=scale_dtype, workers=work.workers)


def _gradient(work: LayerWork, name: str) -> Tensor:
    found = work.gradient(name)
    if found is None:
        raise StatisticsError(
            f"{name}|gradient|{GRADIENT_SUM}: the measurement does not hold it",
            f"measure again with --stats gradient, or --for with {work.plan.algorithm} as the algorithm",
        )
    divisors = work.factors.get(f"{name}|divisors")
    return found if divisors is None else output_blocks.scale_(found, divisors)


def _required(statistics: Mapping[str, Tensor], name: str, statistic: str) -> Tensor:
    tensor = statistics.get(statistic)
    if tensor is None:
        raise StatisticsError(
            f"{name}|input|{statistic}: the measurement does not hold it",
            f"measure again with --stats that include {statistic}",
        )
    return tensor
