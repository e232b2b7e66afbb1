"""An artifact that is opened once: what was hashed is what is read, whatever happens to its folder.

A check by name and a use by name are two things: in between another process can give the name to
another file, or write into the file. So every file is read once, through one descriptor, and hashed
while it is read:

1. Small files (config.json, the tokenizer, the index) are copied into a private folder. They are
   read there.
2. Of a weight file the header is copied alone; the rest of the copy is a hole, so that a reader
   which does not know about any of this finds zeros and never another's weights. The descriptor
   stays open. The state of sha256 is kept at every block, and a block that is read later has to
   lead from its state to the next one: no other block does.

Hashing twice costs what it cost when the signature and the manifest were checked one after the
other, and the disk is read once less.
"""

import fcntl
import hashlib
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantflow.errors import InputError, IntegrityError, QuantflowError
from quantflow.files import disk
from quantflow.files.folder import list_files, reading, refuse_small_pointer
from quantflow.files.manifest import MANIFEST_NAME, UNHASHED, read_manifest
from quantflow.files.origin import is_snapshot

if TYPE_CHECKING:
    from hashlib import _Hash

BLOCK = 1 << 16  # bytes between two states, doubled until a file has STATES at most
STATES = 1 << 14  # of some 300 bytes each
MAX_COPIED = 256 << 20  # bytes of a file that is copied; no reader takes more of one
WEIGHTS = ".safetensors"
_LENGTH = 8  # bytes of a weight file that say how long its header is
_PREFIX = "quantflow-signed-"
_SETTLED = 60  # seconds after which a private folder is held, or left over
_CHANGED = "let nobody else write to the folder, and load it again"


class SealedFile:
    """A file whose bytes are compared, when they are read, with those that were hashed."""

    def __init__(
        self, path: Path, descriptor: int, states: "list[_Hash]", *, nbytes: int, block: int
    ) -> None:
        """Take over a descriptor.

        Args:
            path: path of the file, for messages.
            descriptor: descriptor that the file was hashed through; closed with this object.
            states: sha256 of the bytes before each block, and of the whole file.
            nbytes: bytes of the file.
            block: bytes of a block; the last one may have fewer.
        """
        self.path, self.nbytes, self.block = path, nbytes, block
        self._descriptor, self._states = descriptor, states
        self._kept = (-1, b"")  # the last block of which a part was wanted
        weakref.finalize(self, os.close, descriptor)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` of the file; safe to use from several threads.

        Raises:
            IntegrityError: the bytes are not those that were hashed.
        """
        while view:
            index, inside = divmod(offset, self.block)
            size = min(self.block, self.nbytes - index * self.block)
            taken = min(size - inside, len(view))
            if taken == size:
                self._read_block(index, view[:size])
            else:
                view[:taken] = self._whole(index, size)[inside : inside + taken]
            view, offset = view[taken:], offset + taken

    def _whole(self, index: int, size: int) -> bytes:
        """A block of which a part is wanted; small tensors beside each other share it."""
        kept, content = self._kept
        if kept != index:
            block = bytearray(size)
            self._read_block(index, memoryview(block))
            content = bytes(block)
            self._kept = (index, content)
        return content

    def _read_block(self, index: int, view: memoryview) -> None:
        """Read a whole block, and compare it."""
        begin = index * self.block
        read = _fill(self._descriptor, view, begin)
        state = self._states[index].copy()
        state.update(view)
        if read < len(view) or state.digest() != self._states[index + 1].digest():
            raise IntegrityError(
                f"{self.path}: bytes {begin} to {begin + len(view)} are not those that were hashed "
                "when the signature was checked",
                _CHANGED,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class SealedFolder:
    """An artifact's folder as it was when it was opened.

    Attributes:
        folder: the folder itself, for messages.
        place: private folder with the copies; removed with this object.
        digests: file -> sha256; of the manifest, of each file that it names, and of those that it
            may leave out.
        files: weight file -> its bytes.
        manifest: content of quantflow.json.
    """

    folder: Path
    place: Path
    digests: Mapping[str, str]
    files: Mapping[str, SealedFile]
    manifest: dict[str, Any]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say the folder's own name in errors of the block, in place of the private one's."""
        with _named(self.folder, self.place):
            yield


def seal(folder: Path) -> SealedFolder:
    """Read and hash every file of an artifact once.

    The hashes say nothing yet: the caller compares them with the manifest and with a signature.

    Raises:
        InputError: the folder or its manifest is missing; or the private folder would stand where
            others can exchange it.
        IntegrityError: a file has another size than the manifest says, or is missing or not in it.
        UnsupportedError: the manifest has a newer layout version.
    """
    place = Path(tempfile.mkdtemp(prefix=_PREFIX))
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # as long as this process lives
        _remove_leftovers(place.parent)
        if (where := disk.replaceable(place)) is not None:
            raise InputError(
                f"{place}: copies of signed files would stand there, and others may write to "
                f"{where}",
                "set TMPDIR to a folder of your own",
            )
        if not (folder / MANIFEST_NAME).exists():
            read_manifest(folder)  # says so
        with _named(folder, place):
            first, _ = _copied(folder / MANIFEST_NAME, place / MANIFEST_NAME, nbytes=None)
            manifest = read_manifest(place)
        recorded = manifest["files"]
        names = [name for name in require_same_names(folder, recorded) if name != MANIFEST_NAME]
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)

        def copied(name: str) -> "tuple[str, SealedFile | None]":
            nbytes = recorded[name]["bytes"] if name in recorded else None
            return _copied(folder / name, place / name, nbytes=nbytes)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = dict(zip(names, pool.map(copied, names), strict=True))
    except BaseException:
        _remove(place, held, os.getpid())
        raise
    sealed = SealedFolder(
        folder=folder,
        place=place,
        digests={MANIFEST_NAME: first} | {name: digest for name, (digest, _) in found.items()},
        files={name: file for name, (_, file) in found.items() if file is not None},
        manifest=manifest,
    )
    weakref.finalize(sealed, _remove, place, held, os.getpid())
    return sealed


def _remove(place: Path, held: int, process: int) -> None:
    """Remove a private folder, in the process that made it."""
    if process == os.getpid():
        disk.remove_tree(place)
    os.close(held)


def _remove_leftovers(folder: Path) -> None:
    """Remove the private folders of this user's processes that were killed: nobody holds those."""
    for place in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # one that ends meanwhile removes its own
            status = place.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SETTLED:
                continue
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                disk.remove_tree(place)
            finally:
                os.close(descriptor)


def require_same_names(folder: Path, recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of an artifact's folder, which are those of its manifest.

    Raises:
        IntegrityError: a file is missing, was added, or is a link out of the hub's cache.
        InputError: the folder cannot be read.
    """
    listing = list_files(folder, follow_links=is_snapshot(folder))
    if listing.others:
        raise IntegrityError(
            f"{listing.others[0]}: a link or special file", "put the file itself there (`cp -rL`)"
        )
    for name in sorted(recorded.keys() - set(listing.files)):
        raise IntegrityError(
            f"{name}: recorded in {MANIFEST_NAME}, missing in the folder",
            "copy or export the artifact again",
        )
    for name in sorted(set(listing.files) - recorded.keys() - UNHASHED):
        raise IntegrityError(f"{name}: in the folder, not recorded in {MANIFEST_NAME}", "remove it")
    return listing.files


def _copied(source: Path, target: Path, *, nbytes: int | None) -> "tuple[str, SealedFile | None]":
    """Hash a file and copy what of it is read by name: (sha256, its bytes where it holds weights).

    Args:
        source: path of the file.
        target: path of the copy, which does not exist.
        nbytes: bytes that it has to have; None takes any.

    Raises:
        IntegrityError: it has another size, or ends early.
        InputError: it cannot be read.
    """
    weights = source.suffix == WEIGHTS
    digest = hashlib.sha256()
    states: list[_Hash] = []
    with reading(source) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        step = block_of(size)
        memory = memoryview(bytearray(step))
        if nbytes is not None and size != nbytes:
            try:
                refuse_small_pointer(source)
            except InputError as pointer:
                raise IntegrityError(f"{source.name}: {pointer.cause}", pointer.remedy) from pointer
            raise IntegrityError(
                f"{source.name}: {size} bytes, {MANIFEST_NAME} records {nbytes}",
                "copy or export the artifact again",
            )
        kept = 0 if size > MAX_COPIED else size
        writer = disk.create(target)
        try:
            for start in range(0, size, step):
                block = memory[: min(step, size - start)]
                if _fill(descriptor, block, start) < len(block):
                    raise IntegrityError(
                        f"{source}: ends before byte {start + len(block)}, and had {size} bytes",
                        _CHANGED,
                    )
                if weights and start == 0:
                    length = int.from_bytes(block[:_LENGTH], "little")
                    kept = _LENGTH + length if length <= MAX_COPIED else 0
                states.append(digest.copy())
                digest.update(block)
                if start < kept:
                    disk.write_all(writer, block[: kept - start])
            os.ftruncate(writer, size)
        finally:
            os.close(writer)
        states.append(digest)
        if not weights:
            return digest.hexdigest(), None
        held = os.dup(descriptor)
        return digest.hexdigest(), SealedFile(source, held, states, nbytes=size, block=step)


def block_of(nbytes: int) -> int:
    """Bytes of a block of a file: few for tensors that are small, more where states are many."""
    block = BLOCK
    while nbytes > block * STATES:
        block *= 2
    return block


def _fill(descriptor: int, view: memoryview, offset: int) -> int:
    """Read until `view` is full or the file ends; the number of bytes."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@contextmanager
def _named(folder: Path, place: Path) -> Iterator[None]:
    try:
        yield
    except QuantflowError as error:
        if str(place) not in error.cause:
            raise
        raise type(error)(error.cause.replace(str(place), str(folder)), error.remedy) from error
