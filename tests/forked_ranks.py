"""Ranks of `quantize` as children of one process that has imported what they need."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantflow.reporting.progress_line import ProgressLine
from quantflow.unifying import unify
from quantflow.unifying.job import UnifyJob

Ranks = Callable[..., list[int]]
QUIET = ProgressLine(quiet=True)

# Imports what a rank needs, once, and forks the ranks that it is told to start; as `launch`, it
# ends those that are left soon after one has failed. A rank that `dies` is killed when it is about
# to keep what enters that layer.
SERVER = """
import json, os, signal, sys, time
import torch
import transformers.models.llama.modeling_llama
from quantflow.models.hidden import HiddenStates
import quantflow.quantizing.layer_by_layer, quantflow.quantizing.quantize
from quantflow.distributed.launch import launched_environment
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli import cli

def become(rank, order):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(launched_environment(order["folder"], rank=rank, world=order["world"]))
    if order["dies"] is not None and order["dies"][0] == rank:
        commit = HiddenStates.commit

        def dying(self, label, **options):
            if label == order["dies"][1]:
                os.kill(os.getpid(), signal.SIGKILL)
            commit(self, label, **options)

        HiddenStates.commit = dying
    os._exit(exit_code(cli, order["arguments"]))

for line in sys.stdin:
    order, children, codes = json.loads(line), {}, {}
    for rank in range(order["world"]):
        pid = os.fork()
        if pid == 0:
            become(rank, order)
        children[pid] = rank
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status:
            time.sleep(0.3)
            for other in children:
                os.kill(other, signal.SIGTERM)
    print(json.dumps([codes[rank] for rank in range(order["world"])]), flush=True)
"""


@contextmanager
def forked_ranks(folder: Path, *of: Path) -> Iterator[Ranks]:
    """Yield a function that quantizes with N processes; it returns the exit code of each.

    Args:
        folder: an empty folder for what they tell, and for their meetings.
        of: model and measurement, where the function is given no others.
    """
    log = folder / "stderr"
    with (
        log.open("w") as told,
        subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        given = of
        orders = 0

        def run(
            output: Path,
            recipe: dict,
            *,
            world: int,
            dies: tuple[int, int] | None = None,
            of=given,
        ) -> list[int]:
            nonlocal orders
            private = folder / str(orders)
            private.mkdir()
            orders += 1
            order = {
                "world": world,
                "folder": str(private),
                "dies": dies,
                "arguments": command(*of, output, recipe, world),
            }
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
            codes = json.loads(server.stdout.readline() or "null")
            assert dies is not None or codes == [0] * world, log.read_text()
            return codes

        yield run
        server.stdin.close()


def command(model: Path, measurement: Path, output: Path, recipe: dict, world: int) -> list[str]:
    """Return what stands after `quantflow`."""
    settings = [f"--set=quantize.0.{key}={json.dumps(value)}" for key, value in recipe.items()]
    words = [
        "quantize",
        model,
        "-o",
        output,
        "--measurement",
        measurement,
        "--ranks",
        world,
        "--name",
        "x",
    ]
    return [*map(str, words), "--scheme", recipe["scheme"], *settings]


def together(folder: Path, output: Path, **options) -> Path:
    return unify.run(UnifyJob(measurement=folder, output=output, **options), QUIET)


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every visible file, but of those that say how the folder was made."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in ("DONE.json", "joined.json")
    }


def inputs(folder: Path) -> dict:
    return json.loads((folder / "DONE.json").read_text())["inputs"]
