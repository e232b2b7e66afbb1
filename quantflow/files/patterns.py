"""Regular expressions from files: a config's targets, names of a recipe, adapter, QUANT_CONFIG.

A few characters such as `(a+)+$` keep Python's own engine busy for years. Here an expression has a
largest length, and all its searches together have a largest time.
"""

import time
from typing import Any

import regex

from quantflow.errors import InputError

LONGEST = 4096  # characters
# All searches with one pattern may take so long. A mixture has 50,000 names, each of which takes
# microseconds.
SECONDS = 5.0
_ERRORS = (
    regex.error,
    RecursionError,
    OverflowError,
    MemoryError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
)


class Pattern:
    """A regular expression, with the syntax of Python's `re`."""

    def __init__(self, text: str) -> None:
        """Compile the expression.

        Raises:
            InputError: the text is no regular expression, or too long.
        """
        self.text = text
        self._left = SECONDS
        if len(text) > LONGEST:
            raise self._refused(f"has {len(text)} characters, {LONGEST} are allowed")
        try:
            self._compiled: Any = regex.compile(text)
        except _ERRORS as error:
            raise self._refused(f"is no regular expression: {error}") from error

    def match(self, name: str) -> bool:
        """Whether the pattern matches from the beginning of a name on.

        Raises:
            InputError: the searches took more than their time.
        """
        return self._timed(self._compiled.match, name)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches all of a name; raises like `match`."""
        return self._timed(self._compiled.fullmatch, name)

    def search(self, name: str) -> bool:
        """Whether the pattern matches anywhere in a name; raises like `match`."""
        return self._timed(self._compiled.search, name)

    def _timed(self, find: Any, name: str) -> bool:
        begin = time.monotonic()
        try:
            if self._left <= 0:
                raise TimeoutError
            return find(name, timeout=self._left) is not None
        except (TimeoutError, MemoryError) as error:
            raise self._refused(
                f"takes more than {SECONDS:g} s, the last of it on {name[:80]!r}"
            ) from error
        finally:
            self._left -= time.monotonic() - begin

    def _refused(self, reason: str) -> InputError:
        shown = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return InputError(f"pattern {shown!r} {reason}", "correct the pattern, or write names")
