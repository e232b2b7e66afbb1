"""SIGINT and SIGTERM: the first lets the running step finish, the second stops at once.

Both leave a state that continues. A step is an item of `Progress.steps`: when it ends, its result
is on disk. Outside a step the first signal stops at once.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer

from quantflow.plain_text import plain

STDERR = 2
_AGAIN = 0.05  # seconds


class Interrupted(BaseException):
    """A signal ends the run; no `except Exception` of a library may swallow it.

    Attributes:
        number: the signal; the exit code is 128 more.
    """

    def __init__(self, number: int) -> None:
        """Remember which signal it was."""
        super().__init__(signal.Signals(number).name)
        self.number = number


def _sent_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again that arrived in a destructor or a weak reference's callback.

    Python passes over what these raise. By the time of the next signal they are done.
    """
    if isinstance(unraisable.exc_value, Interrupted):
        Timer(_AGAIN, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
    else:
        sys.__unraisablehook__(unraisable)


class Signals:
    """The signals that have arrived, and the step under way.

    There is one per command line, handed on through click's context.
    """

    def __init__(self) -> None:
        """Nothing has arrived and no step runs."""
        self._received: int | None = None
        self._step: str | None = None
        self._quiet = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Answer both signals inside the block; a signal that the process ignored stays ignored."""
        numbers = [
            n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, self._arrived) for number in numbers}
        hook, sys.unraisablehook = sys.unraisablehook, _sent_again
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def step(self, name: str, *, quiet: bool = False) -> Iterator[None]:
        """Hold the first signal back until the block ends; an inner block holds it for the outer.

        Args:
            name: name of the step, `layer 12`, for whoever sends the signal.
            quiet: write no message.

        Raises:
            Interrupted: at the end of the outermost block, when a signal arrived within it; at
                once, on the second signal.
        """
        outer = (self._step, self._quiet)
        if self._step is None:
            self._step, self._quiet = name, quiet
        try:
            yield
        finally:
            self._step, self._quiet = outer
        if self._step is None and self._received is not None:
            raise Interrupted(self._received)

    def _arrived(self, number: int, _frame: object) -> None:
        if self._step is None or self._received is not None:
            raise Interrupted(number)
        self._received = number
        if not self._quiet:
            again = "press again" if number == signal.SIGINT else "send it again"
            # straight to the descriptor: the interrupted code may be inside sys.stderr's own write
            with suppress(OSError):
                told = f"\nfinishing {plain(self._step)}; {again} to stop at once\n"
                os.write(STDERR, told.encode())
