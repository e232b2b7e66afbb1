"""Folders in other programs' layouts, run as they are.

They give an artifact's text, whatever folder it is in.
"""

import json

import pytest

from quantflow.exporting import export as export_stage
from tests.shared import run


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory, llama):
    """By scheme."""
    work = tmp_path_factory.mktemp("layouts")
    schemes = {
        "W4A16": ("--algorithm", "rtn", "--group-size", "32"),
        "FP8_BLOCK": ("--group-size", "32"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        for scheme, words in schemes.items():
            assert (
                run("quantize", llama, "-o", work / scheme, "--scheme", scheme, *words, "-q") == 0
            )
    return {scheme: work / scheme for scheme in schemes}


@pytest.fixture
def said(capsys):
    """Return what a folder says after three prompts."""

    def generate(folder):
        capsys.readouterr()
        words = (
            "--prompt",
            "value scale",
            "round",
            "group layer token",
            "--max-new-tokens",
            "12",
            "--ignore-eos",
            "--exact",
        )
        assert run("generate", folder, *words, "--json", "-q") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["outputs"]

    return generate


@pytest.mark.parametrize(
    ("scheme", "layout", "method"),
    [
        ("W4A16", "gptq", "gptq"),
        ("W4A16", "gptq_v2", "gptq"),
        ("W4A16", "auto_round", "auto-round"),
        ("W4A16", "awq", "awq"),
        ("FP8_BLOCK", "fp8", "fp8"),
    ],
)
def test_a_folder_in_another_layout_says_what_the_artifact_says(
    artifacts, said, tmp_path, scheme, layout, method
):
    assert run("export", artifacts[scheme], "-o", tmp_path / layout, "--format", layout, "-q") == 0
    config = json.loads((tmp_path / layout / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == method and not (tmp_path / layout / "quantflow.json").exists()
    assert said(tmp_path / layout) == said(artifacts[scheme])


def test_a_folder_in_awqs_layout_becomes_one_in_gptqs(artifacts, said, tmp_path):
    assert run("export", artifacts["W4A16"], "-o", tmp_path / "awq", "--format", "awq", "-q") == 0
    assert run("export", tmp_path / "awq", "-o", tmp_path / "gptq", "--format", "gptq", "-q") == 0
    assert (
        json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        == "gptq"
    )
    assert said(tmp_path / "gptq") == said(artifacts["W4A16"])
