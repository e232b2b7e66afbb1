"""A layer's smoothing transforms: each decides about all folds of the layer before one is folded.

Each card decides about the folds of its own groups; then every card folds all of them in. So no
decision depends on another, or on the card that makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.core.cast import WIDER_MODEL, cast
from quantflow.core.device import HOST, Device
from quantflow.files.safetensors_header import read_header
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models import layer_store
from quantflow.models.graph import Layer, LinearGroup
from quantflow.models.parameters import materialize_
from quantflow.models.reading import read_tensor
from quantflow.numerics.smoothing import (
    Absorber,
    Fold,
    Outcome,
    Smoothing,
    apply_,
    apply_again_,
    smooth_statistics,
)
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.open_layer import Execution, OpenLayer
from quantflow.transforms import TRANSFORMS

FORMAT = FORMATS[DEFAULT]
SEARCHED = ("rows", "seen_min", "seen_max")
# scales that take a factor of their row up, so that it costs nothing
BY_ROW = ("per_channel", "per_group")


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """The result of smoothing a layer.

    Attributes:
        statistics: linear's source name -> statistic -> tensor, of the linear's smoothed input;
            without the statistics that searches alone read.
        decisions: linear -> transform -> its notes.
        changed: source names of tensors that are not quantized and not as in the source.
        factors: factors of the quantized weights [O, I], each of which became (weight / divisors[:,
            None]) * columns: `<linear>|columns` [I] of its input channels, and `<linear>|divisors`
            [O] of its output channels; a missing one changes nothing.
    """

    statistics: Mapping[str, Mapping[str, Tensor]]
    decisions: Mapping[str, Mapping[str, Any]]
    changed: Sequence[str]
    factors: Mapping[str, Tensor]


def smooth_(
    opened: OpenLayer,
    statistics: Mapping[str, Mapping[str, Tensor]],
    *,
    hessians: Mapping[int, HessianObserver],
    execution: Execution,
) -> Smoothed:
    """Smooth a layer: every transform of the plan decides, then its folds are made.

    Args:
        opened: the layer; its weights are modified.
        statistics: statistics of each linear's input.
        hessians: group's number -> Hessian of its input; modified, as the inputs are.
        execution: workers and team; a card decides about its own groups.

    Raises:
        StatisticsError: a statistic is missing.
    """
    groups = opened.layer.groups
    current = dict(statistics)
    decisions: dict[str, dict[str, Any]] = {}
    changed: list[str] = []
    factors: dict[str, Tensor] = {}
    for name, options in opened.plan.smoothings:
        # Decide about every group first, fold afterwards: no decision then depends on another.
        smoothings: dict[int, Smoothing] = {}
        for number, group in enumerate(groups):
            if group.norm is None and (group.feeder is None or not options["linears"]):
                continue
            reason = _why_not(opened, group)
            if reason is not None:
                for linear in group.linears:
                    decisions.setdefault(linear, {})[name] = f"skipped: {reason}"
                continue
            execution.progress.doing(
                f"{name}: {', '.join(map(opened.layer.relative, group.linears))}"
            )
            smoothing, decided = _decided(
                opened,
                number,
                name=name,
                options=options,
                statistics=current.get(group.linears[0], {}),
                hessian=hessians.get(number),
                execution=execution,
            )
            for linear in group.linears:
                decisions.setdefault(linear, {})[name] = decided
            if smoothing is not None:
                smoothings[number] = smoothing
        for number, smoothing in smoothings.items():
            group = groups[number]
            changed += _fold_(opened, group, smoothing)
            for key, values in _factors_of(group, smoothing).items():
                factors[key] = factors[key] * values if key in factors else values
            current |= dict.fromkeys(
                group.linears,
                smooth_statistics(current.get(group.linears[0], {}), smoothing.factors),
            )
            if number in hessians:
                hessians[number].divide_(smoothing.factors)
    return Smoothed(
        statistics={
            linear: {key: of[key] for key in of if key not in SEARCHED}
            for linear, of in current.items()
        },
        decisions=decisions,
        changed=changed,
        factors=factors,
    )


def is_factor(name: str) -> bool:
    """Whether a tensor in a layer's file is one of `Smoothed.factors`, which no artifact holds."""
    return "|" in name


def smooth_again(module: nn.Module, layer: Layer, tensors: Mapping[str, Tensor]) -> None:
    """Smooth the linears of an original layer with the factors that its file keeps.

    Args:
        module: the original layer in float32; modified.
        layer: its names.
        tensors: tensors of its file, factors among them.
    """
    for linear in layer.linears:
        weight = module.get_submodule(layer.relative(linear)).get_parameter("weight")
        apply_again_(
            weight,
            columns=tensors.get(f"{linear}|columns"),
            divisors=tensors.get(f"{linear}|divisors"),
        )


def put_changed(module: nn.Module, layer: Layer, folder: Path, *, device: Device = HOST) -> None:
    """Put in place the other tensors that smoothing changed: norms, biases, linears that stay.

    Args:
        module: the original layer; modified.
        layer: its names.
        folder: the folder of its file, and of its record, which names them.
        device: the module's device.
    """
    path = layer_store.layer_path(folder, layer.index)
    names = layer_store.record(folder, layer.index)["changed"]
    infos, _ = read_header(path)
    found = {layer.relative(name): device.put(read_tensor(path, infos[name])) for name in names}
    materialize_(module, found, dtype=torch.float32)


def _why_not(opened: OpenLayer, group: LinearGroup) -> str | None:
    """The reason why a group is not smoothed; None where it is."""
    schemes = opened.plan.schemes
    if any(schemes[linear] is None for linear in group.linears):
        return "its group is not quantized as a whole"
    feeder = None if group.feeder is None else schemes[group.feeder]
    if feeder is not None and feeder.weights.granularity not in BY_ROW:
        return f"rows of {opened.layer.relative(str(group.feeder))} share scales"
    return None


def _decided(
    opened: OpenLayer,
    number: int,
    *,
    name: str,
    options: Mapping[str, Any],
    statistics: Mapping[str, Tensor],
    hessian: HessianObserver | None,
    execution: Execution,
) -> tuple[Smoothing | None, Mapping[str, Any]]:
    """A transform's smoothing of a group, and its notes; None leaves the group as it is.

    Only the card that owns the group computes; every card gets the same result.
    """
    group = opened.layer.groups[number]
    team = execution.team
    outcome = Outcome(smoothing=None, decisions={})
    if team.owns(number):
        whole = (
            {}
            if hessian is None or HESSIAN_SUM.name not in TRANSFORMS[name].needs(options)
            else hessian.state()
        )
        fold = _fold_of(opened, group, {**statistics, **whole})
        outcome = TRANSFORMS[name].solve(fold, options=options, workers=execution.workers)
        del fold, whole
        give_back_holes()
    smoothing = outcome.smoothing
    tensors = dict[str, Tensor]()
    if smoothing is not None:
        tensors = {"factors": smoothing.factors, "divisors": smoothing.divisors}
        tensors |= {} if smoothing.norm_weight is None else {"norm_weight": smoothing.norm_weight}
    tensors = {name: opened.device.put(tensor) for name, tensor in tensors.items()}
    tensors, decisions = team.broadcast(
        tensors, outcome.decisions, number=number, device=opened.device
    )
    return Smoothing(**tensors) if tensors else None, decisions


def _fold_of(opened: OpenLayer, group: LinearGroup, statistics: Mapping[str, Tensor]) -> Fold:
    schemes = {
        linear: scheme
        for linear in group.linears
        if (scheme := opened.plan.schemes[linear]) is not None
    }
    return Fold(
        weights={linear: opened.weight(linear) for linear in group.linears},
        schemes=schemes,
        scale_dtypes={
            linear: FORMAT.scale_dtype(scheme, opened.dtype_of(f"{linear}.weight"))
            for linear, scheme in schemes.items()
        },
        statistics=statistics,
        absorber=_absorber(opened, group),
    )


def _absorber(opened: OpenLayer, group: LinearGroup) -> Absorber:
    if group.norm is not None:
        return Absorber(
            norm_weight=opened.weight(group.norm).to(opened.dtype_of(f"{group.norm}.weight"))
        )
    feeder = str(group.feeder)
    exact = opened.plan.schemes[feeder] is None or opened.child(feeder).bias is not None
    if not group.per_head:
        return Absorber(exact=exact)
    return Absorber(exact=exact, repeats=opened.layer.repeats, head_dim=opened.layer.head_dim)


def _fold_(opened: OpenLayer, group: LinearGroup, smoothing: Smoothing) -> list[str]:
    """Fold factors into a group and the module before it.

    The layer goes on with the values as the artifact will hold them.

    Returns:
        Source names of tensors that are not quantized and were changed.
    """
    absorber = str(group.norm or group.feeder)
    changed = []
    apply_(
        opened.child(absorber),
        [opened.child(linear) for linear in group.linears],
        smoothing=smoothing,
    )
    for key in [key for key in opened.stored if key.rpartition(".")[0] == absorber]:
        if key == f"{absorber}.weight" and opened.plan.schemes.get(absorber) is not None:
            continue  # it will be quantized
        current = opened.current(key)
        current.copy_(cast(key, current, opened.dtype_of(key), remedy=WIDER_MODEL))
        changed.append(key)
    return changed


def _factors_of(group: LinearGroup, smoothing: Smoothing) -> dict[str, Tensor]:
    """The factors of a fold by their names in a layer's file."""
    factors = {f"{linear}|columns": smoothing.factors for linear in group.linears}
    return (
        factors
        if group.norm is not None
        else {**factors, f"{group.feeder}|divisors": smoothing.divisors}
    )
