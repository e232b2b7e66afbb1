"""Progress goes to stderr, in lines, and is silent for short work."""

import io
import sys

import pytest

from stages import _progress
from stages._progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves one second each time it is read."""
    ticks = iter(range(1000))
    monkeypatch.setattr(_progress.time, "monotonic", lambda: float(next(ticks)))


def test_steps_yield_every_item_and_say_nothing_when_it_is_quick(capsys):
    assert list(Progress().steps("abc", stage="s", unit="layer")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_lines_tell_how_far_it_is_and_how_long_the_rest_takes(capsys, clock):
    list(Progress(patience=3.0).steps([1, 2, 3, 4], stage="measure", unit="layer"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["measure: layer 3 of 4, 3 s, 1 s left", "measure: layer 4 of 4, 4 s, 0 s left"]


def test_lines_are_as_far_apart_as_the_first_is_from_the_beginning_and_the_last_is_told(capsys, clock):
    list(Progress(patience=3.0).steps(range(8), stage="validate", unit="window"))
    told = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["3", "6", "8"]


def test_a_terminal_gets_one_live_line_that_is_cleared(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(Progress(patience=0.0).steps([1, 2], stage="s", unit="window"))
    text = terminal.getvalue()
    assert "\n" not in text and text.endswith("\r\x1b[K") and "window 2 of 2" in text


def test_a_short_step_leaves_a_terminal_untouched(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(Progress().steps([1, 2], stage="s", unit="window"))
    assert terminal.getvalue() == ""


def test_quiet_says_nothing_at_all(capsys, clock):
    progress = Progress(quiet=True, patience=0.0)
    progress.say("hello")
    assert list(progress.steps([1, 2], stage="s", unit="layer")) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_say_writes_to_stderr(capsys):
    Progress().say("up to date")
    assert capsys.readouterr() == ("", "up to date\n")


def test_no_items_are_no_steps(capsys):
    assert list(Progress(patience=0.0).steps([], stage="s", unit="layer")) == []
    assert capsys.readouterr().err == ""
