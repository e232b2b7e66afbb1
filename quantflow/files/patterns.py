"""Regular expressions that come in files: a config's targets, a recipe's names, an adapter's, a QUANT_CONFIG's.

A few characters such as `(a+)+$` keep Python's own engine busy for years. Here an expression has a
length, and its searches have a time together.
"""

import time
from typing import Any

import regex

from quantflow.errors import InputError

LONGEST = 4096  # characters
# of all searches with one pattern; a mixture has 50,000 names, each of which takes microseconds
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
        """Compile it.

        Raises:
            InputError: it is no regular expression, or too long.
        """
        self.text, self._left = text, SECONDS
        if len(text) > LONGEST:
            raise self._refused(f"has {len(text)} characters, {LONGEST} are allowed")
        try:
            self._compiled: Any = regex.compile(text)
        except _ERRORS as error:
            raise self._refused(f"is no regular expression: {error}") from error

    def match(self, name: str) -> bool:
        """Return whether it matches from the beginning of a name on.

        Raises:
            InputError: its searches have taken more than their time.
        """
        return self._timed(self._compiled.match, name)

    def fullmatch(self, name: str) -> bool:
        """Return whether it matches all of a name; raises as `match`."""
        return self._timed(self._compiled.fullmatch, name)

    def search(self, name: str) -> bool:
        """Return whether it matches anywhere in a name; raises as `match`."""
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
