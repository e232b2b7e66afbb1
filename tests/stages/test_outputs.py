"""The folder that a stage writes.

It is never inside an input, it is the one that a link names, and no foreign file is replaced.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantflow.errors import UsageError
from quantflow.exporting import export as export_stage
from quantflow.files import disk, stage_folder
from quantflow.files.outputs import beside, output_folder
from quantflow.files.verify import verify
from quantflow.reporting.log import logged
from tests.shared import run

TEXT = ("--samples", "3", "--sequence-length", "32")


def listed(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def work(tmp_path_factory, llama, text_files):
    """A model, a measurement, a quantized folder and its artifact."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(llama, folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})
        assert (
            run(
                "measure",
                llama,
                "-o",
                folder / "measured",
                "--calibration",
                text_files["calibration"],
                *TEXT,
            )
            == 0
        )
        assert (
            run("quantize", "--no-export", llama, "-o", folder / "quantized", "--scheme", "W8A16")
            == 0
        )
        assert run("export", folder / "quantized", "-o", folder / "artifact") == 0
    return folder


def lines(work, text_files):
    """Return every verb with an output inside each folder that it reads."""
    model, measured, quantized, artifact = (
        work / name for name in ("model", "measured", "quantized", "artifact")
    )
    text = ("--text", text_files["heldout"], "--tokens", "64", "--sequence-length", "32")
    recipe = {
        "model": str(model),
        "calibration": {
            "source": str(text_files["calibration"]),
            "samples": 3,
            "sequence_length": 32,
        },
        "quantize": [{"name": "a", "scheme": "W8A16"}],
        "validate": {
            "text": str(text_files["heldout"]),
            "tokens": 64,
            "sequence_length": 32,
            "gate": "demo",
        },
    }
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    return [
        ("measure", model, "-o", model / "m", "--calibration", text_files["calibration"], *TEXT),
        ("quantize", model, "-o", model / "q", "--scheme", "W8A16"),
        ("quantize", model, "-o", measured / "q", "--scheme", "W8A16", "--measurement", measured),
        ("quantize", model, "-o", work / "new", "--scheme", "W8A16", "--export", model / "a"),
        ("unify", "-m", measured, "-o", measured / "u"),
        ("export", quantized, "-o", quantized / "a"),
        ("export", quantized, "-o", model, "--model", model),
        ("validate", artifact, "--baseline", model, *text, "--report", artifact / "r"),
        ("validate", artifact, "--baseline", model, *text, "--report", model / "r"),
        ("run", work / "recipe.yaml", "-o", model / "all"),
    ]


def test_an_output_inside_an_input_is_a_usage_error_before_anything_is_written(
    work, text_files, capsys
):
    commands, before = lines(work, text_files), listed(work)
    for line in commands:
        assert run(*line) == 2, line
        assert "which is only read" in capsys.readouterr().err, line
        assert listed(work) == before, line
    verify(work / "artifact")


def test_validate_in_the_artifacts_folder_writes_beside_it(work, text_files, monkeypatch):
    artifact = Path(shutil.copytree(work / "artifact", work / "sub" / "a"))
    monkeypatch.chdir(artifact)
    text = (
        "--text",
        text_files["heldout"],
        "--tokens",
        "64",
        "--sequence-length",
        "32",
        "--gate",
        "demo",
    )
    assert run("validate", ".", "--baseline", work / "model", *text) in (0, 4)
    assert (work / "sub" / "a-validation" / "report.html").is_file()
    verify(artifact)


def test_a_link_as_output_stays_and_the_folder_that_it_names_is_written(
    work, tmp_path, monkeypatch
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "a")
    assert run("export", work / "quantized", "-o", tmp_path / "out", "--model", work / "model") == 0
    assert (tmp_path / "out").is_symlink()
    verify(tmp_path / "disk" / "a")
    (tmp_path / "disk" / "a" / "README.md").unlink()
    assert (
        run(
            "export",
            work / "quantized",
            "-o",
            tmp_path / "out",
            "--model",
            work / "model",
            "--force",
        )
        == 0
    )
    assert (tmp_path / "out").is_symlink()


def test_the_current_folder_is_an_output_and_no_name_is_none(work, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("quantize", work / "model", "-o", "", "--scheme", "W8A16") == 2
    assert (
        "the name of the folder is empty" in capsys.readouterr().err
        and listed(tmp_path / "here") == []
    )
    assert run("quantize", "--no-export", work / "model", "-o", ".", "--scheme", "W8A16") == 0
    assert (tmp_path / "here" / "DONE.json").is_file() and (tmp_path / ".here.lock").is_file()
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert run("export", tmp_path / "here", "-o", ".", "--model", work / "model") == 0
    verify(tmp_path / "there")


def test_the_name_beside_a_folder_is_its_own_wherever_one_stands(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    assert beside("work/4-export/", "-packed") == Path("work/4-export-packed")
    assert (
        beside(".", "-packed") == tmp_path / "a-packed"
        and beside("b/..", "-packed") == tmp_path / "a-packed"
    )


def test_links_in_a_circle_are_a_usage_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="-o"):
        output_folder(tmp_path / "a", reads={})


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_nan_in_a_tensor_that_is_copied_is_an_error_of_measure_and_quantize(
    name, work, text_files, tmp_path, capsys
):
    model = Path(shutil.copytree(work / "model", tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    measure = (
        "measure",
        model,
        "-o",
        tmp_path / "m",
        "--calibration",
        text_files["calibration"],
        *TEXT,
        "--stats",
        "",
    )
    for line in (measure, ("quantize", model, "-o", tmp_path / "q", "--scheme", "W8A16")):
        capsys.readouterr()
        assert run(*line) == 3
        assert f"{name}: 1 values" in capsys.readouterr().err
    assert not list(tmp_path.rglob("DONE.json"))


def link(path, other):
    path.symlink_to(other)


def hard_link(path, other):
    os.link(other, path)


def pipe(path, other):
    os.mkfifo(path)


def folder_link(path, other):
    path.symlink_to(other.parent)


@pytest.mark.parametrize("trap", [link, hard_link, pipe])
@pytest.mark.parametrize("write", ["lock", "log", "temporary"])
def test_a_link_or_a_pipe_where_we_write_is_refused_and_what_it_names_keeps_its_content(
    trap, write, tmp_path, capsys
):
    victim = tmp_path / "elsewhere" / "thesis.tex"
    victim.parent.mkdir()
    victim.write_text("years")
    name = {"lock": ".out.lock", "log": "out.log", "temporary": ".file.tmp"}[write]
    trap(tmp_path / name, victim)
    if write == "log":  # a convenience: it is said, and the run goes on
        with logged(tmp_path / "out.log", "title") as log:
            log.write("line")
        assert "it is not written to" in capsys.readouterr().err
    elif write == "lock":
        with pytest.raises(OSError, match="not written to"), stage_folder.locked(tmp_path / "out"):
            pass
    else:
        with pytest.raises(OSError, match="not written to"):
            disk.write_file(tmp_path / name, b"data")
    assert victim.read_text() == "years"


def test_a_link_in_place_of_the_temporary_folder_goes_and_what_it_names_stays(tmp_path):
    victim = tmp_path / "elsewhere" / "thesis.tex"
    victim.parent.mkdir()
    victim.write_text("years")
    for name in (".out.tmp", ".out.old"):
        folder_link(tmp_path / name, victim)
    with stage_folder.publish(tmp_path / "out", stage="s", inputs={}) as temporary:
        assert not temporary.is_symlink()
        disk.write_file(temporary / "a", b"data")
    assert (tmp_path / "out" / "a").read_bytes() == b"data"
    assert listed(tmp_path / "elsewhere") == ["thesis.tex"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("validate.gate=nosuch", "nosuch"),
        ("validate.tokens=0", "tokens=0"),
        ("validate.tokens=1000000000000000000000", "tokens=1000000000000000000000"),
        ("validate.sequence_length=1", "sequence_length=1"),
        ("calibration.sequence_length=0", "sequence_length=0"),
        ("calibration.samples=0", "samples=0"),
        ("measure.ranks=0", "ranks=0"),
        ("measure.stats=[amx]", "amx"),
        ("seed=100000000000000000000", "seed=100000000000000000000"),
        ("export.format=foo", "'foo'"),
        ("export.shard_size=junk", "'junk'"),
        (
            "export.scale_method=maxabs_hw",
            "scale_method maxabs_hw beside format compressed-tensors",
        ),
        ("unify.groups=[xx]", "'xx'"),
        ("unify.groups=['01']", "unknown 1"),
        ("resources.max_memory=99999999999999999999GiB", "size"),
        ("resources.max_disk=" + "9" * 400 + "B", "size"),
    ],
)
def test_run_finds_every_mistake_of_a_recipe_before_its_first_stage(
    setting, said, work, text_files, tmp_path, capsys
):
    lines(work, text_files)
    assert run("run", work / "recipe.yaml", "-o", tmp_path / "all", "--set", setting) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}\n", b'{"input_ids": [5]}\n'])
def test_run_finds_an_unusable_evaluation_text_before_its_first_stage(
    content, work, text_files, tmp_path, capsys
):
    lines(work, text_files)
    (tmp_path / "t.jsonl").write_bytes(content)
    assert (
        run(
            "run",
            work / "recipe.yaml",
            "-o",
            tmp_path / "all",
            "--set",
            f"validate.text={tmp_path / 't.jsonl'}",
        )
        == 3
    )
    assert not (tmp_path / "all").exists()
