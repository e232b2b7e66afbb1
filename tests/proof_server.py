"""Proves artifacts in fresh processes that need no start: it imports what a proof imports once, and forks for each.

A line of stdin is one request in JSON, a line of stdout its answer:

    request   {"order": what the proof's process reads from stdin, "environment": its variables, "folder": its current one}
    answer    {"code": its exit code, minus the signal that ended it, "stderr": what it wrote there}
"""

import json
import os
import sys
import traceback

from quantflow.exporting import canary, proof_process  # noqa: F401  # the canary is what takes seconds to import


def fork(request: dict) -> dict:
    """Return how the proof of one request ended."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writes, 2)
        os.dup2(2, 1)  # nothing that it prints is an answer
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        code = 1
        try:
            code = proof_process.main(request["order"])
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    os.close(writes)
    with open(reads) as stream:
        said = stream.read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "stderr": said}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)
