"""The benchmarks without their peers.

Bits are counted, rows scored, bars judged, tables printed, folders locked.
"""

import asyncio
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.load import load_model, open_source
from quantflow.numerics.divergence import Comparison, score
from quantflow.numerics.perplexity import logits_of
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama"
QUIET = ProgressLine(quiet=True)
W4 = "W4A16 g128"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch):
    """Return what imports a module as the benchmark's programs see it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def results(part) -> ModuleType:
    return part("_accuracy.results")


@pytest.fixture
def shared(part) -> ModuleType:
    return part("_shared")


def outcome(results: ModuleType, program: str, scheme: str = W4, **values: Any):
    plain = {
        "model": "tiny-llama",
        "bits": 4.125,
        "mean_kld": 0.01,
        "kld_p999": 0.2,
        "ppl_ratio": 1.01,
        "top1_agreement": 0.9,
    }
    return results.Outcome(
        program=program,
        scheme=scheme,
        **{**plain, "seconds": 10.0, "cpu": 9.0, "rss": 10**9, **values},
    )


def words_of(values: list[int], bits: int) -> np.ndarray:
    """Integers end to end, the lowest bit first, as one number that is cut into words."""
    number = sum(value << (bits * index) for index, value in enumerate(values))
    return np.frombuffer(number.to_bytes(len(values) * bits // 8, "little"), dtype="<i4")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_are_read_from_words_in_the_order_of_their_bits(shared, bits):
    values = [(5 * index + 3) % (1 << bits) for index in range(32)]
    assert shared.unpack(words_of(values, bits)[None], bits, axis=1)[0].tolist() == values
    assert shared.unpack(words_of(values, bits)[:, None], bits, axis=0)[:, 0].tolist() == values
    assert shared.unpack(np.array([[0x76543210]]), 4, axis=1)[0].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]


@pytest.mark.parametrize("minus_one", [True, False])
def test_gptqs_layout_is_read_with_both_kinds_of_zero_points(shared, minus_one):
    """Eight inputs in two groups, eight outputs.

    The layout's first version takes one off each zero point, as whole words.
    """
    values = np.arange(64).reshape(8, 8) % 16  # [I, O]
    points = np.array([[0, 8, 15, 1, 2, 3, 4, 0], [7, 0, 0, 15, 8, 8, 8, 8]])  # [G, O]
    scales = np.linspace(0.5, 2.0, 16, dtype=np.float16).reshape(2, 8)
    stored = [sum(int(point) << (4 * index) for index, point in enumerate(row)) for row in points]
    stored = [(word - (0x11111111 if minus_one else 0)) % 2**32 for word in stored]
    tensors = {
        "x.qweight": np.array(
            [[sum(int(v) << (4 * i) for i, v in enumerate(values[:, o])) for o in range(8)]],
            dtype="<u4",
        ),
        "x.qzeros": np.array([[word] for word in stored], dtype="<u4"),
        "x.scales": scales,
    }
    tensors = {
        name: tensor.view("<i4") if tensor.dtype == np.dtype("<u4") else tensor
        for name, tensor in tensors.items()
    }
    expected = [
        [float(scales[i // 4, o]) * float(values[i, o] - points[i // 4, o]) for i in range(8)]
        for o in range(8)
    ]
    found = shared.gptq_weight(tensors, "x", bits=4, minus_one=minus_one)
    assert found.dtype == np.float32
    assert found.tolist() == expected
    order = np.array([1, 0, 1, 0, 1, 0, 1, 0])
    moved = shared.gptq_weight({**tensors, "x.g_idx": order}, "x", bits=4, minus_one=minus_one)
    assert moved[3, 0] == float(scales[1, 3]) * float(values[0, 3] - points[1, 3])


@pytest.mark.parametrize("minus_one", [True, False])
@pytest.mark.parametrize("bits", [3, 5, 6])
def test_zero_points_of_3_5_and_6_bits_are_one_too_small_each_by_itself(shared, bits, minus_one):
    """Thirty-two outputs of one group.

    Of 3 bits the 11th and the 22nd lie in two words, and a 0 is stored as 7.
    """
    largest = (1 << bits) - 1
    points = [index * 5 % (largest + 1) for index in range(32)]
    stored = [(point - 1) % (largest + 1) if minus_one else point for point in points]
    tensors = {
        "x.qweight": np.zeros((bits, 32), dtype="<i4"),  # 32 inputs
        "x.qzeros": words_of(stored, bits)[None],
        "x.scales": np.ones((1, 32), dtype=np.float16),
    }
    found = shared.gptq_weight(tensors, "x", bits=bits, minus_one=minus_one)
    assert found.tolist() == [[float(-point)] * 32 for point in points]


def test_awqs_layout_is_read_in_its_order(shared):
    """A word holds outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    word = sum(output << (4 * place) for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]))
    tensors = {
        "x.qweight": np.array([[word], [word]]).astype("<u4").view("<i4"),
        "x.qzeros": np.zeros((1, 1), dtype="<i4"),
        "x.scales": np.full((1, 8), 0.5, dtype=np.float16),
    }
    assert shared.awq_weight(tensors, "x").tolist() == [[0.5 * output] * 2 for output in range(8)]


def test_a_peers_two_files_come_back_as_a_candidate(part, shared, tmp_path, monkeypatch):
    weights = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((4, 2), dtype=np.float32),
    }
    scheme = {"kind": "float", "num_bits": 8, "granularity": "per_tensor", "dynamic": False}

    def quantized(model, rows, output, settings):
        assert (model, rows, output, settings) == (
            "M",
            [[1, 2], [3]],
            tmp_path / "model",
            {"bits": 4},
        )
        return shared.Report(version="1.2", seconds=3.0, settings={"more": True})

    def dequantized(model, output, settings):
        assert (model, output, settings) == (
            Path("M"),
            tmp_path / "model",
            {"bits": 4, "more": True},
        )
        changed = {"norm.weight": np.full(3, 2.0)}
        scales = {"a": 0.5, "b": 0.25}
        return shared.Saved(
            weights=weights,
            stored=7,
            each={"a": 3, "b": 4},
            changed=changed,
            input=scheme,
            scales=scales,
        )

    (tmp_path / "c.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [3]}\n')
    told = ["quantize", "M", str(tmp_path / "c.jsonl"), str(tmp_path), '{"bits": 4}']
    for line in (told, ["dequantize", "M", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["accuracy_x.py", *line])
        shared.main(quantized, dequantized)
    assert load_file(tmp_path / "weights.safetensors")["a.weight"].tolist() == weights["a"].tolist()
    candidate = part("_accuracy.score").of_peer(tmp_path)
    assert {name: weight.tolist() for name, weight in candidate.weights.items()} == {
        n: w.tolist() for n, w in weights.items()
    }
    assert candidate.changed["norm.weight"].tolist() == [2.0, 2.0, 2.0]
    assert (
        candidate.inputs["b"].scale.tolist() == [0.25] and not candidate.inputs["b"].scheme.dynamic
    )
    assert candidate.bits == 8 * 7 / 14 and candidate.each == {"a": 3, "b": 4}
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["version"], report["seconds"], report["settings"]) == (
        "1.2",
        3.0,
        {"bits": 4, "more": True},
    )


def test_a_static_input_without_a_scale_is_refused(part, shared, tmp_path):
    shared.write_safetensors(tmp_path / "weights.safetensors", {"a.weight": np.zeros((2, 2))})
    report = {"bytes": 1, "linears": ["a"], "scales": {}}
    report["input"] = {
        "kind": "float",
        "num_bits": 8,
        "granularity": "per_tensor",
        "dynamic": False,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(part("_watch").Failed, match="0 scales of 1 linears"):
        part("_accuracy.score").of_peer(tmp_path)


def test_bits_count_scales_and_zero_points(part):
    bits = part("_accuracy.score").bits_per_weight
    assert bits(64 + 2, [128]) == 4.125  # a group of 128 at 4 bits with a scale of 16
    assert bits(2 * (24 + 2) + 3, [64, 64]) == 8 * 55 / 128


@pytest.fixture(scope="module")
def smoothed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of a small model.

    One has integers in groups of 32; the other is W8A8, whose norms are not the source's.
    """
    folder = tmp_path_factory.mktemp("accuracy")
    lines = [json.dumps({"input_ids": list(range(start, start + 60))}) for start in range(2, 10)]
    (folder / "ids.jsonl").write_text("\n".join(lines) + "\n")
    calibration = Calibration(source=str(folder / "ids.jsonl"), samples=8, sequence_length=64)
    measured = measure.run(
        MeasureJob(model=llama, output=folder / "m", calibration=calibration), QUIET
    )
    made = {}
    for scheme, group in (("W4A16_ASYM", 32), ("W8A8", None), ("FP8", None)):
        entry = Quantize(
            name=scheme.lower().replace("_", "-"), scheme=scheme, algorithm="rtn", group_size=group
        )
        job = QuantizeJob(
            model=llama, output=folder / f"{scheme}-q", entry=entry, measurement=measured
        )
        done = quantize.run(job, QUIET)
        made[scheme] = export.run(ExportJob(source=done, output=folder / scheme), QUIET)
    return made


@pytest.mark.parametrize(
    ("scheme", "bits"), [("W4A16_ASYM", 4 + 16 / 32 + 4 / 32), ("W8A8", None), ("FP8", None)]
)
def test_an_artifact_as_plain_tensors_scores_what_its_runtime_does(
    part, llama, smoothed, scheme, bits
):
    """Weights, smoothed norms and rounded inputs all arrive.

    The scores are those of the runtime's own logits, with exact inputs and as it runs by default.
    """
    module, windows = part("_accuracy.score"), [torch.arange(5, 65), torch.arange(100, 140)]
    judge = module.Judge(llama, windows)
    original = logits_of(load_model(open_source(llama), dtype=torch.float32))
    klds = {}
    for inputs in ("stored", "usual"):
        candidate = module.of_artifact(smoothed[scheme], judge.source, inputs=inputs)
        found = judge.score(candidate)
        loaded = load(smoothed[scheme], backend="reference", exact=inputs == "stored")
        running = logits_of(loaded.model)
        kld = torch.cat([score(original(row), running(row), row).kld for row in windows])
        assert found["mean_kld"] == pytest.approx(float(kld.mean()), rel=1e-4)
        assert found["kld_p999"] == pytest.approx(float(kld.max()), rel=1e-4)  # of 98 tokens
        assert bool(candidate.changed) == (scheme == "W8A8")
        assert bool(candidate.inputs) == (scheme != "W4A16_ASYM" or inputs == "usual")
        klds[inputs] = found["mean_kld"]
    assert min(klds.values()) > 1e-6
    # of weights alone export found that rounding in groups costs little
    assert (klds["usual"] != klds["stored"]) == (scheme == "W4A16_ASYM")
    if bits is not None:
        assert candidate.bits == bits
    else:
        assert 8 < candidate.bits < 8.6  # a float32 scale per 64 or 128 inputs, or per linear


def test_a_head_that_a_rotation_untied_is_scored_as_a_head_of_its_own(part, llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["model.norm.weight"] *= 3
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    entry = Quantize(name="x", scheme="W8A16", algorithm="rtn", transforms=({"hadamard": {}},))
    done = quantize.run(QuantizeJob(model=model, output=tmp_path / "q", entry=entry), QUIET)
    artifact = export.run(ExportJob(source=done, output=tmp_path / "a"), QUIET)
    module, windows = part("_accuracy.score"), [torch.arange(5, 65), torch.arange(100, 140)]
    judge = module.Judge(model, windows)
    candidate = module.of_artifact(artifact, judge.source, inputs="stored")
    assert "lm_head.weight" in candidate.changed
    original = logits_of(load_model(open_source(model), dtype=torch.float32))
    running = logits_of(load(artifact, backend="reference", exact=True).model)
    kld = torch.cat([score(original(row), running(row), row).kld for row in windows])
    assert judge.score(candidate)["mean_kld"] == pytest.approx(float(kld.mean()), rel=1e-4)


def test_a_linear_that_was_left_out_is_refused(part, llama, smoothed):
    module = part("_accuracy.score")
    judge = module.Judge(llama, [torch.arange(5, 65)])
    whole = module.of_artifact(smoothed["W4A16_ASYM"], judge.source, inputs="stored")
    name = "model.layers.1.mlp.down_proj"
    rest = {key: weight for key, weight in whole.weights.items() if key != name}
    with pytest.raises(part("_watch").Failed, match=f"{name}: not quantized"):
        judge.score(module.Candidate(weights=rest, stored=1))
    with pytest.raises(
        part("_watch").Failed, match=r"down_proj.weight: \[2, 2\], the model has \[64, 128\]"
    ):
        judge.score(module.Candidate(weights={**rest, name: torch.zeros(2, 2)}, stored=1))


def test_logits_of_a_file_are_scored_window_by_window_against_the_original(part, llama, tmp_path):
    """The file holds the original's own logits, the second window's halved."""
    module, windows = part("_accuracy.score"), [torch.arange(5, 25), torch.arange(40, 52)]
    judge = module.Judge(llama, windows)
    logits = logits_of(load_model(open_source(llama), dtype=torch.float32))
    found = [logits(windows[0]), logits(windows[1]) / 2]
    expected = score(logits(windows[1]), found[1], windows[1]).kld.sum() / (19 + 11)
    report = {"vocabulary": found[0].shape[1], "bytes": 45, "elements": 80}
    (tmp_path / "file.json").write_text(json.dumps(report))
    (tmp_path / "logits.f32").write_bytes(torch.cat(found).numpy().tobytes())
    bits, metrics = judge.score_file(tmp_path)
    assert bits == 4.5 and metrics["mean_kld"] == pytest.approx(float(expected), rel=1e-9)
    (tmp_path / "logits.f32").write_bytes(found[0].numpy().tobytes())
    with pytest.raises(part("_watch").Failed, match="32 tokens"):
        judge.score_file(tmp_path)


def test_a_text_that_names_a_row_whole_takes_it_alone_and_another_takes_all_that_contain_it(part):
    rows = part("_accuracy.rows")
    table = [
        rows.Row(program="gptq", scheme=scheme, commands=())
        for scheme in ("NVFP4", "NVFP4A16", "W4A16")
    ]

    def schemes(*only: str) -> list[str]:
        return [row.scheme for row in rows.wanted(table, only)]

    assert schemes() == ["NVFP4", "NVFP4A16", "W4A16"]
    assert schemes("gptq: NVFP4") == ["NVFP4"]
    assert schemes("NVFP4") == ["NVFP4", "NVFP4A16"]
    assert schemes("gptq: NVFP4", "W4A16") == ["NVFP4", "W4A16"]
    assert schemes("INT4") == []


def test_every_row_is_there_once_and_quantflow_measures_where_it_must(part, tmp_path):
    rows = part("_accuracy.rows")
    paths = {
        key: tmp_path / key
        for key in ("model", "calibration", "output", "gguf", "names", "windows", "peers")
    }
    found = rows.all_rows(rows.Place(**paths))
    assert len({(row.program, row.scheme) for row in found}) == len(found)
    table = {(row.program, row.scheme): row for row in found}

    def measured(program: str, scheme: str) -> bool:
        (command,) = table[program, scheme].commands
        assert command[3] == "quantize" and "--export" in command
        return "--calibration" in command and "--measurement" in command

    assert not measured("quantflow rtn", W4) and not measured("quantflow rtn", "FP8_DYNAMIC")
    assert (
        measured("quantflow gptq", W4)
        and measured("quantflow rtn", "W8A8")
        and measured("quantflow rtn", "FP8")
    )
    (words,) = table["quantflow gptq", "W3A16_ASYM g64"].commands
    assert (
        words[words.index("--group-size") + 1] == "64"
        and words[words.index("--scheme") + 1] == "W3A16_ASYM"
    )
    (mixed,) = table["quantflow best", "W4A16@4.25"].commands
    assert [
        mixed[mixed.index(f"--{word}") + 1] for word in ("scheme", "algorithm", "target-bpw")
    ] == ["W4A16", "best", "4.25"]
    assert measured("quantflow best", "W4A16@4.25") and "--group-size" not in mixed
    (uniform,) = table["quantflow gptq", "W5A16 g128"].commands
    assert (
        uniform[uniform.index("--scheme") + 1] == "W5A16"
        and uniform[uniform.index("--group-size") + 1] == "128"
    )
    assert (
        "--target-bpw" not in uniform
        and "--group-size" not in table["quantflow best", "W8A16"].commands[0]
    )
    assert measured("quantflow signround", W4)
    (turned,) = table["quantflow best hadamard", "W2A16 g64"].commands
    assert (
        measured("quantflow best hadamard", "MXFP4")
        and turned[turned.index("--set") + 1] == 'quantize.0.transforms=["hadamard"]'
        and turned[turned.index("--group-size") + 1] == "64"
    )
    mixing = {
        program for program, scheme in table if scheme in ("W5A16 g128", "W6A16 g128", *rows.MIXED)
    }
    searching = {
        f"AutoRound{more}" for more in ("", " extended", " 50 iterations", " 0 iterations")
    }
    assert mixing == {"quantflow gptq", "quantflow best"} | searching
    assert not [scheme for _, scheme in table if scheme.endswith("active")]
    assert json.loads(table["llm-compressor GPTQ", "W8A16"].commands[0][-1])["group_size"] == -1
    peer = table["GPTQModel", "W2A16 g64"]
    assert json.loads(peer.commands[0][-1]) == {"bits": 2, "group_size": 64, "symmetric": True}
    assert rows.installed(table["quantflow rtn", W4]) and not rows.installed(peer)
    file = table["quantflow best", "Q4_K_M.gguf"]
    assert file.runs and not rows.installed(file), "llama.cpp, which runs the file, is not there"
    quantize, write = file.commands
    assert (
        quantize[quantize.index("--scheme") + 1] == "Q4_K_M"
        and write[3] == "export"
        and write[-1] == "gguf"
    )
    assert file.after[2:4] == ("run", tmp_path / "output" / "gguf" / "model-q4_k_m.gguf")
    weighed, plain = (
        table[program, "Q4_0.gguf"].commands[0] for program in ("llama.cpp imatrix", "llama.cpp")
    )
    assert [json.loads(words[-1])["importance"] for words in (weighed, plain)] == [True, False]
    scripts = {
        row.commands[0][1]
        for row in found
        if row.after is not None and not row.program.startswith("quantflow")
    }
    assert len(scripts) == 6 and all(script.is_file() for script in scripts)


def test_bits_that_a_token_reads_count_an_expert_by_its_share(part):
    """An expert of 8 bits, one of 4 tokens, beside attention of 4 bits with as many weights."""
    weights = {"attention": torch.zeros(2, 8), "expert": torch.zeros(2, 8)}
    each = {"attention": 8, "expert": 16}
    candidate = part("_accuracy.score").Candidate
    found = candidate(weights=weights, stored=24, each=each)
    assert found.bits == 6
    assert found.active_bits({"attention": 1, "expert": 0.25}) == (4 + 8 / 4) / (1 + 1 / 4)
    assert candidate(weights=weights, stored=24).active_bits({}) == 6  # all alike


def test_rows_of_experts_round_those_with_few_tokens_and_choose_schemes_by_active_bits_too(
    part, tmp_path
):
    rows = part("_accuracy.rows")
    paths = {key: tmp_path / key for key in ("model", "calibration", "output", "windows", "peers")}
    place = rows.Place(**paths, gguf=None, names=None, sparse=True)
    table = {(row.program, row.scheme): row for row in rows.all_rows(place)}
    for program in ("gptq", "good", "best", "signround"):
        (words,) = table[f"quantflow {program}", W4].commands
        assert words[words.index("--experts") + 1] == "damp"
    for program in ("gptq", "best"):
        (words,) = table[f"quantflow {program}", "W4A16@4.25 active"].commands
        assert [words[words.index(f"--{key}") + 1] for key in ("target-bpw", "bits-of")] == [
            "4.25",
            "active",
        ]
        assert "--bits-of" not in table[f"quantflow {program}", "W4A16@4.25"].commands[0]
        assert (f"quantflow {program}", "W4A16 g64") in table  # 4.25 bits too
    told = json.loads(table["AutoRound", "W4A16@4.25"].commands[0][-1])
    assert told == {"average_bits": 4.25, "iterations": 200}
    assert not [scheme for _, scheme in table if scheme.endswith(".gguf")]
    assert not [program for program, _ in table if program.startswith("llama.cpp")]
    assert ("llm-compressor GPTQ", W4) in table and ("AutoRound", W4) in table


def test_experts_that_are_rounded_together_have_the_bits_of_one_by_one(part, capsys):
    part("expert_seconds").compare(256, 64)
    assert capsys.readouterr().out.rstrip().endswith("True")


def test_the_mixture_that_is_trained_has_twelve_million_weights_and_sends_a_token_to_four_experts(
    part, monkeypatch
):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples" / "tiny-llama"))
    with torch.device("meta"):
        model = part("_accuracy.train_model").qwen3_moe()
    assert 12e6 < sum(parameter.numel() for parameter in model.parameters()) < 12.5e6
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (16, 4)
    assert model.config.output_router_logits, "tokens are spread over the experts"


@pytest.mark.parametrize(
    ("words", "tokens", "budget"),
    [
        ([], 16000, ("--minutes", "10")),
        (["--quick", "--minutes", "2.5"], 1000, ("--minutes", "2.5")),
        (["--tokens", "4096", "--steps", "300"], 4096, ("--steps", "300")),
    ],
)
def test_the_text_of_the_comparison_and_the_training_are_as_long_as_was_said(
    part, words, tokens, budget
):
    given = part("accuracy")._arguments(words)
    assert (given.tokens, given.budget) == (tokens, budget)


def test_a_training_of_so_many_steps_makes_the_same_weights_at_any_pace(
    part, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples" / "tiny-llama"))
    train = part("_accuracy.train_model").train
    monkeypatch.setattr(train.torch, "compile", lambda model: model)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = torch.randint(0, 32, (4 * train.SEQUENCE,))
    weights = []
    for pace in (1.0, 1e6):  # seconds from one look at the clock to the next
        clock = itertools.count(0.0, pace)
        monkeypatch.setattr(train.time, "monotonic", lambda clock=clock: next(clock))
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        told = {"minutes": 0.0, "peak": 1e-2, "decay": 0.1, "seed": 0, "snapshot": tmp_path}
        record = train.train(model, tokens, tokens, steps=3, sequences=1, **told)
        assert record["steps"] == 3
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*weights)


def test_a_model_that_128_does_not_divide_has_its_four_bits_in_groups_of_64(part, tmp_path):
    rows = part("_accuracy.rows")
    paths = {
        key: tmp_path / key
        for key in ("model", "calibration", "output", "gguf", "names", "windows", "peers")
    }
    wide, narrow = (
        {(row.program, row.scheme) for row in rows.all_rows(rows.Place(**paths, narrow=it))}
        for it in (False, True)
    )
    assert {scheme for _, scheme in narrow - wide} == {"W4A16 g64", "W4A16_ASYM g64"}
    assert not [scheme for _, scheme in narrow if "g128" in scheme or "@" in scheme]
    assert {program for program, scheme in wide if scheme == W4} == {
        program for program, scheme in narrow if scheme == "W4A16 g64"
    }


def test_gptq_is_judged_against_each_peer_at_equal_settings(results):
    rows = [
        outcome(results, "quantflow gptq", mean_kld=0.0102, seconds=5.0, rss=6 * 10**8),
        outcome(results, "GPTQModel", mean_kld=0.0100, seconds=10.0),
        outcome(results, "llm-compressor GPTQ", mean_kld=0.0099, seconds=8.0),
        # nothing of ours to compare it with
        outcome(results, "GPTQModel", "W3A16 g64", mean_kld=1e-9),
    ]
    found = {
        (bar.what.rsplit(": ")[-1], bar.promised): (bar.found, bar.met)
        for bar in results.judge(rows)
    }
    assert found == {
        ("KLD", "<= 1.02x GPTQModel"): ("1.02x, 0.01020 of 0.01000", True),
        ("KLD", "<= 1.02x llm-compressor GPTQ"): ("1.03x, 0.01020 of 0.00990", False),
        ("seconds", "<= 0.6x GPTQModel"): ("0.50x, 5.0 s of 10.0 s", True),
        ("seconds", "<= 0.6x llm-compressor GPTQ"): ("0.62x, 5.0 s of 8.0 s", False),
        ("peak RSS", "<= 0.6x GPTQModel"): ("0.60x, 0.60 GB of 1.00 GB", True),
        ("peak RSS", "<= 0.6x llm-compressor GPTQ"): ("0.60x, 0.60 GB of 1.00 GB", True),
    }


def test_best_is_judged_against_equal_settings_and_fewer_bits_of_peers_alone(results):
    rows = [
        outcome(results, "quantflow best", mean_kld=0.0084, seconds=100.0),
        outcome(results, "quantflow gptq", mean_kld=0.0001),
        # stores zero points that say nothing
        outcome(results, "AutoRound", mean_kld=0.0105, bits=4.156, seconds=99.0),
        outcome(results, "llama.cpp", "IQ4_NL", mean_kld=0.0002, bits=4.5),
        outcome(results, "llm-compressor RTN", "W8A8", mean_kld=0.0003, bits=4.0),
        outcome(results, "llama.cpp", "Q9", mean_kld=0.0100, bits=4.1),
    ]
    found = {bar.promised: (bar.what, bar.found, bar.met) for bar in results.judge(rows)}
    subject = f"tiny-llama, {W4}, quantflow best"
    assert found == {
        "<= 0.85x llama.cpp Q9": (f"{subject}: KLD", "0.84x, 0.00840 of 0.01000", True),
        "<= 1.0x AutoRound": (f"{subject}: seconds", "1.01x, 100.0 s of 99.0 s", False),
    }
    assert not any("best" in bar.what for bar in results.judge(rows[1:]))
    # a peer's row of fewer bits alone is no bar
    assert results.judge([rows[0], rows[-1]]) == []


def test_quantized_inputs_are_judged_by_the_best_of_both_sides(results):
    rows = [
        outcome(results, "quantflow rtn", "FP8", mean_kld=0.0021),
        outcome(results, "quantflow other", "FP8", mean_kld=0.0019),
        outcome(results, "llm-compressor RTN", "FP8", mean_kld=0.0020),
        outcome(results, "llm-compressor RTN", "FP8_DYNAMIC", mean_kld=0.0001),
    ]
    (bar,) = results.judge(rows)
    assert (bar.what, bar.found, bar.met) == (
        "tiny-llama, FP8, quantflow other: KLD",
        "0.95x, 0.00190 of 0.00200",
        True,
    )
    (bar,) = results.judge([*rows, outcome(results, "quantflow best", "FP8", mean_kld=0.0022)])
    assert (bar.found, bar.met) == ("1.10x, 0.00220 of 0.00200", False)


def test_floats_of_four_bits_are_judged_at_a_share_of_the_best_peers_divergence(results):
    rows = [
        outcome(results, "quantflow gptq", "NVFP4", mean_kld=0.02),
        outcome(results, "quantflow best", "NVFP4", mean_kld=0.026),
        outcome(results, "llm-compressor GPTQ", "NVFP4", mean_kld=0.03),
        outcome(results, "AutoRound", "NVFP4", mean_kld=0.031),
    ]
    (bar,) = results.judge(rows)
    assert (bar.promised, bar.found, bar.met) == (
        "<= 0.85x llm-compressor GPTQ",
        "0.87x, 0.02600 of 0.03000",
        False,
    )


def test_a_file_that_llama_cpp_ran_is_judged_against_its_quantizer_with_an_importance_matrix_alone(
    results,
):
    name = "Q4_K_M.gguf"
    rows = [
        outcome(results, "quantflow best", name, mean_kld=0.006),
        outcome(results, "llama.cpp", name, mean_kld=0.0061),
        outcome(results, "llama.cpp imatrix", name, mean_kld=0.009),
    ]
    (bar,) = results.judge(rows)
    assert (bar.promised, bar.found, bar.met) == (
        "<= 0.7x llama.cpp imatrix",
        "0.67x, 0.00600 of 0.00900",
        True,
    )
    layers = [
        outcome(results, "quantflow best", mean_kld=0.01),
        outcome(results, "AutoRound", mean_kld=0.02),
    ]
    best, *_ = results.judge([*layers, *rows])
    assert best.promised == "<= 0.85x AutoRound", "whole files are no peers of layers"


def test_a_mixture_is_judged_against_the_line_between_its_own_algorithms_uniform_schemes(results):
    """A quarter of the way from 4.125 to 5.125 bits, 0.012 to 0.004: at 0.010."""
    uniform = [
        outcome(results, "quantflow best", mean_kld=0.012),
        outcome(results, "quantflow best", "W5A16 g128", bits=5.125, mean_kld=0.004),
        outcome(results, "quantflow gptq", mean_kld=0.100),
        outcome(results, "llm-compressor GPTQ", "W5A16 g128", bits=5.125, mean_kld=1e-9),
    ]

    def judged(kld, program="quantflow best", bits=4.375):
        mixed = outcome(results, program, "W4A16@4.25", bits=bits, mean_kld=kld)
        return [bar for bar in results.judge([*uniform, mixed]) if "line" in bar.promised]

    (bar,) = judged(0.0099)
    assert (bar.what, bar.promised) == (
        "tiny-llama, W4A16@4.25, quantflow best: KLD",
        "<= 1.0x the line from W4A16 g128 to W5A16 g128",
    )
    assert (bar.found, bar.met) == ("0.99x, 0.00990 of 0.01000", True)
    (bar,) = judged(0.0101)
    assert (bar.found, bar.met) == ("1.01x, 0.01010 of 0.01000", False)
    assert judged(0.001, "quantflow gptq") == []  # its own 5 bits are not there
    assert judged(0.001, bits=4.0) == judged(0.001, bits=5.2) == []  # no line there


def test_a_mixture_is_judged_against_q4_k_m_where_it_has_no_more_bits(results):
    rows = [
        outcome(results, "quantflow best", "W4A16@4.25", bits=4.25, mean_kld=0.0090),
        outcome(results, "quantflow best", "W4A16@4.65", bits=4.65, mean_kld=0.0080),
        outcome(results, "llama.cpp", "Q4_K_S", bits=4.5, mean_kld=0.0001),
    ]
    assert results.judge(rows) == []
    four = outcome(results, "llama.cpp", "Q4_K_M", bits=4.7, mean_kld=0.0085)
    assert [
        (bar.what, bar.promised, bar.found, bar.met) for bar in results.judge([*rows, four])
    ] == [
        (
            "tiny-llama, W4A16@4.25, quantflow best: KLD",
            "<= 1.0x llama.cpp Q4_K_M",
            "1.06x, 0.00900 of 0.00850",
            False,
        ),
        (
            "tiny-llama, W4A16@4.65, quantflow best: KLD",
            "<= 1.0x llama.cpp Q4_K_M",
            "0.94x, 0.00800 of 0.00850",
            True,
        ),
    ]
    fewer = outcome(results, "llama.cpp", "Q4_K_M", bits=4.6, mean_kld=0.0085)
    assert ["4.25" in bar.what for bar in results.judge([*rows, fewer])] == [True]


def test_fewer_bits_than_q4_k_ms_are_asked_for_on_every_model(part):
    """llama.cpp mixes 4.5 bits with 6.5625 and 5.5.

    6.5625 are of values and the MLP's way back, of some layers; 5.5 are of a fused q/k/v.
    """
    # 1 of 3 layers
    wide = {
        "qkvo": 2 * 768 * 768 + 768 * 256,
        "v": 768 * 256,
        "mlp": 2 * 768 * 2304,
        "down": 768 * 2304,
    }
    least = 4.5 + (6.5625 - 4.5) * (wide["v"] + wide["down"]) / sum(wide.values()) / 3
    assert all(
        bits < least for bits in part("_accuracy.rows").MIXED.values()
    ) and least == pytest.approx(4.696, abs=1e-3)


def test_schemes_that_are_chosen_are_judged_against_a_uniform_one_and_a_peers_search(results):
    rows = [
        outcome(results, "quantflow best", "W4A16 g64", bits=4.25, active=4.25, mean_kld=0.0090),
        outcome(
            results, "quantflow best", "W4A16@4.25 active", bits=3.8, active=4.25, mean_kld=0.0060
        ),
        outcome(results, "quantflow best", "W4A16@4.25", bits=4.3, active=4.8, mean_kld=0.0050),
        outcome(results, "AutoRound", "W4A16@4.25", bits=4.24, active=4.7, mean_kld=0.0040),
    ]
    found = [(bar.what.split(", ")[1], bar.promised, bar.found) for bar in results.judge(rows[1:])]
    searched = "<= 1.0x AutoRound"
    assert found == [
        ("W4A16@4.25 active", f"{searched} W4A16@4.25", "1.50x, 0.00600 of 0.00400"),
        ("W4A16@4.25", searched, "1.25x, 0.00500 of 0.00400"),
    ]
    (bar,) = [bar for bar in results.judge(rows) if bar.promised.endswith("best W4A16 g64")]
    assert (bar.found, bar.met) == ("0.67x, 0.00600 of 0.00900", True)  # 4.3 bits are more


def test_a_model_with_experts_has_a_bar_of_its_own(results):
    rows = [
        outcome(results, "quantflow best", mean_kld=0.0082, active=4.125),
        outcome(results, "AutoRound", mean_kld=0.0100, active=4.125),
        outcome(results, "quantflow best", "NVFP4", mean_kld=0.0079, active=4.5),
        outcome(results, "AutoRound", "NVFP4", mean_kld=0.0100, active=4.5),
    ]
    found = [(bar.promised, bar.met) for bar in results.judge(rows) if "KLD" in bar.what]
    assert found == [("<= 0.8x AutoRound", False), ("<= 0.8x AutoRound", True)]


def test_8_bits_are_judged_by_being_below_peers_of_equal_bits_and_llama_cpps_8_bits(results):
    rows = [
        outcome(results, "quantflow best", "W8A16", bits=8.03, mean_kld=0.00010),
        outcome(results, "llm-compressor GPTQ", "W8A16", bits=8.03, mean_kld=0.00011),
        # equal settings, its zero points say nothing
        outcome(results, "GPTQModel", "W8A16", bits=8.05, mean_kld=0.00009),
        outcome(results, "llama.cpp", "Q8_0", bits=8.5, mean_kld=0.000125),
    ]
    assert [(bar.promised, bar.found, bar.met) for bar in results.judge(rows)] == [
        ("<= 1.0x GPTQModel", "1.11x, 0.0001000 of 0.0000900", False),
        ("<= 1.0x llama.cpp Q8_0", "0.80x, 0.0001000 of 0.0001250", True),
    ]
    (bar,) = results.judge(
        [row for row in rows if row.program in ("quantflow best", "llm-compressor GPTQ")]
    )
    assert (bar.promised, bar.met) == ("<= 1.0x llm-compressor GPTQ", True)


def test_seconds_of_a_busy_machine_are_neither_shown_nor_judged(results):
    rows = [
        outcome(results, "quantflow gptq", seconds=5.0),
        outcome(results, "GPTQModel", seconds=10.0, idle=False),
        outcome(results, "quantflow best", seconds=5.0, idle=False),
        outcome(results, "AutoRound", seconds=10.0),
    ]
    assert not any("seconds" in bar.what for bar in results.judge(rows))
    assert any("peak RSS" in bar.what for bar in results.judge(rows))
    again = [outcome(results, row.program, seconds=row.seconds) for row in rows]
    assert sum("seconds" in bar.what for bar in results.judge(again)) == 2
    assert results.as_table(rows[1:2]).splitlines()[2].endswith("| 90.00% |  | 1.00 GB |")


def test_rows_run_in_turn_and_the_middle_run_by_seconds_stands_for_all(
    part, results, tmp_path, monkeypatch, capsys
):
    """Two programs, three rounds, and one program that is not installed, which says so once.

    The rounds are 7 of 9, 3, 7 seconds and 20 of 10, 30, 20.
    """
    program, rows = part("accuracy"), part("_accuracy.rows")
    plain: dict[str, Any] = {"scheme": W4, "commands": [[sys.executable]], "after": None}
    ours, theirs = (rows.Row(program=name, **plain) for name in ("quantflow gptq", "GPTQModel"))
    missing = rows.Row(
        program="HQQ", scheme=W4, commands=[[tmp_path / "no" / "python"]], after=None
    )
    seconds, asked, found = iter([9.0, 10.0, 3.0, 30.0, 7.0, 20.0]), [], {}

    def run(name, row, place, judge, *, idle):
        asked.append(row.program)
        return outcome(
            results, row.program, seconds=(taken := next(seconds)), rss=int(taken), idle=idle
        )

    monkeypatch.setattr(program, "_outcome", run)
    place = rows.Place(
        **dict.fromkeys(
            ("model", "calibration", "output", "gguf", "names", "windows", "peers"), tmp_path
        )
    )
    told = {"idle": True, "rounds": 3}
    program._model_rows(
        "tiny-llama",
        [ours, missing, theirs],
        place,
        None,
        found,
        tmp_path / "r.json",
        {"tokens": 9},
        **told,
    )
    assert asked == ["quantflow gptq", "GPTQModel"] * 3
    assert capsys.readouterr().out.count("HQQ: W4A16 g128: not installed") == 1
    assert [(row.seconds, row.rss, row.runs) for row in found.values()] == [
        (7.0, 7, [9.0, 3.0, 7.0]),
        (20.0, 20, [10.0, 30.0, 20.0]),
    ]
    assert results.read(tmp_path / "r.json", tokens=9) == found
    assert (
        results.middle([outcome(results, "a", seconds=taken) for taken in (4.0, 2.0)]).seconds
        == 4.0
    )


def test_models_are_judged_apart(results):
    pair = [
        outcome(results, "quantflow gptq", mean_kld=0.02),
        outcome(results, "GPTQModel", mean_kld=0.01),
    ]
    other = [
        outcome(results, row.program, model="gpt-neox", mean_kld=0.03 - row.mean_kld)
        for row in pair
    ]
    klds = [bar.met for bar in results.judge([*pair, *other]) if "KLD" in bar.what]
    assert klds == [False, True]


def test_the_table_is_in_order_and_says_each_row(results):
    rows = [
        outcome(results, "llama.cpp", "Q8_0", bits=8.5, model="gpt-neox"),
        outcome(results, "llama.cpp", "Q8_0", bits=8.5),
        outcome(results, "llama.cpp", "Q4_0", bits=4.5, mean_kld=0.5),
        outcome(results, "a", "W3A16 g64"),
        outcome(results, "b", mean_kld=0.02),
        outcome(results, "c", mean_kld=0.01),
    ]
    found = results.ordered(rows, ["tiny-llama", "gpt-neox"])
    assert [row.program for row in found] == ["c", "b", "a", "llama.cpp", "llama.cpp", "llama.cpp"]
    assert [row.scheme for row in found[3:]] == ["Q4_0", "Q8_0", "Q8_0"] and found[
        -1
    ].model == "gpt-neox"
    lines = results.as_table(found[:1]).splitlines()
    assert lines[0].count("|") == lines[2].count("|") == 11
    assert (
        lines[2]
        == f"| tiny-llama | c | {W4} | 4.125 | 0.01000 | 0.2000 | 1.0100 | 90.00% | 10 | 1.00 GB |"
    )


def test_the_table_says_active_bits_and_the_divergence_by_default_where_they_are_others(results):
    rows = [
        outcome(results, "a", bits=3.8, active=4.25),
        outcome(results, "b", active=4.125, usual_kld=0.011),
    ]
    cells = [line.split(" | ")[3:5] for line in results.as_table(rows).splitlines()[2:]]
    assert cells == [
        ["3.800, 4.250 active", "0.01000"],
        ["4.125", "0.01000, by default 0.01100"],
    ]


def test_results_are_kept_for_the_next_run_unless_the_evaluation_differs(results, tmp_path):
    path, rows = (
        tmp_path / "r.json",
        [outcome(results, "GPTQModel", settings={"bits": 4}, quantizing=2.0)],
    )
    assert results.read(path, tokens=100) == results.read(None, tokens=100) == {}
    results.write(path, {"tokens": 100}, rows, [])
    assert results.read(path, tokens=100) == {("tiny-llama", "GPTQModel", W4): rows[0]}
    assert results.read(path, tokens=16000) == {}


@pytest.mark.filterwarnings("default")
def test_the_plot_has_a_mark_for_every_row_with_weights_alone(part, results, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        outcome(results, "quantflow rtn"),
        outcome(results, "GPTQModel"),
        outcome(results, "GPTQModel", "W3A16 g64", bits=3.25),
    ]
    rows += [outcome(results, "HQQ", "4 bits g64", bits=4.5, model="gpt-neox")]
    part("_accuracy.plot").draw(
        [*rows, outcome(results, "llm-compressor RTN", "FP8")], tmp_path / "p.svg"
    )
    text = (tmp_path / "p.svg").read_text()
    ElementTree.fromstring(text)
    assert [text.count(f">{word}<") for word in ("tiny-llama", "gpt-neox", "bits per weight")] == [
        1,
        1,
        2,
    ]
    # one legend for all panels
    assert [text.count(f">{word}<") for word in ("quantflow rtn", "GPTQModel", "HQQ")] == [1, 1, 1]
    assert "llm-compressor" not in text


def test_the_frontier_has_a_panel_for_each_scheme_with_seconds_to_compare(part, results, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        outcome(results, "quantflow gptq", seconds=10.0),
        outcome(results, "AutoRound", seconds=200.0, mean_kld=0.005),
        outcome(results, "GPTQModel", seconds=20.0, idle=False),
        outcome(results, "quantflow gptq", "W3A16 g64", seconds=10.0),
        outcome(results, "AutoRound", "FP8", seconds=10.0),
    ]
    draw = part("_accuracy.plot").draw_frontier
    draw(rows, tmp_path / "f.svg")
    text = (tmp_path / "f.svg").read_text()
    words = (f"tiny-llama, {W4}", "tiny-llama, W3A16 g64", "seconds", "GPTQModel", "AutoRound")
    assert [text.count(f">{word}<") for word in words] == [1, 0, 1, 0, 1]
    draw(rows[2:], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_a_folder_is_a_model_with_its_own_text_or_the_shipped_one(part, results, tmp_path, capsys):
    program, models = part("accuracy"), part("_accuracy.models")
    folder = tmp_path / "mine"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.png", "*.safetensors"))
    given = program._arguments(["--models", "gpt-neox", str(folder)])
    assert [models.label(name) for name in given.models] == ["gpt-neox", "mine"]
    with pytest.raises(SystemExit):
        program._arguments(["--models", str(tmp_path)])
    assert "nor a folder with a config.json" in capsys.readouterr().err
    assert models.make_model(str(folder), tmp_path, budget=("--steps", "1")) == folder
    shipped = models.make_text(str(folder), folder, tmp_path / "text", tokens=1024).calibration
    expected = shipped.read_bytes()
    for name in ("calibration.jsonl", "heldout.jsonl"):
        lines = [{"text": f"{name} {number} " * 4000} for number in range(20)]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = models.make_text(str(folder), folder, tmp_path / "text", tokens=1024)
    assert own.calibration.read_bytes() != expected and len(own.windows) == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert "heldout.jsonl" in tokenizer.decode(own.windows[0])
    rows = [outcome(results, "a", model=model) for model in ("mine", "gpt-neox")]
    found = program._in_order({row.key: row for row in rows})
    assert [row.model for row in found] == ["gpt-neox", "mine"]


def test_text_of_ones_own_is_split_by_pieces_and_written_beside_the_model(
    part, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples" / "tiny-llama"))
    program = part("_accuracy.train_model")
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(20000)))
    training, heldout = program.own_text([tmp_path / "a.txt"], tmp_path, seed=3)
    assert len(heldout) == (len(training) + len(heldout)) // 10 > 1
    assert not set(training) & set(heldout)
    assert all(piece.startswith("line ") and piece.endswith("\n") for piece in training)
    for name, side in (("calibration", training), ("heldout", heldout)):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["text"] for line in lines] == side
    assert program.own_text([tmp_path / "a.txt"], tmp_path, seed=4)[1] != heldout
    (tmp_path / "short.txt").write_text("line\n" * 2000)
    with pytest.raises(SystemExit, match=r"short\.txt: 2 pieces"):
        program.own_text([tmp_path / "short.txt"], tmp_path, seed=3)


def test_the_plots_lines_go_down_where_more_bits_help_and_nowhere_else(part):
    least = part("_accuracy.plot").least
    points = [(4.5, 0.02), (3.0, 0.1), (4.0, 0.03), (4.25, 0.04), (4.0, 0.05)]
    assert least(points, end=8.0) == [(3.0, 0.1), (4.0, 0.03), (4.5, 0.02), (8.0, 0.02)]
    assert least([(3.0, 0.1)], end=3.0) == [(3.0, 0.1)] and least([], end=3.0) == []


RELEASED_NAMES = json.loads((BENCHMARKS / "released/gpt-oss-20b.json").read_text())["names"]


def test_a_random_gpt_oss_has_the_released_names_and_runs_as_transformers_reads_it(part, tmp_path):
    """Its experts are written in MXFP4, and one dtype or shape apart neither program loads it."""
    mixture, synthetic = part("_mixture"), part("_synthetic")
    shape = mixture.MixtureShape(
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        experts=4,
        chosen=2,
        vocab=4096,
    )
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        mixture.make_mixture(folder, shape, seed=3, tokenizer=EXAMPLE)
    first, again = ({f.name: f.read_bytes() for f in each.iterdir()} for each in folders)
    assert first == again
    tensors = {
        name: tensor
        for file in folders[0].glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    found = {re.sub(r"[.][0-9]+[.]", ".{}.", name) for name in tensors}
    assert sorted(found) == RELEASED_NAMES
    held = sum(
        tensor.numel() * (2 if name.endswith("_blocks") else 1)
        for name, tensor in tensors.items()
        if name.endswith(("weight", "_blocks")) and "norm" not in name
    )
    assert shape.weights == held
    of_experts = 3 * shape.layers * shape.hidden * shape.intermediate
    embedding = shape.vocab * shape.hidden
    assert shape.weights - shape.active == 2 * of_experts + embedding
    ids = torch.tensor([list(synthetic.TOKENIZER_IDS[5:1000:41])])
    words = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], quantization_config=words, dtype=torch.float32
    ).eval()
    loaded = load(folders[0], decoder="lean", dtype=torch.float32, exact=True)
    assert loaded.reasons == ()
    with torch.inference_mode():
        expected = theirs(ids).logits
        loaded.decoder.begin(rows=1, capacity=ids.shape[1])
        logits = loaded.decoder.forward(ids, last_only=False)
    assert torch.isfinite(expected).all() and expected.std() > 0.1
    assert torch.allclose(logits, expected, atol=1e-3, rtol=1e-3)


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
import runtime_quantflow
from quantflow import process_memory

settings = {"dtype": "bfloat16", "exact": False, "kv_cache": "auto", "threads": 2}
kept = [runtime_quantflow.load(settings | {"artifact": sys.argv[2]})]
begun = process_memory.usage()
kept.append(runtime_quantflow.load(settings | {"artifact": sys.argv[3]}))
print(process_memory.usage().anonymous - begun.anonymous)
"""


def test_the_process_of_a_mixture_holds_its_weights_once(part, tmp_path):
    """The first mixture, a small one, takes what a process has but once: modules, buffers."""
    mixture, sizes = part("_mixture"), []
    for name, layers in (("small", 1), ("large", 5)):
        shape = mixture.MixtureShape(
            hidden=1024,
            intermediate=1024,
            layers=layers,
            heads=8,
            kv_heads=2,
            head_dim=64,
            experts=8,
            chosen=2,
            vocab=4096,
        )
        mixture.make_mixture(tmp_path / name, shape, seed=3, tokenizer=EXAMPLE)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")))
    folders = [str(tmp_path / name) for name in ("small", "large")]
    taken = subprocess.run(
        [sys.executable, "-c", MEMORY, str(BENCHMARKS / "peers"), *folders],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert 0.9 * sizes[1] < int(taken.stdout) < 1.15 * sizes[1]


HOLD = """
import sys
from pathlib import Path
from quantflow.files.stage_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "name", ["accuracy", "runtime", "large_checkpoint", "measure_ranks", "unify_many_ranks"]
)
def test_a_second_benchmark_in_a_work_folder_names_the_first_and_ends(
    part, tmp_path, capsys, monkeypatch, name
):
    work = tmp_path / "work"
    program = part(name)
    begun = []
    monkeypatch.setattr(program, "_run", lambda given: begun.append(given) or 0)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        assert program.main(["--work", str(work)]) == 5
        assert begun == []
        assert capsys.readouterr().err == (
            f"error: {work}: process {first.pid} is writing it\n  fix: wait for it, or choose "
            "another folder, with --work\n"
        )
        first.communicate()
    assert program.main(["--work", str(work)]) == 0 and len(begun) == 1


TERMINATED = """
import argparse, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from _alone import alone
from busy import neighbours

def work(given):
    with neighbours(2):
        print("they count", flush=True)
        time.sleep(60)

alone(work, argparse.Namespace(work=pathlib.Path(sys.argv[2])))
"""


def test_a_benchmark_that_is_terminated_ends_what_it_started(tmp_path):
    command = [sys.executable, "-c", TERMINATED, str(BENCHMARKS), str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "they count\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.terminate()
        assert process.wait(20) == 143
    assert len(children) == 2 and not any(Path("/proc", child).exists() for child in children)


def test_what_a_fork_returns_raises_or_dies_of_is_told(part):
    forks = part("_forks")
    assert forks.in_fork(lambda: {"a": [1, None]}, seconds=20) == {"a": [1, None]}
    with pytest.raises(forks.ForkError, match="ValueError: too wide"):
        forks.in_fork(lambda: exec("raise ValueError('too wide')"), seconds=20)
    with pytest.raises(forks.ForkError, match="ended by signal 9"):
        forks.in_fork(lambda: os.kill(os.getpid(), 9), seconds=20)
    with pytest.raises(forks.ForkError, match="not done after 1 s"):
        forks.in_fork(lambda: time.sleep(60), seconds=1)


def test_a_type_passes_when_no_stage_has_a_reason_and_types_that_cannot_be_made_do_not_count(part):
    families = part("families")
    rows = {
        "a": {"measure": None, "W4A16": None, "W8A8": None},
        "b": {"measure": None, "W4A16": None, "W8A8": "other logits"},
        "c": {"measure": "refused: no", "by name": None},
        "d": {"model": "no size"},
        "llava": {"measure": None, "W4A16": None, "W8A8": None},
    }
    told = families.table(rows, {"a": None, "b": "no linears"})
    assert "Models that read images too:\n\n- W4A16: 1 of 1 types pass, 100.0%" in told
    assert (
        "- W4A16: 2 of 3 types pass, 66.7%" in told and "- W8A8: 1 of 3 types pass, 33.3%" in told
    )
    assert (
        "| c | no (3) | no (3) |" in told and "3. c: refused: no" in told and "- d: no size" in told
    )
    assert "(W4A16, GPTQ): 1 of 2 types pass, 50.0%" in told
    assert (
        "1 types are refused with the reason; the weights of 1 of them go through by name" in told
    )


def test_an_artifact_in_stock_transformers_has_columns_and_does_not_decide_who_passes(part):
    families = part("families")
    done = {"measure": None, "W4A16": None}
    rows = {
        "a": {**done, "stock W4A16": None},
        "b": {**done, "stock W4A16": f"{families.LOUDLY}Conv1D"},
        "c": {**done, "stock W4A16": f"{families.SILENTLY}the logits differ"},
    }
    told = families.table(rows, {})
    assert all(families.passes(row) for row in rows.values())
    assert "- W4A16: 3 of 3 types pass, 100.0%" in told
    assert (
        "- W4A16, the artifact in stock transformers: 1 right, 1 refused with an error, "
        "1 silently wrong"
    ) in told
    assert "| type | W4A16 | stock W4A16 |" in told and "| a | yes | yes |" in told
    assert "| b | yes | no (1) |" in told
    assert f"1. stock W4A16, b: {families.LOUDLY}Conv1D" in told


def test_a_soak_names_what_a_server_did_not_keep(part):
    soak = part("soak")
    names = (
        "running",
        "waiting",
        "pool_used",
        "reserved_tokens",
        "failed",
        "cancelled",
        "submitted",
        "finished",
    )
    kept = dict.fromkeys(names, 0.0) | {"submitted": 5.0, "finished": 5.0}
    level = soak.Seen(memory=[(when, 500) for when in range(0, 1000, 20)])
    grown = soak.Seen(
        memory=[(when, 500 + when / 5) for when in range(0, 1000, 20)],
        faults=["generate: 500: b''"],
    )
    left = kept | {"pool_used": 2.0, "submitted": 6.0}
    assert soak.judge(level, kept, seconds=1000, growth=0.1) == []
    faults = soak.judge(grown, left, seconds=1000, growth=0.1)
    assert faults[0] == "generate: 500: b''" and "pool_used is 2 at the end" in faults
    assert (
        any(text.startswith("requests: ") for text in faults)
        and "resident memory grew from" in faults[-1]
    )


def test_what_a_soak_asks_is_drawn_from_the_seed_alone(part):
    soak, bodies = part("soak"), []
    for _ in range(2):
        rng = random.Random("0 1")
        bodies.append([make(rng) for make, _, _ in soak.KINDS.values() for _ in range(20)])
    assert bodies[0] == bodies[1] and {path for path, _ in bodies[0]} >= {
        "/generate",
        "/generate_stream",
        "/v1/completions",
        "/tokenize",
    }


@pytest.fixture
def serving(part) -> ModuleType:
    return part("serving")


def seen_of(serving: ModuleType, pieces: list[tuple[float, bytes]]):
    """Return what a client of 3 tokens notes that began at second 100 and got these pieces."""

    async def reply():
        return serving.Reply()

    seen = serving.Seen(due=0.0, new=3, reply=asyncio.run(reply()))
    seen.reply.pieces = pieces
    serving.note_tokens(seen, 100.0)
    return seen


def test_a_token_of_a_server_came_when_the_last_byte_of_its_line_did(serving):
    event = b'data: {"choices": [{"text": "a"}]}\n\n'
    pieces = [
        (101.0, b"HTTP/1.1 200 OK\r\n\r\n" + event + event[:9]),
        (103.0, event[9:]),
        (104.0, b"data: [DONE]\n\n"),
    ]
    seen = seen_of(serving, pieces)
    # two events of three tokens
    assert (seen.first, seen.last, seen.tokens, seen.error) == (1.0, 3.0, 3, None)
    assert (seen.ttft, seen.tpot) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([(101.0, b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")], "HTTP/1.1 429 Too Many Requests"),
        ([(101.0, b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": "overloaded"}\n\n')], "overloaded"),
        ([(101.0, b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n")], "no token came"),
        ([], "no answer"),
    ],
)
def test_a_request_that_a_server_does_not_answer_has_its_reason(serving, pieces, error):
    assert seen_of(serving, pieces).error == error


def test_a_perplexity_beside_another_is_worked_by_hand(part):
    """Two tokens: exp((0 + 2 ln 2) / 2) = 2 before, and a quarter more of each likelihood after."""
    before = torch.tensor([0.0, 2 * math.log(2)], dtype=torch.float64)
    comparison = Comparison(
        lengths=torch.tensor([2]),
        kld=torch.tensor([0.25, 0.75]),
        agreement=torch.tensor([True, True]),
        nll_baseline=before,
        nll_candidate=before + math.log(1.25),
    )
    assert part("kv_cache").figures(comparison) == ("2.5000", "25.00%", "0.50000")


def test_a_cache_of_16_bits_has_the_perplexity_of_transformers_and_others_stand_beside_it(
    part, tmp_path, capsys
):
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLE / "train.py").read_text())
    words = ["perplexity", str(EXAMPLE), "--text", str(text), "--windows", "2", "--length", "64"]
    assert part("kv_cache").main([*words, "--kinds", "bfloat16", "int4"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["cache", "perplexity", "above bfloat16", "mean KLD"]
    assert [row[0] for row in rows[2:]] == ["bfloat16", "int4"]
    assert rows[2][2:] == ["0.00%", "0.00000"] and 0 < float(rows[3][3]) < 0.1
    ids = transformers.AutoTokenizer.from_pretrained(EXAMPLE)(text.read_text())["input_ids"]
    windows = torch.tensor(ids[:128]).view(2, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    with torch.no_grad():
        expected = model(windows, labels=windows).loss.exp().item()
    assert float(rows[2][1]) == pytest.approx(expected, rel=0.02)
    with pytest.raises(SystemExit, match="give a longer text, or less windows"):
        part("kv_cache").main([*words, "--windows", "9999"])


def test_attention_is_timed_over_all_columns_and_the_new_one(part, capsys):
    module = part("kv_cache")
    operations, column = module.filled("float32", 2, 1, 16, 40)
    columns = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = (
        torch.cat([columns, columns[:1]]).unflatten(1, (4, 16)).transpose(0, 1).split([2, 1, 1])
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, -1:], k.expand(2, -1, -1), v.expand(2, -1, -1)
    )
    for layer in (0, module.LAYERS - 1):
        found = operations.attend(column.clone(), layer).view(2, 1, 16)
        torch.testing.assert_close(found, expected)
    words = ["attention", "--shapes", "2,1,16,40", "1,1,32,9", "--passes", "1"]
    assert module.main([*words, "--kinds", "int8", "int5"]) == 0
    *_, head, _, first, second = capsys.readouterr().out.splitlines()
    assert head.endswith("| int8 | int5 |")
    assert first.startswith("| 2, 1, 16, 40 |") and second.startswith("| 1, 1, 32, 9 |")
