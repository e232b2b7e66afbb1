"""Importance matrices: bytes worked by hand, files of the package `gguf`, damage."""

import struct

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from quantflow.errors import InputError
from quantflow.formats.llama_cpp.imatrix import (
    Entry,
    ImportanceMatrix,
    read_imatrix,
    write_gguf,
    write_older,
)

DENSE, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"
# two entries: 3 chunks, 2 inputs; then 1 chunk, a matrix of 1 input for each of 2 experts
OLDER = (
    struct.pack("<i", 2)
    + struct.pack("<i", len(DENSE)) + DENSE.encode() + struct.pack("<iiff", 3, 2, 1.5, 6.0)
    + struct.pack("<i", len(EXPERTS)) + EXPERTS.encode() + struct.pack("<iiff", 1, 2, 0.25, 1.0)
    + struct.pack("<i", 3) + struct.pack("<i", 5) + b"a.txt"
)  # fmt: skip


def matrix() -> ImportanceMatrix:
    return ImportanceMatrix(
        entries={
            EXPERTS: Entry(sums=torch.tensor([8.0, 4.0, 0.0, 0.0]), counts=torch.tensor([4.0, 0])),
            DENSE: Entry(sums=torch.tensor([1.0, 2.0, 0.0]), counts=torch.tensor([8.0])),
        },
        datasets=("text",),
        chunks=2,
        chunk_size=4,
    )


def test_the_older_form_worked_by_hand(tmp_path):
    path = tmp_path / "imatrix.dat"
    path.write_bytes(OLDER)
    found = read_imatrix(path)
    assert (found.datasets, found.chunks) == (("a.txt",), 3)
    means = {name: entry.mean_squares().tolist() for name, entry in found.entries.items()}
    assert means == {DENSE: [0.5, 2.0], EXPERTS: [0.25, 1.0]}
    path.write_bytes(OLDER[:-13])  # as before llama.cpp wrote chunks and the text's name
    assert {name: e.mean_squares().tolist() for name, e in read_imatrix(path).entries.items()} == (
        means
    )


def test_the_older_form_is_written_as_it_is_read(tmp_path):
    write_older(tmp_path / "i.dat", matrix())
    assert (tmp_path / "i.dat").read_bytes() == (
        struct.pack("<i", 2)
        + struct.pack("<i", len(DENSE)) + DENSE.encode()
        + struct.pack("<iifff", 2, 3, 0.25, 0.5, 0.0)
        + struct.pack("<i", len(EXPERTS)) + EXPERTS.encode()
        + struct.pack("<iiffff", 2, 4, 4.0, 2.0, 2.0, 2.0)  # 1 for what saw no token
        + struct.pack("<ii", 2, 4) + b"text"
    )  # fmt: skip
    found = read_imatrix(tmp_path / "i.dat").entries[EXPERTS]
    assert found.mean_squares().tolist() == [2.0, 1.0, 1.0, 1.0]


def test_weights_none_of_whose_experts_saw_a_token_are_not_in_the_older_form(tmp_path):
    unseen = Entry(sums=torch.zeros(2), counts=torch.zeros(2))
    write_older(
        tmp_path / "i.dat",
        ImportanceMatrix(entries={EXPERTS: unseen, DENSE: matrix().entries[DENSE]}),
    )
    assert list(read_imatrix(tmp_path / "i.dat").entries) == [DENSE]


def test_gguf_reads_what_is_written(tmp_path):
    write_gguf(tmp_path / "i.gguf", matrix())
    reader = GGUFReader(tmp_path / "i.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["text"]
    assert reader.get_field("imatrix.chunk_count").contents() == 2
    assert reader.get_field("imatrix.chunk_size").contents() == 4
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert tensors[f"{EXPERTS}.in_sum2"].tolist() == [[8.0, 4.0], [0.0, 0.0]]
    assert tensors[f"{EXPERTS}.counts"].tolist() == [[4.0], [0.0]]
    assert tensors[f"{DENSE}.in_sum2"].tolist() == [[1.0, 2.0, 0.0]]
    assert tensors[f"{DENSE}.counts"].tolist() == [[8.0]]


def by_gguf(path, tensors, kind="imatrix"):
    writer = GGUFWriter(path, "unused")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["a.txt", "b.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_the_package_gguf_is_read_with_and_without_sums_and_dimensions_of_one(tmp_path):
    tensors = {
        f"{DENSE}.in_sum2": [2.0, 4.0],  # llama.cpp leaves dimensions of 1 out
        f"{DENSE}.counts": [4.0],
        f"{DENSE}.in_sum": [-9.0, 9.0],
        f"{EXPERTS}.in_sum2": [[3.0], [0.0]],
        f"{EXPERTS}.counts": [[6.0], [0.0]],
    }
    found = read_imatrix(by_gguf(tmp_path / "i.gguf", tensors))
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt", "b.txt"), 7, 512)
    means = {name: entry.mean_squares().tolist() for name, entry in found.entries.items()}
    assert means == {DENSE: [0.5, 1.0], EXPERTS: [0.5, 1.0]}


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({f"{DENSE}.in_sum2": [1.0], f"{DENSE}.counts": [1.0]}, "model", "general.type is 'model'"),
        ({f"{DENSE}.in_sum2": [1.0]}, "imatrix", "counts' is missing"),
        ({f"{DENSE}.counts": [1.0]}, "imatrix", "without entries"),
        ({f"{DENSE}.in_sum2": [1.0], f"{DENSE}.counts": [-1.0]}, "imatrix", "counts with NaN"),
        ({f"{DENSE}.in_sum2": [-1.0], f"{DENSE}.counts": [1.0]}, "imatrix", "squares with NaN"),
        ({f"{DENSE}.in_sum2": [1.0] * 3, f"{DENSE}.counts": [1.0] * 2}, "imatrix", "3 sums of"),
        ({DENSE: [1.0]}, "imatrix", "is none of an importance matrix"),
    ],
)
def test_a_gguf_file_that_is_none_is_refused(tmp_path, tensors, kind, message):
    with pytest.raises(InputError, match=message):
        read_imatrix(by_gguf(tmp_path / "i.gguf", tensors, kind))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "one that is cut: 4 bytes at 0 of 0"),
        (OLDER[:20], "one that is cut"),
        (OLDER[:40], "one that is cut"),
        (OLDER + b"x", "1 bytes behind its end"),
        (b"\0" * 64, "begins with 0 entries"),
        (struct.pack("<ii", 1, 1 << 20) + b"a" * 99, "a name of 1048576 bytes"),
        (struct.pack("<ii", 1, 2) + b"\xff\xfe" + b"a" * 99, "not UTF-8"),
        (struct.pack("<iiBiif", 1, 1, 97, 1, 1, float("nan")), "a: sums of squares with NaN"),
        (struct.pack("<iiBii", 1, 1, 97, 1, 1 << 30), "one that is cut"),
        (struct.pack("<iiBii", 1, 1, 97, 1, -4), "a: -4 values"),
    ],
)
def test_an_older_file_that_is_none_is_refused(tmp_path, data, message):
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_imatrix(tmp_path / "i.dat")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_imatrix(tmp_path / "i.dat")
