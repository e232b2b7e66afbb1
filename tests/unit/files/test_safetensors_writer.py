"""Files written piece by piece: other readers read them, and wrong pieces are refused."""

import errno
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.errors import InputError
from quantflow.files.safetensors_header import read_header
from quantflow.files.safetensors_writer import Writer, layout
from tests.shared import open_in

TENSORS = {
    "b.weight": torch.arange(12, dtype=torch.int8).reshape(3, 4),
    "a.scale": torch.tensor([[1.5], [2.5], [-3.0]]),
    "shape": torch.tensor([3, 4], dtype=torch.int64),
    "c": torch.arange(5, dtype=torch.bfloat16),
    "a.float8": torch.arange(3, dtype=torch.float32).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 4),
}
NAMES = {
    torch.int8: "I8",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
SPECS = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def raw(tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_another_reader_finds_the_same_tensors(tmp_path):
    with Writer(tmp_path / "f.safetensors", SPECS) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, raw(tensor))
    loaded = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)
    tensors, metadata = read_header(tmp_path / "f.safetensors")
    assert metadata == {"format": "pt"} and tensors == writer.layout.tensors
    assert (tmp_path / "f.safetensors").stat().st_size == writer.layout.nbytes


def test_the_file_is_the_one_that_the_format_s_own_writer_makes(tmp_path):
    # one dtype per element size
    tensors = {name: TENSORS[name] for name in ("b.weight", "a.scale", "shape", "c")}
    with Writer(tmp_path / "f", {name: SPECS[name] for name in tensors}) as writer:
        for name in tensors:
            writer.write(name, raw(TENSORS[name]))
    assert list(read_header(tmp_path / "f")[0]) == ["shape", "a.scale", "c", "b.weight"]
    assert (tmp_path / "f").read_bytes() == safetensors.torch.save(
        tensors, metadata={"format": "pt"}
    )


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_order_of_the_pieces_does_not_matter(tmp_path_factory, seed, size):
    folder = tmp_path_factory.mktemp("pieces")
    pieces = [
        (name, raw(tensor)[start : start + size], start)
        for name, tensor in TENSORS.items()
        for start in range(0, tensor.nbytes, size)
    ]
    random.Random(seed).shuffle(pieces)
    with Writer(folder / "f", SPECS) as writer:
        for name, data, start in pieces:
            writer.write(name, data, offset_bytes=start)
    loaded = safetensors.torch.load_file(folder / "f")
    assert all(raw(loaded[name]) == raw(tensor) for name, tensor in TENSORS.items())


def test_several_threads_fill_one_tensor(tmp_path):
    content = os.urandom(64 * 1000)
    with Writer(tmp_path / "f", {"x": ("U8", (64, 1000))}) as writer, ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda i: writer.write(
                    "x", content[i * 1000 : (i + 1) * 1000], offset_bytes=i * 1000
                ),
                range(64),
            )
        )
    assert (tmp_path / "f").read_bytes().endswith(content)


def test_tensors_are_aligned_and_the_layout_follows_from_names_and_shapes_alone():
    one = layout({"z": ("I64", (1,)), "y": ("I8", (3,)), "a": ("F32", (2,)), "x": ("BF16", (1, 1))})
    two = layout({"x": ("BF16", (1, 1)), "a": ("F32", (2,)), "y": ("I8", (3,)), "z": ("I64", (1,))})
    assert one == two and list(one.tensors) == ["z", "a", "x", "y"]
    assert len(one.header) % 8 == 0 and one.nbytes == len(one.header) + 8 + 8 + 2 + 3
    sizes = {"z": 8, "a": 4, "x": 2, "y": 1}
    assert all(info.offset % sizes[name] == 0 for name, info in one.tensors.items())
    assert json.loads(one.header[8:])["x"] == {
        "dtype": "BF16",
        "shape": [1, 1],
        "data_offsets": [16, 18],
    }


def test_the_caller_may_choose_the_order_and_leave_the_metadata_out():
    specs = {"z": ("I64", (1,)), "a": ("F64", (2,)), "y": ("F32", ())}
    made = layout({name: specs[name] for name in ("z", "a", "y")}, metadata={}, keep_order=True)
    assert list(json.loads(made.header[8:])) == list(made.tensors) == ["z", "a", "y"]
    assert [info.offset - len(made.header) for info in made.tensors.values()] == [0, 8, 24]


@pytest.mark.parametrize("length", range(1, 9))
def test_the_first_tensor_begins_where_the_caller_wants_it_aligned(length):
    made = layout({"x" * length: ("I64", (1,))}, metadata={}, align=64)
    assert (
        len(made.header) % 64 == 0
        and int.from_bytes(made.header[:8], "little") == len(made.header) - 8
    )


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(0, 4)],
        [(0, 4), (5, 8)],
        [(0, 4), (3, 8)],
        [(0, 8), (0, 8)],
        [(0, 4), (4, 8), (4, 8)],
        [(4, 8), (4, 8)],
        [(0, 2), (2, 4), (3, 5), (6, 8)],
    ],
)
def test_a_gap_or_an_overlap_is_refused_and_the_file_removed(tmp_path, pieces):
    with (
        pytest.raises(InputError, match="x has 8 bytes"),
        Writer(tmp_path / "f", {"x": ("U8", (8,))}) as writer,
    ):
        for begin, end in pieces:
            writer.write("x", bytes(end - begin), offset_bytes=begin)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("name", "size", "offset"), [("x", 9, 0), ("x", 1, 8), ("x", 1, -1), ("y", 1, 0)]
)
def test_a_piece_outside_its_tensor_is_refused(tmp_path, name, size, offset):
    with (
        pytest.raises(InputError, match=f"{name} is "),
        Writer(tmp_path / "f", {"x": ("U8", (8,))}) as writer,
    ):
        writer.write(name, bytes(size), offset_bytes=offset)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("spec", [("F5", (2,)), ("F32", (2**62, 4)), ("F4", (3,)), ("F32", (-1,))])
def test_what_the_format_cannot_hold_is_refused_by_name(spec):
    with pytest.raises(InputError, match="odd"):
        layout({"odd": spec})


def test_a_block_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), Writer(tmp_path / "f", {"x": ("U8", (8,))}) as writer:
        writer.write("x", bytes(8))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync"])
def test_a_fault_of_the_disk_leaves_no_file(tmp_path, monkeypatch, call):
    def fail(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError), Writer(tmp_path / "f", {"x": ("U8", (8,))}) as writer:
        writer.write("x", bytes(8))
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left_open(tmp_path):
    for fill in (8, 4):
        try:
            with Writer(tmp_path / "f", {"x": ("U8", (8,))}) as writer:
                assert open_in(tmp_path)
                writer.write("x", bytes(fill))
        except InputError:
            pass
        assert not open_in(tmp_path)
