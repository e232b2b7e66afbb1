"""The start of the fresh process in which an artifact is proved, and its answer.

The process runs quantflow/exporting/proof_process.py.

Nothing here imports torch: the process can be started first, and imports what it needs while the
one that starts it does.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantflow import child_process
from quantflow.errors import (
    InputError,
    IntegrityError,
    QuantflowError,
    ResourceError,
    UnsupportedError,
)

CANARY, TENSORS = "canary", "tensors"  # the kinds of proof: the first runs the model
_KINDS: Mapping[int, type[QuantflowError]] = {3: InputError, 5: ResourceError, 6: UnsupportedError}


class Prover:
    """The fresh process, which waits for one order to prove."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Take a process that runs `quantflow.exporting.proof_process`."""
        self._process = process

    def expect(self, kind: str) -> None:
        """Let the process import the packages of a kind of proof while it waits.

        For another kind it imports them when the order comes.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `prove` tells how
            self._process.stdin.write(f"{kind}\n")
            self._process.stdin.flush()

    def expect_canary(self) -> None:
        """Let the process import the packages that run the model while it waits."""
        self.expect(CANARY)

    def prove(
        self, artifact: Path, quantized: Path, source: Path, *, workers: int, measures: bool
    ) -> dict[str, Any]:
        """Prove an artifact.

        Args:
            artifact: folder of the artifact.
            quantized: quantized folder of the artifact.
            source: folder of the model.
            workers: number of tensors that are compared at once.
            measures: flag of `quantflow.exporting.proof_process.prove`.

        Returns:
            The optional keys of its manifest.

        Raises:
            IntegrityError: as `quantflow.exporting.proof_process.prove`, and any other error of the
                project as the process met it.
            ResourceError: the process was killed.
            InputError: the process ended in another way.
        """
        places = [str(path.resolve()) for path in (artifact, quantized, source)]
        output, messages = self._process.communicate(json.dumps([*places, workers, measures]))
        _judge(self._process.returncode, messages, artifact)
        notes: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return notes


@contextmanager
def proving() -> Iterator[Prover]:
    """Start the process that proves an artifact before there is one.

    It imports torch meanwhile, and ends with the context.
    """
    process = subprocess.Popen(
        child_process.python_module("quantflow.exporting.proof_process"),
        env=child_process.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Prover(process)
    finally:
        if process.returncode is None:  # there was nothing to prove
            process.kill()
            process.communicate()


def _judge(code: int, messages: str, artifact: Path) -> None:
    """Raise the error that the process met."""
    if code == 0:
        return
    lines = messages.strip().splitlines() or ["no message"]
    try:
        message = json.loads(lines[-1])
        cause, remedy = message["cause"], message["remedy"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        if code < 0:  # the kernel does that when memory ends
            killed = f"{artifact}: the proof process was ended by signal {-code}"
            raise ResourceError(killed, "free some memory and export again") from error
        raise InputError(
            f"{artifact}: the proof process ended with {code}: {lines[-1]}", "report this"
        ) from error
    raise _KINDS.get(code, IntegrityError)(cause, remedy)
