"""Exit codes, the two lines of an error, tables and outlines."""

import errno
import json
import os
import signal
from pathlib import Path

import click
import pytest
import torch

from quantflow.distributed.launch import launched_environment
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
from quantflow.stages.cli.options import common
from quantflow.stages.cli.output import exit_code, outline, reporting, show, table


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
    ("number", "code"),
    [(errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EACCES, 3), (errno.ENOENT, 3), (errno.EISDIR, 3)],
)
def test_the_systems_refusals_name_the_file(capsys, number, code):
    assert exit_code(raising(OSError(number, os.strerror(number), "/some/file")), ["verb"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"error: /some/file: {os.strerror(number)}\n") and "Traceback" not in err


def test_a_failing_disk_is_told_as_such_with_the_file(capsys):
    assert (
        exit_code(raising(OSError(errno.EIO, os.strerror(errno.EIO), "/some/file")), ["verb"]) == 3
    )
    cause, remedy = capsys.readouterr().err.splitlines()
    assert (
        cause == "error: /some/file: Input/output error: the disk or file system failed"
        and "continues" in remedy
    )


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_vanished_is_named(capsys, number):
    assert (
        exit_code(raising(OSError(number, os.strerror(number), "/model/a.safetensors")), ["verb"])
        == 3
    )
    err = capsys.readouterr().err
    assert err.startswith("error: /model/a.safetensors: ") and "bring the file back" in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
            "bytes."
        ),
    ],
)
def test_memory_that_ends_is_a_matter_of_resources_not_a_bug(capsys, error):
    assert exit_code(raising(error), ["verb"]) == 5
    err = capsys.readouterr().err
    assert "--max-memory" in err and "bug" not in err


def test_what_torch_says_when_memory_ends_is_recognized(capsys):
    @click.group()
    def group():
        pass

    @group.command()
    def verb():
        torch.empty(1 << 60, dtype=torch.uint8)

    assert exit_code(group, ["verb"]) == 5


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


def writing(action):
    """A verb that writes `out` and does something with its progress."""

    @click.group()
    def group():
        pass

    @group.command()
    @click.argument("output", type=Path)
    @common
    def verb(output, **shared):
        with reporting(shared, output) as progress:
            action(progress)

    return group


def test_a_verb_logs_its_command_line_beside_its_output_and_finishes_the_step_that_runs(
    tmp_path, capsys
):
    done = []

    def work(progress):
        for item in progress.steps("ab", stage="s", unit="layer"):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(item)

    assert exit_code(writing(work), ["verb", str(tmp_path / "out"), "-q"]) == 143
    assert done == ["a"]
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "out.log").read_text().splitlines()]
    assert lines[0] == f"begin: quantflow verb {tmp_path / 'out'} -q"
    assert lines[-1].startswith("stopped: Interrupted: SIGTERM, after ")
    assert list(tmp_path.iterdir()) == [tmp_path / "out.log"]


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("0", True), ("", True)])
def test_the_environment_silences_the_bars(tmp_path, monkeypatch, value, wanted):
    monkeypatch.setenv("TQDM_DISABLE", value)
    found = []
    assert (
        exit_code(
            writing(lambda progress: found.append(progress.bars)), ["verb", str(tmp_path / "out")]
        )
        == 0
    )
    assert found == [wanted]


@pytest.mark.parametrize(
    ("rank", "ours", "written"), [("0", True, []), ("1", False, []), ("0", False, ["out.log"])]
)
def test_a_rank_has_a_log_where_it_is_the_first_of_somebodys_torchrun(
    tmp_path, monkeypatch, rank, ours, written
):
    theirs = {"RANK": rank, "WORLD_SIZE": "2"}
    for name, value in (
        launched_environment("private", rank=int(rank), world=2) if ours else theirs
    ).items():
        monkeypatch.setenv(name, value)
    assert (
        exit_code(
            writing(lambda progress: progress.say("measure: hello")),
            ["verb", str(tmp_path / "out")],
        )
        == 0
    )
    assert [path.name for path in tmp_path.iterdir()] == written


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
    assert text.splitlines() == [
        "a    b   c    n",
        "---  --  -  ---",
        "x    yy  z    1",
        "xxx  y   z  100",
    ]


def test_an_outline_indents_and_cuts_long_lists():
    text = outline({"a": {"b": 1}, "empty": {}, "list": list(range(25))})
    assert text.splitlines()[:4] == ["a:", "  b: 1", "empty: {}", "list:"]
    assert text.splitlines()[-1] == "  ... 5 more" and len(text.splitlines()) == 25


def test_an_outline_shows_equal_tables_in_a_row_once():
    same = {"bits": 8}
    text = outline({"x": same, "y": same, "z": same, "w": {"bits": 4}, "v": 1, "u": 1, "t": 1})
    assert text.splitlines() == [
        "x to z (3 alike):",
        "  bits: 8",
        "w:",
        "  bits: 4",
        "v: 1",
        "u: 1",
        "t: 1",
    ]
