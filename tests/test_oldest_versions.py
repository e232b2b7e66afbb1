"""quantflow on the oldest versions of its dependencies, in an environment of their own.

`constraints-oldest.txt` pins them and says how the environment is made; OLDEST_ENV names it.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ.get("OLDEST_ENV") or None
MODULES = """
import importlib, pkgutil, quantflow
OPTIONAL = ("langchain_core", "lm_eval", "triton")  # of extras
for module in pkgutil.walk_packages(quantflow.__path__, "quantflow."):
    if module.name != "quantflow.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
"""
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
needs_environment = pytest.mark.skipif(
    ENVIRONMENT is None, reason="OLDEST_ENV names no environment of constraints-oldest.txt"
)


def pinned():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def run(*words):
    python = Path(str(ENVIRONMENT)).absolute() / "bin" / "python"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, *map(str, words)], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_a_range_begins_at_the_version_that_was_run():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["serve"]]
    begins = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)(?:;.*)?", line).groups() for line in asked)
    run_with = pinned()
    assert {"torch", "transformers", "huggingface_hub", "tokenizers"} <= set(run_with)
    for name, version in run_with.items():
        assert f"{version}.".startswith(f"{begins[name]}."), (name, version, begins[name])


@needs_environment
@pytest.mark.slow
def test_the_environment_has_these_versions():
    found = run("-c", VERSIONS, *pinned())
    for name, version in pinned().items():
        assert f'"{name}": "{version}' in found, found


@needs_environment
@pytest.mark.slow
def test_every_module_imports():
    run("-c", MODULES)


@needs_environment
@pytest.mark.slow
def test_a_model_is_measured_quantized_proved_and_generated_from(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(40)))
    quantize = ["quantize", "examples/tiny-llama", "-o", tmp_path / "a", "--scheme", "W4A16", "-q"]
    calibration = ["--calibration", text, "--samples", "4", "--sequence-length", "32"]
    run("-m", "quantflow", *quantize, *calibration)
    asked = ["generate", tmp_path / "a", "--prompt", "def main(", "--max-new-tokens", "8", "-q"]
    assert run("-m", "quantflow", *asked).strip()


@needs_environment
@pytest.mark.slow
def test_the_arithmetic_and_the_names_are_the_same():
    folders = ("test_affine.py", "test_groups.py", "test_qtensor.py", "test_fixed_order.py")
    tests = [*(f"tests/unit/core/{name}" for name in folders), "tests/unit/numerics"]
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *tests)
