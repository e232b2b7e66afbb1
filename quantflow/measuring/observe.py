"""The statistics of every layer: sequences run through the model, watched by observers.

Each sequence has observers of its own, which arrive in sample order and are added up in a fixed one
(totals.py): sequences run on several threads, and the sums are those of one. Where gradients are
observed too, the input of each layer is kept until it was run backwards
(quantflow/measuring/gradients.py).
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.core import determinism
from quantflow.core.device import HOST, Device, fetched
from quantflow.core.parallel import Workers
from quantflow.distributed.placement import is_elsewhere
from quantflow.distributed.transformers_split import RankShare, cut_, held_channels
from quantflow.files.canonical import digest_of
from quantflow.files.safetensors_header import read_header
from quantflow.measuring.backward import generator_for
from quantflow.measuring.gradients import Backward
from quantflow.measuring.replicas import Replica
from quantflow.measuring.routing import SITE as ROUTED
from quantflow.measuring.stored import Deferred, Later
from quantflow.measuring.totals import Observers, Totals
from quantflow.models import layer_store
from quantflow.models.capture import LayerStream, State
from quantflow.models.experts import every_token, watch_routing
from quantflow.models.graph import Graph, Layer
from quantflow.models.hidden import HiddenStates
from quantflow.models.hooks import KVRecorder, QueryRecorder, watch
from quantflow.models.load import Source
from quantflow.models.reading import read_tensor
from quantflow.numerics.statistics import COUNT
from quantflow.observers import OBSERVERS, goes_back, of_gradients
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.channel_amax import ChannelAmaxObserver
from quantflow.observers.count import CountObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.keys import HEADS, is_matrix
from quantflow.planning.resources import Allowance
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress

# Tokens that each expert of a mixture sees while it is observed: those that the router sends it, or
# all. The value is a context of the layer's module.
EXPERT_TOKENS: dict[str, Any] = {"routed": nullcontext, "all": every_token}


def products_of(stats: Sequence[str], device: Device = HOST) -> torch.dtype:
    """The dtype of products on the way back: the device's fast one, where only sums are wanted."""
    sums_alone = [kind for kind in stats if of_gradients(kind)] == [GradientObserver.NAME]
    return determinism.products(device) if sums_alone else torch.float32


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rank's sequences on their way through the layers.

    Attributes:
        stats: observers of every linear's input; `fisher` and `gradient` see the gradient by its
            output.
        indices: numbers of the sequences in the whole calibration set.
        seed: seed of the labels whose gradients are taken.
        folder: folder of the resume state.
        key: digest of everything that the statistics depend on.
        experts: a key of EXPERT_TOKENS.
        device: device that runs layers; statistics stay there until their layer is done.
        dtype: dtype of weights and hidden states; statistics are float32 and wider.
    """

    stats: Sequence[str]
    indices: Sequence[int]
    seed: int
    source: Source
    graph: Graph
    folder: Path
    key: str
    progress: Progress
    workers: Workers
    allowance: Allowance
    replica: Replica
    experts: str = "routed"
    device: Device = HOST
    dtype: torch.dtype = torch.float32

    def statistics(self, sequences: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Every statistic of every layer, by `<source name>|<site>|<statistic>`.

        Matrices stay in the layers' files.
        """
        stream = self._stream()
        backwards = goes_back(self.stats)
        opened = partial(
            HiddenStates,
            len(sequences),
            folder=self.folder / "hidden",
            keep=backwards,
            device=self.device,
        )
        start, hidden = layer_store.restart_together(
            self.folder, self.key, self.graph, opened=opened, span=self.replica.span
        )
        states = stream.begin(sequences, hidden=hidden)
        if not hidden.restored:
            hidden.commit(0, key=self.key, settled=self.replica.wait)
        rest = self.graph.layers[start:]
        fields: Any = {"samples": len(sequences), "nbytes": self._bytes}
        for layer in self.progress.steps(
            rest, stage="measure", unit="layer", before=start, **fields
        ):
            path = layer_store.layer_path(self.folder, layer.index)
            layer_key = digest_of([self.key, layer.index])
            last = layer is self.graph.layers[-1]
            if (
                last
                and not backwards
                and self.replica.all(layer_store.finished(path, layer_key) is not None)
            ):
                continue
            give_back_holes()
            with stream.layer(layer.index) as module:
                measured = self._measure_layer(stream, module, layer, states)
            layer_store.write_layer(path, measured, {"key": layer_key})
            if not last or backwards:
                hidden.commit(layer.index + 1, key=self.key, settled=self.replica.wait)
        hidden.close()
        folders = [self.folder]
        if backwards:
            folders.append(self._backward(stream, states).run())
        paths = [
            layer_store.layer_path(folder, layer.index)
            for folder in folders
            for layer in self.graph.layers
        ]
        held = dict[str, Tensor]()
        later = dict[str, Later]()
        for path in paths:
            for name, info in read_header(path)[0].items():
                if is_matrix(name):
                    later[name] = Later((info.dtype, info.shape), partial(read_tensor, path, info))
                else:
                    held[name] = read_tensor(path, info)
        return Deferred(held, later)

    def _backward(self, stream: LayerStream, states: list[State]) -> Backward:
        """The way back from what left the last layer."""
        calls = [state.calls for state in states]
        give_back_holes()
        return Backward(
            stream=stream,
            graph=self.graph,
            calls=calls,
            indices=self.indices,
            generators=[generator_for(self.seed, index) for index in self.indices],
            hidden=self.folder / "hidden",
            folder=self.folder / "backwards",
            stats=[kind for kind in self.stats if of_gradients(kind)],
            products=products_of(self.stats, self.device),
            key=self.key,
            progress=self.progress,
            workers=self.workers,
            allowance=self.allowance,
        )

    def _stream(self) -> LayerStream:
        if self.replica.mesh is None:
            return LayerStream(self.source, self.graph, dtype=self.dtype, device=self.device)
        share = RankShare(source=self.source, placements=self.replica.placements)
        stream = LayerStream(share, self.graph, dtype=self.dtype, device=self.device)
        cut_(
            stream,
            self.replica.placements,
            self.replica.mesh,
            among_zeros=self.replica.among_zeros,
        )
        return stream

    def _measure_layer(
        self, stream: LayerStream, module: nn.Module, layer: Layer, states: Sequence[State]
    ) -> dict[str, Tensor]:
        """Run a layer over every sequence and put the hidden states that leave it.

        Returns:
            The layer's statistics.
        """
        firsts = {group.linears[0] for group in layer.groups}
        gates = list(layer.gates.values())
        held = [name for name in layer.linears if self._is_here(name)]
        # Hooks belong to the module, and several threads run sequences through it: each thread has
        # the observers of its own sequence.
        mine = threading.local()

        def unit(state: State) -> tuple[Tensor, Observers]:
            mine.observers = {}
            cache = KVRecorder(
                lambda _index, key, value: self._observe_cache(mine.observers, layer, key, value)
            )
            with QueryRecorder(partial(self._observe_query, mine.observers, layer)):
                hidden = stream.run(module, state, cache=cache)
            return hidden, mine.observers

        def watched(name: str, x: Tensor, y: Tensor) -> None:
            x, y = self._own(name, x, "row"), self._own(name, y, "column")
            if name in firsts:  # linears of a group see one input: observed once
                self._see(mine.observers, f"{name}|input", self._of_inputs, x)
            self._see(mine.observers, f"{name}|output", [AmaxObserver.NAME], y)

        def routed(tokens: Tensor) -> None:
            for gate, count in zip(gates, tokens.unbind(), strict=True):
                if not self._is_here(gate):
                    continue
                mine.observers[f"{gate}|{ROUTED}"] = [
                    CountObserver.from_state({COUNT.name: count.clone()})
                ]

        totals = Totals()
        total: Observers = {}
        for name in held:
            weight: Any = module.get_submodule(layer.relative(name)).weight
            self._see(total, f"{name}|weight", [AmaxObserver.NAME], weight)
        watching = watch(module, {layer.relative(name): partial(watched, name) for name in held})
        with watching, watch_routing(module, routed), EXPERT_TOKENS[self.experts](module):
            arrived = self.workers.stream(unit, states, ahead=self.allowance.in_flight)
            for number, (state, (hidden, observers)) in enumerate(
                zip(states, arrived, strict=True), start=1
            ):
                self.progress.doing(f"sequence {number} of {len(states)}")
                totals.add(self.indices[state.index], observers)
                state.store.put(state.index, hidden)
        total |= totals.take()
        self._add_unseen(total, module, layer)
        return fetched(_by_name(total, layer), self.device)

    def _own(self, name: str, x: Tensor, kind: str, *, axis: int = -1, width: int = 1) -> Tensor:
        """What is this card's of a tensor of which the layer was given all.

        Args:
            name: linear or attention along whose cut axis the tensor lies, if it is cut.
            x: the tensor.
            kind: kind of placement that cuts that axis.
            axis: axis of the tensor.
            width: channels of the placement that are one of the tensor's: of a head.
        """
        placement = self.replica.placements.get(name)
        if not self.replica.among_zeros or placement is None or placement["kind"] != kind:
            return x
        return held_channels(x, placement, axis=axis, width=width)

    def _is_here(self, name: str) -> bool:
        """Whether a linear is not one of an expert that another card holds."""
        placement = self.replica.placements.get(name)
        return placement is None or not is_elsewhere(placement)

    def _add_unseen(self, total: Observers, module: nn.Module, layer: Layer) -> None:
        """Add empty statistics of experts without tokens, so that every rank has the same keys."""
        for group in layer.groups:
            for name in group.linears if group.expert is not None else ():
                if not self._is_here(name):
                    continue
                weight: Any = module.get_submodule(layer.relative(name)).weight
                outputs, inputs = weight.shape
                total.setdefault(f"{name}|output", self._observers([AmaxObserver.NAME], outputs))
                if name == group.linears[0]:
                    total.setdefault(f"{name}|input", self._observers(self._of_inputs, inputs))

    @property
    def _of_inputs(self) -> list[str]:
        return [kind for kind in self.stats if not of_gradients(kind)]

    def _observe_query(self, observers: Observers, layer: Layer, query: Tensor) -> None:
        # others multiply what they call queries too, and keep no keys
        if layer.attention is not None:
            # the linear behind attention is cut as its heads are
            for name in layer.linears if self.replica.among_zeros else ():
                if name.startswith(f"{layer.attention}."):
                    query = self._own(name, query, "row", axis=1, width=query.shape[-1])
            self._see(observers, f"{layer.attention}|query", [AmaxObserver.NAME], query)

    def _observe_cache(
        self, observers: Observers, layer: Layer, key: Tensor, value: Tensor
    ) -> None:
        key, value = (self._own(str(layer.attention), x, "column", axis=1) for x in (key, value))
        self._see(observers, f"{layer.attention}|k_cache", [AmaxObserver.NAME], key)
        self._see(observers, f"{layer.attention}|v_cache", [AmaxObserver.NAME], value)
        for site, states in zip(HEADS, (key, value), strict=True):  # observed as [1, D, S, heads]
            of_heads = states.transpose(1, 3)  # [1, D, S, heads]
            self._see(observers, f"{layer.attention}|{site}", [ChannelAmaxObserver.NAME], of_heads)

    def _see(self, observers: Observers, site: str, kinds: Sequence[str], x: Tensor) -> None:
        """Show a tensor, [..., features], to the observers of a site."""
        if site not in observers:
            observers[site] = self._observers(kinds, x.shape[-1])
        for observer in observers[site]:
            observer.update(x)

    def _observers(self, kinds: Sequence[str], features: int) -> list[Any]:
        with self.device.factories():
            return [OBSERVERS[kind](features=features) for kind in kinds]

    def _bytes(self, layer: Layer) -> int:
        prefix = f"{layer.prefix}."
        return sum(
            info.nbytes
            for name, info in self.source.checkpoint.infos.items()
            if name.startswith(prefix)
        )


def _by_name(observers: Observers, layer: Layer) -> dict[str, Tensor]:
    """The statistics by name; those of a shared input stand under each of its linears.

    The observers are emptied.
    """
    statistics: dict[str, Tensor] = {}
    for site in list(observers):
        for observer in observers.pop(site):
            statistics |= {f"{site}|{name}": tensor for name, tensor in observer.state().items()}
    others = {f"{group.linears[0]}|input": group.linears[1:] for group in layer.groups}
    for key in list(statistics):
        site, _, statistic = key.rpartition("|")
        statistics |= {
            f"{name}|input|{statistic}": statistics[key] for name in others.get(site, ())
        }
    return statistics
