"""`generate --ranks` and `bench --ranks`.

Processes that share an artifact say what one says, end together, or refuse.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quantflow.benching import latency
from quantflow.distributed.binding import cores_of
from quantflow.exporting import export as export_stage
from quantflow.runtime.ranks import processes as rank_processes
from tests.shared import run

PROMPTS = ("value scale", "round", "group layer token model")
PYTHON = [sys.executable, "-m"]


def quantflow(*arguments, by=("quantflow",)):
    command = [*PYTHON, *by, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    """8-bit weights, per channel, and inputs, per token."""
    work = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        assert (
            run(
                "quantize",
                "--no-export",
                llama,
                "-o",
                work / "2",
                "--scheme",
                "W8A8",
                "--set",
                "quantize.0.transforms=[]",
                "-q",
            )
            == 0
        )
        assert run("export", work / "2", "-o", work / "4", "-q") == 0
    return work / "4"


@pytest.mark.slow
def test_two_ranks_say_what_one_process_says_and_a_difference_to_the_reference_is_theirs(
    artifact, tmp_path, capsys
):
    prompts, reference = tmp_path / "prompts.txt", tmp_path / "reference.json"
    prompts.write_text("\n\n".join(PROMPTS))
    arguments = (
        "generate",
        artifact,
        "--prompts",
        prompts,
        "--batch-size",
        "2",
        "--max-new-tokens",
        "9",
        "--ignore-eos",
        "--json",
    )
    assert run(*arguments, "-q") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["ranks"] == 1
    texts = {output["prompt"]: output["text"] for output in alone["outputs"]}
    reference.write_text(json.dumps(texts | {PROMPTS[1]: "something else"}))
    result = quantflow(*arguments, "--reference", reference, "--ranks", "2")
    assert result.returncode == 4 and "error: reference: 1 of 3 texts differ" in result.stderr, (
        result.stderr
    )
    shared = json.loads(result.stdout)
    assert (
        shared["ranks"] == 2
        and shared["decoder"]["name"] == "lean"
        and shared["differing"] == [PROMPTS[1]]
    )
    assert (
        shared["outputs"] == alone["outputs"]
        and shared["timing"]["forwards"] == alone["timing"]["forwards"]
    )


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores"
)
def test_a_bound_process_keeps_to_its_cores_while_it_runs(artifact, monkeypatch, capsys):
    seen, load = [], latency.load

    def loading(*arguments, **words):
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))
        return load(*arguments, **words)

    monkeypatch.setattr(latency, "load", loading)
    before = os.sched_getaffinity(0), torch.get_num_threads()
    shape = (
        "--input-tokens",
        "4",
        "--new-tokens",
        "2",
        "--runs",
        "1",
        "--warmups",
        "0",
        "--json",
        "-q",
    )
    assert run("bench", artifact, *shape, "--bind") == 0
    (cores,) = cores_of(1)
    assert seen == [(cores, len(cores))] and json.loads(capsys.readouterr().out)["threads"] == len(
        cores
    )
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert run("bench", artifact, *shape, "--bind", "--trust-network") == 2
    assert "bench: bind under torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_bound_ranks_have_cores_of_their_own_and_say_what_one_process_says(artifact, capsys):
    arguments = ("generate", artifact, "--prompt", PROMPTS[2], "--max-new-tokens", "8")
    assert run(*arguments, "-q") == 0
    result = quantflow(*arguments, "--ranks", "2", "--bind")
    if len(os.sched_getaffinity(0)) < 2:
        assert result.returncode == 2 and "bind: 2 ranks" in result.stderr
    else:
        assert (result.returncode, result.stdout) == (0, capsys.readouterr().out), result.stderr


@pytest.mark.slow
def test_ranks_of_somebodys_torchrun_share_the_model_and_the_text_is_printed_once(artifact, capsys):
    arguments = (
        "generate",
        artifact,
        "--prompt",
        PROMPTS[2],
        "--max-new-tokens",
        "8",
        "--prompt-lookup",
        "3",
    )
    assert run(*arguments, "-q") == 0
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "quantflow")
    result = quantflow(*arguments, "--trust-network", by=torchrun)
    assert result.returncode == 0, result.stderr
    assert result.stdout == capsys.readouterr().out


@pytest.mark.slow
def test_bench_counts_the_ranks_and_tells_the_memory_of_each(artifact, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")  # which would decide how many threads a rank has
    shape = ("--input-tokens", "8", "--new-tokens", "4", "--runs", "2")
    result = quantflow("bench", artifact, *shape, "--ranks", "2", "--json", "-q")
    assert result.returncode == 0, result.stderr
    timed = json.loads(result.stdout)
    assert timed["ranks"] == 2 and timed["settings"]["ranks"] == 2
    peaks = timed["memory"]["rank_peak_bytes"]
    assert len(peaks) == 2 and min(peaks) > 1 << 20 and timed["memory"]["peak_bytes"] == max(peaks)
    assert timed["batches"][0]["produced"] == 8
    assert timed["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.slow
def test_rank_0_ends_the_others_when_the_prompts_cannot_be_read(artifact, tmp_path):
    (tmp_path / "prompts.json").write_text("{")
    result = quantflow("generate", artifact, "--prompts", tmp_path / "prompts.json", "--ranks", "2")
    assert result.returncode == 3 and result.stdout == "", result.stdout
    assert "error: rank 0 of 2 failed: " in result.stderr and "prompts.json" in result.stderr, (
        result.stderr
    )


def rank_process(rank: int, launcher: int) -> int:
    """Return the process of a rank below a launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in map(int, children):
        if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{child}/environ').read_text()}":
            return child
        if found := rank_process(rank, child):
            return found
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_killed_rank_is_named_and_takes_the_others_with_it(artifact, tmp_path, rank):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(PROMPTS * 4000))
    line = [
        "generate",
        artifact,
        "--prompts",
        prompts,
        "--ignore-eos",
        "--max-new-tokens",
        "100",
        "--ranks",
        "2",
    ]
    command = [*PYTHON, "quantflow", *map(str, line)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        told = process.stderr.readline()
        assert told.startswith("generate"), told  # batches are under way
        others = [rank_process(other, process.pid) for other in (0, 1)]
        os.kill(others[rank], signal.SIGKILL)
        began, told = time.monotonic(), process.communicate()[1]
    assert time.monotonic() - began < 20
    assert process.returncode == 5 and f"rank {rank} of 2 was ended by SIGKILL" in told, told
    assert "run the same command again" in told
    assert not any(Path(f"/proc/{other}").exists() for other in others)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ranks", "0"), "generate: ranks=0; use 1 or more"),
        (
            ("--ranks", "3"),
            "3 ranks: 4 heads, 2 of keys and values, do not go whole; use 1 or 2 or 4 ranks",
        ),
        (
            ("--ranks", "2", "--decoder", "transformers"),
            "generate: 2 ranks with the transformers decoder; leave one of them out",
        ),
        (
            ("--ranks", "2", "--adapter", "lora"),
            "generate: 2 ranks with an adapter; leave one of them out",
        ),
        (
            ("--ranks", "2", "--disk-offload"),
            "generate: 2 ranks with disk_offload; leave one of them out",
        ),
        (("--ranks", "2", "--mtp", "2"), "generate: 2 ranks with mtp; leave one of them out"),
        (
            ("--ranks", "2", "--device", "cuda"),
            "generate: 2 ranks with device cuda; leave one of them out",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_one_is_started(
    artifact, monkeypatch, capsys, arguments, told
):
    def never(*_arguments, **_options):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(rank_processes, "launch", never)
    assert run("generate", artifact, "--prompt", "x", *arguments) == 2
    assert told in capsys.readouterr().err.replace("\n  fix: ", "; ")
    if arguments[2:3] not in (("--adapter",), ("--disk-offload",), ("--mtp",)):
        assert run("bench", artifact, *arguments) == 2
        assert told.replace("generate", "bench") in capsys.readouterr().err.replace(
            "\n  fix: ", "; "
        )


def test_another_number_than_torchruns_is_refused(artifact, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert run("generate", artifact, "--prompt", "x", "--ranks", "4", "--trust-network") == 2
    assert "generate: ranks=4, torchrun started 2" in capsys.readouterr().err


def test_a_family_that_the_lean_decoder_does_not_run_is_refused(
    family_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    assert (
        run(
            "quantize",
            "--no-export",
            family_model("mpt"),
            "-o",
            tmp_path / "2",
            "--scheme",
            "W8A16",
            "-q",
        )
        == 0
    )
    assert run("export", tmp_path / "2", "-o", tmp_path / "4", "-q") == 0
    capsys.readouterr()
    assert run("generate", tmp_path / "4", "--prompt", "x", "--ranks", "2") == 6
    assert (
        "2 ranks share the lean decoder: it does not know the layers of mpt"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_two_jobs_of_two_ranks_run_at_once_without_a_port_that_they_could_share(artifact):
    line = [
        "generate",
        str(artifact),
        "--prompt",
        "value scale",
        "--max-new-tokens",
        "6",
        "--json",
        "-q",
    ]
    command = [*PYTHON, "quantflow", *line, "--ranks", "2"]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    alone = json.loads(quantflow(*line).stdout)["outputs"]
    assert [json.loads(out)["outputs"] for out, _ in said] == [alone, alone]
