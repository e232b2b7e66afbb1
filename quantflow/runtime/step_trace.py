"""A trace of some steps of an engine, for chrome://tracing, in one file."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from quantflow.errors import InputError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TracedSteps:
    """The steps that are traced, and the file of the trace.

    Attributes:
        path: file of the trace.
        skip: steps before the trace.
        count: steps of the trace, 1 or more.
        shapes: whether it has the shapes of inputs.
    """

    path: Path
    skip: int
    count: int
    shapes: bool = False


class StepTrace:
    """Traces steps; the thread that does one step does all.

    Attributes:
        done: whether the file is written, or cannot be.
    """

    def __init__(self, options: TracedSteps) -> None:
        """Wait for the first step.

        Raises:
            InputError: the file cannot be written.
        """
        try:
            options.path.parent.mkdir(parents=True, exist_ok=True)
            with options.path.open("ab") as file:  # an earlier trace stays until there is another
                empty = not file.tell()
            if empty:
                options.path.unlink()
        except OSError as error:
            raise InputError(
                f"{options.path}: {error.strerror or error}", "choose another folder for the trace"
            ) from error
        self.done = False
        self._options, self._seen = options, 0
        self._profile: profile | None = None

    def step(self, work: Callable[[], Result]) -> Result:
        """Do a step and return its result.

        The last step of the trace writes the file, or warns that it cannot.
        """
        options, number = self._options, self._seen
        self._seen += 1
        if self.done or number < options.skip:
            return work()
        if self._profile is None:
            self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=options.shapes)
            self._profile.start()
        try:
            with record_function("step"):
                return work()
        finally:
            if self._seen == options.skip + options.count:
                self._end()

    def _end(self) -> None:
        """Write the file. Requests go on where it cannot be written, such as on a full disk."""
        traced, self._profile, self.done = self._profile, None, True
        assert traced is not None
        traced.stop()
        try:
            traced.export_chrome_trace(str(self._options.path))
        except (OSError, RuntimeError) as error:
            warnings.warn(f"{self._options.path}: no trace: {error}", stacklevel=2)
