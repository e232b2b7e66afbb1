"""The way back of stage 1: observed gradients of the model's own loss, from head to first layer.

Forward every layer's input was kept. Here each layer runs again, from the last to the first, and
observers watch the gradients at its linears, as they watch inputs on the way forward: each sequence
has its own, which are added up in a fixed order (totals.py).

On a device a sequence goes back there, and its statistics stay there until the layer is done.

Draws of labels make sums of gradients noisy, far more than bfloat16 does. Where nothing but these
sums is wanted, products of linears, of the head and of the sums are in `products`; choices of
schemes, which read squares of gradients too, have float32.

    <folder>/hidden/00012.hidden       the gradient by the input of layer 12
    <folder>/layers/00012.safetensors  the statistics of layer 12
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.core.device import Device, fetched
from quantflow.core.parallel import Workers
from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.canonical import digest_of
from quantflow.measuring.backward import Through, backward, sampled_gradient
from quantflow.measuring.totals import Observers, Totals
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Graph, Layer
from quantflow.models.hidden import HiddenStates
from quantflow.models.stand_ins import Call
from quantflow.models.trained_layer import replaced
from quantflow.observers import OBSERVERS
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.planning.resources import Allowance
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One rank's sequences on their way back.

    Attributes:
        calls: arguments of each decoder layer, for each sequence.
        indices: numbers of the sequences in the whole calibration set.
        generators: generator of each sequence's labels.
        hidden: folder of the hidden states, a generation for the input of every layer and one for
            the last layer's output.
        folder: folder of the resume state.
        stats: observers of the gradients, by name.
        products: dtype of products.
        key: digest of everything that the statistics depend on.
    """

    stream: LayerStream
    graph: Graph
    calls: Sequence[tuple[Call, ...]]
    indices: Sequence[int]
    generators: Sequence[torch.Generator]
    hidden: Path
    folder: Path
    stats: Sequence[str]
    products: torch.dtype
    key: str
    progress: Progress
    workers: Workers
    allowance: Allowance

    def run(self) -> Path:
        """The folder whose layers hold the statistics of every layer."""
        disk.make_folder(self.folder / "layers")
        gradients = HiddenStates(
            len(self.calls), folder=self.folder / "hidden", device=self.stream.device
        )
        left = self._restart(gradients)
        if left is None:
            left = len(self.graph.layers)
            self._from_head(gradients)
        rest = self.graph.layers[:left][::-1]
        fields: Any = {"samples": len(self.calls), "before": len(self.graph.layers) - left}
        for layer in self.progress.steps(rest, stage="measure backwards", unit="layer", **fields):
            give_back_holes()
            states = self._states(layer.index)
            rounded = self.products != torch.float32
            with (
                self.stream.layer(layer.index, as_stored=rounded) as module,
                self._rounded(module, layer),
            ):
                statistics = self._layer(module, layer, states, gradients)
            layer_store.write_layer(
                layer_store.layer_path(self.folder, layer.index),
                statistics,
                {"key": self._layer_key(layer.index)},
            )
            gradients.commit(layer.index, key=self.key)
        gradients.close()
        return self.folder

    def _rounded(self, module: nn.Module, layer: Layer) -> AbstractContextManager[None]:
        """The context in which linears multiply in `products`."""
        if self.products == torch.float32:
            return nullcontext()
        names = {
            name: module.get_submodule(layer.relative(name)).get_parameter("weight")
            for name in layer.linears
        }
        return replaced(
            module,
            layer,
            {name: weight.detach().to(self.products) for name, weight in names.items()},
        )

    def _restart(self, gradients: HiddenStates) -> int | None:
        """The number of layers that are left, with the gradients that enter the next one.

        No gradients begin at the head.
        """
        count = left = len(self.graph.layers)
        while (
            left
            and layer_store.finished(
                layer_store.layer_path(self.folder, left - 1), self._layer_key(left - 1)
            )
            is not None
        ):
            left -= 1
        return next(
            (index for index in range(left, count + 1) if gradients.restore(index, key=self.key)),
            None,
        )

    def _states(self, index: int) -> list[State]:
        """Every sequence with the hidden state that entered a layer, or left the last one.

        A hidden state is read when it is needed.

        Raises:
            InputError: the file is not as it was written.
        """
        store = HiddenStates(
            len(self.calls), folder=self.hidden, keep=True, device=self.stream.device
        )
        if not store.restore(index, key=self.key):
            raise InputError(
                f"{self.hidden / f'{index:05d}.hidden'}: is missing or changed while it was in use",
                f"remove {self.hidden.parent}, and measure again",
            )
        return [
            State(calls=calls, store=store, index=number) for number, calls in enumerate(self.calls)
        ]

    def _from_head(self, gradients: HiddenStates) -> None:
        """Put the gradients by what left the last layer."""
        count = len(self.graph.layers)
        states = self._states(count)
        with self.stream.head(products=self.products):
            numbers = self.progress.steps(
                range(len(states)), stage="measure backwards", unit="sequence"
            )
            gradients_of_head = self.workers.stream(
                partial(self._sampled, states), numbers, ahead=self.allowance.in_flight
            )
            for number, gradient in enumerate(gradients_of_head):
                gradients.put(number, gradient)
                give_back_holes()
        gradients.commit(count, key=self.key)
        give_back_holes()

    def _sampled(self, states: Sequence[State], number: int) -> Tensor:
        return sampled_gradient(
            self.stream, states[number].hidden, generator=self.generators[number]
        )

    def _layer(
        self, module: nn.Module, layer: Layer, states: Sequence[State], gradients: HiddenStates
    ) -> dict[str, Tensor]:
        """Bring every gradient back through a layer and put the gradients by its input.

        Returns:
            The layer's statistics.
        """
        totals = Totals()
        with backward(self.stream, module, layer) as through:
            arrived = self.workers.stream(
                partial(
                    _sequence, through, gradients, self.stats, self.products, self.stream.device
                ),
                states,
                ahead=self.allowance.in_flight,
            )
            for number, (gradient, observers) in enumerate(arrived):
                self.progress.doing(f"sequence {number + 1} of {len(states)}")
                totals.add(self.indices[number], observers)
                gradients.put(number, gradient)
                give_back_holes()  # what a sequence leaves is in many pieces of many sizes
        total = totals.take()
        self._add_unseen(total, module, layer)
        states_of_sites = [
            (site, observer.state()) for site in sorted(total) for observer in total[site]
        ]
        named = {
            f"{site}|{name}": value
            for site, state in states_of_sites
            for name, value in state.items()
        }
        return fetched(named, self.stream.device)

    def _add_unseen(self, total: Observers, module: nn.Module, layer: Layer) -> None:
        """Add empty statistics of linears that no gradient reached.

        Such are those of experts without tokens, and those that only choose, as an indexer's do.
        """
        for name in layer.linears:
            weight: Any = module.get_submodule(layer.relative(name)).weight
            outputs, inputs = weight.shape
            for site, features in (("gradient", outputs), ("guided_input", inputs)):
                kinds = [kind for kind in self.stats if site in OBSERVERS[kind].SITES]
                if kinds and f"{name}|{site}" not in total:
                    with self.stream.device.factories():
                        total[f"{name}|{site}"] = [OBSERVERS[kind](features) for kind in kinds]

    def _layer_key(self, index: int) -> str:
        return digest_of([self.key, index])


def _sequence(
    through: Through,
    gradients: HiddenStates,
    stats: Sequence[str],
    products: torch.dtype,
    device: Device,
    state: State,
) -> tuple[Tensor, Observers]:
    """The gradient by the input of one sequence, and what observers of its own saw on the way."""
    observers: Observers = {}

    def see(site: str, kind: str, seen: Tensor) -> None:
        with device.factories():
            observers.setdefault(site, []).append(OBSERVERS[kind](features=seen.shape[-1]))
        observers[site][-1].update(seen)

    def observe(name: str, x: Tensor, gradient: Tensor) -> None:
        if FisherObserver.NAME in stats:
            weights = gradient.square().mean(dim=-1, keepdim=True).sqrt()  # [1, S, 1]
            see(f"{name}|gradient", FisherObserver.NAME, gradient)
            see(f"{name}|guided_input", FisherObserver.NAME, x * weights)
        if GradientObserver.NAME in stats:
            see(f"{name}|gradient", GradientObserver.NAME, gradient.to(products))

    return through(state, gradients.get(state.index), observe), observers
