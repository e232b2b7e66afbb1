"""A decoder of our own: the layers as a short list of products, with C between them.

No module of transformers runs in its loop. `quantflow.models.architecture` says which models it
knows, and what they compute. Hidden states are float32 whatever the artifact's dtype is: the dtype
decides the inputs of linears, and how weights are kept. With dtype bfloat16 and a bfloat16 cache,
attention rounds queries and probabilities to bfloat16 on CPUs that multiply it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends import kernels
from quantflow.core.kv import KVScales
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models import architecture
from quantflow.models.architecture import Blueprint
from quantflow.models.family import FusedRows
from quantflow.runtime import delta_net, operations, sparse_attention
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import require_room
from quantflow.runtime.kv_cache import KIND_OF, DeltaStates, KVCache, require_kind
from quantflow.runtime.latent_attention import LatentOutput, LatentQueries, latent_products
from quantflow.runtime.operations import (
    NO_NORM,
    DecoderBlock,
    Norm,
    Operations,
    Projection,
    normalized,
    product,
)
from quantflow.runtime.packed import Pack
from quantflow.runtime.projection import plain_weight, projection
from quantflow.runtime.ranks.tensor_parallel import Ranks
from quantflow.runtime.routed_experts import Exchange, ExpertProjections, RoutedExperts
from quantflow.runtime.row_adapters import RowAdapters


def why_not(artifact: Artifact, *, crops: bool = False) -> str | None:
    """Why the lean decoder cannot run an artifact, in a sentence; None when it can.

    Args:
        artifact: an artifact, or a model that is not quantized.
        crops: whether `crop` will be called.
    """
    if artifact.device.type != "cpu":
        return f"it runs on cpu, not on {artifact.device.type}"
    blueprint = architecture.read(artifact.checkpoint.config)
    if isinstance(blueprint, str):
        return blueprint
    if any(placement.scheme.rotation is not None for placement in artifact.linears.values()):
        return "it mixes no inputs by Hadamard matrices, as down_proj of this artifact needs"
    if artifact.dtype == torch.float16:
        return "it holds weights in float32 or bfloat16, not in float16"
    if note := artifact.manifest.get("lean_decoder"):
        return f"export compared it: {note}"
    if blueprint.heads.latent and artifact.kv_cache is not None:
        return "it has no measured scales for a cache of latents"
    if crops and any(blueprint.linear):
        assert blueprint.delta is not None  # some layers have it
        return f"it cannot take a wrong guess back out of the state of {blueprint.delta.kind}"
    return (
        delta_net.why_not(blueprint)
        or sparse_attention.why_not(blueprint)
        or operations.why_not(blueprint.heads.head_dim, blueprint.heads.latent)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """What a decoder shares with layers that predict further tokens.

    Attributes:
        blueprint: the model.
        embed: hidden states before the first layer, of tokens.
        logits: output of the head, of hidden states after the last norm.
        new_cache: makes a cache of the decoder's kind, as `KVCache`.
        rotary_tables: tables for so many positions, as `Operations.begin` takes them.
        rounds: see `Operations`.
    """

    blueprint: Blueprint
    embed: Projection
    logits: Projection
    new_cache: Callable[..., KVCache]
    rotary_tables: Callable[[int], Sequence[tuple[Tensor, Tensor]]]
    rounds: bool


class LeanDecoder:
    """A `Decoder` whose weights come straight from an artifact.

    Attributes:
        vocab_size, positions, device: as in `quantflow.runtime.decoder.Decoder`.
        stateful: sequences have states that cannot be cropped, nor be shared by those that only
            begin alike (`quantflow.runtime.delta_net`).
        cache: keys and values since `begin`; None before.
        processes: number of processes that share the model; each has its heads' part of the cache.
        why_not_invariant: why the bits of a sequence may depend on what is computed with it, in a
            sentence; None: they do not.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        kv_cache: str = "auto",
        pack: Pack | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Read the weights.

        Args:
            artifact: opened for the CPU.
            kv_cache: a key of `quantflow.runtime.kv_cache.KINDS`, without measured scales; or
                `auto` for what the artifact brings scales for, else its dtype.
            pack: file where weights are looked for first; what is not there is put into it.
            ranks: exchange between the processes, where `artifact` is the share of one of several.

        Raises:
            UnsupportedError: `why_not` has a reason.
            UsageError: a cache of an unknown kind.
            InputError: a tensor that holds what it must not.
        """
        reason, blueprint = why_not(artifact), architecture.read(artifact.checkpoint.config)
        if reason is not None or isinstance(blueprint, str):
            raise UnsupportedError(f"the lean decoder: {reason}", "use decoder transformers")
        if ranks is not None:
            blueprint = ranks.blueprint
        self.vocab_size = blueprint.vocab_size
        self.positions = blueprint.positions
        self.device = artifact.device
        self.cache: KVCache | None = None
        self.stateful = any(blueprint.linear)
        self.processes = 1 if ranks is None else ranks.world
        self._blueprint = blueprint
        scales = kv_scales(artifact, blueprint) if kv_cache == "auto" else ()
        if kv_cache == "auto":
            kv_cache = (
                KIND_OF[scales[0].scheme.kind]
                if scales
                else str(artifact.dtype).removeprefix("torch.")
            )
        require_kind(kv_cache, latent=blueprint.heads.latent > 0)
        self._new_cache = partial(
            KVCache,
            kind=kv_cache,
            layers=blueprint.layers - sum(blueprint.linear),
            scales=scales,
            **cache_shape(blueprint),
        )
        blocks = [block(artifact, blueprint, index, pack) for index in range(blueprint.layers)]
        embedding, self._norm, self._head = ends(artifact, blueprint, pack)
        self._entrance = entrance(artifact, blueprint, pack)
        self._exit = exit_linear(artifact, blueprint, pack)
        self._embed: Projection = lambda ids: functional.embedding(ids, embedding).float()
        if ranks is not None:
            blocks = [
                _put_together(block, blueprint, index, ranks) for index, block in enumerate(blocks)
            ]
            self._embed = ranks.embedding(embedding, blueprint.names.embedding)
            self._head = ranks.joined(self._head, artifact.head)
        self._blocks = blocks
        self._rounds = artifact.dtype == torch.bfloat16
        self._operations = Operations(blueprint.heads, blocks, blueprint.form, rounds=self._rounds)
        self._row_adapters: tuple[RowAdapters, Operations] | None = None  # and the layers with them
        foreign = {
            linear.backend.name
            for linear in artifact.linears.values()
            if linear.backend.linear is not kernels.linear
        }
        self.why_not_invariant: str | None = None
        if foreign:
            self.why_not_invariant = (
                f"{', '.join(sorted(foreign))} sums in another order for more tokens"
            )
        self._rotary_tables: list[tuple[Tensor, Tensor]] = []

    @property
    def shared(self) -> ModelParts:
        """What layers that predict further tokens need of the model."""
        return ModelParts(
            blueprint=self._blueprint,
            embed=lambda ids: self._embedded(ids, lambda: torch.zeros_like(ids)),
            logits=self._logits,
            new_cache=self._new_cache,
            rotary_tables=self._grow_rotary_tables,
            rounds=self._rounds,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states beside the cache's columns; 0 but for `stateful` models."""
        states = None if self.cache is None else self.cache.states
        return 0 if states is None else states.nbytes

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that `forward_rows` knows; see `adapt`."""
        return () if self._row_adapters is None else self._row_adapters[0].names

    def adapt(self, artifact: Artifact, folders: Mapping[str, str | Path]) -> None:
        """Let sequences of `forward_rows` have LoRA adapters, each its own.

        Args:
            artifact: artifact that the weights came from.
            folders: folders of the adapters by name, as PEFT writes them.

        Raises:
            InputError: files that are missing or damaged, tensors that belong to no linear of the
                model or do not fit it.
            UnsupportedError: another kind of adapter than plain LoRA on linears of attention and
                MLP.
        """
        blueprint = self._blueprint
        if blueprint.delta is not None and self.stateful:
            raise UnsupportedError(
                f"adapters by request: the layers of {blueprint.delta.kind} have none",
                "merge the adapter into the model",
            )
        if blueprint.latent is not None:
            raise UnsupportedError(
                "adapters by request: the queries and keys of latent attention have none",
                "merge the adapter into the model",
            )
        adapters = RowAdapters(artifact, folders)
        order = _order_of_heads(blueprint)
        blocks = []
        for index, block in enumerate(self._blocks):
            named = zip(block.products, linears_of(blueprint, index), strict=True)
            products = [
                adapters.beside(product, artifact, names, order=None if at else order)
                for at, (product, names) in enumerate(named)
            ]
            blocks.append(replace(block, products=tuple(products)))
        adapters.require_used()
        self._row_adapters = (
            adapters,
            Operations(blueprint.heads, blocks, blueprint.form, rounds=self._rounds),
        )

    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; see `Decoder.begin`.

        A batch that fits into the memory of the last one takes it over.
        """
        cache = self.cache
        if cache is not None and cache.has_room(rows=rows, capacity=capacity):
            cache.clear(rows)
        else:
            states = delta_states(self._blueprint, sequences=rows)
            self.cache = cache = self._new_cache(rows=rows, capacity=capacity, states=states)
        self._grow_rotary_tables(cache.capacity)
        self._operations.begin(cache, self._rotary_tables)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """Append positions; see `Decoder.forward`.

        Raises:
            UsageError: more rows or columns than `begin` made room for.
        """
        logits = self._logits(self._hidden(input_ids, padding, last_only=last_only))
        return logits if last_only else logits.view(*input_ids.shape, -1)  # [B, T, V]

    @torch.inference_mode()
    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append positions; see `HiddenDecoder.forward_hidden`."""
        # a copy: the next step writes into the same memory
        hidden = self._hidden(input_ids, padding, last_only=False).clone()
        logits = self._logits(hidden)
        return logits.view(*input_ids.shape, -1), hidden.view(*input_ids.shape, -1)

    @torch.inference_mode()
    def forward_states(self, input_ids: Tensor) -> Tensor:
        """Append positions; the final hidden states [B, T, H] alone, without logits."""
        hidden = self._hidden(input_ids, None, last_only=False).clone()
        return hidden.view(*input_ids.shape, -1)

    def begin_blocks(
        self, *, blocks: int, columns: int, positions: int, sequences: int = 1
    ) -> KVCache:
        """Empty the cache and divide it into blocks, which `forward_rows` fills with sequences.

        Args:
            blocks: number of blocks.
            columns: columns of a block.
            positions: most positions of a sequence.
            sequences: most sequences at a time; the states of `stateful` models are theirs.
        """
        states = delta_states(self._blueprint, sequences=sequences)
        self.cache = cache = self._new_cache(rows=blocks, capacity=columns, states=states)
        self._grow_rotary_tables(positions)
        self._operations.begin(cache, self._rotary_tables)
        if self._row_adapters is not None:
            self._row_adapters[1].begin(cache, self._rotary_tables)
        return cache

    @torch.inference_mode()
    def forward_rows(
        self,
        input_ids: Tensor,
        *,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        wanted: Tensor,
        slots: Tensor | None = None,
        adapters: Sequence[str | None] = (),
    ) -> Tensor:
        """Append positions to sequences in blocks.

        The bits of a sequence's logits do not depend on the other sequences.

        Args:
            input_ids: [N] int64, the new tokens of all B sequences, one after the other.
            first: [B + 1] int64, begin of each sequence's tokens, and N.
            start: [B] int64, position of each sequence's first new token.
            table: [B, W] int64, blocks of each sequence.
            wanted: [M] int64, those of the N positions whose logits are returned, in their order.
            slots: [B] int64, for each sequence a number of its own among those that `begin_blocks`
                has room for, where the model is `stateful`; None: 0, 1 and so on. A sequence that
                starts at position 0 is a new one.
            adapters: name in `adapters` of each sequence, or None; empty where no sequence has one.

        Returns:
            [M, V] float32.
        """
        operations, x, delta = self._rows(input_ids, first, start, table, slots, adapters)
        if len(wanted) < len(x):
            x, delta = x[wanted], None if delta is None else delta[wanted]  # [M, H]
        return self._logits(self._last(operations, x, delta))

    @torch.inference_mode()
    def forward_rows_states(
        self,
        input_ids: Tensor,
        *,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        wanted: Tensor,
        slots: Tensor | None = None,
        adapters: Sequence[str | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """Append positions as `forward_rows` does; its logits, and the states they come from.

        Returns:
            [M, V] float32, and the final hidden states of all new positions, [N, H] float32.
        """
        operations, x, delta = self._rows(input_ids, first, start, table, slots, adapters)
        # a copy: the next step writes into the same memory
        states = self._last(operations, x, delta).clone()
        return self._logits(states[wanted]), states

    def _rows(
        self,
        input_ids: Tensor,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        slots: Tensor | None,
        adapters: Sequence[str | None],
    ) -> tuple[Operations, Tensor, Tensor | None]:
        """Run the layers over rows; what ran them, x [N, H], and what is still to be added."""
        operations = self._operations
        if self._row_adapters is not None and self._row_adapters[0].choose(first, adapters):
            operations = self._row_adapters[1]
        operations.step_rows(first, start, table, torch.zeros_like(start), slots)

        def positions() -> Tensor:
            # a sequence's first new token is number `first` of all
            begins = (start - first[:-1]).repeat_interleave(first.diff())
            return begins + torch.arange(len(input_ids))  # [N]

        x = self._embedded(input_ids, positions)  # [N, H]
        return operations, x, operations.run(x)

    def keep(self, rows: Tensor) -> None:
        """Choose sequences of the cache; see `Decoder.keep`."""
        cache = self._begun()
        cache.keep(rows)
        self._operations.begin(cache, self._rotary_tables)

    def crop(self, length: int) -> None:
        """Forget positions; see `Decoder.crop`."""
        self._begun().crop(length)

    def _hidden(self, input_ids: Tensor, padding: Tensor | None, *, last_only: bool) -> Tensor:
        """Run the layers.  Returns [B or B * T, H], after the last norm."""
        cache, operations = self._begun(), self._operations
        count = input_ids.shape[1]
        require_room(input_ids, rows=cache.rows, length=cache.length, capacity=cache.capacity)
        if padding is not None:
            cache.padding.copy_(padding)
        operations.step(count)

        def positions() -> Tensor:
            columns = cache.length + torch.arange(count)
            return (columns - cache.padding[:, None]).clamp(min=0).reshape(-1)  # [B * T]

        x = self._embedded(input_ids.reshape(-1), positions)  # [B * T, H]
        delta = operations.run(x)
        cache.length += count
        if last_only and count > 1:
            last = slice(count - 1, None, count)
            # [B, H]
            x, delta = x[last].contiguous(), None if delta is None else delta[last].contiguous()
        return self._last(operations, x, delta)

    def _last(self, operations: Operations, x: Tensor, delta: Tensor | None) -> Tensor:
        """What the head reads, [N, H], of x and of what is still to be added to it."""
        hidden = operations.last_norm(x, delta, self._norm)
        return hidden if self._exit is None else self._exit(hidden)

    def _embedded(self, ids: Tensor, positions: Callable[[], Tensor]) -> Tensor:
        """The hidden states of tokens [N] before the first layer, [N, H].

        Args:
            ids: int64 [N].
            positions: position of each, int64 [N]; called where the model has embeddings of them.
        """
        at = None if self._entrance.positions is None else positions()
        return embedded(self._embed(ids), self._blueprint, self._entrance, at)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, V] of hidden states [N, H]."""
        return scaled(self._head(hidden), self._blueprint)

    def _grow_rotary_tables(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """The rotary tables of so many positions, computed unless there are as many."""
        if not self._rotary_tables or len(self._rotary_tables[0][0]) < positions:
            self._rotary_tables = [rope.table(positions) for rope in self._blueprint.ropes]
        return self._rotary_tables

    def _begun(self) -> KVCache:
        if self.cache is None:
            raise UsageError("the decoder has no cache", "call begin before anything else")
        return self.cache


def kv_scales(artifact: Artifact, blueprint: Blueprint) -> tuple[KVScales, ...]:
    """The measured scales of every layer's cache, of all heads or one for each kv head.

    Raises:
        InputError: see `Artifact.kv_scales`.
    """
    scales = artifact.kv_scales()
    if not blueprint.repeated_cache:
        return scales
    repeats = blueprint.heads.num_heads // blueprint.heads.num_kv_heads
    return tuple(
        replace(each, keys=each.keys[::repeats], values=each.values[::repeats]) for each in scales
    )


def cache_shape(blueprint: Blueprint) -> dict[str, Any]:
    """The arguments of `KVCache` that say what a layer keeps of a column."""
    heads = blueprint.heads
    return {
        "kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "latent": heads.latent > 0,
        "index_dim": 0 if blueprint.indexer is None else blueprint.indexer.head_dim,
    }


def delta_states(
    blueprint: Blueprint, *, sequences: int, layers: int | None = None
) -> DeltaStates | None:
    """The states of gated delta nets, of all layers or of so many; None where there are none."""
    count = sum(blueprint.linear) if layers is None else layers
    if blueprint.delta is None or not count:
        return None
    return DeltaStates(blueprint.delta, layers=count, sequences=sequences)


@dataclass(frozen=True, kw_only=True, eq=False)
class Entrance:
    """What lies between the embedding of tokens and the first layer.

    Attributes:
        linear: from the width of embeddings to that of hidden states; None: the two are equal.
        positions: a row for each position, float32 [P, H], which is added; None: there are none.
        norm: norm of the sum.
    """

    linear: Projection | None = None
    positions: Tensor | None = None
    norm: Norm = NO_NORM


def entrance(artifact: Artifact, blueprint: Blueprint, pack: Pack | None) -> Entrance:
    """Read what lies between the embedding of tokens and the first layer."""
    names, positions = blueprint.names, None
    if names.positions is not None:
        table = f"{names.positions}.weight"
        positions = artifact.read([table], torch.float32)[table][blueprint.position_offset :]
    linear, norm = names.embedding_linear, names.embedding_norm
    return Entrance(
        linear=None if linear is None else projection(artifact, [linear], pack),
        positions=positions,
        norm=NO_NORM if norm is None else norm_of(artifact, blueprint, norm),
    )


def exit_linear(artifact: Artifact, blueprint: Blueprint, pack: Pack | None) -> Projection | None:
    """Read the linear from the hidden state to what the head reads; None where there is none."""
    name = blueprint.names.head_linear
    return None if name is None else projection(artifact, [name], pack)


def embedded(
    x: Tensor, blueprint: Blueprint, entrance: Entrance, positions: Tensor | None
) -> Tensor:
    """The hidden states [N, H] that the first layer reads.

    Args:
        x: [N, E] rows of the embedding.
        blueprint: the model.
        entrance: its entrance.
        positions: int64 [N], position of each token; read where the model has embeddings of them.

    Raises:
        UsageError: a position that the model has no embedding of.
    """
    x = x if blueprint.embedding_scale == 1 else x * blueprint.embedding_scale
    if entrance.linear is not None:
        x = entrance.linear(x)
    table = entrance.positions
    if table is not None and positions is not None:
        if len(positions) and int(positions.max()) >= len(table):
            raise UsageError(
                f"position {int(positions.max())}: {blueprint.names.positions} has {len(table)}",
                "use shorter prompts or fewer new tokens",
            )
        x = x + table[positions]
    if entrance.norm.weight is None:
        return x
    return normalized(x, entrance.norm, blueprint.heads.eps, centered=blueprint.form.centered)


def scaled(logits: Tensor, blueprint: Blueprint) -> Tensor:
    """The output of the head [N, V], multiplied and capped as the model has it."""
    if blueprint.logits_scale != 1:
        logits = logits * blueprint.logits_scale
    if not blueprint.logits_cap:
        return logits
    # row by row: the bits of a row depend on nothing but the row
    rows = (logits[index : index + 1] for index in range(len(logits)))
    return torch.cat(
        [blueprint.logits_cap * torch.tanh(row / blueprint.logits_cap) for row in rows]
    )


def block(artifact: Artifact, blueprint: Blueprint, index: int, pack: Pack | None) -> DecoderBlock:
    """Read a layer.

    Raises:
        InputError: a tensor that holds what it must not.
    """
    names, prefix = blueprint.names, f"{blueprint.names.layers}.{index}"
    order = _order_of_heads(blueprint)
    groups = linears_of(blueprint, index)
    attention, net = _latent(artifact, blueprint, prefix, pack), None
    linear = blueprint.is_linear(index)
    if linear and blueprint.delta is not None:
        attention, net = delta_net.delta_net(artifact, blueprint.delta, index, prefix, pack)
    indexer = None
    if blueprint.indexer is not None and blueprint.indexer.layers[index]:
        queries = attention[0]
        assert isinstance(queries, LatentQueries)  # no other attention has an indexer
        indexer = sparse_attention.indexer(artifact, blueprint, prefix, queries, pack)
    products = [
        *attention,
        *(
            projection(artifact, group, pack, order=None if at else order)
            for at, group in enumerate(groups)
            if at >= len(attention)
        ),
    ]
    kinds = ("attention_norm", "attended_norm", "mlp_norm", "gated_norm", "q_norm", "k_norm")
    called = {kind: getattr(names, kind) for kind in kinds}
    norms = {
        kind: NO_NORM if name is None else norm_of(artifact, blueprint, f"{prefix}.{name}")
        for kind, name in called.items()
        if not (linear and kind in ("q_norm", "k_norm"))
    }
    if blueprint.unit_qk_norms and blueprint.rope_of_layer[index] is not None:
        # a norm of ones commutes with the rotation behind which the model has it
        norms |= dict.fromkeys(
            ("q_norm", "k_norm"), Norm(weight=torch.ones(blueprint.heads.head_dim))
        )
    experts = (
        _experts(artifact, blueprint, prefix, pack)
        if blueprint.mixture and blueprint.sparse[index]
        else None
    )
    return DecoderBlock(
        products=tuple(products),
        experts=experts,
        delta_net=net,
        indexer=indexer,
        shares=blueprint.shares[index] if blueprint.shares else None,
        **norms,
        window=blueprint.windows[index],
        chunk=blueprint.chunks[index] if blueprint.chunks else 0,
        temperature=blueprint.temperature if blueprint.rope_of_layer[index] is None else None,
        rope=blueprint.rope_of_layer[index],
        sinks=None if names.sinks is None else _vector(artifact, f"{prefix}.{names.sinks}"),
    )


def _latent(
    artifact: Artifact, blueprint: Blueprint, prefix: str, pack: Pack | None
) -> tuple[Projection, ...]:
    """The products of a layer's multi-head latent attention, none where it has another one."""
    latent = blueprint.latent
    if latent is None:
        return ()
    names = [latent.names.norm]
    if latent.compressed is not None:
        names.append(latent.names.query_norm)
    norms = {name: norm_of(artifact, blueprint, f"{prefix}.{name}") for name in names}
    return latent_products(artifact, blueprint, prefix, norms, pack)


def linears_of(blueprint: Blueprint, index: int) -> list[list[str]]:
    """The source names of a layer's linears, one list per product: qkv, output, up, down."""
    names, prefix = blueprint.names, f"{blueprint.names.layers}.{index}"
    mlp = [] if blueprint.sparse[index] else [names.up, (names.down,)]
    attention = [names.qkv, (names.output,)]
    if blueprint.delta is not None and blueprint.is_linear(index):
        attention = [blueprint.delta.names.inputs, (blueprint.delta.names.output,)]
    return [[f"{prefix}.{name}" for name in group] for group in (*attention, *mlp)]


def _experts(
    artifact: Artifact, blueprint: Blueprint, prefix: str, pack: Pack | None
) -> RoutedExperts:
    """Read the experts of a layer; `prefix` is the layer's name."""
    routing, names = blueprint.routing, blueprint.mixture
    assert routing is not None and names is not None  # a layer is sparse
    block = f"{prefix}.{names.block}"

    def expert(place: str, linears: Sequence[str]) -> ExpertProjections:
        *entering, down = (f"{place}.{name}" for name in linears)
        return projection(artifact, entering, pack), projection(artifact, [down], pack)

    router, *score = (projection(artifact, [f"{block}.{name}"], pack) for name in names.routers)
    shared = None
    if names.shared:
        shared = expert(f"{prefix}.{names.shared_block or names.block}", names.shared)
    experts = [
        expert(f"{block}.experts.{number}", names.linears) for number in range(routing.experts)
    ]
    correction = names.correction
    return RoutedExperts(
        router=router,
        experts=experts,
        routing=routing,
        form=blueprint.form,
        correction=None if correction is None else _vector(artifact, f"{block}.{correction}"),
        shared=shared,
        shared_score=score[0] if score else None,
    )


def _vector(artifact: Artifact, name: str) -> Tensor:
    """A tensor that belongs to no linear and no norm, as float32 of one axis."""
    return artifact.read([name], torch.float32)[name].flatten()


def _order_of_heads(blueprint: Blueprint) -> Tensor | None:
    """The rows of queries, keys and values in the order in which decode.c takes them, int64 [O].

    All queries come first, then all keys, all values, and gates where there are some. Features that
    are rotated together are half of the rotated ones apart: scores do not depend on the order of
    features, which is that of queries and of keys. None where the model has that order.
    """
    heads, dim = blueprint.heads, blueprint.heads.head_dim
    if heads.output_gate:  # the gate of a head comes after its query
        rows = torch.arange(heads.num_heads * 2 * dim).view(-1, 2, dim)
        others = len(rows) * 2 * dim + torch.arange(2 * heads.num_kv_heads * dim)
        return torch.cat([rows[:, 0].flatten(), others, rows[:, 1].flatten()])
    fused = blueprint.fused if len(blueprint.names.qkv) == 1 else FusedRows()
    blocks = fused.blocks or 1
    counts = {"q": heads.num_heads, "k": heads.num_kv_heads, "v": heads.num_kv_heads}
    rows = torch.arange(sum(counts.values()) * dim).view(blocks, -1, dim)  # [blocks, heads, dim]
    parts = torch.split(rows, [counts[part] // blocks for part in fused.order], dim=1)
    by_part = dict(zip(fused.order, parts, strict=True))
    if blueprint.rotary_pairs:
        rotated = blueprint.ropes[0].dim
        pairs = torch.arange(rotated).view(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., 1, 3, 5, ...
        features = torch.cat([pairs, torch.arange(rotated, dim)])
        by_part |= {part: by_part[part][..., features] for part in "qk"}
    order = torch.cat([by_part[part].reshape(-1) for part in "qkv"])
    return None if torch.equal(order, rows.flatten()) else order


def _put_together(
    block: DecoderBlock, blueprint: Blueprint, index: int, ranks: Ranks
) -> DecoderBlock:
    """The block whose last products, output and down or the experts, gather the parts of all ranks.

    Norms of all heads at once are taken before the products' outputs are the rank's again.
    """
    names, prefix = blueprint.names, f"{blueprint.names.layers}.{index}"
    qkv, output, *mlp = block.products
    name = f"{prefix}.{names.output}"
    if isinstance(output, LatentOutput):
        output = replace(output, output=ranks.attention(output.output, name))
    else:
        output = ranks.attention(output, name)
    if blueprint.heads.whole_norms:
        qkv = ranks.with_whole_norms(qkv, block.q_norm, block.k_norm)
        block = replace(block, q_norm=NO_NORM, k_norm=NO_NORM)
    if mlp:
        up, down = mlp
        mlp = [up, ranks.across(down, f"{prefix}.{names.up[0]}", f"{prefix}.{names.down}")]
    experts = block.experts
    if isinstance(experts, RoutedExperts):
        experts = replace(experts, exchange=_exchange(blueprint, prefix, ranks))
    return replace(block, products=(qkv, output, *mlp), experts=experts)


def _exchange(blueprint: Blueprint, prefix: str, ranks: Ranks) -> Exchange:
    """The exchange of a layer's experts; `prefix` is the layer's name."""
    names = blueprint.mixture
    assert names is not None  # the layer is sparse
    place, shared = f"{prefix}.{names.block}.experts.0", None
    if names.shared:
        shared = f"{prefix}.{names.shared_block or names.block}.{names.shared[0]}"
    inner = ranks.all_of(f"{place}.{names.linears[0]}")
    return Exchange(
        inner=inner,
        shared_inner=inner if shared is None else ranks.all_of(shared),
        outputs=ranks.all_of(f"{place}.{names.linears[-1]}"),
    )


def ends(
    artifact: Artifact, blueprint: Blueprint, pack: Pack | None
) -> tuple[Tensor, Norm, Projection]:
    """The embedding [V, E], the last norm, and the head, which may be the embedding again."""
    embedding, source = (
        plain_weight(artifact, f"{blueprint.names.embedding}.weight", pack),
        artifact.head,
    )
    bias = artifact.bias(blueprint.names.head, torch.float32)
    tied_head = partial(product, weight=embedding, bias=bias, dtype=artifact.dtype)
    head = (
        tied_head if source == blueprint.names.embedding else projection(artifact, [source], pack)
    )
    norm = NO_NORM if blueprint.norm is None else norm_of(artifact, blueprint, blueprint.norm)
    return embedding, norm, head


def norm_of(artifact: Artifact, blueprint: Blueprint, name: str) -> Norm:
    """Read a norm, [H] or [dim] float32.

    A model whose norms multiply by 1 + their weight gets that sum.
    """
    weight = artifact.read([f"{name}.weight"], torch.float32)[f"{name}.weight"]
    return Norm(
        weight=1.0 + weight if blueprint.unit_offset else weight,
        bias=artifact.bias(name, torch.float32),
    )
