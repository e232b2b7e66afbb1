"""Files of torch.save: torch reads what we write, we read what torch wrote, no pickle is run."""

import collections
import io
import os
import pickle
import tracemalloc
import zipfile

import pytest
import torch

from quantflow.core.dtypes import DTYPES
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.torch_file import STORAGES, read_torch_header, write_torch_file
from quantflow.models.reading import bytes_of, read_tensor

SHAPES = {"a.packed_weight": (3, 5), "b": (7,), "c": (), "d.x": (2, 0, 4), "e": (1, 1, 6)}


def tensors_of(dtype: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(0, 2 if dtype == "BOOL" else 100, shape, generator=generator).to(
            DTYPES[dtype]
        )
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("dtype", STORAGES)
def test_torch_reads_what_is_written_and_we_read_it_where_it_lies(tmp_path, dtype):
    tensors, path = tensors_of(dtype), tmp_path / "x.pt"
    specs = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_torch_file(path, specs, map(bytes_of, tensors.values()))
    found = torch.load(path, weights_only=True)
    mapped = torch.load(path, weights_only=True, mmap=True)
    headers = read_torch_header(path)
    assert list(found) == list(headers) == list(tensors)
    for name, tensor in tensors.items():
        assert (
            found[name].dtype == tensor.dtype
            and torch.equal(found[name], tensor)
            and torch.equal(mapped[name], tensor)
        )
        assert torch.equal(read_tensor(path, headers[name]), tensor)
        assert headers[name].offset % 64 == 0


def test_equal_content_has_equal_bytes_whatever_the_file_is_called(tmp_path):
    tensors = tensors_of("F16")
    specs = {name: ("F16", tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name in ("a.pt", "b.pt"):
        write_torch_file(tmp_path / name, specs, map(bytes_of, tensors.values()))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_what_torch_saves_of_a_module_is_read_views_and_transposes_too(tmp_path):
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))
    table = collections.OrderedDict(module.state_dict())
    table |= {"rows": whole[1:3], "turned": whole.T, "half": whole.half(), "whole": whole}
    torch.save(table, tmp_path / "x.pt")
    headers = read_torch_header(tmp_path / "x.pt")
    assert headers.keys() == table.keys() and headers["turned"].strides == (1, 6)
    for name, tensor in table.items():
        assert torch.equal(read_tensor(tmp_path / "x.pt", headers[name]), tensor), name
    torch.save(module.state_dict(), tmp_path / "y.pt")  # it has _metadata beside its tensors
    assert read_torch_header(tmp_path / "y.pt").keys() == module.state_dict().keys()


@pytest.mark.parametrize("order", ["big", "middle", "little and more", ""])
def test_numbers_in_another_order_of_bytes_are_refused(tmp_path, order):
    torch.save({"a": torch.arange(4.0)}, tmp_path / "little.pt")
    assert read_torch_header(tmp_path / "little.pt").keys() == {"a"}
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as source,
        zipfile.ZipFile(tmp_path / "other.pt", "w") as other,
    ):
        orders = [name for name in source.namelist() if name.endswith("/byteorder")]
        assert len(orders) == 1 and source.read(orders[0]) == b"little"
        for name in source.namelist():
            other.writestr(name, order if name in orders else source.read(name))
    with pytest.raises(
        UnsupportedError,
        match=f"other.pt: byteorder is '{order[:16]}', little-endian files are read",
    ):
        read_torch_header(tmp_path / "other.pt")


class Sings:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def archive(path, data: bytes, *, compression=zipfile.ZIP_STORED, members=("x/data/0",)):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x/data.pkl", data)
        for name in members:
            file.writestr(name, bytes(16))
    return path


def test_a_pickle_that_asks_for_more_than_tensors_is_not_run(tmp_path):
    for number, content in enumerate(({"a": Sings(tmp_path / "sung")}, [Sings(tmp_path / "sung")])):
        path = archive(tmp_path / f"{number}.pt", pickle.dumps(content, protocol=2))
        with pytest.raises(
            InputError,
            match=r"the pickle asks for the name (posix|nt)\.mkdir; nothing of it was run",
        ):
            read_torch_header(path)
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "p.pt")
    with pytest.raises(InputError, match="the name torch._utils._rebuild_parameter"):
        read_torch_header(tmp_path / "p.pt")
    assert not (tmp_path / "sung").exists()


TENSOR = (
    b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00("
)
TAIL = b"t\x89ccollections\nOrderedDict\n)RtRs."


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TENSOR + b"K\x05t(K\x01" + TAIL, r"a: \[5\] of F32 ends after 20 bytes"),
        (TENSOR + b"K\x02t(J\xff\xff\xff\xff" + TAIL, "a tensor of shape"),
        (TENSOR + b"K\x02K\x02t(K\x01" + TAIL, "a tensor of shape"),
        (TENSOR.replace(b"0X\x03", b"7X\x03") + b"K\x02t(K\x01" + TAIL, "no storage 7"),
        (b"\x80\x02}X\x01\x00\x00\x00aK\x05s.", "'a' is int, a tensor is expected"),
        (b"\x80\x02]K\x05a.", "holds list, a table of tensors is expected"),
        (b"\x80\x02ctorch\nFloatStorage\n(K\x01tR.", "no pickle of tensors"),
        (b"\x80\x02ctorch\nFloatStorage\n}b.", "a change of a storage's class"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.", "a change of a function"),
        (
            b"\x80\x02ccollections\nOrderedDict\n((K\x01K\x02ttR.",
            "a table that is made from something",
        ),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "a reference to a"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "a memo of 4294967295 entries"),
        (b"\x80\x02", "no pickle of tensors"),
    ],
)
def test_a_damaged_or_strange_pickle_is_a_sentence(tmp_path, data, said):
    with pytest.raises(InputError, match=said):
        read_torch_header(archive(tmp_path / "x.pt", data))


def test_files_that_are_no_such_zip_are_refused(tmp_path):
    good = pickle.dumps({}, protocol=2)
    with pytest.raises(InputError, match="is compressed"):
        read_torch_header(archive(tmp_path / "a.pt", good, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(InputError, match="2 of them data.pkl"):
        read_torch_header(archive(tmp_path / "b.pt", good, members=("y/data.pkl",)))
    torch.save({"a": torch.ones(2)}, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="not a whole file of torch.save"):
        read_torch_header(tmp_path / "c.pt")
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2000)}, buffer)
    (tmp_path / "d.pt").write_bytes(buffer.getvalue()[:-400])
    with pytest.raises(InputError, match="not a whole file of torch.save"):
        read_torch_header(tmp_path / "d.pt")


def test_a_pickle_that_is_larger_than_its_zip_says_is_read_no_further(tmp_path):
    path = archive(tmp_path / "x.pt", pickle.dumps({}, protocol=2) + bytes(64 << 20))
    data = bytearray(path.read_bytes())
    # the size stands in the member's head, and again in the list at the end
    for magic, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.index(magic) + place
        data[start : start + 4] = (16).to_bytes(4, "little")
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(InputError, match="not a whole file of torch.save"):
        read_torch_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
