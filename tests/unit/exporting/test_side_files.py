"""Templates, tokenizers and processors of a source arrive in every folder that is made of it."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quantflow.files.manifest import read_manifest
from quantflow.files.verify import verify
from quantflow.planning.forecast import run as plan
from quantflow.planning.plan_job import PlanJob, entries
from quantflow.planning.recipe import Recipe
from quantflow.progress import SILENT
from tests.shared import run

BESIDE = (
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "preprocessor_config.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenization_kimi.py",
    "vocab.bpe",
)
TEMPLATES = {
    "default": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
    "tool_use": "TOOLS {{ tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


@pytest.fixture(scope="module")
def source(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "model"
    shutil.copytree(llama, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    for name in BESIDE[2:]:
        (folder / name).write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("x" * 5000)
    return folder


@pytest.fixture(scope="module")
def artifact(source) -> Path:
    made = source.parent / "w8a16"
    assert run("quantize", source, "-o", made, "--scheme", "W8A16", "-q") == 0
    return made


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_artifact_has_them_and_its_ledger_names_the_others(source, artifact):
    assert set(BESIDE) <= names(artifact) and "onnx/model.onnx" not in names(artifact)
    for name in BESIDE:
        assert (artifact / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(artifact).chat_template == TEMPLATES
    verify(artifact)
    manifest = read_manifest(artifact)
    assert set(BESIDE) <= manifest["files"].keys() & manifest["source"]["files"].keys()
    fates = {row["name"]: row["action"] for row in manifest["ledger"]["files"]}
    assert fates.keys() == names(source) and fates["onnx/model.onnx"] == "dropped"


def test_every_other_export_has_them_and_says_what_stays_behind(artifact, tmp_path, capsys):
    for chosen in ("dequantized", "gptq"):
        out = tmp_path / chosen
        assert run("export", artifact, "-o", out, "--format", chosen) == 0
        assert set(BESIDE) <= names(out)
        assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATES


def test_export_says_what_stays_behind(source, tmp_path, capsys):
    assert run("quantize", source, "-o", tmp_path / "o", "--scheme", "W8A16") == 0
    assert (
        "export o: left behind: onnx/ (not part of what a runtime loads)" in capsys.readouterr().err
    )


def test_a_plan_counts_their_bytes(source, tmp_path):
    def planned() -> int:
        recipe = Recipe(model=str(source), quantize=entries("W8A16"))
        done = plan(PlanJob(recipe=recipe, measured=False, folder=tmp_path), SILENT)
        return done["artifacts"][0]["output_bytes"]

    before = planned()
    extra = source / "additional_chat_templates" / "more.jinja"
    extra.write_text("x" * 1000)
    try:
        assert planned() == before + 1000
    finally:
        extra.unlink()
