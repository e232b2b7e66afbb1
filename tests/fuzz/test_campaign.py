"""Short campaigns: readers and verbs get what nobody would write, and answer with a sentence, a value or the right text."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
VERSION = Path(__file__).parents[1] / "golden" / "versions" / "0.1.0"


def ran(program, *arguments):
    """Return what a program of this folder prints; it exits 0."""
    line = [sys.executable, FOLDER / program, *arguments]
    result = subprocess.run([*map(str, line)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_no_reader_does_other_than_promised():
    out = ran(
        "campaign.py", VERSION / "artifact", VERSION / "measurement" / "rank-000-of-001", "--inputs", "1000", "--seed", "7"
    )
    assert out.count("1000 inputs") == 18


@pytest.mark.slow
def test_an_artifact_of_hostile_parts_is_refused_or_says_what_transformers_says():
    out = ran("hostile.py", VERSION / "model", "--changes", "1", "--seed", "7")
    assert out.count("\t0 findings") == 7 and "generate 0" in out and "generate 3" in out
