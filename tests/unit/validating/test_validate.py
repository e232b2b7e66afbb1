"""The texts that an artifact may be judged on, and the files that validations share."""

import json
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import GateError, InputError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.canonical import digest_of, file_digest
from quantflow.files.manifest import read_manifest, write_manifest
from quantflow.models.identity import CANARY_TOKENS, tensor_hash
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Quantize, Validate
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_folder
from quantflow.validating import validate
from quantflow.validating.job import ValidateJob
from quantflow.validating.regression import read_validation
from quantflow.validating.verdict import raise_for_verdict


def test_bits_per_weight_are_those_of_codes_scales_and_zero_points():
    folder = Path(__file__).resolve().parents[2] / "golden" / "versions" / "0.1.0" / "artifact"
    # W8A8_STATIC: a float32 scale per output; of inputs a float32 and a byte
    artifact = open_folder(folder)
    shapes = [placement.shape for placement in artifact.linears.values()]
    bits = sum(8 * rows * columns + 32 * rows + 40 for rows, columns in shapes)
    assert validate.bits_per_weight(artifact) == bits / sum(
        rows * columns for rows, columns in shapes
    )


def test_a_heading_that_both_texts_have_is_no_overlap_and_64_tokens_are(llama, tmp_path):
    words = load_tokenizer(llama)
    heading, body = (
        "value scale round\n\n",
        " ".join(["group layer token model range shift pack zero point"] * 12),
    )
    text = tmp_path / "heldout.txt"
    text.write_text(heading + body)
    short, long = (torch.tensor(words(part.strip())["input_ids"]) for part in (heading, body))
    assert len(short) < CANARY_TOKENS < len(long)
    options = Validate(text=str(text), tokens=96, sequence_length=96)
    job = ValidateJob(artifact=llama, baseline=llama, report=tmp_path / "r", options=options)

    def manifest(*sequences):
        heads = [tensor_hash(sequence[:CANARY_TOKENS]) for sequence in sequences]
        return {"measurement": {"calibration": {"sequence_length": 128}, "sequence_heads": heads}}

    assert validate._sequences(job, manifest(short), QUIET)
    with pytest.raises(
        InputError,
        match="document 2, tokens 0 to 63: the first 64 tokens of a calibration sequence",
    ):
        validate._sequences(job, manifest(short, long), QUIET)
    # of a window of packed text
    with pytest.raises(InputError, match="document 2, tokens 7 to 70: the first 64 tokens"):
        validate._sequences(job, manifest(short, long[7:]), QUIET)


QUIET = ProgressLine(quiet=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("artifact")
    entry = Quantize(name="a", scheme="W4A16", algorithm="rtn", group_size=32)
    quantize.run(QuantizeJob(model=llama, output=folder / "2", entry=entry), QUIET)
    return export.run(ExportJob(source=folder / "2", output=folder / "4"), QUIET)


def job_of(artifact, llama, text_files, report):
    options = Validate(text=str(text_files["heldout"]), tokens=400, sequence_length=40)
    return ValidateJob(artifact=artifact, baseline=llama, report=report, options=options)


@pytest.fixture
def layers_run(monkeypatch):
    """The dtype of the model for each layer that runs."""
    seen, advance = [], validate.LayerStream.advance
    monkeypatch.setattr(
        validate.LayerStream,
        "advance",
        lambda self, *args, **options: seen.append(self.dtype) or advance(self, *args, **options),
    )
    return seen


def test_a_second_validation_runs_the_candidate_alone_and_finds_the_same(
    artifact, llama, text_files, tmp_path, layers_run
):
    validate.run(job_of(artifact, llama, text_files, tmp_path / "1"), QUIET)
    # of two layers
    assert layers_run.count(torch.float32) == 4 and layers_run.count(torch.bfloat16) == 2
    layers_run.clear()
    validate.run(job_of(artifact, llama, text_files, tmp_path / "2"), QUIET)
    assert layers_run == [torch.float32] * 2
    assert (tmp_path / "2" / "validation.json").read_bytes() == (
        tmp_path / "1" / "validation.json"
    ).read_bytes()
    (kept,) = (tmp_path / "validation-cache").iterdir()
    assert {path.name for path in kept.iterdir()} == {"floor.json", "00002.hidden", "00002.json"}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("floor.json", "changed"),
        pytest.param("00002.hidden", "cut", marks=pytest.mark.slow),
        pytest.param("00002.hidden", "changed", marks=pytest.mark.slow),
        ("00002.json", "changed"),
        pytest.param("floor.json", "cut", marks=pytest.mark.slow),
        pytest.param("floor.json", "removed", marks=pytest.mark.slow),
        pytest.param("00002.hidden", "removed", marks=pytest.mark.slow),
        pytest.param("00002.json", "removed", marks=pytest.mark.slow),
    ],
)
def test_what_was_kept_and_is_damaged_is_made_again(
    artifact, llama, text_files, tmp_path, layers_run, name, harm
):
    validate.run(job_of(artifact, llama, text_files, tmp_path / "1"), QUIET)
    (path,) = (tmp_path / "validation-cache").glob(f"*/{name}")
    whole = path.read_bytes()
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(
            whole[:-7] if harm == "cut" else whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:]
        )
    layers_run.clear()
    validate.run(job_of(artifact, llama, text_files, tmp_path / "2"), QUIET)
    assert len(layers_run) == 4  # the candidate, and the model whose part was damaged
    assert (tmp_path / "2" / "validation.json").read_bytes() == (
        tmp_path / "1" / "validation.json"
    ).read_bytes()
    assert path.read_bytes() == whole


def test_another_text_length_or_seed_keeps_apart_from_what_was_kept(
    artifact, llama, text_files, tmp_path, layers_run
):
    job = job_of(artifact, llama, text_files, tmp_path / "1")
    validate.run(job, QUIET)
    for number, other in enumerate(
        [replace(job.options, sequence_length=32), replace(job.options, tokens=200)], start=2
    ):
        layers_run.clear()
        validate.run(replace(job, report=tmp_path / str(number), options=other), QUIET)
        assert len(layers_run) == 6
    assert len(list((tmp_path / "validation-cache").iterdir())) == 3


@pytest.mark.slow  # two processes import torch
def test_two_validations_at_once_find_what_one_finds(artifact, llama, text_files, tmp_path):
    validate.run(job_of(artifact, llama, text_files, tmp_path / "alone" / "r"), QUIET)
    jobs = [job_of(artifact, llama, text_files, tmp_path / "both" / name) for name in ("a", "b")]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(validate.run, jobs, [SILENT, SILENT]))
    for job in jobs:
        assert (job.report / "validation.json").read_bytes() == (
            tmp_path / "alone" / "r" / "validation.json"
        ).read_bytes()


def test_the_time_it_will_take_is_said_before_it_begins(artifact, llama, text_files, tmp_path):
    said = []

    class Saying(ProgressLine):
        def say(self, text):
            said.append(text)

        def steps(self, items, **told):
            said.append("begins")
            yield from items

    for number in (1, 2):
        validate.run(
            job_of(artifact, llama, text_files, tmp_path / str(number)), Saying(quiet=True)
        )
    first, again = [
        text for text, after in pairwise(said) if after == "begins" and text != "begins"
    ]
    assert re.fullmatch(r"validate 4: 13 windows, 400 tokens, about \d+ s", first)
    assert re.fullmatch(
        r"validate 4: 13 windows, 400 tokens, about \d+ s, noise and baseline kept from before",
        again,
    )


def test_a_gate_that_cannot_be_read_is_refused_before_a_layer_runs(
    artifact, llama, text_files, tmp_path, layers_run
):
    (tmp_path / "gate.yaml").write_text("schemes: [W4A16]\nthresholds: {ppl_ratio: 1.1}\n")
    job = job_of(artifact, llama, text_files, tmp_path / "r")
    with pytest.raises(UsageError, match="metric 'mean_kld' has no threshold; give all four"):
        validate.run(
            replace(job, options=replace(job.options, gate=str(tmp_path / "gate.yaml"))), QUIET
        )
    assert layers_run == []


def test_token_ids_beyond_the_embedding_are_refused_before_a_layer_runs(
    artifact, llama, text_files, tmp_path, layers_run
):
    larger = Path(shutil.copytree(llama, tmp_path / "larger"))
    tokenizer = load_tokenizer(larger)
    token = json.loads((llama / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), token)] + ["<beyond>"])
    tokenizer.save_pretrained(larger)
    for name, row in (
        ("ids", {"input_ids": [5] * 99 + [token]}),
        ("text", {"text": "def <beyond>" * 30}),
    ):
        text = tmp_path / f"{name}.jsonl"
        text.write_text(json.dumps(row) + "\n")
        job = job_of(artifact, larger, {"heldout": text}, tmp_path / "report")
        with pytest.raises(
            InputError, match=rf"{name}\.jsonl: token id {token}, the model has {token}"
        ):
            validate.run(job, SILENT)
    assert layers_run == []


@pytest.fixture(scope="module")
def spoiled(artifact, tmp_path_factory):
    """The artifact with the scales of one layer 5 % too large, and hashes that agree with it."""
    folder = tmp_path_factory.mktemp("spoiled") / "4"
    shutil.copytree(artifact, folder)
    tensors = load_file(folder / "model.safetensors")
    scales = [name for name in tensors if ".layers.1." in name and name.endswith("weight_scale")]
    assert len(scales) == 7
    save_file(
        tensors | {name: tensors[name] * 1.05 for name in scales},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    manifest = read_manifest(artifact)
    file = manifest["files"]["model.safetensors"]
    file |= {
        "sha256": file_digest(folder / "model.safetensors"),
        "bytes": (folder / "model.safetensors").stat().st_size,
    }
    manifest["digest"] = digest_of(
        {key: value for key, value in manifest.items() if key != "digest"}
    )
    write_manifest(folder, manifest)
    return folder


LOOSE = "thresholds: {ppl_ratio: 2.0, mean_kld: 2.0, kld_p999: 20.0, top1_agreement: 0.1}\n"


@pytest.mark.slow
def test_scales_that_are_too_large_in_one_layer_are_a_regression_and_the_other_way_is_a_pass(
    artifact, spoiled, llama, text_files, tmp_path, layers_run
):
    (tmp_path / "g.yaml").write_text(f"{LOOSE}max_regression: {{mean_kld: 0.0}}\n")
    job = job_of(spoiled, llama, text_files, tmp_path / "new")
    job = replace(
        job, options=replace(job.options, gate=str(tmp_path / "g.yaml")), previous=artifact
    )
    result = validate.run(job, QUIET)
    assert len(layers_run) == 8  # both artifacts, and once for both the baseline and its noise
    assert (result["outcome"], result["regression"]["outcome"]) == ("pass", "regression")
    with pytest.raises(GateError, match="a regression: mean_kld: worse by at least"):
        raise_for_verdict(result, allow_inconclusive=True)
    page = (tmp_path / "new" / "report.html").read_text()
    assert "Beside the older artifact" in page and "<td class=regression>regression</td>" in page
    old = tmp_path / "new-previous"
    assert (
        read_validation(old)["metrics"]["mean_kld"]["value"]
        == result["regression"]["metrics"]["mean_kld"]["previous"]
    )
    layers_run.clear()
    assert validate.run(job, QUIET) == result and layers_run == []  # up to date
    back = replace(
        job,
        artifact=artifact,
        report=tmp_path / "back",
        previous=tmp_path / "new" / "validation.json",
    )
    assert validate.run(back, QUIET)["regression"]["outcome"] == "pass"


def test_an_older_artifact_that_was_validated_on_the_same_text_is_not_validated_again(
    artifact, spoiled, llama, text_files, tmp_path, layers_run
):
    older = tmp_path / "old"
    shutil.copytree(artifact, older)
    job = job_of(older, llama, text_files, tmp_path / "old-validation")
    validate.run(job, QUIET)
    layers_run.clear()
    validate.run(replace(job, artifact=spoiled, report=tmp_path / "new", previous=older), QUIET)
    assert len(layers_run) == 2 and not (tmp_path / "new-previous").exists()


def test_validations_of_other_windows_are_no_pairs(artifact, llama, text_files, tmp_path):
    job = job_of(artifact, llama, text_files, tmp_path / "old")
    validate.run(job, QUIET)
    short = replace(
        job,
        report=tmp_path / "new",
        options=replace(job.options, sequence_length=32),
        previous=tmp_path / "old",
    )
    with pytest.raises(
        InputError, match="validated on different text; validate both with the same --text"
    ):
        validate.run(short, QUIET)


@pytest.mark.slow
def test_tasks_are_asked_of_both_models_and_compared_with_the_older_artifact(
    artifact, llama, text_files, tmp_path
):
    job = job_of(artifact, llama, text_files, tmp_path / "old")
    job = replace(job, options=replace(job.options, tasks=("small_piqa", "small_lambada"), limit=5))
    result = validate.run(job, QUIET)
    scores = result["tasks"]["scores"]
    assert result["tasks"]["protocol"] | {"lm_eval": ""} == {
        "limit": 5,
        "shots": None,
        "chat_template": None,
        "bos": True,
        "lm_eval": "",
        "dtype": "float32",
    }
    for name, metric in (("small_piqa", "acc_norm"), ("small_lambada", "acc")):
        score = scores[name]
        assert (score["metric"], score["samples"], len(score["answers"]["artifact"])) == (
            metric,
            5,
            5,
        )
        assert score["artifact"] == score["answers"]["artifact"].count("1") / 5
        assert score["recovery"] == (
            100 * score["artifact"] / score["baseline"] if score["baseline"] else None
        )
    theirs = json.loads((tmp_path / "old" / "tasks.json").read_text())
    assert theirs["results"]["small_piqa"]["acc_norm,none"] == scores["small_piqa"]["artifact"]
    assert "<h2>Tasks</h2>" in (tmp_path / "old" / "report.html").read_text()
    (tmp_path / "g.yaml").write_text(f"{LOOSE}min_recovery: {{small_piqa: 200}}\n")
    gated = replace(
        job, report=tmp_path / "gated", options=replace(job.options, gate=str(tmp_path / "g.yaml"))
    )
    judged = validate.run(gated, QUIET)
    assert judged["outcome"] != "pass" and judged["reasons"][0].startswith(
        "recovery of small_piqa: "
    )
    assert (
        "<td class=name>recovery of small_piqa</td><td>&gt;= 200 %</td>"
        in (tmp_path / "gated" / "report.html").read_text()
    )
    with pytest.raises(
        UsageError,
        match="min_recovery of task small_piqa, which is not asked; give --tasks small_piqa",
    ):
        validate.run(replace(gated, options=replace(gated.options, tasks=()), force=True), QUIET)
    again = validate.run(replace(job, report=tmp_path / "new", previous=tmp_path / "old"), QUIET)
    assert again["tasks"] == result["tasks"]
    asked = again["regression"]["tasks"]
    assert {name: (each["lost"], each["won"], each["outcome"]) for name, each in asked.items()} == {
        "small_lambada": (0, 0, "pass"),
        "small_piqa": (0, 0, "pass"),
    }
