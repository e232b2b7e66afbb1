"""Keys and values of every layer, allocated once and written in place by decode.c.

They are in float32, bfloat16, float8, int8, int5 or int4. Values lie as they come, [columns,
features]. Keys lie with 16 columns side by side, [columns / 16, features, 16], so that one step of
a vector unit adds a feature to the scores of 16 columns. In bfloat16 both lie by twos,
[columns / 2, features, 2] and [columns / 16, features / 2, 16, 2], since a step multiplies pairs
there. Where the number of columns is odd, zeros lie beside the values of the last column.

int4 has two codes to a byte; int5 has their fifth bits beside them. Each head of queries and keys
is multiplied by a Hadamard matrix / sqrt(n), which spreads an outlier of the keys over all features
and changes no score; n is the largest power of two that divides head_dim. A group of 32 features of
a position has a step and a middle, both bfloat16; of 16 features where 32 does not divide head_dim;
in int5 of 64 where 64 divides it. With h = 8 in int4 and 16 in int5:

    step = (largest - least) / (2 h - 1),   middle = least + h step
    code = clamp(round((x - middle) / step), -h, h - 1),   x' = step * code + middle

Attention multiplies integers, as int4.h says. A number that is not finite makes every output NaN
that reads its group; of a key, its position.

The latents of multi-head latent attention are keys and values at once (`latent`), and lie once, as
keys do. int4 and int5 do not keep them.

The keys of an indexer (`index_dim`) are kept beside those of attention, of the same kind and in the
same blocks, and are cropped, kept and shared with them.

Gated delta nets keep no columns but a state of one size for each sequence (`DeltaStates`).

With measured scales (quantflow.core.kv) float8 and int8 are in units of these scales; int8 then
keeps a NaN as 0, having no code for it. Without them float8 is e4m3fn, as serving systems keep it:
keys after the rotary embedding and values lie well inside its range of 448. int8 then has a scale
per head and position, the largest magnitude / 127.5. Attention reads the rounded keys and values of
new positions too, so that a position means the same in whatever forward it is attended to.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quantflow.core.kv import KVScales
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.architecture import Delta
from quantflow.runtime.decoder import require_length

# The dtype of the storage; float8 is kept as bytes, which torch can index and copy. The order is
# decode.c's `enum kind`.
KINDS = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float8": torch.uint8,
        "int8": torch.int8,
        "int4": torch.uint8,
        "int5": torch.uint8,
    }
)
LANES = 16
SCALED = ("int8", "int4", "int5")  # kinds with scales of each position, where none were measured
GROUPED = ("int4", "int5")  # kinds with a step for each group of features
# TensorScheme.kind of measured scales -> a key of KINDS
KIND_OF = MappingProxyType({"float": "float8", "int": "int8"})


class DeltaStates:
    """The states of gated delta nets, float32.

    A state is that of all columns so far. decode.c takes it for zeros where a sequence begins, so
    nothing has to be cleared.

    Attributes:
        kind: what has them, in words.
        inputs: last inputs of each layer's convolution, [sequences, kernel - 1, channels].
        states: states of each layer, [sequences, value_heads, key_dim, value_dim].
    """

    def __init__(self, sizes: Delta, *, layers: int, sequences: int) -> None:
        """Reserve the memory; what is never written takes none."""
        window = (sequences, sizes.kernel - 1, sizes.channels)
        state = (sequences, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.kind = sizes.kind
        self.inputs = [torch.empty(window) for _ in range(layers)]
        self.states = [torch.empty(state) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.states))

    @property
    def sequences(self) -> int:
        """Number of sequences that there is room for."""
        return len(self.states[0]) if self.states else 0

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The inputs and the states of a layer."""
        return self.inputs[layer], self.states[layer]

    def keep(self, rows: Tensor) -> None:
        """Let sequence i become the old sequence rows[i]; the storage grows where it has to."""
        for tensors in (self.inputs, self.states):
            for layer, tensor in enumerate(tensors):
                kept = tensor[rows]
                if len(rows) > len(tensor):
                    tensors[layer] = kept
                else:
                    tensor[: len(rows)] = kept


class KVCache:
    """The cache of one batch.

    Attributes:
        kind: a key of KINDS.
        rows: sequences in use; storage may hold more.
        capacity: columns that there is room for, a multiple of LANES, so it may be more than was
            asked for.
        length: columns in use.
        padding: [rows] int64, how many columns at the left of a sequence are padding.
        keys: keys of each layer, [rows or more, kv_heads, capacity / LANES, head_dim, LANES] in the
            storage's dtype; in bfloat16 [rows or more, kv_heads, capacity / LANES, head_dim / 2,
            LANES, 2].
        values: values of each layer, [rows or more, kv_heads, capacity, head_dim] in the storage's
            dtype; in bfloat16 [rows or more, kv_heads, capacity / 2, head_dim, 2]; empty where the
            keys hold them. In int4 keys are [rows or more, kv_heads, capacity / LANES,
            head_dim / 8, LANES, 4] and values [rows or more, kv_heads, capacity / 4,
            head_dim / 2, 4]; in int5 head_dim / 32 and head_dim / 8 more, rounded up, with the
            fifth bits.
        key_scales, value_scales: scales of each layer's columns, [rows or more, kv_heads, capacity]
            float32, for int8 that was not measured; middles and steps of int4 and int5, [rows or
            more, kv_heads, capacity / LANES, groups, LANES, 2] bfloat16; otherwise empty. The keys'
            are the values' too where the keys hold them.
        key_steps, value_steps: measured scales of each layer, [kv_heads] float32; otherwise empty.
        index: the keys of indexers, each layer's as latents lie; None: there are none.
        states: states of the layers that have a gated delta net; None: no layer has one.
    """

    def __init__(
        self,
        *,
        kind: str,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        latent: bool = False,
        index_dim: int = 0,
        scales: Sequence[KVScales] = (),
        states: DeltaStates | None = None,
    ) -> None:
        """Reserve the memory; what is never written takes none.

        Args:
            kind: a key of KINDS.
            layers: number of layers that keep columns.
            rows: number of sequences.
            kv_heads: kv heads of a layer.
            capacity: columns of a sequence.
            head_dim: features of a head, an even number for bfloat16.
            latent: the keys hold the values, so nothing is kept for those.
            index_dim: features of an indexer's keys; 0: there is no indexer.
            scales: scales of each layer that were measured for this kind; or none.
            states: states of the layers that keep no columns, of as many sequences; or none.

        Raises:
            UsageError: the kind is unknown or has no scales, or there is no row or no column.
            UnsupportedError: the kind does not keep latents.
        """
        require_kind(kind, latent=latent)
        if rows < 1 or capacity < 1:
            raise UsageError(
                f"kv cache of {rows} rows and {capacity} positions", "give at least one of each"
            )
        if any(KIND_OF[scale.scheme.kind] != kind for scale in scales):
            raise UsageError(
                f"kv cache {kind}: the scales are of {scales[0].scheme.kind}",
                "use the kind that was measured",
            )
        blocks = -(-capacity // LANES)
        self.kind, self.capacity, self.states = kind, blocks * LANES, states
        self.clear(rows)
        heads, dtype = (rows, kv_heads), KINDS[kind]
        keys, values = [blocks, head_dim, LANES], [self.capacity, head_dim]
        scale, scale_dtype = [self.capacity], torch.float32
        if kind == "bfloat16":
            keys, values = [blocks, head_dim // 2, LANES, 2], [self.capacity // 2, head_dim, 2]
        if kind in GROUPED:
            fifths = -(-head_dim // 32) if kind == "int5" else 0  # words of a column
            keys = [blocks, head_dim // 8 + fifths, LANES, 4]
            values = [self.capacity // 4, head_dim // 2 + 4 * fifths, 4]
            groups = head_dim // group_of(kind, head_dim)
            scale, scale_dtype = [blocks, groups, LANES, 2], torch.bfloat16
        self.keys = [torch.empty(*heads, *keys, dtype=dtype) for _ in range(layers)]
        apart = 0 if latent else layers  # layers whose values lie apart
        self.values = [torch.empty(*heads, *values, dtype=dtype) for _ in range(apart)]
        self.key_steps = [scale.keys.expand(kv_heads).contiguous() for scale in scales]
        self.value_steps = [scale.values.expand(kv_heads).contiguous() for scale in scales]
        count = layers if kind in SCALED and not scales else 0
        self.key_scales, self.value_scales = (
            [torch.empty(*heads, *scale, dtype=scale_dtype) for _ in range(min(count, each))]
            for each in (layers, apart)
        )

        self.index: KVCache | None = None
        if index_dim:
            self.index = KVCache(
                kind=kind,
                layers=layers,
                rows=rows,
                kv_heads=1,
                capacity=self.capacity,
                head_dim=index_dim,
                latent=True,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the columns' storage."""
        return sum(tensor.nbytes for tensors in self._storage() for tensor in tensors)

    def has_room(self, *, rows: int, capacity: int) -> bool:
        """Whether there is storage for so many sequences and columns."""
        kept = [*self.keys[:1], *([] if self.states is None else self.states.states[:1])]
        return self.capacity >= capacity and all(len(tensor) >= rows for tensor in kept)

    def of(self, layer: int) -> tuple[Any, ...]:
        """The keys, values, their scales and their steps of a layer.

        None stands for those that the cache does not have.
        """
        return tuple(
            part[layer] if part else None
            for part in (*self._own_storage(), self.key_steps, self.value_steps)
        )

    def clear(self, rows: int) -> None:
        """Forget everything and expect so many sequences, at most those there is storage for."""
        self.rows, self.length, self.padding = rows, 0, torch.zeros(rows, dtype=torch.int64)

    def keep(self, rows: Tensor) -> None:
        """Let sequence i become the old sequence rows[i].

        Args:
            rows: [B'] int64; where B' is more than there is storage for, the storage grows.

        Raises:
            UsageError: a row that there is not, or none at all.
        """
        if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= self.rows:
            raise UsageError(
                f"kv cache: keep rows {rows.tolist()} of {self.rows}",
                "keep at least one that there is",
            )
        self.padding = self.padding[rows]
        changed = not torch.equal(rows, torch.arange(len(rows)))
        for tensors in self._storage() if changed else ():
            for layer, tensor in enumerate(tensors):
                # columns, or blocks of them
                used = -(-self.length * tensor.shape[2] // self.capacity)
                kept = tensor[:, :, :used][rows]  # [B', kv_heads, used, ...]
                if len(rows) > len(tensor):
                    tensors[layer] = tensor.new_empty((len(rows), *tensor.shape[1:]))
                tensors[layer][: len(rows), :, :used] = kept
        if changed and self.states is not None:
            self.states.keep(rows)
        self.rows = len(rows)

    def crop(self, length: int) -> None:
        """Forget every column from `length` on.

        Raises:
            UsageError: there are not so many, or a state is that of more and not of none.
        """
        require_length(length, have=self.length)
        if self.states is not None and 0 < length < self.length:
            raise UsageError(
                f"crop to {length} positions of {self.length}: {self.states.kind} has the state of "
                "all of them",
                "begin again",
            )
        self.length = length

    def _own_storage(self) -> tuple[list[Tensor], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    def _storage(self) -> tuple[list[Tensor], ...]:
        index = () if self.index is None else self.index._own_storage()
        return (*self._own_storage(), *index)


def group_of(kind: str, head_dim: int) -> int:
    """Features of a head that share a step in int4 or int5."""
    if head_dim % 32:
        return 16
    return 64 if kind == "int5" and not head_dim % 64 else 32


def require_kind(kind: str, *, latent: bool = False) -> None:
    """Refuse a kind that is not in KINDS, and int4 and int5 of latents.

    Raises:
        UsageError: the kind is unknown.
        UnsupportedError: int4 or int5 of latents, whose last features are values and whose first
            are rotated keys: one rotation of both would mix them.
    """
    if kind not in KINDS:
        raise UsageError(f"kv cache {kind!r} is unknown", f"use one of {', '.join(KINDS)}")
    if kind in GROUPED and latent:
        raise UnsupportedError(
            f"kv cache {kind}: latent attention keeps keys and values in one, which it does not",
            "use float8 or int8",
        )
