"""The GGUF file, version 3: what llama.cpp reads.

One file, little-endian: a header, then the tensors' bytes.

| part      | content                                                                              |
|-----------|--------------------------------------------------------------------------------------|
| 4 bytes   | the letters GGUF                                                                     |
| u32       | version, 3                                                                           |
| u64, u64  | number of tensors, number of metadata fields                                         |
| a field   | name, u32 kind, value                                                                |
| a tensor  | name, u32 number of dimensions, u64 each (the fastest first), u32 type,              |
|           | u64 offset from the beginning of the data                                            |
| data      | each tensor at a multiple of 32 bytes, in the order of the header, without gaps; the |
|           | file ends at such a multiple too                                                     |

A string is u64 length and UTF-8. An array is u32 kind, u64 count, items. Metadata is name -> (kind,
value), a kind of `KINDS`, in brackets for an array: `("u32", 7)`, `("[string]", ["a", "b"])`.
Tensors of plain numbers have the names of safetensors: F32, F16 and BF16. Those of blocks of few
bits have llama.cpp's names; `encoding` makes them. The caller of the reader says which types it
knows: `blocks` has those that can be dequantized.

The package `gguf` reads such files too, without bounds: it does not end within a minute on an array
of 16 million bytes, takes tensors that overlap, and is 15 times slower on a vocabulary of 150,000
tokens. Checks in front of it would have to walk the same header first.

Source: github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files import disk
from quantflow.files.folder import POINTER_START, reading, refuse_pointer
from quantflow.files.safetensors_header import TensorInfo

NAME = "gguf"
LAYOUT_VERSION = 3
ALIGNMENT = 32
MAX_NAME_BYTES = 63  # llama.cpp keeps a tensor's name and a zero byte in 64
MAX_DIMENSIONS = 4
MAX_ITEMS = 1 << 24  # of all fields and their lists, and of tensors: a vocabulary has a few million
# kind -> (its number, its code in struct)
KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"),
    "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"),
    "string": (8, ""), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
ARRAY = 9
# dtype -> (its number, bytes of an element)
TYPES = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2)}
# type of most matrices of a file -> general.file_type
FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K": 11, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K": 14,
    "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ3_M": 27, "IQ2_S": 29, "IQ2_M": 29, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
# general.quantization_version of the blocks that are written here
QUANTIZATION_VERSION = 2
_ALIGNMENT_KEY = "general.alignment"
_SPLIT_COUNT, _SPLIT_NUMBER = "split.count", "split.no"
_DAMAGED = "write the file again"
_NAMES = {number: kind for kind, (number, _) in KINDS.items()}
VERSIONS = (2, LAYOUT_VERSION)  # versions that are read; little-endian files of both are alike


@dataclass(frozen=True, kw_only=True)
class Type:
    """How a tensor's elements are stored: in blocks of `elements` of a row and `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


PLAIN: Mapping[int, Type] = {  # a type's number -> the type
    number: Type(name=name, elements=1, nbytes=nbytes) for name, (number, nbytes) in TYPES.items()
}
# name of a type that is written in blocks -> its number, and the type
BLOCKS: Mapping[str, tuple[int, Type]] = {
    kind.name: (number, kind)
    for number, kind in (
        (2, Type(name="Q4_0", elements=32, nbytes=18)),
        (3, Type(name="Q4_1", elements=32, nbytes=20)),
        (6, Type(name="Q5_0", elements=32, nbytes=22)),
        (7, Type(name="Q5_1", elements=32, nbytes=24)),
        (8, Type(name="Q8_0", elements=32, nbytes=34)),
        (10, Type(name="Q2_K", elements=256, nbytes=84)),
        (11, Type(name="Q3_K", elements=256, nbytes=110)),
        (12, Type(name="Q4_K", elements=256, nbytes=144)),
        (13, Type(name="Q5_K", elements=256, nbytes=176)),
        (14, Type(name="Q6_K", elements=256, nbytes=210)),
        (16, Type(name="IQ2_XXS", elements=256, nbytes=66)),
        (17, Type(name="IQ2_XS", elements=256, nbytes=74)),
        (18, Type(name="IQ3_XXS", elements=256, nbytes=98)),
        (20, Type(name="IQ4_NL", elements=32, nbytes=18)),
        (21, Type(name="IQ3_S", elements=256, nbytes=110)),
        (22, Type(name="IQ2_S", elements=256, nbytes=82)),
        (23, Type(name="IQ4_XS", elements=256, nbytes=136)),
        (34, Type(name="TQ1_0", elements=256, nbytes=54)),
        (35, Type(name="TQ2_0", elements=256, nbytes=66)),
        (39, Type(name="MXFP4", elements=32, nbytes=17)),
    )
}
WRITTEN: Mapping[int, Type] = {**PLAIN, **dict(BLOCKS.values())}
Metadata = Mapping[str, tuple[str, Any]]
Spec = tuple[str, tuple[int, ...]]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class GGUFFilePlan:
    """Where everything lies in a file.

    Attributes:
        header: the file's first bytes, padded to the beginning of the data.
        tensors: name -> place, in the order of the file; the slowest dimension first, offsets from
            the beginning of the FILE.
        nbytes: size of the whole file.
    """

    header: bytes
    tensors: dict[str, TensorInfo]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Metadata and tensors of a file; `tensors` as in `GGUFFilePlan`."""

    metadata: dict[str, tuple[str, Any]]
    tensors: dict[str, TensorInfo]


def layout(metadata: Metadata, specs: Mapping[str, Spec]) -> GGUFFilePlan:
    """Places of the tensors in a file that will be written.

    Args:
        metadata: name -> (kind, value), in the order of the file.
        specs: name -> (a key of TYPES or BLOCKS; shape, slowest dimension first), in the order of
            the file.

    Raises:
        InputError: the format cannot hold a field or a tensor; it is named.
    """
    if _ALIGNMENT_KEY in metadata:
        raise InputError(
            f"{_ALIGNMENT_KEY}: given, {ALIGNMENT} is the only one that is written", "leave it out"
        )
    head = [b"GGUF", struct.pack("<IQQ", LAYOUT_VERSION, len(specs), len(metadata))]
    head += [_string(key) + _value(key, kind, value) for key, (kind, value) in metadata.items()]
    offset, spans = 0, {}
    for name, (dtype, shape) in specs.items():
        nbytes = _tensor_bytes(name, dtype, shape)
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(_string(name) + dimensions + struct.pack("<IQ", _number(dtype), offset))
        spans[name] = (offset, nbytes)
        offset += _padded(nbytes)
    header = b"".join(head)
    header += bytes(-len(header) % ALIGNMENT)
    tensors = {
        name: TensorInfo(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            offset=len(header) + spans[name][0],
            nbytes=spans[name][1],
        )
        for name, (dtype, shape) in specs.items()
    }
    return GGUFFilePlan(header=header, tensors=tensors, nbytes=len(header) + offset)


def write(
    path: Path, planned: GGUFFilePlan, pieces: Callable[[TensorInfo], Iterable[Buffer]]
) -> None:
    """Write a file, a piece of a tensor at a time, and wait until it is on the disk.

    Args:
        path: the file; it is removed again when something fails.
        planned: plan of the file, from `layout`.
        pieces: function from a tensor to its bytes in order, in pieces of any size.

    Raises:
        InputError: the pieces of a tensor have another size than the tensor.
        OSError: the file system failed.
    """
    descriptor = disk.create(path)
    try:
        with disk.naming(path):
            disk.write_all(descriptor, planned.header)
        for info in planned.tensors.values():
            done = 0
            for piece in pieces(info):
                view = disk.flat(piece)
                done += view.nbytes
                with disk.naming(path):
                    disk.write_all(descriptor, view)
            if done != info.nbytes:
                raise InputError(
                    f"{info.name}: {info.nbytes} bytes, its pieces have {done}",
                    "report this defect of quantflow",
                )
            with disk.naming(path):
                disk.write_all(descriptor, bytes(_padded(done) - done))
        with disk.naming(path):
            os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):  # the fault that led here is the one to report
            disk.remove(path)
        raise
    finally:
        os.close(descriptor)


def read_header(path: Path, *, types: Mapping[int, Type] = PLAIN) -> Header:
    """Read and check the header of a file; no weight is read.

    Args:
        path: the file.
        types: number -> type of the tensors that the caller can read; their names become the
            tensors' dtypes.

    Raises:
        InputError: the file is unreadable, truncated, longer than its tensors, or violates the
            format; it is named.
        UnsupportedError: another version, order of bytes or alignment, or a tensor of a type that
            `types` lacks.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(len(POINTER_START))
        refuse_pointer(head, path)
        if not head.startswith(b"GGUF"):
            raise InputError(
                f"{path}: begins with {head[:4]!r}, not with b'GGUF'", "give a GGUF file"
            )
        file.seek(4)
        cursor = _Cursor(path=path, file=file, size=size, types=types)
        (version,) = cursor.unpack("I")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise UnsupportedError(
                f"{path}: the file is big-endian, little-endian ones are read",
                "convert it: gguf-convert-endian FILE little, of the package gguf",
            )
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{path}: GGUF version {version}, {' and '.join(map(str, VERSIONS))} are known",
                "write it with a newer llama.cpp",
            )
        count, fields = cursor.unpack("QQ")
        cursor.spend(count + fields)
        metadata: dict[str, tuple[str, Any]] = {}
        for _ in range(fields):
            key = cursor.string()
            if key in metadata:
                raise InputError(f"{path}: field {key!r} stands twice", _DAMAGED)
            metadata[key] = cursor.value(key)
        if metadata.get(_ALIGNMENT_KEY, ("u32", ALIGNMENT))[1] != ALIGNMENT:
            raise UnsupportedError(
                f"{path}: alignment {metadata[_ALIGNMENT_KEY][1]}, {ALIGNMENT} is known",
                "write it again",
            )
        entries = [cursor.tensor() for _ in range(count)]
        begin = _padded(file.tell())
    return Header(
        metadata=metadata, tensors=_tensors_by_name(path, entries, begin=begin, size=size)
    )


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The place of a file among a model's files.

    Attributes:
        number: number of the file, from 1; None where the file does not say it.
        count: number of files, 2 or more.
    """

    number: int | None
    count: int

    def __str__(self) -> str:
        """The place in words: `2 of 3`, or `one of 3`."""
        return f"{'one' if self.number is None else self.number} of {self.count}"


def part_of(metadata: Metadata, path: Path) -> ModelPart | None:
    """The part of a split model that a file is; None for a whole model.

    Raises:
        InputError: a field on it is no integer.
    """
    numbers = {}
    for key in (_SPLIT_COUNT, _SPLIT_NUMBER):
        kind, value = metadata.get(key, ("u16", None))
        if value is not None and type(value) is not int:
            raise InputError(
                f"{path}: {key} is {value!r} of kind {kind}, an integer is needed", _DAMAGED
            )
        numbers[key] = value
    count, number = numbers[_SPLIT_COUNT], numbers[_SPLIT_NUMBER]
    if count is None or count < 2:
        return None
    return ModelPart(number=None if number is None else number + 1, count=count)


def _tensors_by_name(
    path: Path, entries: list[TensorInfo], *, begin: int, size: int
) -> dict[str, TensorInfo]:
    """Tensors with offsets in the file; they have to follow each other and fill it from `begin`."""
    tensors: dict[str, TensorInfo] = {}
    position = begin
    for info in entries:
        if info.name in tensors:
            raise InputError(f"{path}: tensor {info.name!r} stands twice", _DAMAGED)
        if begin + info.offset != position:
            raise InputError(
                f"{path}: tensor {info.name!r} at {begin + info.offset}, expected {position}",
                _DAMAGED,
            )
        tensors[info.name] = TensorInfo(
            name=info.name, dtype=info.dtype, shape=info.shape, offset=position, nbytes=info.nbytes
        )
        position += _padded(info.nbytes)
    if position != size:
        raise InputError(f"{path}: {size} bytes where the header describes {position}", _DAMAGED)
    return tensors


@dataclass(frozen=True, kw_only=True)
class _Cursor:
    """Takes values at the position of the file, and never more than the file has."""

    path: Path
    file: BufferedReader
    size: int
    types: Mapping[int, Type]
    left: list[int] = field(default_factory=lambda: [MAX_ITEMS])

    def spend(self, count: int) -> None:
        self.left[0] -= count
        if self.left[0] < 0:
            raise InputError(
                f"{self.path}: more than {MAX_ITEMS} fields, items and tensors",
                "give a GGUF file of a model",
            )

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.size - self.file.tell():
            raise InputError(
                f"{self.path}: truncated, {nbytes} bytes at {self.file.tell()} of {self.size}",
                _DAMAGED,
            )
        return self.file.read(nbytes)

    def unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def string(self) -> str:
        data = self.take(self.unpack("Q")[0])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: the string {data[:40]!r} is not UTF-8", _DAMAGED
            ) from error

    def kind(self, key: str) -> str:
        (number,) = self.unpack("I")
        if number not in _NAMES:
            raise InputError(f"{self.path}: field {key!r} has the unknown kind {number}", _DAMAGED)
        return _NAMES[number]

    def value(self, key: str) -> tuple[str, Any]:
        if self.unpack("I") != (ARRAY,):
            self.file.seek(-4, os.SEEK_CUR)
            kind = self.kind(key)
            return kind, self.items(kind, 1)[0]
        kind = self.kind(key)
        (count,) = self.unpack("Q")
        return f"[{kind}]", self.items(kind, count)

    def items(self, kind: str, count: int) -> list[Any]:
        least = 8 if kind == "string" else struct.calcsize(KINDS[kind][1])
        if count * least > self.size - self.file.tell():
            raise InputError(
                f"{self.path}: truncated, {count} items at {self.file.tell()} of {self.size}",
                _DAMAGED,
            )
        self.spend(count)
        if kind == "string":
            return [self.string() for _ in range(count)]
        return list(self.unpack(f"{count}{KINDS[kind][1]}"))

    def tensor(self) -> TensorInfo:
        """A tensor whose offset counts from the beginning of the data."""
        name = self.string()
        (count,) = self.unpack("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise InputError(
                f"{self.path}: tensor {name!r} has {count} dimensions, 1 to {MAX_DIMENSIONS} are "
                "known",
                _DAMAGED,
            )
        shape = self.unpack(f"{count}Q")[::-1]
        number, offset = self.unpack("IQ")
        if number not in self.types:
            known_types = ", ".join(
                f"{number} ({kind.name})" for number, kind in self.types.items()
            )
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} has type {number}, known: {known_types}",
                "read it with llama.cpp",
            )
        kind = self.types[number]
        _require_shape(name, shape)
        if shape[-1] % kind.elements:
            cause = (
                f"{self.path}: tensor {name!r} has rows of {shape[-1]}, {kind.name} is stored in "
                f"blocks of {kind.elements}"
            )
            raise InputError(cause, _DAMAGED)
        nbytes = math.prod(shape) // kind.elements * kind.nbytes
        return TensorInfo(name=name, dtype=kind.name, shape=shape, offset=offset, nbytes=nbytes)


def _string(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InputError(
            f"{text!r}: cannot be written as UTF-8", "mend it where it comes from"
        ) from error
    return struct.pack("<Q", len(data)) + data


def _value(key: str, kind: str, value: Any) -> bytes:
    """Bytes of a field behind its name."""
    array = kind.startswith("[")
    kind = kind.strip("[]")
    if kind not in KINDS:
        raise InputError(f"{key}: kind {kind!r} is unknown", f"use one of {', '.join(KINDS)}")
    number, code = KINDS[kind]
    items = list(value) if array else [value]
    head = struct.pack("<IIQ", ARRAY, number, len(items)) if array else struct.pack("<I", number)
    if kind == "string":
        return head + b"".join(map(_string, items))
    try:
        return head + struct.pack(f"<{len(items)}{code}", *items)
    except (struct.error, OverflowError) as error:
        raise InputError(
            f"{key}: {str(value)[:60]} is no {kind} ({error})", "use a kind that holds it"
        ) from error


def _number(dtype: str) -> int:
    return BLOCKS[dtype][0] if dtype in BLOCKS else TYPES[dtype][0]


def _tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in (*TYPES, *BLOCKS):
        raise InputError(f"{name}: dtype {dtype}", f"use one of {', '.join([*TYPES, *BLOCKS])}")
    _require_shape(name, shape)
    if dtype in BLOCKS:
        kind = BLOCKS[dtype][1]
        if shape[-1] % kind.elements:
            cause = f"{name}: rows of {shape[-1]}, {dtype} is stored in blocks of {kind.elements}"
            raise InputError(cause, "use a type of smaller blocks")
        return math.prod(shape) // kind.elements * kind.nbytes
    return math.prod(shape) * TYPES[dtype][1]


def _require_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the format cannot hold, or a name that llama.cpp does not take."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 1:
        raise InputError(
            f"{name}: shape {list(shape)}, GGUF holds 1 to {MAX_DIMENSIONS} dimensions of 1 or "
            "more",
            "leave it out",
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InputError(
            f"{name}: {len(name.encode())} bytes of name, llama.cpp takes {MAX_NAME_BYTES}",
            "shorten it",
        )
    if math.prod(shape) >= 2**62:
        raise InputError(f"{name}: shape {list(shape)} is larger than any file", _DAMAGED)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT
