"""A probe times calibration text in the dtype in which quantize will run it."""

import dataclasses

import pytest
import torch

import quantflow
from quantflow.planning import probe
from quantflow.planning.recipe import Calibration, Compute, Quantize, Recipe

# A sequence takes an hour in float32 and a millisecond in bfloat16, so no other seconds count.
HOUR = {torch.float32: 3600.0, torch.bfloat16: 0.001}


@pytest.fixture
def seconds(llama, text_files, monkeypatch):
    """A function that gives the seconds of each artifact's quantize, for the dtype asked for."""
    monkeypatch.setattr(probe, "_layer", lambda *_, dtype, **__: (0.001, HOUR[dtype]))
    recipe = Recipe(
        model=str(llama),
        calibration=Calibration(
            source=str(text_files["calibration"]), samples=4, sequence_length=32
        ),
        quantize=(
            Quantize(name="gptq", scheme="W4A16", group_size=16),
            Quantize(name="quantized_inputs", scheme="W4A16", group_size=16, quantized_inputs=True),
        ),
    )

    def found(dtype: str | None) -> dict[str, float]:
        asked = dataclasses.replace(recipe, compute=Compute(dtype=dtype))
        stages = quantflow.plan(asked, probe=True)["stages"]
        return {each["artifact"]: each["seconds"] for each in stages if each["stage"] == "quantize"}

    return found


def test_text_that_runs_in_float32_is_timed_in_float32(seconds):
    assert all(each > 3600 for each in seconds(None).values())


def test_text_that_runs_in_bfloat16_is_timed_in_bfloat16(seconds):
    found = seconds("bfloat16")
    assert found["gptq"] < 600
    assert found["quantized_inputs"] > 3600  # which runs in float32 whatever is asked for
