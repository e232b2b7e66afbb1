"""Every error that quantflow raises on purpose, and the exit code that the command line gives it.

    QuantflowError
    ├── UsageError          2    an option, a recipe key, a pattern, a group size
    │   └── SchemeError     2    a scheme that contradicts itself or does not fit its tensor
    ├── InputError          3    a model, a text or a measurement that cannot be used
    │   └── StatisticsError 3    statistics that are missing, non-finite, or cannot be merged
    ├── GateError           4    a gate failed, or could not decide
    ├── ResourceError       5    memory, disk, or a folder that another live process holds
    │   └── OverloadedError 5    a request that the engine has no room for now
    ├── EngineError         1    the thread that runs requests has died, or was closed
    ├── UnsupportedError    6    a family, layout version or device that this version does not know
    └── IntegrityError      7    content that differs from its recorded hash

A message has two parts: what disagrees (which tensor or file, the two values) and what to do about
it.
"""

import difflib
from collections.abc import Sequence

# the name under which pip knows this package: `quantflow` is another project there
DISTRIBUTION = "quantflow-llm"


class QuantflowError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str) -> None:
        """Keep both parts of the message.

        Args:
            cause: `<which tensor or file>: <the two values that disagree>`.
            remedy: an imperative sentence on what the user can do.
        """
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class UsageError(QuantflowError):
    """A request that cannot be done: an option, a recipe key, a pattern."""

    exit_code = 2


class SchemeError(UsageError):
    """A scheme contradicts itself, or does not fit the tensor it is applied to."""


class InputError(QuantflowError):
    """A model, text or measurement is missing, damaged or foreign."""

    exit_code = 3


class StatisticsError(InputError):
    """Calibration statistics are missing, non-finite, or cannot be merged."""


class GateError(QuantflowError):
    """An accuracy gate failed or was inconclusive."""

    exit_code = 4


class ResourceError(QuantflowError):
    """Memory, disk, or a folder that another live process holds."""

    exit_code = 5


class OverloadedError(ResourceError):
    """A request beyond the limit of waiting and running ones; later there may be room."""


class EngineError(QuantflowError):
    """The thread that runs requests has died or was closed; it takes none any more."""


class UnsupportedError(QuantflowError):
    """A model family, layout version or device that this version does not know."""

    exit_code = 6


class IntegrityError(QuantflowError):
    """Content differs from the hash that was recorded for it."""

    exit_code = 7


def nearest(word: str, valid: Sequence[str]) -> str:
    """The remedy for a misspelt word."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return (
        f"did you mean {close[0]!r}? valid: {', '.join(valid)}"
        if close
        else f"valid: {', '.join(valid)}"
    )


def extra(name: str) -> str:
    """The remedy for a package of an extra that is not installed: the command that brings it."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the error's class where there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
