"""Layers whose scales are tuned end to end: tuned by quantflow/quantization/tuning.py, written to the stage's folder here.

A layer's file and record are what they would be had it been quantized so: the errors of its linears and the hash of what the
canary looks like behind it are taken anew, and what tuning did stands among the decisions of each linear.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.algorithms import TUNE
from quantflow.algorithms import tune as algorithm
from quantflow.artifact.canonical import digest_of
from quantflow.artifact.safetensors_header import read_header
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.hooks import KVRounder
from quantflow.models.identity import tensor_hash
from quantflow.models.reading import read_tensor
from quantflow.numerics.layer_error import error_from, relative_error, weight_sums
from quantflow.planning.kv_cache import kv_scales_of
from quantflow.process_memory import give_back_holes
from quantflow.quantization.layer import FORMAT, canary_traffic, install_all
from quantflow.quantization.layer_by_layer import Forward, canary_tokens, linears_restored, read_back, write_canary
from quantflow.quantization.smoothing import is_factor, put_changed, smooth_again
from quantflow.quantization.tuning import TuningRun


@torch.no_grad()
def tune(done: Forward) -> None:
    """Tune the scales of layers that are quantized, and write them to the stage's folder.

    Raises:
        StatisticsError: what the quantized model predicts is not finite.
        InputError: a layer's file is damaged.
    """
    assert done.plan.tune is not None and done.measurement is not None  # the plan asks for both
    run = TuningRun(done, done.plan.tune, done.measurement.sequences, LayerStream(done.source, done.graph))
    keys = {layer.index: digest_of([done.key, TUNE, layer.index]) for layer in done.graph.layers}
    paths = {index: layer_store.layer_path(done.output, index) for index in keys}
    told: dict[str, Any] = {}
    if any(layer_store.finished(paths[index], key) is None for index, key in keys.items()):
        told = run.steps()
    give_back_holes()
    _write(run, keys, told)


def _write(run: TuningRun, keys: Mapping[int, str], told: Mapping[str, Any]) -> None:
    """Write every layer that is not finished with its scales, run the canary through all, and note what it shows."""
    done, stream = run.done, run.stream
    tokens = canary_tokens(done.source, done.measurement, done.seed)
    (canary,) = stream.begin([tokens])
    last = canary.hidden
    for layer in done.progress.steps(run.layers, stage=f"tune {done.plan.name}: writing", unit="layer"):
        path = layer_store.layer_path(done.output, layer.index)
        scales = kv_scales_of(done.measurement, layer, done.plan.kv_cache)
        cache = None if scales is None else KVRounder({layer.index: scales})
        as_stored = not done.plan.transforms  # they change weights, in float32
        with stream.layer(layer.index, as_stored=as_stored) as module, linears_restored(module):
            if layer_store.finished(path, keys[layer.index]) is not None:
                read_back(module, layer, done.plan, path)
                last = stream.run(module, canary, cache=cache)
            else:
                tensors, record = _finished(run, module, layer, canary, told)
                last = stream.run(module, canary, cache=cache)
                record |= {"key": keys[layer.index], "canary": tensor_hash(last)}
                layer_store.write_layer(path, tensors, record)
        canary.store.put(canary.index, last)
        give_back_holes()
    write_canary(done.output, done.plan, stream, done.measurement, tokens=tokens, last=last)


def _finished(
    run: TuningRun, module: nn.Module, layer: Layer, canary: State, told: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put a layer's linears in place as they were tuned; return what its file holds, and its record."""
    path = layer_store.layer_path(run.done.made, layer.index)
    infos, _ = read_header(path)
    found = {name: read_tensor(path, info) for name, info in infos.items()}
    smooth_again(module, layer, found)
    put_changed(module, layer, run.done.made)
    tensors = {name: tensor for name, tensor in found.items() if not is_factor(name)}
    record = layer_store.record(run.done.made, layer.index)
    starts = run.starts(layer)
    tuned = run.tuned(layer, told["steps"], starts)
    inputs, outputs, _ = canary_traffic(run.stream, module, layer, canary)
    for name, start in starts.items():
        dtype = run.scale_dtype(start, name)
        weight = algorithm.made(start.weight, tuned[name], scale_dtype=dtype)
        original: Any = module.get_submodule(layer.relative(name))
        sums = weight_sums(original.weight.detach(), weight)
        record["errors"][name] = {"weight": error_from(*sums, name=name)}
        tensors |= FORMAT.encode(name, replace(start, weight=weight), scale_dtype=dtype)
        rescaled = int((weight.scale != start.weight.scale).sum())
        decisions = record["decisions"][name]
        decisions[TUNE] = {**told, "rescaled": rescaled}
        if "same_as_rtn" in decisions:
            decisions["same_as_rtn"] = decisions["same_as_rtn"] and not rescaled
    install_all(module, layer, run.done.plan, tensors)
    for name in starts:
        linear: Any = module.get_submodule(layer.relative(name))
        record["errors"][name]["output"] = relative_error(outputs[name], linear(inputs[name]), name=name)
    return tensors, record
