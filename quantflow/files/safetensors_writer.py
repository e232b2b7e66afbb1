"""A safetensors file that is written in any order, piece by piece; no whole tensor is ever held.

Names, dtypes and shapes are known before the first weight is read, and so is the header. Tensors
stand in the order of their element size, largest first, then of their names, so that each is
aligned to its elements.
"""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.safetensors_header import DTYPE_BITS, METADATA, TensorInfo, tensor_bytes

Spec = tuple[str, tuple[int, ...]]
METADATA_PT = {"format": "pt"}  # stock transformers refuses a file without it


@dataclass(frozen=True, kw_only=True)
class SafetensorsPlan:
    """The place of everything in a file.

    Attributes:
        header: first bytes of the file, the length of the header included; a multiple of 8.
        tensors: name -> place, in the order of the file; offsets count from the beginning of the
            FILE.
        nbytes: bytes of the whole file.
    """

    header: bytes
    tensors: dict[str, TensorInfo]
    nbytes: int


def layout(
    specs: Mapping[str, Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    keep_order: bool = False,
    align: int = 8,
) -> SafetensorsPlan:
    """The places of a file's tensors.

    Args:
        specs: name -> (dtype as safetensors names it, shape).
        metadata: metadata of the file; None writes `format: pt`, an empty one writes nothing.
        keep_order: whether tensors keep the order of `specs`, which then keeps them aligned.
        align: bytes, a multiple of 8; the first tensor begins at a multiple of them.

    Raises:
        InputError: a dtype is unknown, or the format cannot hold a shape; the message names the
            tensor.
    """
    entries = METADATA_PT if metadata is None else metadata
    table: dict[str, object] = {METADATA: dict(entries)} if entries else {}
    position = 0
    spans = {}
    for name in (
        specs
        if keep_order
        else sorted(specs, key=lambda name: (-DTYPE_BITS.get(specs[name][0], 0), name))
    ):
        dtype, shape = specs[name]
        size = tensor_bytes(dtype, shape)
        if size is None or name == METADATA:
            raise InputError(
                f"{name}: {dtype} {list(shape)} cannot be stored in safetensors",
                "use another dtype or shape",
            )
        table[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        spans[name] = (position, size)
        position += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    begin = 8 + len(text)
    tensors = {
        name: TensorInfo(
            name=name,
            dtype=specs[name][0],
            shape=tuple(specs[name][1]),
            offset=begin + offset,
            nbytes=size,
        )
        for name, (offset, size) in spans.items()
    }
    return SafetensorsPlan(
        header=len(text).to_bytes(8, "little") + text, tensors=tensors, nbytes=begin + position
    )


class Writer:
    """A file that several threads fill.

    As a context: without an error it is `close`d at the end, with one it is removed.

    Attributes:
        path: path of the file; nobody reads it before `close` returns.
        layout: places of the tensors.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], *, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create the file and write its header.

        Raises:
            InputError: see `layout`.
            OSError: the file system failed.
        """
        self.path = path
        self.layout = layout(specs, metadata=metadata)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self.layout.tensors}
        self._lock = threading.Lock()
        self._descriptor: int | None = disk.create(path)
        try:
            with disk.naming(path):
                disk.pwrite_all(self._descriptor, self.layout.header, 0)
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> Self:
        """The writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file, or remove it when the block failed."""
        if error is None:
            self.close()
        else:
            self.abandon()

    def write(
        self, name: str, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0
    ) -> None:
        """Write a piece of a tensor; every thread may, in any order.

        Args:
            name: name of the tensor.
            data: contiguous elements of any type.
            offset_bytes: begin of the piece in the tensor.

        Raises:
            InputError: the piece reaches beyond the tensor, or `name` is not in the file.
            OSError: the file system failed.
        """
        info = self.layout.tensors.get(name)
        view = disk.flat(data)
        end = offset_bytes + view.nbytes
        if info is None or offset_bytes < 0 or end > info.nbytes or self._descriptor is None:
            size = "not in the file" if info is None else f"{info.nbytes} bytes"
            raise InputError(
                f"{self.path}: {name} is {size}, {offset_bytes}..{end} was to be written",
                "report this",
            )
        if view.nbytes:
            # one at a time: threads that write to one file at once spin in the system
            with self._lock, disk.naming(self.path):
                disk.pwrite_all(self._descriptor, view, info.offset + offset_bytes)
                self._written[name].append((offset_bytes, end))

    def close(self) -> None:
        """Check that every byte of every tensor was written exactly once, and wait for the disk.

        Raises:
            InputError: a tensor has a gap or an overlap; the message names it, and the file is
                removed.
            OSError: the file system failed; the file is removed.
        """
        try:
            self._check_filled()
            if self._descriptor is not None:
                with disk.naming(self.path):
                    os.fsync(self._descriptor)
        except BaseException:
            self.abandon()
            raise
        self._release()

    def abandon(self) -> None:
        """Remove the file."""
        self._release()
        with suppress(OSError):  # the fault that led here is the one to report
            disk.remove(self.path)

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _check_filled(self) -> None:
        for name, pieces in self._written.items():
            size = self.layout.tensors[name].nbytes
            position = 0
            total = sum(end - begin for begin, end in pieces)
            for begin, end in sorted(pieces):
                if begin != position:
                    break
                position = end
            if position != size or total != size:
                raise InputError(
                    f"{self.path}: {name} has {size} bytes, {len(pieces)} pieces of {total} bytes "
                    "do not fill it exactly",
                    "this is a defect in quantflow; report it",
                )
