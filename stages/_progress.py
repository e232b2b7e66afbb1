"""Progress on stderr: one live line with an ETA on a terminal, else a line per step, two seconds apart or more."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeVar

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before anything is said


@dataclass(frozen=True)
class Progress:
    """How much is said: `quiet` says nothing at all, `patience` is how many seconds pass before a step is told."""

    quiet: bool = False
    patience: float = PATIENCE

    def say(self, text: str) -> None:
        """Write one line."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def steps(self, items: Sequence[Item], *, stage: str, unit: str) -> Iterator[Item]:
        """Yield the items, telling after each how far it is and how long the rest will take."""
        stream: TextIO = sys.stderr
        live = stream.isatty()
        begin, shown = time.monotonic(), False
        told = 0.0  # seconds after the beginning
        for index, item in enumerate(items):
            yield item
            elapsed, finished = time.monotonic() - begin, index + 1
            due = elapsed - (0.0 if live else told) >= self.patience or (shown and finished == len(items))
            if self.quiet or not due:
                continue
            told = elapsed
            left = elapsed / finished * (len(items) - finished)
            text = f"{stage}: {unit} {finished} of {len(items)}, {elapsed:.0f} s, {left:.0f} s left"
            stream.write(f"\r\x1b[K{text}" if live else f"{text}\n")
            stream.flush()
            shown = True
        if shown and live:
            stream.write("\r\x1b[K")
