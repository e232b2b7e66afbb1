"""What loading an artifact makes of its weights, kept beside it in one file, so that loading it again is reading alone.

    16 bytes       the name of the layout
    8 bytes        length of the header, little-endian
    header         JSON: {"sha256": of the data, "entries": {name: [[dtype, shape, offset into the data] or null, ...]}}
    data           from the next multiple of 64 bytes on; every tensor begins at one

The file is named after the hash of everything that decides what is in it: the artifact's digest, the dtype, the kernels, the
code that lays the weights out. It is never changed; another artifact or another version makes another file.
"""

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import IntegrityError

Parts = tuple[Tensor | None, ...]
_LAYOUT = b"quantflow pack 1"
_ALIGNED = 64  # bytes, a line of the cache
_READERS = 2  # threads


class Pack:
    """The file of one artifact, and what is to be put into it.

    Attributes:
        path: of the file.
        complete: it was read; nothing has to be made.
    """

    def __init__(self, path: Path, *, verify: bool) -> None:
        """Read the file, if it is there, into memory of its own.

        Raises:
            IntegrityError: `verify`, and its data is not what was written.
        """
        self.path = path
        self._parts: dict[str, Parts] = {}
        self.complete = path.is_file()
        if self.complete:
            self._parts = _read(path, verify=verify)

    def __contains__(self, name: str) -> bool:
        """Return whether there is something under a name."""
        return name in self._parts

    def get(self, name: str, make: Callable[[], Parts]) -> Parts:
        """Return what is kept under a name, made now if there is nothing."""
        if name not in self._parts:
            self._parts[name] = make()
        return self._parts[name]

    def save(self) -> None:
        """Write the file, unless it was read; another process that does the same renames over it."""
        if self.complete:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entries, end = {}, 0
        for name, parts in self._parts.items():
            entries[name] = [None if part is None else [str(part.dtype)[6:], list(part.shape), 0] for part in parts]
            for entry, part in zip(entries[name], parts, strict=True):
                if entry is not None and part is not None:
                    entry[2], end = end, end + _whole(part.nbytes)
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            made = Path(folder) / self.path.name
            with made.open("wb") as file:
                file.write(_header(entries, "0" * 64))
                for piece in self._pieces():
                    file.write(piece)
                    digest.update(piece)
                file.seek(0)
                file.write(_header(entries, digest.hexdigest()))
                file.flush()
                os.fsync(file.fileno())
            made.replace(self.path)

    def _pieces(self) -> Iterable[Any]:
        for parts in self._parts.values():
            for part in parts:
                if part is not None:
                    yield part.contiguous().reshape(-1).view(torch.uint8).numpy()
                    yield b"\0" * (_whole(part.nbytes) - part.nbytes)


def name_of(*inputs: object, sources: Iterable[Path]) -> str:
    """Return the name of the file for what decides it: values, by how they print, and the sources of the code."""
    digest = hashlib.sha256(json.dumps([str(value) for value in inputs]).encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return f"{digest.hexdigest()[:32]}.pack"


def _header(entries: dict[str, Any], digest: str) -> bytes:
    text = json.dumps({"sha256": digest, "entries": entries}).encode()
    head = _LAYOUT + len(text).to_bytes(8, "little") + text
    return head + b" " * (_whole(len(head)) - len(head))


def _read(path: Path, *, verify: bool) -> dict[str, Parts]:
    with path.open("rb", buffering=0) as file:
        head = file.read(24)
        size = int.from_bytes(head[16:], "little")
        try:
            header = json.loads(file.read(size) if head[:16] == _LAYOUT else b"")
        except ValueError as error:
            raise IntegrityError(f"{path}: not a pack of this layout", "remove the file; it is made again") from error
        start = _whole(24 + size)
        nbytes = max(1, os.fstat(file.fileno()).st_size - start)
        memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults now, and fewer misses of the page table with every token
        _fill(file.fileno(), memoryview(memory), start)
    if verify and hashlib.sha256(memory).hexdigest() != header["sha256"]:
        raise IntegrityError(f"{path}: its data is not what was written", "remove the file; it is made again")
    data = torch.frombuffer(memory, dtype=torch.uint8)
    return {name: tuple(_tensor(data, entry) for entry in entries) for name, entries in header["entries"].items()}


def _fill(descriptor: int, memory: memoryview, start: int) -> None:
    """Read a file from byte `start` on, several parts of it at once."""
    step = _whole(-(-len(memory) // _READERS))

    def read(begin: int) -> None:
        end = min(begin + step, len(memory))
        while begin < end:
            count = os.preadv(descriptor, [memory[begin:end]], start + begin)
            if not count:
                raise IntegrityError(f"a pack ends after {start + begin} bytes", "remove the file; it is made again")
            begin += count

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, range(0, len(memory), step)))


def _tensor(data: Tensor, entry: Any) -> Tensor | None:
    if entry is None:
        return None
    dtype: torch.dtype = getattr(torch, entry[0])
    count = dtype.itemsize
    for size in entry[1]:
        count *= size
    return data[entry[2] : entry[2] + count].view(dtype).view(entry[1])


def _whole(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
