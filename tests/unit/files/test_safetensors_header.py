"""The header of a safetensors file: valid ones are read, and everything else is refused."""

import json
import os
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError
from quantflow.files.safetensors_header import DTYPE_BITS, TensorInfo, read_header, tensor_bytes

TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [8, 14]},
}


def write(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def one(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def refused(path, match=None):
    with pytest.raises(InputError, match=match) as caught:
        read_header(path)
    assert path.name in str(caught.value)


def test_a_file_written_by_hand_gives_its_tensors_with_offsets_from_the_beginning_of_the_file(
    tmp_path,
):
    text = json.dumps({"__metadata__": {"format": "pt"}, **TWO}).encode() + b"  "
    tensors, metadata = read_header(write(tmp_path / "x.safetensors", text, bytes(14)))
    begin = 8 + len(text)
    assert tensors == {
        "a": TensorInfo(name="a", dtype="F32", shape=(2,), offset=begin, nbytes=8),
        "b": TensorInfo(name="b", dtype="BF16", shape=(1, 3), offset=begin + 8, nbytes=6),
    }
    assert metadata == {"format": "pt"}


def test_files_of_the_reference_implementation_are_read_with_the_bytes_that_it_reads(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True]),
        "ünïcode/名": torch.arange(3),
    }
    safetensors.torch.save_file(tensors, path, metadata={"k": "v"})
    infos, metadata = read_header(path)
    data = path.read_bytes()
    assert metadata == {"k": "v"}
    assert infos.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = infos[name]
        assert info.shape == tuple(tensor.shape)
        assert (
            data[info.offset : info.offset + info.nbytes]
            == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        )


def test_every_dtype_that_torch_can_save_is_known_with_its_size(tmp_path):
    path = tmp_path / "x.safetensors"
    kinds = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    kinds += (
        " bool complex64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    )
    for kind in kinds.split():
        tensor = torch.zeros(3, dtype=getattr(torch, kind))
        safetensors.torch.save_file({"t": tensor}, path)
        assert read_header(path)[0]["t"].nbytes == 3 * tensor.element_size(), kind


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, -1, +1, 100_000_000, 100_000_001, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1]
)
def test_a_wrong_header_length_is_refused_without_reading_that_much(tmp_path, length):
    text = json.dumps(TWO).encode()
    actual = len(text) + length if length in (-1, 1) else length
    refused(write(tmp_path / "x.safetensors", text, bytes(14), length=actual))


def test_a_header_over_the_formats_limit_is_refused_although_the_file_is_long_enough(tmp_path):
    path = write(tmp_path / "x.safetensors", TWO, length=100_000_001)
    os.truncate(path, 100_000_100)  # sparse: takes no space
    refused(path, "header of 100000001 bytes, the format allows 100000000")


def test_every_file_of_0_to_64_zero_bytes_is_refused(tmp_path):
    for size in range(65):
        path = tmp_path / "x.safetensors"
        path.write_bytes(bytes(size))
        refused(path)


def test_every_truncation_of_a_valid_file_is_refused(tmp_path):
    data = write(tmp_path / "whole.safetensors", TWO, bytes(14)).read_bytes()
    for size in range(len(data)):
        (tmp_path / "x.safetensors").write_bytes(data[:size])
        refused(tmp_path / "x.safetensors")


@pytest.mark.parametrize("extra", [1, 8, 4096])
def test_bytes_after_the_last_tensor_are_refused(tmp_path, extra):
    refused(write(tmp_path / "x.safetensors", TWO, bytes(14 + extra)), "longer than its tensors")


OFFSETS = {
    "overlap": ([0, 8], [4, 12], 12, "overlaps"),
    "the same bytes": ([0, 8], [0, 8], 8, "overlaps"),
    "contained": ([0, 8], [2, 10], 10, "overlaps"),
    "a hole": ([0, 8], [12, 20], 20, "hole"),
    "a hole before the first": ([4, 12], [12, 20], 20, "hole"),
    "a hole at the end": ([0, 8], [8, 16], 20, "longer"),
    "beyond the file": ([0, 8], [8, 16], 12, "truncated"),
    "reversed": ([0, 8], [16, 8], 16, "data_offsets"),
    "negative": ([0, 8], [-8, 0], 16, "data_offsets"),
    "huge": ([0, 8], [2**63 - 9, 2**63 - 1], 16, "hole"),
    "beyond 63 bits": ([0, 8], [2**63, 2**63 + 8], 16, "data_offsets"),
    "beyond 64 bits": ([0, 8], [2**64, 2**64 + 8], 16, "data_offsets"),
    "three offsets": ([0, 8], [8, 16, 24], 16, "data_offsets"),
    "one offset": ([0, 8], [8], 16, "data_offsets"),
    "fractions": ([0, 8], [8.0, 16.0], 16, "data_offsets"),
    "strings": ([0, 8], ["8", "16"], 16, "data_offsets"),
    "truth values": ([0, 8], [False, True], 16, "data_offsets"),
    "null": ([0, 8], None, 16, "data_offsets"),
}


@pytest.mark.parametrize(("first", "second", "size", "match"), OFFSETS.values(), ids=OFFSETS.keys())
def test_offsets_that_do_not_tile_the_file_are_refused(tmp_path, first, second, size, match):
    entry = {"dtype": "F32", "shape": [2]}
    header = {"a": {**entry, "data_offsets": first}, "b": {**entry, "data_offsets": second}}
    refused(write(tmp_path / "x.safetensors", header, bytes(size)), match)


@pytest.mark.slow
def test_a_hundred_thousand_tensors_on_the_same_bytes_are_refused(tmp_path):
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    refused(
        write(tmp_path / "x.safetensors", {f"t{i}": entry for i in range(100_000)}, b"x"),
        "overlaps",
    )


ENTRIES = {
    "unknown dtype": one(dtype="F33"),
    "lower-case dtype": one(dtype="f32"),
    "dtype is a number": one(dtype=32),
    "dtype is a list": one(dtype=["F32"]),
    "dtype of another size": one(dtype="F16"),
    "sub-byte dtype of odd length": one(dtype="F4", shape=[15]),
    "one dimension too small": one(shape=[1]),
    "a scalar's shape": one(shape=[]),
    "zero elements": one(shape=[2, 0]),
    "negative": one(shape=[-2]),
    "two negatives": one(shape=[-1, -2]),
    "a truth value": one(shape=[True, 2]),
    "a fraction": one(shape=[2.0]),
    "a string": one(shape=["2"]),
    "a string for a shape": one(shape="2"),
    "null": one(shape=None),
    "nested": one(shape=[[2]]),
    "2^63": one(shape=[2**63]),
    "a product beyond 63 bits": one(shape=[2**32, 2**32]),
    "a product beyond 64 bits that wraps to two": one(shape=[2**63 - 1, 2**63 - 1, 2]),
    "a product beyond 63 bits times zero": one(shape=[2**62, 2**62, 0], data_offsets=[0, 0]),
    "a missing key": {"t": {"dtype": "F32", "shape": [2]}},
    "an unknown key": one(extra=1),
    "not a table": {"t": [0, 8]},
    "metadata is not a table": {"__metadata__": [], **one()},
    "metadata holds a number": {"__metadata__": {"a": 1}, **one()},
    "metadata is null": {"__metadata__": None, **one()},
}


@pytest.mark.parametrize("header", ENTRIES.values(), ids=ENTRIES.keys())
def test_an_entry_that_breaks_the_format_is_refused(tmp_path, header):
    refused(write(tmp_path / "x.safetensors", header, bytes(8)))


def test_a_shape_of_a_million_dimensions_ends_in_a_short_message(tmp_path):
    path = write(tmp_path / "x.safetensors", one(shape=[2] * 1_000_000), bytes(8))
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert len(str(caught.value)) < 500


TEXTS = {
    "duplicate tensor": b'{"t": %s, "t": %s}',
    "duplicate metadata": b'{"__metadata__": {}, "__metadata__": {}, "t": %s}',
    "duplicate key of an entry": b'{"t": {"dtype": "F32", "dtype": "F32", "shape": [2], '
    b'"data_offsets": [0, 8]}}',
    "duplicate key of the metadata": b'{"__metadata__": {"a": "b", "a": "b"}, "t": %s}',
    "leading space": b' {"t": %s}',
    "byte order mark": b'\xef\xbb\xbf{"t": %s}',
    "a list": b"[%s]",
    "text after the object": b'{"t": %s} {}',
    "NaN": b'{"t": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
    "not UTF-8": b'{"\xff": %s}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_header_that_is_not_one_strict_object_is_refused(tmp_path, text):
    entry = json.dumps(one()["t"]).encode()
    refused(write(tmp_path / "x.safetensors", text.replace(b"%s", entry), bytes(8)))


def test_a_git_lfs_pointer_names_the_command_that_fetches_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(path, "git lfs pull")


def test_an_empty_header_and_empty_tensors_are_valid(tmp_path):
    assert read_header(write(tmp_path / "x.safetensors", {})) == ({}, {})
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}
    infos, _ = read_header(
        write(tmp_path / "y.safetensors", {"e": empty, **one(), "f": empty}, bytes(8))
    )
    assert set(infos) == {"e", "f", "t"}


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F4", (3, 2), 3),
        ("F4", (3,), None),
        ("F6_E2M3", (4,), 3),
        ("F32", (), 4),
        ("F32", (0, 2**40), 0),
        ("X", (), None),
    ],
)
def test_bytes_of_a_tensor_worked_by_hand(dtype, shape, expected):
    assert tensor_bytes(dtype, shape) == expected


HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(sorted(DTYPE_BITS)),
            "shape": st.lists(st.integers(0, 4), max_size=2),
            "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 16)),
        }
    )
    | st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=1),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=300,
)
@given(header=HEADERS, size=st.integers(0, 24))
def test_whatever_the_reference_implementation_refuses_is_refused_and_the_rest_agrees(
    tmp_path, header, size
):
    path = write(tmp_path / "x.safetensors", header, bytes(size))
    try:
        infos, _ = read_header(path)
    except InputError:
        infos = None
    try:
        with safetensors.safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:
        shapes = None
    assert (infos is None) == (shapes is None)
    assert infos is None or {name: info.shape for name, info in infos.items()} == shapes


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=300,
)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_never_crashes_and_never_passes_where_the_reference_refuses(
    tmp_path, position, byte
):
    path = write(tmp_path / "x.safetensors", TWO, bytes(14))
    data = bytearray(path.read_bytes())
    data[position % len(data)] = byte
    path.write_bytes(data)
    try:
        read_header(path)
    except InputError:
        return
    with safetensors.safe_open(path, "pt"):
        pass
