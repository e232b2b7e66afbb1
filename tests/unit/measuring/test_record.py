"""A measurement folder gives back what was written, and refuses whatever was damaged on the way."""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import InputError, IntegrityError, StatisticsError, UnsupportedError
from quantflow.files.canonical import digest_of, file_digest
from quantflow.measuring.record import Measurement, read_measurement, statistic, write_measurement
from quantflow.observers.keys import Key, by_site, parse_key

Q = "model.layers.0.self_attn.q_proj.weight"
FILES = ("calibration.safetensors", "measurement.json", "statistics.safetensors")
META = {
    "layout_version": 1,
    "kind": "measurement",
    "model": {"name": "tiny", "fingerprint": "f" * 64, "family": "llama"},
    "mesh": {"rank": 1, "world": 2, "tp": 1, "dp": 2, "ep": 1},
    "dtype": "float32",
    "seed": 0,
    "calibration": {"hash": "c" * 64, "samples": 4, "tokens": 12, "sequence_length": 8},
    "observers": ["amax", "hessian"],
    "tensors": {Q: {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [4, 2]}},
    "counts": {"samples": 2, "tokens": 5},
    "tools": {"torch": "2"},
}


@pytest.fixture
def measurement():
    return Measurement(
        meta=deepcopy(META),
        statistics={
            f"{Q}|input|amax": torch.tensor(3.5),
            f"{Q}|input|hessian_sum": torch.tensor([[2.0, -1.0], [-1.0, 5.0]]),
            f"{Q}|input|count": torch.tensor(5),
            f"{Q}|output|amax": torch.tensor(0.25),
        },
        sequences=[torch.tensor([5, 6, 7]), torch.tensor([1, 2])],
        indices=[1, 3],
    )


@pytest.fixture
def folder(tmp_path, measurement):
    path = tmp_path / "rank-001-of-002"
    path.mkdir()
    write_measurement(path, measurement)
    return path


def rewrite(folder, **changes):
    """Change fields of measurement.json and give it a digest that fits again."""
    path = folder / "measurement.json"
    meta = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "digest"
    } | changes
    path.write_text(json.dumps({**meta, "digest": digest_of(meta)}))


def replace_tensors(folder, name, tensors):
    """Replace tensors of a file and record its new hash."""
    save_file(load_file(folder / name) | tensors, folder / name)
    files = json.loads((folder / "measurement.json").read_text())["files"]
    rewrite(folder, files=files | {name: file_digest(folder / name)})


def test_what_is_written_is_read(folder, measurement):
    read = read_measurement(folder)
    assert {
        key: value for key, value in read.meta.items() if key not in ("files", "digest")
    } == META
    assert read.statistics.keys() == measurement.statistics.keys()
    for key, value in measurement.statistics.items():
        assert torch.equal(read.statistics[key], value)
        assert read.statistics[key].dtype == value.dtype
    assert [sequence.tolist() for sequence in read.sequences] == [[5, 6, 7], [1, 2]]
    assert read.indices == [1, 3]
    assert sorted(path.name for path in folder.iterdir()) == list(FILES)


def test_the_hashes_are_returned_and_those_of_the_tensors_and_the_digest_recorded(
    tmp_path, measurement
):
    hashes = write_measurement(tmp_path, measurement)
    assert hashes == {name: file_digest(tmp_path / name) for name in FILES}
    meta = json.loads((tmp_path / "measurement.json").read_text())
    assert meta.pop("digest") == digest_of(meta)
    assert meta["files"] == {
        name: file_digest(tmp_path / name) for name in FILES if name != "measurement.json"
    }


def test_writing_what_was_read_gives_the_same_bytes(tmp_path, folder):
    write_measurement(tmp_path, read_measurement(folder))
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_the_order_in_which_statistics_were_made_does_not_matter(tmp_path, folder, measurement):
    write_measurement(
        tmp_path, replace(measurement, statistics=dict(reversed(measurement.statistics.items())))
    )
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_linears_may_share_the_statistics_of_their_input(tmp_path, measurement):
    shared = torch.tensor([1.0, 2.0])
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    keys = [f"{name}|input|channel_amax" for name in ("k", "o", "q", "v")]
    meta = measurement.meta | {"tensors": dict.fromkeys(("k", "o", "q", "v"), META["tensors"][Q])}
    values = dict(zip(keys, (shared, whole[1], shared, whole.T[1]), strict=True))
    write_measurement(tmp_path, replace(measurement, meta=meta, statistics=values))
    read = read_measurement(tmp_path).statistics
    assert [read[key].tolist() for key in keys] == [[1, 2], [3, 4], [1, 2], [2, 4]]


def test_a_rank_without_samples_is_a_measurement(tmp_path, measurement):
    meta = measurement.meta | {"counts": {"samples": 0, "tokens": 0}}
    write_measurement(
        tmp_path, replace(measurement, meta=meta, sequences=[], indices=[], statistics={})
    )
    read = read_measurement(tmp_path)
    assert (read.sequences, read.indices, read.statistics) == ([], [], {})


def test_a_statistic_is_found_by_name_site_and_statistic(measurement):
    assert statistic(measurement, Q, site="output", statistic="amax") == 0.25


@pytest.mark.parametrize(
    ("wanted", "stats"),
    [
        ("hessian_sum", "hessian"),
        ("gradient_sum", "gradient"),
        ("min_val", "min_max"),
        ("amax", "amax"),
        ("count", "count"),
    ],
)
def test_a_missing_statistic_is_refused_and_the_message_says_how_to_get_it(
    measurement, wanted, stats
):
    with pytest.raises(StatisticsError) as caught:
        statistic(measurement, Q, site="weight", statistic=wanted)
    assert (
        str(caught.value)
        == f"{Q}: the measurement has no {wanted} of its weight; measure with --stats {stats}"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(
        InputError, match=rf"{name}: no such file; give a folder that `quantflow measure` finished"
    ):
        read_measurement(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent.measurement\.json: no such file"):
        read_measurement(tmp_path / "absent")


@pytest.mark.parametrize("name", ["calibration.safetensors", "statistics.safetensors"])
def test_a_flipped_bit_anywhere_in_a_tensor_file_is_found(folder, name):
    original = (folder / name).read_bytes()
    for position in range(0, len(original), 3):
        damaged = bytearray(original)
        damaged[position] ^= 1
        (folder / name).write_bytes(damaged)
        with pytest.raises(IntegrityError, match=rf"{name}: sha256 is .*, recorded"):
            read_measurement(folder)


def test_a_flipped_bit_anywhere_in_the_record_is_found(folder):
    path = folder / "measurement.json"
    original = path.read_bytes()
    values = json.loads(original)
    for position in range(0, len(original), 3):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            if json.loads(damaged) == values:
                continue  # white space: the values are the same
        except ValueError:
            pass
        with pytest.raises((InputError, IntegrityError, UnsupportedError)):
            read_measurement(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises((InputError, IntegrityError), match=name):
        read_measurement(folder)


def test_files_of_another_measurement_are_refused(tmp_path, folder, measurement):
    other = replace(
        measurement, statistics=measurement.statistics | {f"{Q}|input|amax": torch.tensor(9.0)}
    )
    write_measurement(tmp_path, other)
    shutil.copy(tmp_path / "statistics.safetensors", folder)
    with pytest.raises(IntegrityError, match=r"statistics\.safetensors: sha256"):
        read_measurement(folder)


def test_a_newer_layout_is_unsupported_whatever_else_it_holds(folder):
    rewrite(folder, layout_version=2, surprise=True)
    with pytest.raises(
        UnsupportedError, match=r"layout_version 2, this quantflow reads up to 1; install a newer"
    ):
        read_measurement(folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "artifact"}', "1"])
def test_a_json_file_of_something_else_is_refused(folder, text):
    (folder / "measurement.json").write_text(text)
    with pytest.raises(InputError, match="not the record of a measurement"):
        read_measurement(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, r"fields missing \[\], unknown \['surprise'\]"),
        ({"layout_version": 0}, r"layout_version 0, kind 'measurement'"),
        ({"layout_version": True}, r"layout_version is True, expected int"),
        ({"seed": "0"}, r"seed is '0', expected int"),
        ({"seed": True}, r"seed is True, expected int"),
        ({"mesh": 3}, r"mesh\.rank is None, expected int"),
        ({"mesh": META["mesh"] | {"rank": 2}}, r"mesh\.rank is 2 of mesh\.world 2"),
        ({"mesh": META["mesh"] | {"rank": -1}}, r"mesh\.rank is -1 of mesh\.world 2"),
        (
            {"calibration": META["calibration"] | {"samples": 3}},
            r"sample numbers \[1, 3\] are not ascending within 0\.\.2",
        ),
        ({"counts": {"samples": 3, "tokens": 5}}, r"counts\.samples is 3, sequences are 2"),
        (
            {"counts": {"samples": 2, "tokens": 6}},
            r"counts\.tokens is 6, tokens in the sequences are 5",
        ),
        ({"tensors": {}}, rf"{Q}\|input was measured, `tensors` does not list it"),
        (
            {"tensors": {Q: {"kind": "diagonal"}}},
            rf"tensors\.{Q} has kind 'diagonal', expected one of replicated",
        ),
        ({"tensors": {Q: "replicated"}}, r"has kind None"),
        ({"files": {}}, r"files is \{\}, expected a hash for each of two files"),
        (
            {"files": ["statistics.safetensors", "calibration.safetensors"]},
            r"expected a hash for each of two files",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(folder, changes, message):
    rewrite(folder, **changes)
    with pytest.raises(InputError, match=message):
        read_measurement(folder)


def test_a_record_without_a_field_is_refused(folder):
    path = folder / "measurement.json"
    meta = json.loads(path.read_text())
    del meta["digest"], meta["tools"]
    path.write_text(json.dumps({**meta, "digest": digest_of(meta)}))
    with pytest.raises(InputError, match=r"fields missing \['tools'\], unknown \[\]"):
        read_measurement(folder)


def test_a_record_without_a_digest_is_refused(folder):
    path = folder / "measurement.json"
    meta = json.loads(path.read_text())
    del meta["digest"]
    path.write_text(json.dumps(meta))
    with pytest.raises(
        IntegrityError, match=r"digest of its content is [0-9a-f]{64}, recorded None"
    ):
        read_measurement(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input|amax", torch.tensor(math.nan), r"input: amax: amax holds 1 NaN and 0 Inf"),
        ("output|amax", torch.tensor(math.inf), r"output: amax: amax holds 0 NaN and 1 Inf"),
        ("input|amax", torch.tensor(-1.0), r"input: amax: amax holds -1\.0, it is at least 0"),
        (
            "input|amax",
            torch.ones(2),
            r"input: amax: amax is torch\.float32 \[2\], expected torch\.float32 \[\]",
        ),
        ("input|count", torch.tensor(-2), r"input: hessian: count holds -2, it is at least 0"),
        (
            "input|hessian_sum",
            -torch.ones(2, 2),
            r"input: hessian: the diagonal of hessian_sum holds -1\.0",
        ),
        ("input|hessian_sum", torch.ones(2, 3), r"input: hessian: the state has \[2, 3\] features"),
        ("input|kurtosis", torch.ones(()), r"input: no observer has the state \['kurtosis'\]"),
        (
            "weight|abs_sum",
            torch.ones(2).double(),
            r"weight: no observer has the state \['abs_sum'\]",
        ),
    ],
)
def test_a_statistic_that_cannot_be_is_refused_when_read_and_when_written(
    folder, tmp_path, measurement, key, value, message
):
    replace_tensors(folder, "statistics.safetensors", {f"{Q}|{key}": value})
    with pytest.raises(StatisticsError, match=rf"{Q}\|{message}"):
        read_measurement(folder)
    with pytest.raises(StatisticsError, match=rf"{Q}\|{message}"):
        write_measurement(
            tmp_path,
            replace(measurement, statistics=measurement.statistics | {f"{Q}|{key}": value}),
        )
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize(
    ("statistic", "value", "message"),
    [
        ("channel_amax", -1e-30, "channel_amax: channel_amax holds -1"),
        ("channel_amax", math.nan, "channel_amax: channel_amax holds 1 NaN and 0 Inf"),
        ("min_val", -math.inf, "min_max: min_val holds 0 NaN and 1 Inf"),
        ("min_val", 1e-30, "min_max: min_val up to 1"),
        ("max_val", -1e-30, "min_max: .* max_val down to -1"),
        ("max_val", math.inf, "min_max: max_val holds 0 NaN and 1 Inf"),
    ],
)
def test_one_value_that_cannot_be_is_found_among_many_sites(
    tmp_path, measurement, place, statistic, value, message
):
    signs = {"channel_amax": 1.0, "min_val": -1.0, "max_val": 1.0}
    values = {
        f"{number}|{site}|{kind}": torch.full((channels,), sign * number)
        for number in range(9)
        for site, channels in (("input", 4), ("output", 2), ("weight", 0))
        for kind, sign in signs.items()
    }
    meta = measurement.meta | {"tensors": {str(number): META["tensors"][Q] for number in range(9)}}
    write_measurement(tmp_path, replace(measurement, meta=meta, statistics=values))
    values[f"{place}|input|{statistic}"][3] = value
    with pytest.raises(StatisticsError, match=rf"^{place}\|input: {message}"):
        write_measurement(tmp_path, replace(measurement, meta=meta, statistics=values))


@pytest.mark.parametrize(
    "key", ["amax", f"{Q}|amax", f"{Q}|momentum|amax", f"{Q}|input|amax|x", "|input|amax"]
)
def test_a_key_that_is_not_one_is_refused(folder, key):
    replace_tensors(folder, "statistics.safetensors", {key: torch.ones(())})
    with pytest.raises(
        StatisticsError,
        match=r"is not <source name>\|<site>\|<statistic> with a site of input, output",
    ):
        read_measurement(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lengths": torch.tensor([3, 3])}, r"lengths add up to 6, there are 5 tokens"),
        (
            {"lengths": torch.tensor([6, -1])},
            r"lengths is torch\.int64 \[2\], expected int64 \[n\] of at least 0",
        ),
        (
            {"tokens": torch.tensor([5, 6, 7, 1, -2])},
            r"tokens is torch\.int64 \[5\], expected int64",
        ),
        ({"tokens": torch.ones(5)}, r"tokens is torch\.float32 \[5\]"),
        ({"indices": torch.tensor([[1, 3]])}, r"indices is torch\.int64 \[1, 2\]"),
        ({"indices": torch.tensor([1, 3, 2])}, r"indices is 3, sequences are 2"),
        ({"indices": torch.tensor([3, 1])}, r"sample numbers \[3, 1\] are not ascending"),
        ({"indices": torch.tensor([1, 1])}, r"sample numbers \[1, 1\] are not ascending"),
        (
            {"indices": torch.tensor([1, 4])},
            r"sample numbers \[1, 4\] are not ascending within 0\.\.3",
        ),
        ({"more": torch.tensor([1])}, r"holds \['indices', 'lengths', 'more', 'tokens'\]"),
    ],
)
def test_token_ids_that_contradict_themselves_are_refused(folder, tensors, message):
    replace_tensors(folder, "calibration.safetensors", tensors)
    with pytest.raises(InputError, match=message):
        read_measurement(folder)


def test_a_file_that_is_not_safetensors_is_refused_though_its_hash_fits(folder):
    (folder / "statistics.safetensors").write_bytes(b"not a tensor")
    files = json.loads((folder / "measurement.json").read_text())["files"]
    rewrite(
        folder,
        files=files | {"statistics.safetensors": file_digest(folder / "statistics.safetensors")},
    )
    with pytest.raises(
        InputError,
        match=r"statistics\.safetensors: header of \d+ bytes, the format allows 100000000",
    ):
        read_measurement(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, measurement):
    with pytest.raises(FileNotFoundError, match="absent/statistics"):
        write_measurement(tmp_path / "absent", measurement)


def test_keys_read_back_and_statistics_are_sorted_by_site():
    assert parse_key("a.b|k_cache|amax") == Key("a.b", "k_cache", "amax")
    assert str(Key("a.b", "k_cache", "amax")) == "a.b|k_cache|amax"
    one = torch.ones(1)
    sites = by_site(
        {"b|input|amax": one, "a|output|amax": one, "a|input|min_val": one, "a|input|max_val": one}
    )
    assert [(site, list(values)) for site, values in sites.items()] == [
        (("a", "input"), ["max_val", "min_val"]),
        (("a", "output"), ["amax"]),
        (("b", "input"), ["amax"]),
    ]
