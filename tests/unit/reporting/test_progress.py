"""ProgressLine goes to stderr, in lines, and is silent for short work."""

import io
import sys
from types import SimpleNamespace

import pytest

from quantflow.reporting import progress_line
from quantflow.reporting.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves one second each time it is read."""
    ticks = iter(range(1000))
    monkeypatch.setattr(
        progress_line, "time", SimpleNamespace(monotonic=lambda: float(next(ticks)))
    )


def test_steps_yield_every_item_and_say_nothing_when_it_is_quick(capsys):
    assert list(ProgressLine().steps("abc", stage="s", unit="layer")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_lines_tell_how_far_it_is_and_how_long_the_rest_takes(capsys, clock):
    list(ProgressLine(patience=3.0).steps([1, 2, 3, 4], stage="measure", unit="layer"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "measure: layer 3 of 4, 3 s, 1 s left",
        "measure: layer 4 of 4, 4 s, 0 s left",
    ]


def test_lines_are_as_far_apart_as_the_first_is_from_the_beginning_and_the_last_is_told(
    capsys, clock
):
    list(ProgressLine(patience=3.0).steps(range(8), stage="validate", unit="window"))
    told = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["3", "6", "8"]


def test_a_terminal_gets_one_live_line_that_is_cleared(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(ProgressLine(patience=0.0).steps([1, 2], stage="s", unit="window"))
    text = terminal.getvalue()
    assert "\n" not in text and text.endswith("\r\x1b[K") and "window 2 of 2" in text


def test_a_short_step_leaves_a_terminal_untouched(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(ProgressLine().steps([1, 2], stage="s", unit="window"))
    assert terminal.getvalue() == ""


def test_the_live_line_tells_what_the_step_does_now_with_bytes_samples_and_memory(
    monkeypatch, clock
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_line, "_columns", lambda stream: 200)
    progress = ProgressLine(patience=0.0)
    for number in progress.steps(
        [1, 2], stage="quantize", unit="layer", nbytes=lambda item: 3 * 10**9, samples=8
    ):
        if number == 2:
            progress.doing("factoring q_proj")
    shown = terminal.getvalue().split("\r\x1b[K")
    # one second per reading of the clock: the first step ends at 1 s, the second is told about at 2
    # s
    assert shown[2].startswith(
        "quantize: layer 2 of 2, factoring q_proj, 8 samples, 2 s, 3.00 GB/s, 1 s left, RSS "
    )
    progress.doing("nothing runs")
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("nbytes", "rate"),
    [(0, ""), (9_000_000, ""), (10_000_000, " 0.01 GB/s,"), (2 * 10**9, " 2.00 GB/s,")],
)
def test_a_line_has_a_rate_where_bytes_matter(capsys, clock, nbytes, rate):
    list(
        ProgressLine(patience=0.0).steps(
            [1, 2], stage="quantize", unit="layer", nbytes=lambda item: nbytes
        )
    )
    assert capsys.readouterr().err.splitlines()[0] == f"quantize: layer 1 of 2, 1 s,{rate} 1 s left"


def test_the_live_line_is_cut_to_the_terminal(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(ProgressLine(patience=0.0).steps([1], stage="s" * 300, unit="layer"))
    # a terminal that does not tell its width has 80 columns
    assert terminal.getvalue().split("\r\x1b[K")[1] == "s" * 79


def test_a_line_that_is_said_takes_the_live_line_away_first(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ProgressLine(patience=0.0)
    for number in progress.steps([1, 2], stage="s", unit="layer"):
        if number == 2:
            progress.say("hello")
    assert "\r\x1b[Khello\n" in terminal.getvalue()


def test_without_bars_a_terminal_gets_lines(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(ProgressLine(patience=0.0, bars=False).steps([1, 2], stage="s", unit="layer"))
    assert terminal.getvalue() == "s: layer 1 of 2, 1 s, 1 s left\ns: layer 2 of 2, 2 s, 0 s left\n"


def test_the_rest_is_estimated_from_the_last_five_steps(capsys, monkeypatch):
    # ten steps that a resumed run skips, then ten of a minute each: 8 of 20 left after 12 means 8
    # minutes, not less
    ends = [0.0] * 10 + [60.0 * i for i in range(1, 11)]
    moments = iter([0.0, *ends])
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    list(ProgressLine(patience=0.0).steps(range(20), stage="s", unit="layer"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[14] == "s: layer 15 of 20, 5 min 00 s, 5 min 00 s left"


def test_a_resumed_run_counts_what_an_earlier_one_finished(capsys, clock):
    list(ProgressLine(patience=0.0).steps("cd", stage="quantize", unit="layer", before=2))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "quantize: layer 3 of 4, 1 s, 1 s left",
        "quantize: layer 4 of 4, 2 s, 0 s left",
    ]


def test_steps_within_steps_are_told_and_the_outer_ones_go_on(capsys, clock):
    progress = ProgressLine(patience=0.0)
    for _ in progress.steps([1, 2], stage="outer", unit="layer"):
        list(progress.steps([1], stage="inner", unit="window"))
    told = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        "inner: window 1 of 1",
        "outer: layer 1 of 2",
        "inner: window 1 of 1",
        "outer: layer 2 of 2",
    ]


def test_the_log_gets_what_quiet_and_patience_hold_back(capsys, tmp_path):
    with ProgressLine(quiet=True).logging(tmp_path / "out.log", "quantflow measure") as progress:
        progress.say("hello")
        progress.note("planned")
        list(progress.steps([1, 2], stage="measure", unit="layer"))
    assert capsys.readouterr() == ("", "")
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "out.log").read_text().splitlines()]
    assert lines[:3] == ["begin: quantflow measure", "hello", "planned"]
    assert lines[3].startswith("measure: layer 1 of 2, 0 s") and lines[4].startswith(
        "measure: layer 2 of 2, 0 s"
    )
    assert lines[5].startswith("measure: 2 layers in 0 s, peak RSS ") and lines[6].startswith(
        "done, after 0 s, peak RSS "
    )


def test_quiet_says_nothing_at_all(capsys, clock):
    progress = ProgressLine(quiet=True, patience=0.0)
    progress.say("hello")
    assert list(progress.steps([1, 2], stage="s", unit="layer")) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_say_writes_to_stderr(capsys):
    ProgressLine().say("up to date")
    assert capsys.readouterr() == ("", "up to date\n")


def test_no_items_are_no_steps(capsys):
    assert list(ProgressLine(patience=0.0).steps([], stage="s", unit="layer")) == []
    assert capsys.readouterr().err == ""
