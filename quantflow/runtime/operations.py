"""The layers of a decoder: their products, and between them norms, rotation, cache, attention, the gate.

Where kernels.c has all products, the layers are one call of decode.c, else each operation is one.
All tensors are float32. The state is that of one batch: `begin` gives it a cache, `step` says how
many columns are new.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import kernels, native
from quantflow.runtime.kv_cache import KINDS, LANES, KVCache

Projection = Callable[[Tensor], Tensor]  # [N, I] float32 -> [N, sum of O] float32, contiguous
SOURCE = Path(__file__).with_name("decode.c")
MOST_HEAD_DIM = 1024  # decode.c keeps a tile of queries on the stack
_TILE = 8  # decode.c's TILE


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention of a model.

    Attributes:
        query, shared: query heads, and key/value heads.
        dim: features of a head.
        scale: of the scores.
        eps: of all norms.
        cap: scores become cap * tanh(score / cap); 0: they stay.
        whole_norms: norms of queries and keys are of all heads at once.
    """

    query: int
    shared: int
    dim: int
    scale: float
    eps: float
    cap: float = 0.0
    whole_norms: bool = False


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # decode.c's `enum activation`


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all layers of a model have in common beside their attention.

    Attributes:
        activation: of the MLP, one of ACTIVATIONS.
        gated: it is activation(gate) * up, else activation(up).
        parallel: the MLP reads the hidden state that attention reads, not the one that attention
            was added to.
        centered: norms subtract the mean first (LayerNorm).
        residual: times what attention and MLP add.
    """

    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    centered: bool = False
    residual: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """A norm: its weight and bias, float32 of the features; without a weight there is no norm, and what is read stays."""

    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = Norm()


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderBlock:
    """A decoder layer.

    Attributes:
        products: qkv, output, up (gate and up where there is a gate), down; the first two alone
            where there are experts.
        experts: what stands in the place of the MLP: a function of its input [N, H] and of
            `Operations.gate`; or None.
        attention_norm, attended_norm: of what attention reads, and of what it adds.
        mlp_norm, gated_norm: of what the MLP reads, and of what it adds.
        q_norm, k_norm: of queries and keys, [dim], or of all heads where `Heads.whole_norms`.
        window: how many positions a query sees, itself included; 0: all before it.
        rotation: which of the tables that `Operations.begin` takes; None rotates nothing.
    """

    products: tuple[Projection, ...]
    attention_norm: Norm = NO_NORM
    attended_norm: Norm = NO_NORM
    mlp_norm: Norm = NO_NORM
    gated_norm: Norm = NO_NORM
    q_norm: Norm = NO_NORM
    k_norm: Norm = NO_NORM
    experts: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None
    window: int = 0
    rotation: int | None = 0


def why_not(head_dim: int) -> str | None:
    """Return why decode.c cannot run heads of so many features, in a sentence, or None; compiles it if need be."""
    if head_dim % LANES:
        return f"it works on {LANES} features at once, heads have {head_dim}"
    if head_dim > MOST_HEAD_DIM:
        return f"it works on heads of {MOST_HEAD_DIM} features at most, these have {head_dim}"
    return native.why_not(SOURCE, needs=())


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Product(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "bias", "call", "order")]


class _Layer(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in ("keys", "values", "key_scales", "value_scales", "key_steps", "value_steps")
        ]
        + [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p)]
        + [
            (name, _Norm)
            for name in (
                "q_norm",
                "k_norm",
                "attention_norm",
                "attended_norm",
                "mlp_norm",
                "gated_norm",
            )
        ]
        + [(name, _Product) for name in ("qkv", "output", "up", "down")]
        + [("window", ctypes.c_int64), ("rotary", ctypes.c_int64)]
    )


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("padding", "first", "start", "table", "tiles")]
        + [
            (name, ctypes.c_int64)
            for name in ("rows", "block", "width", "heads", "kv_heads", "dim", "kind")
        ]
        + [
            (name, ctypes.c_int64)
            for name in ("whole_norms", "centered", "parallel", "activation", "gated", "rounds")
        ]
        + [(name, ctypes.c_float) for name in ("scale", "eps", "cap", "residual")]
    )


_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: tuple[tuple[str, list[Any]], ...] = (  # of the functions of decode.c
    (
        "add_norm",
        [_POINTER] * 2 + [_Norm] * 2 + [_POINTER] + [_COUNT] * 2 + [_FLOAT, _COUNT, _FLOAT, _COUNT],
    ),
    ("gate", [_POINTER] * 2 + [_COUNT] * 4),
    ("product", [_POINTER] * 4 + [_COUNT] * 5),
    ("summarize", [_POINTER] + [_COUNT] * 2 + [_POINTER] * 2),
    ("rotate_store", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER]),
    ("attend", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER, _POINTER]),
    ("run", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _COUNT] + [_POINTER] * 8),
    ("release_threads", []),
)


@functools.cache
def compiled() -> Any:
    """Return the functions of decode.c, which is compiled if need be.

    Raises:
        UnsupportedError: it cannot be compiled here; see `why_not`.
    """
    library = native.library(SOURCE)
    for name, types in _ARGUMENTS:
        getattr(library, name).argtypes = types
    return library


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return x @ weight.T + bias in float32; a weight in bfloat16 is taken as the float32 numbers that it is.

    What a row gives does not depend on the others, in no bit: torch's product sums in another order
    for more rows.

    Args:
        x: [N, I] float32.
        weight: [O, I], float32 or bfloat16.
        bias: [O], or None.
        dtype: of the inputs; x is rounded to bfloat16 where the weight is in it too, products of
            both are exact in float32.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if dtype == weight.dtype == torch.bfloat16:
        x = x.to(dtype)  # two numbers in the place of one
    out = torch.empty(len(x), len(weight))
    kinds = (tuple(KINDS).index(str(each.dtype).removeprefix("torch.")) for each in (x, weight))
    if len(x):
        compiled().product(
            *map(native.address, (x, weight, bias, out)), *x.shape, len(weight), *kinds
        )
    return out


def summarize(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return of each row of logits [N, V] the likeliest token, the lowest of several, and the logarithm of the sum of exp(x).

    That is NaN where a logit is. A row's numbers do not depend on the others.
    """
    rows, width = logits.shape
    best, log_total = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    if rows:
        compiled().summarize(logits.data_ptr(), rows, width, best.data_ptr(), log_total.data_ptr())
    return best.tolist(), log_total.tolist()


def release_threads() -> None:
    """Give back the OpenMP threads that loops of the calling thread have used; its next loop makes new ones.

    libgomp counts the threads that it made for all threads of the process. Where they are more than
    the cores, a thread that waits for the next loop sleeps at once and has to be woken, several
    times a layer: a token of a small model takes twice as long. So a thread that computes no more
    gives its threads back.
    """
    compiled().release_threads()


class Operations:
    """The layers, and the operations on one batch."""

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
            heads: of attention.
            blocks: the layers.
            form: None: Llama's.
            rounds: over a bfloat16 cache, queries and attention probabilities may be rounded to
                bfloat16.

        Raises:
            UnsupportedError: see `compiled`.
        """
        self._heads, self._form, self._blocks, self._library = (
            heads,
            form or Form(),
            blocks,
            compiled(),
        )
        self._rounds = rounds
        self._rooms: dict[str, Tensor] = {}
        # What decode.c's `run` computes of a layer goes into these; no widths where Python calls it
        # step by step.
        self._widths: tuple[int, ...] = ()
        self._between: list[Tensor] = []
        self._addresses: list[int | None] = []
        products: list[Any] = [product for block in blocks for product in block.products]
        sparse = any(block.experts is not None for block in blocks)
        if (
            products
            and not sparse
            and all(isinstance(p, partial) and p.func is kernels.linear for p in products)
        ):
            # those of the other layers are like the first's
            qkv, output, up, down = (
                product.keywords["prepared"].weight for product in products[:4]
            )
            keywords = (product.keywords for product in products)
            ordered = max(
                (each["prepared"].weight.columns for each in keywords if each["order"] is not None),
                default=0,
            )
            self._widths = (
                qkv.columns,
                qkv.rows,
                output.columns,
                up.rows,
                down.columns,
                ordered,
                down.rows,
            )

    def begin(self, cache: KVCache, rotations: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take a cache, or one whose storage has changed.

        Args:
            cache: of the batch.
            rotations: cosines and sines of each position, [capacity, features that are rotated];
                blocks name them by number.
        """
        heads, form = self._heads, self._form
        self._cache, self._rotations = cache, rotations  # C has their addresses: they must live on
        sizes = (
            cache.rows,
            cache.capacity,
            1,
            heads.query,
            heads.shared,
            heads.dim,
            tuple(KINDS).index(cache.kind),
        )
        flags = (
            heads.whole_norms,
            form.centered,
            form.parallel,
            ACTIVATIONS.index(form.activation),
            form.gated,
        )
        floats = (heads.scale, heads.eps, heads.cap, form.residual)
        self._step = _Step(
            native.address(cache.padding), *[None] * 4, *sizes, *flags, self._rounds, *floats
        )
        self._count = 0  # columns of each sequence that the last step had
        structures = [
            self._structure(block, cache.of(index), rotations)
            for index, block in enumerate(self._blocks)
        ]
        self._structures = (_Layer * len(structures))(*structures)

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

    def step_rows(self, first: Tensor, start: Tensor, table: Tensor, padding: Tensor) -> None:
        """Expect new columns of sequences that lie in blocks of the cache: its rows.

        Args:
            first: [B + 1] int64, where the columns of each begin among all that are new, and how
                many there are.
            start: [B] int64, the first new column of each.
            table: [B, W] int64, the cache's rows that hold the columns of each, `cache.capacity` to
                a row.
            padding: [B] int64, columns at the left of each that are no text.
        """
        step, group = self._step, self._heads.query // self._heads.shared
        counts = (-(-(end - begin) * group // _TILE) for begin, end in pairwise(first.tolist()))
        tiles = torch.tensor([*accumulate(counts, initial=0)])
        self._rows = tensors = (padding, first, start, table, tiles)  # they must live on
        step.padding, step.first, step.start, step.table, step.tiles = map(native.address, tensors)
        step.rows, step.width = table.shape

    def run(self, x: Tensor) -> Tensor | None:
        """Run the layers on x [N, H], changed; return what is still to be added to it, valid until the next call."""
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
        delta, after = None, NO_NORM
        for index, block in enumerate(self._blocks):
            qkv, output, *mlp = block.products
            delta = output(
                self.attend(qkv(self.add_norm(x, delta, block.attention_norm, after=after)), index)
            )
            norm = self.add_norm(
                x, delta, block.mlp_norm, after=block.attended_norm, late=self._form.parallel
            )
            if block.experts is not None:
                delta = block.experts(norm, self.gate)
            else:
                up, down = mlp
                delta = down(self.gate(up(norm)))
            after = block.gated_norm
        return delta

    def last_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add what `run` left to x in place and return the norm of x, valid until the next call.  x, delta: [N, H]."""
        return self.add_norm(
            x, delta, norm, after=self._blocks[-1].gated_norm if self._blocks else NO_NORM
        )

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm,
        *,
        after: Norm = NO_NORM,
        late: bool = False,
    ) -> Tensor:
        """Add the norm `after` of delta to x in place and return the norm of x, valid until the next call.

        Args:
            x: [N, H].
            delta: [N, H], changed; None adds nothing.
            norm: of what is returned.
            after: of what is added.
            late: what is returned is of x as it was before.
        """
        out = self._room("norm", *x.shape)
        pointers = (x.data_ptr(), native.address(delta), _norm(after), _norm(norm), out.data_ptr())
        self._library.add_norm(
            *pointers, *x.shape, self._heads.eps, self._form.centered, self._form.residual, late
        )
        return out

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Rotate, write to the cache and attend.  qkv: [N, (query + 2 shared) * dim], changed; returns [N, query * dim]."""
        heads, structure = self._heads, self._structures[layer]
        self._library.rotate_store(self._step, structure, qkv.data_ptr())
        out = self._room("attention", qkv.shape[0], heads.query * heads.dim)
        self._library.attend(self._step, structure, qkv.data_ptr(), out.data_ptr())
        return out

    def gate(self, up: Tensor) -> Tensor:
        """Return activation(gate) * up, or activation(up); valid until the next call. up: [N, 2 I] or [N, I]; to [N, I]."""
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
        )
        return out

    def _structure(
        self,
        block: DecoderBlock,
        cached: Iterable[Tensor | None],
        rotations: Sequence[tuple[Tensor, Tensor]],
    ) -> _Layer:
        """Return a layer as decode.c reads it: cache, rotation, norms, and of each product weight, bias and function."""
        table = (None, None) if block.rotation is None else rotations[block.rotation]
        rotary = 0 if table[0] is None else table[0].shape[1]
        norms = (
            block.q_norm,
            block.k_norm,
            block.attention_norm,
            block.attended_norm,
            block.mlp_norm,
            block.gated_norm,
        )
        products: Any = block.products if self._widths else ()
        structures = [_Product()] * 4
        for index, keywords in enumerate(p.keywords for p in products):
            prepared, call = (
                keywords["prepared"],
                ctypes.cast(keywords["prepared"].call, ctypes.c_void_p).value,
            )
            pointers = (
                ctypes.addressof(prepared.weight),
                native.address(keywords["bias"]),
                call,
                native.address(keywords["order"]),
            )
            structures[index] = _Product(*pointers)
        return _Layer(
            *map(native.address, (*cached, *table)),
            *map(_norm, norms),
            *structures,
            block.window,
            rotary,
        )

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """Return memory that the operation has used before, where it has the size: no allocation per token."""
        found = self._rooms.get(name)
        if found is None or len(found) < rows or found.shape[1] != width:
            found = self._rooms[name] = torch.empty(rows, width)
        return found[:rows]


def _norm(norm: Norm) -> _Norm:
    return _Norm(native.address(norm.weight), native.address(norm.bias))
