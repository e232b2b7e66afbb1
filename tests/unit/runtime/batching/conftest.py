"""The example model as artifacts that the lean decoder runs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from quantflow.core.scheme import PRESETS, with_group_size

TINY = Path(__file__).resolve().parents[4] / "examples/tiny-llama"
SCHEMES = {
    "W8A8": PRESETS["W8A8"],
    "W4A16": with_group_size(PRESETS["W4A16"], 32),
    "FP8": PRESETS["FP8_DYNAMIC"],
}


@pytest.fixture(scope="session")
def tokenizer():
    """Return the example's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def folders(make_artifact, tmp_path_factory):
    """Return a function from the name of a scheme to an artifact of the example model."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
            make_artifact(made[name], AutoConfig.from_pretrained(TINY), SCHEMES[name], model=model)
        return made[name]

    return folder
