"""The log beside the output: lines with time stamps, and no run that is lost because of it."""

import os
from datetime import datetime

import pytest

from quantflow.errors import InputError
from quantflow.reporting.log import Log, logged
from quantflow.units import duration, size


def test_lines_are_appended_with_the_time_and_its_offset(tmp_path):
    path = tmp_path / "made" / "out.log"
    for text in ("one", "two\nlines"):
        log = Log(path, "title")
        log.write(text)
        log.close()
    stamps, words = zip(
        *(line.split(" ", 1) for line in path.read_text().splitlines()), strict=True
    )
    assert words == ("begin: title", "one", "begin: title", "two", "lines")
    assert all(datetime.fromisoformat(stamp).tzinfo is not None for stamp in stamps)


def test_a_command_that_is_refused_before_anything_was_said_leaves_no_log(tmp_path):
    with pytest.raises(InputError), logged(tmp_path / "out.log", "title"):
        raise InputError("cause", "remedy")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_stops_says_why_in_its_last_line(tmp_path):
    with pytest.raises(InputError), logged(tmp_path / "out.log", "title") as log:
        log.write("layer 1")
        raise InputError("a: 1, not 2", "do it")
    last = (tmp_path / "out.log").read_text().splitlines()[-1]
    assert "stopped: InputError: a: 1, not 2; do it, after 0 s, peak RSS " in last


def test_a_log_that_cannot_be_made_is_said_once(tmp_path, capsys):
    path = tmp_path / "out.log"
    path.mkdir()
    with logged(path, "title") as log:
        log.write("one")
        log.write("two")
    assert capsys.readouterr().err == f"log: {path}: Is a directory; the run goes on without it\n"


def test_a_disk_that_is_full_ends_the_log_and_nothing_else(tmp_path, capsys):
    with logged(tmp_path / "out.log", "title") as log:
        log.write("one")
        os.dup2(os.open("/dev/full", os.O_WRONLY), log._descriptor)
        log.write("two")
        log.write("three")
    assert (
        capsys.readouterr().err.count("No space left on device; the run goes on without it\n") == 1
    )
    assert "two" not in (tmp_path / "out.log").read_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (125, "2 min 05 s"),
        (7199, "119 min 59 s"),
        (7200, "2 h 00 min"),
    ],
)
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(640_000_000, "640 MB"), (3_120_000_000, "3.12 GB")])
def test_sizes_are_for_people(count, text):
    assert size(count) == text
