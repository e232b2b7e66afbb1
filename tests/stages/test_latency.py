"""`quantflow bench ARTIFACT`: what is timed, the tables that are printed, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from quantflow.evaluation.latency import ratios
from quantflow.exporting import export as export_stage
from quantflow.stages.bench import latency_text
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

SMALL = ("--input-tokens", "8", "--new-tokens", "4", "--runs", "3", "-b", "1", "-b", "2", "-q")


def run(*arguments):
    return exit_code(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    work = tmp_path_factory.mktemp("latency")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        assert run("quantize", "--no-export", llama, "-o", work / "2", "--scheme", "W8A16", "-q") == 0
        assert run("export", work / "2", "-o", work / "4", "-q") == 0
    return work / "4"


def batch(rows: int) -> dict:
    """Timings of a batch that the expected tables were worked out from by hand."""
    spread = {"average": 0.002, "lowest": 0.001, "highest": 0.004, "p50": 0.002, "p90": 0.003, "p99": 0.004}
    rates = {name: value * 1e6 for name, value in spread.items()}
    return {
        "batch_size": rows,
        "requested": 40,
        "produced": 30,
        "seconds": 0.3,
        "first_token": spread,
        "next_token": spread,
        "decode_token": spread,
        "decode_total": spread,
        "prefill_per_second": rates,
        "decode_per_second": rates,
        "produced_per_second": 100.0,
        "requested_per_second": 133.333,
    }


RESULT = {
    "artifact": "a",
    "settings": {"input_tokens": 8, "new_tokens": 4, "runs": 10, "warmups": 1},
    "decoder": "lean",
    "reasons": ["small operations run in torch: no C compiler"],
    "backends": ["w4a16"],
    "threads": 2,
    "ranks": 1,
    "load_seconds": 1.5,
    "memory": {"peak_bytes": 3 << 29},
    "percentiles": "of sorted times",
    "profile": None,
    "batches": [batch(1), batch(2)],
}


def test_the_tables_are_those_that_the_original_systems_print():
    told = latency_text(RESULT)
    assert told.splitlines()[:3] == [
        "a: lean decoder, w4a16, 2 threads, loaded in 1.50 s, peak memory 1.50 GiB",
        "small operations run in torch: no C compiler",
        "percentiles of sorted times",
    ]
    summary = """---- Prompt size: 8, batch size: 2
 ---------- Summary: ----------
Inference latency: 0.030 sec.
First token average latency: 0.002 sec.
Average 2... latency: 0.002 sec.
P50 2... latency: 0.002 sec.
P90 2... latency: 0.003 sec.
P99 2... latency: 0.004 sec.
Tokens: 40 requested, 30 produced
Throughput: 100.00 produced tokens/second, 133.33 requested"""
    assert summary in told
    parameters = """| Parameter          | Value |
|--------------------|-------|
| Model              | a     |
| Sequence Length    | 8     |
| Decode Length      | 4     |
| Top N Tokens       | None  |
| N Runs             | 10    |
| Warmups            | 1     |"""
    assert parameters in told
    latencies = """| Step           | Batch Size | Average | Lowest  | Highest | p50     | p90     | p99     |
|----------------|------------|---------|---------|---------|---------|---------|---------|
| Prefill        | 1          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |
|                | 2          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |
| Decode (token) | 1          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |"""
    assert latencies in told
    rates = """| Step    | Batch Size | Average             | Lowest              | Highest             |
|---------|------------|---------------------|---------------------|---------------------|
| Prefill | 1          | 2000.00 tokens/secs | 1000.00 tokens/secs | 4000.00 tokens/secs |"""
    assert rates in told


def test_an_artifact_is_timed_for_every_batch_size(artifact, capsys):
    assert run("bench", artifact, *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["decoder"], result["percentiles"]) == ("lean", "of sorted times")
    assert [found["batch_size"] for found in result["batches"]] == [1, 2]
    for found in result["batches"]:
        assert found["requested"] == found["produced"] == found["batch_size"] * 4 * 3
        first, following = found["first_token"], found["next_token"]
        assert 0 < first["lowest"] <= first["p50"] <= first["p90"] <= first["p99"] <= first["highest"]
        assert found["seconds"] == pytest.approx(3 * first["average"] + 9 * following["average"])
        assert found["decode_per_second"]["highest"] == pytest.approx(found["batch_size"] / found["decode_token"]["lowest"])
    assert result["memory"]["peak_bytes"] > result["memory"]["kv_cache_bytes"] > 0


def test_the_table_of_a_single_token_has_no_row_for_the_next(artifact, capsys):
    assert run("bench", artifact, "--input-tokens", "4", "--new-tokens", "1", "--runs", "1", "-q") == 0
    told = capsys.readouterr().out
    assert "First token average" in told and "Average 2..." not in told
    assert re.search(r"\| Prefill +\| 1 ", told) and not re.search(r"\| Decode \(token\)", told)


def test_a_trace_names_the_prompt_and_the_tokens(artifact, tmp_path, capsys):
    path = tmp_path / "new" / "trace.json"
    assert run("bench", artifact, "--input-tokens", "4", "--new-tokens", "3", "--runs", "1", "--profile", path, "-q") == 0
    assert f"trace: {path}" in capsys.readouterr().out
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert (names.count("prompt"), names.count("token")) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-b", "0"), "bench: batch sizes [0]"),
        (("--runs", "0"), "0 runs"),
        (("--input-tokens", "100000"), "100000 prompt tokens + 32 new ones: the model has"),
        (("--decoder", "fast"), "decoder 'fast' is unknown"),
        (("--kv-cache", "int4"), "kv cache 'int4' is unknown"),
        (("--kernels",), "bench: --kernels beside an artifact"),
    ],
)
def test_what_cannot_be_timed_is_refused(artifact, capsys, arguments, told):
    assert run("bench", artifact, *arguments, "-q") == 2
    assert told in capsys.readouterr().err


def test_without_an_artifact_there_is_nothing_to_time(capsys):
    assert run("bench") == 2
    assert "bench: nothing to time; give an artifact, or --kernels" in capsys.readouterr().err.replace("\n  fix: ", "; ")


def test_ratios_above_one_are_faster_or_smaller_and_stand_beside_both_sides():
    twice = {name: value * 2 if isinstance(value, float) else value for name, value in batch(1)["first_token"].items()}
    slow = batch(1) | {"first_token": twice, "decode_per_second": {"average": 500.0}}
    ours = {**RESULT, "batches": [batch(1)], "memory": {"peak_bytes": 3 << 20}, "weight_bytes": 1 << 20}
    base = {**ours, "artifact": "m", "batches": [slow], "memory": {"peak_bytes": 6 << 20}, "weight_bytes": 4 << 20}
    found = ratios(ours, base)
    assert found == {"batches": [{"batch_size": 1, "first_token": 2.0, "next_token": 4.0}], "memory": 2.0, "weights": 4.0}
    expected = """\
|                              | a       | m       | Ratio |
|------------------------------|---------|---------|-------|
| first token, 1 at once       | 2.0 ms  | 4.0 ms  | 2.00  |
| tokens per second, 1 at once | 2000.0  | 500.0   | 4.00  |
| peak memory                  | 3.0 MiB | 6.0 MiB | 2.00  |
| weights                      | 1.0 MiB | 4.0 MiB | 4.00  |
| decoder                      | lean    | lean    |       |"""
    assert latency_text(ours | {"baseline": base, "ratios": found}).endswith(expected)


def test_a_model_that_is_not_quantized_is_timed_too(llama, capsys):
    assert run("bench", llama, *SMALL, "--decoder", "transformers", "--dtype", "bfloat16", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["decoder"], result["backends"], result["settings"]["dtype"]) == ("transformers", [], "bfloat16")
    assert result["weight_bytes"] == sum(tensor.nbytes for tensor in load_file(Path(llama) / "model.safetensors").values())


@pytest.mark.slow
def test_an_artifact_and_its_model_are_timed_in_processes_of_their_own(artifact, llama, capsys):
    assert run("bench", artifact, "--baseline", llama, *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["artifact"], result["baseline"]["artifact"]) == (str(artifact), str(llama))
    assert result["backends"] and not result["baseline"]["backends"]
    assert result["ratios"] == ratios(result, result["baseline"]) and result["ratios"]["weights"] > 1


def test_ranks_and_a_baseline_do_not_go_together(artifact, llama, capsys):
    assert run("bench", artifact, "--baseline", llama, "--ranks", "2", "-q") == 2
    assert "bench: 2 ranks with a baseline" in capsys.readouterr().err
