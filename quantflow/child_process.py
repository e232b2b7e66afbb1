"""Python processes that this one starts: what every one of them is started with, so that no folder runs code in them.

`python -m MODULE` puts the current folder first among those that modules are imported from: a
`random.py` beside a model that somebody downloaded would run. `-P` leaves it out, and
PYTHONSAFEPATH does for what the child starts itself.
"""

import os
import sys
from collections.abc import Sequence


def python_module(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of this environment, whatever the current folder holds."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with these variables, for a child."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **variables}
