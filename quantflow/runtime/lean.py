"""A decoder for the Llama-like families: the layers as a short list of products, with C of our own between them.

No module of transformers runs in its loop; the rotation of positions comes from transformers' own function once per batch.
Hidden states are float32 whatever the artifact's dtype is: that one says what linears read, and how their weights are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.graph import Graph, Layer, Residual, graph_for, moving_rotation
from quantflow.runtime import operations
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.decoder import require_room
from quantflow.runtime.kv_cache import KIND_OF, KVCache, require_kind
from quantflow.runtime.operations import DecoderBlock, Heads, Operations, Projection, product
from quantflow.runtime.packed import Pack
from quantflow.runtime.projection import plain_weight, projection
from quantflow.runtime.tensor_parallel import Ranks


def why_not(artifact: Artifact) -> str | None:
    """Return why an artifact needs transformers' modules, in a sentence, or None when `LeanDecoder` can run it."""
    config: Any = artifact.config
    graph = graph_for(config)
    if artifact.device.type != "cpu":
        return f"it runs on cpu, not on {artifact.device.type}"
    if graph.sparse or graph.family.residual is None:
        return f"it knows layers like Llama's, not those of {config.model_type}"
    if config.hidden_act not in ("silu", "swish"):
        return f"it gates with silu, not with {config.hidden_act}"
    if any(placement.scheme.rotation is not None for placement in artifact.linears.values()):
        return "it mixes no inputs by Hadamard matrices, as down_proj of this artifact needs"
    if rotation := moving_rotation(config):
        return f"its rotation depends on the position alone, that of rope_type {rotation} on the sequence too"
    rotated, dim = 2 * len(LlamaRotaryEmbedding(config).inv_freq), graph.layers[0].head_dim
    if rotated != dim:
        return f"it rotates all {dim} features of a head, this model {rotated}"
    if artifact.dtype == torch.float16:
        return "it holds weights in float32 or bfloat16, not in float16"
    return operations.why_not(graph.layers[0].head_dim)


class LeanDecoder:
    """A `Decoder` whose weights come straight from an artifact.

    Attributes:
        vocab_size, positions, device: as in `quantflow.runtime.decoder.Decoder`.
        cache: keys and values since `begin`; None before.
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
            kv_cache: a key of `quantflow.runtime.kv_cache.KINDS`, without measured scales; or `auto` for what the artifact
                brings scales for, else its dtype.
            pack: where weights are looked for first; what is not there is put into it.
            ranks: what puts the parts together where `artifact` is the share of one of several processes.

        Raises:
            UnsupportedError: `why_not` has a reason.
            UsageError: a cache of an unknown kind.
            InputError: a tensor that holds what it must not.
        """
        reason = why_not(artifact)
        if reason is not None:
            raise UnsupportedError(f"the lean decoder: {reason}", "use decoder transformers")
        config: Any = artifact.config
        graph = graph_for(config)
        self.vocab_size: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device = artifact.device
        self.cache: KVCache | None = None
        kv_scales = artifact.kv_scales() if kv_cache == "auto" else ()
        if kv_cache == "auto":
            kv_cache = KIND_OF[kv_scales[0].scheme.kind] if kv_scales else str(artifact.dtype).removeprefix("torch.")
        require_kind(kv_cache)
        first = graph.layers[0]
        self._heads = Heads(
            query=config.num_attention_heads,
            shared=config.num_attention_heads // first.repeats,
            dim=first.head_dim,
            scale=first.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        shape = {"layers": len(graph.layers), "kv_heads": self._heads.shared, "head_dim": self._heads.dim}
        self._new_cache = partial(KVCache, kind=kv_cache, scales=kv_scales, **shape)
        blocks = [_block(artifact, layer, pack) for layer in graph.layers]
        embedding, self._norm, self._head = _ends(artifact, graph, pack)
        self._embed: Projection = lambda ids: functional.embedding(ids, embedding).float()
        if ranks is not None:
            blocks = [_put_together(*pair, ranks) for pair in zip(blocks, graph.layers, strict=True)]
            names = graph.family.residual or Residual()
            self._embed = ranks.embedding(embedding, names.embedding)
            self._head = ranks.joined(self._head, artifact.to_source[f"{names.head}.weight"].removesuffix(".weight"))
        self._operations = Operations(self._heads, blocks)
        self._rotary = LlamaRotaryEmbedding(config)  # of every family here: they differ in their configuration alone
        self._tables = (torch.empty(0, self._heads.dim),) * 2

    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; see `Decoder.begin`. A batch that fits into the last one's memory takes it over."""
        cache = self.cache
        if cache is not None and len(cache.keys[0]) >= rows and cache.capacity >= capacity:
            cache.clear(rows)
        else:
            self.cache = cache = self._new_cache(rows=rows, capacity=capacity)
        if len(self._tables[0]) < cache.capacity:
            cos, sin = self._rotary(torch.empty(0), torch.arange(cache.capacity)[None])  # [1, capacity, dim]
            self._tables = cos[0].contiguous(), sin[0].contiguous()
        self._operations.begin(cache, *self._tables)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True) -> Tensor:
        """Append positions; see `Decoder.forward`.

        Raises:
            UsageError: more rows or columns than `begin` made room for.
        """
        logits = self._head(self._hidden(input_ids, padding, last_only=last_only))
        return logits if last_only else logits.view(*input_ids.shape, -1)  # [B, T, V]

    @torch.inference_mode()
    def forward_hidden(self, input_ids: Tensor, *, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Append positions; see `HiddenDecoder.forward_hidden`."""
        hidden = self._hidden(input_ids, padding, last_only=False).clone()  # the next step writes where it lies
        logits = self._head(hidden)
        return logits.view(*input_ids.shape, -1), hidden.view(*input_ids.shape, -1)

    def keep(self, rows: Tensor) -> None:
        """Choose sequences of the cache; see `Decoder.keep`."""
        cache = self._begun()
        cache.keep(rows)
        self._operations.begin(cache, *self._tables)

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
        x = self._embed(input_ids.reshape(-1))  # [B * T, H]
        delta = operations.run(x)
        cache.length += count
        if last_only and count > 1:
            last = slice(count - 1, None, count)
            x, delta = x[last].contiguous(), None if delta is None else delta[last].contiguous()  # [B, H]
        return operations.add_norm(x, delta, self._norm)

    def _begun(self) -> KVCache:
        if self.cache is None:
            raise UsageError("the decoder has no cache", "call begin before anything else")
        return self.cache


def _block(artifact: Artifact, layer: Layer, pack: Pack | None) -> DecoderBlock:
    config: Any = artifact.config
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer.index] == "sliding_attention"
    of_heads = [f"{layer.attention}.{name}.weight" for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (_vector(artifact, name) if name in artifact.checkpoint.tensors else None for name in of_heads)
    return DecoderBlock(
        # `why_not` refuses families whose first and third group read no norm
        norms=tuple(_vector(artifact, f"{layer.groups[index].norm}.weight") for index in (0, 2)),
        products=tuple(projection(artifact, group.linears, pack) for group in layer.groups),
        q_norm=q_norm,
        k_norm=k_norm,
        window=getattr(config, "sliding_window", None) or 0 if slides else 0,
    )


def _put_together(block: DecoderBlock, layer: Layer, ranks: Ranks) -> DecoderBlock:
    """Return a block whose two products that need more than a rank's own part get and give all of it."""
    names, (qkv, output, gate_up, down) = [group.linears[0] for group in layer.groups], block.products
    return replace(block, products=(qkv, ranks.across(output, *names[:2]), gate_up, ranks.across(down, *names[2:])))


def _ends(artifact: Artifact, graph: Graph, pack: Pack | None) -> tuple[Tensor, Tensor, Projection]:
    """Return the embedding [V, H], the last norm [H], and the head, which may be the embedding again."""
    residual = graph.family.residual
    assert isinstance(residual, Residual)  # `why_not` refuses other families
    embedding = plain_weight(artifact, f"{residual.embedding}.weight", pack)
    source = artifact.to_source[f"{residual.head}.weight"].removesuffix(".weight")
    tied_head = partial(product, weight=embedding, bias=None)
    head = tied_head if source == residual.embedding else projection(artifact, [source], pack)
    return embedding, _vector(artifact, f"{residual.norm}.weight"), head


def _vector(artifact: Artifact, name: str) -> Tensor:
    return artifact.read([name], torch.float32)[name]
