"""Small files that would take gigabytes or years: each is refused before it is expanded."""

import json
import pickle
import struct
import time
import tracemalloc
import zipfile

import pytest

from quantflow.errors import InputError, UsageError
from quantflow.files import canonical
from quantflow.files.canonical import MAX_CONTAINERS, parse_json
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.patterns import Pattern
from quantflow.files.safetensors_header import read_header
from quantflow.formats.gaudi import restricted_npz
from quantflow.formats.gaudi.module_patterns import module_list
from quantflow.formats.llama_cpp import gguf
from quantflow.planning.recipe import apply_settings, read_yaml

SLOW = "(a+)+$"
NAME = "a" * 64 + "b"


def peak_of(work):
    """The largest memory that Python held while `work` raised its InputError or UsageError."""
    tracemalloc.start()
    with pytest.raises((InputError, UsageError)):
        work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_json_of_millions_of_lists_is_refused_before_one_is_made():
    data = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"  # 12 MB, which would take some 300
    assert peak_of(lambda: parse_json(data, "x.json")) < 1 << 20


def test_a_json_of_many_items_is_refused_before_one_is_made(monkeypatch):
    monkeypatch.setattr(canonical, "MAX_ITEMS", 10)
    assert parse_json(b"[1,1,1,1,1,1,1,1,1,1,1]", "x") == [1] * 11
    with pytest.raises(
        InputError, match="x: 1 tables and lists, 11 items; 4000000 and 10 are read"
    ):
        parse_json(b"[1,1,1,1,1,1,1,1,1,1,1,1]", "x")


def header(tmp_path, text):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    return path


def test_a_tensor_of_more_dimensions_than_torch_has_and_a_name_of_a_page_are_refused(tmp_path):
    shape = ",".join(["1"] * 65)
    with pytest.raises(InputError, match="65 dimensions"):
        read_header(
            header(tmp_path, f'{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}')
        )
    with pytest.raises(InputError, match="5000 characters"):
        read_header(
            header(
                tmp_path, f'{{"{"a" * 5000}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'
            )
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", 10**9), ("num_hidden_layers", -1), ("num_local_experts", 10**9)),
        *(("head_dim", 10**12), ("vocab_size", -5), ("hidden_size", 2**62), ("rope_theta", 10**30)),
    ],
)
def test_numbers_of_a_config_that_the_weights_cannot_have_are_refused_with_the_key(
    key, value, tmp_path
):
    for config in ({key: value}, {"text_config": {key: value}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        header(tmp_path, '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}').rename(
            tmp_path / "model.safetensors"
        )
        with pytest.raises(InputError, match=f"config.json: {key} "):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("how", ["match", "fullmatch", "search"])
def test_a_pattern_that_would_take_years_is_refused_after_its_time(how, monkeypatch):
    monkeypatch.setattr("quantflow.files.patterns.SECONDS", 0.05)
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"pattern '\(a\+\)\+\$' takes more than 0.05 s"):
        pattern = Pattern(SLOW)
        # the engine is clever about one name, and the names share the time
        for _ in range(1_000_000):
            getattr(pattern, how)(NAME)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "text", ["(", "[", "a{99999999999999999999}", "(?P<n>", "x" * 5000, "(?<=a+)(", "\\"]
)
def test_a_pattern_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="pattern"):
        Pattern(text)
    with pytest.raises(UsageError, match="blocklist.names: pattern"):
        module_list("blocklist", {"names": [text]})


YAML = {
    "laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "deep": "a: " + "[" * 1000 + "]" * 1000,
    "long": "a: " + "x" * (1 << 20),
    "date": "a: 2001-99-99\n",
    "number": f"a: {'9' * 5000}\n",
    "base 16": f"a: 0x{'f' * 5000}\n",
    "base 60": f"a: 1{':59' * 5000}\n",
    "base 2": f"a: 0b{'1' * 1025}\n",
    "key": "? [1, 2]\n: 3\n",
    "mapping": "{a: 1}: 2\n",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_with_aliases_depth_length_or_values_that_are_none_is_a_usage_error(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML[name])
    with pytest.raises(UsageError):
        read_yaml(path)
    if name not in ("key", "mapping", "long"):
        with pytest.raises(UsageError):
            apply_settings(
                {}, [f"a={YAML[name].partition(': ')[2]}" if name != "laughs" else "a=[&a 1, *a]"]
            )


def test_yaml_of_many_keys_is_read_at_once(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"k{i}: 1\n" for i in range(20_000)))
    begin = time.monotonic()
    assert len(read_yaml(path)) == 20_000
    assert time.monotonic() - begin < 30  # comparing each with each takes minutes


def npz(tmp_path, data, *, members=1, compression=zipfile.ZIP_DEFLATED, name=restricted_npz.MEMBER):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for number in range(members):
            archive.writestr(name if number == 0 else f"more{number}", data)
    return path


def npy(pickled):
    text = "{'descr': '|O', 'fortran_order': False, 'shape': (), }\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + pickled


@pytest.mark.parametrize("opcode", [b"r", b"j"], ids=["LONG_BINPUT", "LONG_BINGET"])
def test_a_pickle_with_a_memo_of_billions_is_refused_without_its_memory(opcode, tmp_path):
    path = npz(tmp_path, npy(b"\x80\x03N" + opcode + b"\xff\xff\xff\x7f."))
    assert peak_of(lambda: restricted_npz.read_npz(path)) < 1 << 24


@pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_compression_that_numpy_does_not_write_is_refused(compression, tmp_path):
    path = npz(tmp_path, npy(pickle.dumps({}, protocol=3)), compression=compression)
    with pytest.raises(InputError, match="compressed in a way"):
        restricted_npz.read_npz(path)


def test_a_member_that_is_larger_unpacked_than_is_read_is_refused_before_it_is_unpacked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(restricted_npz, "MAX_BYTES", 1 << 16)
    path = npz(tmp_path, npy(b"\x00" * (64 << 20)))  # 64 MiB in 64 KiB
    assert path.stat().st_size < 1 << 17
    assert peak_of(lambda: restricted_npz.read_npz(path)) < 1 << 20


def test_a_member_that_is_larger_than_its_zip_says_is_read_no_further(tmp_path):
    path = npz(tmp_path, npy(b"\x00" * (64 << 20)))
    size = struct.pack("<I", len(npy(b"\x00" * (64 << 20))))
    assert path.read_bytes().count(size) == 2  # before the member, and in the list at the end
    path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 4096)))
    assert peak_of(lambda: restricted_npz.read_npz(path)) < 1 << 22


def test_a_zip_of_many_files_is_refused_from_its_end(tmp_path):
    path = npz(tmp_path, b"x", members=300)
    with pytest.raises(InputError, match="holds 300 files"):
        restricted_npz.read_npz(path)


def test_a_member_whose_name_is_no_text_is_refused(tmp_path):
    path = npz(tmp_path, b"x", name="é" * 5 + "arr.npy")
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(InputError, match="a.npz"):
        restricted_npz.read_npz(path)


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': " + "(" * 300 + ")" * 300 + "}",
        "{'descr': 'O', 'shape': 5}",
        "[" * 3000,
        "\x00" * 90,
    ],
)
def test_a_numpy_header_that_is_none_is_refused(head, tmp_path):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode("latin-1")
    with pytest.raises(InputError, match="a.npz"):
        restricted_npz.read_npz(npz(tmp_path, data))


def test_a_gguf_of_more_items_than_a_vocabulary_has_is_refused_before_they_are_made(tmp_path):
    path = tmp_path / "a.gguf"
    items = (gguf.MAX_ITEMS + 1).to_bytes(8, "little")
    field = struct.pack("<Q", 1) + b"a" + struct.pack("<II", gguf.ARRAY, 0) + items
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
        file.truncate(gguf.MAX_ITEMS + 4096)  # a hole: it takes no disk
    assert peak_of(lambda: gguf.read_header(path)) < 1 << 24
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63))
    assert peak_of(lambda: gguf.read_header(path)) < 1 << 20
