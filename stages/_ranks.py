"""Several processes for one stage: torchrun starts them, their messages come through, and none outlives its parent.

Each writes a folder of its own, whose name says which of how many it is.
"""

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quantflow.errors import InputError, IntegrityError, QuantflowError, ResourceError, UnsupportedError, UsageError
from stages._progress import Progress

_PR_SET_PDEATHSIG = 1
_BY_EXIT_CODE = {kind.exit_code: kind for kind in (UsageError, ResourceError, UnsupportedError, IntegrityError)}
_EXIT_CODE = re.compile(r"exitcode\s*: (\d+) \(pid")


def rank_folder(output: Path, rank: int, world: int) -> Path:
    """Return the folder of one rank."""
    return output / f"rank-{rank:03d}-of-{world:03d}"


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed run leaves nobody who holds a lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(arguments: Sequence[str], *, ranks: int, progress: Progress) -> None:
    """Run `quantflow <arguments>` in `ranks` processes under torchrun and wait for all of them.

    Raises:
        QuantflowError: a rank failed; the class, and so the exit code, is that of the rank's own error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "stages.cli", *arguments]
    cause, remedy, code = f"{arguments[0]}: torchrun failed", "run the same command with --ranks 1 to see why", 3
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    ) as process:
        assert process.stderr is not None  # it is a pipe
        try:
            for line in process.stderr:
                text = line.rstrip("\n")
                if text.startswith("error: "):
                    cause = text.removeprefix("error: ")
                elif text.startswith("  fix: "):
                    remedy = text.removeprefix("  fix: ")
                elif text.startswith(f"{arguments[0]}: "):
                    progress.say(text)
                elif found := _EXIT_CODE.search(text):
                    code = int(found[1])
        except BaseException:
            process.kill()  # and its ranks with it, see die_with_parent
            raise
    if process.returncode:
        kind: type[QuantflowError] = _BY_EXIT_CODE.get(code, InputError)
        raise kind(f"a rank of {ranks} failed: {cause}", f"{remedy}; the same command continues with the missing ranks")
