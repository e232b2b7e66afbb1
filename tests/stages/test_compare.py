"""`compare`: any models beside one source, by one measure; nothing of theirs is touched."""

import hashlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.formats.llama_cpp.logits_base import open_logits_base, writing_base
from quantflow.progress import SILENT
from quantflow.validating.compare_job import CompareJob
from tests.shared import run

WORDS = ("--tokens", "400", "--sequence-length", "48")


@pytest.fixture(scope="module")
def artifacts(llama, tmp_path_factory) -> dict[str, Path]:
    """W8A16 and W4A16 of one model, and the 4-bit one as a GGUF file."""
    folder = tmp_path_factory.mktemp("artifacts")
    for scheme in ("W8A16", "W4A16"):
        words = ("--scheme", scheme, "--algorithm", "rtn", "--group-size", "32")
        words = words if scheme == "W4A16" else words[:4]
        assert run("quantize", llama, "-o", folder / f"q{scheme}", *words, "-q") == 0
        assert run("export", folder / f"q{scheme}", "-o", folder / scheme, "-q") == 0
    assert run("export", folder / "W4A16", "-o", folder / "gguf", "--format", "gguf", "-q") == 0
    return {
        "w8": folder / "W8A16",
        "w4": folder / "W4A16",
        "gguf": next((folder / "gguf").glob("*.gguf")),
    }


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def compared(capsys, *words) -> dict:
    capsys.readouterr()
    assert run("compare", *words, *WORDS, "--json", "-q") == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_has_each_candidate_and_folders_stay_as_they_are(
    llama, artifacts, text_files, tmp_path, capsys
):
    before = {name: hashes(path.parent) for name, path in artifacts.items()}
    words = (llama, *(artifacts[name] for name in ("w8", "w4", "gguf")))
    words = (*words, "-o", tmp_path / "c", "--text", text_files["heldout"])
    found = compared(capsys, *words)
    by_name = {row["name"]: row for row in found["candidates"]}
    w8, w4, gguf = (by_name[str(artifacts[name])] for name in ("w8", "w4", "gguf"))
    divergence = {
        name: row["metrics"]["mean_kld"]["value"]
        for name, row in (("w8", w8), ("w4", w4), ("gguf", gguf))
    }
    assert 0 < divergence["w8"] < divergence["w4"] / 10
    assert divergence["gguf"] == pytest.approx(divergence["w4"], rel=0.05)  # bfloat16 of its values
    assert (w8["stored"], w4["stored"]) == ("W8A16", "W4A16")
    assert w4["bits_per_weight"] < w8["bits_per_weight"] < 16
    assert [pair["verdict"] for pair in found["pairs"]] == ["worse", "worse"]
    assert {name: hashes(path.parent) for name, path in artifacts.items()} == before
    page = (tmp_path / "c/compare.html").read_text()
    assert (
        "W4A16" in page and "<svg" in page and "<circle" in (tmp_path / "c/compare.svg").read_text()
    )
    # the same inputs again: nothing runs
    assert run("compare", *words, *WORDS) == 0
    assert "up to date" in capsys.readouterr().err
    # other inputs: refused, and redone where it is asked
    assert run("compare", *words, "--tokens", "300", "--sequence-length", "48") == 2
    assert run("compare", *words, "--tokens", "300", "--sequence-length", "48", "--force") == 0


def test_figures_are_validates_own(llama, artifacts, text_files, tmp_path, capsys):
    text = ("--text", text_files["heldout"])
    found = compared(capsys, llama, artifacts["w4"], "-o", tmp_path / "c", *text)
    report = tmp_path / "v"
    assert run(
        "validate", artifacts["w4"], "--baseline", llama, *text, *WORDS, "--report", report
    ) in (0, 4)
    expected = json.loads((report / "validation.json").read_text())
    assert found["candidates"][0]["metrics"] == expected["metrics"]
    assert found["candidates"][0]["windows"] == expected["windows"]


def test_a_base_gives_the_same_figures_as_its_source(
    llama, artifacts, text_files, tmp_path, capsys
):
    base = tmp_path / "llama.kld"
    words = (artifacts["w8"], artifacts["w4"])
    text = ("--text", text_files["heldout"])
    written = compared(
        capsys, llama, *words, "--write-base", base, *text, "-o", tmp_path / "written"
    )
    read = compared(capsys, base, *words, "-o", tmp_path / "read")
    assert read["candidates"] == written["candidates"]
    assert read["pairs"] == written["pairs"]
    assert read["protocol"]["scored"] == "second half of each chunk"
    # by hand: the logits of the whole model over one chunk, the float32 model's KL
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    file = open_logits_base(base)
    (chunk, *_) = file.sequences(None)
    with torch.no_grad():
        log_p = model(input_ids=chunk[None]).logits[0].log_softmax(dim=-1)
    there = log_p[file.first : -1]
    assert (file.log_probabilities(0) - there)[there > -16].abs().max() < 1e-3
    divergence = written["candidates"][0]["metrics"]["mean_kld"]["value"]
    assert 0 < divergence < written["candidates"][1]["metrics"]["mean_kld"]["value"]


def test_validate_judges_by_a_base_that_it_writes_where_there_is_none(
    llama, artifacts, text_files, tmp_path, capsys
):
    own, theirs = tmp_path / "own.kld", tmp_path / "theirs.kld"
    text = ("--text", text_files["heldout"])
    compared(capsys, llama, "--write-base", theirs, *text, "-o", tmp_path / "written")
    expected = compared(capsys, theirs, artifacts["w4"], "-o", tmp_path / "c")
    words = ("validate", artifacts["w4"], "--baseline", llama, *text, *WORDS, "--base", own)
    assert run(*words, "--report", tmp_path / "v") in (0, 4)
    assert own.read_bytes() == theirs.read_bytes()
    found = json.loads((tmp_path / "v/validation.json").read_text())
    assert found["metrics"] == expected["candidates"][0]["metrics"]
    assert found["protocol"]["scored"] == "second half of each chunk"
    assert (found["protocol"]["windows"], found["protocol"]["sequence_length"]) == (8, 48)
    capsys.readouterr()
    assert run(*words, "--report", tmp_path / "v") in (0, 4)  # the file is there now
    assert "up to date" in capsys.readouterr().err


def test_validate_refuses_a_base_of_another_model_and_one_beside_a_diagnosis(
    llama, artifacts, text_files, tmp_path, capsys
):
    base = tmp_path / "other.kld"
    vocabulary = json.loads((llama / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(4, vocabulary, (2, 32), generator=generator)
    with writing_base(base, tokens, vocabulary) as writer:
        for chunk in range(2):
            writer.write(chunk, 4 * torch.randn(32, vocabulary, generator=generator))
    words = ("validate", artifacts["w4"], "--baseline", llama, "--base", base)
    assert run(*words, "--report", tmp_path / "v") == 3
    assert "it is of another model" in capsys.readouterr().err
    assert run(*words, "--report", tmp_path / "v", "--diagnose", "16") == 2
    assert "--diagnose with --base" in capsys.readouterr().err


class StandIn:
    """The part of llama-cpp-python that is used, on transformers: nothing else is known of it."""

    opened: ClassVar[list[dict]] = []

    def __init__(self, **words):
        from quantflow.runtime.load import load
        from quantflow.sources.gguf_import import import_gguf

        StandIn.opened.append(words)
        path = Path(words["model_path"])
        folder = import_gguf(path, path.parent.parent / "imported", SILENT)
        self.runs = load(folder, dtype=torch.float32).model
        self.model, self.scores = self, np.empty((words["n_ctx"], self.n_vocab()), np.float32)
        self.past = self.closed = 0

    def n_vocab(self) -> int:
        return self.runs.config.vocab_size

    def token_bos(self) -> int:
        return self.runs.config.bos_token_id

    def reset(self) -> None:
        self.past = 0

    def eval(self, tokens: list[int]) -> None:
        assert not self.past
        self.past = len(tokens)
        with torch.no_grad():
            logits = self.runs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        self.scores[: self.past] = logits.float().numpy()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def llama_cpp(monkeypatch):
    module = ModuleType("llama_cpp")
    module.Llama = StandIn
    module.llama_model_get_vocab = lambda model: model
    module.llama_vocab_get_add_bos = lambda vocab: True  # as the model's tokenizer does
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    StandIn.opened.clear()


def test_llama_cpp_runs_files_beside_our_runtime_and_alone(
    llama, artifacts, text_files, tmp_path, capsys, llama_cpp
):
    base, engine = tmp_path / "llama.kld", ("--engine", "llama.cpp")
    words = (artifacts["w4"], artifacts["gguf"], "--text", text_files["heldout"])
    here = compared(capsys, llama, *words, "-o", tmp_path / "here")
    assert StandIn.opened == []
    there = compared(capsys, llama, *words, *engine, "-o", tmp_path / "there")
    (opened,) = StandIn.opened
    assert (opened["model_path"], opened["n_ctx"]) == (str(artifacts["gguf"]), 48)
    assert there["candidates"][0] == here["candidates"][0]
    ours, theirs = (found["candidates"][1] for found in (here, there))
    assert theirs["windows"]["kld"] == pytest.approx(ours["windows"]["kld"], rel=1e-3)
    assert theirs["stored"] == "BF16, F32" and theirs["bits_per_weight"] > 16
    # with a base nothing of ours has to run
    compared(
        capsys, llama, "--write-base", base, "--text", text_files["heldout"], "-o", tmp_path / "b"
    )
    alone = compared(capsys, base, artifacts["gguf"], *engine, "-o", tmp_path / "alone")
    with_ours = compared(capsys, base, artifacts["gguf"], "-o", tmp_path / "ours")
    one, other = (found["candidates"][0]["windows"] for found in (alone, with_ours))
    assert one["kld"] == pytest.approx(other["kld"], rel=1e-3)


def test_without_llama_cpp_its_engine_is_refused_by_name(
    llama, artifacts, text_files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    words = ("--engine", "llama.cpp", "--text", text_files["heldout"], "-o", tmp_path / "c")
    assert run("compare", llama, artifacts["gguf"], *words) == 6
    assert "install llama-cpp-python in the environment" in capsys.readouterr().err


def test_a_base_alone_is_written_and_a_lost_one_is_made_again(llama, text_files, tmp_path, capsys):
    base = tmp_path / "llama.kld"
    words = (llama, "--write-base", base, "--text", text_files["heldout"], "-o", tmp_path / "c")
    found = compared(capsys, *words)
    assert found["candidates"] == [] and open_logits_base(base).tokens.shape == (8, 48)
    data = base.read_bytes()
    base.unlink()
    assert run("compare", *words, *WORDS, "-q") == 0
    assert base.read_bytes() == data


def test_the_source_itself_has_no_divergence(llama, text_files, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    found = compared(capsys, llama, copy, "-o", tmp_path / "c", "--text", text_files["heldout"])
    (row,) = found["candidates"]
    assert row["metrics"]["mean_kld"]["value"] == 0
    assert row["metrics"]["top1_agreement"]["value"] == 1
    assert "nothing to draw" in (tmp_path / "c/compare.svg").read_text()


def test_the_page_stands_beside_its_source_or_here():
    job = partial(CompareJob, candidates=(Path("a"),))
    assert job(source=Path("work/models/llama")).folder == Path("work/models/llama-compare")
    assert job(source=Path("org/llama-of-nobody")).folder == Path("llama-of-nobody-compare")
    assert job(source=Path("work/models/llama"), output=Path("o")).folder == Path("o")


def test_what_cannot_be_compared_is_refused_before_a_layer_runs(
    llama, artifacts, text_files, tmp_path, capsys
):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    config = json.loads((other / "config.json").read_text())
    tensors = {}
    for path in other.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (other / "model.safetensors.index.json").unlink(missing_ok=True)
    config["vocab_size"] -= 8
    (other / "config.json").write_text(json.dumps(config))
    for name, tensor in tensors.items():
        if tensor.shape[0] == config["vocab_size"] + 8:
            tensors[name] = tensor[:-8].contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    text = ("--text", text_files["heldout"])
    for code, words, says in (
        (2, (llama,), "no candidate"),
        (2, (llama, artifacts["w4"], artifacts["w4"]), "is given twice"),
        (3, (llama, other, *text), f"a vocabulary of {config['vocab_size']}"),
        (3, (llama, tmp_path / "none"), "no such folder or file"),
        (2, (llama, artifacts["w4"], "-o", artifacts["w4"] / "c"), "lies in the candidate"),
    ):
        if "-o" not in words:
            words = (*words, "-o", tmp_path / "c")
        assert run("compare", *words, *WORDS) == code, words
        assert says in capsys.readouterr().err
    (tmp_path / "cut.kld").write_bytes(b"_logits_1234")
    assert run("compare", tmp_path / "cut.kld", artifacts["w4"], "-o", tmp_path / "c") == 3
    assert "cut.kld: no base" in capsys.readouterr().err
