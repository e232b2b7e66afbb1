"""A rank that failed ends with its code, whatever torch's open process group does at the end."""

import os
import subprocess
import sys

import pytest

# What follows the sentence is what a thread of an open group does to a process: the C++ runtime
# aborts it at its end.
PROCESS = """
import atexit, os, sys
from quantflow.distributed.rank import end_failed_rank
atexit.register(os.abort)
print("said")
end_failed_rank(int(sys.argv[1]))
print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    [
        (3, {"RANK": "0", "WORLD_SIZE": "2"}, (3, "said\n")),
        (0, {"RANK": "0", "WORLD_SIZE": "2"}, (0, "said\nwent on\n")),
        (3, {}, (0, "said\nwent on\n")),
    ],
)
def test_a_rank_alone_ends_at_once_and_after_an_error_alone(code, variables, expected):
    surroundings = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    command = [sys.executable, "-c", PROCESS, str(code)]
    done = subprocess.run(
        command, env={**surroundings, **variables}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == expected, done.stderr
