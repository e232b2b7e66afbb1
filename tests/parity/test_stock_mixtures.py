"""Stock transformers with compressed-tensors on artifacts with experts.

It dequantizes them, or it does not load.

Pinned, because the model card says so: a version that does better fails here.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact

# transformers warns that it was given `dequantize`
pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = ProgressLine(quiet=True)
TOKENS = torch.randint(2, 300, (1, 32), generator=torch.Generator().manual_seed(0))
W4A16 = {"scheme": "W4A16", "algorithm": "rtn", "group_size": 32}
ASYMMETRIC = {"scheme": "W4A16_ASYM", "algorithm": "rtn", "group_size": 32}


def make(model: Path, folder: Path, **words: Any) -> Path:
    job = QuantizeJob(model=model, output=folder / "q", entry=Quantize(name="x", **words))
    return export.run(ExportJob(source=quantize.run(job, QUIET), output=folder / "a"), QUIET)


def dequantized(model: Path, artifact: Path, folder: Path) -> Path:
    """Write the source's model with the artifact's weights, in float32."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    opened = open_artifact(artifact, backend="reference")
    weights = load_file(model / "model.safetensors")
    for name in opened.linears:
        weights[f"{name}.weight"] = opened.decode(name).weight.dequantize()
    save_file(
        {name: weight.float() for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def logits(folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(
            TOKENS
        ).logits


@pytest.mark.parametrize(
    "words", [W4A16, {"scheme": "FP8_DYNAMIC"}], ids=lambda words: words["scheme"]
)
def test_stock_transformers_loads_experts_dequantized(
    words: dict[str, Any], family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = family_model("qwen3_moe")
    artifact = make(model, tmp_path, **words)
    expected = logits(dequantized(model, artifact, tmp_path / "dequantized"))
    found = logits(artifact, quantization_config=CompressedTensorsConfig(dequantize=True))
    # It rounds the dequantized weights to the scales' dtype, bfloat16 where the layout packs; a
    # wrong expert is off by 1.
    assert (found - expected).norm() <= 0.02 * expected.norm()
    # attention quantizes its inputs in FP8_DYNAMIC
    assert (logits(artifact) - expected).norm() <= 0.2 * expected.norm()


@pytest.mark.parametrize(
    "words", [{"scheme": "W8A8", "transforms": ()}, ASYMMETRIC], ids=lambda words: words["scheme"]
)
def test_stock_transformers_does_not_load_int8_experts_or_zero_points(
    words: dict[str, Any], family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    artifact = make(family_model("qwen3_moe"), tmp_path, **words)
    for options in ({}, {"quantization_config": CompressedTensorsConfig(dequantize=True)}):
        with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
            logits(artifact, **options)


def test_an_expert_has_the_names_that_vllm_looks_for(
    family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM makes one parameter of all experts, with one scheme for a layer.

    Their names are `experts.<number>.<projection>.<suffix>`.
    """
    model = family_model("mixtral")
    stored = load_file(make(model, tmp_path, **W4A16) / "model.safetensors")
    for layer, number, projection in itertools.product(range(2), range(4), ("w1", "w2", "w3")):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{number}.{projection}"
        assert {
            f"{name}.weight_packed",
            f"{name}.weight_scale",
            f"{name}.weight_shape",
        } <= stored.keys()
    assert stored["model.layers.0.block_sparse_moe.gate.weight"].dtype == torch.bfloat16
