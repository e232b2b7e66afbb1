"""Short campaigns: readers and verbs get inputs that nobody would write.

They answer with a sentence, a value or the right text.
"""

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


ENDS = """
import os, time
from isolated import isolated

def leaves():
    os.close(1)
    os.close(2)
    time.sleep(600)
    return 0

def ends(work, **limits):
    outcome = isolated(work, **limits)
    print(outcome.code, outcome.said.strip().rpartition("\\n")[2], outcome.seconds < 99)

ends(lambda: time.sleep(600) or 0, clock=0.2)
ends(leaves, clock=0.2)
ends(lambda: [0 for _ in iter(int, 1)] and 0, seconds=1, clock=100)
ends(lambda: print("said") or 3)
ends(lambda: os.kill(os.getpid(), 11) or 0)
ends(lambda: len(bytes(1 << 30)), memory=1 << 28)
"""


def test_how_a_process_ends_is_its_outcome_also_when_it_says_nothing_and_goes_on():
    result = subprocess.run(
        [sys.executable, "-c", ENDS], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == [
        "None  True",
        "None  True",
        "-24  True",
        "3 said True",
        "-11  True",
        "1 MemoryError True",
    ]


@pytest.mark.slow
def test_no_reader_does_other_than_promised():
    out = ran(
        "campaign.py",
        VERSION / "artifact",
        VERSION / "measurement" / "rank-000-of-001",
        "--inputs",
        "250",
        "--seed",
        "7",
    )
    assert out.count("\t250 inputs") == 28


@pytest.mark.slow
def test_an_artifact_of_hostile_parts_is_refused_or_says_what_transformers_says():
    out = ran("hostile.py", VERSION / "model", "--changes", "1", "--most", "12", "--seed", "7")
    assert out.count("\t0 findings") == 10 and "generate 0" in out and "generate 3" in out
