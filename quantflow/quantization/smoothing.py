"""A layer's transforms: which folds there are, what each transform decides about them, and how they are folded in.

A transform decides about all folds of the layer before any of them changes, each card about those of its own groups; then
every card folds all of them in. So no decision depends on another, or on who makes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.artifact.safetensors_header import read_header
from quantflow.formats import FORMATS
from quantflow.models import layer_store
from quantflow.models.graph import Layer, LinearGroup
from quantflow.models.load import materialize_
from quantflow.models.reading import read_tensor
from quantflow.numerics.smoothing import Absorber, Fold, Outcome, Smoothing, apply_, apply_again_, smooth_statistics
from quantflow.observers.hessian import HessianObserver
from quantflow.process_memory import give_back_holes
from quantflow.quantization.layer_work import LayerWork
from quantflow.transforms import TRANSFORMS

FORMAT = FORMATS["compressed-tensors"]
SEARCHED = ("rows", "seen_min", "seen_max")
BY_ROW = ("per_channel", "per_group")  # scales that take a factor of their row up, so that it costs nothing


def smooth(work: LayerWork, hessians: Mapping[int, HessianObserver]) -> None:
    """Let every transform of the plan decide and fold; statistics and Hessians become those of the smoothed inputs.

    Raises:
        StatisticsError: a statistic is missing.
    """
    for name, options in work.plan.smoothings:
        found: dict[int, Smoothing] = {}
        for number, group in enumerate(work.layer.groups):
            if group.norm is None and (group.feeder is None or not options["linears"]):
                continue
            reason = _why_not(work, group)
            if reason is not None:
                for linear in group.linears:
                    work.decisions.setdefault(linear, {})[name] = f"skipped: {reason}"
                continue
            work.progress.doing(f"{name}: {', '.join(map(work.layer.relative, group.linears))}")
            smoothing = _decided(work, number, name, options, hessians.get(number))
            if smoothing is not None:
                found[number] = smoothing
        for number, smoothing in found.items():
            _fold(work, work.layer.groups[number], smoothing)
            if number in hessians:
                hessians[number].divide_(smoothing.factors)
    for linear, statistics in work.statistics.items():  # what searches read has served
        work.statistics[linear] = {key: value for key, value in statistics.items() if key not in SEARCHED}


def is_factor(name: str) -> bool:
    """Return whether a tensor in a layer's file is one of `LayerWork.factors`, which no artifact holds."""
    return "|" in name


def smooth_again(module: nn.Module, layer: Layer, tensors: Mapping[str, Tensor]) -> None:
    """Let the linears of a layer have the weights that were quantized.

    Args:
        module: the original layer in float32; modified.
        layer: which one.
        tensors: of its file, factors among them.
    """
    for linear in layer.linears:
        weight = module.get_submodule(layer.relative(linear)).get_parameter("weight")
        apply_again_(weight, columns=tensors.get(f"{linear}|columns"), divisors=tensors.get(f"{linear}|divisors"))


def put_changed(module: nn.Module, layer: Layer, folder: Path) -> None:
    """Put in place what smoothing changed beside the weights that were quantized: norms, biases, linears left as they were.

    Args:
        module: the original layer; modified.
        layer: which one.
        folder: has its file, and its record, which names them.
    """
    path, names = layer_store.layer_path(folder, layer.index), layer_store.record(folder, layer.index)["changed"]
    infos, _ = read_header(path)
    materialize_(module, {layer.relative(name): read_tensor(path, infos[name]) for name in names}, dtype=torch.float32)


def _why_not(work: LayerWork, group: LinearGroup) -> str | None:
    """Return why a group is left as it is."""
    if any(work.plan.schemes[linear] is None for linear in group.linears):
        return "its group is not quantized as a whole"
    feeder = None if group.feeder is None else work.plan.schemes[group.feeder]
    if feeder is not None and feeder.weights.granularity not in BY_ROW:
        return f"rows of {work.layer.relative(str(group.feeder))} share scales"
    return None


def _decided(
    work: LayerWork, number: int, name: str, options: Mapping[str, Any], hessian: HessianObserver | None
) -> Smoothing | None:
    """Return what a transform does with a group, on every card; None leaves it as it is."""
    group = work.layer.groups[number]
    outcome = Outcome(smoothing=None, decisions={})
    if work.team.owns(number):
        whole = {} if hessian is None or "hessian_sum" not in TRANSFORMS[name].needs(options) else hessian.state()
        statistics = {**work.statistics.get(group.linears[0], {}), **whole}
        fold = _fold_of(work, group, statistics)
        outcome = TRANSFORMS[name].solve(fold, options=options, workers=work.workers)
        del fold, statistics, whole
        give_back_holes()
    smoothing, tensors = outcome.smoothing, dict[str, Tensor]()
    if smoothing is not None:
        tensors = {"factors": smoothing.factors, "divisors": smoothing.divisors}
        tensors |= {} if smoothing.norm_weight is None else {"norm_weight": smoothing.norm_weight}
    tensors, decisions = work.team.broadcast(tensors, outcome.decisions, number=number)
    for linear in group.linears:
        work.decisions.setdefault(linear, {})[name] = decisions
    return Smoothing(**tensors) if tensors else None


def _fold_of(work: LayerWork, group: LinearGroup, statistics: Mapping[str, Tensor]) -> Fold:
    schemes = {linear: scheme for linear in group.linears if (scheme := work.plan.schemes[linear]) is not None}
    return Fold(
        weights={linear: work.child(linear).weight.detach() for linear in group.linears},
        schemes=schemes,
        scale_dtypes={
            linear: FORMAT.scale_dtype(scheme, work.dtype_of(f"{linear}.weight")) for linear, scheme in schemes.items()
        },
        statistics=statistics,
        absorber=_absorber(work, group),
    )


def _absorber(work: LayerWork, group: LinearGroup) -> Absorber:
    if group.norm is not None:
        norm_weight = work.child(group.norm).weight.detach()
        return Absorber(norm_weight=norm_weight.to(work.dtype_of(f"{group.norm}.weight")))
    feeder = str(group.feeder)
    exact = work.plan.schemes[feeder] is None or work.child(feeder).bias is not None
    if not group.per_head:
        return Absorber(exact=exact)
    return Absorber(exact=exact, repeats=work.layer.repeats, head_dim=work.layer.head_dim)


def _fold(work: LayerWork, group: LinearGroup, smoothing: Smoothing) -> None:
    """Fold factors into a group and what it comes from, and go on with the values that the artifact will hold."""
    absorber = str(group.norm or group.feeder)
    apply_(work.child(absorber), [work.child(linear) for linear in group.linears], smoothing=smoothing)
    for key in [key for key in work.stored if key.rpartition(".")[0] == absorber]:
        if key == f"{absorber}.weight" and work.plan.schemes.get(absorber) is not None:
            continue  # it will be quantized
        current = work.current(key)
        current.copy_(current.to(work.dtype_of(key)))
        work.changed.append(key)
    made = {f"{linear}|columns": smoothing.factors for linear in group.linears}
    made |= {} if group.norm is not None else {f"{absorber}|divisors": smoothing.divisors}
    for name, values in made.items():
        work.factors[name] = work.factors[name] * values if name in work.factors else values
    smoothed = smooth_statistics(work.statistics.get(group.linears[0], {}), smoothing.factors)
    work.statistics |= dict.fromkeys(group.linears, smoothed)
