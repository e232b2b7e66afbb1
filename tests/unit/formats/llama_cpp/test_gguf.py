"""GGUF: the header byte by byte, what comes back from a file, and what is refused."""

import errno
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats.llama_cpp import gguf

# Two fields of every shape of value and two tensors, worked by hand from the format's description.
METADATA = {
    "n": ("u32", 7),
    "ok": ("bool", True),
    "s": ("string", "é"),
    "a": ("[i32]", [1, -1]),
    "w": ("[string]", ["x", "yz"]),
}
SPECS = {"t": ("F32", (2, 3)), "u": ("BF16", (5,))}
HEADER = bytes.fromhex(
    """
    47475546  03000000  0200000000000000  0500000000000000
    0100000000000000 6e    04000000  07000000
    0200000000000000 6f6b  07000000  01
    0100000000000000 73    08000000  0200000000000000 c3a9
    0100000000000000 61    09000000  05000000 0200000000000000  01000000 ffffffff
    0100000000000000 77    09000000  08000000 0200000000000000
    0100000000000000 78  0200000000000000 797a
    0100000000000000 74    02000000  0300000000000000 0200000000000000  00000000  0000000000000000
    0100000000000000 75    01000000  0500000000000000                   1e000000  2000000000000000
    """
)
BEGIN = 256  # the next multiple of 32 behind the header's 230 bytes


def write(path: Path, metadata=METADATA, specs=SPECS, data=None) -> Path:
    planned = gguf.layout(metadata, specs)
    gguf.write(
        path, planned, lambda info: [bytes(info.nbytes) if data is None else data[info.name]]
    )
    return path


def test_the_header_is_the_one_worked_by_hand():
    planned = gguf.layout(METADATA, SPECS)
    assert len(HEADER) == 230 and planned.header == HEADER + bytes(26)
    assert planned.tensors == {
        "t": TensorInfo(name="t", dtype="F32", shape=(2, 3), offset=BEGIN, nbytes=24),
        "u": TensorInfo(name="u", dtype="BF16", shape=(5,), offset=BEGIN + 32, nbytes=10),
    }
    assert planned.nbytes == BEGIN + 64


def test_the_file_is_the_header_and_padded_tensors(tmp_path):
    path = write(tmp_path / "f", data={"t": bytes(range(24)), "u": b"0123456789"})
    assert path.read_bytes() == HEADER + bytes(26) + bytes(range(24)) + bytes(
        8
    ) + b"0123456789" + bytes(22)


def test_a_tensor_is_written_in_pieces_of_any_size(tmp_path):
    data = {"t": bytes(range(24)), "u": b"0123456789"}
    whole = write(tmp_path / "whole", data=data).read_bytes()
    gguf.write(
        tmp_path / "pieces",
        gguf.layout(METADATA, SPECS),
        lambda info: (bytes([byte]) for byte in data[info.name]),
    )
    assert (tmp_path / "pieces").read_bytes() == whole


def test_the_reader_returns_what_was_written(tmp_path):
    found = gguf.read_header(write(tmp_path / "f"))
    assert found.metadata == METADATA and list(found.metadata) == list(METADATA)
    assert found.tensors == gguf.layout(METADATA, SPECS).tensors


def numbers(kind):
    bits = int(kind[1:])
    if kind[0] == "f":
        return st.floats(width=bits, allow_nan=False)
    return (
        st.integers(0, 2**bits - 1)
        if kind[0] == "u"
        else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = {
    kind: st.booleans() if kind == "bool" else TEXT if kind == "string" else numbers(kind)
    for kind in gguf.KINDS
}
FIELD = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), VALUES[kind]),
        st.tuples(st.just(f"[{kind}]"), st.lists(VALUES[kind], max_size=4)),
    )
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15)
TENSOR = st.tuples(
    st.sampled_from(sorted(gguf.TYPES)),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
)


@settings(max_examples=60)
@given(
    metadata=st.dictionaries(NAMES, FIELD, max_size=5),
    specs=st.dictionaries(NAMES, TENSOR, max_size=4),
    seed=st.randoms(),
)
def test_any_metadata_and_tensors_come_back(tmp_path_factory, metadata, specs, seed):
    metadata.pop("general.alignment", None)
    path = tmp_path_factory.mktemp("gguf") / "f"
    planned = gguf.layout(metadata, specs)
    data = {name: seed.randbytes(info.nbytes) for name, info in planned.tensors.items()}
    write(path, metadata, specs, data)
    found = gguf.read_header(path)
    assert found.metadata == metadata
    assert {name: (info.dtype, info.shape) for name, info in found.tensors.items()} == specs
    content = path.read_bytes()
    assert len(content) == planned.nbytes and len(content) % 32 == 0
    for name, info in found.tensors.items():
        assert (
            info.offset % 32 == 0 and content[info.offset : info.offset + info.nbytes] == data[name]
        )
        elements = math.prod(info.shape)
        assert info.nbytes == elements * (4 if info.dtype == "F32" else 2)


@pytest.mark.parametrize(
    ("metadata", "specs", "said"),
    [
        ({"n": ("u8", 256)}, {}, "n: 256 is no u8"),
        ({"n": ("u32", -1)}, {}, "n: -1 is no u32"),
        ({"n": ("f32", 1e300)}, {}, r"n: 1e\+300 is no f32"),
        ({"n": ("[i32]", [1, "x"])}, {}, "n: .* is no i32"),
        ({"n": ("u24", 1)}, {}, "n: kind 'u24' is unknown"),
        ({"n": ("string", "\ud800")}, {}, "cannot be written as UTF-8"),
        ({"general.alignment": ("u32", 64)}, {}, "general.alignment: given"),
        ({}, {"t": ("F64", (2,))}, "t: dtype F64"),
        ({}, {"t": ("F32", ())}, r"t: shape \[\]"),
        ({}, {"t": ("F32", (1, 2, 3, 4, 5))}, r"t: shape \[1, 2, 3, 4, 5\]"),
        ({}, {"t": ("F32", (3, 0))}, r"t: shape \[3, 0\]"),
        ({}, {"t" * 64: ("F32", (1,))}, "64 bytes of name, llama.cpp takes 63"),
    ],
)
def test_what_the_format_does_not_hold_is_refused_by_name(metadata, specs, said):
    with pytest.raises(InputError, match=said):
        gguf.layout(metadata, specs)


@pytest.mark.parametrize("pieces", [[b"123"], [b"1234", b"5"], []])
def test_pieces_that_do_not_fill_their_tensor_leave_no_file(tmp_path, pieces):
    with pytest.raises(InputError, match=r"t: 4 bytes, its pieces have"):
        gguf.write(tmp_path / "f", gguf.layout({}, {"t": ("F32", (1,))}), lambda _: pieces)
    assert not (tmp_path / "f").exists()


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "f")
    assert caught.value.filename == str(tmp_path / "f") and not (tmp_path / "f").exists()


@pytest.mark.parametrize("size", range(0, BEGIN, 3))
def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path, size):
    path = write(tmp_path / "f")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"f: (truncated|begins with|\d+ bytes where)"):
        gguf.read_header(path)


def changed(path: Path, at: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    return path


TENSOR_AT = HEADER.index(b"t\x02\x00\x00\x00")  # the letter t, then how many dimensions


@pytest.mark.parametrize(
    ("at", "new", "kind", "said"),
    [
        (0, b"GGML", InputError, "begins with b'GGML'"),
        (4, b"\x01", UnsupportedError, "GGUF version 1, 2 and 3 are known"),
        (8, struct.pack("<Q", 2**60), InputError, "more than 16777216 fields"),
        (33, b"\x0d", InputError, "field 'n' has the unknown kind 13"),
        (77, b"\xff", InputError, "not UTF-8"),
        (TENSOR_AT + 1, b"\x05", InputError, "tensor 't' has 5 dimensions"),
        (TENSOR_AT + 1, b"\x00", InputError, "tensor 't' has 0 dimensions"),
        (TENSOR_AT + 21, b"\x0c", UnsupportedError, "tensor 't' has type 12"),
        (TENSOR_AT + 25, b"\x20", InputError, "tensor 't' at 288, expected 256"),
        (TENSOR_AT + 5, struct.pack("<QQ", 2**40, 2**40), InputError, "larger than any file"),
        (len(HEADER) - 25, b"t", InputError, "tensor 't' stands twice"),
    ],
)
def test_damage_is_named(tmp_path, at, new, kind, said):
    with pytest.raises(kind, match=said):
        gguf.read_header(changed(write(tmp_path / "f"), at, new))


@pytest.mark.parametrize("version", [2, 3])
def test_a_big_endian_file_is_called_so(tmp_path, version):
    with pytest.raises(
        UnsupportedError, match="the file is big-endian, little-endian ones are read"
    ):
        gguf.read_header(changed(write(tmp_path / "f"), 4, struct.pack(">I", version)))


def test_a_file_says_which_part_of_a_model_it_is():
    path = Path("f")
    assert (
        gguf.part_of({}, path) is None
        and gguf.part_of({"split.count": ("u16", 1), "split.no": ("u16", 0)}, path) is None
    )
    assert str(gguf.part_of({"split.count": ("u16", 3), "split.no": ("u16", 1)}, path)) == "2 of 3"
    assert str(gguf.part_of({"split.count": ("i32", 3)}, path)) == "one of 3"
    for fields in (
        {"split.count": ("string", "3")},
        {"split.count": ("u16", 3), "split.no": ("[u16]", [1])},
    ):
        with pytest.raises(InputError, match=r"f: split\.(count|no) is .*, an integer is needed"):
            gguf.part_of(fields, path)


def test_a_name_that_stands_twice_another_alignment_and_a_longer_file_are_refused(tmp_path):
    twice = write(tmp_path / "twice", {"n": ("u8", 1), "m": ("u8", 1)}, {})
    at = twice.read_bytes().index(b"m\x00")
    with pytest.raises(InputError, match="field 'n' stands twice"):
        gguf.read_header(changed(twice, at, b"n"))
    other = write(tmp_path / "other", {"general.alignmen_": ("u32", 64)}, {})
    at = other.read_bytes().index(b"_")
    with pytest.raises(UnsupportedError, match="alignment 64, 32 is known"):
        gguf.read_header(changed(other, at, b"t"))
    longer = write(tmp_path / "longer")
    longer.write_bytes(longer.read_bytes() + bytes(32))
    with pytest.raises(
        InputError, match=f"{BEGIN + 96} bytes where the header describes {BEGIN + 64}"
    ):
        gguf.read_header(longer)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "f").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    )
    with pytest.raises(InputError, match="git-LFS pointer"):
        gguf.read_header(tmp_path / "f")
