"""What lies between the linears of a Llama-like decoder layer: norms, rotation, cache, attention, the gate.

`NativeOperations` calls decode.c, `TorchOperations` torch; the results agree within float32 rounding. All tensors are
float32. Both hold the state of one batch: `begin` gives them its cache, `step` says how many columns are new.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core import native
from quantflow.runtime.kv_cache import KINDS, LANES, KVCache

SOURCE = Path(__file__).with_name("decode.c")
_FEW = 16  # new columns, and rows of a product, up to which one pass over the memory counts more than the arithmetic
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


class Operations(Protocol):
    """The operations on one batch.

    Attributes:
        WIDENS: `product` takes weights in bfloat16 as the float32 numbers that they are, without rounding inputs to it.
    """

    WIDENS: bool

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """Take a cache, or one whose storage has changed, and the rotation of each position, [capacity, dim]."""

    def step(self, count: int) -> None:
        """Expect `count` new columns, from the cache's length on."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add delta to x in place and return the norm of x, valid until the next call.  x, delta: [N, H]."""

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Rotate, write to the cache and attend.  qkv: [N, (query + 2 shared) * dim], changed; returns [N, query * dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, valid until the next call.  gate_up: [N, 2 I]; returns [N, I]."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias.  x: [N, I]; weight: [O, I], float32 or bfloat16; bias: [O]; returns [N, O]."""


class TorchOperations:
    """Operations in torch."""

    WIDENS = False

    def __init__(self, heads: Heads, layers: Sequence[Attention]) -> None:
        """Take the shapes and the layers of a model."""
        self._heads, self._layers = heads, layers
        self._count = 0

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """See `Operations`."""
        self._cache, self._cos, self._sin = cache, cos, sin

    def step(self, count: int) -> None:
        """See `Operations`."""
        self._count = count

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Operations`."""
        if delta is not None:
            x += delta
        return _norm(x, weight, self._heads.eps)

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """See `Operations`."""
        heads, cache, settings = self._heads, self._cache, self._layers[layer]
        split = qkv.view(cache.rows, self._count, heads.query + 2 * heads.shared, heads.dim)  # [B, T, heads, D]
        q, k, v = split.transpose(1, 2).split([heads.query, heads.shared, heads.shared], dim=1)  # type: ignore[no-untyped-call]
        columns = torch.arange(cache.length, cache.length + self._count)
        positions = (columns - cache.padding[:, None]).clamp_min(0)  # [B, T]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [B, 1, T, D]
        q = _rotate(q if settings.q_norm is None else _norm(q, settings.q_norm, heads.eps), cos, sin)
        k = _rotate(k if settings.k_norm is None else _norm(k, settings.k_norm, heads.eps), cos, sin)
        cache.store(layer, k, v)
        return attend_many(q, cache, layer, heads=heads, window=settings.window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Operations`."""
        result = functional.linear(x.to(weight.dtype), weight).float()
        return result if bias is None else result + bias


def fused_why_not(heads: Heads) -> str | None:
    """Return why decode.c cannot be used, in a sentence, or None; compiles it if need be."""
    if heads.dim % LANES:
        return f"it works on {LANES} features at once, heads have {heads.dim}"
    return native.why_not(SOURCE, needs=())


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("keys", "values", "key_scales", "value_scales", "key_steps", "value_steps", "q_norm", "k_norm")
    ] + [("window", ctypes.c_int64)]


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("cos", "sin", "padding")]
        + [(name, ctypes.c_int64) for name in ("rows", "count", "start", "heads", "kv_heads", "dim", "capacity", "kind")]
        + [("scale", ctypes.c_float), ("eps", ctypes.c_float)]
    )


class NativeOperations:
    """Operations in C; attention of many new columns, and products of many rows, in torch."""

    WIDENS = True

    def __init__(self, heads: Heads, layers: Sequence[Attention]) -> None:
        """Take the shapes and the layers of a model, and compile decode.c if need be.

        Raises:
            UnsupportedError: it cannot be compiled here; see `fused_why_not`.
        """
        self._heads, self._layers = heads, layers
        self._library = _functions(native.library(SOURCE))
        self._torch = TorchOperations(heads, layers)
        self._rooms: dict[str, Tensor] = {}

    def begin(self, cache: KVCache, cos: Tensor, sin: Tensor) -> None:
        """See `Operations`."""
        heads = self._heads
        self._cache, self._tables = cache, (cos, sin, cache.padding)  # C has their addresses: they must live on
        self._torch.begin(cache, cos, sin)
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
        )
        none = [None] * len(self._layers)
        scales = (part or none for part in (cache.key_scales, cache.value_scales, cache.key_steps, cache.value_steps))
        of_layer = zip(cache.keys, cache.values, *scales, self._layers, strict=True)
        self._structures = [
            _Layer(*map(native.address, (*tensors, layer.q_norm, layer.k_norm)), window=layer.window)
            for *tensors, layer in of_layer
        ]

    def step(self, count: int) -> None:
        """See `Operations`."""
        self._step.count, self._step.start = count, self._cache.length
        self._torch.step(count)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Operations`."""
        rows, width = x.shape
        out = self._room("norm", rows, width)
        added = None if delta is None else delta.data_ptr()
        self._library.add_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, width, self._heads.eps)
        return out

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """See `Operations`."""
        heads, count, structure = self._heads, self._step.count, self._structures[layer]
        self._library.rotate_store(self._step, structure, qkv.data_ptr())
        if count > _FEW:
            split = qkv.view(self._cache.rows, count, heads.query + 2 * heads.shared, heads.dim)  # [B, T, heads, D]
            q = split[:, :, : heads.query].transpose(1, 2)  # [B, query, T, D]
            return attend_many(q, self._cache, layer, heads=heads, window=self._layers[layer].window)
        out = self._room("attention", qkv.shape[0], heads.query * heads.dim)
        self._library.attend(self._step, structure, qkv.data_ptr(), out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._room("gate", rows, width)
        self._library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Operations`."""
        if weight.dtype != torch.bfloat16:
            return self._torch.product(x, weight, bias)
        if x.shape[0] > _FEW:
            split: Any = weight.split(_WIDENED)  # type: ignore[no-untyped-call]
            result = torch.cat([functional.linear(x, rows.float()) for rows in split], dim=-1)
            return result if bias is None else result + bias
        out = torch.empty(x.shape[0], weight.shape[0])
        pointers = (x.data_ptr(), weight.data_ptr(), native.address(bias), out.data_ptr())
        self._library.product_bfloat16(*pointers, *x.shape, weight.shape[0])
        return out

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """Return memory that the operation has used before, where it has the size: no allocation per token."""
        found = self._rooms.get(name)
        if found is None or found.shape != (rows, width):
            found = self._rooms[name] = torch.empty(rows, width)
        return found


def attend_many(q: Tensor, cache: KVCache, layer: int, *, heads: Heads, window: int) -> Tensor:
    """Attend to the cache, its newest columns among it, in torch.

    Args:
        q: [B, query, T, D], rotated; those of the columns from the cache's length on, which are written already.
        cache: where keys and values are.
        layer: which.
        heads: the shapes.
        window: as in `Attention`.

    Returns:
        [B * T, query * D]. A query that is padding sees itself alone.
    """
    start, count = cache.length, q.shape[2]
    end = start + count
    keys, values = cache.read(layer, end)  # [B, shared, end, D]
    mask = None
    if start or 0 < window < end or cache.padding.any():
        columns, own = torch.arange(end), torch.arange(start, end)[:, None]  # [end], [T, 1]
        seen = columns <= own
        if window:
            seen &= columns > own - window
        mask = (seen & (columns >= cache.padding[:, None, None])) | (columns == own)  # [B, T, end]
        mask = mask[:, None]
    result = functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=heads.scale, enable_gqa=heads.query != heads.shared
    )
    return result.transpose(1, 2).reshape(-1, heads.query * heads.dim)  # [B * T, query * D]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _functions(library: ctypes.CDLL) -> Any:
    """Say what the functions of decode.c take."""
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.add_norm.argtypes = [pointer] * 4 + [count] * 2 + [ctypes.c_float]
    library.silu_mul.argtypes = [pointer] * 2 + [count] * 2
    library.product_bfloat16.argtypes = [pointer] * 4 + [count] * 3
    library.rotate_store.argtypes = [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), pointer]
    library.attend.argtypes = [ctypes.POINTER(_Step), ctypes.POINTER(_Layer), pointer, pointer]
    for name in ("add_norm", "silu_mul", "product_bfloat16", "rotate_store", "attend"):
        getattr(library, name).restype = None
    return library
