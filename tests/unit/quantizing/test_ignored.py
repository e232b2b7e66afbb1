"""A linear that stays as it is, beside those that are quantized with calibration."""

from pathlib import Path

import pytest

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


@pytest.mark.skipif(
    not (EXAMPLE / "model.safetensors").is_file(),
    reason="the example model is part of the repository",
)
def test_an_artifact_with_a_linear_that_stays_as_it_is_computes_what_quantize_computed(
    text_files, tmp_path
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=2, sequence_length=64)
    measurement = measure.run(
        MeasureJob(model=EXAMPLE, output=tmp_path / "1", calibration=calibration), SILENT
    )
    names = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    entry = Quantize(name="a", scheme="W4A16", algorithm="gptq", ignore=names)
    quantize.run(
        QuantizeJob(model=EXAMPLE, output=tmp_path / "2", entry=entry, measurement=measurement),
        SILENT,
    )
    # proves it on the canary
    export.run(ExportJob(source=tmp_path / "2", output=tmp_path / "4"), SILENT)
