"""A trace of some steps of an engine, for chrome://tracing: one file, of the steps after those that are left alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TracedSteps:
    """Which steps are traced, and where to.

    Attributes:
        path: the file.
        skip: steps before the trace.
        count: steps of the trace, 1 or more.
        shapes: whether it has the shapes of inputs.
    """

    path: Path
    skip: int
    count: int
    shapes: bool = False


class StepTrace:
    """Traces the steps that it is told of; the thread that does one does all.

    Attributes:
        done: whether the file is written.
    """

    def __init__(self, options: TracedSteps) -> None:
        """Wait for the first step."""
        self.done = False
        self._options, self._seen = options, 0
        self._profile: profile | None = None

    def step(self, work: Callable[[], Result]) -> Result:
        """Do a step and return what it returns; the last one of the trace writes the file.

        Raises:
            OSError: the file cannot be written.
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
                self._profile.stop()
                self.done = True
                options.path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(options.path))
                self._profile = None
