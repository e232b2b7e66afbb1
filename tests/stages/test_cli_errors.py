"""A user's mistake ends with the right exit code and no traceback.

One line says what disagrees, one what to do.

Longer than 300 lines because every mistake of a command line stands here, once, over one set of
fixtures.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.exporting import export as export_stage
from quantflow.measuring import measure as measure_stage
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration
from quantflow.quantizing import missing_statistics
from quantflow.reporting.progress_line import ProgressLine
from tests.shared import run

THRESHOLDS = "thresholds: {{ppl_ratio: {0}, mean_kld: {0}, kld_p999: {0}, top1_agreement: {1}}}\n"


@pytest.fixture
def refused(capsys):
    """Run a command line, check its exit code and the two lines, and return them as one text."""

    def check(code, *arguments):
        capsys.readouterr()
        assert run(*arguments) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert out == "" or code == 4  # a failed gate prints its table
        told = [line for line in err.splitlines() if line.startswith(("error:", "  fix:"))]
        assert [line[:6] for line in told] == ["error:", "  fix:"] and err.splitlines()[-2:] == told
        assert all(len(line) > 12 for line in told)
        assert "Traceback" not in err and "a bug in quantflow" not in err
        return "\n".join(told)

    return check


@pytest.fixture(scope="module")
def work(tmp_path_factory, llama, text_files):
    """A measurement, a quantized folder (rtn, no statistics) and its artifact."""
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
            )
            == 0
        )
        smooth = ("--scheme", "W8A8", "--measurement", folder / "measured")
        assert run("quantize", llama, "-o", folder / "quantized", *smooth) == 0
        assert run("export", folder / "quantized", "-o", folder / "artifact") == 0
    return folder


@pytest.fixture
def copy(tmp_path, llama):
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def missing(model):
    shutil.rmtree(model)


def empty(model):
    for path in model.iterdir():
        path.unlink()


def truncated(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pointer(model):
    (model / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    )


def not_a_number(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def pickled(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def changed_config(model, **values):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def quantized(model):
    changed_config(model, quantization_config={"quant_method": "awq", "bits": 4})
    path = model / "model.safetensors"
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(8, 1, dtype=torch.int32)}
    save_file(load_file(path) | packed, path, {"format": "pt"})


def unsupported(model):
    changed_config(model, model_type="t5", architectures=["T5ForConditionalGeneration"])


@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        (missing, 3, "model"),
        (empty, 3, "empty"),
        (truncated, 3, "model.safetensors"),
        (pointer, 3, "git lfs pull"),
        (not_a_number, 3, "model.layers.1.mlp.up_proj"),
        (pickled, 3, "save_pretrained"),
        (quantized, 3, "awq"),
        (unsupported, 6, "t5"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_by_every_verb_that_reads_it(
    refused, copy, tmp_path, text_files, work, damage, code, said
):
    damage(copy)
    for line in (
        ("measure", copy, "-o", tmp_path / "m", "--calibration", text_files["calibration"]),
        ("quantize", copy, "-o", tmp_path / "q", "--scheme", "W8A16"),
        (
            "validate",
            work / "artifact",
            "--baseline",
            copy,
            "--text",
            text_files["heldout"],
            "--report",
            tmp_path / "r",
        ),
    ):
        if line[0] != "validate":
            assert said in refused(code, *line)
        elif (
            damage is not_a_number
        ):  # readable, so what validate finds is that these are other weights
            assert "was made from other weights" in refused(3, *line)
        elif damage is not unsupported:  # a baseline needs no graph, and t5 has other tensors
            assert said in refused(code, *line)
    assert not (tmp_path / "m" / "rank-000-of-001").exists() and not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "no document"),
        ("a.txt", b" \n\n \n", "no document"),
        ("a.jsonl", b'{"input_ids": [5]}\n', "2 tokens are needed"),
        ("a.txt", b"good\xffbad", "UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2"),
        ("a.jsonl", b'{"txt": "fine"}\n', "give each row text, messages, "),
        ("a.csv", b"text\n", "csv"),
    ],
)
def test_calibration_text_that_cannot_be_used_is_refused(
    refused, llama, tmp_path, name, content, said
):
    (tmp_path / name).write_bytes(content)
    told = refused(3, "measure", llama, "-o", tmp_path / "m", "--calibration", tmp_path / name)
    assert said in told and (name in told or "calibration" in told)


def test_calibration_text_that_is_missing_is_refused(refused, llama, tmp_path):
    assert "nothing.txt" in refused(
        3, "measure", llama, "-o", tmp_path / "m", "--calibration", tmp_path / "nothing.txt"
    )
    assert "no such text" in refused(
        3, "measure", llama, "-o", tmp_path / "m", "--calibration", "nothing"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--scheme", "W4A16", "--algorithm", "rtn", "--group-size", "128"),
            "in_features=64 is not a multiple of group_size=128",
        ),
        (("--scheme", "W4A16", "--algorithm", "rtn", "--group-size", "48"), "group_size=48"),
        (("--scheme", "W8A16", "--ignore", "re:.*quack"), "'re:.*quack' matches none"),
        (("--scheme", "W8A16", "--ignore", "re:.*"), "none of 14 linears"),
        (("--scheme", "W4A61"), "did you mean 'W4A16'"),
        (("--scheme", "FP8_DYNAMIC", "--algorithm", "hqq"), "hqq chooses integers"),
        (("--scheme", "W8A16", "--algorithm", "gtpq"), "did you mean 'gptq'"),
        (("--scheme", "W8A8", "--smoothquant", "1.5"), "alpha=1.5"),
        (("--scheme", "W8A8", "--smoothquant", "half"), "alpha='half'"),
        (("--scheme", "W4A16", "--group-size", "32", "--ranks", "2"), "hessian_sum"),
        (("--scheme", "FP8", "--ranks", "2"), "needs amax"),
        (("--scheme", "W8A16", "--export", "a", "--no-export"), "--export a beside --no-export"),
        (("--scheme", "W8A16", "--export", "a", "--ranks", "2"), "--export with --ranks 2"),
        (
            ("--scheme", "FP8", "--calibration", "t.txt", "--ranks", "2"),
            "--calibration t.txt with --ranks 2",
        ),
        (("--scheme", "W8A16", "--sceme", "FP8"), "--sceme"),
        (("--scheme", "W8A16", "--set", "sede=1"), "did you mean 'seed'"),
        (("--scheme", "W8A16", "--set", "seed=[1"), "not YAML"),
        (
            ("--scheme", "W8A16", "--set", "quantize.0.transforms=[{smoothquant: 0.5}]"),
            "0.5 is not a mapping",
        ),
        ((), "--scheme"),
        (("--recipe", "tiny-lama"), "did you mean 'tiny-llama'"),
        (("--recipe", "tiny-llama", "--name", "w4a16-bst"), "did you mean 'w4a16-best'"),
        (("--set", "quantize=[]", "--recipe", "tiny-llama"), "no entry"),
    ],
)
def test_a_quantize_that_cannot_be_is_a_usage_error(refused, llama, tmp_path, options, said):
    assert said in refused(2, "quantize", llama, "-o", tmp_path / "q", *options)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: m\n", "did you mean 'model'"),
        ("model: m\nmodel: n\n", "stands twice"),
        ("model: m\ncalibration: 5\n", "not a mapping"),
        ("model: m\nseed: zero\n", "not int"),
        ("model: m\nquantize: []\n", "quantize"),
        ("model: [\n", "not YAML"),
    ],
)
def test_a_recipe_with_a_mistake_is_a_usage_error_for_every_verb(
    refused, llama, tmp_path, text, said
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert said in refused(2, "run", recipe, "-o", tmp_path / "o")
    assert said in refused(2, "quantize", llama, "-o", tmp_path / "q", "--recipe", recipe)
    if "quantize" not in text:
        assert said in refused(
            2, "measure", llama, "-o", tmp_path / "m", "--recipe", recipe, "--samples", "4"
        )


def test_run_of_several_recipes_has_no_output_folder(refused, tmp_path):
    said = refused(2, "run", "tiny-llama", "tiny-llama-outliers", "-o", tmp_path)
    assert "of 2 recipes" in said and not list(tmp_path.iterdir())


def test_run_takes_its_recipe_once(refused):
    assert "give the recipe once" in refused(
        2, "run", "tiny-llama", "--recipe", "tiny-llama-outliers"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--stats", "amx"), "did you mean 'amax'"),
        (("--ranks", "0"), "ranks=0"),
        (("--ranks", "99"), "12 sequences for 99 ranks"),
        (("--samples", "0"), "samples=0"),
        (("--sequence-length", "100000"), "128 positions"),
        (("--ranks", "1000000000"), "ranks=1000000000"),
    ],
)
def test_a_measure_that_cannot_be_is_a_usage_error(
    refused, llama, text_files, tmp_path, options, said
):
    line = (
        "measure",
        llama,
        "-o",
        tmp_path / "m",
        "--calibration",
        text_files["calibration"],
        *options,
    )
    assert said in refused(2, *line)


def test_a_mistake_is_found_before_ranks_are_started(refused, llama, copy, tmp_path, monkeypatch):
    monkeypatch.setattr(measure_stage, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "a.txt").write_text("")
    assert "no document" in refused(
        3,
        "measure",
        llama,
        "-o",
        tmp_path / "m",
        "--calibration",
        tmp_path / "a.txt",
        "--ranks",
        "2",
    )
    unsupported(copy)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert "t5" in refused(
        6,
        "measure",
        copy,
        "-o",
        tmp_path / "m",
        "--calibration",
        tmp_path / "a.txt",
        "--ranks",
        "2",
    )


def two_ranks(llama, text_files, folder, *ranks):
    job = MeasureJob(
        model=llama, output=folder, calibration=Calibration(source=str(text_files["calibration"]))
    )
    for rank in ranks:
        measure_stage._measure_rank(job, ProgressLine(quiet=True), rank=rank, world=2)


def test_ranks_that_do_not_fit_the_groups_are_refused(refused, llama, text_files, tmp_path):
    two_ranks(llama, text_files, tmp_path / "m", 0)
    assert "rank" in refused(3, "unify", "-m", tmp_path / "m", "-o", tmp_path / "u")
    two_ranks(llama, text_files, tmp_path / "m", 1)
    assert "unknown 2" in refused(
        2, "unify", "-g", "012", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )
    assert "missing 1" in refused(2, "unify", "-g", "0", "-m", tmp_path / "m", "-o", tmp_path / "u")
    assert "did you mean 'unify'" in refused(
        2, "unify", "--set", "unfy.groups=[01]", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )
    assert "unknown 3" in refused(
        2, "unify", "--set", "unify.groups=['03']", "-m", tmp_path / "m", "-o", tmp_path / "u"
    )
    quantize = ("quantize", llama, "-o", tmp_path / "q", "--scheme", "FP8", "--measurement")
    assert "quantflow unify" in refused(3, *quantize, tmp_path / "m")
    assert "quantflow unify" in refused(3, *quantize, tmp_path / "m" / "rank-001-of-002")
    assert "lies in the measurement" in refused(
        2, "unify", "-m", tmp_path / "m", "-o", tmp_path / "m"
    )


def test_a_measurement_that_is_missing_unfinished_damaged_or_foreign_is_refused(
    refused, llama, family_model, tmp_path, work
):
    line = ("-o", tmp_path / "q", "--scheme", "FP8", "--measurement")
    assert "nowhere" in refused(3, "quantize", llama, *line, tmp_path / "nowhere")
    assert "measured on model" in refused(
        3, "quantize", family_model("mistral"), *line, work / "measured"
    )
    measured = Path(shutil.copytree(work / "measured", tmp_path / "m"))
    statistics = measured / "rank-000-of-001" / "statistics.safetensors"
    data = bytearray(statistics.read_bytes())
    data[-1] ^= 1
    statistics.write_bytes(data)
    assert "statistics.safetensors" in refused(7, "quantize", llama, *line, measured)
    (measured / "rank-000-of-001" / "DONE.json").unlink()
    assert "unfinished" in refused(3, "quantize", llama, *line, measured)


def test_a_missing_statistic_names_the_tensor_and_the_way_out(
    refused, llama, text_files, tmp_path, monkeypatch
):
    # a rank does not measure by itself
    monkeypatch.setattr(missing_statistics, "launched_rank", lambda: (0, 1))
    assert (
        run(
            "measure",
            llama,
            "-o",
            tmp_path / "m",
            "--calibration",
            text_files["calibration"],
            "--stats",
            "histogram",
        )
        == 0
    )
    told = refused(
        3,
        "quantize",
        llama,
        "-o",
        tmp_path / "q",
        "--scheme",
        "W8A8",
        "--measurement",
        tmp_path / "m",
    )
    assert "model.layers.0.self_attn.q_proj|input|channel_amax" in told and "--stats" in told


def test_a_result_made_from_other_inputs_is_named_and_replaced_by_force_only(
    refused, llama, text_files, tmp_path, monkeypatch
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    measure = ("measure", llama, "-o", tmp_path / "m", "--calibration", text_files["calibration"])
    layers = ("quantize", "--no-export", llama, "-o", tmp_path / "q")
    quantize = (*layers, "--scheme", "W4A16", "--algorithm", "rtn", "--group-size")
    export = ("export", tmp_path / "q", "-o", tmp_path / "a")
    assert (run(*measure), run(*quantize, "32"), run(*export)) == (0, 0, 0)
    assert "calibration.samples = 128, now 4" in refused(2, *measure, "--samples", "4")
    assert "group_size = 32, now 16" in refused(2, *quantize, "16")
    assert run(*measure) == run(*quantize, "32") == 0  # what was there is still there
    assert run(*measure, "--samples", "4", "--force") == run(*quantize, "16", "--force") == 0
    assert "other inputs" in refused(2, *export)
    before = (tmp_path / "a" / "quantflow.json").read_bytes()
    assert run(*export, "--force") == 0
    assert (tmp_path / "a" / "quantflow.json").read_bytes() != before


def test_no_verb_replaces_a_folder_that_quantflow_did_not_write(
    refused, llama, text_files, tmp_path, work
):
    theirs = tmp_path / "theirs"
    (theirs / "rank-000-of-001").mkdir(parents=True)
    (theirs / "rank-000-of-001" / "thesis.tex").write_text("years")
    for line in (
        ("measure", llama, "-o", theirs, "--calibration", text_files["calibration"]),
        ("quantize", llama, "-o", theirs, "--scheme", "W8A16"),
        ("unify", "-m", work / "measured", "-o", theirs),
        ("export", work / "quantized", "-o", theirs),
        (
            "validate",
            work / "artifact",
            "--baseline",
            llama,
            "--text",
            text_files["heldout"],
            "--report",
            theirs,
        ),
    ):
        refused(2, *line)
        refused(2, *line, "--force")
    kept = sorted(path.name for path in theirs.rglob("*") if not path.name.endswith(".lock"))
    assert kept == ["rank-000-of-001", "thesis.tex"]


def test_layers_of_a_larger_model_do_not_stay_behind(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    (tmp_path / "q" / "layers").mkdir(parents=True)
    for name in ("00002.safetensors", "00002.json"):
        (tmp_path / "q" / "layers" / name).write_text(
            '{"errors": {}, "decisions": {}, "changed": []}'
        )
    assert run("quantize", "--no-export", llama, "-o", tmp_path / "q", "--scheme", "W8A16") == 0
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    assert len(json.loads((tmp_path / "a" / "quantflow.json").read_text())["layers"]) == 2


def test_export_refuses_what_quantize_did_not_finish_and_another_model(
    refused, llama, family_model, tmp_path, work
):
    line = ("-o", tmp_path / "a")
    assert "quantflow quantize" in refused(3, "export", tmp_path / "nowhere", *line)
    assert "'measure'" in refused(3, "export", work / "measured" / "rank-000-of-001", *line)
    assert "was made from" in refused(
        3, "export", work / "quantized", *line, "--model", family_model("qwen2")
    )
    assert "format 'exl2'" in refused(2, "export", work / "quantized", *line, "--format", "exl2")
    assert "made from an artifact" in refused(
        2, "export", work / "quantized", *line, "--format", "awq"
    )
    assert "dtype f16 beside format fp8" in refused(
        2, "export", work / "quantized", *line, "--format", "fp8", "--dtype", "f16"
    )
    assert "size '4 apples'" in refused(
        2, "export", work / "quantized", *line, "--shard-size", "4 apples"
    )
    damaged = Path(shutil.copytree(work / "quantized", tmp_path / "q"))
    (damaged / "layers" / "00001.json").write_text("{}")
    assert "00001.json" in refused(7, "export", damaged, *line)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("length", [20, 64, 100])
def test_evaluating_on_the_calibration_text_is_refused_at_every_window_length(
    refused, llama, text_files, tmp_path, work, length
):
    line = (
        "validate",
        work / "artifact",
        "--baseline",
        llama,
        "--report",
        tmp_path / "r",
        "--sequence-length",
        length,
    )
    assert "calibration sequence" in refused(3, *line, "--text", text_files["calibration"])
    assert not (tmp_path / "r").exists()


def test_a_gate_decides_the_exit_code_and_a_change_of_it_is_noticed(
    refused, llama, text_files, tmp_path, work
):
    strict, lax = tmp_path / "strict.yaml", tmp_path / "lax.yaml"
    strict.write_text(THRESHOLDS.format(0.0, 1.0))
    lax.write_text(THRESHOLDS.format(100.0, 0.0))
    line = (
        "validate",
        work / "artifact",
        "--baseline",
        llama,
        "--text",
        text_files["heldout"],
        "--tokens",
        "130",
    )

    def gated(gate, expect, report):
        return (*line, "--gate", gate, "--expect", expect, "--report", tmp_path / report)

    assert "fails gate" in refused(4, *gated(strict, "pass", "a"))
    assert (tmp_path / "a" / "report.html").is_file()
    # up to date, and still a failure
    assert "fails gate" in refused(4, *gated(strict, "pass", "a"))
    assert run(*gated(strict, "fail", "b")) == 0
    assert "a failure was expected" in refused(4, *gated(lax, "fail", "c"))
    assert run(*gated(lax, "pass", "d")) == 0
    lax.write_text(THRESHOLDS.format(0.0, 1.0))
    assert "gate." in refused(2, *gated(lax, "pass", "d"))
    assert "fails gate" in refused(4, *gated(lax, "pass", "d"), "--force")
    assert "did you mean 'demo'" in refused(2, *gated("dmo", "pass", "e"))


def test_a_full_disk_is_told_with_the_file_and_leaves_no_half_result(
    refused, llama, text_files, tmp_path, work, monkeypatch
):
    write = os.pwrite

    def full(descriptor, data, offset):
        if memoryview(data).nbytes > 1000:  # weights; a lock still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    told = refused(5, "quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16")
    assert (
        "No space left on device" in told
        and "00000.safetensors" in told
        and "free some space" in told
    )
    assert "No space" in refused(5, "export", work / "quantized", "-o", tmp_path / "a")
    assert not (tmp_path / "a").exists() and not (tmp_path / ".a.tmp").exists()
    monkeypatch.undo()
    assert run("quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16") == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--backend", "abacus"), 2),
        (("--max-new-tokens", "0"), 2),
        (("--temperature", "-1"), 2),
        (("--top-p", "2"), 2),
    ],
)
def test_a_generate_that_cannot_be_is_refused(refused, work, options, code):
    refused(code, "generate", work / "artifact", "--prompt", "value", *options)


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "generate"])
def test_reading_what_is_not_there_is_an_input_error(refused, tmp_path, verb):
    more = {"diff": (tmp_path / "b",), "generate": ("--prompt", "x")}.get(verb, ())
    refused(3, verb, tmp_path / "a", *more)


def test_the_calibration_verb_tells_the_same_mistakes(refused, llama, tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert "no document" in refused(
        3, "calibration", "inspect", tmp_path / "a.txt", "--tokenizer", llama
    )
    (tmp_path / "a.txt").write_text("value")
    refused(3, "calibration", "inspect", tmp_path / "a.txt", "--tokenizer", tmp_path / "nowhere")


def test_a_stage_that_does_not_fit_into_memory_or_disk_says_what_it_needs(
    refused, llama, tmp_path, work, text_files
):
    measure = ("measure", llama, "-o", tmp_path / "m", "--calibration", text_files["calibration"])
    quantize = (
        "quantize",
        llama,
        "-o",
        tmp_path / "q",
        "--scheme",
        "W8A8",
        "--measurement",
        work / "measured",
    )
    files = ("quantize", llama, "-o", tmp_path / "f", "--scheme", "W8A16")
    export = ("export", work / "quantized", "-o", tmp_path / "x")
    text = ("--text", text_files["heldout"], "--tokens", "256", "--sequence-length", "64")
    validate = (
        "validate",
        work / "artifact",
        "--baseline",
        llama,
        "--report",
        tmp_path / "r",
        *text,
    )
    for line in (measure, quantize, files, export, validate):
        told = refused(5, *line, "--max-memory", "50MB")
        assert (
            f"{line[0]}: needs" in told
            and "--max-memory 50MB is 50000000" in told
            and "give --max-memory" in told
        )
        assert not list(tmp_path.rglob("DONE.json")) and not (tmp_path / "x").exists()
    for line in (measure, quantize, files, export):
        told = refused(5, *line, "--max-disk", "1KB")
        assert f"{line[0]}: writes" in told and "--max-disk is 1KB" in told


def test_limits_that_are_no_sizes_are_usage_errors(refused, llama, tmp_path):
    assert "size 'much'" in refused(
        2, "quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16", "--max-memory", "much"
    )
    assert "size '-1'" in refused(2, "run", "tiny-llama", "-o", tmp_path / "r", "--max-disk=-1")


def test_statistics_by_name_and_by_scheme_exclude_each_other(refused, llama, tmp_path):
    assert "--stats amax beside --for FP8" in refused(
        2, "measure", llama, "-o", tmp_path / "m", "--stats", "amax", "--for", "FP8"
    )
    assert "did you mean" in refused(
        2, "measure", llama, "-o", tmp_path / "m", "--for", "FP8_DYNAMICS"
    )
