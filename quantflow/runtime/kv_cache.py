"""Keys and values of every layer, allocated once and written in place, in float32, bfloat16, float8 or int8.

float8 is e4m3fn without a scale, as serving systems keep it where none was measured: keys after the rotation and values lie
well inside its range of 448. int8 has a scale per head and position, the largest magnitude / 127.5. Attention reads what
was kept, of new positions too, so that a position means the same in whatever forward it is attended to.
"""

from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import affine, float8
from quantflow.core.scheme import TensorScheme
from quantflow.errors import UsageError

# The dtype of the storage; float8 is kept as bytes, which torch can index and copy. The order is decode.c's `enum kind`.
KINDS = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.uint8, "int8": torch.int8})
_INT8 = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)


class KVCache:
    """The cache of one batch.

    Attributes:
        kind: a key of KINDS.
        rows: sequences in use; storage may hold more.
        capacity: columns that there is room for.
        length: columns in use.
        padding: [rows] int64, how many columns at the left of a sequence are padding.
        keys, values: of each layer, [rows or more, kv_heads, capacity, head_dim] in the storage's dtype.
        key_scales, value_scales: of each layer, [rows or more, kv_heads, capacity] float32 for int8; otherwise empty.
    """

    def __init__(self, *, kind: str, layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int) -> None:
        """Reserve the memory; what is never written takes none.

        Raises:
            UsageError: the kind is unknown, or there is no row or no column.
        """
        if kind not in KINDS:
            raise UsageError(f"kv cache {kind!r} is unknown", f"use one of {', '.join(KINDS)}")
        if rows < 1 or capacity < 1:
            raise UsageError(f"kv cache of {rows} rows and {capacity} positions", "give at least one of each")
        self.kind, self.rows, self.capacity, self.length = kind, rows, capacity, 0
        self.padding = torch.zeros(rows, dtype=torch.int64)
        shape = (rows, kv_heads, capacity, head_dim)
        self.keys, self.values = ([torch.empty(shape, dtype=KINDS[kind]) for _ in range(layers)] for _ in range(2))
        count = layers if kind == "int8" else 0
        self.key_scales, self.value_scales = ([torch.empty(shape[:3]) for _ in range(count)] for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(tensor.nbytes for tensors in self._storage() for tensor in tensors)

    def clear(self, rows: int) -> None:
        """Forget everything and expect so many sequences, at most those there is storage for."""
        self.rows, self.length, self.padding = rows, 0, torch.zeros(rows, dtype=torch.int64)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write new columns from `length` on; `length` itself changes when all layers are written.

        Args:
            layer: its index.
            keys, values: [rows, kv_heads, T, head_dim] float32.
        """
        columns = slice(self.length, self.length + keys.shape[2])
        scales = (self.key_scales, self.value_scales)
        for x, storage, scale in zip((keys, values), (self.keys, self.values), scales, strict=True):
            target = storage[layer][: self.rows, :, columns]
            if self.kind == "float8":
                target.copy_(float8.cast(x, "e4m3fn").view(torch.uint8))
            elif self.kind == "int8":
                found = affine.scale_from_amax(x.abs().amax(dim=-1), _INT8)  # [rows, kv_heads, T]
                scale[layer][: self.rows, :, columns] = found
                target.copy_(affine.quantize(x, found[..., None], None, _INT8))
            else:
                target.copy_(x)

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return what is kept of the first `end` columns, keys and values [rows, kv_heads, end, head_dim] float32."""
        found = []
        for storage, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            x = storage[layer][: self.rows, :, :end]
            if self.kind == "float8":
                x = float8.widen(x.view(torch.float8_e4m3fn))
            elif self.kind == "int8":
                x = x * scales[layer][: self.rows, :, :end, None]
            found.append(x.float())
        return found[0], found[1]

    def keep(self, rows: Tensor) -> None:
        """Let sequence i become the old sequence rows[i].

        Args:
            rows: [B'] int64; where B' is more than there is storage for, the storage grows.

        Raises:
            UsageError: a row that there is not, or none at all.
        """
        if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= self.rows:
            raise UsageError(f"kv cache: keep rows {rows.tolist()} of {self.rows}", "keep at least one that there is")
        self.padding = self.padding[rows]
        changed = not torch.equal(rows, torch.arange(len(rows)))
        for tensors in self._storage() if changed else ():
            for layer, tensor in enumerate(tensors):
                kept = tensor[:, :, : self.length][rows]  # [B', kv_heads, length, ...]
                if len(rows) > len(tensor):
                    tensors[layer] = tensor.new_empty((len(rows), *tensor.shape[1:]))
                tensors[layer][: len(rows), :, : self.length] = kept
        self.rows = len(rows)

    def crop(self, length: int) -> None:
        """Forget every column from `length` on.

        Raises:
            UsageError: there are not so many.
        """
        if not 0 <= length <= self.length:
            raise UsageError(f"kv cache: crop to {length} of {self.length} positions", "crop to at most what there is")
        self.length = length

    def _storage(self) -> tuple[list[Tensor], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales
