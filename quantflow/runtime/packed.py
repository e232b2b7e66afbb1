"""The pack: weights as loading prepares them, kept beside an artifact in one safetensors file.

Loading the artifact again is then mapping the file. It is named after the hash of everything that
decides what is in it: the artifact's digest, the dtype, the kernels, the code that lays the weights
out. It is never changed; another artifact or another version makes another file. So unlike a
checkpoint (`quantflow.models.reading`) it may be mapped: weights lie in the page cache, once for
all processes, and nothing is copied.

Its tensors are called KEY|PART. Those that fill whole lines of the CPU's cache come first, so each
of these begins at a line. The metadata has a hash of names, dtypes, shapes, and sums of the data: a
block of 32 KiB is a square of 64 x 64 words, and the sum of each row and of each column is in the
hash. So one changed word is found, and two that changed places, which one sum cannot see. The sums
take hardly longer than reading the data; sha256 of the data would take several times as long at
every load.

A pack is not signed: whoever may write it decides what the model says. A pack that others may write
to, or exchange because they may write to a folder above it, is neither read nor made.
"""

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.errors import InputError, IntegrityError
from quantflow.files import disk
from quantflow.files.folder import reading
from quantflow.files.safetensors_header import read_header
from quantflow.files.safetensors_writer import Spec, layout
from quantflow.models.reading import bytes_of

PackedTensors = dict[str, Tensor]
_LINE = 64  # bytes of a line of the cache
_SIDE = 64  # words of 8 bytes of a row and of a column of a block
_BLOCK = 8 * _SIDE**2  # bytes
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644  # whatever the umask: others read at most
_UNFINISHED = ".made-by-"  # and the number of the process
_REMEDY = "remove the file; it is made again"


class Pack:
    """The file of one artifact, and the tensors that are put into it.

    Attributes:
        path: path of the file.
        complete: whether the file was read, so that nothing has to be made.
    """

    def __init__(self, path: Path, *, verify: bool) -> None:
        """Map the file, if it is there.

        Raises:
            IntegrityError: it is damaged; its data is compared with the hash if `verify`.
            InputError: others may write to it, or exchange it.
        """
        self.path, self.complete = path, path.is_file()
        for place in (path.parent, path) if self.complete else ():
            if disk.writable_by_others(place):
                cause = f"{place}: others may write to it, and it decides what the model says"
                raise InputError(cause, f"remove {path.parent}; it is made again")
        if (above := disk.replaceable(path.parent)) is not None:
            raise InputError(
                f"{above}: others may write to it and exchange {path.parent.name}, which decides "
                "what the model says",
                "leave pack out, or move the artifact to where nobody else may write",
            )
        self._kept: dict[str, PackedTensors] = {}
        for name, tensor in (_read(path, verify=verify) if self.complete else {}).items():
            key, _, part = name.rpartition("|")
            self._kept.setdefault(key, {})[part] = tensor

    def __contains__(self, key: str) -> bool:
        """Whether something is kept under a key."""
        return key in self._kept

    def get(self, key: str, make: Callable[[], PackedTensors]) -> PackedTensors:
        """The tensors kept under a key, made now if there are none."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def save(self) -> None:
        """Write the file, unless it was read; another process that does so renames over it."""
        if self.complete:
            return
        tensors = {
            f"{key}|{part}": tensor
            for key, parts in self._kept.items()
            for part, tensor in parts.items()
        }
        order = sorted(
            tensors, key=lambda name: (tensors[name].nbytes % _LINE > 0, -tensors[name].itemsize)
        )
        specs = {name: (NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order}
        digest = _digest(specs, (bytes_of(tensors[name]) for name in order))
        header = layout(specs, metadata={"sha256": digest}, keep_order=True, align=_LINE).header
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True)
            self.path.parent.chmod(_FOLDER_MODE)
        _remove_leftovers(self.path.parent)
        with tempfile.TemporaryDirectory(
            dir=self.path.parent, prefix=f"{_UNFINISHED}{os.getpid()}-"
        ) as folder:
            temporary = Path(folder) / self.path.name
            with temporary.open("wb") as file:
                file.write(header)
                file.writelines(bytes_of(tensors[name]) for name in order)
                file.flush()
                os.fchmod(file.fileno(), _FILE_MODE)
                os.fsync(file.fileno())
            temporary.replace(self.path)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun to write: none of them is there any more."""
    for path in folder.glob(f"{_UNFINISHED}*-*"):
        number = path.name.removeprefix(_UNFINISHED).partition("-")[0]
        try:
            os.kill(int(number), 0)  # asks whether there is such a process
        except (ProcessLookupError, ValueError, OverflowError):
            disk.remove_tree(path)
        except PermissionError:  # another user's process has the number
            pass


def name_of(*inputs: object, sources: Iterable[Path]) -> str:
    """The name of the file, from the values that decide it and the sources of the code.

    Args:
        inputs: values, hashed as they print.
        sources: source files, hashed by their bytes.
    """
    digest = hashlib.sha256(json.dumps([str(value) for value in inputs]).encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return f"{digest.hexdigest()[:32]}.safetensors"


def _digest(specs: Mapping[str, Spec], data: Iterable[memoryview]) -> str:
    """The sha256 of the tensors' specs and of the int64 sums of each block of their data.

    Bytes outside of blocks are hashed themselves.
    """
    digest = hashlib.sha256(json.dumps(list(specs.items())).encode())
    for piece in data:
        if whole := 0 if len(piece) % _LINE else len(piece) // _BLOCK * _BLOCK:
            blocks = torch.frombuffer(piece[:whole], dtype=torch.int64).view(-1, _SIDE, _SIDE)
            # [blocks, 2 sides]
            digest.update(bytes_of(torch.cat([blocks.sum(1), blocks.sum(2)], dim=1)))
        digest.update(piece[whole:])
    return digest.hexdigest()


def _read(path: Path, *, verify: bool) -> dict[str, Tensor]:
    """Map every tensor."""
    try:
        infos, metadata = read_header(path)
    except InputError as error:
        raise IntegrityError(error.cause, _REMEDY) from error
    if not infos:
        raise IntegrityError(f"{path}: holds no tensor", _REMEDY)
    with reading(path) as file:
        # torch warns of one that cannot be written
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    specs = {name: (info.dtype, info.shape) for name, info in infos.items()}
    spans = {name: data[info.offset : info.offset + info.nbytes] for name, info in infos.items()}
    # A thread touches every 16th page, which maps 16 of them, while the interpreter goes on; the
    # sums below do the same.
    if not verify:
        ThreadPoolExecutor(1).submit(lambda: data[:: 16 * mmap.PAGESIZE].sum())
    elif _digest(specs, map(bytes_of, spans.values())) != metadata.get("sha256"):
        raise IntegrityError(f"{path}: its data is not what was written", _REMEDY)
    return {
        name: span.view(DTYPES[infos[name].dtype]).view(infos[name].shape)
        for name, span in spans.items()
    }
