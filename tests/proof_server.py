"""Proves artifacts in fresh processes that need no start.

It imports what a proof imports once, and forks for each.

A line of stdin is one request in JSON, a line of stdout its answer:

    request   {"order": stdin of the proof's process, "environment": its variables,
               "folder": its current folder}
    answer    {"code": its exit code, minus the signal that ended it,
               "stdout", "stderr": its output}
"""

import json
import os
import sys
import tempfile
import traceback
from typing import IO

from quantflow.exporting import canary, proof_process  # noqa: F401  # the canary is what takes seconds to import


def fork(request: dict) -> dict:
    """Return how the proof of one request ended."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        code = prove(request, stdout, stderr)
        for stream in (stdout, stderr):
            stream.seek(0)
        return {"code": code, "stdout": stdout.read(), "stderr": stderr.read()}


def prove(request: dict, stdout: IO[str], stderr: IO[str]) -> int:
    """Return the exit code of a fork that proves, minus the signal that ended it."""
    child = os.fork()
    if not child:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        code = 1
        try:
            code = proof_process.main(request["order"])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)
