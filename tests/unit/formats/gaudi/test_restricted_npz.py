"""The reader of foreign pickles: what numpy writes is read, all else is refused before it runs."""

import copyreg
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantflow.errors import InputError
from quantflow.formats.gaudi.restricted_npz import MEMBER, dumps, loads, npz_bytes, read_npz

TABLE = {
    "GlobalRank": None,
    "LocalRank": 3,
    "Mode": "DynamicRange",
    "Nodes": {
        "model.layers.0.self_attn.q_proj": {
            "inputs": [np.array([[1.5]], dtype=np.float32)],
            "params": {"weight": np.array([[0.25], [3.0]], dtype=np.float32)},
        },
        "ünïcode": {"inputs": [], "flag": True, "off": False, "number": -7, "float": 0.1},
    },
}


def same(left, right) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def npz(payload: bytes, *, member: str = MEMBER) -> bytes:
    """Wrap a pickle as numpy does."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(
            member, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + payload
        )
    return buffer.getvalue()


def test_what_numpy_saves_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", TABLE)
    assert same(read_npz(tmp_path / "a.npz"), TABLE)
    np.savez_compressed(tmp_path / "b.npz", TABLE)
    assert same(read_npz(tmp_path / "b.npz"), TABLE)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("module", [b"numpy.core", b"numpy._core"])
def test_every_protocol_and_both_spellings_of_numpy_are_read(protocol, module):
    data = pickle.dumps(np.array(TABLE, dtype=object), protocol=protocol)
    if protocol == 4:  # its texts carry their length
        data = data.replace(
            b"\x8c\x16numpy._core.multiarray",
            b"\x8c" + bytes([len(module) + 11]) + module + b".multiarray",
        )
        frame = data.index(b"\x95")
        data = data[:frame] + data[frame + 9 :]  # the length of the frame is another one now
    else:
        data = data.replace(b"numpy._core", module)
    assert module + b".multiarray" in data
    assert same(loads(data, name="file"), TABLE)


def test_numbers_of_numpy_are_read_as_arrays():
    found = loads(
        pickle.dumps({"a": np.float32(0.1), "b": np.int64(-3), "c": np.float64(2)}, protocol=4),
        name="file",
    )
    assert (
        found["a"].shape == ()
        and found["a"] == np.float32(0.1)
        and found["b"] == -3
        and found["c"] == 2.0
    )


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<i8", ">i2", "u1", "?", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_number_order_and_layout_are_read(dtype, order):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = loads(pickle.dumps(np.asarray(array, order=order), protocol=4), name="file")
    assert np.array_equal(found, array) and found.dtype == array.dtype.newbyteorder("=")


def test_numpy_reads_what_is_written(tmp_path):
    (tmp_path / "a.npz").write_bytes(npz_bytes(TABLE))
    with np.load(tmp_path / "a.npz", allow_pickle=True) as archive:
        assert archive.files == ["arr_0"]
        assert same(archive["arr_0"].item(), TABLE)
    assert same(read_npz(tmp_path / "a.npz"), TABLE)


@pytest.mark.slow
def test_what_is_written_has_one_byte_form_and_no_time(tmp_path):
    program = (
        "import numpy as np, sys; from quantflow.formats.gaudi.restricted_npz import npz_bytes; "
        "sys.stdout.buffer.write(npz_bytes({'a': np.ones((1, 1), dtype=np.float32), 'b': [0.5, "
        "'text']}))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env={**os.environ, "TZ": zone},
        ).stdout
        for zone in ("UTC", "Asia/Tokyo")
    ]
    assert outputs[0] == outputs[1] and len(outputs[0]) > 200
    with zipfile.ZipFile(io.BytesIO(outputs[0])) as archive:
        assert archive.infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)


def test_the_written_pickle_names_numpy_as_every_release_knows_it():
    names = {
        argument
        for opcode, argument, _ in pickletools.genops(dumps(TABLE))
        if opcode.name == "GLOBAL"
    }
    assert names == {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**31), 2**31 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_data_comes_back(value):
    assert same(loads(dumps(value), name="file"), value)
    assert same(pickle.loads(dumps(value)).item(), value)


@given(st.binary(max_size=60))
def test_noise_is_refused_with_the_files_name(data):
    try:
        loads(data, name="noise.npz")
    except InputError as error:
        assert "noise.npz" in error.cause


class Canary:
    """Runs a function when it is unpickled."""

    def __init__(self, function, *arguments) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def attacks(path):
    """Pickles that would write a file if they were loaded, by the way in which they would."""
    created = str(path)
    command = f"touch {created}"
    yield "mkdir", pickle.dumps({"Nodes": Canary(os.mkdir, created)})
    yield "os.system", pickle.dumps(Canary(os.system, command), protocol=0)
    yield "subprocess", pickle.dumps([Canary(subprocess.getoutput, command)], protocol=4)
    yield "eval", pickle.dumps(Canary(eval, f"open({created!r}, 'w')"), protocol=2)
    yield (
        "by way of numpy",
        b"cnumpy.lib.npyio\nsave\n(" + pickle.dumps(created, protocol=0)[:-1] + b"I1\ntR.",
    )
    yield "exec", pickle.dumps(Canary(exec, f"open({created!r}, 'w')"))


@pytest.mark.parametrize(
    "kind", ["mkdir", "os.system", "subprocess", "eval", "by way of numpy", "exec"]
)
def test_a_pickle_that_would_write_a_file_is_refused_and_there_is_no_file(tmp_path, kind):
    created = tmp_path / "created"
    payload = dict(attacks(created))[kind]
    if kind == "mkdir":  # the canary sings when nobody restricts it
        pickle.loads(payload)
        created.rmdir()
    (tmp_path / "a.npz").write_bytes(npz(payload))
    with pytest.raises(
        InputError, match=r"a\.npz: the pickle asks for the name .*; nothing of it was run"
    ):
        read_npz(tmp_path / "a.npz")
    assert not created.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cnumpy\nndarray\n(K\x01tR.",  # a call of the class
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
        b"c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.",  # a change of the function
        # an array of another class
        b"cnumpy.core.multiarray\n_reconstruct\n(c_codecs\nencode\nK\x00\x85C\x01btR.",
        b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R.",  # a dtype is no data
        b"cnumpy\ndtype\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04evil\x93.",
        b"\x82\x01.",  # an extension code
        b"Pname\n.",  # a persistent id
        b"(lp0\ng0\na.",  # a list that holds itself
        b"C\x01a.",  # bytes
    ],
)
def test_other_uses_of_the_machine_are_refused(payload):
    with pytest.raises(InputError, match="file"):
        loads(payload, name="file")


def test_registered_extensions_do_not_open_a_door():
    copyreg.add_extension("os", "system", 241)
    try:
        with pytest.raises(InputError, match=r"os\.system"):
            loads(b"\x82\xf1.", name="file")
    finally:
        copyreg.remove_extension("os", "system", 241)


def test_a_few_bytes_that_stand_for_more_values_than_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr("quantflow.formats.gaudi.restricted_npz.MAX_VALUES", 10_000)
    value = [0]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(InputError, match="more than 10000 values"):
        loads(pickle.dumps(value), name="file")


@pytest.mark.parametrize(
    "array",
    [np.array(["a"]), np.array([1 + 2j]), np.array([None, None]), np.zeros(2, dtype=[("a", "f4")])],
)
def test_arrays_of_anything_but_numbers_are_refused(array):
    with pytest.raises(InputError):
        loads(pickle.dumps(array, protocol=4), name="file")


def test_files_that_are_no_such_archive_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, TABLE)
    whole = path.read_bytes()
    for content in (b"", b"no zip", whole[: len(whole) // 2], npz(b"", member="arr_1.npy")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.npz"):
            read_npz(path)
    np.savez(path, np.ones(3))
    with pytest.raises(InputError, match="a table is expected"):
        read_npz(path)
    with pytest.raises(InputError, match="missing"):
        read_npz(tmp_path / "missing.npz")


def test_what_no_measurement_holds_is_not_written():
    for value in (object(), 2**40, np.array(["a"]), {"a": b"bytes"}):
        with pytest.raises(TypeError):
            npz_bytes({"value": value})
