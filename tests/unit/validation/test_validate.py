"""Which text an artifact may be judged on, and what validations of one model keep for each other."""

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

from quantflow.errors import InputError, UsageError
from quantflow.exporting import export
from quantflow.models.identity import CANARY_TOKENS, tensor_hash
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Quantize, Validate
from quantflow.progress import SILENT
from quantflow.quantization import quantize
from quantflow.stages.cli.progress_line import ProgressLine
from quantflow.validation import validate


def test_a_heading_that_both_texts_have_is_no_overlap_and_64_tokens_are(llama, tmp_path):
    words = load_tokenizer(llama)
    heading, body = "value scale round\n\n", " ".join(["group layer token model range shift pack zero point"] * 12)
    text = tmp_path / "heldout.txt"
    text.write_text(heading + body)
    short, long = (torch.tensor(words(part.strip())["input_ids"]) for part in (heading, body))
    assert len(short) < CANARY_TOKENS < len(long)
    options = Validate(text=str(text), tokens=96, sequence_length=96)
    job = validate.ValidateJob(artifact=llama, baseline=llama, report=tmp_path / "r", options=options)

    def manifest(*sequences):
        heads = [tensor_hash(sequence[:CANARY_TOKENS]) for sequence in sequences]
        return {"measurement": {"calibration": {"sequence_length": 128}, "sequence_heads": heads}}

    assert validate._sequences(job, manifest(short))
    with pytest.raises(InputError, match="document 2, tokens 0 to 63: the first 64 tokens of a calibration sequence"):
        validate._sequences(job, manifest(short, long))
    with pytest.raises(InputError, match="document 2, tokens 7 to 70: the first 64 tokens"):  # of a window of packed text
        validate._sequences(job, manifest(short, long[7:]))


QUIET = ProgressLine(quiet=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("artifact")
    entry = Quantize(name="a", scheme="W4A16", algorithm="rtn", group_size=32)
    quantize.run(quantize.QuantizeJob(model=llama, output=folder / "2", entry=entry), QUIET)
    return export.run(export.ExportJob(quantized=folder / "2", output=folder / "4"), QUIET)


def job_of(artifact, llama, text_files, report):
    options = Validate(text=str(text_files["heldout"]), tokens=400, sequence_length=40)
    return validate.ValidateJob(artifact=artifact, baseline=llama, report=report, options=options)


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


def test_a_second_validation_runs_the_candidate_alone_and_finds_the_same(artifact, llama, text_files, tmp_path, layers_run):
    validate.run(job_of(artifact, llama, text_files, tmp_path / "1"), QUIET)
    assert layers_run.count(torch.float32) == 4 and layers_run.count(torch.bfloat16) == 2  # of two layers
    layers_run.clear()
    validate.run(job_of(artifact, llama, text_files, tmp_path / "2"), QUIET)
    assert layers_run == [torch.float32] * 2
    assert (tmp_path / "2" / "validation.json").read_bytes() == (tmp_path / "1" / "validation.json").read_bytes()
    (kept,) = (tmp_path / "validation-cache").iterdir()
    assert {path.name for path in kept.iterdir()} == {"floor.json", "00002.hidden", "00002.json"}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("floor.json", "changed"),
        ("00002.hidden", "cut"),
        ("00002.hidden", "changed"),
        ("00002.json", "changed"),
        pytest.param("floor.json", "cut", marks=pytest.mark.slow),
        pytest.param("floor.json", "removed", marks=pytest.mark.slow),
        pytest.param("00002.hidden", "removed", marks=pytest.mark.slow),
        pytest.param("00002.json", "removed", marks=pytest.mark.slow),
    ],
)
def test_what_was_kept_and_is_damaged_is_made_again(artifact, llama, text_files, tmp_path, layers_run, name, harm):
    validate.run(job_of(artifact, llama, text_files, tmp_path / "1"), QUIET)
    (path,) = (tmp_path / "validation-cache").glob(f"*/{name}")
    whole = path.read_bytes()
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(whole[:-7] if harm == "cut" else whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    layers_run.clear()
    validate.run(job_of(artifact, llama, text_files, tmp_path / "2"), QUIET)
    assert len(layers_run) == 4  # the candidate, and the model whose part was damaged
    assert (tmp_path / "2" / "validation.json").read_bytes() == (tmp_path / "1" / "validation.json").read_bytes()
    assert path.read_bytes() == whole


def test_another_text_length_or_seed_keeps_apart_from_what_was_kept(artifact, llama, text_files, tmp_path, layers_run):
    job = job_of(artifact, llama, text_files, tmp_path / "1")
    validate.run(job, QUIET)
    for number, other in enumerate([replace(job.options, sequence_length=32), replace(job.options, tokens=200)], start=2):
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
        assert (job.report / "validation.json").read_bytes() == (tmp_path / "alone" / "r" / "validation.json").read_bytes()


def test_the_time_it_will_take_is_said_before_it_begins(artifact, llama, text_files, tmp_path):
    said = []

    class Saying(ProgressLine):
        def say(self, text):
            said.append(text)

        def steps(self, items, **told):
            said.append("begins")
            yield from items

    for number in (1, 2):
        validate.run(job_of(artifact, llama, text_files, tmp_path / str(number)), Saying(quiet=True))
    first, again = [text for text, after in pairwise(said) if after == "begins" and text != "begins"]
    assert re.fullmatch(r"validate 4: 13 windows, 400 tokens, about \d+ s", first)
    assert re.fullmatch(r"validate 4: 13 windows, 400 tokens, about \d+ s, noise and baseline kept from before", again)


def test_a_gate_that_cannot_be_read_is_refused_before_a_layer_runs(artifact, llama, text_files, tmp_path, layers_run):
    (tmp_path / "gate.yaml").write_text("schemes: [W4A16]\nthresholds: {ppl_ratio: 1.1}\n")
    job = job_of(artifact, llama, text_files, tmp_path / "r")
    with pytest.raises(UsageError, match="metric 'mean_kld' has no threshold; give all four"):
        validate.run(replace(job, options=replace(job.options, gate=str(tmp_path / "gate.yaml"))), QUIET)
    assert layers_run == []


def test_token_ids_beyond_the_embedding_are_refused_before_a_layer_runs(artifact, llama, text_files, tmp_path, layers_run):
    larger = Path(shutil.copytree(llama, tmp_path / "larger"))
    tokenizer = load_tokenizer(larger)
    token = json.loads((llama / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), token)] + ["<beyond>"])
    tokenizer.save_pretrained(larger)
    for name, row in (("ids", {"input_ids": [5] * 99 + [token]}), ("text", {"text": "def <beyond>" * 30})):
        text = tmp_path / f"{name}.jsonl"
        text.write_text(json.dumps(row) + "\n")
        job = job_of(artifact, larger, {"heldout": text}, tmp_path / "report")
        with pytest.raises(InputError, match=rf"{name}\.jsonl: token id {token}, the model has {token}"):
            validate.run(job, SILENT)
    assert layers_run == []
