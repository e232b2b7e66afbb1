"""One benchmark at a time in a work folder.

Two would delete each other's outputs, and time each other.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from quantflow.errors import ResourceError
from quantflow.files.stage_folder import locked


def alone(run: Callable[[argparse.Namespace], int], given: argparse.Namespace) -> int:
    """Run a benchmark while its folder `given.work` is locked.

    SIGTERM ends it as an exception does, so that the processes that it started end too.

    Returns:
        Its exit code; 5 when another process holds the folder, which stderr names.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(given.work.resolve()))
        except ResourceError as error:
            print(f"error: {error.cause}\n  fix: {error.remedy}, with --work", file=sys.stderr)
            return error.exit_code
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        held.callback(signal.signal, signal.SIGTERM, before)
        return run(given)
