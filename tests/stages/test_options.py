"""Exit codes, the two lines of an error, tables and outlines."""

import errno
import json
import os
import signal

import click
import pytest

from quantflow.errors import (
    GateError,
    InputError,
    IntegrityError,
    ResourceError,
    SchemeError,
    StatisticsError,
    UnsupportedError,
    UsageError,
)
from stages._options import exit_code, outline, show, table


def raising(error):
    @click.group()
    def group():
        pass

    @group.command()
    @click.option("--debug", is_flag=True)
    def verb(debug):
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("c", "r"), 2),
        (SchemeError("c", "r"), 2),
        (InputError("c", "r"), 3),
        (StatisticsError("c", "r"), 3),
        (GateError("c", "r"), 4),
        (ResourceError("c", "r"), 5),
        (UnsupportedError("c", "r"), 6),
        (IntegrityError("c", "r"), 7),
    ],
)
def test_every_error_has_its_exit_code_and_two_lines(capsys, error, code):
    assert exit_code(raising(error), ["verb"]) == code
    assert capsys.readouterr() == ("", "error: c\n  fix: r\n")


def test_a_message_of_several_lines_is_told_on_two(capsys):
    exit_code(raising(InputError("one\ntwo", "three\nfour")), ["verb"])
    assert capsys.readouterr().err == "error: one two\n  fix: three four\n"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EACCES, 3), (errno.ENOENT, 3), (errno.EISDIR, 3)]
)
def test_the_systems_refusals_name_the_file(capsys, number, code):
    assert exit_code(raising(OSError(number, os.strerror(number), "/some/file")), ["verb"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"error: /some/file: {os.strerror(number)}\n") and "Traceback" not in err


def test_an_unforeseen_error_is_a_bug_and_its_traceback_is_shown_on_request_only(capsys):
    assert exit_code(raising(ZeroDivisionError("oh")), ["verb"]) == 1
    err = capsys.readouterr().err
    assert "a bug in quantflow: ZeroDivisionError: oh" in err and "Traceback" not in err
    assert exit_code(raising(ZeroDivisionError("oh")), ["verb", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_and_a_termination_have_their_codes(capsys):
    assert exit_code(raising(KeyboardInterrupt()), ["verb"]) == 130
    assert "error: interrupted" in capsys.readouterr().err

    @click.group()
    def group():
        pass

    @group.command()
    def verb():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    assert exit_code(group, ["verb"]) == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("arguments", [["nothing"], ["verb", "--nope"], ["verb", "more"]])
def test_a_command_line_that_says_nothing_is_a_usage_error(capsys, arguments):
    assert exit_code(raising(ValueError()), arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and "--help" in lines[1]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["verb", "--help"]])
def test_help_is_not_an_error(capsys, arguments):
    assert exit_code(raising(ValueError()), arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_a_result_is_text_or_one_json_document(capsys):
    show({"b": 1, "a": [2]}, as_json=True, text="text")
    assert json.loads(capsys.readouterr().out) == {"a": [2], "b": 1}
    show({"b": 1}, as_json=False, text="text")
    assert capsys.readouterr().out == "text\n"


def test_a_table_puts_names_left_and_numbers_right():
    text = table(("a", "b", "c", "n"), [("x", "yy", "z", "1"), ("xxx", "y", "z", "100")])
    assert text.splitlines() == ["a    b   c    n", "---  --  -  ---", "x    yy  z    1", "xxx  y   z  100"]


def test_an_outline_indents_and_cuts_long_lists():
    text = outline({"a": {"b": 1}, "empty": {}, "list": list(range(25))})
    assert text.splitlines()[:4] == ["a:", "  b: 1", "empty: {}", "list:"]
    assert text.splitlines()[-1] == "  ... 5 more" and len(text.splitlines()) == 25


def test_an_outline_shows_equal_tables_in_a_row_once():
    same = {"bits": 8}
    text = outline({"x": same, "y": same, "z": same, "w": {"bits": 4}, "v": 1, "u": 1, "t": 1})
    assert text.splitlines() == ["x to z (3 alike):", "  bits: 8", "w:", "  bits: 4", "v: 1", "u: 1", "t: 1"]
