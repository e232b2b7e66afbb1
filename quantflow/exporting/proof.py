"""What starts the fresh process in which an artifact is proved (quantflow/exporting/proof_process.py), and tells what it met.

Nothing here imports torch: the process can be started first, and imports what it needs while the one that starts it does.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quantflow import child_process
from quantflow.errors import InputError, IntegrityError, QuantflowError, ResourceError, UnsupportedError

CANARY = "canary"  # the kind of proof that runs the model
Proved = Callable[..., str | None]
_KINDS: Mapping[int, type[QuantflowError]] = {3: InputError, 5: ResourceError, 6: UnsupportedError}


@contextmanager
def proving(*expected: str) -> Iterator[Proved]:
    """Start a process that proves an artifact when it is told where one is; meanwhile it imports what it needs, and waits.

    Args:
        expected: kinds of proof that are likely; for another the process imports what it needs when it is told.

    Yields:
        A function of the artifact, the quantized folder, the source, and `workers`. It returns why the lean decoder is not to
        run the artifact, or None, and raises

        IntegrityError: as `quantflow.exporting.proof_process.prove`, and any other error of the project as the process met it.
        ResourceError: the process was killed.
        InputError: the process ended in another way.
    """
    process = subprocess.Popen(
        child_process.python_module("quantflow.exporting.proof_process", expected),
        env=child_process.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def proved(artifact: Path, quantized: Path, source: Path, *, workers: int) -> str | None:
        places = [str(path.resolve()) for path in (artifact, quantized, source)]
        found, told = process.communicate(json.dumps([*places, workers]))
        _judge(process.returncode, told, artifact)
        reason: str | None = json.loads(found.strip().splitlines()[-1])
        return reason

    try:
        yield proved
    finally:
        if process.returncode is None:  # there was nothing to prove
            process.kill()
            process.communicate()


def _judge(code: int, told: str, artifact: Path) -> None:
    """Raise what the process met."""
    if code == 0:
        return
    lines = told.strip().splitlines() or ["no message"]
    try:
        message = json.loads(lines[-1])
        cause, remedy = message["cause"], message["remedy"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        if code < 0:  # the kernel does that when memory ends
            killed = f"{artifact}: the proof process was ended by signal {-code}"
            raise ResourceError(killed, "free some memory and export again") from error
        raise InputError(f"{artifact}: the proof process ended with {code}: {lines[-1]}", "report this") from error
    raise _KINDS.get(code, IntegrityError)(cause, remedy)
