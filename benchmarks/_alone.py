"""One benchmark at a time in a work folder.

Two would delete each other's outputs, and time each other.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

from quantflow.errors import ResourceError
from quantflow.files.stage_folder import locked


def alone(run: Callable[[argparse.Namespace], int], given: argparse.Namespace) -> int:
    """Run a benchmark while its folder `given.work` is locked.

    Returns:
        Its exit code; 5 when another process holds the folder, which stderr names.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(given.work.resolve()))
        except ResourceError as error:
            print(f"error: {error.cause}\n  fix: {error.remedy}, with --work", file=sys.stderr)
            return error.exit_code
        return run(given)
