"""The layers of a Llama-like decoder: their products, and between them norms, rotation, cache, attention, the gate.

Where kernels.c has all products, the layers are one call of decode.c. Else each operation is one, or the same in torch where it
cannot be compiled; the results agree within float32 rounding. All tensors are float32. The state is that of one batch: `begin`
gives it a cache, `step` says how many columns are new.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
_PRODUCTS = ("qkv", "output", "gate_up", "down")


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
    """A decoder layer: its norms [H] float32, and its products."""

    attention_norm: Tensor
    qkv: Projection
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


def fused_why_not(heads: Heads) -> str | None:
    """Return why decode.c cannot be used, in a sentence, or None; compiles it if need be."""
    if heads.dim % LANES:
        return f"it works on {LANES} features at once, heads have {heads.dim}"
    return native.why_not(SOURCE, needs=())


class _Product(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "key_steps", "value_steps")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "attention_norm", "mlp_norm")),
        *((name, _Product) for name in _PRODUCTS),
        ("window", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "padding")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "start", "heads", "kv_heads", "dim", "capacity", "kind")),
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        ("linear", ctypes.c_void_p),
    ]


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
        self._library = _functions(native.library(SOURCE)) if fused else None
        self._rooms: dict[str, Tensor] = {}
        self._blocks: Sequence[Block] = ()
        self._widths: dict[str, int] = {}  # of what `run` of decode.c computes; empty where it cannot

    def take(self, blocks: Sequence[Block]) -> None:
        """Take the layers that `run` runs; before `begin`."""
        self._blocks, found = blocks, [getattr(block, name) for block in blocks for name in _PRODUCTS]
        if self._library is not None and all(isinstance(f, partial) and f.func is kernels.linear for f in found):
            qkv, output, gate_up, down = (product.keywords["prepared"] for product in found[:4])  # alike in every layer
            self._widths = {"norm": qkv.columns, "qkv": qkv.rows, "attention": output.columns}
            self._widths |= {"gate_up": gate_up.rows, "gate": down.columns, "delta": down.rows}

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """Take a cache, or one whose storage has changed, and the rotation of each position, [capacity, dim]."""
        heads = self._heads
        self._cache, self._tables = cache, (cos, sin, cache.padding)  # C has their addresses: they must live on
        self._step = _Step(
            *map(native.address, self._tables),
            rows=cache.rows,
            heads=heads.query,
            kv_heads=heads.shared,
            dim=heads.dim,
            capacity=cache.capacity,
            kind=tuple(KINDS).index(cache.kind),
            scale=heads.scale,
            eps=heads.eps,
            hidden=self._widths.get("norm", 0),
            intermediate=self._widths.get("gate", 0),
        )
        none = [None] * len(self._layers)
        scales = (part or none for part in (cache.key_scales, cache.value_scales, cache.key_steps, cache.value_steps))
        of_layer = zip(cache.keys, cache.values, *scales, self._layers, strict=True)
        structures = [
            _Layer(*map(native.address, (*tensors, layer.q_norm, layer.k_norm)), window=layer.window)
            for *tensors, layer in of_layer
        ]
        for structure, block in zip(structures, self._blocks if self._widths else (), strict=False):
            structure.attention_norm, structure.mlp_norm = block.attention_norm.data_ptr(), block.mlp_norm.data_ptr()
            for name in _PRODUCTS:
                product = getattr(block, name).keywords
                setattr(structure, name, _Product(product["prepared"].address, native.address(product["bias"])))
                self._step.linear = ctypes.cast(product["prepared"].call, ctypes.c_void_p)
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
            qkv = block.qkv(self.add_norm(x, delta, block.attention_norm))
            delta = block.output(self.attend(qkv, index))
            gate_up = block.gate_up(self.add_norm(x, delta, block.mlp_norm))
            delta = block.down(self.silu_mul(gate_up))
        return delta

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add delta to x in place and return the norm of x, valid until the next call.  x, delta: [N, H]."""
        if self._library is None:
            return _norm(x if delta is None else x.add_(delta), weight, self._heads.eps)
        rows, width = x.shape
        out = self._room("norm", rows, width)
        self._library.add_norm(*map(native.address, (x, delta, weight, out)), rows, width, self._heads.eps)
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

    def _split(self, qkv: Tensor) -> Tensor:
        """Return [B, query + 2 shared, T, dim]; a view."""
        heads = self._heads
        return qkv.view(self._cache.rows, self._count, heads.query + 2 * heads.shared, heads.dim).transpose(1, 2)

    def _rotate_store(self, qkv: Tensor, layer: int) -> Tensor:
        """Do as the function of this name in decode.c, in torch.  Returns the queries, [B, query, T, dim]."""
        heads, cache, settings = self._heads, self._cache, self._layers[layer]
        q, k, v = self._split(qkv).split([heads.query, heads.shared, heads.shared], dim=1)  # type: ignore[no-untyped-call]
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


def _functions(library: ctypes.CDLL) -> Any:
    """Say what the functions of decode.c take; `run` alone returns something."""
    pointer, count, step, layer = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Step), ctypes.POINTER(_Layer)
    arguments = {
        "add_norm": [pointer] * 4 + [count] * 2 + [ctypes.c_float],
        "silu_mul": [pointer] * 2 + [count] * 2,
        "product_bfloat16": [pointer] * 4 + [count] * 3,
        "rotate_store": [step, layer, pointer],
        "attend": [step, layer, pointer, pointer],
        "run": [step, layer, count] + [pointer] * 7,
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    return library
