"""A Falcon under the names of its first release, with code beside the weights, which is not run."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantflow.runtime.load import load
from tests.conftest import write_model
from tests.shared import run

IDS = torch.randint(3, 90, (1, 10), generator=torch.Generator().manual_seed(2))
OLD = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_kv_heads": "n_head_kv",
}


@pytest.fixture(scope="module", params=["falcon", "falcon new"])
def falcon(request, tmp_path_factory):
    """A folder as first released, and the same one as transformers has it."""
    plain = write_model(tmp_path_factory.mktemp("falcon") / "plain", request.param)
    folder = shutil.copytree(plain, plain.with_name("released"))
    config = json.loads((plain / "config.json").read_text())
    new = config.pop("new_decoder_architecture")
    if not new:
        del config["num_kv_heads"]
    for key in ("num_ln_in_parallel_attn", "activation", "tie_word_embeddings", "rope_parameters"):
        config.pop(key, None)
    config |= {
        "model_type": "RefinedWeb" if new else "RefinedWebModel",
        "architectures": ["RWForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_RW.RWConfig",
            "AutoModelForCausalLM": "modelling_RW.RWForCausalLM",
        },
    }
    (folder / "config.json").write_text(
        json.dumps({OLD.get(key, key): value for key, value in config.items()})
    )
    for name in ("configuration_RW.py", "modelling_RW.py"):
        (folder / name).write_text("raise RuntimeError('this code was run')\n")
    return folder, plain


def logits(decoder):
    decoder.begin(rows=1, capacity=16)
    steps = [decoder.forward(IDS[:, :6], last_only=False)]
    steps += [decoder.forward(IDS[:, at : at + 1], last_only=False) for at in range(6, 10)]
    return torch.cat(steps, dim=1)


def test_as_first_released_it_runs_in_both_decoders_as_transformers_falcon(falcon):
    folder, plain = falcon
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(IDS).logits
    for decoder in ("lean", "transformers"):
        with torch.inference_mode():
            found = logits(load(folder, decoder=decoder).decoder)
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_its_artifact_is_one_that_transformers_knows(falcon, tmp_path):
    line = ("--scheme", "W4A16", "--algorithm", "rtn", "--group-size", "32", "-q")
    for folder in falcon:
        artifact = tmp_path / folder.name
        assert run("quantize", folder, "-o", tmp_path / "q", "--export", artifact, *line) == 0
        shutil.rmtree(tmp_path / "q")
    mine, theirs = (AutoConfig.from_pretrained(tmp_path / folder.name) for folder in falcon)
    assert mine.model_type == theirs.model_type == "falcon"
    assert mine.architectures == theirs.architectures == ["FalconForCausalLM"]
    found, expected = (
        logits(load(tmp_path / folder.name, decoder="lean").decoder) for folder in falcon
    )
    assert torch.equal(found, expected)
