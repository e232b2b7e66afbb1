"""Layers of a decoder: their products, and between them norms, RoPE, KV cache, attention, the gate.

Where kernels.c has all products, all layers are one call of decode.c; otherwise each operation is
one. All tensors are float32. The state is that of one batch: `begin` gives it a cache, `step` says
how many columns are new.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantflow.backends import kernels, native
from quantflow.models.architecture import Delta, Form, Heads, Indexer, Shares, Temperature
from quantflow.runtime.kv_cache import KINDS, LANES, KVCache

Projection = Callable[[Tensor], Tensor]  # [N, I] float32 -> [N, sum of O] float32, contiguous
# cosines and sines of the rotary embedding by position, [capacity, features that are rotated] each
RotaryTables = tuple[Tensor, Tensor]
SOURCE = Path(__file__).with_name("decode.c")
MAX_HEAD_DIM = 1024  # decode.c keeps a tile of queries on the stack
MAX_KERNEL = 8  # decode.c keeps the inputs of a convolution on the stack
_TILE, _WORD = 8, 64  # decode.c's TILE and BLOCK


# decode.c's `enum activation`
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """A norm: its weight and bias, float32 of the features.

    Without a weight there is no norm, and its input stays as it is.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = Norm()


class LayerExperts(Protocol):
    """A mixture of experts in the place of an MLP."""

    @property
    def structure(self) -> ctypes.Structure | None:
        """The mixture as decode.c runs it; None where Python has to call a product."""

    def __call__(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [N, H] of x [N, H]; `gate` lies between an expert's products."""


class LayerDeltaNet(Protocol):
    """A gated delta net in the place of attention."""

    @property
    def scores(self) -> Projection:
        """From the hidden state to two numbers for each head of values."""

    @property
    def sizes(self) -> Delta:
        """Its sizes."""

    def structure(self, inputs: Tensor, states: Tensor, kept: list[Any]) -> ctypes.Structure:
        """The layer's part as decode.c reads it; what it points to is added to `kept`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexInputs:
    """What a layer with sparse attention makes of hidden states.

    Attributes:
        attention: what attention takes, see `Operations.attend`.
        index: [N, (heads + 1) * head_dim] queries of the indexer's heads, and its key.
        weights: [N, heads] how much each of these heads counts.
    """

    attention: Tensor
    index: Tensor
    weights: Tensor


class LayerIndexer(Protocol):
    """The indexer of a layer; see `quantflow.runtime.sparse_attention`."""

    @property
    def sizes(self) -> Indexer:
        """Its sizes."""

    @property
    def key_norm(self) -> Norm:
        """Norm of its keys."""

    def __call__(self, x: Tensor) -> IndexInputs:
        """What attention and the index take of hidden states [N, H]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderBlock:
    """A decoder layer.

    Attributes:
        products: qkv, output, up (gate and up where there is a gate), down; the first two alone
            where there are experts.
        experts: stands in the place of the MLP; None: there are none.
        delta_net: stands in the place of attention, between qkv and output; None: there is none.
        indexer: stands in the place of qkv and chooses what queries see; None: there is none.
        shares: factors of the sums of hidden state and branches; None: `Form.residual` alone.
        attention_norm, attended_norm: norm before attention, and of what attention adds.
        mlp_norm, gated_norm: norm before the MLP, and of what the MLP adds.
        q_norm, k_norm: norms of queries and keys, [dim], or of all heads where `Heads.whole_norms`.
        window: positions that a query sees, itself included; 0: all before it.
        chunk: positions of a chunk, of which a query sees its own alone; 0: there are no chunks.
        temperature: how queries grow with their positions; None: they stay.
        rope: index of its tables among those that `Operations.begin` takes; None rotates nothing.
        sinks: score of a column without a value, float32 of the query heads; None: there is none.
    """

    products: tuple[Projection, ...]
    attention_norm: Norm = NO_NORM
    attended_norm: Norm = NO_NORM
    mlp_norm: Norm = NO_NORM
    gated_norm: Norm = NO_NORM
    q_norm: Norm = NO_NORM
    k_norm: Norm = NO_NORM
    experts: LayerExperts | None = None
    delta_net: LayerDeltaNet | None = None
    indexer: LayerIndexer | None = None
    shares: Shares | None = None
    window: int = 0
    chunk: int = 0
    temperature: Temperature | None = None
    rope: int | None = 0
    sinks: Tensor | None = None


def why_not(head_dim: int, latent: int = 0) -> str | None:
    """Why decode.c cannot run heads of so many features, in a sentence; None when it can.

    It is compiled if need be.

    Args:
        head_dim: features of a head.
        latent: last features of the keys that are values too.
    """
    if head_dim % LANES:
        return f"it works on {LANES} features at once, heads have {head_dim}"
    if latent % LANES:
        return f"it works on {LANES} features at once, latents have {latent}"
    if head_dim > MAX_HEAD_DIM:
        return f"it works on heads of {MAX_HEAD_DIM} features at most, these have {head_dim}"
    return native.why_not(SOURCE, cpu_flags=())


def why_not_delta(key_dim: int, value_dim: int, kernel: int) -> str | None:
    """Why decode.c cannot run a gated delta net of these sizes, in a sentence; None when it can."""
    for what, width in (("keys", key_dim), ("values", value_dim)):
        if width % LANES or width > MAX_HEAD_DIM:
            return (
                f"it works on {LANES} features at once and {MAX_HEAD_DIM} at most, heads of a "
                f"gated delta net's {what} have {width}"
            )
    if kernel > MAX_KERNEL:
        return f"it knows convolutions of {MAX_KERNEL} tokens at most, this model's has {kernel}"
    return None


def why_not_indexer(head_dim: int) -> str | None:
    """Why decode.c cannot run an indexer of such heads, in a sentence; None when it can."""
    if head_dim % LANES or head_dim > MAX_HEAD_DIM:
        return (
            f"it works on {LANES} features at once and {MAX_HEAD_DIM} at most, an indexer's heads "
            f"have {head_dim}"
        )
    return None


_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


# The structures of decode.c, which explains their fields; `compiled` compares the two.
class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER)]


class _Product(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("call", _POINTER), ("order", _POINTER)]


class _Plain(ctypes.Structure):
    _fields_ = [
        ("weight", _COUNT * 2),  # rows, columns
        ("data", _POINTER),
        ("kind", _COUNT),
        ("narrow", _COUNT),
    ]


class _Experts(ctypes.Structure):
    _fields_ = [
        ("router", _Product),
        ("shared_up", _Product),
        ("shared_down", _Product),
        ("shared_score", _Product),
        ("up", _POINTER),
        ("down", _POINTER),
        ("up_bias", _POINTER),
        ("down_bias", _POINTER),
        ("linears", _POINTER),
        ("correction", _POINTER),
        ("experts", _COUNT),
        ("chosen", _COUNT),
        ("scores", _COUNT),
        ("groups", _COUNT),
        ("chosen_groups", _COUNT),
        ("counted", _COUNT),
        ("normalized", _COUNT),
        ("scales_inputs", _COUNT),
        ("activation", _COUNT),
        ("gated", _COUNT),
        ("near", _FLOAT),
        ("least", _FLOAT),
        ("factor", _FLOAT),
        ("alpha", _FLOAT),
        ("limit", _FLOAT),
    ]


class _DeltaNet(ctypes.Structure):
    _fields_ = [
        ("scores", _Product),
        ("convolution", _POINTER),
        ("rate", _POINTER),
        ("shift", _POINTER),
        ("norm", _POINTER),
        ("inputs", _POINTER),
        ("states", _POINTER),
        ("key_heads", _COUNT),
        ("value_heads", _COUNT),
        ("key_dim", _COUNT),
        ("value_dim", _COUNT),
        ("kernel", _COUNT),
        ("lightning", _COUNT),
        ("eps", _FLOAT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_scales", _POINTER),
        ("value_scales", _POINTER),
        ("key_steps", _POINTER),
        ("value_steps", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("sinks", _POINTER),
        ("q_norm", _Norm),
        ("k_norm", _Norm),
        ("attention_norm", _Norm),
        ("attended_norm", _Norm),
        ("mlp_norm", _Norm),
        ("gated_norm", _Norm),
        ("qkv", _Product),
        ("output", _Product),
        ("up", _Product),
        ("down", _Product),
        ("experts", _POINTER),
        ("delta_net", _POINTER),
        ("window", _COUNT),
        ("chunk", _COUNT),
        ("rotary_dim", _COUNT),
        ("floor_scale", _FLOAT),
        ("attn_scale", _FLOAT),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("padding", _POINTER),
        ("first", _POINTER),
        ("start", _POINTER),
        ("table", _POINTER),
        ("tiles", _POINTER),
        ("slots", _POINTER),
        ("selected", _POINTER),
        ("words", _COUNT),
        ("slopes", _POINTER),
        ("rounded_alibi", _COUNT),
        ("rows", _COUNT),
        ("block", _COUNT),
        ("width", _COUNT),
        ("query_heads", _COUNT),
        ("kv_heads", _COUNT),
        ("head_dim", _COUNT),
        ("kind", _COUNT),
        ("latent", _COUNT),
        ("output_gate", _COUNT),
        ("whole_norms", _COUNT),
        ("centered", _COUNT),
        ("parallel", _COUNT),
        ("post", _COUNT),
        ("activation", _COUNT),
        ("gated", _COUNT),
        ("rounds", _COUNT),
        ("scale", _FLOAT),
        ("eps", _FLOAT),
        ("cap", _FLOAT),
        ("clip", _FLOAT),
        ("residual", _FLOAT),
        ("alpha", _FLOAT),
        ("limit", _FLOAT),
    ]


_ARGUMENTS: tuple[tuple[str, list[Any]], ...] = (  # argument types of decode.c's functions
    (
        "add_norm",
        [_POINTER] * 2
        + [_Norm] * 2
        + [_POINTER]
        + [_COUNT] * 2
        + [_FLOAT, _COUNT, _FLOAT, _COUNT]
        + [_FLOAT],
    ),
    ("gate", [_POINTER] * 2 + [_COUNT] * 4 + [_FLOAT] * 2),
    ("product", [_POINTER] * 4 + [_COUNT] * 5),
    ("product_of_heads", [_POINTER] * 3 + [_COUNT] * 10),
    ("argmax_logsumexp", [_POINTER] + [_COUNT] * 2 + [_POINTER] * 2),
    ("rope_store", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER]),
    ("attend", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER, _POINTER]),
    (
        "select_columns",
        [ctypes.POINTER(_Step), ctypes.POINTER(_Layer)] + [_POINTER] * 2 + [_COUNT, _POINTER],
    ),
    ("delta_rule", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer)] + [_POINTER] * 3),
    ("route", [ctypes.POINTER(_Experts)] + [_POINTER] * 2 + [_COUNT] + [_POINTER] * 2),
    ("sort_rows", [ctypes.POINTER(_Experts), _POINTER, _COUNT] + [_POINTER] * 2),
    ("combine", [ctypes.POINTER(_Experts)] + [_POINTER] * 6 + [_COUNT] * 2),
    ("mixture", [ctypes.POINTER(_Experts), _POINTER, _COUNT, _POINTER]),
    ("run", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _COUNT] + [_POINTER] * 9),
    ("release_threads", []),
)


@functools.cache
def compiled() -> Any:
    """The functions of decode.c, which is compiled if need be.

    Raises:
        IntegrityError: decode.c has other structures than this file.
        UnsupportedError: it cannot be compiled here; see `why_not`.
    """
    native.require_same_fields(SOURCE, _Norm, _Product, _Plain, _Experts, _DeltaNet, _Layer, _Step)
    library = native.library(SOURCE)
    for name, types in _ARGUMENTS:
        getattr(library, name).argtypes = types
    return library


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The product x @ weight.T + bias in float32.

    A weight in bfloat16 stands for the float32 numbers that it is. The bits of a row do not depend
    on the other rows; torch's product sums in another order for more rows.

    Args:
        x: [N, I] float32.
        weight: [O, I], float32 or bfloat16.
        bias: [O], or None.
        dtype: dtype of the inputs; x is rounded to bfloat16 where the weight is in it too. Products
            of both are exact in float32.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if dtype == weight.dtype == torch.bfloat16:
        x = x.to(dtype)  # a CPU that multiplies pairs of bfloat16 takes two numbers at once
    out = torch.empty(len(x), len(weight))
    kinds = (tuple(KINDS).index(str(each.dtype).removeprefix("torch.")) for each in (x, weight))
    if len(x):
        compiled().product(
            *map(native.address, (x, weight, bias, out)), *x.shape, len(weight), *kinds
        )
    return out


def normalized(x: Tensor, norm: Norm, eps: float, *, centered: bool = False) -> Tensor:
    """The RMSNorm of each row, [N, width] float32; the LayerNorm where it is `centered`.

    Args:
        x: [N, width] float32.
        norm: norm of the width.
        eps: its epsilon.
        centered: subtract the mean first.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if len(x):
        pointers = (x.data_ptr(), None, _norm(NO_NORM), _norm(norm), out.data_ptr())
        compiled().add_norm(*pointers, *x.shape, eps, centered, 1.0, False, 1.0)
    return out


def product_of_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the products out[:, h] = x[:, h] @ weight[h].T; what a row gives is its own.

    Args:
        x: [N, heads, I] float32, or bfloat16 where the weight is in it too; its last axis is
            contiguous.
        weight: [heads, O, I] float32 or bfloat16, contiguous.
        out: [N, heads, O] float32, its last axis contiguous.
    """
    rows, heads, width = x.shape
    kinds = (tuple(KINDS).index(str(each.dtype).removeprefix("torch.")) for each in (x, weight))
    if rows:
        compiled().product_of_heads(
            *map(native.address, (x, weight, out)),
            *(rows, heads, width, weight.shape[1]),
            *(x.stride(0), x.stride(1), out.stride(0), out.stride(1)),
            *kinds,
        )


def argmax_logsumexp(logits: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row of logits [N, V], and log(sum(exp(logits))) of each row.

    The token is the lowest of several. The logarithm is NaN where a logit is. The numbers of a row
    do not depend on the other rows.
    """
    rows, width = logits.shape
    best, log_total = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    if rows:
        compiled().argmax_logsumexp(
            logits.data_ptr(), rows, width, best.data_ptr(), log_total.data_ptr()
        )
    return best.tolist(), log_total.tolist()


def release_threads() -> None:
    """Give back the OpenMP threads that loops of the calling thread have used.

    The next loop of the thread makes new ones. libgomp counts the threads that it made for all
    threads of the process. Where they are more than the cores, a thread that waits for the next
    loop sleeps at once and has to be woken, several times a layer: a token of a small model takes
    twice as long. So a thread that computes no more gives its threads back.
    """
    compiled().release_threads()


class Operations:
    """Layers, and the operations on one batch.

    Attributes:
        selection: columns that queries may see, as bits int64 [N, columns / 64], chosen by the last
            layer with an indexer; None: all. A layer without one has that of the layer before.
    """

    def __init__(
        self,
        heads: Heads,
        blocks: Sequence[DecoderBlock],
        form: Form | None = None,
        *,
        rounds: bool = False,
    ) -> None:
        """Take the shapes and the layers of a model.

        Args:
            heads: attention of the model.
            blocks: the layers.
            form: what the layers have in common; None: Llama's.
            rounds: queries and attention probabilities may be rounded to bfloat16 over a bfloat16
                cache.

        Raises:
            UnsupportedError: see `compiled`.
        """
        self._heads = heads
        # place of each layer among those that keep columns, or among those that keep states
        linear = [block.delta_net is not None for block in blocks]
        self._places = [linear[:at].count(linear[at]) for at in range(len(blocks))]
        self._form = form or Form()
        self._blocks = blocks
        self._library = compiled()
        self._rounds = rounds
        self._slopes = _slopes(heads)  # C has its address
        self._rooms: dict[str, Tensor] = {}
        self._indexer = next((block.indexer.sizes for block in blocks if block.indexer), None)
        self.selection: Tensor | None = None
        # Room for the parts of a layer, which decode.c's `run` writes; there are no widths where
        # Python calls the operations one by one.
        self._widths: tuple[int, ...] = ()
        self._between: list[Tensor] = []
        self._addresses: list[int | None] = []
        self._kept: list[Any] = []  # structures that C has the addresses of
        nets = [block.delta_net for block in blocks if block.delta_net is not None]
        products = [each for block in blocks for each in block.products]
        products += [net.scores for net in nets]
        experts = [block.experts for block in blocks if block.experts is not None]
        if (
            products
            and all(map(in_c, products))
            and all(each.structure is not None for each in experts)
            and not any(block.shares for block in blocks)
        ):
            # those of the widest layer; of layers without experts, all have the first one's
            attentions = [tuple(map(shape_in_c, block.products[:2])) for block in blocks]
            hidden = attentions[0][0][1]
            qkv = max(entering[0] for entering, _ in attentions)
            attended = max(output[1] for _, output in attentions)
            scores = max((shape_in_c(net.scores)[0] for net in nets), default=0)
            mlps = (block.products[2:] for block in blocks if block.experts is None)
            up, down = map(shape_in_c, next(mlps, (None, None)))
            ordered = max(
                (shape_in_c(each)[1] for each in products if _is_ordered(each)), default=0
            )
            self._widths = (hidden, qkv, scores, attended, up[0], down[1], ordered, hidden)

    def begin(self, cache: KVCache, rotary_tables: Sequence[RotaryTables]) -> None:
        """Take a cache, or one whose storage has changed.

        Args:
            cache: KV cache of the batch.
            rotary_tables: tables that `DecoderBlock.rope` counts.
        """
        heads, form = self._heads, self._form
        # C has the addresses of their tensors: they must live on
        self._cache = cache
        self._rotary_tables = rotary_tables
        self._step = _Step(  # first, start, table, tiles and slots are NULL until `step_rows`
            padding=native.address(cache.padding),
            slopes=native.address(self._slopes),
            rounded_alibi=heads.rounded_alibi,
            rows=cache.rows,
            block=cache.capacity,
            width=1,
            query_heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            kind=tuple(KINDS).index(cache.kind),
            latent=heads.latent,
            output_gate=heads.output_gate,
            whole_norms=heads.whole_norms,
            centered=form.centered,
            parallel=form.parallel,
            post=form.post,
            activation=ACTIVATIONS.index(form.activation),
            gated=form.gated,
            rounds=self._rounds,
            scale=heads.scale,
            eps=heads.eps,
            cap=heads.cap,
            clip=heads.clip,
            residual=form.residual,
            alpha=form.alpha,
            limit=form.limit,
        )
        self._kept = []
        self._count = 0  # columns of each sequence that the last step had
        structures = [
            self._structure(block, place, rotary_tables)
            for block, place in zip(self._blocks, self._places, strict=True)
        ]
        self._structures = (_Layer * len(structures))(*structures)
        if self._indexer is not None and cache.index is not None:
            self._begin_index(self._indexer, cache.index)

    def _begin_index(self, sizes: Indexer, cache: KVCache) -> None:
        """Take the cache of an indexer's keys.

        Its heads are those of an attention whose keys are its values (`latent`), of which decode.c
        computes all but the sums.
        """
        self._index_step = _Step(
            block=cache.capacity,
            query_heads=sizes.heads,
            kv_heads=1,
            head_dim=sizes.head_dim,
            kind=tuple(KINDS).index(cache.kind),
            latent=sizes.head_dim,
            centered=True,
            scale=1.0,
            eps=sizes.eps,
        )
        self._index_layers: list[_Layer | None] = []
        for block, place in zip(self._blocks, self._places, strict=True):
            if block.indexer is None or block.rope is None:
                self._index_layers.append(None)
                continue
            keys, _, key_scales, *_ = map(native.address, cache.of(place))
            cos, sin = self._rotary_tables[block.rope]
            self._index_layers.append(
                _Layer(
                    keys=keys,
                    key_scales=key_scales,
                    cos=native.address(cos),
                    sin=native.address(sin),
                    k_norm=_norm(block.indexer.key_norm),
                    rotary_dim=cos.shape[1],
                )
            )

    def step(self, count: int) -> None:
        """Expect `count` new columns of every sequence of the cache, from the cache's length on."""
        rows = self._cache.rows
        if count != self._count:
            self._count, self._start = count, torch.empty(rows, dtype=torch.int64)
            self.step_rows(
                torch.arange(rows + 1) * count,
                self._start,
                torch.arange(rows)[:, None],
                self._cache.padding,
            )
        self._start.fill_(self._cache.length)

    def step_rows(
        self,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        padding: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        """Expect new columns of sequences that lie in blocks of the cache: its rows.

        Args:
            first: [B + 1] int64, begin of each sequence's columns among all new columns, and their
                number.
            start: [B] int64, first new column of each sequence.
            table: [B, W] int64, rows of the cache that hold the columns of each sequence,
                `cache.capacity` to a row.
            padding: [B] int64, columns at the left of each sequence that are no text.
            slots: [B] int64, place of each sequence among the states of gated delta nets; None:
                its own number.
        """
        slots = torch.arange(len(start)) if slots is None else slots
        step, firsts = self._step, first.tolist()

        def tile_counts(group: int) -> Iterator[int]:
            return (-(-(end - begin) * group // _TILE) for begin, end in pairwise(firsts))

        group = self._heads.num_heads // self._heads.num_kv_heads
        tiles = torch.tensor([*accumulate(tile_counts(group), initial=0)])
        self._rows = (padding, first, start, table, tiles, slots)  # C has their addresses
        step.padding = native.address(padding)
        step.first = native.address(first)
        step.start = native.address(start)
        step.table = native.address(table)
        step.tiles = native.address(tiles)
        step.slots = native.address(slots)
        step.rows, step.width = table.shape
        if self._indexer is not None:
            index, heads = self._index_step, self._indexer.heads
            self._index_tiles = torch.tensor([*accumulate(tile_counts(heads), initial=0)])
            for name in ("padding", "first", "start", "table", "rows", "width"):
                setattr(index, name, getattr(step, name))
            index.tiles = native.address(self._index_tiles)

    def run(self, x: Tensor) -> Tensor | None:
        """Run the layers on x [N, H], which is changed.

        Returns:
            What is still to be added to x, valid until the next call.
        """
        if self._widths:
            rows = len(x)
            if not self._between or len(self._between[-1]) < rows:
                self._between = [torch.empty(rows, width) for width in self._widths]
                self._addresses = [*map(native.address, self._between)]
            if self._library.run(
                self._step, self._structures, len(self._structures), x.data_ptr(), *self._addresses
            ):
                raise MemoryError(f"inputs of {rows} tokens")
            return self._between[-1][:rows]
        delta: Tensor | None = None
        after, shares = NO_NORM, None
        for index, block in enumerate(self._blocks):
            qkv, output, *mlp = block.products
            norm = self._first_norm(x, delta, after, block.attention_norm, shares)
            shares = block.shares
            if block.delta_net is not None:
                delta = output(self.delta_rule(qkv(norm), block.delta_net.scores(norm), index))
            elif block.indexer is not None:
                inputs = block.indexer(norm)
                self.select(inputs, index)
                delta = output(self.attend(inputs.attention, index))
            else:
                delta = output(self.attend(qkv(norm), index))
            norm = self.add_norm(
                x,
                delta,
                block.mlp_norm,
                after=block.attended_norm,
                late=self._form.parallel,
                factors=None if shares is None else shares.attention,
            )
            if block.experts is not None:
                delta = block.experts(norm, self.gate)
            else:
                up, down = mlp
                delta = down(self.gate(up(norm)))
            after = block.gated_norm
        return delta

    def last_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add the rest of `run` to x in place; the norm of x, valid until the next call.

        Args:
            x: [N, H].
            delta: what `run` returned, [N, H].
            norm: last norm of the model.
        """
        last = self._blocks[-1] if self._blocks else DecoderBlock(products=())
        normed = self._first_norm(x, delta, last.gated_norm, norm, last.shares)
        # behind the last layer of post-LN there may be a norm of the whole model
        return self.add_norm(x, None, norm) if self._form.post else normed

    def _first_norm(
        self, x: Tensor, delta: Tensor | None, after: Norm, norm: Norm, shares: Shares | None
    ) -> Tensor:
        """Add what the layer before left to x; what the next layer reads.

        Args:
            x: [N, H], changed.
            delta: what the MLP before left, [N, H]; None before the first layer.
            after: second norm of that MLP.
            norm: norm that the next layer begins with.
            shares: factors of the layer before.
        """
        if self._form.post:
            return self.add_norm(x, delta, after)
        factors = None if shares is None else shares.mlp
        return self.add_norm(x, delta, norm, after=after, factors=factors)

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm,
        *,
        after: Norm = NO_NORM,
        late: bool = False,
        factors: tuple[float, float] | None = None,
    ) -> Tensor:
        """Add the norm `after` of delta to x in place; the norm of x, valid until the next call.

        With `Form.post` and `Form.replaced` the norm of x takes the place of x.

        Args:
            x: [N, H].
            delta: [N, H], changed; None adds nothing.
            norm: norm that is returned.
            after: norm of what is added.
            late: the returned norm is of x as it was before.
            factors: factors of x and of what is added; None: 1 and `Form.residual`.
        """
        out = x if self._form.post or self._form.replaced else self._room("norm", *x.shape)
        if not len(x):
            return out
        pointers = (x.data_ptr(), native.address(delta), _norm(after), _norm(norm), out.data_ptr())
        kept, added = factors or (1.0, self._form.residual)
        self._library.add_norm(
            *pointers, *x.shape, self._heads.eps, self._form.centered, added, late, kept
        )
        return out

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Rotate, write to the cache and attend.

        Args:
            qkv: [N, (num_heads + 2 num_kv_heads) * head_dim], changed; without the values where
                the keys hold them; with gates behind them where there are gates.
            layer: index of the layer.

        Returns:
            [N, num_heads * head_dim], or a latent for each head.
        """
        heads, structure = self._heads, self._structures[layer]
        self._step.selected = native.address(self.selection)
        self._step.words = 0 if self.selection is None else self.selection.shape[1]
        self._library.rope_store(self._step, structure, qkv.data_ptr())
        width = heads.num_heads * (heads.latent or heads.head_dim)
        out = self._room("attention", qkv.shape[0], width)
        self._library.attend(self._step, structure, qkv.data_ptr(), out.data_ptr())
        return out

    def select(self, inputs: IndexInputs, layer: int) -> None:
        """Write a layer's keys of the index to the cache, and choose what its queries see.

        Args:
            inputs: what its indexer made of hidden states; the index's queries are changed.
            layer: index of the layer.
        """
        step, structure, sizes = self._index_step, self._index_layers[layer], self._indexer
        assert structure is not None and sizes is not None  # it is such a layer
        padding, first, start, *_ = self._rows
        index, ends = inputs.index, start + first.diff()
        self._library.rope_store(step, structure, index.data_ptr())
        self.selection = None
        if not len(index) or int((ends - padding).max()) <= sizes.chosen:
            return
        words = -(-int(ends.max()) // _WORD)
        self.selection = torch.empty(len(index), words, dtype=torch.int64)
        step.words = words
        pointers = (index.data_ptr(), inputs.weights.data_ptr())
        if self._library.select_columns(
            step, structure, *pointers, sizes.chosen, self.selection.data_ptr()
        ):
            raise MemoryError(f"scores of {int(ends.max())} positions")

    def delta_rule(self, x: Tensor, scores: Tensor, layer: int) -> Tensor:
        """What a gated delta net makes of new columns, by which its states change.

        Args:
            x: [N, channels + value_heads * value_dim], changed: queries, keys and values of all
                heads, and the gates of what they put out.
            scores: [N, 2 value_heads].
            layer: index of the layer.

        Returns:
            [N, value_heads * value_dim], valid until the next call.
        """
        net = self._blocks[layer].delta_net
        assert net is not None  # it is such a layer
        out = self._room("delta net", len(x), net.sizes.value_heads * net.sizes.value_dim)
        pointers = (x.data_ptr(), scores.data_ptr(), out.data_ptr())
        self._library.delta_rule(self._step, self._structures[layer], *pointers)
        return out

    def gate(self, up: Tensor) -> Tensor:
        """The MLP's activation(gate) * up, or activation(up), [N, I]; valid until the next call.

        Args:
            up: [N, 2 I] where the MLP is gated, else [N, I].
        """
        form = self._form
        rows, width = up.shape[0], up.shape[1] // (2 if form.gated else 1)
        out = self._room("gate", rows, width)
        self._library.gate(
            up.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            ACTIVATIONS.index(form.activation),
            form.gated,
            form.alpha,
            form.limit,
        )
        return out

    def _structure(
        self,
        block: DecoderBlock,
        place: int,
        rotary_tables: Sequence[RotaryTables],
    ) -> _Layer:
        """A layer as decode.c reads it; `place` is that among the layers that keep the same."""
        cached: Sequence[Tensor | None] = (None,) * 6
        net = None
        if block.delta_net is None:
            cached = self._cache.of(place)
        elif self._cache.states is not None:
            net = block.delta_net.structure(*self._cache.states.of(place), self._kept)
            self._kept.append(net)
        cos, sin = (None, None) if block.rope is None else rotary_tables[block.rope]
        keys, values, key_scales, value_scales, key_steps, value_steps = map(native.address, cached)
        products: Any = block.products if self._widths else ()
        names = ("qkv", "output", "up", "down")
        structures = {
            name: structure_of(each, self._kept)
            for name, each in zip(names, products, strict=False)
        }
        experts = block.experts.structure if products and block.experts is not None else None
        temperature = block.temperature or Temperature(floor_scale=0.0, attn_scale=0.0)
        return _Layer(
            keys=keys,
            values=values,
            key_scales=key_scales,
            value_scales=value_scales,
            key_steps=key_steps,
            value_steps=value_steps,
            cos=native.address(cos),
            sin=native.address(sin),
            sinks=native.address(block.sinks),
            q_norm=_norm(block.q_norm),
            k_norm=_norm(block.k_norm),
            attention_norm=_norm(block.attention_norm),
            attended_norm=_norm(block.attended_norm),
            mlp_norm=_norm(block.mlp_norm),
            gated_norm=_norm(block.gated_norm),
            experts=None if experts is None else ctypes.addressof(experts),
            delta_net=None if net is None else ctypes.addressof(net),
            window=block.window,
            chunk=block.chunk,
            rotary_dim=0 if cos is None else cos.shape[1],
            floor_scale=temperature.floor_scale,
            attn_scale=temperature.attn_scale,
            **structures,
        )

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """Memory of an operation, kept from call to call: no allocation per token."""
        room = self._rooms.get(name)
        if room is None or len(room) < rows or room.shape[1] != width:
            room = self._rooms[name] = torch.empty(rows, width)
        return room[:rows]


def _slopes(heads: Heads) -> Tensor | None:
    """ALiBi's slopes, float32 of the query heads; None where there are none."""
    if not heads.slopes:
        return None
    slopes = torch.tensor(heads.slopes)
    return slopes.bfloat16().float() if heads.rounded_alibi else slopes


def _norm(norm: Norm) -> _Norm:
    return _Norm(weight=native.address(norm.weight), bias=native.address(norm.bias))


def experts_structure(**fields: Any) -> ctypes.Structure:
    """A mixture as decode.c reads it, from the fields of its `Experts`."""
    return _Experts(**fields)


def delta_structure(**fields: Any) -> ctypes.Structure:
    """A gated delta net as decode.c reads it, from the fields of its `DeltaNet`."""
    return _DeltaNet(**fields)


def in_c(linear: Projection) -> bool:
    """Whether decode.c can call a product: one of kernels.c, or of a matrix that is as it was."""
    return isinstance(linear, partial) and linear.func in (kernels.linear, product)


def is_plain(linear: Any) -> bool:
    """Whether the matrix of a product of `in_c` is not quantized."""
    return linear.func is product


def _is_ordered(linear: Any) -> bool:
    return linear.keywords.get("order") is not None


def shape_in_c(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a product of `in_c`; (0, 0) of None."""
    if linear is None:
        return 0, 0
    if is_plain(linear):
        rows, columns = linear.keywords["weight"].shape
        return rows, columns
    weight = linear.keywords["prepared"].weight
    return weight.rows, weight.columns


def structure_of(linear: Any, kept: list[Any]) -> _Product:
    """A product of `in_c` as decode.c reads it; what it points to is added to `kept`."""
    bias, order = native.address(linear.keywords["bias"]), linear.keywords.get("order")
    if not is_plain(linear):
        prepared = linear.keywords["prepared"]
        weight, call = prepared.weight, prepared.call
    else:
        matrix, dtype = linear.keywords["weight"], linear.keywords["dtype"]
        weight, call = _plain(matrix, dtype), compiled().plain
        kept += [weight, matrix]
    return _Product(
        weight=ctypes.addressof(weight),
        bias=bias,
        call=native.function_address(call),
        order=native.address(order),
    )


def _plain(matrix: Tensor, dtype: torch.dtype) -> _Plain:
    """A contiguous matrix as decode.c reads it, for inputs that `product` takes so."""
    kind = tuple(KINDS).index(str(matrix.dtype).removeprefix("torch."))
    narrow = dtype == matrix.dtype == torch.bfloat16
    return _Plain(weight=tuple(matrix.shape), data=matrix.data_ptr(), kind=kind, narrow=narrow)
