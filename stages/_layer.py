"""One decoder layer of stage 2: transforms, statistics, algorithm, and what the artifact will hold for it.

The order is fixed: smooth, prove on the canary that smoothing changed nothing, collect Hessians of the smoothed inputs,
quantize group by group, put the quantized linears in place. What comes out holds every tensor of the layer under its name in
the artifact, so the file of a layer is all that a resumed run needs.

In memory at once: while sequences run, the layer and half a Hessian per group; while a group is quantized, its Hessian, which
its algorithm overwrites, and the weights and half Hessians of the groups that are still to come. Weights are as stored, or
in float32 where a transform may change them.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.algorithms import ALGORITHMS
from quantflow.backends import reference
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import StatisticsError
from quantflow.evaluation.layer_error import relative_error, weight_error
from quantflow.formats import FORMATS
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer, LinearGroup
from quantflow.models.hooks import watch
from quantflow.models.load import Source, materialize_, release_
from quantflow.models.reading import DTYPES
from quantflow.observers.hessian import HessianObserver
from quantflow.runtime.linear import QuantLinear
from quantflow.transforms import TRANSFORMS
from stages._inputs import input_of
from stages._memory import give_back_holes
from stages._plan import Plan
from stages._progress import Progress

FORMAT = FORMATS["compressed-tensors"]
SMOOTHING_TOLERANCE = 1e-6  # ||change||^2 / ||output||^2 of the canary: a float32 reordering, not another function


@dataclass(kw_only=True)
class LayerWork:
    """What quantizing one layer reads, and what it has found so far.

    Attributes:
        statistics: linear's source name -> statistic -> tensor, of the linear's input; changed by smoothing.
        states: the calibration sequences where they enter the layer; empty when the algorithm needs no Hessians.
        keep_outputs: make the original layer's outputs the states' next hidden states, while the Hessians are collected.
        ahead: how many sequences may be under way at once.
        errors: linear -> {"weight", "output"}: relative squared error, output on the canary.
        decisions: linear -> what the transforms and the algorithm decided.
        tensors: what the layer's file will hold.
        changed: source names of tensors that are not quantized and not as in the source.
    """

    stream: LayerStream
    source: Source
    module: nn.Module
    layer: Layer
    plan: Plan
    statistics: dict[str, Mapping[str, Tensor]]
    canary: State
    states: Sequence[State]
    keep_outputs: bool
    workers: Workers
    ahead: int
    progress: Progress
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def stored(self) -> list[str]:
        """The source names of the layer's tensors."""
        return [name for name in self.source.names if name.startswith(f"{self.layer.prefix}.")]

    def read(self, name: str) -> Tensor:
        """Return a source tensor as stored."""
        return self.source.read([name])[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a source tensor is stored."""
        return DTYPES[self.source.checkpoint.infos[name].dtype]

    def child(self, name: str) -> Any:
        """Return the norm or linear with that source name."""
        return self.module.get_submodule(self.layer.relative(name))


def quantize_layer(work: LayerWork) -> None:
    """Fill `work` with the layer's tensors, errors and decisions, and leave its module quantized.

    Raises:
        StatisticsError: a statistic is missing, or smoothing changed the layer's function.
    """
    original = work.stream.run(work.module, work.canary)
    _smooth(work)
    inputs, outputs = _canary_traffic(work, original)
    hessians = _collect_hessians(work) if work.plan.needs_hessian else {}
    for group in work.layer.groups:
        _quantize_group(work, group, hessians.pop(group.linears[0], None))
    give_back_holes()
    install_all(work.module, work.layer, work.plan, work.tensors)
    for name in work.errors:
        work.errors[name]["output"] = relative_error(outputs[name], work.child(name)(inputs[name]), name=name)
    for name in work.stored:
        if name.removesuffix(".weight") not in work.errors:
            kept = work.read(name)
            work.tensors[name] = _current(work, name).to(kept.dtype) if name in work.changed else kept


def install_all(module: nn.Module, layer: Layer, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Put the quantized linears of a layer in place, from the tensors that its file holds; the others get float32 weights."""
    for name in layer.linears:
        scheme = plan.schemes[name]
        old: Any = module.get_submodule(layer.relative(name))
        if scheme is not None:
            bias = None if old.bias is None else old.bias.detach().float()
            quantized = FORMAT.decode(name, tensors, scheme)
            linear = QuantLinear(quantized, bias=bias, backend=reference, dtype=torch.float32)
            module.set_submodule(layer.relative(name), linear)
            give_back_holes()
        else:  # in one product from float32, as export's proof runs it: equal bits are then no matter of the BLAS
            materialize_(old, {"weight": old.weight.detach()}, dtype=torch.float32)


def _smooth(work: LayerWork) -> None:
    for name, options in work.plan.transforms:
        for group in work.layer.groups:
            if group.norm is None:
                continue
            if any(work.plan.schemes[linear] is None for linear in group.linears):
                for linear in group.linears:
                    work.decisions.setdefault(linear, {})[name] = "skipped: its group is not quantized as a whole"
                continue
            _smooth_group(work, group, name, options)


def _smooth_group(work: LayerWork, group: LinearGroup, name: str, options: Mapping[str, Any]) -> None:
    transform = TRANSFORMS[name]
    assert group.norm is not None  # the caller skips groups without one
    norm = work.child(group.norm)
    smoothing = transform.solve(
        {linear: work.child(linear).weight for linear in group.linears},
        input_amax=_required(work.statistics.get(group.linears[0], {}), group.linears[0], "channel_amax"),
        norm_weight=norm.weight.to(work.dtype_of(f"{group.norm}.weight")),
        alpha=options["alpha"],
    )
    transform.apply_(norm, [work.child(linear) for linear in group.linears], smoothing=smoothing)
    for key in [key for key in work.stored if key.rpartition(".")[0] == group.norm]:
        current = _current(work, key)
        current.copy_(current.to(work.dtype_of(key)))  # go on with the values that the artifact will hold
        work.changed.append(key)
    for linear in group.linears:
        work.statistics[linear] = transform.smooth_statistics(work.statistics[linear], smoothing.factors)
        work.decisions.setdefault(linear, {})[name] = {
            "alpha": options["alpha"],
            "smallest_factor": float(smoothing.factors.min()),
            "largest_factor": float(smoothing.factors.max()),
        }


def _canary_traffic(work: LayerWork, original: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the canary through the smoothed layer; return each linear's input and output there."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def remember(name: str, x: Tensor, y: Tensor) -> None:
        inputs[name], outputs[name] = x, y

    with watch(work.module, {work.layer.relative(name): partial(remember, name) for name in work.layer.linears}):
        smoothed = work.stream.run(work.module, work.canary)
    change = relative_error(original, smoothed, name=work.layer.prefix)
    if change > SMOOTHING_TOLERANCE:
        raise StatisticsError(
            f"{work.layer.prefix}: transforms changed the layer's output by {change:.3g} (relative, squared)",
            "this family's norms and linears do not fit together as its graph says; leave transforms out",
        )
    return inputs, outputs


def _collect_hessians(work: LayerWork) -> dict[str, HessianObserver]:
    """Return, per group by its first linear, the Hessian of its input, folded in sample order.

    Sequences run on the workers; their inputs are folded here, in order, while the next ones run.
    """
    firsts = [g.linears[0] for g in work.layer.groups if any(work.plan.schemes[name] is not None for name in g.linears)]
    observers = {name: HessianObserver(features=work.child(name).weight.shape[1]) for name in firsts}
    seen = threading.local()  # hooks are the module's, what they see belongs to the sequence that the thread runs

    def remember(name: str, x: Tensor, _y: Tensor) -> None:
        seen.inputs[name] = x

    def unit(state: State) -> tuple[dict[str, Tensor], Tensor]:
        seen.inputs = {}
        hidden = work.stream.run(work.module, state)
        return seen.inputs, hidden

    with ExitStack() as stack:
        stack.enter_context(watch(work.module, {work.layer.relative(name): partial(remember, name) for name in firsts}))
        arrived = work.workers.stream(unit, work.states, ahead=work.ahead)
        for number, (state, (inputs, hidden)) in enumerate(zip(work.states, arrived, strict=True), start=1):
            work.progress.doing(f"sequence {number} of {len(work.states)}")
            for name, observer in observers.items():
                observer.update(inputs.pop(name))
            if work.keep_outputs:
                state.store.put(state.index, hidden)
            give_back_holes()
    return observers


def _quantize_group(work: LayerWork, group: LinearGroup, hessian: HessianObserver | None) -> None:
    """Quantize the linears that share an input, one scheme after the other, and let go of their weights."""
    give_back_holes()  # what the group before left
    statistics = {**work.statistics.get(group.linears[0], {}), **({} if hessian is None else hessian.take())}
    give_back_holes()  # the strips of the Hessian
    schemes = list(dict.fromkeys(scheme for scheme in map(work.plan.schemes.get, group.linears) if scheme is not None))
    for scheme in schemes:
        members = [name for name in group.linears if work.plan.schemes[name] == scheme]
        work.progress.doing(", ".join(work.layer.relative(name) for name in members))
        _quantize_members(work, members, scheme, statistics=statistics, last=scheme is schemes[-1])
        for name in members:
            release_(work.child(name), ["weight"])


def _quantize_members(
    work: LayerWork,
    members: Sequence[str],
    scheme: LinearScheme,
    *,
    statistics: dict[str, Tensor],
    last: bool,
) -> None:
    """Quantize linears that share an input and a scheme, and keep what the layer's file will hold of them.

    The `last` of a group may overwrite the Hessian, and lets go of it.
    """
    for statistic in ALGORITHMS[work.plan.algorithm].NEEDS:
        _required(statistics, members[0], statistic)
    weights = {name: work.child(name).weight.detach() for name in members}
    scale_dtype = FORMAT.scale_dtype(scheme, work.dtype_of(f"{members[0]}.weight"))
    results = ALGORITHMS[work.plan.algorithm].quantize_group(
        weights, scheme, statistics=statistics, scale_dtype=scale_dtype, workers=work.workers, in_place=last
    )
    if last:
        statistics.pop("hessian_sum", None)
    seen = input_of(members[0], scheme, statistics)
    for name, result in results.items():
        quantized = QuantizedLinear(
            weight=result.weight, scheme=scheme, input_scale=seen.scale, input_zero_point=seen.zero_point
        )
        work.tensors |= FORMAT.encode(name, quantized, scale_dtype=scale_dtype)
        work.errors[name] = {"weight": weight_error(weights[name], result.weight, name=name)}
        work.decisions.setdefault(name, {}).update({**result.decisions, **seen.decisions})


def _required(statistics: Mapping[str, Tensor], name: str, statistic: str) -> Tensor:
    tensor = statistics.get(statistic)
    if tensor is None:
        raise StatisticsError(
            f"{name}|input|{statistic}: the measurement does not hold it",
            f"measure again with --stats that include {statistic}",
        )
    return tensor


def _current(work: LayerWork, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(work.child(owner), leaf)
    return tensor.detach()
