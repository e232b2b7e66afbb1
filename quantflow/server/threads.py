"""Threads beside the event loop, for work that grows with a request.

The event loop serves every client, so it does nothing that takes long. Python runs one thread at a
time, and a thread gives way only between two steps of Python code: work here is made of short
steps, also where it calls into libraries (json_text.py).

Each kind of work has threads of its own, so that a short text never waits for a long one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

LONG_TEXT = 1 << 16  # characters of a text that is long
SMALL = 1 << 16  # bytes of a body whose work is done on the loop, in a few milliseconds


class ServerThreads:
    """The threads of a server that work on requests."""

    def __init__(self, texts: int) -> None:
        """Start none before the first work.

        Args:
            texts: threads that tokenize short texts.
        """
        counts = {"texts": texts, "long-texts": 1, "bodies": 1}
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"quantflow-{name}")
            for name, count in counts.items()
        }

    async def read(self, work: Callable[[], Result], *, characters: int) -> Result:
        """Tokenize a text of so many characters."""
        return await self._run("long-texts" if characters > LONG_TEXT else "texts", work)

    async def large(self, work: Callable[[], Result]) -> Result:
        """Work on a large body, or on a large answer."""
        return await self._run("bodies", work)

    async def sized(self, work: Callable[[], Result], *, nbytes: int) -> Result:
        """Work on a body of so many bytes, on the loop where it is small."""
        return work() if nbytes <= SMALL else await self.large(work)

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, name: str, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pools[name], work)
