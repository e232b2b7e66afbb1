"""A short fuzzing campaign: every reader gets inputs that nobody would write, and answers with a sentence or a value."""

import subprocess
import sys
from pathlib import Path

import pytest

VERSION = Path(__file__).parents[1] / "golden" / "versions" / "0.1.0"


@pytest.mark.slow
def test_no_reader_does_other_than_promised():
    program = Path(__file__).with_name("campaign.py")
    line = [sys.executable, program, VERSION / "artifact", VERSION / "measurement" / "rank-000-of-001", "--inputs", "1000"]
    result = subprocess.run([*map(str, line), "--seed", "7"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("1000 inputs") == 14
