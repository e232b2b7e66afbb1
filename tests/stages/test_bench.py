"""`quantflow bench --kernels` and `inspect --backends`: their rows, and their refusals."""

import json

import pytest
import torch

from quantflow import cpu_threads
from quantflow.backends import BACKENDS, kernels, native
from quantflow.benching import kernel_speed
from quantflow.benching.bench_job import KernelJob
from quantflow.exporting import export as export_stage
from tests.shared import run

SMALL = ("--shape", "48x64,16x128", "--tokens", "1,3", "--rounds", "2")
OURS = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is None


def test_kernels_are_timed_for_every_backend_that_can_run_the_scheme(capsys):
    assert run("bench", "--kernels", "--scheme", "W8A16,W8A8", *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rounds"], result["dtype"], result["threads"]) == (
        2,
        "bfloat16",
        torch.get_num_threads(),
    )
    able = {
        "W8A16": ["w8a16"] * OURS + ["int8_pack", "reference"],
        "W8A8": ["w8a8"] * OURS + ["int8_mm", "reference"],
    }
    wanted = [
        (shape, scheme, backend, tokens)
        for shape in ((48, 64), (16, 128))
        for scheme in able
        for tokens in (1, 3)
        for backend in able[scheme]
    ]
    rows = result["timings"]
    assert [
        ((r["out_features"], r["in_features"]), r["scheme"], r["backend"], r["tokens"])
        for r in rows
    ] == wanted
    for row in rows:
        assert row["bytes_per_second"] == row["weight_bytes"] / row["seconds"] > 0
        assert (
            row["products_per_second"]
            == row["tokens"] * row["out_features"] * row["in_features"] / row["seconds"]
        )
        assert (row["read_bytes_per_second"] is not None) == OURS
    reference = next(row for row in rows if row["backend"] == "reference")
    assert reference["weight_bytes"] == 48 * 64 * 2  # bfloat16


def test_the_table_names_the_machine_share_and_every_column(capsys):
    assert (
        run(
            "bench",
            "--kernels",
            "--scheme",
            "W4A8",
            "--shape",
            "64x128",
            "--tokens",
            "2",
            "--rounds",
            "1",
        )
        == 0
    )
    first, _, columns, _, row, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"bfloat16, {torch.get_num_threads()} threads, medians of 1 calls")
    assert (
        " ".join(columns.split())
        == "shape scheme backend tokens microseconds GB/s plain read of it products/s"
    )
    assert row.split()[:4] == ["64x128", "W4A8", "w4a8" if OURS else "reference", "2"]


def test_without_our_own_kernels_the_table_says_why_and_times_the_others(capsys, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda *_args, **_options: "this CPU has no avx512_vnni")
    assert run("bench", "--kernels", "--scheme", "W8A16", *SMALL) == 0
    text = capsys.readouterr().out
    assert "our own kernels cannot run: this CPU has no avx512_vnni" in text
    assert " int8_pack " in text and " w8a16 " not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to time; "),
        (("--kernels", "--shape", "64by64"), "shape '64by64'; write out_features x in_features"),
        (("--kernels", "--shape", "64x0"), "shape '64x0'; "),
        (("--kernels", "--tokens", "1,two"), "tokens '1,two'; "),
        (("--kernels", "--tokens", "0"), "7 rounds of [0] tokens; "),
        (("--kernels", "--rounds", "0"), "0 rounds of [1, 8, 256] tokens; "),
        (("--kernels", "--scheme", "W9A9"), "scheme 'W9A9' is unknown; "),
        (("--kernels", "--scheme", "FP8"), "scheme FP8 has a static input; "),
    ],
)
def test_what_cannot_be_timed_is_refused(capsys, arguments, said):
    assert run("bench", *arguments) == 2
    assert said.split("; ")[0] in capsys.readouterr().err


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        scheme = (
            "--scheme",
            "W4A16",
            "--algorithm",
            "rtn",
            "--group-size",
            "32",
            "--ignore",
            "re:.*down_proj",
        )
        assert run("quantize", "--no-export", llama, "-o", folder / "q", *scheme) == 0
        assert run("export", folder / "q", "-o", folder / "artifact") == 0
    return folder / "artifact"


def test_inspect_says_what_runs_the_linears_of_an_artifact_and_why_the_others_do_not(
    capsys, artifact
):
    assert run("inspect", artifact, "--backends", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["count"] for row in rows) == 2 * 6
    assert {tuple(row["shape"]): row["count"] for row in rows} == {
        (64, 64): 4,
        (32, 64): 4,
        (128, 64): 4,
    }
    for row in rows:
        assert row["backend"] == ("w4a16" if OURS else "int4_pack")
        assert set(row["why_not"]) == set(list(BACKENDS)[: list(BACKENDS).index(row["backend"])])
    assert run("inspect", artifact, "--backends", "--dtype", "bfloat16") == 0
    text = capsys.readouterr().out
    assert "W4A16, not run by" in text
    assert "  w8a8: w8a8 needs symmetric int8 weights, scheme W4A16 has int4 per group" in text


def test_backends_of_what_is_no_artifact_is_an_input_error(capsys, llama):
    assert run("inspect", llama, "--backends") == 3
    assert "quantflow.json" in capsys.readouterr().err


def test_kernels_are_timed_with_the_threads_that_were_given(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_threads, "_given", 1)
    try:
        job = KernelJob(schemes=("W8A8",), shapes=("64x64",), tokens=(1,), rounds=1)
        assert kernel_speed.run(job)["threads"] == 1
    finally:
        torch.set_num_threads(before)
