"""Verbs that read without computing: inspect, verify, diff and --help.

They import no torch, and no damage gets past them.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from quantflow.errors import IntegrityError
from quantflow.exporting import export as export_stage
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from tests.shared import run

HEAVY = ("torch", "transformers", "safetensors", "numpy", "tokenizers")
RUN_ALL = f"""
import json, sys
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli import cli
codes = [exit_code(cli, line) for line in json.loads(sys.argv[1])]
print(json.dumps([codes, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)
"""


def commands(group, prefix=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


@pytest.fixture(scope="module")
def work(tmp_path_factory, llama, text_files):
    """A measurement, an artifact, and another of the same model."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        assert (
            run(
                "measure",
                llama,
                "-o",
                folder / "measured",
                "--calibration",
                text_files["calibration"],
                "--samples",
                "4",
            )
            == 0
        )
        for name, options in {"a": ("--group-size", "32"), "b": ("--group-size", "16")}.items():
            scheme = ("--scheme", "W4A16", "--algorithm", "rtn", "--name", "int4", *options)
            assert run("quantize", "--no-export", llama, "-o", folder / f"q{name}", *scheme) == 0
            assert (
                run("export", folder / f"q{name}", "-o", folder / name, "--shard-size", "64KiB")
                == 0
            )
    return folder


@pytest.fixture
def artifact(tmp_path, work):
    return Path(shutil.copytree(work / "a", tmp_path / "a"))


def test_help_inspect_verify_and_diff_import_nothing_heavy(work, llama):
    lines = [
        *(["--help"], ["--version"], ["measure", "--help"], ["run", "--help"]),
        *(["inspect", str(path)] for path in (llama, work / "a", work / "measured")),
        *(
            ["verify", str(work / "a")],
            ["diff", str(work / "a"), str(work / "b")],
            ["verify", str(llama)],
        ),
    ]
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    codes, imported = json.loads(result.stderr.splitlines()[-1])
    assert codes == [0] * 9 + [3]
    assert imported == []


def test_help_is_there_at_once():
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "quantflow", "--help"], capture_output=True, text=True, check=False
    )
    elapsed = time.monotonic() - begin
    print(f"quantflow --help: {elapsed:.2f} s")
    assert result.returncode == 0 and "validate" in result.stdout and result.stderr == ""
    assert elapsed < 5


CONVERSATIONS = (("chat",), ("serve",))  # they go on until they are ended, and have no result


@pytest.mark.parametrize("line", list(commands(cli)))
def test_every_verb_explains_itself_with_an_example(capsys, line):
    assert run(*line, "--help") == 0
    text = capsys.readouterr().out
    assert f"Example: quantflow {' '.join(line)} " in text
    assert "--debug" in text
    assert "--json" in text or line in CONVERSATIONS


def test_the_help_lists_every_stage(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for verb in (
        "run",
        "measure",
        "quantize",
        "unify",
        "export",
        "validate",
        "generate",
        "bench",
        "inspect",
        "verify",
        "diff",
        "calibration",
    ):
        assert f"\n  {verb} " in text


def test_a_reader_that_closes_the_pipe_is_no_error(llama):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quantflow", "inspect", str(llama)]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_intact_artifact_verifies_and_says_what_was_checked(capsys, work):
    assert run("verify", work / "a", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    manifest = json.loads((work / "a" / "quantflow.json").read_text())
    assert report["digest"] == manifest["digest"] and report["files"] == len(manifest["files"])
    assert run("verify", work / "a") == 0
    assert capsys.readouterr().out.startswith("intact: ")


def test_one_flipped_bit_in_any_file_is_found_by_verify_and_by_the_runtime(capsys, artifact):
    generator = random.Random(0)
    hashed = [*json.loads((artifact / "quantflow.json").read_text())["files"], "quantflow.json"]
    assert (
        len([name for name in hashed if name.endswith(".safetensors")]) > 1
        and "config.json" in hashed
    )
    for name in hashed:
        path = artifact / name
        intact = path.read_bytes()
        for position in (0, len(intact) - 1, *(generator.randrange(len(intact)) for _ in range(4))):
            data = bytearray(intact)
            data[position] ^= 1 << generator.randrange(8)
            path.write_bytes(data)
            capsys.readouterr()
            assert run("verify", artifact) == 7, (name, position)
            assert name in capsys.readouterr().err.splitlines()[0]
        with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
            load(artifact)
        path.write_bytes(intact)
    assert run("verify", artifact) == 0
    load(artifact)


@pytest.mark.parametrize("change", ["missing", "extra", "link"])
def test_a_missing_an_extra_and_a_linked_file_are_found(capsys, artifact, change):
    path = artifact / ("evil.py" if change == "extra" else "tokenizer.json")
    if change == "extra":
        path.write_text("")
    elif change == "missing":
        path.unlink()
    else:
        path.rename(artifact.parent / path.name)
        path.symlink_to(artifact.parent / path.name)
    assert run("verify", artifact) == 7
    assert path.name in capsys.readouterr().err
    assert run("generate", artifact, "--prompt", "value") == 7


def test_the_card_may_be_edited(artifact):
    (artifact / "README.md").write_text("my own words")
    assert run("verify", artifact) == 0


def test_inspect_says_what_a_folder_is(capsys, work, llama):
    found = {}
    for path in (llama, work / "a", work / "measured", work / "measured" / "rank-000-of-001"):
        assert run("inspect", path, "--json") == 0
        found[path.name] = json.loads(capsys.readouterr().out)
    model, artifact, ranks, rank = found.values()
    assert (model["kind"], model["model_type"], model["tensors"]) == ("checkpoint", "llama", 21)
    assert (artifact["kind"], artifact["format"], artifact["recipe"]["name"]) == (
        "artifact",
        "pack-quantized",
        "int4",
    )
    assert artifact["source_bytes"]["source"] == model["bytes"]
    assert (ranks["kind"], list(ranks["ranks"])) == ("measurements", ["rank-000-of-001"])
    assert (rank["kind"], rank["counts"]["samples"]) == ("measurement", 4)


def test_inspect_tells_people_the_scheme_of_equal_linears_once(capsys, work):
    assert run("inspect", work / "a") == 0
    text = capsys.readouterr().out
    # as asked for, and as resolved
    assert "(14 alike)" in text and text.count("group_size: 32") == 2
    assert len(text.splitlines()) < 150


def test_diff_tells_the_fields_that_differ_and_nothing_for_the_same(capsys, work):
    assert run("diff", work / "a", work / "a") == 0
    assert capsys.readouterr().out == "no difference\n"
    assert run("diff", work / "a", work / "b", "--json") == 0
    rows = {row["path"]: (row["left"], row["right"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["recipe.group_size"] == ("32", "16")
    assert not any(path.startswith("source") for path in rows)


def test_calibration_text_is_counted(capsys, llama, tmp_path):
    (tmp_path / "text.txt").write_text("value scale\n\nvalue scale\n\nround " + "group " * 50)
    assert (
        run(
            "calibration",
            "inspect",
            tmp_path / "text.txt",
            "--tokenizer",
            llama,
            "--sequence-length",
            "10",
            "--json",
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["duplicates"], summary["truncated"]["documents"]) == (
        3,
        1,
        1,
    )
    assert summary["bos"] == {"0": 0, "1": 3, "2": 0}
