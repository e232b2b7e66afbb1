"""Compiled C: the sources of this package, built for the machine they run on when first used.

A library is compiled once. It is kept in a cache folder under the hash of all that it depends on
(sources, compiler, flags, CPU). It carries the hash of its own bytes at its end, which is checked
before it is loaded: a damaged one is compiled again. So is one that another user may write to,
since whoever writes it can hash it. Of processes that need it at once, as ranks do, one compiles it
and the others wait. Sources that include team.h share their loops among the threads of team.c,
which is one library for all of them. They take as many threads as torch's OpenMP runtime, hence as
`torch.set_num_threads` says.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# loads torch's OpenMP runtime, which the library then shares instead of bringing another
from torch import Tensor

from quantflow.errors import IntegrityError, UnsupportedError
from quantflow.files import disk

_FLAGS = (
    "-march=native",
    "-std=gnu11",
    "-fopenmp",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-Werror=vla",
)
_TEAM = Path(__file__).with_name("team.c")
_FAST = ("-O3",)
_CHECKED = (
    "-O1",
    "-g",
    "-DQUANTFLOW_CHECK",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
_COMPILERS = ("gcc", "cc")
# /proc/cpuinfo's, of x86 and of ARM
_FLAG_FIELDS = ("flags", "Features")
_CPU_FIELDS = ("model name", "microcode", "CPU implementer", "CPU part", *_FLAG_FIELDS)
_DIGEST_BYTES = hashlib.sha256().digest_size
_FOLDER_MODE, _FILE_MODE = 0o700, 0o644  # whatever the umask: others write to neither
_FOLDER = "set QUANTFLOW_CACHE to a folder of your own that can be written"


def library(source: Path) -> ctypes.CDLL:
    """The library of a C source, compiled if the cache does not hold it; one per process.

    The compiler is the environment's CC, else gcc. The cache is QUANTFLOW_CACHE, else quantflow/ in
    XDG_CACHE_HOME or ~/.cache. QUANTFLOW_NATIVE=checked makes a debug build, which looks at its
    arguments and runs under AddressSanitizer and UBSan; the process needs the compiler's libasan.so
    in LD_PRELOAD then.

    Raises:
        UnsupportedError: no compiler, one that fails, or a cache folder that cannot be used.
    """
    outcome = _attempt(source)
    if isinstance(outcome, UnsupportedError):
        raise outcome
    return outcome


def why_not(source: Path, *, cpu_flags: tuple[str, ...]) -> str | None:
    """Why the library of a C source cannot be had here, in a sentence; None when it can.

    Args:
        source: C source, which is compiled if need be.
        cpu_flags: CPU flags by the kernel's names, such as `avx2`.
    """
    for name in cpu_flags:
        if not any(name in _cpu().get(field, "").split() for field in _FLAG_FIELDS):
            return f"this CPU has no {name}"
    outcome = _attempt(source)
    return str(outcome) if isinstance(outcome, UnsupportedError) else None


def address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous CPU tensor's elements, for a C function; None for NULL."""
    return None if tensor is None else tensor.data_ptr()


def function_address(function: object) -> int:
    """The address of a library's function, for a C structure."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


class _Field(ctypes.Structure):
    """`struct field` of the C sources."""

    _fields_ = [
        ("structure", ctypes.c_char_p),
        ("field", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    ]


def require_same_fields(source: Path, *structures: type[ctypes.Structure]) -> None:
    """Compare structures with those of a C source, field by field.

    ctypes knows a structure from its Python declaration alone: a field that C has at another place
    would be written into its neighbour.

    Args:
        source: C source that lists its fields in `structure_fields`.
        structures: Python's structures, called as C calls them, with an underscore before.

    Raises:
        IntegrityError: a field is at another place, or one of the two has a field more.
        UnsupportedError: the library cannot be had.
    """
    function = library(source).structure_fields
    function.restype = ctypes.POINTER(_Field)
    entries = itertools.takewhile(lambda entry: entry.structure, function())
    in_c = {(entry.structure, entry.field): (entry.offset, entry.bytes) for entry in entries}
    in_python: dict[tuple[bytes, bytes | None], tuple[int, int]] = {}
    for structure in structures:
        name = structure.__name__.removeprefix("_").encode()
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            in_python[name, field.encode()] = (place.offset, place.size)
        in_python[name, None] = (ctypes.sizeof(structure), 0)
    for key in sorted({*in_c, *in_python}, key=str):
        if in_c.get(key) != in_python.get(key):
            structure_name, field_name = (b"its end" if part is None else part for part in key)
            raise IntegrityError(
                f"{source.name}: structure {structure_name.decode()}, {field_name.decode()}: "
                f"(byte, size) is {in_c.get(key)} in C and {in_python.get(key)} in Python",
                "install quantflow again: its files are of two versions",
            )


@functools.cache
def _attempt(source: Path) -> ctypes.CDLL | UnsupportedError:
    """The library, or the error that says why there is none.

    A compiler that failed is not asked again for every linear.
    """
    try:
        return _load(source)
    except UnsupportedError as error:
        return error


def _load(source: Path) -> ctypes.CDLL:
    if b'#include "team.h"' in source.read_bytes() and source != _TEAM:
        library(_TEAM)  # the other finds its functions by their names
    compiler = _compiler()
    machine = "\n".join(_cpu().get(field, "") for field in _CPU_FIELDS)
    texts = [
        path.read_bytes()
        for path in (source, *sorted({*source.parent.glob("*.h"), *_TEAM.parent.glob("*.h")}))
    ]
    parts = (*texts, _identity(compiler), " ".join(_flags()).encode(), machine.encode())
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    path = _cache_folder() / f"{source.stem}-{key[:32]}.so"
    try:
        if not _intact(path):
            with _alone_in(path.parent):
                if not _intact(path):
                    _build(source, compiler, path)
        return ctypes.CDLL(
            str(path), mode=ctypes.RTLD_GLOBAL if source == _TEAM else ctypes.RTLD_LOCAL
        )
    except OSError as error:
        raise UnsupportedError(f"{path}: {error.strerror or error}", _FOLDER) from error


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time compile into a folder.

    Where the file system has no locks each compiles its own, and the last renames over the others.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _build(source: Path, compiler: str, path: Path) -> None:
    """Compile `source` beside `path`, add its hash, and rename it there.

    Raises:
        UnsupportedError: the compiler fails, or its result belongs to a folder that others may
            write to.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        command = [compiler, *_flags(), f"-I{_TEAM.parent}", "-o", str(library), str(source), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            message = next(
                (line for line in result.stderr.splitlines() if "error" in line),
                result.stderr.strip()[:200],
            )
            cause = f"{source.name}: {compiler} exits {result.returncode}: {message}"
            raise UnsupportedError(cause, "set CC to a gcc of version 11 or later")
        body = library.read_bytes()
        # the loader reads the parts that the ELF headers name, so bytes after them do no harm
        library.write_bytes(body + hashlib.sha256(body).digest())
        library.chmod(_FILE_MODE)
        library.replace(path)


def _flags() -> tuple[str, ...]:
    """The compiler's flags: for fast code, or for code that is checked."""
    return (*_FLAGS, *(_CHECKED if os.environ.get("QUANTFLOW_NATIVE") == "checked" else _FAST))


def _intact(path: Path) -> bool:
    """Whether the library is there, nobody else may write to it, and it ends in its own hash.

    Loading a truncated library would kill the process. The hash says nothing of who wrote it: one
    that others may write to is compiled again.
    """
    if not path.is_file() or disk.writable_by_others(path):
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compiler() -> str:
    """The compiler's path.

    Raises:
        UnsupportedError: there is none.
    """
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise UnsupportedError(
        f"no C compiler ({wanted or ', '.join(_COMPILERS)})", "install gcc, or set CC to a compiler"
    )


def _identity(compiler: str) -> bytes:
    """Bytes that tell a compiler from its other versions, without running it."""
    status = os.stat(compiler)
    return f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns}".encode()


@functools.cache
def _cpu() -> dict[str, str]:
    """The kernel's fields of the first CPU, some of which decide what -march=native makes."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cache_folder() -> Path:
    """The folder of compiled libraries, made if need be.

    Raises:
        UnsupportedError: it cannot be made, others may write to it or exchange it, or the user has
            no home.
    """
    own = os.environ.get("QUANTFLOW_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own or Path(caches or Path.home() / ".cache") / "quantflow")
    except RuntimeError as error:  # a container's user whose number is not in /etc/passwd
        raise UnsupportedError(
            f"compiled kernels: HOME is not set and user {os.getuid()} has no home folder", _FOLDER
        ) from error
    try:
        for place in (*reversed(folder.parents), folder):
            with suppress(FileExistsError):
                place.mkdir(mode=_FOLDER_MODE)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        others = folder if disk.writable_by_others(folder) else disk.replaceable(folder)
    except OSError as error:
        raise UnsupportedError(f"{folder}: {error.strerror or error}", _FOLDER) from error
    if others is not None:
        raise UnsupportedError(
            f"{others}: others may write code to it that this process would run", _FOLDER
        )
    return folder
