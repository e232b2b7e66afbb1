"""The first signal lets the step finish, the second stops at once; outside a step the first."""

import os
import signal
import time
import weakref

import pytest

from quantflow.reporting.progress_line import ProgressLine
from quantflow.reporting.signals import Interrupted, Signals

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def signals():
    # what a shell starts with `&` ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = Signals()
    with signals.installed():
        yield signals
    signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_outside_a_step_a_signal_stops_at_once(signals, number):
    with pytest.raises(Interrupted) as caught:
        send(number)
    assert caught.value.number == number


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "press again"), (signal.SIGTERM, "send it again")]
)
def test_within_a_step_the_first_signal_waits_for_its_end_and_is_answered(
    signals, capfd, number, again
):
    done = []
    with pytest.raises(Interrupted) as caught:
        for item in ProgressLine(signals=signals).steps("abc", stage="quantize", unit="layer"):
            if item == "b":
                send(number)
            done.append(item)
    assert caught.value.number == number and done == ["a", "b"]
    assert capfd.readouterr().err == f"\nfinishing quantize: layer 2; {again} to stop at once\n"


@pytest.mark.parametrize("second", NUMBERS)
def test_the_second_signal_stops_within_the_step_with_its_own_number(signals, second):
    done = []
    with pytest.raises(Interrupted) as caught:
        for item in ProgressLine(signals=signals, quiet=True).steps("abc", stage="s", unit="layer"):
            send(signal.SIGINT)
            send(second)
            done.append(item)
    assert caught.value.number == second and done == []


def test_a_step_within_a_step_does_not_end_the_outer_one_early(signals):
    progress, done = ProgressLine(signals=signals, quiet=True), []
    with pytest.raises(Interrupted):
        for layer in progress.steps("ab", stage="s", unit="layer"):
            for window in progress.steps("12", stage="s", unit="window"):
                send(signal.SIGTERM) if window == "1" else None
                done.append(layer + window)
    assert done == ["a1", "a2"]


def test_a_signal_during_the_last_step_still_ends_the_run(signals):
    with pytest.raises(Interrupted):
        for _ in ProgressLine(signals=signals, quiet=True).steps("a", stage="s", unit="layer"):
            send(signal.SIGTERM)


def test_an_error_of_the_step_wins_over_a_signal_that_waits(signals):
    with pytest.raises(ZeroDivisionError):
        for _ in ProgressLine(signals=signals, quiet=True).steps("ab", stage="s", unit="layer"):
            send(signal.SIGTERM)
            raise ZeroDivisionError


def test_quiet_finishes_the_step_without_a_word(signals, capfd):
    with pytest.raises(Interrupted):
        for _ in ProgressLine(signals=signals, quiet=True).steps("a", stage="s", unit="layer"):
            send(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_process_that_ignored_interrupts_keeps_ignoring_them_and_handlers_come_back():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals().installed():
            send(signal.SIGINT)
            with pytest.raises(Interrupted):
                send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_in_the_callback_of_a_weak_reference_is_not_lost(signals, number):
    class Anything:
        pass

    one = Anything()
    watch = weakref.ref(one, lambda _: send(number))  # Python passes over what it raises
    del one
    assert watch() is None
    with pytest.raises(Interrupted) as caught:
        time.sleep(5)
    assert caught.value.number == number


def test_other_errors_in_such_a_callback_are_told_as_ever(signals, capsys):
    class Anything:
        def __del__(self):
            raise ValueError("told")

    Anything()
    assert "ValueError: told" in capsys.readouterr().err
