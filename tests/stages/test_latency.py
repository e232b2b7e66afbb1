"""`quantflow bench ARTIFACT`: what is timed, the tables that are printed, and what is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from quantflow.benching import latency
from quantflow.benching.generation_speed import time_run
from quantflow.benching.latency import ratios
from quantflow.exporting import export as export_stage
from quantflow.stages.bench import latency_text
from tests.shared import run

SMALL = ("--input-tokens", "8", "--new-tokens", "4", "--runs", "3", "-b", "1", "-b", "2", "-q")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    work = tmp_path_factory.mktemp("latency")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        assert (
            run("quantize", "--no-export", llama, "-o", work / "2", "--scheme", "W8A16", "-q") == 0
        )
        assert run("export", work / "2", "-o", work / "4", "-q") == 0
    return work / "4"


def batch(rows: int) -> dict:
    """Timings of a batch that the expected tables were worked out from by hand."""
    spread = {
        "average": 0.002,
        "lowest": 0.001,
        "highest": 0.004,
        "p50": 0.002,
        "p90": 0.003,
        "p99": 0.004,
    }
    rates = {name: value * 1e6 for name, value in spread.items()}
    return {
        "input_tokens": 8,
        "batch_size": rows,
        "requested": 40,
        "produced": 30,
        "seconds": 0.3,
        "joules": None,
        "produced_per_joule": None,
        "first_token": spread,
        "next_token": spread,
        "decode_token": spread,
        "decode_total": spread,
        "prefill_per_second": {name: 2 * value for name, value in rates.items()},
        "decode_per_second": rates,
        "produced_per_second": 100.0,
        "requested_per_second": 133.333,
    }


RESULT = {
    "artifact": "a",
    "settings": {
        "input_tokens": [8],
        "new_tokens": 4,
        "runs": 10,
        "warmups": 1,
        "temperature": 0.5,
        "top_k": None,
        "top_p": None,
    },
    "method": "drawn tokens",
    "decoder": "lean",
    "reasons": ["small operations run in torch: no C compiler"],
    "rounded_inputs": 0,
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
        "a: lean decoder, w4a16, 2 threads, drawn tokens, loaded in 1.50 s, peak memory 1.50 GiB",
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
| Warmups            | 1     |
| Temperature        | 0.5   |
| Top K              | None  |"""
    assert parameters in told and "| Do Sample          | True  |" in told
    latencies = """\
| Step           | Batch Size | Average | Lowest  | Highest | p50     | p90     | p99     |
|----------------|------------|---------|---------|---------|---------|---------|---------|
| Prefill        | 1          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |
|                | 2          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |
| Decode (token) | 1          | 2.00 ms | 1.00 ms | 4.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |"""
    assert latencies in told
    rates = """\
| Step    | Batch Size | Average             | Lowest              | Highest             |
|---------|------------|---------------------|---------------------|---------------------|
| Prefill | 1          | 4000.00 tokens/secs | 2000.00 tokens/secs | 8000.00 tokens/secs |"""
    assert rates in told
    assert (
        "| Decode  | 1          | 2000.00 tokens/secs | 1000.00 tokens/secs | 4000.00 tokens/secs |"
        in told
    )


def test_an_artifact_is_timed_for_every_batch_size(artifact, capsys):
    assert run("bench", artifact, *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["decoder"], result["percentiles"]) == ("lean", "of sorted times")
    assert [found["batch_size"] for found in result["batches"]] == [1, 2]
    for found in result["batches"]:
        assert found["requested"] == found["produced"] == found["batch_size"] * 4 * 3
        first, following = found["first_token"], found["next_token"]
        assert (
            0 < first["lowest"] <= first["p50"] <= first["p90"] <= first["p99"] <= first["highest"]
        )
        assert found["seconds"] == pytest.approx(3 * first["average"] + 9 * following["average"])
        assert found["decode_per_second"]["highest"] == pytest.approx(
            found["batch_size"] / found["decode_token"]["lowest"]
        )
        for tokens in ("requested", "produced"):
            assert found[f"{tokens}_per_second"] == pytest.approx(found[tokens] / found["seconds"])
    assert result["memory"]["peak_bytes"] > result["memory"]["kv_cache_bytes"] > 0
    assert result["memory"]["device_peak_bytes"] is None


def test_on_a_device_the_memory_of_its_tensors_stands_beside_that_of_the_process(
    artifact, capsys, monkeypatch
):
    monkeypatch.setattr(latency.Device, "peak_bytes", lambda self: 5 << 29)
    assert run("bench", artifact, *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["memory"]["device_peak_bytes"] == 5 << 29
    assert re.search(
        r"peak memory [\d.]+ GiB, of the device 2\.50 GiB$", latency_text(result), re.MULTILINE
    )
    result["memory"]["device_peak_bytes"] = None
    assert re.search(r"peak memory [\d.]+ GiB$", latency_text(result), re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "called"),
    [
        (("--num-beams", "3", "-b", "2"), "3 beams"),
        (("--num-beams", "2", "--top-k", "4"), "2 beams, drawn"),
        (("--do_sample", "-b", "2"), "drawn tokens"),
        (("--temperature", "0"), "the likeliest token"),
        (("--prompt-lookup", "3"), "the likeliest token, 3 proposed by the text"),
        (
            ("--assistant-model", "ARTIFACT", "--assistant-tokens", "2"),
            "the likeliest token, 2 proposed by ARTIFACT",
        ),
    ],
)
def test_other_ways_to_generate_are_timed_token_by_token(artifact, capsys, options, called):
    words = [str(artifact) if word == "ARTIFACT" else word for word in options]
    line = ("bench", artifact, "--input-tokens", "8", "--new-tokens", "6", "--runs", "2", "-q")
    assert run(*line, *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == called.replace("ARTIFACT", str(artifact))
    (found,) = result["batches"]
    rows = found["batch_size"]
    assert found["requested"] == found["produced"] == 2 * 6 * rows
    first, following = found["first_token"], found["next_token"]
    assert first["lowest"] > 0 and following["highest"] > 0 and following["lowest"] >= 0
    assert found["seconds"] == pytest.approx(2 * (first["average"] + 5 * following["average"]))
    assert found["produced_per_second"] == pytest.approx(found["produced"] / found["seconds"])
    assert run(*line, *words) == 0
    assert f", {result['method']}, loaded in" in capsys.readouterr().out


def test_the_table_of_a_single_token_has_no_row_for_the_next(artifact, capsys):
    assert (
        run("bench", artifact, "--input-tokens", "4", "--new-tokens", "1", "--runs", "1", "-q") == 0
    )
    told = capsys.readouterr().out
    assert "First token average" in told and "Average 2..." not in told
    assert re.search(r"\| Prefill +\| 1 ", told) and not re.search(r"\| Decode \(token\)", told)


def test_a_trace_names_the_prompt_and_the_tokens(artifact, tmp_path, capsys):
    path = tmp_path / "new" / "trace.json"
    assert (
        run(
            "bench",
            artifact,
            "--input-tokens",
            "4",
            "--new-tokens",
            "3",
            "--runs",
            "1",
            "--profile",
            path,
            "-q",
        )
        == 0
    )
    assert f"trace: {path}" in capsys.readouterr().out
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert (names.count("prompt"), names.count("token")) == (1, 2)


def test_a_trace_has_the_tokens_after_those_that_are_skipped_and_shapes(artifact, tmp_path):
    line = (
        "bench",
        artifact,
        "--input-tokens",
        "4",
        "--new-tokens",
        "6",
        "--runs",
        "1",
        "-q",
        "--profile",
    )
    assert (
        run(
            *line,
            tmp_path / "a.json",
            "--profile-skip",
            "2",
            "--profile-tokens",
            "3",
            "--profile-shapes",
        )
        == 0
    )
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert (names.count("prompt"), names.count("token")) == (0, 3)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert run(*line, tmp_path / "b.json", "--profile-tokens", "2") == 0
    events = json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert (names.count("prompt"), names.count("token")) == (1, 1)
    assert not any("Input Dims" in event.get("args", {}) for event in events)


@pytest.fixture
def prompts_of_runs(monkeypatch):
    """Return the prompts that are timed, one tensor after the other."""
    found = []

    def timed(decoder, prompts, **words):
        found.append(prompts.tolist())
        return time_run(decoder, prompts, **words)

    monkeypatch.setattr(latency, "time_run", timed)
    return found


def test_texts_are_cut_or_repeated_to_each_length_and_fill_batches_in_turn(
    artifact, tmp_path, prompts_of_runs, capsys
):
    (tmp_path / "texts.json").write_text(
        json.dumps({"input": {"32": "value", "64": "round scale " * 20}})
    )
    words = AutoTokenizer.from_pretrained(artifact)
    first, second = words("value")["input_ids"], words("group layer")["input_ids"]
    assert len(first) < 9 and len(second) < 9
    line = ("bench", artifact, "--new-tokens", "2", "--runs", "1", "--warmups", "0", "-q", "--json")
    assert (
        run(
            *line,
            "--prompts",
            tmp_path / "texts.json",
            "--prompt",
            "group layer",
            "-b",
            "1",
            "-b",
            "3",
            "--input-tokens",
            "2",
            "9",
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert [(found["input_tokens"], found["batch_size"]) for found in result["batches"]] == [
        (2, 1),
        (2, 3),
        (9, 1),
        (9, 3),
    ]
    # what stands on the command line goes first
    long = [(tokens * 9)[:9] for tokens in (second, first)]
    assert prompts_of_runs[2:] == [[long[0]], [long[0], long[1], long[0]]]
    assert prompts_of_runs[:2] == [[long[0][:2]], [long[0][:2], long[1][:2], long[0][:2]]]
    prompts_of_runs.clear()
    assert (
        run(*line, "--prompts", tmp_path / "texts.json", "--column", "64", "--input-tokens", "16")
        == 0
    )
    assert prompts_of_runs == [[words("round scale " * 20)["input_ids"][:16]]]


def test_a_text_per_row_and_lengths_as_other_programs_ask_for_them(
    artifact, tmp_path, prompts_of_runs, capsys
):
    (tmp_path / "rows.jsonl").write_text('{"a": "value"}\n{"a": "round"}\n')
    line = ("--runs", "1", "--warmups", "0", "--new-tokens", "1", "-q")
    flags = (
        "--dataset_name",
        tmp_path / "rows.jsonl",
        "--column_name",
        "a",
        "--simulate_dyn_prompt",
        "3",
        "5",
        "-b",
        "2",
    )
    assert run("bench", artifact, *flags, *line) == 0
    told = capsys.readouterr().out
    assert "Prompt size: 3, batch size: 2" in told and "Prompt size: 5, batch size: 2" in told
    assert told.count("| Sequence Length    | 3 ") == told.count("| Sequence Length    | 5 ") == 1
    assert [len(row) for rows in prompts_of_runs for row in rows] == [3, 3, 5, 5]


def test_every_run_keeps_its_result_as_a_file_of_its_own(artifact, tmp_path, capsys):
    line = (
        "bench",
        artifact,
        "--input-tokens",
        "4",
        "--new-tokens",
        "2",
        "--runs",
        "1",
        "-q",
        "--json",
    )
    results = []
    for _ in range(2):
        assert run(*line, "--output_dir", tmp_path / "new" / "results") == 0
        results.append(json.loads(capsys.readouterr().out))
    files = sorted((tmp_path / "new" / "results").iterdir())
    assert [file.name for file in files] == ["bench-0001.json", "bench-0002.json"]
    assert [json.loads(file.read_text()) for file in files] == results
    assert [result["results_file"] for result in results] == list(map(str, files))


def test_a_batch_that_does_not_fit_into_memory_is_a_row_that_says_so(artifact, monkeypatch, capsys):
    def timed(decoder, prompts, **words):
        if len(prompts) == 4:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return time_run(decoder, prompts, **words)

    monkeypatch.setattr(latency, "time_run", timed)
    line = ("bench", artifact, "--input-tokens", "4", "--new-tokens", "2", "--runs", "1", "-q")
    assert run(*line, "-b", "1", "-b", "4", "-b", "2") == 0
    told = capsys.readouterr().out
    assert "---- Prompt size: 4, batch size: 4\nit does not fit into memory\n" in told
    # of each step
    assert len(re.findall(r"\| +\| 4 +\| it does not fit into memory \|", told)) == 5
    assert re.search(r"\| 2 +\| [\d.]+ ms", told)
    assert run(*line, "-b", "4") == 5
    assert "error: bench: no batch fits into memory" in capsys.readouterr().err


def test_joules_stand_beside_tokens_where_the_processor_counts_them(artifact, monkeypatch, capsys):
    readings = iter(range(0, 1000, 7))
    monkeypatch.setattr(
        latency, "package_joules", lambda: SimpleNamespace(since=lambda: float(next(readings)))
    )
    line = (
        "bench",
        artifact,
        "--input-tokens",
        "4",
        "--new-tokens",
        "2",
        "--runs",
        "3",
        "--warmups",
        "0",
        "-q",
    )
    assert run(*line, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["batches"]
    assert (found["joules"], found["produced_per_joule"]) == (0 + 7 + 14, 6 / 21)
    assert run(*line) == 0
    assert "Energy: 84.0 J, 0.07 tokens/J" in capsys.readouterr().out
    monkeypatch.setattr(latency, "package_joules", lambda: None)
    assert run(*line, "--json") == 0
    assert json.loads(capsys.readouterr().out)["batches"][0]["joules"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--column", "a"), "bench: --column a without --prompts"),
        (
            ("--profile", "x.json", "--profile-skip", "32"),
            "profile_skip=32 of 32 new tokens leaves nothing to trace",
        ),
        (("--profile-tokens", "0"), "profile_tokens=0"),
        (("--input-tokens", "4", "100000"), "100000 prompt tokens + 32 new ones: the model has"),
        (("-b", "0"), "bench: batch sizes [0]"),
        (("--num-beams", "0"), "beams=0"),
        (("--num-beams", "2", "--prompt-lookup", "2"), "bench: beams=2 and lookup=2 together"),
        (("--prompt-lookup", "2", "-b", "1", "-b", "2"), "bench: lookup=2 with batch sizes [1, 2]"),
        (("--top-p", "2"), "top_p=2"),
        (("--top-k", "2", "--profile", "x.json"), "bench: a profile of another way"),
        (("--runs", "0"), "0 runs"),
        (("--input-tokens", "100000"), "100000 prompt tokens + 32 new ones: the model has"),
        (("--decoder", "fast"), "decoder 'fast' is unknown"),
        (("--kv-cache", "int3"), "kv cache 'int3' is unknown"),
        (("--kernels",), "bench: --kernels beside an artifact"),
    ],
)
def test_what_cannot_be_timed_is_refused(artifact, capsys, arguments, told):
    assert run("bench", artifact, *arguments, "-q") == 2
    assert told in capsys.readouterr().err


def test_without_an_artifact_there_is_nothing_to_time(capsys):
    assert run("bench") == 2
    assert (
        "bench: nothing to time; give an artifact, --url, or --kernels"
        in capsys.readouterr().err.replace("\n  fix: ", "; ")
    )


def test_ratios_above_one_are_faster_or_smaller_and_stand_beside_both_sides():
    twice = {
        name: value * 2 if isinstance(value, float) else value
        for name, value in batch(1)["first_token"].items()
    }
    slow = batch(1) | {"first_token": twice, "decode_per_second": {"average": 500.0}}
    ours = {
        **RESULT,
        "batches": [batch(1)],
        "memory": {"peak_bytes": 3 << 20},
        "weight_bytes": 1 << 20,
    }
    base = {
        **ours,
        "artifact": "m",
        "batches": [slow],
        "memory": {"peak_bytes": 6 << 20},
        "weight_bytes": 4 << 20,
    }
    found = ratios(ours, base)
    ratio = {"input_tokens": 8, "batch_size": 1, "first_token": 2.0, "next_token": 4.0}
    assert found == {"batches": [ratio], "memory": 2.0, "weights": 4.0}
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
    assert (
        run("bench", llama, *SMALL, "--decoder", "transformers", "--dtype", "bfloat16", "--json")
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["decoder"], result["backends"], result["settings"]["dtype"]) == (
        "transformers",
        [],
        "bfloat16",
    )
    assert result["weight_bytes"] == sum(
        tensor.nbytes for tensor in load_file(Path(llama) / "model.safetensors").values()
    )


@pytest.mark.slow
def test_an_artifact_and_its_model_are_timed_in_processes_of_their_own(artifact, llama, capsys):
    assert run("bench", artifact, "--baseline", llama, *SMALL, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["artifact"], result["baseline"]["artifact"]) == (str(artifact), str(llama))
    assert result["backends"] and not result["baseline"]["backends"]
    assert (
        result["ratios"] == ratios(result, result["baseline"]) and result["ratios"]["weights"] > 1
    )


def test_ranks_and_a_baseline_do_not_go_together(artifact, llama, capsys):
    assert run("bench", artifact, "--baseline", llama, "--ranks", "2", "-q") == 2
    assert "bench: 2 ranks with a baseline" in capsys.readouterr().err
