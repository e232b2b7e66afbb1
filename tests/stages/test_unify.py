"""The verb unify on rank folders: which files are read, what is printed, refused, and written."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantflow.files.canonical import digest_of, readable_json
from quantflow.measuring.merging.ranks import unify_each
from quantflow.measuring.record import (
    Measurement,
    open_measurements,
    read_measurement,
    read_meta,
    write_measurement,
)
from quantflow.unifying import unify
from tests.shared import run, slow

ROOT = Path(__file__).resolve().parents[2]
NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture
def said(capsys):
    """Run a command line and return (exit code, stdout, stderr)."""

    def call(*arguments):
        capsys.readouterr()
        code = run(*arguments)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(said):
    """Run a command line that fails with a code, and return cause and remedy."""

    def call(code, *arguments):
        found, _, err = said(*arguments)
        assert found == code, err
        told = err.splitlines()[-2:]
        assert [line[:6] for line in told] == ["error:", "  fix:"] and "Traceback" not in err
        return "\n".join(told)

    return call


def meta(rank, *, tp, dp):
    column = {
        "kind": "column",
        "axis": 0,
        "offset": 2 * (rank % tp),
        "length": 2,
        "full_shape": [2 * tp, 3],
    }
    replicated = {
        "kind": "replicated",
        "axis": None,
        "offset": 0,
        "full_shape": [2, 3],
        "plan": "column",
    }
    return {
        "layout_version": 1,
        "kind": "measurement",
        "model": {"name": "tiny", "fingerprint": "f" * 64, "family": "llama"},
        "mesh": {"rank": rank, "world": tp * dp, "tp": tp, "dp": dp, "ep": 1},
        "dtype": "float32",
        "seed": 0,
        "calibration": {"hash": "c" * 64, "samples": dp, "tokens": 2 * dp, "sequence_length": 2},
        "observers": ["amax", "channel_amax"],
        "tensors": {NAME: column if tp > 1 else replicated},
        "counts": {"samples": 1, "tokens": 2},
        "tools": {"torch": "2"},
    }


def write(folder, rank, *, tp=1, dp=1, amax=None, **changes):
    """Write one finished rank whose output reached `amax`, its number by default."""
    value = float(rank + 1 if amax is None else amax)
    measurement = Measurement(
        meta={**meta(rank, tp=tp, dp=dp), **changes},
        statistics={
            f"{NAME}|output|amax": torch.tensor(value),
            f"{NAME}|output|channel_amax": torch.tensor([value, value / 2]),
        },
        sequences=[torch.tensor([rank // tp, 7])],
        indices=[rank // tp],
    )
    path = folder / f"rank-{rank:03d}-of-{tp * dp:03d}"
    path.mkdir(parents=True)
    write_measurement(path, measurement)
    (path / "DONE.json").write_text(json.dumps({"stage": "measure", "inputs": {}, "files": {}}))
    return path


def ranks(folder, *, tp=1, dp=1, amax=()):
    for rank in range(tp * dp):
        write(folder, rank, tp=tp, dp=dp, amax=amax[rank] if amax else None)
    return folder


def amax(folder, rank, world):
    return load_file(folder / f"rank-{rank:03d}-of-{world:03d}" / "statistics.safetensors")[
        f"{NAME}|output|amax"
    ].item()


def test_rank_1_of_16_is_not_rank_11(said, tmp_path):
    """A search for `1_16` in file names finds `11_16` as well.

    The one that the folder lists first wins.
    """
    values = [float(rank + 1) for rank in range(16)]
    ranks(tmp_path / "m", dp=16, amax=values)
    code, out, err = said("unify", "-g", "0-7", "8-15", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert code == 0, err
    assert [amax(tmp_path / "u", rank, 2) for rank in (0, 1)] == [8.0, 16.0]
    code, out, err = said(
        "unify", "-g", *map(str, range(16)), "-m", tmp_path / "m", "-o", tmp_path / "same"
    )
    assert code == 0, err
    assert [amax(tmp_path / "same", rank, 16) for rank in range(16)] == values


def test_four_groups_of_two_are_written_in_one_go(said, tmp_path):
    ranks(tmp_path / "m", dp=8)
    code, _, err = said(
        "unify", "-g", "01", "23", "45", "67", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )
    assert code == 0, err
    assert [amax(tmp_path / "u", rank, 4) for rank in range(4)] == [2.0, 4.0, 6.0, 8.0]
    recorded = json.loads((tmp_path / "u" / "DONE.json").read_text())["files"]
    assert len(recorded) == 4 * 3
    for name, about in recorded.items():
        data = (tmp_path / "u" / name).read_bytes()
        assert about == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_a_rank_is_written_while_the_next_one_is_merged_and_no_other(said, tmp_path, monkeypatch):
    ranks(tmp_path / "m", dp=8)
    made, changed = [], threading.Condition()

    def each(*arguments, **options):
        for measurement in unify_each(*arguments, **options):
            with changed:
                made.append(measurement.meta["mesh"]["rank"])
                changed.notify_all()
            yield measurement

    def write_one(path, measurement):
        due = min(measurement.meta["mesh"]["rank"] + 2, 4)
        with changed:
            changed.wait_for(lambda: len(made) >= due, timeout=60)
            assert len(made) == due
        return write_measurement(path, measurement)

    monkeypatch.setattr(unify, "unify_each", each)
    monkeypatch.setattr(unify, "write_measurement", write_one)
    code, _, err = said("unify", "--ranks", "4", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert code == 0, err
    assert [amax(tmp_path / "u", rank, 4) for rank in range(4)] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_a_rank_that_cannot_be_written_leaves_nothing_of_the_others(
    refused, tmp_path, monkeypatch, failing
):
    ranks(tmp_path / "m", dp=8)

    def write_one(path, measurement):
        time.sleep(0.05)  # others are under way when one fails
        if measurement.meta["mesh"]["rank"] == failing:
            raise OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "statistics.safetensors")
            )
        return write_measurement(path, measurement)

    monkeypatch.setattr(unify, "write_measurement", write_one)
    told = refused(5, "unify", "--ranks", "4", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert f"rank-00{failing}-of-004" in told
    assert not any((tmp_path / name).exists() for name in ("u", ".u.tmp", ".u.old"))


def test_any_grouping_of_replicas_that_covers_every_rank_once_is_merged(said, tmp_path):
    ranks(tmp_path / "m", dp=8, amax=[1.0, 7.0, 3.0, 2.0, 8.0, 5.0, 4.0, 6.0])
    code, _, err = said(
        "unify", "-g", "7,0,2,5", "6134", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )
    assert code == 0, err
    assert [amax(tmp_path / "u", rank, 2) for rank in (0, 1)] == [6.0, 8.0]


@pytest.mark.parametrize(
    "groups",
    [
        ["-g", "0123", "4567"],
        ["-g", "0,1,2,3", "4-7"],
        ["-g", "0-3", "-g", "4,5,6,7"],
        ["-g", "3210 4-7"],
        ["--ranks", "2"],
    ],
)
def test_groups_are_written_as_people_write_them(said, tmp_path, groups):
    ranks(tmp_path / "m", dp=8)
    code, _, err = said("unify", *groups, "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert code == 0, err
    assert [amax(tmp_path / "u", rank, 2) for rank in (0, 1)] == [4.0, 8.0]


def test_files_beside_the_ranks_change_nothing(said, tmp_path):
    """Counting the files of a folder makes every stray one a rank."""
    ranks(tmp_path / "m", dp=2)
    for name in (
        "notes.json",
        "rank-000-of-002.json",
        "measure_hooks_maxabs_0_8.json",
        "rank-000-of-002.log",
    ):
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "m" / "rank-old").mkdir()
    (tmp_path / "m" / ".rank-000-of-002.work").mkdir()
    code, _, err = said("unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert code == 0, err
    assert amax(tmp_path / "u", 0, 1) == 2.0


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_rank_is_named_whichever_it_is(refused, tmp_path, gone):
    """The first missing rank fails without a name elsewhere.

    Any other is dropped in silence.
    """
    ranks(tmp_path / "m", dp=3)
    shutil.rmtree(tmp_path / "m" / f"rank-00{gone}-of-003")
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert f"measurements of 3 ranks: missing {gone}" in told and "--allow-missing" in told
    assert not (tmp_path / "u").exists()


def test_going_on_without_a_rank_is_a_choice_that_the_result_records(said, tmp_path):
    ranks(tmp_path / "m", dp=3)
    shutil.rmtree(tmp_path / "m" / "rank-002-of-003")
    line = ("unify", "--allow-missing", "-m", tmp_path / "m", "-o", tmp_path / "u")
    code, out, err = said(*line, "--json")
    assert code == 0 and "rank 0 is without ranks 2" in err
    assert json.loads(out)["missing"] == [2]
    assert read_measurement(tmp_path / "u" / "rank-000-of-001").meta["unified"]["missing"] == [2]
    assert amax(tmp_path / "u", 0, 1) == 2.0


def test_a_card_of_a_replica_that_is_missing_leaves_a_hole_and_is_refused(refused, tmp_path):
    ranks(tmp_path / "m", tp=2, dp=2)
    shutil.rmtree(tmp_path / "m" / "rank-001-of-004")
    told = refused(3, "unify", "--allow-missing", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert "replica 0 (ranks 0 to 1): 1 missing" in told and "rank-000-of-004: rank 0" in told


def test_a_rank_that_is_there_twice_is_named_with_its_files(refused, tmp_path):
    ranks(tmp_path / "m", dp=2)
    shutil.rmtree(tmp_path / "m" / "rank-001-of-002")
    shutil.copytree(tmp_path / "m" / "rank-000-of-002", tmp_path / "m" / "rank-001-of-002")
    for allowed in ((), ("--allow-missing",)):
        told = refused(3, "unify", *allowed, "-m", tmp_path / "m", "-o", tmp_path / "u")
        assert "twice 0" in told and "rank-000-of-002" in told and "rank-001-of-002" in told


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["-g", "01"], "missing 2, 3"),
        (["-g", "01", "12", "3"], "named twice 1"),
        (["-g", "012", "3"], "groups of 1 and 3 ranks"),
        (["-g", "0123", "4"], "unknown 4"),
        (["--ranks", "3"], "4 ranks into 3 groups of one size; use one of 1, 2, 4"),
        (["--ranks", "0"], "4 ranks into 0 groups"),
        (["--ranks", "2", "-g", "01", "23"], "groups beside ranks"),
        (["--expand", "2", "--ranks", "2"], "ranks beside expand"),
    ],
)
def test_groups_that_do_not_cover_every_rank_once_are_refused(refused, tmp_path, groups, message):
    ranks(tmp_path / "m", dp=4)
    told = refused(2, "unify", *groups, "-m", tmp_path / "m", "-o", tmp_path / "u").replace(
        "\n  fix:", ";"
    )
    assert message in told


def test_ranks_of_two_worlds_are_refused_with_their_files(refused, tmp_path):
    ranks(tmp_path / "m", dp=2)
    write(tmp_path / "m", 0, dp=4)
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert "made by 2, 4 ranks" in told and "rank-000-of-004" in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"name": "tiny", "fingerprint": "e" * 64, "family": "llama"}},
            "model.fingerprint is 'eee",
        ),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', on "),
        ({"seed": 5}, "seed is 5, on "),
        ({"observers": ["amax"]}, "observers is ['amax'], on "),
        ({"tools": {"torch": "2", "instructions": "AVX2"}}, "tools.instructions is 'AVX2', on "),
        ({"device": "gaudi2"}, "device is 'gaudi2', on "),
        (
            {"calibration": {"hash": "d" * 64, "samples": 2, "tokens": 4, "sequence_length": 2}},
            "calibration.hash is 'ddd",
        ),
    ],
)
def test_a_foreign_rank_is_refused_with_its_file_and_both_values(
    refused, tmp_path, change, message
):
    write(tmp_path / "m", 0, dp=2)
    write(tmp_path / "m", 1, dp=2, **change)
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert f"{tmp_path / 'm' / 'rank-001-of-002'}: rank 1: {message}" in told
    assert str(tmp_path / "m" / "rank-000-of-002") in told


def test_a_damaged_rank_is_refused_with_its_file(refused, tmp_path):
    ranks(tmp_path / "m", dp=2)
    path = tmp_path / "m" / "rank-001-of-002" / "statistics.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path}: sha256 is" in refused(7, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    path.unlink()
    assert f"{path}: no such file" in refused(
        3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "1 NaN and 0 Inf"),
        (float("inf"), "0 NaN and 1 Inf"),
        (-2.0, "-2.0, it is at least 0"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_cannot_be_is_refused_with_its_file_in_any_order(
    refused, tmp_path, monkeypatch, value, message, place
):
    """`max` of Python takes NaN or drops it, depending on which comes first."""
    from quantflow.measuring import record

    with monkeypatch.context() as patch:
        # a writer that did not look
        patch.setattr(record, "_check_statistics", lambda _measurement: None)
        for rank in range(2):
            write(tmp_path / "m", rank, dp=2, amax=value if rank == place else 1.0)
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert f"rank-00{place}-of-002: rank {place}: {NAME}|output|amax holds {message}" in told
    assert not (tmp_path / "u").exists()


def test_scales_are_not_merged_because_they_are_derived(refused, tmp_path):
    """Scale files are dictionaries where weights have scales per channel.

    Statistics are merged, and scales made from them.
    """
    folder = tmp_path / "m" / "rank-000-of-001"
    folder.mkdir(parents=True)
    for name in (
        "DONE.json",
        "measurement.json",
        "statistics.safetensors",
        "calibration.safetensors",
    ):
        (folder / name).write_text(
            json.dumps({"Mode": "Scale", "Nodes": {NAME: {"params": {"weight": {"0": [1.0]}}}}})
        )
    (folder / "DONE.json").write_text(json.dumps({"stage": "x", "inputs": {}, "files": {}}))
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert f"{folder / 'measurement.json'}: not the record of a measurement" in told


def test_the_output_is_made_with_its_parents_replaced_by_force_only_and_never_in_the_input(
    said, refused, tmp_path
):
    ranks(tmp_path / "m", dp=2)
    deep = tmp_path / "a" / "b" / "c"
    assert said("unify", "-m", tmp_path / "m", "-o", deep)[0] == 0
    before = (deep / "DONE.json").read_bytes()
    assert "groups = [[0, 1]], now [[0], [1]]" in refused(
        2, "unify", "-g", "0", "1", "-m", tmp_path / "m", "-o", deep
    )
    assert (deep / "DONE.json").read_bytes() == before
    assert said("unify", "-g", "0", "1", "-m", tmp_path / "m", "-o", deep, "--force")[0] == 0
    for inside in (tmp_path / "m" / "unified", tmp_path / "m", tmp_path):
        told = refused(2, "unify", "-m", tmp_path / "m", "-o", inside, "--force")
        assert "lies in the" in told and "write beside" in told
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "rank-000-of-002",
        "rank-001-of-002",
    ]


@pytest.mark.slow
def test_checks_hold_where_python_leaves_assertions_out(tmp_path):
    ranks(tmp_path / "m", dp=4)
    line = [
        sys.executable,
        "-O",
        "-m",
        "quantflow",
        "unify",
        "-g",
        "01",
        "2",
        "-m",
        tmp_path / "m",
        "-o",
        tmp_path / "u",
    ]
    result = subprocess.run(
        list(map(str, line)), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 2 and "groups of 4 ranks: missing 3" in result.stderr
    assert not (tmp_path / "u").exists()


def test_the_result_is_json_and_safetensors_under_the_names_of_ranks(said, tmp_path):
    """No reader of it needs to run what a pickle says."""
    ranks(tmp_path / "m", dp=4)
    assert said("unify", "--ranks", "2", "-m", tmp_path / "m", "-o", tmp_path / "u")[0] == 0
    found = {
        str(path.relative_to(tmp_path / "u"))
        for path in (tmp_path / "u").rglob("*")
        if path.is_file()
    }
    parts = ("calibration.safetensors", "measurement.json", "statistics.safetensors")
    assert found == {
        "DONE.json",
        *(f"rank-00{rank}-of-002/{part}" for rank in (0, 1) for part in parts),
    }
    for name in found:
        text = (tmp_path / "u" / name).read_bytes()
        assert json.loads(
            text if name.endswith("json") else text[8 : 8 + int.from_bytes(text[:8], "little")]
        )


def test_what_was_never_measured_is_answered_with_the_step_that_is_missing(refused, tmp_path):
    """Elsewhere the only symptom is a file that fails to load."""
    (tmp_path / "m").mkdir()
    told = refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert "holds no rank-*-of-* folder" in told and "`quantflow measure`" in told
    told = refused(3, "unify", "-m", tmp_path / "nowhere", "-o", tmp_path / "u")
    assert "nowhere" in told and "`quantflow measure`" in told


def test_measuring_takes_no_scheme_so_that_nobody_measures_what_is_quantized(said, tmp_path):
    code, _, err = said("measure", tmp_path, "-o", tmp_path / "m", "--scheme", "FP8")
    assert code == 2 and "--scheme" in err


@pytest.fixture
def make(tmp_path):
    """Run a target of the Makefile with this Python, on folders of its own."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    verb = environment / "bin" / "quantflow"
    verb.write_text(f'#!/bin/sh\nexec {sys.executable} -m quantflow "$@"\n')
    verb.chmod(0o755)
    (environment / ".ready").touch()

    def call(*words):
        line = [
            "make",
            "--no-print-directory",
            "-C",
            str(ROOT),
            f"VENV={environment}",
            f"WORK={tmp_path / 'work'}",
            *words,
        ]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)

    return call


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.slow
def test_make_unify_takes_groups_as_they_are_written(make, tmp_path):
    ranks(tmp_path / "work" / "1-measure", dp=4)
    result = make("unify", "GROUPS=01 23")
    assert result.returncode == 0, result.stderr
    assert "amax          maximum  2" in result.stdout.splitlines()
    assert [amax(tmp_path / "work" / "3-unify", rank, 2) for rank in (0, 1)] == [2.0, 4.0]
    plain = make("-n", "unify").stdout.split()
    assert plain[1:] == [
        "unify",
        "-m",
        f"{tmp_path}/work/1-measure",
        "-o",
        f"{tmp_path}/work/3-unify",
        "--force",
    ]
    assert make("unify", "GROUPS=01 2").returncode == 2
    begun = (
        make("-n", "measure", f"MODEL={tmp_path}", "RANKS=4", "TP=2")
        .stdout.splitlines()[-1]
        .split()
    )
    assert begun[1:3] == ["measure", str(tmp_path)] and begun[-4:] == ["--ranks", "4", "--tp", "2"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_variable_of_the_makefile_becomes_the_option_of_its_verb(make, tmp_path):
    def line(*words):
        return " ".join(make("-n", *words).stdout.replace("\\\n", " ").split()).partition(
            "/quantflow "
        )[2]

    work = tmp_path / "work"
    assert line("measure", "SAMPLES=8").endswith(" --samples 8") and "--samples" not in line(
        "measure"
    )
    assert " --scheme W8A8 --algorithm rtn --measurement " in line(
        "quantize", "SCHEME=W8A8", "ALGORITHM=rtn"
    )
    assert line("validate", "GATE=limits.yaml", "TASKS=small_piqa").endswith(
        " --gate limits.yaml --tasks small_piqa"
    )
    assert (
        line("export") == f"export {work}/2-quantize -o {work}/4-export --format compressed-tensors"
    )
    assert (
        line("export", "FORMAT=inc")
        == f"export {work}/1-measure -o {work}/4-export-inc --format inc --device gaudi2"
    )
    assert line("export", "FORMAT=inc", "DEVICE=gaudi3").endswith(" --device gaudi3")
    assert (
        line("export", "FORMAT=gguf")
        == f"export {work}/4-export -o {work}/4-export-gguf --format gguf"
    )


def test_the_result_is_a_table_of_what_was_merged_how_and_the_folder(said, tmp_path):
    ranks(tmp_path / "m", tp=2, dp=2)
    code, out, err = said("unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    words = f"--scheme W4A16 --measurement {tmp_path / 'u'}"
    assert (code, err) == (0, f"next: quantflow quantize MODEL -o DIR {words}\n")
    assert out.splitlines() == [
        "statistic     rule                        count",
        "------------  --------------------------  -----",
        "amax          maximum                     1",
        "channel_amax  concatenated, then maximum  1",
        str(tmp_path / "u"),
    ]
    code, out, err = said("unify", "-m", tmp_path / "m", "-o", tmp_path / "u", "--json")
    assert json.loads(out) == {
        "folder": str(tmp_path / "u"),
        "mesh": {"world": 1, "tp": 1, "dp": 1, "ep": 1},
        "merged": [
            {"statistic": "amax", "rule": "maximum", "count": 1},
            {"statistic": "channel_amax", "rule": "concatenated, then maximum", "count": 1},
        ],
        "missing": [],
        "outliers": [],
        "bounds": [],
        "unseen": [],
    }
    assert "unify: up to date" in err
    merged = read_measurement(tmp_path / "u" / "rank-000-of-001")
    assert merged.statistics[f"{NAME}|output|channel_amax"].tolist() == [3.0, 1.5, 4.0, 2.0]


def test_a_rank_that_saw_eight_times_the_others_is_told(said, tmp_path):
    ranks(tmp_path / "m", dp=4, amax=[1.0, 2.0, 16.0, 2.0])
    code, out, err = said("unify", "-m", tmp_path / "m", "-o", tmp_path / "u", "--json")
    assert code == 0
    assert err == f"unify: {NAME}|output|amax: rank 2 saw 16, the median rank 2\n"
    assert json.loads(out)["outliers"] == [
        {"key": f"{NAME}|output|amax", "rank": 2, "amax": 16.0, "median": 2.0}
    ]
    unified = read_measurement(tmp_path / "u" / "rank-000-of-001").meta["unified"]
    assert unified["maxima"] == {f"{NAME}|output|amax": 2}


def test_one_rank_is_expanded_and_unified_again(said, refused, tmp_path):
    write(tmp_path / "m", 0, amax=8.0)
    line = ("unify", "--expand", "2", "-m", tmp_path / "m", "-o", tmp_path / "two")
    code, out, err = said(*line, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["mesh"] == {"world": 2, "tp": 2, "dp": 1, "ep": 1}
    assert [amax(tmp_path / "two", rank, 2) for rank in (0, 1)] == [8.0, 4.0]
    assert "up to date" in said(*line)[2]
    assert said("unify", "-m", tmp_path / "two", "-o", tmp_path / "one")[0] == 0
    again = read_measurement(tmp_path / "one" / "rank-000-of-001").statistics
    assert again[f"{NAME}|output|channel_amax"].tolist() == [8.0, 4.0]
    assert "2 rows over 4 cards" in refused(
        2, "unify", "--expand", "4", "-m", tmp_path / "m", "-o", tmp_path / "four"
    )
    assert "expand to 0 ranks" in refused(
        2, "unify", "--expand", "0", "-m", tmp_path / "m", "-o", tmp_path / "none"
    )
    told = refused(3, "unify", "--expand", "2", "-m", tmp_path / "two", "-o", tmp_path / "more")
    assert "holds 2 ranks, one is expanded" in told


def test_the_folder_of_one_rank_can_be_given_itself(said, tmp_path):
    path = write(tmp_path / "m", 0, amax=8.0)
    assert said("unify", "--expand", "2", "-m", path, "-o", tmp_path / "two")[0] == 0


def test_statistics_stay_in_their_files_until_they_are_asked_for(tmp_path):
    path = write(tmp_path / "m", 0)
    (opened,) = open_measurements({path: read_meta(path)})
    whole = read_measurement(path)
    assert dict(opened.statistics.items()).keys() == whole.statistics.keys()
    assert (
        len(opened.statistics) == 2
        and f"{NAME}|output|amax" in opened.statistics
        and "x" not in opened.statistics
    )
    for key, value in whole.statistics.items():
        assert (
            torch.equal(opened.statistics[key], value)
            and opened.statistics[key].dtype == value.dtype
        )
    with pytest.raises(KeyError):
        opened.statistics["x"]
    assert opened.origin == str(path) and opened.who == f"{path}: rank 0"


def test_measured_ranks_of_a_model_carry_the_plan_by_which_they_are_expanded(
    said, llama, text_files, tmp_path
):
    measured, four = tmp_path / "m", tmp_path / "four"
    line = (
        "measure",
        llama,
        "-o",
        measured,
        "--calibration",
        text_files["calibration"],
        "--samples",
        "3",
    )
    assert said(*line)[0] == 0
    code, _, err = said("unify", "--expand", "4", "-m", measured, "-o", four)
    assert code == 0, err
    whole = read_measurement(measured / "rank-000-of-001")
    parts = [read_measurement(four / f"rank-00{rank}-of-004") for rank in range(4)]
    prefix = "model.layers.1"
    for name, kind in (
        ("self_attn.q_proj", "column"),
        ("self_attn.o_proj", "row"),
        ("mlp.down_proj", "row"),
        ("self_attn", "column"),
    ):
        assert {part.meta["tensors"][f"{prefix}.{name}"]["kind"] for part in parts} == {kind}
    key = f"{prefix}.mlp.down_proj|input|channel_amax"
    assert torch.equal(torch.cat([part.statistics[key] for part in parts]), whole.statistics[key])
    kv_heads = [part.meta["tensors"][f"{prefix}.self_attn"]["offset"] for part in parts]
    assert kv_heads == [0, 0, 1, 1]  # two heads, copied on four cards
    code, _, err = said("unify", "-m", four, "-o", tmp_path / "one")
    assert code == 0, err
    again = read_measurement(tmp_path / "one" / "rank-000-of-001")
    assert again.meta["tensors"] == whole.meta["tensors"]
    for key, value in again.statistics.items():
        assert torch.equal(value, whole.statistics[key]), key
    assert {
        key.rpartition("|")[2] for key in whole.statistics.keys() - again.statistics.keys()
    } == {"counts"}


@pytest.mark.parametrize("tp", [slow(1), 8, 64])
def test_64_ranks_become_one_or_four_or_stay_64(said, tmp_path, tp):
    values = [float((rank * 37) % 64 + 1) for rank in range(64)]
    ranks(tmp_path / "m", tp=tp, dp=64 // tp, amax=values)
    for world in {1: (1, 4, 64), 8: (1, 4), 64: (1,)}[tp]:
        size = 64 // world
        groups = [
            f"{first}-{first + size - 1}" if size > 1 else str(first)
            for first in range(0, 64, size)
        ]
        code, _, err = said(
            "unify", "-g", *groups, "-m", tmp_path / "m", "-o", tmp_path / f"u{world}"
        )
        assert code == 0, err
        expected = [max(values[first : first + size]) for first in range(0, 64, size)]
        assert [amax(tmp_path / f"u{world}", rank, world) for rank in range(world)] == expected


@pytest.mark.slow
def test_more_ranks_than_descriptors_are_a_sentence_and_with_more_the_command_continues(tmp_path):
    ranks(tmp_path / "m", dp=64)
    for limit, code in ((40, 5), (120, 0)):
        unify = f"{sys.executable} -m quantflow unify -m {tmp_path / 'm'} -o {tmp_path / 'u'}"
        line = f"ulimit -n {limit}; {unify}"
        result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr
        assert code == 0 or "ulimit -n" in result.stderr and "Traceback" not in result.stderr
    assert amax(tmp_path / "u", 0, 1) == 64.0


@pytest.mark.parametrize("key", ["world", "tp", "dp", "ep"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 2**63])
def test_a_declared_world_that_nobody_has_is_refused_before_anything_is_made_of_it(
    refused, tmp_path, key, value
):
    ranks(tmp_path / "m")
    path = tmp_path / "m" / "rank-000-of-001" / "measurement.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    body["mesh"][key] = value
    path.write_bytes(readable_json({**body, "digest": digest_of(body)}))
    assert f"mesh.{key}" in refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")


def test_any_number_of_declared_samples_is_compared_with_those_that_are_there(refused, tmp_path):
    calibration = {"hash": "c" * 64, "samples": 10**15, "tokens": 2, "sequence_length": 2}
    write(tmp_path / "m", 0, calibration=calibration)
    assert "on no rank 1, 2, 3" in refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
