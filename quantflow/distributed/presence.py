"""Which ranks are still there: each is heard every few seconds, and a silent one is named.

A rank that dies breaks its connections, and the others learn of it at once. A rank that is stopped,
or whose machine has lost its network, breaks none: the others would wait for it as long as their
group waits, a day. So a thread of each rank counts a number up in torch's store, and reads those of
the others. Once a number has stood still for SILENCE the process says which rank's it is, and ends.

Arithmetic of hours is no silence, since the thread counts on beside it. A process that was stopped
itself, as a whole command can be, begins to listen anew.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from quantflow.errors import ResourceError
from quantflow.reporting.failures import end_at_once, failure_of, report

INTERVAL = 5.0  # seconds from one look to the next
# Seconds. A layer that is written by Rust holds Python's lock, and so its thread, for some of them.
SILENCE = 300.0
ASKED = timedelta(seconds=30)  # time in which the store answers
_LEFT = b"left"


class Presence:
    """A rank's sign of life, and what it hears of the others.

    Args:
        store: torch's store of the ranks, for this thread alone.
        rank, world: number of this rank, and of all.
        clock: seconds, of any beginning.
    """

    def __init__(
        self, store: Any, *, rank: int, world: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to listen; the rank gives its first sign when it looks."""
        self._store = store
        self._rank = rank
        self._world = world
        self._clock = clock
        self._count = 0
        self._numbers: dict[int, bytes] = {}
        self.listen_anew()

    def listen_anew(self) -> None:
        """Count every silence from now."""
        now = self._clock()
        self._heard = {rank: now for rank in range(self._world) if rank != self._rank}
        self._answered = now

    def look(self) -> str | None:
        """Give the sign, and return who has been silent for SILENCE; None where nobody has."""
        try:
            self._count += 1
            self._store.set(_key(self._rank), str(self._count))
            for other in self._heard:
                self._hear(other)
            self._answered = self._clock()
        except distributed.DistError:  # its machine may be the silent one: see how long
            if self._clock() - self._answered > SILENCE:
                return "the store of the ranks, on the first machine,"
            return None
        silent = [other for other, heard in self._heard.items() if self._answered - heard > SILENCE]
        return f"{_named(silent)} of {self._world}" if silent else None

    def _hear(self, other: int) -> None:
        number = self._store.get(_key(other)) if self._store.check([_key(other)]) else b""
        if number == _LEFT or number != self._numbers.get(other, b""):
            self._numbers[other] = number
            self._heard[other] = self._clock()

    def leave(self) -> None:
        """Say that this rank has ended well, so that nobody waits for its sign."""
        self._store.set(_key(self._rank), _LEFT)


@contextmanager
def watched(store: Any, *, rank: int, world: int) -> Iterator[None]:
    """Let a thread give this rank's sign, and end the process where another is silent.

    Args:
        store: torch's store of the ranks.
        rank: number of this rank.
        world: number of all.
    """
    own = store.clone()
    own.set_timeout(ASKED)
    presence = Presence(own, rank=rank, world=world)
    done = threading.Event()

    def watch() -> None:
        while True:
            began = time.monotonic()
            if done.wait(INTERVAL):
                return
            if time.monotonic() - began > 3 * INTERVAL:
                presence.listen_anew()  # this process was stopped, the others perhaps with it
            silent = presence.look()
            if silent is not None and not done.is_set():
                _end(silent)

    thread = threading.Thread(target=watch, name="presence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
    thread.join()
    # Where the first rank has ended, and the store with it, nobody reads this any more.
    with suppress(distributed.DistError):
        presence.leave()


def await_all(store: Any, *, rank: int, world: int, timeout: timedelta) -> None:
    """Return when all ranks have come here.

    Args:
        store: torch's store of the ranks.
        rank: number of this rank.
        world: number of all.
        timeout: time in which they have to come.

    Raises:
        ResourceError: a rank has not come; the message names it.
    """
    end = time.monotonic() + timeout.total_seconds()
    store.set(_came(rank), b"")
    missing = list(range(world))
    pause = 0.01
    while missing := [other for other in missing if not store.check([_came(other)])]:
        if time.monotonic() > end:
            raise ResourceError(
                f"{_named(missing)} of {world} did not come within {_seconds(timeout)}",
                "look whether it was started, what it said, and whether it reaches the first "
                "machine; the same command continues",
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _end(silent: str) -> None:
    """End the process, whose main thread waits for a rank that is silent."""
    failure = failure_of(
        ResourceError(
            f"{silent} has not been heard for {SILENCE:.0f} s",
            "look whether its process is stopped and its machine reachable; the same command "
            "continues",
        )
    )
    assert failure is not None  # a QuantflowError has an exit code
    end_at_once(report(failure))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


def _key(rank: int) -> str:
    return f"quantflow/present/{rank}"


def _came(rank: int) -> str:
    return f"quantflow/came/{rank}"
