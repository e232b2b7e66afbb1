"""A file of torch.save as data: its tensors and their places, read without torch and unpickling.

Such a file is a zip whose members are not compressed: `NAME/data.pkl`, a pickled dictionary, and
`NAME/data/K`, the bytes of storage K. `NAME/byteorder`, where it exists, names their order: little;
any other is refused. The pickle calls three names, each of which stands for a few lines of this
file: `collections.OrderedDict`, `torch._utils._rebuild_tensor_v2`, and the class of a storage,
which is a dtype. A pickle that asks for anything else is refused before anything was called. The
result is a `TensorInfo` of each tensor, so that weights are read like those of a safetensors file.

The writer emits a pickle opcode by opcode, with one tensor in memory at a time. Equal content has
equal bytes.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.folder import reading
from quantflow.files.pickle_steps import scan
from quantflow.files.safetensors_header import DTYPE_BITS, TensorInfo
from quantflow.files.safetensors_writer import Spec

STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
MAX_PICKLE = 64 << 20  # bytes; a tensor takes some 150
MAX_MEMBERS = 1 << 17
_DTYPES = {storage: dtype for dtype, storage in STORAGES.items()}
_MOST = 1 << 48  # elements
_ORDER_BYTES = 16  # bytes that are read of `byteorder`, which is one word
_ALIGN = 64  # bytes: torch maps storages where they lie
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold
# head of a member: signature, ..., length of its name, length of the extra field behind it
_LOCAL = struct.Struct("<4s5H3L2H")
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError),
    # names that are not UTF-8, numbers out of range
    *(ValueError, struct.error, OverflowError, MemoryError),
)
_REMEDY = "give the file as torch.save wrote it, from a source that you trust; or download it again"


class _Refused(Exception):
    """A request of a pickle that is not granted."""


class _Storage:
    """Stand-in for a class such as torch.FloatStorage: a dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __setstate__(self, state: object) -> None:
        raise _Refused("a change of a storage's class")


class _Held:
    """Stand-in for a storage: its dtype and the number of its member."""

    __slots__ = ("dtype", "key")

    def __init__(self, dtype: str, key: str) -> None:
        self.dtype, self.key = dtype, key

    def __setstate__(self, state: object) -> None:
        raise _Refused("a change of a storage")


class _View:
    """Stand-in for a tensor: elements of a storage from `start` on."""

    __slots__ = ("shape", "start", "storage", "strides")

    def __init__(
        self, storage: _Held, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.storage, self.start, self.shape, self.strides = storage, start, shape, strides

    def __setstate__(self, state: object) -> None:
        raise _Refused("a change of a tensor")


class _Rebuild:
    """Stand-in for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> _View:
        storage, start, shape, strides = arguments[:4] if len(arguments) in (6, 7) else (None,) * 4
        if (
            not isinstance(storage, _Held)
            or not isinstance(shape, tuple)
            or not isinstance(strides, tuple)
        ):
            raise _Refused("a tensor of something else than a storage, a shape and strides")
        numbers = (start, *shape, *strides)
        if (
            len(shape) != len(strides)
            or len(shape) > 8
            or any(type(size) is not int or not 0 <= size < _MOST for size in numbers)
        ):
            raise _Refused(f"a tensor of shape {shape!r}")
        assert isinstance(start, int)
        return _View(storage, start, shape, strides)

    def __setstate__(self, state: object) -> None:
        raise _Refused("a change of a function")


class _Table(dict[Any, Any]):
    """Stand-in for collections.OrderedDict; a module's state beside its tensors is ignored."""

    def __init__(self, *items: object) -> None:
        if items:
            raise _Refused("a table that is made from something")
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global, which is refused where there is none; nothing is imported."""
        if (module, name) == ("collections", "OrderedDict"):
            return _Table
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _DTYPES:
            return _Storage(_DTYPES[name])
        raise _Refused(f"the name {module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        """The storage of a member."""
        if (
            not isinstance(pid, tuple)
            or len(pid) != 5
            or pid[0] != "storage"
            or not isinstance(pid[1], _Storage)
        ):
            raise _Refused(f"a reference to {str(pid)[:80]}")
        return _Held(pid[1].dtype, str(pid[2]))


def read_torch_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name.

    Raises:
        InputError: the file cannot be read, is no such zip or compressed, its pickle asks for more
            than tensors, or a tensor reaches beyond its storage; the message names the tensor.
        UnsupportedError: its numbers are not little-endian.
    """
    with reading(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = {info.filename: info for info in archive.infolist()[: MAX_MEMBERS + 1]}
                pickles = [name for name in members if name.endswith("/data.pkl")]
                if (
                    len(pickles) != 1
                    or len(members) > MAX_MEMBERS
                    or members[pickles[0]].file_size > MAX_PICKLE
                ):
                    raise InputError(
                        f"{path}: {len(members)} members, {len(pickles)} of them data.pkl; one "
                        "is expected",
                        _REMEDY,
                    )
                packed = [
                    name
                    for name, info in members.items()
                    if info.compress_type != zipfile.ZIP_STORED
                ]
                if packed:
                    raise InputError(
                        f"{path}: {packed[0]} is compressed, torch.save compresses nothing", _REMEDY
                    )
                with archive.open(pickles[0]) as member:
                    # read(n) stops at n bytes; without n a member may be larger than it declares
                    data = member.read(members[pickles[0]].file_size)
                root = pickles[0].removesuffix("data.pkl")
                if (order := members.get(f"{root}byteorder")) is not None:
                    with archive.open(order) as member:
                        _require_little(member.read(_ORDER_BYTES), path=path)
                table = _loads(data, path=path)
            infos = {}
            for name, value in table.items():
                if not isinstance(name, str) or not isinstance(value, _View):
                    raise InputError(
                        f"{path}: {str(name)[:80]!r} is {type(value).__name__}, a tensor is "
                        "expected",
                        _REMEDY,
                    )
                infos[name] = _info(
                    name,
                    value,
                    members.get(f"{root}data/{value.storage.key}"),
                    file=file,
                    path=path,
                )
        except _ZIP_ERRORS as error:
            raise InputError(
                f"{path}: not a whole file of torch.save ({error})", _REMEDY
            ) from error
    return infos


def _require_little(order: bytes, *, path: Path) -> None:
    if order != b"little":
        cause = (
            f"{path}: byteorder is {order.decode(errors='replace')!r}, little-endian files are read"
        )
        raise UnsupportedError(cause, "save it with torch on a little-endian machine")


def _loads(data: bytes, *, path: Path) -> dict[Any, Any]:
    try:
        scan(data, _Refused)
        table = _Restricted(io.BytesIO(data)).load()
    except _Refused as error:
        raise InputError(
            f"{path}: the pickle asks for {error}; nothing of it was run", _REMEDY
        ) from error
    except Exception as error:  # a damaged pickle fails in any way that its opcodes can
        raise InputError(
            f"{path}: no pickle of tensors ({type(error).__name__}: {error})", _REMEDY
        ) from error
    if not isinstance(table, dict):
        raise InputError(
            f"{path}: holds {type(table).__name__}, a table of tensors is expected", _REMEDY
        )
    return table


def _info(
    name: str, view: _View, member: zipfile.ZipInfo | None, *, file: BinaryIO, path: Path
) -> TensorInfo:
    if member is None:
        raise InputError(f"{name}: {path} has no storage {view.storage.key[:40]}", _REMEDY)
    file.seek(member.header_offset)
    *_, name_bytes, extra_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
    itemsize = DTYPE_BITS[view.storage.dtype] // 8
    elements, dense = 1, []
    for size in reversed(view.shape):
        dense.append(elements)
        elements *= size
    plain = not elements or all(
        size == 1 or stride == own
        for size, stride, own in zip(view.shape, view.strides, reversed(dense), strict=True)
    )
    reach = view.start + (
        1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    )
    if elements and reach * itemsize > member.file_size:
        raise InputError(
            f"{name}: {list(view.shape)} of {view.storage.dtype} ends after {reach * itemsize} "
            f"bytes, its storage in {path} has {member.file_size}",
            _REMEDY,
        )
    return TensorInfo(
        name=name,
        dtype=view.storage.dtype,
        shape=view.shape,
        offset=member.header_offset
        + _LOCAL.size
        + name_bytes
        + extra_bytes
        + view.start * itemsize,
        nbytes=elements * itemsize,
        strides=None if plain else view.strides,
    )


def write_torch_file(
    path: Path, specs: Mapping[str, Spec], parts: Iterable[bytes | memoryview]
) -> None:
    """Write a file that `torch.load` reads as a dictionary of tensors.

    Args:
        path: path of the file; nobody reads it yet.
        specs: tensor name -> dtype, as safetensors names it, a key of STORAGES, and shape.
        parts: bytes of each tensor, in the order of `specs`; one is taken at a time.

    Raises:
        OSError: the file system failed.
    """
    source = iter(parts)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        _write(archive, file, "data.pkl", [_pickle(specs)])
        _write(archive, file, "byteorder", [b"little"])
        for key in range(len(specs)):
            _write(archive, file, f"data/{key}", [next(source)])
        _write(archive, file, "version", [b"3\n"])


def _write(
    archive: zipfile.ZipFile, file: BinaryIO, name: str, parts: Iterable[bytes | memoryview]
) -> None:
    """Write a member whose bytes begin at a multiple of _ALIGN."""
    info = zipfile.ZipInfo(f"archive/{name}", date_time=_EPOCH)
    info.create_system, info.external_attr = 3, 0o644 << 16
    # The extra field holds 20 bytes of 64-bit sizes, then the padding with a head of 4 bytes.
    begins = file.tell() + _LOCAL.size + len(info.filename) + 20 + 4
    info.extra = struct.pack("<2sH", b"FB", -begins % _ALIGN) + bytes(-begins % _ALIGN)
    with archive.open(info, "w", force_zip64=True) as member:
        for part in parts:
            member.write(part)


def _pickle(specs: Mapping[str, Spec]) -> bytes:
    """The pickle (protocol 2) of a dictionary of tensors, each with a storage of its own."""
    steps = [b"\x80\x02}("]
    for key, (name, (dtype, shape)) in enumerate(specs.items()):
        elements, strides = 1, []
        for size in reversed(shape):
            strides.append(elements)
            elements *= size
        storage = (
            b"("
            + _text("storage")
            + f"ctorch\n{STORAGES[dtype]}\n".encode()
            + _text(str(key))
            + _text("cpu")
        )
        steps += [
            *(
                _text(name),
                b"ctorch._utils\n_rebuild_tensor_v2\n(",
                storage,
                _number(elements),
                b"tQ",
                _number(0),
            ),
            *(_numbers(shape), _numbers(reversed(strides)), b"\x89ccollections\nOrderedDict\n)RtR"),
        ]
    return b"".join([*steps, b"u."])


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _numbers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"
