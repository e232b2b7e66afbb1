"""C sources of this package, compiled for the machine they run on when they are first used.

A library is compiled once, kept in a cache folder under the hash of all that it depends on
(sources, compiler, flags, CPU), and carries the hash of its own bytes at its end, which is checked
before it is loaded: a damaged one is compiled again. Processes that need it at once each compile
their own, and the last renames over the others. It shares torch's OpenMP runtime, so
`torch.set_num_threads` says how many threads it takes.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# loads torch's OpenMP runtime, which the library then shares instead of bringing another
from torch import Tensor

from quantflow.errors import UnsupportedError
from quantflow.files.disk import writable_by_others

_FLAGS = (
    "-march=native",
    "-std=gnu11",
    "-fopenmp",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-Werror=vla",
)
_FAST = ("-O3",)
_CHECKED = (
    "-O1",
    "-g",
    "-DQUANTFLOW_CHECK",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
_COMPILERS = ("gcc", "cc")
_CPU_FIELDS = ("model name", "flags", "microcode")
_DIGEST_BYTES = hashlib.sha256().digest_size
_FOLDER = "set QUANTFLOW_CACHE to a folder of your own that can be written"


def library(source: Path) -> ctypes.CDLL:
    """Return the library of a C source, compiled if the cache does not hold it; one per process.

    The compiler is the environment's CC, else gcc. The cache is QUANTFLOW_CACHE, else quantflow/ in
    XDG_CACHE_HOME or ~/.cache. QUANTFLOW_NATIVE=checked makes a debug build, which looks at its
    arguments and runs under AddressSanitizer and UBSan; the process needs the compiler's libasan.so
    in LD_PRELOAD then.

    Raises:
        UnsupportedError: no compiler, one that fails, or a cache folder that cannot be used.
    """
    found = _attempt(source)
    if isinstance(found, UnsupportedError):
        raise found
    return found


def why_not(source: Path, *, needs: tuple[str, ...]) -> str | None:
    """Return why the library of a C source cannot be had here, in a sentence, or None when it can.

    Args:
        source: compiled if need be.
        needs: instruction sets by the kernel's names, such as `avx2`.
    """
    for name in needs:
        if name not in _cpu().get("flags", "").split():
            return f"this CPU has no {name}"
    outcome = _attempt(source)
    return str(outcome) if isinstance(outcome, UnsupportedError) else None


def address(tensor: Tensor | None) -> int | None:
    """Return where the elements of a contiguous CPU tensor begin, as a C function takes it; None for NULL."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _attempt(source: Path) -> ctypes.CDLL | UnsupportedError:
    """Return the library or why there is none: a compiler that failed is not asked again for every linear."""
    try:
        return _load(source)
    except UnsupportedError as error:
        return error


def _load(source: Path) -> ctypes.CDLL:
    compiler, machine = _compiler(), "\n".join(_cpu().get(field, "") for field in _CPU_FIELDS)
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*texts, _identity(compiler), " ".join(_flags()).encode(), machine.encode())
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    path = _cache_folder() / f"{source.stem}-{key[:32]}.so"
    try:
        if not _intact(path):
            _build(source, compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path}: {error.strerror or error}", _FOLDER) from error


def _build(source: Path, compiler: str, path: Path) -> None:
    """Compile `source` beside `path`, add its hash, and rename it there.

    Raises:
        UnsupportedError: the compiler fails, or its result belongs to a folder that others may
            write to.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        command = [compiler, *_flags(), "-o", str(library), str(source), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            said = next(
                (line for line in result.stderr.splitlines() if "error" in line),
                result.stderr.strip()[:200],
            )
            cause = f"{source.name}: {compiler} exits {result.returncode}: {said}"
            raise UnsupportedError(cause, "set CC to a gcc of version 11 or later")
        body = library.read_bytes()
        # the loader reads what the headers name, not the end
        library.write_bytes(body + hashlib.sha256(body).digest())
        library.replace(path)


def _flags() -> tuple[str, ...]:
    """Return the compiler's flags: fast code, or code that is checked."""
    return (*_FLAGS, *(_CHECKED if os.environ.get("QUANTFLOW_NATIVE") == "checked" else _FAST))


def _intact(path: Path) -> bool:
    """Return whether the library is there and ends in its own hash: loading a truncated one would kill the process."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compiler() -> str:
    """Return the compiler's path.

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
    """Return what tells a compiler from its other versions, without running it."""
    status = os.stat(compiler)
    return f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns}".encode()


@functools.cache
def _cpu() -> dict[str, str]:
    """Return what the kernel tells of the first CPU; -march=native looks at some of it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cache_folder() -> Path:
    """Return the folder of compiled libraries, made if need be.

    Raises:
        UnsupportedError: it cannot be made, others may write to it, or the user has no home.
    """
    named, shared = os.environ.get("QUANTFLOW_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(named or Path(shared or Path.home() / ".cache") / "quantflow")
    except RuntimeError as error:  # a container's user of a number that /etc/passwd lacks
        raise UnsupportedError(
            f"compiled kernels: HOME is not set and user {os.getuid()} has no home folder", _FOLDER
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = writable_by_others(folder)
    except OSError as error:
        raise UnsupportedError(f"{folder}: {error.strerror or error}", _FOLDER) from error
    if others:
        raise UnsupportedError(
            f"{folder}: others may write code to it that this process would run", _FOLDER
        )
    return folder
