"""Threads for independent units of work: rows of a weight, sequences, files.

torch runs on one thread inside each unit (`torch.set_num_threads(1)`, which the stages call and
each thread of the workers repeats), because GEMM, Cholesky and reductions give other bits on two.
The units and their sizes never depend on the number of workers, so neither do the results. Threads
suffice, since torch and the hashes release the interpreter's lock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A pool of `count` threads; 1 runs everything in the caller's thread.

    A unit must not use the workers that run it.

    Attributes:
        count: number of units that run at once, at least 1.
    """

    def __init__(self, count: int = 1) -> None:
        """Begin without a thread."""
        self.count = max(1, count)
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        """The workers."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the units that run, drop those that have not begun."""
        self.close()

    def close(self) -> None:
        """Wait for the units that run, drop those that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results of `function` for every item, in order; the first error ends the rest."""
        return list(self.stream(function, items))

    def stream(
        self, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int | None = None
    ) -> Iterator[Result]:
        """Yield the results of `function` for every item, in order, while later items run.

        Args:
            function: one unit.
            items: arguments of the units, taken lazily.
            ahead: most units that are begun or finished but not yet yielded; None means `count`.
        """
        if self.count == 1:
            yield from map(function, items)
            return
        if self._pool is None:
            # The number of threads of a product is a setting of each thread; its default is one
            # per core.
            self._pool = ThreadPoolExecutor(
                self.count, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
            )
        limit = self.count if ahead is None else max(1, ahead)
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(self._pool.submit(function, item))
                if len(running) == limit:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


SEQUENTIAL = Workers(1)  # has no pool, hence no state
