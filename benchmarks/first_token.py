"""The seconds of an artifact to its first token.

The time to read its bytes from the page cache stands beside them.

python benchmarks/first_token.py artifacts/runtime/2GB/W4A16-head-W8A16

README.md says what is run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _report import Bar, bars, machine, table

PROMPT = [[1, 5, 9, 20, 31, 44, 56, 77]]
MOST = 1.3  # times what reading takes
WAYS = ("read", "weights read and laid out", "pack, hashes checked", "pack")


def main(arguments: Sequence[str]) -> int:
    """Start every way in turns, a process each, and print medians.

    The exit code is 1 where a bar is missed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "artifact",
        type=Path,
        help="a folder that `quantflow export` wrote; its pack is put beside it",
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each, after one that is not counted (default 5)"
    )
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    given = parser.parse_args(arguments)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(given.threads),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(given.runs + 1):
        for way in WAYS:
            command = [sys.executable, __file__, str(given.artifact), way]
            told = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            if turn:
                found[way].append(json.loads(told))
    seconds = {way: [run["seconds"] for run in found[way]] for way in WAYS}
    read = statistics.median(seconds["read"])
    rows, judged = [], []
    for way, taken in seconds.items():
        imports = f"{statistics.median(run['imports'] for run in found[way]):.2f}"
        times = statistics.median(taken) / read
        rows.append(
            (
                way,
                f"{statistics.median(taken):.3f}",
                f"{min(taken):.3f} to {max(taken):.3f}",
                f"{times:.2f}x",
                imports,
            )
        )
        if way.startswith("pack"):
            judged.append(
                Bar(what=way, promised=f"{MOST:.2f}x", found=f"{times:.2f}x", met=times <= MOST)
            )
    print(
        table(("way", "seconds", "lowest to highest", "of read", "imports before"), rows)
        + "\n\n"
        + bars(judged)
    )
    print(f"\nload average at the end {machine(given.artifact)['load']:.1f}")
    return 0 if all(bar.met for bar in judged) else 1


def measure(folder: Path, way: str) -> dict[str, float]:
    """Return the seconds of one way in this process, and of what it imported first."""
    begin = time.perf_counter()
    if way == "read":
        block, files = (
            bytearray(1 << 20),
            sorted(path for path in folder.iterdir() if path.is_file()),
        )
        imported = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
    else:
        import torch

        from quantflow.runtime.load import load

        imported = time.perf_counter()
        pack = way.startswith("pack")
        loaded = load(
            folder, decoder="auto", dtype=torch.bfloat16, pack=pack, verify="hashes" in way
        )
        loaded.decoder.begin(rows=1, capacity=32)
        loaded.decoder.forward(torch.tensor(PROMPT)).argmax().item()
    return {"seconds": time.perf_counter() - imported, "imports": imported - begin}


if __name__ == "__main__":
    if sys.argv[2:] and sys.argv[2] in WAYS:
        print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1:]))
