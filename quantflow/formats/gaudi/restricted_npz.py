"""Gaudi's npz files without unpickling: a reader of tables, lists, numbers, text and arrays alone.

Such a file is a zip with one member, `arr_0.npy`: a zero-dimensional object array, that is, a
pickled dictionary of arrays. A pickle is a program for a small machine that may call any Python
function. Here the machine gets six names, none of which is numpy's or codecs' own: each stands for
a few lines of this file that take plain data apart. A pickle that asks for anything else is refused
before anything was called.

The writer emits opcode by opcode, so that equal content has equal bytes whatever the versions of
Python and numpy are. The old spelling `numpy.core` loads in all of them.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantflow.errors import InputError
from quantflow.files.folder import reading
from quantflow.files.pickle_steps import scan

MEMBER = "arr_0.npy"
MAX_BYTES = 1 << 30
MAX_VALUES = 10_000_000
MAX_DIRECTORY = 1 << 16  # bytes of a zip's list of files, which has one
_KINDS = "fiub"  # floats, integers, booleans
# of a zip: signature, disk, disk, entries, entries, bytes of the list, offset, comment
_END = struct.Struct("<4s4H2LH")
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError),
    # names that are not UTF-8, numbers that are none
    *(ValueError, struct.error, OverflowError, MemoryError),
)
_REMEDY = "give the file as Gaudi's toolkit wrote it, from a source that you trust"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


class _Refused(Exception):
    """A request of a pickle that is not granted."""


class _Dtype:
    """Stand-in for numpy.dtype.

    Its call is `dtype('f4', False, True)`, its state (3, '<', None, None, None, -1, -1, 0).
    """

    def __init__(self, code: object, *_flags: object) -> None:
        self.code = code
        self.order = "="

    def __setstate__(self, state: object) -> None:
        if (
            not isinstance(state, tuple)
            or len(state) < 5
            or state[1] not in ("<", ">", "|", "=")
            or any(state[2:5])
        ):
            raise _Refused(f"a dtype with the state {state!r}")
        self.order = state[1]

    def resolve(self) -> np.dtype[Any] | None:
        """The dtype; None for objects."""
        if not isinstance(self.code, str):
            raise _Refused(f"the dtype {self.code!r}")
        if self.code in ("O", "O8"):
            return None
        if self.code[:1] not in _KINDS or not self.code[1:].isdecimal():
            raise _Refused(f"the dtype {self.code!r}")
        try:
            return np.dtype(self.code).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]
        except TypeError as error:
            raise _Refused(f"the dtype {self.code!r}") from error


class _Array:
    """Stand-in for numpy.ndarray: (1, shape, dtype, column-major, bytes or list of objects)."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[1], tuple):
            raise _Refused("an array with a state that is none")
        self.state = state

    def resolve(self, resolved: Callable[[Any], Any]) -> Any:
        """The array; of a zero-dimensional object array its one object, `resolved`."""
        if not self.state:
            raise _Refused("an array without content")
        _, shape, dtype, column_major, data = self.state
        kind = dtype.resolve() if isinstance(dtype, _Dtype) else _Array
        if kind is None and shape == () and isinstance(data, list) and len(data) == 1:
            return resolved(data[0])
        numbers = (
            isinstance(kind, np.dtype)
            and isinstance(data, bytes)
            and all(type(size) is int for size in shape)
        )
        if not numbers or len(shape) > 8 or any(size < 0 for size in shape):
            raise _Refused(f"an array of shape {shape!r} that holds no numbers")
        try:
            array = np.frombuffer(data, dtype=kind).reshape(
                shape, order="F" if column_major else "C"
            )
        except ValueError as error:
            raise _Refused(f"an array of shape {shape!r} with {len(data)} bytes") from error
        # a copy of its own, in this machine's order
        return array.astype(array.dtype.newbyteorder("="))


class _Call:
    """Stand-in for a function; a pickle can call it, and cannot change it."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: object) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _Refused(f"a change of {self.function.__name__.strip('_')}")


def _reconstruct(kind: object, *_ignored: object) -> _Array:
    if not isinstance(kind, _Call) or kind.function is not _ndarray:
        raise _Refused("an array of a class that is not ndarray")
    return _Array()


def _ndarray(*_arguments: object) -> None:
    raise _Refused("a call of ndarray")


def _scalar(dtype: object, data: object) -> _Array:
    array = _Array()
    array.state = (1, (), dtype, False, data)
    return array


def _encode(text: object, codec: object) -> bytes:
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise _Refused(f"text encoded as {codec!r}")
    return text.encode("latin-1")


def _stand_in(module: str, name: str) -> Callable[..., Any] | None:
    """Stand-in for a global of a pickle; None for a name that is refused.

    The two spellings are numpy's before and since release 2.
    """
    stand_ins: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.multiarray", "scalar"): _scalar,
        ("numpy", "ndarray"): _ndarray,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }
    spelled = {
        "numpy.core.multiarray": "numpy.multiarray",
        "numpy._core.multiarray": "numpy.multiarray",
    }
    return stand_ins.get((spelled.get(module, module), name))


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Stand-in for a global, or a refusal; nothing is imported."""
        function = _stand_in(module, name)
        if function is None:
            raise _Refused(f"the name {module}.{name}")
        return _Call(function)

    def persistent_load(self, pid: object) -> Any:
        """Refuse references to things outside the file."""
        raise _Refused(f"a reference to {pid!r}")


class _Resolver:
    """Replaces every stand-in by its value; nothing but plain data and arrays is left."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def __call__(self, value: Any) -> Any:
        self.left -= 1
        if self.left < 0:  # a few shared lists can stand for more values than memory holds
            raise _Refused(f"more than {MAX_VALUES} values")
        match value:
            case _Array():
                return value.resolve(self)
            case dict():
                return {self(key): self(item) for key, item in value.items()}
            case list() | tuple():
                return [self(item) for item in value]
            case None | str() | int() | float():
                return value
        raise _Refused(f"a value of type {type(value).__name__.strip('_')}")


def loads(data: bytes, *, name: str) -> Any:
    """The plain data that a pickle holds.

    Args:
        data: the pickle.
        name: name of the file, for messages.

    Raises:
        InputError: the pickle asks for anything but plain data and arrays, or is none.
    """
    try:
        scan(data, _Refused)
        return _Resolver()(_Restricted(io.BytesIO(data)).load())
    except _Refused as error:
        raise InputError(
            f"{name}: the pickle asks for {error}; nothing of it was run", _REMEDY
        ) from error
    except Exception as error:  # a damaged pickle fails in any way that its opcodes can
        raise InputError(
            f"{name}: no pickle of plain data ({type(error).__name__}: {error})", _REMEDY
        ) from error


def read_npz(path: Path) -> Any:
    """The dictionary in a file of Gaudi's toolkit.

    Raises:
        InputError: the file cannot be read, is no such archive, or its pickle is refused.
    """
    with reading(path) as file:
        _refuse_directory(file, path)
        try:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                size = archive.getinfo(MEMBER).file_size if names == [MEMBER] else 0
                if names != [MEMBER] or size > MAX_BYTES:
                    raise InputError(
                        f"{path}: holds {names[:4]}, one {MEMBER} of at most 1 GiB is expected",
                        _REMEDY,
                    )
                if archive.getinfo(MEMBER).compress_type not in (
                    zipfile.ZIP_STORED,
                    zipfile.ZIP_DEFLATED,
                ):
                    raise InputError(
                        f"{path}: {MEMBER} is compressed in a way that numpy does not write",
                        _REMEDY,
                    )
                with archive.open(MEMBER) as member:
                    # without a number all is unpacked, whatever size the file gives
                    data = member.read(size)
        except _ZIP_ERRORS as error:
            raise InputError(f"{path}: not a whole npz file ({error})", _REMEDY) from error
    stream = io.BytesIO(data)
    try:
        layout: Any = np.lib.format
        readers = {(1, 0): layout.read_array_header_1_0, (2, 0): layout.read_array_header_2_0}
        shape, _, dtype = readers[layout.read_magic(stream)](stream)
    # numpy evaluates the header, which fails in any way that Python text can
    except Exception as error:
        raise InputError(f"{path}: {MEMBER} is no array ({error})", _REMEDY) from error
    if shape != () or dtype != np.dtype(object):
        raise InputError(f"{path}: {MEMBER} is {dtype} {list(shape)}, a table is expected", _REMEDY)
    return loads(stream.read(), name=str(path))


def _refuse_directory(file: BinaryIO, path: Path) -> None:
    """Refuse a zip whose list of files is longer than that of one file: it would be read whole.

    Raises:
        InputError: the file ends with no such list, or with a longer one.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read(_END.size)
    file.seek(0)
    if len(end) < _END.size or not end.startswith(b"PK\x05\x06"):
        raise InputError(f"{path}: not a whole npz file (its end is missing)", _REMEDY)
    _, _, _, entries, total, nbytes, _, _ = _END.unpack(end)
    if (entries, total) != (1, 1) or nbytes > MAX_DIRECTORY:
        raise InputError(f"{path}: holds {total} files, one {MEMBER} is expected", _REMEDY)


def npz_bytes(table: Mapping[str, Any]) -> bytes:
    """The file that `numpy.load(..., allow_pickle=True)["arr_0"].item()` reads as `table`.

    Equal tables have equal bytes.

    Args:
        table: dictionaries with text or whole numbers as keys, lists, None, booleans, numbers, text
            and arrays of numbers.

    Raises:
        TypeError: the table holds something else.
    """
    text = "{'descr': '|O', 'fortran_order': False, 'shape': (), }"
    header = text + " " * (-(len(text) + 11) % 64) + "\n"  # magic, version and length take 10 bytes
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + dumps(table)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(MEMBER, date_time=_EPOCH)
        info.create_system, info.external_attr = 3, 0o644 << 16
        archive.writestr(info, npy)
    return buffer.getvalue()


def dumps(value: Any) -> bytes:
    """The pickle (protocol 3) of a zero-dimensional object array that holds `value`."""
    state = (
        b"("
        + _emit(1)
        + b")"
        + _dtype("O8", "|", 63)
        + b"\x89"
        + b"]("
        + _emit(value)
        + b"e"
        + b"t"
    )
    return b"\x80\x03" + _RECONSTRUCT + state + b"b."


_RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"


def _dtype(code: str, order: str, flags: int) -> bytes:
    """Opcodes of a dtype: the call, and the state that sets its byte order."""
    state = b"(" + _emit(3) + _emit(order) + b"NNN" + _emit(-1) + _emit(-1) + _emit(flags) + b"t"
    return b"cnumpy\ndtype\n" + _emit(code) + b"\x89\x88\x87R" + state + b"b"


def _emit(value: Any) -> bytes:
    """Opcodes that push one value."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case list() | tuple():
            return b"](" + b"".join(map(_emit, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_emit(key) + _emit(item) for key, item in value.items()) + b"u"
        case np.ndarray() if value.dtype.kind in _KINDS:
            data = value.astype(value.dtype.newbyteorder("<")).tobytes()
            shape = b"(" + b"".join(map(_emit, value.shape)) + b"t"
            order = "|" if value.dtype.itemsize == 1 else "<"
            kind = _dtype(value.dtype.str[1:], order, 0)
            content = b"B" + struct.pack("<I", len(data)) + data
            return _RECONSTRUCT + b"(" + _emit(1) + shape + kind + b"\x89" + content + b"tb"
    raise TypeError(f"{type(value).__name__} is not what measurement files hold")
