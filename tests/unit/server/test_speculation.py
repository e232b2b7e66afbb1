"""Speculation by the model's own layer and by Medusa heads: the same texts, and what is said."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.progress import SILENT
from quantflow.server import in_folders
from quantflow.server.models import Models, open_model
from quantflow.server.process import closing_lines, opening_lines
from quantflow.server.settings import ServeJob, speculated
from tests.mtp_models import FAMILIES, bigram_, write

TINY = Path(__file__).resolve().parents[3] / "examples/tiny-llama"
VOCABULARY = 4096
PROMPT = "def main(arguments):\n    return"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose layer ahead is always right, with the example's tokenizer."""
    folder = tmp_path_factory.mktemp("ahead") / "model"
    config = copy.deepcopy(FAMILIES["deepseek_v3"])
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 256
    write(folder, config, bigram_)
    for path in TINY.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def test_the_layer_ahead_changes_no_text_and_its_guesses_are_counted(serve, model):
    asked = {"max_new_tokens": 24, "details": True}
    grammar = {"type": "regex", "value": r"( \d,?)+\]\n"}
    with serve(artifact=model) as plain, serve(artifact=model, speculate="mtp:2") as guessing:
        for more in ({}, {"do_sample": True, "seed": 3, "temperature": 0.5}, {"grammar": grammar}):
            expected = plain.generate(PROMPT, **asked, **more).json()
            assert expected["details"]["generated_tokens"] > 1
            assert guessing.generate(PROMPT, **asked, **more).json() == expected
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24}}
        streams = [
            [event["token"]["id"] for event in server.post("/generate_stream", body).events()]
            for server in (plain, guessing)
        ]
        assert len(streams[0]) == 24 and streams[0] == streams[1]
        counters = guessing.models.first.engine.counters()
        assert 0 < counters.taken_tokens <= counters.proposed_tokens
        assert counters.steps < plain.models.first.engine.counters().steps
        said = guessing.get("/info").json()["speculation"]
        assert said == {
            "method": "2 tokens by the model's layer that predicts further tokens (MTP)",
            "proposed": counters.proposed_tokens,
            "taken": counters.taken_tokens,
            "acceptance": counters.taken_tokens / counters.proposed_tokens,
        }
        assert plain.get("/info").json()["speculation"] is None
        metrics = guessing.get("/metrics").body.decode()
        for kind in ("proposed", "taken"):
            value = float(getattr(counters, f"{kind}_tokens"))
            assert f'quantflow_engine_{kind}_tokens{{model="model"}} {value}\n' in metrics
        lines = opening_lines(guessing.models.job, guessing.models)
        assert f"speculation: {said['method']}" in lines
        (line,) = closing_lines(guessing.models)
        assert line.startswith(
            f"speculation of model: {counters.taken_tokens} of {counters.proposed_tokens} proposed"
        )
        assert closing_lines(plain.models) == []


def test_medusa_heads_change_no_text(serve, model, tmp_path):
    heads = torch.randn(2, VOCABULARY, 64, generator=torch.Generator().manual_seed(1))
    save_file(
        {f"{number}.0.weight": head.clone() for number, head in enumerate(heads)},
        tmp_path / "medusa_lm_head.safetensors",
    )
    with serve(artifact=model) as plain, serve(artifact=model, medusa=tmp_path) as guessing:
        asked = {"max_new_tokens": 12, "details": True}
        expected = plain.generate(PROMPT, **asked).json()
        assert guessing.generate(PROMPT, **asked).json() == expected
        # two a step, as long as more than one token is left; none was right
        assert guessing.models.first.engine.counters().proposed_tokens == 2 * 9 + 1
    with serve(artifact=model, medusa=tmp_path, speculate=1) as guessing:
        assert guessing.generate(PROMPT, **asked).json() == expected
        assert guessing.models.first.engine.counters().proposed_tokens == 10
    save_file({"0.0.weight": torch.randn(9, 64)}, tmp_path / "medusa_lm_head.safetensors")
    job = ServeJob(artifact=model, medusa=tmp_path)
    with pytest.raises(InputError, match=r"head 0 is \[9, 64\], the model's is \[4096, 64\]"):
        Models(job, open_model(model, job))


def test_heads_in_a_models_place_are_served_with_the_model_that_their_config_names(
    serve, model, tmp_path
):
    folder = tmp_path / "heads"
    folder.mkdir()
    heads = torch.randn(3, VOCABULARY, 64, generator=torch.Generator().manual_seed(1))
    save_file(
        {f"{number}.0.weight": head.clone() for number, head in enumerate(heads)},
        folder / "medusa_lm_head.safetensors",
    )
    config = {
        "medusa_num_heads": 3,
        "medusa_num_layers": 0,
        "base_model_name_or_path": str(model),
    }
    (folder / "config.json").write_text(json.dumps(config))
    asked = {"max_new_tokens": 12, "details": True}
    with serve(artifact=model) as plain:
        expected = plain.generate(PROMPT, **asked).json()
    for speculate, proposed in ((0, 3 * 8 + 2 + 1), (2, 2 * 9 + 1)):
        found = in_folders(ServeJob(artifact=folder, speculate=speculate), SILENT)
        assert (found.artifact, found.medusa, found.first_name) == (model, folder, "heads")
        served = {"artifact": found.artifact, "medusa": found.medusa, "name": found.name}
        with serve(**served, speculate=speculate) as guessing:
            assert guessing.generate(PROMPT, **asked).json() == expected
            assert guessing.models.first.engine.counters().proposed_tokens == proposed
    assert in_folders(ServeJob(artifact=model), SILENT).medusa is None
    with pytest.raises(UsageError, match="speculate=4: .*heads has 3 heads"):
        in_folders(ServeJob(artifact=folder, speculate=4), SILENT)
    with pytest.raises(UsageError, match="heads has heads itself"):
        in_folders(ServeJob(artifact=folder, medusa=tmp_path), SILENT)
    for wrong in ({"base_model_name_or_path": None}, {"medusa_num_heads": "3"}):
        (folder / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(InputError, match="config.json: medusa_num_heads="):
            in_folders(ServeJob(artifact=folder), SILENT)


def test_what_cannot_guess_is_refused_before_anything_is_served(artifact, model):
    job = ServeJob(artifact=artifact, speculate="mtp")
    with pytest.raises(UnsupportedError, match="no layer predicts further tokens"):
        Models(job, open_model(artifact, job))
    job = ServeJob(artifact=model, speculate="mtp", decoder="transformers")
    with pytest.raises(UnsupportedError, match="speculate=mtp: the lean decoder is not used"):
        Models(job, open_model(model, job))
    for speculate in ("mtp:0", "draft", "-1", "mtp:"):
        with pytest.raises(UsageError, match="speculate="):
            ServeJob(artifact=model, speculate=speculate)
    with pytest.raises(UsageError, match="medusa with speculate=mtp"):
        ServeJob(artifact=model, speculate="mtp", medusa=model)
    assert [speculated(text) for text in ("0", "12", "mtp", "mtp:3")] == [0, 12, "mtp", "mtp:3"]
