"""The verbs one after the other, and all of them as `run`.

Tested are their output, their files, and the files that they leave alone.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantflow.exporting import export as export_stage
from quantflow.measuring import measure as measure_stage
from quantflow.measuring.job import MeasureJob
from quantflow.planning import resources
from quantflow.planning.recipe import Calibration
from quantflow.reporting.progress_line import ProgressLine
from tests.shared import run

GATE = "thresholds: {ppl_ratio: 100, mean_kld: 100, kld_p999: 100, top1_agreement: 0.0}\n"
SCHEME = ("--scheme", "W4A16", "--group-size", "32", "--name", "int4")


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def as_json(capsys):
    """Run a verb with --json, check that stdout is one document, and return it with stderr."""

    def call(*arguments):
        capsys.readouterr()
        assert run(*arguments, "--json") == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


@pytest.fixture(scope="module")
def lines(tmp_path_factory, llama, text_files):
    """The command lines of the stages, in order, in one working folder."""
    work = tmp_path_factory.mktemp("work")
    (work / "gate.yaml").write_text(GATE)
    validate = (
        "--text",
        text_files["heldout"],
        "--tokens",
        "130",
        "--sequence-length",
        "64",
        "--gate",
        work / "gate.yaml",
    )
    return {
        "measure": (
            "measure",
            llama,
            "-o",
            work / "1",
            "--calibration",
            text_files["calibration"],
            "--samples",
            "6",
        ),
        "quantize": ("quantize", llama, "-o", work / "2", "--measurement", work / "1", *SCHEME),
        "export": ("export", work / "2", "-o", work / "4"),
        "validate": ("validate", work / "4", "--baseline", llama, *validate),
    }


@pytest.fixture(scope="module")
def done(lines):
    """The working folder after every stage ran once.

    Export proves the artifact in a fresh process.
    """
    for line in lines.values():
        assert run(*line) == 0
    return lines["export"][3].parent


def test_every_stage_says_up_to_date_the_second_time_and_writes_nothing(as_json, lines, done):
    before = tree(done)
    for name, line in lines.items():
        result, err = as_json(*line)
        assert "up to date" in err and name in err
        if name == "validate":
            assert result["outcome"] == "pass"
        else:
            assert result == {"folder": str(line[3])}
    after = tree(done)
    # the hash of a file that was very young is kept the second time
    beside = (".lock", ".log", ".hashes.json")
    assert {name: after[name] for name in after if not name.endswith(beside)} == {
        name: before[name] for name in before if not name.endswith(beside)
    }


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        ("measure", "quantize {llama} -o DIR --scheme W4A16 --measurement {work}/1"),
        ("quantize", "export {work}/2 -o DIR"),
        ("export", "validate {work}/4 --baseline MODEL"),
    ],
)
def test_a_stage_says_the_command_that_comes_next_beside_its_result(
    capsys, lines, done, llama, name, follows
):
    assert run(*lines[name]) == 0
    told = f"next: quantflow {follows.format(llama=llama, work=done)}"
    assert told in capsys.readouterr().err.splitlines()
    for silent in ("-q", "--json"):
        assert run(*lines[name], silent) == 0
        assert "next: " not in capsys.readouterr().err


def test_without_json_a_stage_prints_its_folder_and_validate_a_table(capsys, lines, done):
    assert run(*lines["quantize"]) == 0
    assert capsys.readouterr().out == f"{done / '2'}\n"
    assert run(*lines["validate"]) == 0
    out = capsys.readouterr().out
    assert (
        "int4" in out
        and "pass" in out
        and out.splitlines()[-1] == f"report: {done / '4-validation' / 'report.html'}"
    )
    assert (done / "4-validation" / "report.html").is_file()


def test_the_whole_chain_leaves_what_the_next_stage_reads_and_nothing_half(done):
    names = {path.name for path in done.iterdir() if not path.name.endswith((".lock", ".log"))}
    assert names == {"1", "2", "4", "4-validation", "gate.yaml", "validation-cache"}
    assert {"config.json", "model.safetensors", "quantflow.json", "README.md"} <= {
        path.name for path in (done / "4").iterdir()
    }
    hidden = {path.name for path in done.rglob(".*") if not path.name.endswith((".lock", ".log"))}
    # what is known of the source, and what a folder was made from
    assert hidden <= {".hashes.json", ".inputs.json"}
    validation = json.loads((done / "4-validation" / "validation.json").read_text())
    assert validation["digest"] == json.loads((done / "4" / "quantflow.json").read_text())["digest"]


def test_no_path_host_or_time_reaches_the_artifact(done, llama, tmp_path_factory):
    for name in ("quantflow.json", "config.json", "README.md"):
        text = (done / "4" / name).read_text()
        for place in (done, llama, llama.parent, tmp_path_factory.getbasetemp(), Path.home()):
            assert f"{place}/" not in text and f'{place}"' not in text
        for word in ("seconds", "duration", "hostname", '"time', "threads"):
            assert word not in text


def test_another_place_and_another_day_give_the_same_digest(done, llama, text_files, tmp_path):
    copied = Path(shutil.copytree(llama, tmp_path / "elsewhere" / llama.name))
    text = Path(shutil.copy(text_files["calibration"], tmp_path / "renamed.jsonl"))
    assert (
        run("measure", copied, "-o", tmp_path / "m", "--calibration", text, "--samples", "6") == 0
    )
    assert (
        run("quantize", copied, "-o", tmp_path / "q", "--measurement", tmp_path / "m", *SCHEME) == 0
    )
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    for name in ("quantflow.json", "model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (done / "4" / name).read_bytes()


def test_progress_goes_to_stderr_and_quiet_silences_it(as_json, lines, llama, tmp_path):
    line = ("quantize", "--no-export", llama, "-o", tmp_path / "q", "--scheme", "W8A16")
    result, err = as_json(*line, "-v")
    assert result == {"folder": str(tmp_path / "q")} and "quantize w8a16: layer 2 of 2" in err
    assert as_json(*line)[1] == "quantize w8a16: up to date\n"
    assert as_json(*line, "-q")[1] == ""


def test_a_dry_run_writes_nothing_and_says_what_it_would_do(
    as_json, capsys, llama, text_files, tmp_path
):
    (tmp_path / "r.yaml").write_text(f"model: {llama}\nquantize: [{{name: a, scheme: W8A16}}]\n")
    for line in (
        ("measure", llama, "-o", tmp_path / "m", "--calibration", text_files["calibration"]),
        ("quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16"),
        ("unify", "-m", tmp_path / "m", "-o", tmp_path / "u"),
        ("export", tmp_path / "q", "-o", tmp_path / "a"),
        ("validate", tmp_path / "a", "--baseline", llama, "--report", tmp_path / "v"),
        ("run", tmp_path / "r.yaml", "-o", tmp_path / "o"),
    ):
        said, err = as_json(*line, "--dry-run")
        assert isinstance(said, dict) and said and err == ""
        assert run(*line, "--dry-run") == 0
        assert capsys.readouterr().out.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_flags_win_over_set_and_set_over_the_recipe_in_quantize(as_json, llama, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: other\nseed: 5\nquantize: [{name: a, scheme: W8A16}, {name: b, scheme: W4A16}]\n"
    )
    line = ("quantize", llama, "-o", tmp_path / "q", "--dry-run")
    recipe = ("--recipe", tmp_path / "r.yaml")

    def entry(*more):
        job = as_json(*line, *more)[0]
        assert job["model"] == str(llama)
        return *(job["entry"][key] for key in ("name", "scheme", "group_size")), job["seed"]

    assert entry(*recipe) == ("a", "W8A16", None, 5)
    assert entry(*recipe, "--name", "b", "--set", "quantize.1.group_size=32") == (
        "b",
        "W4A16",
        32,
        5,
    )
    assert entry(
        *recipe, "--name", "b", "--set", "quantize.1.group_size=32", "--group-size", "16"
    ) == ("b", "W4A16", 16, 5)
    assert entry(*recipe, "--scheme", "FP8", "--seed", "7") == ("a", "FP8", None, 7)
    assert entry("--scheme", "W4A16", "--set", "quantize.0.group_size=64") == (
        "w4a16",
        "W4A16",
        64,
        0,
    )


def test_measure_takes_its_recipe_under_set_under_flags(as_json, llama, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: other\nseed: 5\ncalibration: {source: a.txt, samples: 1, sequence_length: 11}\n"
    )
    line = ("measure", llama, "-o", tmp_path / "m", "--recipe", tmp_path / "r.yaml", "--dry-run")
    job = as_json(
        *line,
        "--set",
        "calibration.samples=2",
        "--set",
        "seed=6",
        "--seed",
        "7",
        "--stats",
        "amax,min_max",
    )[0]
    assert (
        job["model"] == str(llama)
        and job["seed"] == 7
        and job["options"]["stats"] == ["amax", "min_max"]
    )
    assert job["calibration"] == {
        "source": "a.txt",
        "samples": 2,
        "sequence_length": 11,
        "pack": None,
        "synthetic": 0,
    }


def test_generate_streams_exactly_the_text_that_it_returns(as_json, capsys, done):
    line = ("generate", done / "4", "--prompt", "value scalé", "--max-new-tokens", "24")
    result, err = as_json(*line)
    (output,) = result["outputs"]
    assert len(err.splitlines()) == 1 and err.startswith("generate: threads: ")
    assert len(output["tokens"]) <= 24
    capsys.readouterr()
    assert run(*line) == 0
    assert capsys.readouterr().out == f"{output['prompt']}{output['text']}\n"


def test_quantize_reads_the_word_of_plan_and_says_so(as_json, llama, tmp_path, capsys):
    line = ("quantize", llama, "-o", tmp_path / "q", "--dry-run")
    options = ("--scheme", "W4A16", "--algorithm", "gptq", "--target-bpw", "4.25")
    assert as_json(*line, "--for", "W4A16:gptq@4.25") == as_json(*line, *options)
    assert run(*line, "--for", "W4A16:gptq") == 0
    said = "quantize: --for W4A16:gptq is read as --scheme W4A16 --algorithm gptq\n"
    assert capsys.readouterr().err == said
    assert run(*line, "--for", "W4A16:gptq", "-q") == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--for", "W4A16,FP8"), "--for W4A16,FP8 names 2 artifacts, quantize makes one"),
        (("--for", "W4A16", "--scheme", "FP8"), "--for W4A16 beside --scheme"),
        (("--for", "W4A16:gptq", "--algorithm", "rtn"), "--for W4A16:gptq beside --algorithm"),
        (("--for", ""), "name each scheme once"),
    ],
)
def test_quantize_refuses_several_artifacts_and_two_words_for_one(
    llama, tmp_path, capsys, options, cause
):
    assert run("quantize", llama, "-o", tmp_path / "q", *options) == 2
    assert cause in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_quantize_that_exports_makes_what_the_two_verbs_make(as_json, done, lines, llama, tmp_path):
    ours = (
        "quantize",
        llama,
        "-o",
        tmp_path / "2",
        "--measurement",
        done / "1",
        *SCHEME,
        "--export",
        tmp_path / "4",
    )
    found, err = as_json(*ours)
    assert found == {"folder": str(tmp_path / "4")}
    assert "proving it in a fresh process" in err
    for name in ("2", "4"):
        mine, other = (
            {path.name for path in (folder / name).iterdir()} - {".hashes.json"}
            for folder in (tmp_path, done)
        )
        assert mine == other
    digests = [
        json.loads((folder / "4" / "quantflow.json").read_text())["digest"]
        for folder in (tmp_path, done)
    ]
    assert digests[0] == digests[1]
    _, err = as_json(*ours)
    assert err.count("up to date") == 2


@pytest.mark.slow
def test_the_proof_starts_before_anything_is_imported_or_measured_and_ends_with_the_verb(
    llama, tmp_path
):
    """Both processes import torch at once.

    The proof's own waits for its order, and knows nothing of the artifact yet.
    """
    script = """
import subprocess, sys
import quantflow.distributed.launch  # whose annotations name the class that is replaced
real, started = subprocess.Popen, []
def popen(command, **options):
    started.append((command[1:], "torch" in sys.modules, real(command, **options)))
    return started[-1][-1]
subprocess.Popen = popen
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli import cli
code = exit_code(cli, sys.argv[1:])
((command, late, process),) = started
print(code, *command, late, process.poll() is not None)
"""
    text = tmp_path / "text.txt"
    text.write_text("a scale and a value\n\n" * 8)
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "2",
        "--scheme",
        "W4A16",
        "--group-size",
        "5",
        "--export",
        tmp_path / "4",
    )
    for more in ((), ("--calibration", text, "--measurement", tmp_path / "1")):
        called = [sys.executable, "-c", script, *map(str, (*line, *more))]
        # ends with 2: no 5 divides the features
        found = subprocess.run(called, capture_output=True, text=True)
        assert found.stdout.splitlines() == [
            "2 -P -m quantflow.exporting.proof_process False True"
        ], found.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--dry-run",), 0),
        (("--group-size", "5", "--max-memory", "9GB"), 2),
        (("--group-size", "5", "--disk-offload"), 2),
    ],
)
def test_no_proof_waits_beside_a_dry_run_or_where_memory_is_bounded(
    monkeypatch, llama, tmp_path, options, code
):
    monkeypatch.setattr(subprocess, "Popen", None)
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "2",
        "--scheme",
        "W4A16",
        "--algorithm",
        "rtn",
        "--export",
        tmp_path / "4",
    )
    assert run(*line, *options) == code


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--export", "2"), "the artifact's folder and the quantized one"),
        (("--export", "4", "--set", "export.format=inc"), "format 'inc'"),
    ],
)
def test_quantize_that_cannot_export_is_refused_before_it_quantizes(
    capsys, llama, tmp_path, monkeypatch, options, told
):
    monkeypatch.chdir(tmp_path)
    assert run("quantize", llama, "-o", "2", "--scheme", "FP8_DYNAMIC", *options) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_quantize_that_exports_is_refused_for_shards_before_anything_is_read(capsys, tmp_path):
    wanted = (
        "quantize",
        "nowhere",
        "-o",
        tmp_path / "2",
        "--scheme",
        "FP8_DYNAMIC",
        "--ranks",
        "2",
    )
    assert run(*wanted, "--export", tmp_path / "4") == 2
    assert "--export with --ranks 2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sampling_follows_its_seed(as_json, done):
    line = (
        "generate",
        done / "4",
        "--prompt",
        "value",
        "--max-new-tokens",
        "12",
        "--temperature",
        "2.0",
    )
    first, second, other = (
        as_json(*line, "--seed", seed)[0]["outputs"][0]["tokens"] for seed in (1, 1, 2)
    )
    assert first == second != other


def test_ranks_are_unified_once_and_by_the_groups_of_flag_or_recipe(
    as_json, llama, text_files, tmp_path
):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6)
    for rank in range(2):
        job = MeasureJob(model=llama, output=tmp_path / "m", calibration=calibration)
        measure_stage._measure_rank(job, ProgressLine(quiet=True), rank=rank, world=2)
    line = ("unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    result, err = as_json(*line, "-g", "01")
    assert (result["folder"], result["mesh"]["world"], err) == (str(tmp_path / "u"), 1, "")
    assert "up to date" in as_json(*line)[1]  # no group is all ranks into one
    assert [path.name for path in (tmp_path / "u").iterdir() if path.is_dir()] == [
        "rank-000-of-001"
    ]
    as_json(
        "unify", "-m", tmp_path / "m", "-o", tmp_path / "two", "--set", "unify.groups=['0', '1']"
    )
    assert len([path for path in (tmp_path / "two").iterdir() if path.is_dir()]) == 2
    assert (
        run(
            "quantize",
            llama,
            "-o",
            tmp_path / "q",
            "--scheme",
            "FP8",
            "--measurement",
            tmp_path / "u",
        )
        == 0
    )


def test_run_does_what_the_verbs_do_and_is_up_to_date_afterwards(
    as_json, done, llama, text_files, tmp_path
):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"model: {llama}\ncalibration: {{source: {text_files['calibration']}, samples: 6}}\n"
        # as the verb does without --for
        "measure: {stats: [amax, channel_amax, min_max, mean_abs, histogram]}\n"
        "quantize: [{name: int4, scheme: W4A16, group_size: 32}]\n"
        f"validate: {{text: {text_files['heldout']}, tokens: 130, sequence_length: 64, gate: "
        f"{done / 'gate.yaml'}}}\n"
    )
    results, _ = as_json("run", recipe, "-o", tmp_path / "o")
    assert [(result["artifact"], result["outcome"]) for result in results] == [("int4", "pass")]
    assert (tmp_path / "o" / "report.html").is_file()
    manifests = [
        json.loads((path / "quantflow.json").read_text())
        for path in (done / "4", tmp_path / "o" / "4-export" / "int4")
    ]
    assert (
        manifests[0]["files"] == manifests[1]["files"]
        and manifests[0]["digest"] == manifests[1]["digest"]
    )
    again, err = as_json("run", recipe, "-o", tmp_path / "o")
    assert again == results and err.count("up to date") == 4


def test_run_expects_a_failure_where_the_recipe_says_so(
    llama, text_files, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    recipe, gate = tmp_path / "mine.yaml", tmp_path / "strict.yaml"
    gate.write_text("thresholds: {ppl_ratio: 0, mean_kld: 0, kld_p999: 0, top1_agreement: 1}\n")
    text = (
        f"model: {llama}\ncalibration: {{source: {text_files['calibration']}, samples: 4}}\n"
        "quantize: [{name: a, scheme: W8A16, expect: EXPECT}]\n"
        f"validate: {{text: {text_files['heldout']}, tokens: 130, sequence_length: 64, gate: "
        f"{gate}}}\n"
    )
    recipe.write_text(text.replace("EXPECT", "fail"))
    assert run("run", recipe, "-o", tmp_path / "o") == 0
    assert "fail (expected)" in capsys.readouterr().out
    recipe.write_text(text.replace("EXPECT", "pass"))
    assert run("run", recipe, "-o", tmp_path / "o") == 4


def test_measuring_for_gptq_keeps_the_token_ids_alone_and_gives_the_same_artifact(
    lines, done, tmp_path
):
    assert (
        run(*lines["measure"][:3], tmp_path / "1", *lines["measure"][4:], "--for", "W4A16:gptq")
        == 0
    )
    rank = tmp_path / "1" / "rank-000-of-001"
    meta = json.loads((rank / "measurement.json").read_text())
    assert meta["observers"] == [] and meta["calibration"]["samples"] == 6
    assert (
        run(
            "quantize",
            lines["quantize"][1],
            "-o",
            tmp_path / "2",
            "--measurement",
            tmp_path / "1",
            *SCHEME,
        )
        == 0
    )
    for index in range(2):
        name = f"layers/{index:05d}.safetensors"
        assert (tmp_path / "2" / name).read_bytes() == (done / "2" / name).read_bytes()


def test_quantize_measures_first_where_it_is_given_text_and_makes_the_same(
    lines, done, text_files, tmp_path, capsys
):
    text = ("--calibration", text_files["calibration"], "--set", "calibration.samples=6")
    line = ("quantize", lines["quantize"][1], "-o", tmp_path / "2", *text, *SCHEME)
    assert run(*line, "--measurement", tmp_path / "1", "--ranks", "2") == 2
    assert (
        run(*line, "--measurement", tmp_path / "1", "--dry-run") == 0
        and not (tmp_path / "1").exists()
    )
    capsys.readouterr()
    assert run(*line, "--measurement", tmp_path / "1") == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "2")]
    for index in range(2):
        name = f"layers/{index:05d}.safetensors"
        assert (tmp_path / "2" / name).read_bytes() == (done / "2" / name).read_bytes()
    before = tree(tmp_path / "1" / "rank-000-of-001") | tree(tmp_path / "2")
    assert run(*line, "--measurement", tmp_path / "1") == 0
    assert tree(tmp_path / "1" / "rank-000-of-001") | tree(tmp_path / "2") == before


def test_limits_change_no_byte_of_what_is_made(lines, done, tmp_path, monkeypatch):
    line = ("quantize", lines["quantize"][1], "--measurement", done / "1", *SCHEME)
    assert run(*line, "-o", tmp_path / "tenth", "--disk-offload", "--max-disk", "1GB") == 0
    given = resources.grant
    monkeypatch.setattr(
        resources, "grant", lambda *a, **k: replace(given(*a, **k), workers=1, in_flight=1)
    )
    assert run(*line, "-o", tmp_path / "one", "--max-memory", "8GB") == 0
    for folder in ("tenth", "one"):
        for index in range(2):
            name = f"layers/{index:05d}.safetensors"
            assert (tmp_path / folder / name).read_bytes() == (done / "2" / name).read_bytes()
