"""The layers of a Llama-like decoder: their products, and between them norms, rotation, cache, attention, the gate.

Where kernels.c has all products, the layers are one call of decode.c, else each operation is one. All tensors are float32. The
state is that of one batch: `begin` gives it a cache, `step` says how many columns are new.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends import kernels, native
from quantflow.runtime.kv_cache import KINDS, LANES, KVCache

Projection = Callable[[Tensor], Tensor]  # [N, I] float32 -> [N, sum of O] float32, contiguous
SOURCE = Path(__file__).with_name("decode.c")
MOST_HEAD_DIM = 1024  # decode.c keeps a tile of queries on the stack
_TILE = 8  # decode.c's TILE
_FEW = 16  # rows of a product up to which one pass over the memory counts more than the arithmetic
_WIDENED = 4096  # rows of a weight that are converted at once


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention of a model.

    Attributes:
        query, shared: query heads, and key/value heads.
        dim: features of a head.
        scale: of the scores.
        eps: of all norms.
    """

    query: int
    shared: int
    dim: int
    scale: float
    eps: float


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderBlock:
    """A decoder layer.

    Attributes:
        norms: [H] float32, the weights of the norms before attention and MLP.
        products: qkv, output, gate_up, down.
        q_norm, k_norm: [dim] weights of norms over a head, or None.
        window: how many positions a query sees, itself included; 0: all before it.
    """

    norms: tuple[Tensor, ...]
    products: tuple[Projection, ...]
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int


def why_not(head_dim: int) -> str | None:
    """Return why decode.c cannot run heads of so many features, in a sentence, or None; compiles it if need be."""
    if head_dim % LANES:
        return f"it works on {LANES} features at once, heads have {head_dim}"
    if head_dim > MOST_HEAD_DIM:
        return f"it works on heads of {MOST_HEAD_DIM} features at most, these have {head_dim}"
    return native.why_not(SOURCE, needs=())


class _Layer(ctypes.Structure):
    _fields_ = [("pointers", ctypes.c_void_p * 22), ("window", ctypes.c_int64)]  # in the order of decode.c


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("cos", "sin", "padding", "first", "start", "table", "tiles")]
        + [(name, ctypes.c_int64) for name in ("rows", "block", "width", "heads", "kv_heads", "dim", "kind")]
        + [("scale", ctypes.c_float), ("eps", ctypes.c_float)]
    )


_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (  # of the functions of decode.c
    ("add_norm", [_POINTER] * 4 + [_COUNT] * 2 + [ctypes.c_float]),
    ("silu_mul", [_POINTER] * 2 + [_COUNT] * 2),
    ("product_bfloat16", [_POINTER] * 4 + [_COUNT] * 3),
    ("rotate_store", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER]),
    ("attend", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _POINTER, _POINTER]),
    ("run", [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), _COUNT] + [_POINTER] * 7),
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


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias; a weight in bfloat16 is taken as the float32 numbers that it is, x is not rounded to it.

    Args:
        x: [N, I].
        weight: [O, I], float32 or bfloat16.
        bias: [O], or None.
    """
    if weight.dtype != torch.bfloat16:
        return functional.linear(x, weight, bias)
    if len(x) > _FEW:
        split: Any = weight.split(_WIDENED)  # type: ignore[no-untyped-call]
        out = torch.cat([functional.linear(x, rows.float()) for rows in split], dim=-1)
        return out if bias is None else out.add_(bias)
    out = torch.empty(len(x), len(weight))
    compiled().product_bfloat16(*map(native.address, (x, weight, bias, out)), *x.shape, len(weight))
    return out


class Operations:
    """The layers, and the operations on one batch."""

    def __init__(self, heads: Heads, blocks: Sequence[DecoderBlock]) -> None:
        """Take the shapes and the layers of a model.

        Raises:
            UnsupportedError: see `compiled`.
        """
        self._heads, self._blocks, self._library = heads, blocks, compiled()
        self._rooms: dict[str, Tensor] = {}
        self._widths: dict[str, int] = {}  # of what decode.c computes of a layer; empty where Python calls it step by step
        found: list[Any] = [product for block in blocks for product in block.products]
        if found and all(isinstance(p, partial) and p.func is kernels.linear for p in found):
            # those of the other layers are like the first's
            qkv, output, gate_up, down = (product.keywords["prepared"].weight for product in found[:4])
            self._widths = {"norm": qkv.columns, "qkv": qkv.rows, "attention": output.columns}
            self._widths |= {"gate_up": gate_up.rows, "gate": down.columns, "delta": down.rows}

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """Take a cache, or one whose storage has changed, and the rotation of each position, [positions, dim]."""
        heads = self._heads
        self._cache, self._tables = cache, (cos, sin, cache.padding)  # C has their addresses: they must live on
        sizes = (cache.rows, cache.capacity, 1, heads.query, heads.shared, heads.dim, tuple(KINDS).index(cache.kind))
        self._step = _Step(*map(native.address, self._tables), *[None] * 4, *sizes, heads.scale, heads.eps)
        self._count = 0  # columns of each sequence that the last step had
        structures = [self._structure(block, cache.of(index)) for index, block in enumerate(self._blocks)]
        self._structures = (_Layer * len(structures))(*structures)

    def step(self, count: int) -> None:
        """Expect `count` new columns of every sequence of the cache, from the cache's length on."""
        rows = self._cache.rows
        if count != self._count:
            self._count, self._start = count, torch.empty(rows, dtype=torch.int64)
            self.step_rows(torch.arange(rows + 1) * count, self._start, torch.arange(rows)[:, None], self._tables[2])
        self._start.fill_(self._cache.length)

    def step_rows(self, first: Tensor, start: Tensor, table: Tensor, padding: Tensor) -> None:
        """Expect new columns of sequences that lie in blocks of the cache: its rows.

        Args:
            first: [B + 1] int64, where the columns of each begin among all that are new, and how many there are.
            start: [B] int64, the first new column of each.
            table: [B, W] int64, the cache's rows that hold the columns of each, `cache.capacity` to a row.
            padding: [B] int64, columns at the left of each that are no text.
        """
        step, heads = self._step, self._heads
        queries = first.diff() * (heads.query // heads.shared)
        tiles = torch.zeros_like(first)
        torch.cumsum((queries + (_TILE - 1)) // _TILE, dim=0, out=tiles[1:])
        self._rows = tensors = (padding, first, start, table, tiles)  # they must live on
        step.padding, step.first, step.start, step.table, step.tiles = map(native.address, tensors)
        step.rows, step.width = table.shape

    def run(self, x: Tensor) -> Tensor | None:
        """Run the layers on x [N, H], changed; return what is still to be added to it, valid until the next call."""
        if self._widths:
            rooms = [self._room(name, len(x), width) for name, width in self._widths.items()]
            if self._library.run(self._step, self._structures, len(self._structures), *map(native.address, [x, *rooms])):
                raise MemoryError(f"inputs of {len(x)} tokens")
            return rooms[-1]
        delta = None
        for index, block in enumerate(self._blocks):
            qkv, output, gate_up, down = block.products
            delta = output(self.attend(qkv(self.add_norm(x, delta, block.norms[0])), index))
            delta = down(self.silu_mul(gate_up(self.add_norm(x, delta, block.norms[1]))))
        return delta

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add delta to x in place and return the norm of x, valid until the next call.  x, delta: [N, H]."""
        out = self._room("norm", *x.shape)
        self._library.add_norm(*map(native.address, (x, delta, weight, out)), *x.shape, self._heads.eps)
        return out

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Rotate, write to the cache and attend.  qkv: [N, (query + 2 shared) * dim], changed; returns [N, query * dim]."""
        heads, structure = self._heads, self._structures[layer]
        self._library.rotate_store(self._step, structure, qkv.data_ptr())
        out = self._room("attention", qkv.shape[0], heads.query * heads.dim)
        self._library.attend(self._step, structure, qkv.data_ptr(), out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, valid until the next call.  gate_up: [N, 2 I]; returns [N, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._room("gate", rows, width)
        self._library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def _structure(self, block: DecoderBlock, cached: Iterable[Tensor | None]) -> _Layer:
        """Return a layer as decode.c reads it: the cache, norms, and of each product weight, bias and function."""
        found = [native.address(tensor) for tensor in (*cached, block.q_norm, block.k_norm, *block.norms)]
        products: Any = block.products if self._widths else ()
        for prepared, bias in ((product.keywords["prepared"], product.keywords["bias"]) for product in products):
            call = ctypes.cast(prepared.call, ctypes.c_void_p).value
            found += ctypes.addressof(prepared.weight), native.address(bias), call
        return _Layer(tuple(found), block.window)

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """Return memory that the operation has used before, where it has the size: no allocation per token."""
        found = self._rooms.get(name)
        if found is None or found.shape != (rows, width):
            found = self._rooms[name] = torch.empty(rows, width)
        return found
