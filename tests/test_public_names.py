"""The front door: what `import quantflow` offers, and what it costs."""

import subprocess
import sys

import pytest

import quantflow

PUBLIC = [
    "ALGORITHMS",
    "ArtifactJob",
    "BACKENDS",
    "BenchJob",
    "Calibration",
    "Compute",
    "Export",
    "ExportJob",
    "FORMATS",
    "GateJob",
    "GenerateJob",
    "LinearScheme",
    "Measure",
    "MeasureJob",
    "OBSERVERS",
    "PRESETS",
    "PlanJob",
    "Progress",
    "QTensor",
    "QuantLinear",
    "QuantflowError",
    "Quantize",
    "QuantizeJob",
    "Recipe",
    "Resources",
    "ServeJob",
    "TensorScheme",
    "UnifyJob",
    "Validate",
    "ValidateJob",
    "bench",
    "export",
    "gate",
    "generate",
    "load",
    "make_artifact",
    "measure",
    "pipeline",
    "plan",
    "preset",
    "quantize",
    "serve",
    "unify",
    "validate",
    "verify",
]


def test_the_public_names_are_these_in_this_order():
    assert quantflow.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    assert getattr(quantflow, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quantflow.nothing


def test_importing_quantflow_imports_no_torch():
    code = "import quantflow, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
