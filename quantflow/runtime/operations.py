"""The layers of a Llama-like decoder: their products, and between them norms, rotation, cache, attention, the gate.

Where kernels.c has all products, the layers are one call of decode.c. Else each operation is one, or the same in torch where it
cannot be compiled; the results agree within float32 rounding. All tensors are float32. The state is that of one batch: `begin`
gives it a cache, `step` says how many columns are new.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core import kernels, native
from quantflow.runtime.kv_cache import KINDS, LANES, KVCache

Projection = Callable[[Tensor], Tensor]  # [N, I] float32 -> [N, sum of O] float32, contiguous
SOURCE = Path(__file__).with_name("decode.c")
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
class Attention:
    """The attention of a layer.

    Attributes:
        q_norm, k_norm: [dim] weights of norms over a head, or None.
        window: how many positions a query sees, itself included; 0: all before it.
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A decoder layer: its norms [H] float32, of attention and MLP, and its products: qkv, output, gate_up, down."""

    norms: tuple[Tensor, ...]
    products: tuple[Projection, ...]


def fused_why_not(heads: Heads) -> str | None:
    """Return why decode.c cannot be used, in a sentence, or None; compiles it if need be."""
    if heads.dim % LANES:
        return f"it works on {LANES} features at once, heads have {heads.dim}"
    return native.why_not(SOURCE, needs=())


class _Layer(ctypes.Structure):
    _fields_ = [("pointers", ctypes.c_void_p * 22), ("window", ctypes.c_int64)]  # in the order of decode.c


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("cos", "sin", "padding")]
        + [(name, ctypes.c_int64) for name in ("rows", "count", "start", "heads", "kv_heads", "dim", "capacity", "kind")]
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


class Operations:
    """The operations on one batch: in C where it is `fused`, but for products of many rows.

    Attributes:
        widens: `product` takes weights in bfloat16 as the float32 numbers that they are, without rounding inputs to it.
    """

    def __init__(self, heads: Heads, layers: Sequence[Attention], *, fused: bool) -> None:
        """Take the shapes and the layers of a model; `fused` compiles decode.c if need be.

        Raises:
            UnsupportedError: it cannot be compiled here; see `fused_why_not`.
        """
        self.widens = fused
        self._heads, self._layers, self._count = heads, layers, 0
        self._library: Any = native.library(SOURCE) if fused else None
        for name, types in _ARGUMENTS if fused else ():
            getattr(self._library, name).argtypes = types
        self._rooms: dict[str, Tensor] = {}
        self._blocks: Sequence[Block] = ()
        self._widths: dict[str, int] = {}  # of what decode.c computes of a layer; empty where Python calls it step by step

    def take(self, blocks: Sequence[Block]) -> None:
        """Take what `run` runs; before `begin`."""
        self._blocks, found = blocks, [product for block in blocks for product in block.products]
        if self._library is not None and all(isinstance(p, partial) and p.func is kernels.linear for p in found):
            first: Any = found[:4]  # those of the other layers are like them
            qkv, output, gate_up, down = (product.keywords["prepared"].weight for product in first)
            self._widths = {"norm": qkv.columns, "qkv": qkv.rows, "attention": output.columns}
            self._widths |= {"gate_up": gate_up.rows, "gate": down.columns, "delta": down.rows}

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """Take a cache, or one whose storage has changed, and the rotation of each position, [capacity, dim]."""
        heads = self._heads
        self._cache, self._tables = cache, (cos, sin, cache.padding)  # C has their addresses: they must live on
        sizes = (cache.rows, 0, 0, heads.query, heads.shared, heads.dim, cache.capacity, tuple(KINDS).index(cache.kind))
        self._step = _Step(*map(native.address, self._tables), *sizes, heads.scale, heads.eps)
        none = [None] * len(self._layers)
        scales = (part or none for part in (cache.key_scales, cache.value_scales, cache.key_steps, cache.value_steps))
        whole = [self._pointers(block) for block in self._blocks] if self._widths else [()] * len(self._layers)
        of_layer = zip(cache.keys, cache.values, *scales, self._layers, whole, strict=True)
        structures = [
            _Layer(tuple(map(native.address, (*tensors, layer.q_norm, layer.k_norm))) + more, layer.window)
            for *tensors, layer, more in of_layer
        ]
        self._structures = (_Layer * len(structures))(*structures)

    def step(self, count: int) -> None:
        """Expect `count` new columns, from the cache's length on."""
        self._count = self._step.count = count
        self._step.start = self._cache.length

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
        if self._library is None:
            return _norm(x if delta is None else x.add_(delta), weight, self._heads.eps)
        out = self._room("norm", *x.shape)
        self._library.add_norm(*map(native.address, (x, delta, weight, out)), *x.shape, self._heads.eps)
        return out

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Rotate, write to the cache and attend.  qkv: [N, (query + 2 shared) * dim], changed; returns [N, query * dim]."""
        heads, structure = self._heads, self._structures[layer]
        if self._library is None:
            return self._attend(self._rotate_store(qkv, layer), layer)
        self._library.rotate_store(self._step, structure, qkv.data_ptr())
        out = self._room("attention", qkv.shape[0], heads.query * heads.dim)
        self._library.attend(self._step, structure, qkv.data_ptr(), out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, valid until the next call.  gate_up: [N, 2 I]; returns [N, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if self._library is None:
            return functional.silu(gate_up[:, :width]) * gate_up[:, width:]
        out = self._room("gate", rows, width)
        self._library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias.  x: [N, I]; weight: [O, I], float32 or bfloat16; bias: [O]; returns [N, O]."""
        if self._library is None or weight.dtype != torch.bfloat16:
            result = functional.linear(x.to(weight.dtype), weight).float()
        elif x.shape[0] > _FEW:
            split: Any = weight.split(_WIDENED)  # type: ignore[no-untyped-call]
            result = torch.cat([functional.linear(x, rows.float()) for rows in split], dim=-1)
        else:
            out = torch.empty(x.shape[0], weight.shape[0])
            pointers = (x.data_ptr(), weight.data_ptr(), native.address(bias), out.data_ptr())
            self._library.product_bfloat16(*pointers, *x.shape, weight.shape[0])
            return out
        return result if bias is None else result + bias

    def _rotate_store(self, qkv: Tensor, layer: int) -> Tensor:
        """Do as the function of this name in decode.c, in torch.  Returns the queries, [B, query, T, dim]."""
        heads, cache, settings = self._heads, self._cache, self._layers[layer]
        parts: Any = qkv.view(cache.rows, self._count, -1, heads.dim).transpose(1, 2)  # [B, query + 2 shared, T, dim]
        q, k, v = parts.split([heads.query, heads.shared, heads.shared], dim=1)
        columns = torch.arange(cache.length, cache.length + self._count)
        positions = (columns - cache.padding[:, None]).clamp_min(0)  # [B, T]
        cos, sin = (table[positions][:, None] for table in self._tables[:2])  # [B, 1, T, D]
        q = _rotate(q if settings.q_norm is None else _norm(q, settings.q_norm, heads.eps), cos, sin)
        k = _rotate(k if settings.k_norm is None else _norm(k, settings.k_norm, heads.eps), cos, sin)
        cache.store(layer, k, v)
        return q

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        """Attend to the cache in torch; the new columns are written already.

        Args:
            q: [B, query, T, D], rotated.
            layer: which.

        Returns:
            [B * T, query * D]. A query that is padding sees itself alone.
        """
        heads, cache, window = self._heads, self._cache, self._layers[layer].window
        start, end = cache.length, cache.length + self._count
        keys, values = cache.read(layer, end)  # [B, shared, end, D]
        mask = None
        if start or 0 < window < end or cache.padding.any():
            columns, own = torch.arange(end), torch.arange(start, end)[:, None]  # [end], [T, 1]
            seen = columns <= own
            if window:
                seen &= columns > own - window
            mask = (seen & (columns >= cache.padding[:, None, None])) | (columns == own)  # [B, T, end]
            mask = mask[:, None]
        grouped = heads.query != heads.shared
        result = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=heads.scale, enable_gqa=grouped
        )
        return result.transpose(1, 2).reshape(-1, heads.query * heads.dim)  # [B * T, query * D]

    def _pointers(self, block: Block) -> tuple[int | None, ...]:
        """Return what decode.c calls: the norms of a layer, and of each product its weight, bias and function."""
        products: Any = [product.keywords for product in block.products if isinstance(product, partial)]
        calls = ((p["prepared"].weight, p["bias"], p["prepared"].call) for p in products)
        found = ((ctypes.addressof(w), native.address(b), ctypes.cast(c, ctypes.c_void_p).value) for w, b, c in calls)
        return tuple(chain(map(native.address, block.norms), *found))

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """Return memory that the operation has used before, where it has the size: no allocation per token."""
        found = self._rooms.get(name)
        if found is None or found.shape != (rows, width):
            found = self._rooms[name] = torch.empty(rows, width)
        return found


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
