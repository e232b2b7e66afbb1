"""Names of folders that nobody chooses by hand.

They hold controls, newlines, quotes, bytes that are no UTF-8, or are as long as they can be.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantflow.exporting import export as export_stage
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

NAMES = (
    "a\nerror: all is well",
    "\x1b[2J\x07",
    " spaces 'and' \"quotes\" ",
    "naïve ☃ \u202egnp",
    "-n",
    "re:.*",
    "a,b=c{}[]*?$HOME%s",
)
SHORT = ("--samples", "3", "--sequence-length", "32")
JUDGED = ("--tokens", "64", "--sequence-length", "32", "--gate", "demo")
LONG = "n" * 255


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})


@pytest.fixture
def said(capsys):
    """Exit code, stdout and stderr of a command line.

    They hold nothing raw for a terminal.
    """

    def run(*arguments):
        capsys.readouterr()
        code = exit_code(cli, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "a bug in quantflow" not in err, err
        assert not any(
            ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 or ord(c) == 0x202E
            for c in out + err
        )
        return code, out, err

    return run


def chain(work, model, text, name):
    """Return every verb with folders of a name."""
    texts = ("--calibration", text["calibration"], *SHORT)
    made = {
        stage: work / stage / name
        for stage in ("measured", "unified", "quantized", "artifact", "report")
    }
    scheme = ("--scheme", "W4A16", "--group-size", "32")
    judged = ("--text", text["heldout"], *JUDGED)
    return [
        ("measure", model, "-o", made["measured"], *texts),
        ("unify", "-m", made["measured"], "-o", made["unified"]),
        (
            "quantize",
            "--no-export",
            model,
            "-o",
            made["quantized"],
            *scheme,
            "--measurement",
            made["unified"],
        ),
        ("export", made["quantized"], "-o", made["artifact"], "--model", model),
        ("validate", made["artifact"], "--baseline", model, *judged, "--report", made["report"]),
        ("verify", made["artifact"]),
        ("inspect", made["artifact"]),
        ("inspect", made["artifact"], "--json"),
        ("diff", made["artifact"], made["artifact"]),
        ("generate", made["artifact"], "--prompt", "value", "--max-new-tokens", "2"),
        (
            "bench",
            made["artifact"],
            "--input-tokens",
            "4",
            "--new-tokens",
            "2",
            "--runs",
            "1",
            "--warmups",
            "0",
        ),
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != NAMES[0])) for name in NAMES]
)
def test_a_folder_of_any_name_goes_through_every_stage(name, llama, text_files, tmp_path, said):
    model = Path(shutil.copytree(llama, tmp_path / "model" / name))
    texts = {
        kind: Path(shutil.copy(path, tmp_path / f"{name}{path.suffix}.{kind}.jsonl"))
        for kind, path in text_files.items()
    }
    for line in chain(tmp_path, model, texts, name):
        code, _, err = said(*line)
        assert code in ((0, 4) if line[0] == "validate" else (0,)), (line[0], err)
    card = (tmp_path / "artifact" / name / "README.md").read_text()
    assert "\x1b" not in card and "\nerror: all is well" not in card
    report = (tmp_path / "report" / name / "report.html").read_text()
    assert "\x1b" not in report  # a newline is a space in HTML


def test_a_name_of_255_bytes_is_refused_before_any_work_and_one_with_room_goes_through(
    llama, text_files, tmp_path, said
):
    for line in chain(tmp_path, llama, text_files, LONG)[:5]:
        code, _, err = said(*line)
        if line[0] in ("measure", "quantize"):
            assert code == 2 and "255 bytes" in err, (line[0], err)
        assert code in (2, 3)
    assert not list(tmp_path.rglob("DONE.json"))
    for line in chain(tmp_path, llama, text_files, "n" * 200):
        code, _, err = said(*line)
        assert code in ((0, 4) if line[0] == "validate" else (0,)), (line[0], err)


def test_a_model_in_a_folder_of_255_bytes_is_read(llama, tmp_path, said):
    model = Path(shutil.copytree(llama, tmp_path / LONG))
    code, _, err = said("quantize", "--no-export", model, "-o", tmp_path / "q", "--scheme", "W8A16")
    assert code == 0, err


@pytest.mark.slow
def test_a_current_folder_whose_name_is_no_utf_8_is_worked_in(llama, tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff\xfe\x1b"
    os.mkdir(folder)
    (tmp_path / "model").symlink_to(llama)
    for line in (
        ("quantize", "../model", "-o", "q", "--scheme", "W8A16", "--export", "a"),
        ("verify", "a"),
        ("generate", "a", "--prompt", "value", "--max-new-tokens", "2"),
        ("verify", "nothing"),
    ):
        words = [sys.executable, "-m", "quantflow", *line]
        result = subprocess.run(words, cwd=folder, capture_output=True, check=False)
        assert result.returncode == (3 if line[1] == "nothing" else 0), result.stderr
        assert b"Traceback" not in result.stderr and b"\x1b" not in result.stdout + result.stderr


def test_a_file_of_a_model_whose_name_is_no_utf_8_or_moves_a_cursor_is_named_or_copied(
    llama, tmp_path, said
):
    for number, name in enumerate((b"\xff.txt", b"\x1b[2J.txt", b"a\nb.txt", b"x" * 255)):
        model = Path(shutil.copytree(llama, tmp_path / f"model-{number}"))
        with open(os.fsencode(model) + b"/" + name, "wb") as file:
            file.write(b"text")
        q, a = tmp_path / f"q-{number}", tmp_path / f"a-{number}"
        code, _, err = said("quantize", "--no-export", model, "-o", q, "--scheme", "W8A16")
        if code == 0:
            code, _, err = said("export", q, "-o", a, "--model", model)
        assert code in (0, 3), (name, err)
        if code == 0:
            assert said("verify", a)[0] == 0 and said("inspect", a)[0] == 0
            assert json.loads((a / "quantflow.json").read_text())["ledger"]
