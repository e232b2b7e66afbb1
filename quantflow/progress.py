"""What the library tells while it works, as a protocol: who calls it decides what becomes of it.

The command line shows a live line and writes a log (quantflow/reporting/progress_line.py). A
program gives nothing and gets `SILENT`, or gives an object of its own with these five methods.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

Item = TypeVar("Item")


class Progress(Protocol):
    """Where a stage tells how far it is."""

    @property
    def patience(self) -> float:
        """Seconds between two lines about steps; ranks that the stage starts keep to it."""
        ...

    def say(self, text: str) -> None:
        """Take one line for people."""

    def note(self, text: str) -> None:
        """Take one line for the log alone."""

    def doing(self, text: str) -> None:
        """Take the present work of the running step; called from the thread that runs the steps."""

    def steps(
        self,
        items: Sequence[Item],
        *,
        stage: str,
        unit: str,
        nbytes: Callable[[Item], int] | None = None,
        samples: int = 0,
        before: int = 0,
    ) -> Iterator[Item]:
        """Yield the items; a run may be ended between two: a step's result is on disk by then.

        Args:
            items: one per step.
            stage: the stage, and of what.
            unit: what an item is: layer, window.
            nbytes: the bytes that an item reads or writes; None where bytes do not matter.
            samples: how many sequences each step runs.
            before: how many steps an earlier run finished; the first item is the one after them.
        """
        ...

    def hushed(self) -> Self:
        """This progress without lines for people, for a rank that is not the first."""
        ...


class Silent:
    """A progress that tells nobody."""

    patience = float("inf")

    def say(self, text: str) -> None:
        """Drop the line."""

    def note(self, text: str) -> None:
        """Drop the line."""

    def doing(self, text: str) -> None:
        """Drop the line."""

    def steps(
        self,
        items: Sequence[Item],
        *,
        stage: str,
        unit: str,
        nbytes: Callable[[Item], int] | None = None,
        samples: int = 0,
        before: int = 0,
    ) -> Iterator[Item]:
        """Yield the items."""
        del stage, unit, nbytes, samples, before
        yield from items

    def hushed(self) -> Self:
        """Return itself."""
        return self


SILENT = Silent()
