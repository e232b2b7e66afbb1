"""The model as embeddings, decoder layers and head, with one decoder layer in memory at a time.

No family's forward is written again here. The model's own forward is run with every decoder layer
replaced by a recorder. The arguments of each layer's call (masks, position embeddings) are replayed
later, layer by layer.

    states = stream.begin(sequences)
    for index in range(len(graph.layers)):
        with stream.layer(index) as layer:
            stream.advance(layer, states)
    with stream.head():
        logits = [stream.finish(state.hidden) for state in states]
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quantflow.core.device import HOST, Device, placed
from quantflow.core.groups import spans
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QuantizedLinear
from quantflow.errors import InputError, UnsupportedError
from quantflow.models.graph import Graph, text_config
from quantflow.models.hidden import HiddenStates
from quantflow.models.hooks import RepeatedHeads
from quantflow.models.names import NameMap
from quantflow.models.parameters import materialize_, release_
from quantflow.models.skeleton import skeleton
from quantflow.models.stand_ins import (
    Call,
    Given,
    HeadStandIn,
    NoEmbedding,
    QuantizedHead,
    Recorded,
    Recorder,
    Rows,
    TensorPool,
    giving,
    in_parts,
    logit_rows,
)
from quantflow.models.weights import Weights
from quantflow.numerics.product import widened

_CACHE_ARGUMENTS = ("past_key_values", "layer_past")


def _with_cache(module: nn.Module, args: tuple[Any, ...], cache: Cache) -> tuple[Any, ...]:
    """The arguments of a layer's call behind its input, with a cache where one has its place.

    GPT-2 passes it without its name.
    """
    names = list(signature(module.forward).parameters)[1:]
    return tuple(
        cache if name in _CACHE_ARGUMENTS else value
        for name, value in zip_longest(names[: len(args)], args)
    )


@dataclass(frozen=True, kw_only=True)
class State:
    """One sequence on its way through the layers.

    Attributes:
        calls: arguments of each decoder layer; tensors are shared over layers and sequences, never
            modified.
        store: hidden states of all sequences.
        index: this sequence's place in the store.
    """

    calls: tuple[Call, ...]
    store: HiddenStates
    index: int

    @property
    def hidden(self) -> Tensor:
        """The input of the next layer, [1, S, H]."""
        return self.store.get(self.index)


class LayerStream:
    """A model that runs layer by layer; between calls only buffers are in memory.

    Attributes:
        weights: opened checkpoint or artifact.
        graph: graph of the model.
        dtype: dtype of weights and hidden states.
        model: the causal LM, parameters on meta.
        names: binding of the checkpoint's tensors to the model's.
        cache: KV cache of calls that bring none.
        device: device of layers and head; embeddings are looked up in host memory.
    """

    def __init__(
        self,
        weights: Weights,
        graph: Graph,
        *,
        dtype: torch.dtype = torch.float32,
        cache: Cache | None = None,
        device: Device = HOST,
    ) -> None:
        """Build the model without storage and check it against the checkpoint and the graph.

        Args:
            weights: opened checkpoint or artifact.
            graph: graph of the model.
            dtype: dtype of the weights and hidden states, whatever the checkpoint stores.
            cache: KV cache of calls that bring none, a `KVRounder`, or None.
            device: device of layers and head.

        Raises:
            InputError: the checkpoint and its config.json do not belong together.
            UnsupportedError: the model's decoder layers differ from the graph's.
        """
        self.weights = weights
        self.graph = graph
        self.dtype = dtype
        self.cache = cache
        self.device = device
        self.model: PreTrainedModel = skeleton(weights.config, dtype=dtype)
        self.names = NameMap(self.model).bind(weights.names)
        self._layers: nn.ModuleList = self.model.get_submodule(graph.family.layers)
        self._originals = tuple(self._layers)
        self._latest = -1  # the last layer that `layer` yielded
        self._index = {module: index for index, module in enumerate(self._originals)}
        self._mine = threading.local()
        self._given = [
            Given(layer, self._mine, tuple_of=graph.family.tuple_of) for layer in self._originals
        ]
        inside = f"{graph.family.layers}."
        known = self.names.to_source
        self._outer = tuple(
            name
            for name in self.model.state_dict()
            if not name.startswith(inside) and name in known
        )
        self._embeds: Any = self.model.get_input_embeddings()
        self._embedding = self._name_of(self._embeds)
        self._head = self._name_of(self.model.get_output_embeddings())
        self._untie()
        self._check_graph()

    def _name_of(self, module: nn.Module) -> str:
        found: str = next(name for name, part in self.model.named_modules() if part is module)
        return found

    def _untie(self) -> None:
        """Untie parameters of which the checkpoint holds both.

        transformers does so when the two differ.
        """
        tied = self.model.all_tied_weights_keys
        for name, twin in list(tied.items()):
            if self.names.to_source[name] != self.names.to_source[twin]:
                del tied[name]

    def _check_graph(self) -> None:
        kept = (*self.graph.routers, *self.graph.idle)
        modules = {
            name: layer.module(name)
            for layer in self.graph.layers
            for name in (*layer.linears, *layer.routers, *layer.idle)
        }
        bound = self.names.to_module
        expected = {
            modules[name]
            for name in self.graph.linears
            if bound.get(f"{name}.weight") == f"{modules[name]}.weight"
        }
        inside = self._layers.named_modules(prefix=self.graph.family.layers)
        present = {name for name, module in inside if isinstance(module, nn.Linear)}
        present -= {modules[name] for name in kept}
        if present != expected:
            name = min(present ^ expected)
            raise UnsupportedError(
                f"{name}: in {'the model' if name in present else 'the graph'} only, "
                f"the {self.graph.family.model_type} family expects it in both, under one name "
                "in file and model",
                "use a checkpoint in the names of the family's transformers implementation",
            )

    @torch.no_grad()
    def begin(
        self, sequences: Sequence[Tensor], *, hidden: HiddenStates | None = None, first: int = 0
    ) -> list[State]:
        """Embed sequences, one per forward, and record the arguments of every decoder layer's call.

        Only those rows of the embedding are read that the sequences name, and the padding token's:
        a model that reads images too puts padding where a sequence names an image.

        Args:
            sequences: token ids, int64 [S] each.
            hidden: store of the hidden states, on this stream's device; None keeps them in memory.
                A restored store keeps its own.
            first: place in the store of the first sequence.

        Raises:
            InputError: a sequence is empty or holds an id outside the vocabulary.
        """
        vocabulary = self._embeds.num_embeddings
        for number, sequence in enumerate(sequences):
            if sequence.ndim != 1 or not len(sequence):
                raise InputError(
                    f"sequence {number}: shape {list(sequence.shape)}, [S] is needed",
                    "drop the sequence",
                )
            if int(sequence.min()) < 0 or int(sequence.max()) >= vocabulary:
                raise InputError(
                    f"sequence {number}: token ids {int(sequence.min())}..{int(sequence.max())}, "
                    f"the model embeds 0..{vocabulary - 1}",
                    "use the tokenizer that belongs to the model",
                )
        if not sequences:
            return []
        store = HiddenStates(len(sequences), device=self.device) if hidden is None else hidden
        padding = self._padding()
        # [n], ascending
        ids = torch.unique(
            torch.cat([*sequences, *([] if padding is None else [torch.tensor([padding])])])
        )
        rows = self.weights.read_rows(self.names.to_source[f"{self._embedding}.weight"], ids).to(
            self.dtype
        )
        pool = TensorPool(self.device)
        base = self._base()
        prefix = "".join(
            f"{name}." for name, module in self.model.named_modules() if module is base and name
        )
        outer = [
            name
            for name in self._outer
            if name.startswith(prefix) and name != f"{self._embedding}.weight"
        ]
        with (
            self._resident(outer),
            self._in_place_of(self._embedding, Rows(ids, rows, self._embeds, padding=padding)),
        ):
            return [
                self._record(sequence, pool, store, index)
                for index, sequence in enumerate(sequences, first)
            ]

    def _padding(self) -> int | None:
        """The padding token; None where config.json names none that is embedded."""
        padding: int | None = getattr(text_config(self.model.config), "pad_token_id", None)
        return padding if padding in range(self._embeds.num_embeddings) else None

    def _base(self) -> Any:
        """The model without its head.

        Llama 4 has no module under the base model's name; its decoder is taken.
        """
        base = self.model.base_model
        return self.model.get_decoder() if base is self.model else base

    def _record(self, sequence: Tensor, pool: TensorPool, store: HiddenStates, index: int) -> State:
        recorders = [
            Recorder(
                layer,
                tuple_of=self.graph.family.tuple_of,
                last=layer is self._originals[-1],
            )
            for layer in self._originals
        ]
        with self._replaced(recorders), suppress(Recorded):
            self._base()(input_ids=sequence[None], use_cache=False)  # [1, S]
        seen: dict[int, Tensor] = {}
        calls = [
            Call(args=pool.share(part.args, seen), kwargs=pool.share(part.kwargs, seen))
            for part in recorders
        ]
        if not store.restored:
            carried = self.graph.family.carried
            hidden = recorders[0].hidden
            store.put(index, hidden if carried is None else carried.joined(hidden, None))
        return State(calls=tuple(calls), store=store, index=index)

    @contextmanager
    def layer(self, index: int, *, as_stored: bool = False) -> Iterator[nn.Module]:
        """Yield a decoder layer with its weights in memory; they are released on exit.

        A skipped layer, which text goes past, has no weights.

        Args:
            index: index of the layer.
            as_stored: keep the weights of its linears in their stored dtype: half the memory, for
                the same outputs up to rounding (`quantflow.models.stand_ins.in_parts`). They must
                not be quantized.
        """
        module = self._originals[index]
        layer = self.graph.layers[index]
        if layer.skipped:
            yield module
            return
        place = f"{self.graph.family.layers}.{index}"
        names = {name: self.names.to_source[f"{place}.{name}"] for name in module.state_dict()}
        inside = [layer.relative(name) for name in layer.linears if as_stored]
        linears: dict[str, Any] = {name: module.get_submodule(name) for name in inside}
        stored = [f"{name}.weight" for name in linears]
        try:
            plain = {name: names[name] for name in names if name not in stored}
            self.weights.fill_(module, plain, dtype=self.dtype, device=self.device)
            for name in stored:
                (weight,) = self.weights.read([names[name]]).values()
                materialize_(module, {name: self.device.put(weight)}, dtype=weight.dtype)
                # The caller may release the weight while this generator waits at `yield`; a local
                # name would keep it alive.
                del weight
            self._want_after(index)
            with placed(module, self.device), in_parts(linears.values(), dtype=self.dtype):
                yield module
        finally:
            self.weights.empty_(module, names)

    @contextmanager
    def beside(self, index: int, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a decoder layer that runs in this stream's dtype with another stream's weights.

        Linears multiply the weights that are there, whatever their dtype, and take no memory. All
        other parameters are copies in this stream's dtype; they are released on exit.

        Args:
            index: index of the layer.
            module: the layer as the other stream's `layer` yielded it, not quantized; its buffers
                are used as they are.
        """
        own = self._originals[index]
        layer = self.graph.layers[index]
        if own is module or layer.skipped:
            yield own
            return
        inside = [layer.relative(name) for name in layer.linears]
        linears: dict[str, Any] = {name: own.get_submodule(name) for name in inside}
        shared = {f"{name}.weight" for name in linears}
        names = set(own.state_dict())
        try:
            for name, tensor in module.state_dict().items():
                dtype = tensor.dtype if name in shared else self.dtype
                materialize_(own, {name: tensor.detach()}, dtype=dtype)
            with placed(own, self.device), in_parts(linears.values(), dtype=self.dtype):
                yield own
        finally:
            release_(own, names)

    def _want_after(self, index: int) -> None:
        """Start to read the next layer in the direction in which layers are asked for."""
        after = index + (1 if index >= self._latest else -1)
        self._latest = index
        if self.weights.ahead is not None and 0 <= after < len(self._originals):
            prefix = f"{self.graph.layers[after].prefix}."
            self.weights.ahead.want(
                [name for name in self.weights.names if name.startswith(prefix)]
            )

    @torch.no_grad()
    def run(self, module: nn.Module, state: State, *, cache: Cache | None = None) -> Tensor:
        """The output of a decoder layer for a state, [1, S, H]; the state stays as it is.

        Args:
            module: layer that `layer` yielded.
            state: the sequence; `state.hidden` is the layer's input.
            cache: a `KVRecorder` or `KVRounder`, or None for the stream's own.
        """
        return self.forward(module, state, state.hidden, cache=cache)

    def forward(
        self, module: nn.Module, state: State, hidden: Tensor, *, cache: Cache | None = None
    ) -> Tensor:
        """The output of a decoder layer for a hidden state, [1, S, H].

        Gradients flow where they are enabled. In a family whose layers hand on further values, both
        tensors hold these in further columns (`quantflow.models.carried`).

        Args:
            module: layer that `layer` yielded.
            state: sequence whose recorded call is replayed; its own hidden state is not read.
            hidden: the layer's input, [1, S, H].
            cache: a `KVRecorder` or `KVRounder`, or None for the stream's own.
        """
        if self.graph.layers[self._index[module]].skipped:
            return hidden
        call = state.calls[self._index[module]]
        carried = self.graph.family.carried
        if carried is not None:
            hidden, value = carried.parted(hidden, numbers=self.dtype)
            call = call.given(carried.argument, value)
        args, kwargs = call.args, call.kwargs
        cache = self.cache if cache is None else cache
        if cache is not None and self.graph.layers[self._index[module]].attention is not None:
            kwargs = kwargs | {name: cache for name in _CACHE_ARGUMENTS if name in kwargs}
            args = _with_cache(module, args, cache)
        alone = self.device.is_host or self.dtype != torch.float32
        with widened(self.dtype), nullcontext() if alone else RepeatedHeads():
            output: Any = module(hidden, *args, **kwargs)
        result: Tensor = output[0] if self.graph.family.tuple_of else output
        return result if carried is None else carried.joined(result, output[carried.output])

    def advance(
        self,
        module: nn.Module,
        states: Iterable[State],
        *,
        cache: Cache | None = None,
        workers: Workers = SEQUENTIAL,
    ) -> None:
        """Run a decoder layer over states, in order; its outputs become their hidden states.

        Args:
            module: layer that `layer` yielded.
            states: every sequence of a store.
            cache: a `KVRecorder` or `KVRounder`, or None for the stream's own; it must be
                thread-safe.
            workers: run several sequences at once.
        """
        waiting = list(states)
        outputs = workers.stream(partial(self.run, module, cache=cache), waiting)
        for state, hidden in zip(waiting, outputs, strict=True):
            state.store.put(state.index, hidden)

    @contextmanager
    def head(
        self, linear: QuantizedLinear | None = None, *, products: torch.dtype | None = None
    ) -> Iterator[None]:
        """Keep the final norm and the head in memory, as stored, for many calls of `finish`.

        Args:
            linear: quantized head that computes the logits instead of the weights' own, inside
                another `head()` until this one ends.
            products: dtype in which the weights' own head is multiplied; None is the stream's.
        """
        inside = isinstance(self.model.get_submodule(self._head), HeadStandIn | QuantizedHead)
        if inside and linear is None:
            yield
            return
        name = f"{self._head}.weight"
        source = self.names.to_source[name]
        others = [
            other for other in self._outer if other not in (name, f"{self._embedding}.weight")
        ]
        linear = linear or self.weights.quantized(source)
        bias = None
        if (added := self.names.to_source.get(f"{self._head}.bias")) is not None:
            bias = self.device.put(self.weights.read([added], self.dtype)[added])
        if linear:
            head: nn.Module = QuantizedHead(linear.to(self.device.kind), self.dtype, bias)
        else:
            weight = self.device.put(self.weights.read([source])[source])
            head = HeadStandIn(weight, dtype=products or self.dtype, bias=bias)
        with ExitStack() as stack:
            if not inside:
                stack.enter_context(self._resident(others))
                stack.enter_context(self._replaced(self._given))
                stack.enter_context(placed(self.model, self.device))
            stack.enter_context(self._in_place_of(self._head, head))
            stack.enter_context(
                self._in_place_of(
                    self._embedding, NoEmbedding(self._embeds, dtype=self.dtype, device=self.device)
                )
            )
            yield

    @torch.no_grad()
    def finish(self, hidden: Tensor) -> Tensor:
        """The logits [1, S, V] of the last layer's output [1, S, H].

        Inside `head()` several threads may call it. Outside it reads the head, and changes the
        model while it runs.
        """
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of `finish`; gradients flow where they are enabled."""
        hidden = self.alone(hidden)
        with self.head(), giving(self._mine, hidden), widened(self.dtype):
            logits: Tensor = self.model(
                input_ids=hidden.new_zeros(hidden.shape[:2], dtype=torch.int64), use_cache=False
            ).logits
        return logits

    def alone(self, hidden: Tensor) -> Tensor:
        """A hidden state as the layer returned it, without the values carried beside it."""
        carried = self.graph.family.carried
        return hidden if carried is None else carried.parted(hidden, numbers=self.dtype)[0]

    def parts(self, tokens: int) -> list[slice]:
        """A sequence's tokens in parts, each with few enough logits for several threads at once."""
        return spans(tokens, logit_rows(text_config(self.model.config).vocab_size))

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
    def _in_place_of(self, name: str, module: nn.Module) -> Iterator[None]:
        """Run the block with `module` in the place of a submodule of the model."""
        original = self.model.get_submodule(name)
        try:
            self.model.set_submodule(name, module)
            yield
        finally:
            self.model.set_submodule(name, original)

    @contextmanager
    def _resident(self, names: Iterable[str]) -> Iterator[None]:
        """Run the block with parameters outside the layers in memory."""
        sources = {name: self.names.to_source[name] for name in names}
        try:
            self.weights.fill_(self.model, sources, dtype=self.dtype)
            yield
        finally:
            self.weights.empty_(self.model, sources)
