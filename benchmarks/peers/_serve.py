"""The loop that the programs of runtime.py share.

Each loads a model once and then answers one line of JSON with another.

    runtime_PEER.py SETTINGS          JSON: threads, and what the program itself says it takes

It prints {"version", "load_seconds", "weight_bytes"} when it is ready; weight_bytes are read for
each token. Asked for {"rows": token ids of each sequence, "new": N} it decodes N tokens greedily,
end tokens ignored, and answers {"first": seconds until the first token of all, "steps": seconds of
each further token}.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Timed = tuple[float, list[float]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A loaded model.

    `run` takes the rows and how many tokens to add; `read`, where there is one, takes bytes to read
    plainly.
    """

    version: str
    weight_bytes: int
    run: Callable[[list[list[int]], int], Timed]
    read: Callable[[int], float] | None = None


def serve(load: Callable[[dict[str, Any]], Program]) -> None:
    """Load and answer until the input ends; what the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    program = load(json.loads(sys.argv[1]))
    ready = {
        "version": program.version,
        "weight_bytes": program.weight_bytes,
        "load_seconds": time.perf_counter() - begin,
    }
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "read" in asked and program.read is not None:
            answer: dict[str, Any] = {"seconds": program.read(asked["read"])}
        else:
            first, steps = program.run(asked["rows"], asked["new"])
            answer = {"first": first, "steps": steps}
        print(json.dumps(answer), file=answers, flush=True)


def clocked(forward: Callable[[Any], Any], start: Any, new: int) -> Timed:
    """Time `new` calls, each with what the last one returned; the first takes the prompts."""
    seconds, step = [], start
    for _ in range(new):
        begin = time.perf_counter()
        step = forward(step)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1:]
