"""Python processes that this one starts: the options with which no folder can run code in them.

`python -m MODULE` puts the current folder first on the import path: a `random.py` beside a
downloaded model would run. `-P` leaves the folder out, and PYTHONSAFEPATH does the same for
processes that the child starts.
"""

import os
import sys
from collections.abc import Sequence


def python_module(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command that runs a module of this environment, whatever the current folder holds."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with these variables, for a child."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **variables}
