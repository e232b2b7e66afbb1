"""Hidden states between two decoder layers, one per calibration sequence, on disk or in memory.

The inputs of one layer are one generation. While a layer runs, the next generation is written
beside the current one; `commit` makes it the current one, under a name, with its hash. So a process
that is killed finds the last committed generation whole, and goes on with its layer. A backward
pass afterwards needs the input of every layer; then all generations are kept.

    <folder>/00012.hidden   the input of layer 12, sequence after sequence, raw
    <folder>/00012.json     {"key", "sha256", "shapes", "dtypes"}, written after it

With a folder nothing stays in this process's memory: written states are read again, from the
system's file cache as long as there is room for it. Without one everything is in memory and nothing
is kept.

On a device with room for two generations they stay there (`resident`), and every eighth is written:
a run that was stopped repeats the layers since then. To hash and write each generation would take
longer than the layers do.
"""

import hashlib
import os
import re
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.device import HOST, Device
from quantflow.errors import InputError, UsageError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, file_digest, read_json
from quantflow.models.reading import bytes_of, read_into

# names of its files; those that are written hold a dot in front, and may have been left by a kill
_OWN = re.compile(r"\d{5,}\.(hidden|json)|\.next\.hidden|\.\d{5,}\.json\.tmp")


_Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a sequence's hidden state


WRITTEN = 8  # of so many resident generations one is written


def _nobody_else() -> None:
    """Wait for nobody."""


class HiddenStates:
    """The hidden states of `count` sequences, [1, S, H] each; get any, put in order.

    Args:
        count: number of sequences.
        folder: folder of the generations; None keeps them in memory.
        keep: whether every committed generation stays in the folder.
        device: device of the hidden states that `get` returns; they wait in host memory.
        resident: whether they wait on the device instead; not with `keep`.
    """

    def __init__(
        self,
        count: int,
        *,
        folder: Path | None = None,
        keep: bool = False,
        device: Device = HOST,
        resident: bool = False,
    ) -> None:
        """Begin without a generation; the states put until the first commit are the first one."""
        self._count = count
        self._folder = folder
        self._keep = keep
        self._device = device
        self._resident = resident
        self._held: list[Tensor | None] = [None] * count  # without a folder, or resident
        # the current generation: shape and dtype of each sequence, and its file
        self._parts: list[_Part] = []
        self._current: Path | None = None
        # of the next generation so far; a layer may return another dtype than its input's
        self._next_parts: list[_Part] = []
        self._put = 0  # sequences of the next generation so far
        self._hash = hashlib.sha256()
        self._next = -1  # descriptor of the next generation's file
        if folder is not None:
            disk.make_folder(folder)

    @property
    def restored(self) -> bool:
        """Whether a generation was restored, so that the first one need not be made."""
        return self._current is not None

    def __len__(self) -> int:
        """The number of sequences."""
        return self._count

    def get(self, index: int) -> Tensor:
        """A hidden state, [1, S, H]: that of the current generation, or the one put since.

        Raises:
            InputError: the file of the generation ends early.
        """
        held = self._held[index]
        if held is not None:
            return self._device.put(held)
        path, parts = self._current, self._parts
        if index < self._put:
            path, parts = self._next_path, self._next_parts
        assert path is not None  # a state that is not in memory was written
        offset = sum(_bytes(part) for part in parts[:index])
        shape, dtype = parts[index]
        hidden = self._device.host_empty(shape, dtype=dtype)
        read_into(path, hidden, offset, name="hidden states")
        return self._device.put(hidden)

    def put(self, index: int, hidden: Tensor) -> None:
        """Add a sequence to the next generation.

        Args:
            index: the one after the last that was put.
            hidden: [1, S, H].

        Raises:
            UsageError: another index is due.
        """
        if index != self._put:
            raise UsageError(
                f"hidden states: sequence {index} put, {self._put} is next",
                "put sequences in order",
            )
        hidden = hidden.detach().contiguous()
        if not self._resident:
            hidden = self._device.fetch(hidden)
        if self._resident or self._folder is None:
            self._held[index] = hidden
            # in memory, a generation that is complete is the current one
            self._put = (index + 1) % self._count
            return
        self._put = index + 1
        self._append(hidden)

    def _append(self, hidden: Tensor) -> None:
        """Write a sequence of the next generation, in host memory, behind those before it."""
        if self._next < 0:
            self._next, self._next_parts = disk.create(self._next_path), []
        self._next_parts.append((tuple(hidden.shape), hidden.dtype))
        data = bytes_of(hidden)
        self._hash.update(data)
        with disk.naming(self._next_path):
            disk.write_all(self._next, data)

    def commit(self, label: int, *, key: str, settled: Callable[[], None] = _nobody_else) -> None:
        """Make the next generation the current one, and remove the others unless all are kept.

        Args:
            label: index of the layer whose input it is.
            key: digest of everything that it depends on; `restore` compares it.
            settled: called between the two steps; it returns when every rank of a cut model has its
                part of the generation, so that there is always one that all of them have.

        Raises:
            UsageError: not every sequence was put.
        """
        if self._folder is None:
            return
        if self._put != (0 if self._resident else self._count):
            raise UsageError(
                f"hidden states: {self._put} of {self._count} sequences", "put every sequence"
            )
        if self._resident:
            if label == 0 or label % WRITTEN:
                settled()
                return
            for held in self._held:
                assert held is not None  # every sequence was put
                self._append(self._device.fetch(held))
        with disk.naming(self._next_path):
            os.fsync(self._next)
        os.close(self._next)
        self._next = -1
        path = self._folder / f"{label:05d}.hidden"
        disk.replace(self._next_path, path)
        self._parts = self._next_parts
        record = {
            "key": key,
            "sha256": self._hash.hexdigest(),
            "shapes": [shape for shape, _ in self._parts],
            "dtypes": [str(dtype) for _, dtype in self._parts],
        }
        disk.write_atomic(path.with_suffix(".json"), canonical_json(record))
        self._current, self._put, self._hash = path, 0, hashlib.sha256()
        settled()
        for other in [] if self._keep else self._written():
            if other.stem != path.stem:
                disk.remove(other)

    def restore(self, label: int, *, key: str) -> bool:
        """Take up the generation of a label; whether it is there, whole and of the same key."""
        if self._folder is None:
            return False
        path = self._folder / f"{label:05d}.hidden"
        try:
            record = read_json(path.with_suffix(".json"))
            if (
                record["key"] != key
                or len(record["shapes"]) != self._count
                or file_digest(path) != record["sha256"]
            ):
                return False
            dtypes = [_DTYPES[name] for name in record["dtypes"]]
            shapes = [tuple(shape) for shape in record["shapes"]]
            parts = list(zip(shapes, dtypes, strict=True))
            if sum(map(_bytes, parts)) != path.stat().st_size:
                return False
        # a damaged or missing generation is made again, never used
        except (InputError, KeyError, TypeError, ValueError):
            return False
        self._parts = parts
        self._current, self._put = path, 0
        return True

    def move(self, folder: Path) -> None:
        """Move the current generation to another folder on the same disk.

        `restore` takes it up there. A file there of the same label is replaced: at any moment it is
        absent, old or complete, whoever else reads or writes it.
        """
        if self._current is None or self._current.parent == folder:
            return
        disk.make_folder(folder)
        # the record, which holds the hash, comes last
        for path in (self._current, self._current.with_suffix(".json")):
            disk.replace(path, folder / path.name)
        self._current = folder / self._current.name

    def discard(self) -> None:
        """Remove every generation, and the folder."""
        self.close()
        if self._folder is not None and self._folder.is_dir():
            for path in self._written():
                disk.remove(path)
            os.rmdir(self._folder)

    def close(self) -> None:
        """Drop the generation that is being written; committed ones stay.

        Such a generation is the output of the last layer.
        """
        if self._next >= 0:
            os.close(self._next)
            self._next = -1
            disk.remove(self._next_path)

    def _written(self) -> list[Path]:
        """The files that this class writes; a file of anybody else in the folder stays."""
        assert self._folder is not None  # checked by the callers
        return [path for path in sorted(self._folder.iterdir()) if _OWN.fullmatch(path.name)]

    @property
    def _next_path(self) -> Path:
        assert self._folder is not None  # checked by the callers
        return self._folder / ".next.hidden"


_DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _bytes(part: _Part) -> int:
    shape, dtype = part
    return prod(shape) * dtype.itemsize
