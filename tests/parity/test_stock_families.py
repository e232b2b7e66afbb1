"""Stock transformers on artifacts of families whose linears it knows in other forms.

It loads what it can, with the weights of the dequantized export, and refuses the rest with a
sentence of the artifact's. Nothing loads with weights that are random numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    BertGenerationConfig,
    GPT2Config,
    GraniteMoeConfig,
    PreTrainedConfig,
)

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Export, Quantize
from quantflow.planning.stock_transformers import CONV1D, EXPERTS, PACKED, REFUSED
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from tests.shared import slow

QUIET = ProgressLine(quiet=True)
TOKENS = torch.randint(2, 300, (1, 32), generator=torch.Generator().manual_seed(0))
W4A16 = {"scheme": "W4A16", "algorithm": "rtn", "group_size": 32}
SIZES = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
LLAMA = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "aria_text": lambda: AriaTextConfig(**LLAMA, moe_num_experts=4, moe_topk=2),
    "bert-generation": lambda: BertGenerationConfig(**LLAMA, is_decoder=True),
    "gpt2": lambda: GPT2Config(**SIZES, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "granitemoe": lambda: GraniteMoeConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.fixture
def source(family_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return the folder of a tiny random model of a family."""

    def make(family: str) -> Path:
        if family not in CONFIGS:
            return family_model(family)
        torch.manual_seed(0)
        config = CONFIGS[family]()
        config.initializer_range = 0.1
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


def make(model: Path, folder: Path, **words: Any) -> Path:
    job = QuantizeJob(model=model, output=folder / "q", entry=Quantize(name="x", **words))
    return export.run(ExportJob(source=quantize.run(job, QUIET), output=folder / "a"), QUIET)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(TOKENS).logits


def table(artifact: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((artifact / "config.json").read_text())
    return found["quantization_config"]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("falcon", W4A16),
        slow(("falcon", {**W4A16, "scheme": "W4A16_ASYM"})),
        # 64 and 256 inputs: groups of 64
        slow(("falcon", {"scheme": "W4A16", "algorithm": "rtn"})),
        ("gpt_bigcode", W4A16),
        slow(("bert-generation", W4A16)),
        ("bert-generation", {"scheme": "W8A16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["scheme"],
)
def test_it_computes_what_the_dequantized_export_does(
    family: str, words: dict[str, Any], source: Callable[[str], Path], tmp_path: Path
) -> None:
    artifact = make(source(family), tmp_path, **words)
    options = Export(format="dequantized", dtype="f32")
    plain = ExportJob(source=artifact, output=tmp_path / "plain", options=options).run().folder
    found, expected = logits(artifact), logits(plain)
    # weights are made in the dtype of the scales, bfloat16; random ones would be off by 1
    assert (found - expected).norm() <= 0.02 * expected.norm()
    ours = load(artifact, exact=True).model
    assert ours is not None
    with torch.no_grad():
        assert (ours(TOKENS).logits - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("family", "words", "said"),
    [
        ("gpt2", W4A16, CONV1D),
        slow(("gpt2", {"scheme": "FP8_DYNAMIC"}, CONV1D)),
        slow(("aria_text", W4A16, EXPERTS)),
        ("granitemoe", {"scheme": "W8A16"}, EXPERTS),
        ("falcon", {"scheme": "W4A8", "algorithm": "rtn"}, PACKED),  # inputs are rounded
    ],
    ids=lambda value: value if isinstance(value, str) else value["scheme"],
)
def test_it_refuses_what_it_would_fill_with_random_numbers(
    family: str, words: dict[str, Any], said: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    model = source(family)
    artifact = make(model, tmp_path, **words)
    assert table(artifact)[REFUSED] == said
    with pytest.raises(ValueError, match=f"{REFUSED}(.|\n)*input_value='{said}'"):
        AutoModelForCausalLM.from_pretrained(artifact)
    assert "Stock transformers refuses this folder" in (artifact / "README.md").read_text()
    options = Export(format="dequantized", dtype="f32")
    plain = ExportJob(source=artifact, output=tmp_path / "plain", options=options).run().folder
    ours = load(artifact, exact=True).model
    assert ours is not None
    with torch.no_grad():
        expected = logits(plain)
        if words["scheme"].endswith("A16"):
            assert (ours(TOKENS).logits - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_neox", "bloom"])
def test_nothing_is_added_for_families_that_load(
    family: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    found = table(make(source(family), tmp_path, **W4A16))
    assert found[REFUSED] is None and "dequantize" not in found
