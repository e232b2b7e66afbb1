"""Progress on stderr: a live line on a terminal, else lines at intervals; all of it in the log."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TextIO, TypeVar

from quantflow.plain_text import one_line, plain
from quantflow.process_memory import usage
from quantflow.reporting.log import Log, logged, peaks
from quantflow.reporting.signals import Signals
from quantflow.units import duration, size

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before anything is said
# steps that the ETA is taken from: finished steps that a resumed run skips would promise too much
RECENT = 5
REDRAW = 0.1  # seconds between two drawings of the live line
# GB/s; a slower step is bound by arithmetic, and its bytes per second say nothing
LEAST_RATE = 0.01
COLUMNS = 80  # of a terminal that does not tell


class LiveLine:
    """The live line of a terminal, which anything else written to stderr must clear first."""

    def __init__(self) -> None:
        """Nothing is shown."""
        self._shown = False
        self._drawn = float("-inf")  # time.monotonic() of the last drawing

    def draw(self, text: str, *, now: float, at_least: float = 0.0) -> None:
        """Show a text in the place of the last, cut to the terminal.

        Nothing happens while the last text is younger than `at_least` seconds.
        """
        if now - self._drawn < at_least:
            return
        sys.stderr.write(f"\r\x1b[K{one_line(text)[: _columns(sys.stderr) - 1]}")
        sys.stderr.flush()
        self._shown, self._drawn = True, now

    def clear(self) -> None:
        """Take the line away, if there is one."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown, self._drawn = False, float("-inf")


class Pace:
    """The progress of a loop: steps, seconds and bytes."""

    def __init__(self, head: str, total: int, *, samples: int, before: int) -> None:
        """Begin now.

        Args:
            head: `quantize int4: layer`.
            total: number of steps, those of an earlier run included.
            samples: number of sequences that each step runs; 0 leaves them out.
            before: number of steps that an earlier run finished.
        """
        self.head, self.total, self.samples, self.before = head, total, samples, before
        self.finished = 0
        self.nbytes = 0
        self.elapsed = 0.0  # seconds at the end of the last step
        self.begin = time.monotonic()
        self._recent: deque[float] = deque([0.0], maxlen=RECENT + 1)

    def step(self, nbytes: int) -> None:
        """Count a finished step of so many bytes."""
        self.elapsed = time.monotonic() - self.begin
        self.finished += 1
        self.nbytes += nbytes
        self._recent.append(self.elapsed)

    @property
    def number(self) -> int:
        """The number of finished steps, those of an earlier run included."""
        return self.before + self.finished

    def text(self, number: int, *, doing: str, elapsed: float, memory: bool) -> str:
        """One line about step `number`, counted from 1."""
        parts = [f"{self.head} {number} of {self.total}", doing]
        parts.append(f"{self.samples} samples" if self.samples else "")
        parts.append(duration(elapsed))
        rate = self.nbytes / self.elapsed / 1e9 if self.elapsed > 0 else 0.0  # GB/s
        parts.append(f"{rate:.2f} GB/s" if rate >= LEAST_RATE else "")
        if self.finished:
            each = (self._recent[-1] - self._recent[0]) / (len(self._recent) - 1)
            parts.append(f"{duration(each * (self.total - self.number))} left")
        parts.append(f"RSS {size(usage().resident)}" if memory else "")
        return ", ".join(part for part in parts if part)


@dataclass
class Now:
    """The innermost loop that runs, which `doing` is about."""

    pace: Pace | None = None


@dataclass(frozen=True)
class ProgressLine:
    """The settings of progress, and its targets.

    Attributes:
        quiet: write nothing on stderr; the log still gets everything.
        patience: seconds before a step is reported, and between two reports.
        bars: show a live line on a terminal; without, lines as if there were none.
        log: file of every line, each step's included.
        signals: holder of the first SIGINT or SIGTERM until a step has ended.
    """

    quiet: bool = False
    patience: float = PATIENCE
    bars: bool = True
    log: Log | None = None
    signals: Signals | None = None
    line: LiveLine = field(default_factory=LiveLine, repr=False, compare=False)
    now: Now = field(default_factory=Now, repr=False, compare=False)

    @contextmanager
    def logging(self, path: Path, title: str) -> Iterator["ProgressLine"]:
        """Yield this progress with a log file, which is beside the output and never inside it.

        Args:
            path: path of the log, which is appended to; a log that cannot be written is reported
                once and the run goes on.
            title: the command, in one line.
        """
        with logged(path, title) as log:
            yield replace(self, log=log)

    def hushed(self) -> Self:
        """This progress with its lines in the log alone."""
        return replace(self, quiet=True)

    def say(self, text: str) -> None:
        """Write one line."""
        self.note(text)
        if not self.quiet:
            self.line.clear()
            print(plain(text), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Write one line into the log alone."""
        if self.log is not None:
            self.log.write(text)

    def doing(self, text: str) -> None:
        """Show the running step's present part on the live line; for the thread of the steps."""
        pace = self.now.pace
        if pace is None or self.quiet or not self._live():
            return
        moment = time.monotonic()
        if moment - pace.begin >= self.patience:
            number = min(pace.number + 1, pace.total)
            told = pace.text(number, doing=text, elapsed=moment - pace.begin, memory=True)
            self.line.draw(told, now=moment, at_least=REDRAW)

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
        """Yield the items, and report after each the progress and the time that is left.

        The body of the loop must leave the step's result on disk: a first signal waits for it, and
        ends the run after it.

        Args:
            items: one per step.
            stage: name of the stage, and of its subject.
            unit: word for an item: layer, window.
            nbytes: bytes that an item reads or writes, for the bytes per second.
            samples: number of sequences that each step runs.
            before: number of steps that an earlier run finished; the first item is the one after
                them.

        Raises:
            Interrupted: a signal arrived during the last step.
        """
        pace = Pace(f"{stage}: {unit}", before + len(items), samples=samples, before=before)
        outer = self.now.pace
        told = 0.0  # seconds after the beginning
        self.now.pace = pace
        try:
            for number, item in enumerate(items, start=before + 1):
                with self._step(f"{stage}: {unit} {number}"):
                    yield item
                    pace.step(0 if nbytes is None else nbytes(item))
                    told = self._tell(pace, told)
        finally:
            self.now.pace = outer
            self.line.clear()
        if items:
            self.note(f"{stage}: {len(items)} {unit}s in {duration(pace.elapsed)}, {peaks()}")

    def _tell(self, pace: Pace, told: float) -> float:
        """Report that a step has ended; the result is the time of the last line, in seconds."""
        live = self._live()
        text = pace.text(pace.number, doing="", elapsed=pace.elapsed, memory=live)
        self.note(text)
        if self.quiet:
            return told
        if live:
            if pace.elapsed >= self.patience:
                self.line.draw(text, now=pace.begin + pace.elapsed)
            return told
        if pace.elapsed - told < self.patience and not (told > 0 and pace.number == pace.total):
            return told
        print(plain(text), file=sys.stderr, flush=True)
        return pace.elapsed

    def _step(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.signals is None else self.signals.step(name, quiet=self.quiet)

    def _live(self) -> bool:
        return self.bars and sys.stderr.isatty()


def _columns(stream: TextIO) -> int:
    """The width of the terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a terminal that does not tell, or none
        return COLUMNS
