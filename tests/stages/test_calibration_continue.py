"""`calibration continue`: measuring what a model runs while it generates."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quantflow.measuring.text import read_documents
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load
from tests.shared import run

PROMPTS = ("value scale", "round", "group layer token model")
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps([*PROMPTS, "one more"]))
    return tmp_path / "prompts.json"


def test_measuring_the_file_sees_what_prompts_and_decode_steps_put_into_a_linear(
    llama, prompts, tmp_path, capsys
):
    file = tmp_path / "new" / "said.safetensors"
    line = (
        "calibration",
        "continue",
        llama,
        "--prompts",
        prompts,
        "--samples",
        "3",
        "--new-tokens",
        "6",
        "-o",
        file,
    )
    assert run(*line, "--batch-size", "2", "--json", "-q") == 0
    said = json.loads(capsys.readouterr().out)
    loaded, seen, largest = load(llama), [], torch.zeros(())

    def hook(_, inputs, __):
        nonlocal largest
        largest = torch.maximum(largest, inputs[0].abs().max())

    loaded.model.get_submodule(DOWN).register_forward_hook(hook)
    for prompt in PROMPTS:
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        found = generate(loaded.decoder, ids, max_new_tokens=6, eos_token_id=loaded.eos_token_ids)
        seen.append(found[0, :-1].tolist())  # the last one is told and never run
    assert read_documents(file, load_tokenizer(llama)) == seen
    given = sum(len(loaded.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert said == {
        "file": str(file),
        "sequences": 3,
        "prompt_tokens": given,
        "new_tokens": sum(map(len, seen)) - given,
    }
    assert (
        run("measure", llama, "-o", tmp_path / "1", "--calibration", file, "--stats", "amax", "-q")
        == 0
    )
    measured = load_file(tmp_path / "1" / "rank-000-of-001" / "statistics.safetensors")[
        f"{DOWN}|input|amax"
    ]
    assert float(measured) == pytest.approx(float(largest), rel=1e-5)


def test_drawn_tokens_follow_their_seed(llama, prompts, tmp_path):
    files = []
    for seed in (1, 1, 2):
        files.append(tmp_path / f"{len(files)}.safetensors")
        line = (
            "calibration",
            "continue",
            llama,
            "--prompts",
            prompts,
            "--temperature",
            "2",
            "--seed",
            seed,
            "-o",
            files[-1],
        )
        assert run(*line, "--new-tokens", "12", "-q") == 0
    first, second, other = (file.read_bytes() for file in files)
    assert first == second != other


def test_what_cannot_be_continued_is_refused(llama, prompts, tmp_path, capsys):
    line = ("calibration", "continue", llama, "--prompts")
    for arguments, code, told in (
        (
            (prompts, "-o", tmp_path / "said.jsonl"),
            2,
            "said.jsonl: token ids are written as safetensors",
        ),
        ((prompts, "-o", tmp_path / "a.safetensors", "--new-tokens", "0"), 2, "new_tokens=0"),
        ((prompts, "-o", tmp_path / "a.safetensors", "--new-tokens", "1000"), 2, "positions"),
        ((tmp_path / "none.json", "-o", tmp_path / "a.safetensors"), 3, "none.json"),
    ):
        assert run(*line, *arguments, "-q") == code, arguments
        assert told in capsys.readouterr().err
    assert not (tmp_path / "a.safetensors").exists()
