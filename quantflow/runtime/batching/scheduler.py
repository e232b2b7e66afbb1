"""The scheduler: which requests run, and which of their tokens a step computes, without a model.

A row joins the running batch when its whole length, prompt + max_new_tokens, fits into what is left
of the budget; it keeps that reservation until it ends. So whatever runs can always end, nothing is
ever thrown out again, and the batch cannot lock itself up. Rows of one priority join in the order
in which they came, and one that does not fit yet is never passed by a later, smaller one of its
class. With queue_threshold_ms the shortest prompt of a class joins first, but rows that have waited
so long join before all others. A row at the head of a lower class that was passed by MOST_PASSES
rows of higher ones goes before them all, so no class starves.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from quantflow.runtime.batching.limits import BatchLimits

MOST_PASSES = 16  # rows of higher classes that may join before the head of a lower one


class Schedulable(Protocol):
    """The properties of a row that the scheduler reads.

    Attributes:
        input_tokens: tokens of the prompt.
        total_tokens: tokens of the prompt + max_new_tokens.
        priority: class of the row; higher joins first.
        submitted: time at which it came, in seconds of the scheduler's clock.
        left: tokens whose keys and values are still to be computed before the next one can be
            chosen: prompt tokens in prefill, afterwards 1, or more with speculation.
        in_prefill: whether they are the prompt's.
    """

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt + max_new_tokens."""

    @property
    def priority(self) -> int:
        """Class of the row."""

    @property
    def submitted(self) -> float:
        """Time at which the row came."""

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""

    @property
    def in_prefill(self) -> bool:
        """Whether these tokens are the prompt's."""


R = TypeVar("R", bound=Schedulable)


class Scheduler(Generic[R]):
    """The waiting and the running rows.

    Attributes:
        running: in the order in which they joined.
    """

    def __init__(self, limits: BatchLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            limits: `BatchLimits.resolved`.
            clock: clock in seconds, read only with queue_threshold_ms.
        """
        self.running: list[R] = []
        self._limits, self._clock = limits, clock
        self._classes: dict[int, deque[R]] = {}
        # class -> rows of higher classes that joined since its head became that
        self._passes: dict[int, int] = {}
        self._since = 0  # steps since rows last joined

    @property
    def waiting(self) -> int:
        """Number of waiting rows."""
        return sum(map(len, self._classes.values()))

    def queued(self) -> list[R]:
        """The waiting rows."""
        return [row for rows in self._classes.values() for row in rows]

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the rows in prefill, which max_batch_prefill_tokens bounds."""
        return sum(row.input_tokens for row in self.running if row.in_prefill)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the running rows, which max_batch_total_tokens bounds."""
        return sum(row.total_tokens for row in self.running)

    def add(self, row: R) -> None:
        """Let a row wait behind those of its class."""
        self._classes.setdefault(row.priority, deque()).append(row)

    def remove(self, row: R) -> None:
        """Forget a row, wherever it is."""
        if row in self.running:
            self.running.remove(row)
            return
        rows = self._classes[row.priority]
        if rows[0] is row:
            self._passes.pop(row.priority, None)
        rows.remove(row)
        if not rows:
            del self._classes[row.priority]

    def admit(self) -> list[R]:
        """Let rows join for which there is room; the rows that joined."""
        limits, waiting, running = self._limits, self.waiting, len(self.running)
        if (
            running
            and self._since < limits.max_waiting_tokens
            and waiting < limits.waiting_served_ratio * running
        ):
            return []
        # resolved
        assert (
            limits.max_batch_prefill_tokens is not None
            and limits.max_batch_total_tokens is not None
        )
        prefill = limits.max_batch_prefill_tokens - self.prefill_tokens
        total = limits.max_batch_total_tokens - self.reserved_tokens
        joined: list[R] = []
        while self._classes and len(self.running) < limits.rows:
            row = self._head(self._next_class())
            prefill, total = prefill - row.input_tokens, total - row.total_tokens
            if prefill < 0 or total < 0:
                break
            self._join(row)
            joined.append(row)
        if joined:
            self._since = 0
        return joined

    def plan(self) -> list[tuple[R, int]]:
        """The rows that the next step computes, and the number of tokens of each.

        Every decoding row is in it. Prompts share `prefill_chunk` tokens; those that joined first
        come before the others. The call counts as a step.
        """
        self._since += 1
        chunk = self._limits.prefill_chunk
        work: list[tuple[R, int]] = []
        for row in self.running:
            count = min(row.left, chunk) if row.in_prefill else row.left
            chunk -= count if row.in_prefill else 0
            if count:
                work.append((row, count))
        return work

    def _join(self, row: R) -> None:
        for priority in self._classes:
            if priority < row.priority:
                self._passes[priority] = self._passes.get(priority, 0) + 1
        self.remove(row)
        self._passes.pop(row.priority, None)
        self.running.append(row)

    def _head(self, priority: int) -> R:
        """The row of a class that joins next."""
        rows, threshold = self._classes[priority], self._limits.queue_threshold_ms
        if threshold is None:
            return rows[0]
        now = self._clock()
        late = [row for row in rows if (now - row.submitted) * 1000 >= threshold]
        # `min` takes the first of equal rows, which came first
        return min(late or rows, key=lambda row: row.input_tokens)

    def _next_class(self) -> int:
        passed: Sequence[int] = [
            priority for priority in self._classes if self._passes.get(priority, 0) >= MOST_PASSES
        ]
        return min(passed) if passed else max(self._classes)
