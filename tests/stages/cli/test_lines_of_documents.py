"""The command lines of five programs' documents, each after the verb whose work it is.

A line is understood, or refused once: with every reason, and with a line that is understood.
"""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from quantflow.errors import UsageError
from quantflow.stages.cli import cli

LINES = tomllib.loads(Path(__file__).with_name("lines_of_documents.toml").read_text())["line"]
PROGRAM = re.compile(r".*\.py|text-generation-(benchmark|launcher)|ghcr\.io/.*")
LAUNCHER = re.compile(r".*gaudi_spawn\.py|deepspeed")
CASES = [(verb, line["text"].strip()) for line in LINES for verb in line["verbs"]]


def words_of(text):
    """The words of a line after its program's name; those of what starts it on ranks before them.

    <a placeholder> is a word, and so is what a shell puts in place of a `command`.
    """
    text = re.sub(r"`[^`]*`", "10.0.0.1", text).replace("\\\n", " ")
    words = shlex.split(re.sub(r"<[^<>]*>", lambda place: f"'{place[0]}'", text))
    launched = [place for place, word in enumerate(words) if LAUNCHER.fullmatch(word)]
    start = launched[0] + 1 if launched else 0
    programs = [at for at, word in enumerate(words) if at >= start and PROGRAM.fullmatch(word)]
    if not programs:
        return words
    return [*(words[start : programs[0]] if launched else []), *words[programs[0] + 1 :]]


def parse(verb, words):
    """Parse a line without running it; None where it asks for help."""
    group = click.Context(cli, info_name="quantflow", **cli.context_settings)
    command = cli.get_command(group, verb)
    try:
        return command.make_context(verb, list(words), parent=group).params
    except click.exceptions.Exit as end:
        assert end.exit_code == 0
        return None


def test_the_documents_lines_are_here():
    assert len(LINES) == 67
    assert {line["document"] for line in LINES} == set("HGBIA")


@pytest.mark.parametrize(("verb", "text"), CASES)
def test_a_line_is_understood_or_refused_once_with_the_line_to_use(verb, text, capsys):
    words = words_of(text)
    try:
        parse(verb, words)
    except UsageError as error:
        assert "No such option" not in error.cause and "--help" not in error.remedy
        *_, line = re.findall(r"here it is `(.*)`$", error.remedy)
        _, other, *ours = shlex.split(line.replace("--ranks N", "--ranks 2"))
        assert parse(other, ours) is not None
        assert "left out" not in capsys.readouterr().err


def test_half_of_the_lines_and_more_are_understood_as_they_are():
    def understood(verb, text):
        try:
            parse(verb, words_of(text))
        except UsageError:
            return False
        return True

    first = [understood(line["verbs"][0], line["text"].strip()) for line in LINES]
    assert first.count(True) >= 53, first
