"""Seconds from the start of `quantflow serve` to its first answer, and from Ctrl-C to its end.

    python benchmarks/first_answer.py work/4-export
    python benchmarks/first_answer.py work/4-export --runs 1          a try

Each run starts a server, asks for one token until it is answered, and sends SIGINT. The bar is 3 s
to the first answer. The program exits 1 when the median misses the bar, or when a server ends with
another code than 0.
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from _report import machine, table

HOST = "127.0.0.1"
BAR_SECONDS = 3.0


def run(artifact: Path) -> tuple[float, float, int]:
    """Start a server and end it; seconds to its first answer, seconds to its end, exit code.

    Raises:
        SystemExit: it ends before it answers.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    body = json.dumps({"inputs": "class Stack:", "parameters": {"max_new_tokens": 1}}).encode()
    asked = urllib.request.Request(
        f"http://{HOST}:{port}/generate", body, {"content-type": "application/json"}
    )
    words = [sys.executable, "-m", "quantflow", "serve", str(artifact), "--port", str(port)]
    begin = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        while True:
            try:
                urllib.request.urlopen(asked, timeout=30).read()
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(f"{' '.join(words)}: ended with {server.returncode}") from None
                time.sleep(0.02)
        answered = time.perf_counter()
        server.send_signal(signal.SIGINT)
        code = server.wait(30)
    return answered - begin, time.perf_counter() - answered, code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    given = parser.parse_args(arguments)
    runs = [run(given.artifact) for _ in range(given.runs)]
    print(machine(given.artifact))
    rows = [
        (number, f"{first:.2f} s", f"{end:.2f} s", code)
        for number, (first, end, code) in enumerate(runs, start=1)
    ]
    print(table(("run", "first answer", "end after Ctrl-C", "exit code"), rows))
    middle = statistics.median(first for first, _, _ in runs)
    print(f"median: first answer after {middle:.2f} s, bar {BAR_SECONDS:g} s")
    return 0 if middle <= BAR_SECONDS and not any(code for _, _, code in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
