"""Inputs mixed while the model runs: transformers computes our logits.

compressed-tensors has applied the config before.
"""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from transformers import AutoModelForCausalLM

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load

QUIET = ProgressLine(quiet=True)


@pytest.mark.parametrize("scheme", ["W8A16", "W8A8"])
def test_compressed_tensors_mixes_what_the_config_names_and_stock_transformers_alone_does_not(
    family_model, tmp_path: Path, scheme: str
) -> None:
    entry = Quantize(name="x", scheme=scheme, transforms=({"hadamard": {"down": True}},))
    job = QuantizeJob(
        model=family_model("llama"), output=tmp_path / "q", entry=entry, measurement=None
    )
    artifact = export.run(ExportJob(source=quantize.run(job, QUIET), output=tmp_path / "a"), QUIET)
    tokens = torch.randint(2, 300, (1, 64), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32).eval()
    config = json.loads((artifact / "config.json").read_text())["quantization_config"][
        "transform_config"
    ]
    with torch.no_grad():
        ours = load(artifact, backend="reference", exact=True).model(tokens).logits
        ignored = model(tokens).logits
        apply_transform_config(model, TransformConfig(**config))
        theirs = model(tokens).logits
    assert (ignored - ours).norm() > 0.5 * ours.norm()  # which is why the model card warns
    difference = float((theirs - ours).norm() / ours.norm())
    print(f"{scheme}: logits differ by {difference:.1e}")
    # a sum in another order now and then rounds to another integer
    assert difference < (1e-5 if scheme == "W8A16" else 0.02)
