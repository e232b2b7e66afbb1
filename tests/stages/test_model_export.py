"""`export MODEL` writes a model that is not quantized in files of another size, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


def export(*words):
    return exit_code(cli, ["export", *map(str, words)])


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_a_model_is_written_in_small_files_and_is_the_same(llama, tmp_path, capsys):
    # the words of IPEX's create_shard_model.py
    line = ("-m", llama, "--save-path", tmp_path / "small", "--max-shard-size", "50KB")
    assert export(*line) == 0
    said = capsys.readouterr()
    assert "is not quantized; its tensors are written in files of 50KB at most" in said.err
    assert "next: " not in said.err
    files = sorted((tmp_path / "small").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {path.name for path in files}
    ours, theirs = tensors(tmp_path / "small"), tensors(llama)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for path in files:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
        assert len(names) == 1 or path.stat().st_size < 50_000 + 8_000  # and its header
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    ids = torch.arange(5)[None]
    expected = AutoModelForCausalLM.from_pretrained(llama)(ids).logits
    assert torch.equal(written(ids).logits, expected)
    assert export(*line) == 0 and "up to date" in capsys.readouterr().err
    assert export(*line[:-1], "200KB") == 2  # another size is another result


def test_a_models_dtype_is_changed_where_one_is_given(llama, tmp_path):
    assert export(llama, "-o", tmp_path / "narrow", "--dtype", "bfloat16", "-q") == 0
    ours, theirs = tensors(tmp_path / "narrow"), tensors(llama)
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--measure-inputs",), "measure_inputs True beside format compressed-tensors"),
        (("--dtype", "int8"), "dtype 'int8' is unknown"),
        (("--shard-size", "0"), "size '0'"),
        (("--model", "examples/tiny-llama"), "--model examples/tiny-llama beside"),
    ],
)
def test_what_a_model_cannot_be_written_with_is_refused(llama, tmp_path, words, cause, capsys):
    assert export(llama, "-o", tmp_path / "o", *words) == 2
    assert cause in capsys.readouterr().err and not (tmp_path / "o").exists()
