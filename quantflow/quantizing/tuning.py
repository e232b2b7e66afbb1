"""Scales tuned end to end: the quantized model runs forward and back, one layer in memory.

    ../.<folder>.tune/layers/          the layers as they were quantized
    ../.<folder>.tune/original/        every sequence's hidden state after the original model's last
                                       layer, written while the layers are quantized
    ../.<folder>.tune/steps/00007/     the tuned parameters of each layer after seven steps
                                       (quantflow/algorithms/tune.py)
    ../.<folder>.tune/inputs/00012/    the hidden states that enter layer 12, while a step runs

A step has three parts. It runs its sequences through the quantized layers and keeps the hidden
states that enter each; it takes the gradient of the divergence at the head; and it brings the
gradient back, layer by layer from the last to the first. A layer runs again for that, and takes a
step of its own when all sequences have come back through it. So a run that was stopped goes on at
its step. Before the first step and after the last the divergence of some sequences is taken: scales
that made it no less are left as they were.

The routers of a mixture of experts stay as they are, and send tokens where they will in the
artifact. Scales of experts that got too few tokens stay too.

Steps are noisy by the sequences that they see, far more than by rounding. So their products, of
linears and of the head, are in bfloat16 where the CPU has it
(`quantflow.core.determinism.products`), at twice the speed, and on a GPU; hidden states, norms,
attention, sums and all that is recorded are in float32. The dtype of products is part of the key
and of the record.

Then every layer is written to the stage's folder. Its file and record are those of a layer that was
quantized so: the errors of its linears and the hash of the canary behind it are taken anew, and the
notes of each linear have an entry on tuning.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.algorithms import TUNE
from quantflow.algorithms import tune as algorithm
from quantflow.core import determinism
from quantflow.core.device import fetched
from quantflow.core.dtypes import DTYPES
from quantflow.core.qtensor import QuantizedLinear
from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of, read_json
from quantflow.files.safetensors_header import read_header
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.hidden import HiddenStates
from quantflow.models.hooks import KVRounder
from quantflow.models.identity import tensor_hash
from quantflow.models.reading import read_tensor
from quantflow.models.trained_layer import gradients, replaced
from quantflow.numerics.sequence_turns import spread, turns
from quantflow.planning.experts import Policy
from quantflow.planning.recipe import Tune
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.cache_scales import kv_scales_of
from quantflow.quantizing.layer import FORMAT, canary_traffic, install_all
from quantflow.quantizing.layer_by_layer import (
    ORIGINAL,
    Forward,
    as_stored,
    canary_tokens,
    linears_restored,
    read_back,
    write_canary,
)
from quantflow.quantizing.layer_error import error_from, relative_error, weight_sums
from quantflow.quantizing.smoothing import is_factor, put_changed, smooth_again
from quantflow.quantizing.undercalibrated import Short, short_of_tokens

PARTS = ("u", "mean", "square")  # of what is tuned
TunedTensors = Mapping[str, algorithm.Tuned]  # of the linears of a layer


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A layer in memory whose linears have the weights that are tuned.

    Attributes:
        module: the layer's module.
        layer: its names.
        starts: linear -> its quantized values before tuning.
        tuned: linear -> the factors of its scales.
        weights: linear -> [O, I], in the dtype of its products.
    """

    module: nn.Module
    layer: Layer
    starts: Mapping[str, QuantizedLinear]
    tuned: TunedTensors
    weights: Mapping[str, Tensor]


class TuningRun:
    """The steps, on all sequences of the calibration text."""

    def __init__(
        self, done: Forward, plan: Tune, *, sequences: Sequence[Tensor], stream: LayerStream
    ) -> None:
        """Run nothing yet.

        Args:
            done: the layers as they were quantized.
            plan: number of steps, and of sequences of each.
            sequences: token ids [S] of each sequence.
            stream: the model.
        """
        self.done, self.plan, self.sequences, self.stream = done, plan, sequences, stream
        self.layers = done.graph.layers
        self.device = stream.device
        self.products = determinism.products(self.device)
        self.key = digest_of([done.key, TUNE, str(self.products)])
        self._stage = f"tune {done.plan.name}"

    def steps(self) -> dict[str, Any]:
        """Take the steps that are left.

        Returns:
            The record's entry on tuning; `steps` is 0 where the scales stay.
        """
        original = self._original()
        embedded = HiddenStates(
            len(self.sequences), folder=self.done.folder / "embedded", device=self.device
        )
        states = self.stream.begin(self.sequences, hidden=embedded)
        checked = spread(len(states), algorithm.CHECKED)
        taken = self._latest()
        if taken is None:
            first = self._divergence(states, original, checked, step=0)
            self._save(0, {"divergence_start": first})
            taken = 0
        order = turns(len(states), self.plan.batch)
        count = self.plan.steps
        left = range(taken, count)
        for step in self.done.progress.steps(
            left, stage=self._stage, unit="step", before=taken, samples=len(order[0])
        ):
            self._step(step, [states[number] for number in order[step % len(order)]], original)
            give_back_holes()
        self.done.progress.doing("comparing")
        record = {
            **self._record(count),
            "divergence": self._divergence(states, original, checked, step=count),
        }
        record["products"] = str(self.products).removeprefix("torch.")
        kept = record["divergence"] < record["divergence_start"]
        return {"steps": count if kept else 0, **record}

    def tuned(self, layer: Layer, step: int, starts: Mapping[str, QuantizedLinear]) -> TunedTensors:
        """The tuned parameters of a layer after so many steps."""
        if step == 0:
            return {name: algorithm.begin(name, linear.weight) for name, linear in starts.items()}
        infos, _ = read_header(self._at(step, layer.index))
        tensors = {
            name: self.device.put(read_tensor(self._at(step, layer.index), info))
            for name, info in infos.items()
        }
        return {
            name: algorithm.Tuned(**{key: tensors[f"{name}|{key}"] for key in PARTS})
            for name in starts
        }

    def starts(self, layer: Layer) -> dict[str, QuantizedLinear]:
        """The linears of a layer as they were quantized."""
        path = layer_store.layer_path(self.done.folder, layer.index)
        infos, _ = read_header(path)
        linears = {}
        for name in layer.linears:
            if (scheme := self.done.plan.schemes[name]) is not None:
                parts = [part for part in FORMAT.tensor_names(name, scheme) if part in infos]
                linear: QuantizedLinear = FORMAT.decode(
                    name, {part: read_tensor(path, infos[part]) for part in parts}, scheme
                )
                linears[name] = linear.to(self.device.kind)
        return linears

    def short(self, layer: Layer) -> dict[str, Short]:
        """Linear -> its group, of the layer's experts that the router sent too few tokens."""
        tokens = layer_store.record(self.done.folder, layer.index).get("experts", {}).get("tokens")
        if tokens is None:
            return {}
        plan = self.done.plan
        policy = plan.experts or Policy(tokens=self.done.entry.expert_tokens, weights=True)
        found = short_of_tokens(
            layer,
            policy,
            dict(zip(layer.gates, tokens, strict=True)),
            schemes=plan.schemes,
            shapes={name: info.shape for name, info in self.done.source.checkpoint.infos.items()},
        )
        return {name: short for short in found for name in short.group.linears}

    def scale_dtype(self, linear: QuantizedLinear, name: str) -> torch.dtype:
        """The dtype in which the layout stores the scales of a linear."""
        stored = DTYPES[self.done.source.checkpoint.infos[f"{name}.weight"].dtype]
        found: torch.dtype = FORMAT.scale_dtype(linear.scheme, stored)
        return found

    @contextmanager
    def _layer(self, index: int, step: int, *, products: torch.dtype) -> Iterator[Visit]:
        """Yield a layer with the weights after so many steps, in the dtype of their products."""
        layer = self.layers[index]
        workers = self.done.workers
        with self.stream.layer(index, as_stored=True) as module:
            put_changed(module, layer, self.done.folder, device=self.device)
            starts = self.starts(layer)
            tuned = self.tuned(layer, step, starts)

            def weight(name: str) -> Tensor:
                linear = starts[name]
                tuned_weight = algorithm.made(
                    linear.weight, tuned[name], scale_dtype=self.scale_dtype(linear, name)
                )
                return tuned_weight.dequantize().to(products)

            weights = dict(zip(starts, workers.map(weight, list(starts)), strict=True))
            with replaced(module, layer, weights):
                yield Visit(module=module, layer=layer, starts=starts, tuned=tuned, weights=weights)

    def _original(self) -> list[State]:
        """Every sequence with its hidden state after the original model's last layer."""
        hidden = self.done.original()
        if hidden is not None:  # put while the layers were quantized
            return self.stream.begin(self.sequences, hidden=hidden)
        hidden = HiddenStates(
            len(self.sequences), folder=self.done.folder / ORIGINAL, device=self.device
        )
        begin = next(
            (
                index
                for index in range(len(self.layers), -1, -1)
                if hidden.restore(index, key=self.key)
            ),
            0,
        )
        states = self.stream.begin(self.sequences, hidden=hidden)
        if not hidden.restored:
            hidden.commit(0, key=self.key)
        left = self.layers[begin:]
        stage = f"{self._stage}: original"
        for layer in self.done.progress.steps(
            left, stage=stage, unit="layer", samples=len(states), before=begin
        ):
            with self.stream.layer(layer.index, as_stored=True) as module:
                self.stream.advance(module, states, workers=self.done.workers)
            hidden.commit(layer.index + 1, key=self.key)
        return states

    def _room(self, name: str, count: int) -> HiddenStates:
        """Store of hidden states for the sequences under way, which no resumed run reads."""
        return HiddenStates(count, folder=self.done.folder / "inputs" / name, device=self.device)

    def _through(
        self, batch: Sequence[State], step: int, *, products: torch.dtype
    ) -> list[list[State]]:
        """The sequences as they enter each quantized layer, and as they leave the last."""
        rooms = [self._room(f"{index:05d}", len(batch)) for index in range(len(self.layers) + 1)]
        places = [
            [State(calls=state.calls, store=room, index=at) for at, state in enumerate(batch)]
            for room in rooms
        ]
        for at, state in enumerate(batch):
            rooms[0].put(at, state.hidden)
        for layer in self.layers:
            with self._layer(layer.index, step, products=products) as visit:
                run = partial(self.stream.run, visit.module)
                left = self.done.workers.stream(
                    run, places[layer.index], ahead=self.done.allowance.in_flight
                )
                for at, hidden in enumerate(left):
                    rooms[layer.index + 1].put(at, hidden)
        return places

    def _divergence(
        self,
        states: Sequence[State],
        original: Sequence[State],
        numbers: Sequence[int],
        *,
        step: int,
    ) -> float:
        """The mean divergence of some sequences after so many steps, in nats per token."""
        total = 0.0
        for first in range(0, len(numbers), self.plan.batch):
            some = numbers[first : first + self.plan.batch]
            places = self._through(
                [states[number] for number in some], step, products=torch.float32
            )
            with self.stream.head():
                pairs = list(zip(places[-1], [original[number] for number in some], strict=True))
                for loss in self.done.workers.stream(
                    self._lost, pairs, ahead=self.done.allowance.in_flight
                ):
                    total += loss
                    give_back_holes()
            _close(places)
        return total / sum(len(self.sequences[number]) for number in numbers)

    def _step(self, step: int, batch: Sequence[State], original: Sequence[State]) -> None:
        """Run some sequences forward and back, and write what every layer became."""
        disk.make_folder(self._at(step + 1, 0).parent)
        places = self._through(batch, step, products=self.products)
        arriving = self._from_head(places[-1], [original[state.index] for state in batch])
        for layer in reversed(self.layers):
            with self._layer(layer.index, step, products=self.products) as visit:
                entering = self._room(f"back-{layer.index:05d}", len(batch))
                slopes = self._back(visit, places[layer.index], arriving, entering)
                arriving.close()
                arriving = entering
                fixed = self.short(layer)
                stepped = {
                    name: algorithm.stepped(
                        visit.starts[name].weight,
                        tuned,
                        slopes[name],
                        step=step,
                        steps=self.plan.steps,
                    )
                    if name not in fixed
                    else tuned
                    for name, tuned in visit.tuned.items()
                }
            parts = {
                f"{name}|{key}": getattr(tuned, key)
                for name, tuned in stepped.items()
                for key in PARTS
            }
            parts = fetched(parts, self.device)
            layer_store.write_layer(
                self._at(step + 1, layer.index), parts, {"key": self._step_key(step + 1, layer)}
            )
        arriving.close()
        _close(places)
        self._save(step + 1, self._record(step))

    def _from_head(self, states: Sequence[State], original: Sequence[State]) -> HiddenStates:
        """The gradients of the mean divergence by what leaves the last layer."""
        arriving = self._room("back", len(states))
        tokens = sum(state.hidden.shape[1] for state in states)
        with self.stream.head(products=self.products):
            unit = partial(self._slope, tokens)
            pairs = list(zip(states, original, strict=True))
            for at, gradient in enumerate(
                self.done.workers.stream(unit, pairs, ahead=self.done.allowance.in_flight)
            ):
                arriving.put(at, gradient)
                give_back_holes()
        return arriving

    def _lost(self, pair: tuple[State, State]) -> float:
        """The quantized model's divergence from the original, summed over a sequence's tokens."""
        hidden, original = (state.hidden for state in pair)
        total = 0.0
        for part in self.stream.parts(hidden.shape[1]):
            logits, expected = (self.stream.finish(of[:, part])[0] for of in (hidden, original))
            total += algorithm.divergence(logits, expected)[0]
        return total

    def _slope(self, tokens: int, pair: tuple[State, State]) -> Tensor:
        """The gradient by a last hidden state of the mean divergence, [1, S, H].

        Args:
            tokens: number of tokens that the mean is over.
            pair: a sequence after the quantized layers, and after the original ones.
        """
        hidden, original = (state.hidden for state in pair)
        gradient = torch.empty_like(hidden)
        for part in self.stream.parts(hidden.shape[1]):
            with torch.enable_grad():
                leaf = hidden[:, part].requires_grad_()
                logits = self.stream.logits(leaf)
            _, slope = algorithm.divergence(
                logits.detach()[0], self.stream.finish(original[:, part])[0]
            )
            (gradient[:, part],) = torch.autograd.grad(logits, leaf, slope[None].div_(tokens))
        return gradient

    def _back(
        self, visit: Visit, states: Sequence[State], arriving: HiddenStates, entering: HiddenStates
    ) -> dict[str, Tensor]:
        """Bring gradients back through a layer into `entering`.

        Returns:
            Gradients by the tuned parameters, summed in sample order.
        """
        names = list(visit.weights)
        for weight in visit.weights.values():
            weight.requires_grad_()

        def unit(state: State) -> tuple[Tensor, list[Tensor]]:
            weights = [visit.weights[name] for name in names]
            gradient, found = gradients(
                self.stream, visit.module, state, arriving.get(state.index), weights
            )
            pairs = zip(names, found, strict=True)
            return gradient, [
                algorithm.slope(visit.starts[name].weight, visit.tuned[name], part)
                for name, part in pairs
            ]

        total: dict[str, Tensor] = {}
        come = self.done.workers.stream(unit, states, ahead=self.done.allowance.in_flight)
        for at, (gradient, slopes) in enumerate(come):
            entering.put(at, gradient)
            for name, found in zip(names, slopes, strict=True):
                total[name] = total[name].add_(found) if name in total else found
            give_back_holes()  # what a sequence leaves is in many pieces of many sizes
        for weight in visit.weights.values():
            weight.requires_grad_(False)
        return total

    def _at(self, step: int, index: int) -> Path:
        return self.done.folder / "steps" / f"{step:05d}" / f"{index:05d}.safetensors"

    def _step_key(self, step: int, layer: Layer) -> str:
        return digest_of([self.key, step, layer.index])

    def _save(self, step: int, record: Mapping[str, Any]) -> None:
        """Record the state after so many steps, whose layers are written; earlier states go."""
        folder = self.done.folder / "steps"
        disk.make_folder(folder / f"{step:05d}")
        disk.write_atomic(
            folder / f"{step:05d}" / "told.json",
            canonical_json({**record, "key": digest_of([self.key, step])}),
        )
        for other in folder.iterdir():
            if other.name != f"{step:05d}":
                disk.remove_tree(other)

    def _record(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.done.folder / "steps" / f"{step:05d}" / "told.json")
        return {key: value for key, value in found.items() if key != "key"}

    def _latest(self) -> int | None:
        """The number of steps whose files are all there and current; None begins anew."""
        folder = self.done.folder / "steps"
        for step in range(self.plan.steps, -1, -1):
            try:
                record = read_json(folder / f"{step:05d}" / "told.json")
            except InputError:
                continue
            paths = {
                self._at(step, layer.index): self._step_key(step, layer)
                for layer in self.layers
                if step
            }
            if record.get("key") == digest_of([self.key, step]) and all(
                map(layer_store.finished, paths, paths.values())
            ):
                return step
        return None


@torch.no_grad()
def tune(done: Forward, plan: Tune, *, sequences: Sequence[Tensor]) -> None:
    """Tune the scales of quantized layers, and write them to the stage's folder.

    Args:
        done: the layers as they were quantized.
        plan: number of steps, and of sequences of each.
        sequences: the calibration text, token ids [S] of each sequence.

    Raises:
        StatisticsError: the quantized model's predictions are not finite.
        InputError: a layer's file is damaged.
    """
    run = TuningRun(
        done,
        plan,
        sequences=sequences,
        stream=LayerStream(done.source, done.graph, device=done.device),
    )
    keys = {layer.index: digest_of([run.key, layer.index]) for layer in done.graph.layers}
    paths = {index: layer_store.layer_path(done.output, index) for index in keys}
    outcome: dict[str, Any] = {}
    if any(layer_store.finished(paths[index], key) is None for index, key in keys.items()):
        outcome = run.steps()
    give_back_holes()
    _write(run, keys=keys, outcome=outcome)


def _write(run: TuningRun, *, keys: Mapping[int, str], outcome: Mapping[str, Any]) -> None:
    """Write every unfinished layer with its scales; the canary runs through all layers."""
    done = run.done
    stream = run.stream
    tokens = canary_tokens(done.source, done.measurement, done.seed)
    (canary,) = stream.begin([tokens])
    last = canary.hidden
    for layer in done.progress.steps(
        run.layers, stage=f"tune {done.plan.name}: writing", unit="layer"
    ):
        path = layer_store.layer_path(done.output, layer.index)
        scales = kv_scales_of(done.measurement, layer, done.plan.kv_cache)
        cache = None if scales is None else KVRounder({layer.index: scales.to(done.device.kind)})
        with (
            stream.layer(layer.index, as_stored=as_stored(done.plan, layer)) as module,
            linears_restored(module),
        ):
            if layer_store.finished(path, keys[layer.index]) is not None:
                read_back(module, layer, done.plan, path, device=done.device)
                last = stream.run(module, canary, cache=cache)
            else:
                tensors, record = _finished(
                    run, module, layer=layer, canary=canary, outcome=outcome
                )
                last = stream.run(module, canary, cache=cache)
                record |= {"key": keys[layer.index], "canary": tensor_hash(done.device.fetch(last))}
                layer_store.write_layer(path, tensors, record)
        canary.store.put(canary.index, last)
        give_back_holes()
    write_canary(done.output, done.plan, stream, done.measurement, tokens=tokens, last=last)


def _finished(
    run: TuningRun, module: nn.Module, *, layer: Layer, canary: State, outcome: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put a layer's tuned linears in place; the result is its file's tensors, and its record."""
    path = layer_store.layer_path(run.done.folder, layer.index)
    infos, _ = read_header(path)
    quantized = {name: read_tensor(path, info) for name, info in infos.items()}
    device = run.device
    smooth_again(
        module,
        layer,
        {name: device.put(tensor) for name, tensor in quantized.items() if is_factor(name)},
    )
    put_changed(module, layer, run.done.folder, device=device)
    tensors = {name: tensor for name, tensor in quantized.items() if not is_factor(name)}
    record = layer_store.record(run.done.folder, layer.index)
    starts = run.starts(layer)
    fixed = run.short(layer)
    tuned = run.tuned(layer, outcome["steps"], starts)
    inputs, outputs, _ = canary_traffic(run.stream, module, layer, canary)
    for name, start in starts.items():
        dtype = run.scale_dtype(start, name)
        weight = algorithm.made(start.weight, tuned[name], scale_dtype=dtype)
        original: Any = module.get_submodule(layer.relative(name))
        sums = weight_sums(original.weight.detach(), weight)
        record["errors"][name] = {"weight": error_from(*sums, name=name)}
        tensors |= fetched(
            FORMAT.encode(name, replace(start, weight=weight), scale_dtype=dtype), device
        )
        rescaled = int((weight.scale != start.weight.scale).sum())
        decisions = record["decisions"][name]
        decisions[TUNE] = {**outcome, "rescaled": rescaled}
        if name in fixed:
            decisions[TUNE] |= {"tokens": fixed[name].tokens, "needed": fixed[name].needed}
        if "same_as_rtn" in decisions:
            decisions["same_as_rtn"] = decisions["same_as_rtn"] and not rescaled
    install_all(module, layer, run.done.plan, tensors, device=device)
    for name in starts.keys() & outputs.keys():  # the canary does not reach every expert
        linear: Any = module.get_submodule(layer.relative(name))
        record["errors"][name]["output"] = relative_error(
            outputs[name], linear(inputs[name]), name=name
        )
    return tensors, record


def _close(places: Sequence[Sequence[State]]) -> None:
    for room in places:
        room[0].store.close()
