"""The model as embeddings, decoder layers and head, with one decoder layer in memory at a time.

No family's forward is written again here. The model's own forward is run with every decoder layer replaced by a
recorder; what it handed to each layer (masks, position embeddings) is replayed later, layer by layer.

    states = stream.begin(sequences)
    for index in range(len(graph.layers)):
        with stream.layer(index) as layer:
            stream.advance(layer, states)
    with stream.head():
        logits = [stream.finish(state.hidden) for state in states]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.models.graph import Graph
from quantflow.models.load import Source, materialize_, release_, skeleton
from quantflow.models.names import NameMap
from quantflow.models.stand_ins import Call, Constant, Recorder, TensorPool

LinearCallback = Callable[[Tensor, Tensor], None]
KVCallback = Callable[[int, Tensor, Tensor], None]
_CACHE_ARGUMENTS = ("past_key_values", "layer_past")


@dataclass(kw_only=True)
class State:
    """One sequence on its way through the layers.

    Attributes:
        hidden: [1, S, H], the input of the next layer.
        calls: per decoder layer, what it is called with; tensors are shared over layers and sequences, never modified.
    """

    hidden: Tensor
    calls: tuple[Call, ...]


class KVRecorder(Cache):  # type: ignore[misc]
    """A cache that stores nothing and reports what an attention layer wants to store."""

    def __init__(self, callback: KVCallback) -> None:
        """Report to `callback(layer index, K after RoPE, V)`; K and V are [1, key/value heads, S, head_dim]."""
        super().__init__(layers=[])
        self._callback = callback

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Report K and V and return them unchanged."""
        self._callback(layer_idx, key_states, value_states)
        return key_states, value_states


class LayerStream:
    """A model that runs layer by layer; between calls only buffers are in memory.

    Attributes:
        model: the causal LM, parameters on meta.
        names: what every tensor of the checkpoint is in the model.
    """

    def __init__(self, source: Source, graph: Graph, *, dtype: torch.dtype = torch.float32) -> None:
        """Build the model without storage and check it against the checkpoint and the graph.

        Args:
            source: the opened checkpoint.
            graph: its graph.
            dtype: of the weights and hidden states, whatever the checkpoint stores.

        Raises:
            InputError: the checkpoint and its config.json do not belong together.
            UnsupportedError: the model's decoder layers are not what the graph says.
        """
        self.source = source
        self.graph = graph
        self.dtype = dtype
        self.model: PreTrainedModel = skeleton(source.config)
        self.names = NameMap(self.model).bind(source.names)
        self._layers: nn.ModuleList = self.model.get_submodule(graph.family.layers)
        self._originals = tuple(self._layers)
        self._index = {module: index for index, module in enumerate(self._originals)}
        inside = f"{graph.family.layers}."
        parameters = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        self._outer = tuple(name for name in parameters if not name.startswith(inside))
        embedding = self.model.get_input_embeddings()
        self._embedding = next(f"{name}.weight" for name, part in self.model.named_modules() if part is embedding)
        self._untie()
        self._check_graph()

    def _untie(self) -> None:
        """Follow the checkpoint where it holds both of two tied parameters, as transformers does when they differ."""
        tied = self.model.all_tied_weights_keys
        for name, twin in list(tied.items()):
            if self.names.to_source[name] != self.names.to_source[twin]:
                del tied[name]

    def _check_graph(self) -> None:
        found = {
            f"{self.graph.family.layers}.{name}"
            for name, module in self._layers.named_modules()
            if isinstance(module, nn.Linear)
        }
        known = {name for name in self.graph.linears if self.names.to_module.get(f"{name}.weight") == f"{name}.weight"}
        if found != known:
            name = min(found ^ known)
            raise UnsupportedError(
                f"{name}: in {'the model' if name in found else 'the graph'} only, "
                f"the {self.graph.family.model_type} family expects it in both, under one name in file and model",
                "use a checkpoint in the names of the family's transformers implementation",
            )

    @torch.no_grad()
    def begin(self, sequences: Sequence[Tensor]) -> list[State]:
        """Embed sequences, one per forward, and record what every decoder layer is called with.

        Args:
            sequences: token ids, int64 [S] each.

        Raises:
            InputError: a sequence that is empty or holds an id outside the vocabulary.
        """
        rows = self.model.get_input_embeddings().num_embeddings
        for number, sequence in enumerate(sequences):
            if sequence.ndim != 1 or not len(sequence):
                raise InputError(f"sequence {number}: shape {list(sequence.shape)}, [S] is needed", "drop the sequence")
            if int(sequence.min()) < 0 or int(sequence.max()) >= rows:
                raise InputError(
                    f"sequence {number}: token ids {int(sequence.min())}..{int(sequence.max())}, "
                    f"the model embeds 0..{rows - 1}",
                    "use the tokenizer that belongs to the model",
                )
        pool = TensorPool()
        prefix = f"{self.model.base_model_prefix}."
        with self._resident(name for name in self._outer if name.startswith(prefix)):
            return [self._record(sequence, pool) for sequence in sequences]

    def _record(self, sequence: Tensor, pool: TensorPool) -> State:
        recorders = [Recorder() for _ in self._originals]
        with self._replaced(recorders):
            self.model.base_model(input_ids=sequence[None], use_cache=False)  # [1, S]
        seen: dict[int, Tensor] = {}
        calls = [Call(args=pool.share(part.args, seen), kwargs=pool.share(part.kwargs, seen)) for part in recorders]
        return State(hidden=recorders[0].hidden, calls=tuple(calls))

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Yield a decoder layer with its weights in memory; they are released on exit."""
        module, prefix = self._originals[index], f"{self.graph.layers[index].prefix}."
        names = [name for name, _ in module.named_parameters()]
        try:
            materialize_(module, self._read(names, prefix=prefix), dtype=self.dtype)
            yield module
        finally:
            release_(module, names)

    @torch.no_grad()
    def run(self, module: nn.Module, state: State, *, cache: Cache | None = None) -> Tensor:
        """Return what a decoder layer makes of a state, [1, S, H]; the state stays as it is.

        Args:
            module: as `layer` yields it.
            state: the sequence, `state.hidden` is the layer's input.
            cache: a `KVRecorder`, or None.
        """
        call = state.calls[self._index[module]]
        kwargs = call.kwargs
        if cache is not None:
            kwargs = kwargs | {name: cache for name in _CACHE_ARGUMENTS if name in kwargs}
        hidden: Tensor = module(state.hidden, *call.args, **kwargs)
        return hidden

    def advance(self, module: nn.Module, states: Iterable[State], *, cache: Cache | None = None) -> None:
        """Run a decoder layer over states, in order, and make its outputs their hidden states."""
        for state in states:
            state.hidden = self.run(module, state, cache=cache)

    @contextmanager
    def head(self) -> Iterator[None]:
        """Keep the final norm and the head in memory for many calls of `finish`."""
        with self._resident(name for name in self._outer if name != self._embedding):
            yield

    @torch.no_grad()
    def finish(self, hidden: Tensor) -> Tensor:
        """Return the logits [1, S, V] of the last layer's output [1, S, H]; reads the head unless inside `head()`."""
        with self.head(), self._replaced([Constant(hidden) for _ in self._originals]):
            logits: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return logits

    @contextmanager
    def _replaced(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Run the block with `modules` in the place of the decoder layers."""
        try:
            for index, module in enumerate(modules):
                self._layers[index] = module
            yield
        finally:
            for index, module in enumerate(self._originals):
                self._layers[index] = module

    @contextmanager
    def _resident(self, names: Iterable[str]) -> Iterator[None]:
        """Run the block with parameters outside the layers in memory; those that were not there before are released."""
        absent = [name for name in self._outer if self.model.get_parameter(name).is_meta]
        try:
            materialize_(self.model, self._read([name for name in names if name in absent]), dtype=self.dtype)
            yield
        finally:
            release_(self.model, absent)

    def _read(self, names: Sequence[str], *, prefix: str = "") -> dict[str, Tensor]:
        """Read parameters by module name, relative to `prefix`."""
        sources = {name: self.names.to_source[f"{prefix}{name}"] for name in names}
        tensors = self.source.read(sources.values(), self.dtype)
        return {name: tensors[source] for name, source in sources.items()}


@contextmanager
def watch(module: nn.Module, callbacks: Mapping[str, LinearCallback]) -> Iterator[None]:
    """Call `callback(input, output)` whenever a submodule has run, until the block ends.

    Args:
        module: a decoder layer.
        callbacks: name relative to `module` -> callback; input [1, S, I] and output [1, S, O] are the real ones.

    Raises:
        UsageError: a name that is not in the module.
    """
    inside = dict(module.named_modules())
    for name in callbacks:
        if name not in inside:
            raise UsageError(f"{name}: not in {type(module).__name__}", f"use one of {', '.join(filter(None, inside))}")
    with ExitStack() as stack:
        for name, callback in callbacks.items():
            handle = inside[name].register_forward_hook(partial(_report, callback))
            stack.callback(handle.remove)
        yield


def _report(callback: LinearCallback, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    callback(args[0], output)
