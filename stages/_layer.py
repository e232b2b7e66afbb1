"""One decoder layer of stage 2: transforms, statistics, algorithm, and what the artifact will hold for it.

The order is fixed: smooth, prove on the canary that smoothing changed nothing, collect Hessians of the smoothed inputs,
quantize group by group, put the quantized linears in place. What comes out holds every tensor of the layer under its name
in the artifact, so the file of a layer is all that a resumed run needs.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.algorithms import ALGORITHMS
from quantflow.backends import reference
from quantflow.core.activations import static_input, unseen
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import StatisticsError
from quantflow.evaluation.layer_error import relative_error
from quantflow.formats import FORMATS
from quantflow.models.capture import LayerStream, State, watch
from quantflow.models.graph import Layer, LinearGroup
from quantflow.observers import OBSERVERS
from quantflow.runtime.linear import QuantLinear
from quantflow.transforms import TRANSFORMS
from stages._plan import Plan

FORMAT = FORMATS["compressed-tensors"]
SMOOTHING_TOLERANCE = 1e-6  # ||change||^2 / ||output||^2 of the canary: a float32 reordering, not another function


@dataclass(kw_only=True)
class LayerWork:
    """What quantizing one layer reads, and what it has found so far.

    Attributes:
        stored: every source tensor of the layer in its stored dtype, by source name.
        statistics: linear's source name -> statistic -> tensor, of the linear's input; changed by smoothing.
        errors: linear -> {"weight", "output"}: relative squared error, output on the canary.
        decisions: linear -> what the transforms and the algorithm decided.
    """

    stream: LayerStream
    module: nn.Module
    layer: Layer
    plan: Plan
    stored: Mapping[str, Tensor]
    statistics: dict[str, Mapping[str, Tensor]]
    canary: State
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def child(self, name: str) -> Any:
        """Return the norm or linear with that source name."""
        return self.module.get_submodule(self.layer.relative(name))


def quantize_layer(work: LayerWork, *, states: Sequence[State]) -> None:
    """Fill `work` with the layer's tensors, errors and decisions, and leave its module quantized.

    Args:
        work: one layer.
        states: the calibration sequences where they enter the layer; only read when the algorithm needs Hessians.

    Raises:
        StatisticsError: a statistic is missing, or smoothing changed the layer's function.
    """
    original = work.stream.run(work.module, work.canary)
    _smooth(work)
    inputs, outputs = _canary_traffic(work, original)
    if work.plan.needs_hessian:
        _collect_hessians(work, states)
    for group in work.layer.groups:
        for scheme in dict.fromkeys(work.plan.schemes[name] for name in group.linears):
            if scheme is not None:
                members = [name for name in group.linears if work.plan.schemes[name] == scheme]
                _quantize_members(work, members, scheme, inputs=inputs, outputs=outputs)
    for name, tensor in work.stored.items():
        if name.removesuffix(".weight") not in work.errors:
            work.tensors[name] = _current(work, name).to(tensor.dtype) if name in work.changed else tensor


def install(module: nn.Module, relative: str, quantized: QuantizedLinear) -> QuantLinear:
    """Put a quantized linear in the place of the linear at `relative` and return it."""
    old: Any = module.get_submodule(relative)
    bias = None if old.bias is None else old.bias.detach().float()
    linear = QuantLinear(quantized, bias=bias, backend=reference, dtype=torch.float32)
    module.set_submodule(relative, linear)
    return linear


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
    stored_norm = work.stored[f"{group.norm}.weight"]
    smoothing = transform.solve(
        {linear: work.child(linear).weight for linear in group.linears},
        input_amax=_required(work, group.linears[0], "channel_amax"),
        norm_weight=norm.weight.to(stored_norm.dtype),
        alpha=options["alpha"],
    )
    transform.apply_(norm, [work.child(linear) for linear in group.linears], smoothing=smoothing)
    for key in [key for key in work.stored if key.rpartition(".")[0] == group.norm]:
        current = _current(work, key)
        current.copy_(current.to(work.stored[key].dtype))  # go on with the values that the artifact will hold
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

    with ExitStack() as stack:
        for group in work.layer.groups:
            for name in group.linears:
                stack.enter_context(watch(work.module, {work.layer.relative(name): _named(remember, name)}))
        smoothed = work.stream.run(work.module, work.canary)
    change = relative_error(original, smoothed, name=work.layer.prefix)
    if change > SMOOTHING_TOLERANCE:
        raise StatisticsError(
            f"{work.layer.prefix}: transforms changed the layer's output by {change:.3g} (relative, squared)",
            "this family's norms and linears do not fit together as its graph says; leave transforms out",
        )
    return inputs, outputs


def _collect_hessians(work: LayerWork, states: Sequence[State]) -> None:
    """Add the Hessian of each group's input to the statistics of its linears, folded in sample order."""
    observers = {}
    for group in work.layer.groups:
        if any(work.plan.schemes[name] is not None for name in group.linears):
            first = group.linears[0]
            observers[first] = OBSERVERS["hessian"](features=work.child(first).weight.shape[1])
    with ExitStack() as stack:
        for name, observer in observers.items():
            callback = _named(lambda _, x, y, observer=observer: observer.update(x), name)
            stack.enter_context(watch(work.module, {work.layer.relative(name): callback}))
        for state in states:
            work.stream.run(work.module, state)
    for group in work.layer.groups:
        if group.linears[0] in observers:
            state_of = observers[group.linears[0]].state()
            for name in group.linears:
                work.statistics[name] = {**work.statistics.get(name, {}), **state_of}


def _quantize_members(
    work: LayerWork,
    members: Sequence[str],
    scheme: LinearScheme,
    *,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> None:
    """Quantize linears that share an input and a scheme, and put them in place."""
    statistics = work.statistics.get(members[0], {})
    for statistic in ALGORITHMS[work.plan.algorithm].NEEDS:
        _required(work, members[0], statistic)
    weights = {name: work.child(name).weight.detach() for name in members}
    scale_dtype = FORMAT.scale_dtype(scheme, work.stored[f"{members[0]}.weight"].dtype)
    results = ALGORITHMS[work.plan.algorithm].quantize_group(weights, scheme, statistics=statistics, scale_dtype=scale_dtype)
    input_scale, input_zero_point = None, None
    if scheme.input is not None and not scheme.input.dynamic:
        input_scale, input_zero_point = static_input(statistics, scheme.input)
        if unseen(statistics):
            for name in members:
                work.decisions.setdefault(name, {})["input"] = "unseen in calibration, scale 1"
    for name, result in results.items():
        quantized = QuantizedLinear(
            weight=result.weight, scheme=scheme, input_scale=input_scale, input_zero_point=input_zero_point
        )
        quantized.weight.validate(name)
        work.tensors |= FORMAT.encode(name, quantized, scale_dtype=scale_dtype)
        linear = install(work.module, work.layer.relative(name), quantized)
        work.errors[name] = {
            "weight": relative_error(weights[name], result.weight.dequantize(), name=name),
            "output": relative_error(outputs[name], linear(inputs[name]), name=name),
        }
        work.decisions.setdefault(name, {}).update(result.decisions)
        if "amax" in statistics:
            work.decisions[name]["input_amax"] = float(statistics["amax"])


def _required(work: LayerWork, name: str, statistic: str) -> Tensor:
    tensor = work.statistics.get(name, {}).get(statistic)
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


def _named(callback: Any, name: str) -> Any:
    def call(x: Tensor, y: Tensor) -> None:
        callback(name, x, y)

    return call
