"""The cost of rounded inputs, measured by export: numbers, runtimes' choice, and `exact`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantflow.core.scheme import PRESETS, with_group_size, with_rounded_inputs
from quantflow.errors import UsageError
from quantflow.files.manifest import read_manifest, rounds_inputs, with_note, write_manifest
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.load import load
from tests.shared import run

LINEAR = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory, llama) -> dict[str, Path]:
    """Artifacts: calibrated, from file to file, and the latter with the cost of rounding."""
    folder = tmp_path_factory.mktemp("rounded")
    text = folder / "calibration.txt"
    text.write_text("a scale and a value\n\n" * 8)
    four = ("--scheme", "W4A16", "--set", "quantize.0.group_size=32")
    assert run("measure", llama, "-o", folder / "m", "--calibration", text, "--samples", "2") == 0
    measured = ("--measurement", folder / "m", "--algorithm", "gptq")
    assert run("quantize", "--no-export", llama, "-o", folder / "q", *four, *measured) == 0
    assert (
        run("quantize", "--no-export", llama, "-o", folder / "plain", *four, "--algorithm", "rtn")
        == 0
    )
    assert run("export", folder / "q", "-o", folder / "calibrated") == 0
    assert run("export", folder / "plain", "-o", folder / "rtn") == 0
    assert run("export", folder / "plain", "-o", folder / "asked", "--measure-inputs") == 0
    return {name: folder / name for name in ("q", "calibrated", "rtn", "asked")}


def test_export_measures_what_rounding_costs_as_transformers_says(artifacts, llama):
    record = read_manifest(artifacts["calibrated"])["rounded_inputs"]
    tokens = load_file(artifacts["q"] / "canary.safetensors")["tokens"][None]  # [1, S]
    source = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    exact = load(artifacts["calibrated"], backend="reference", exact=True).model
    with torch.no_grad():
        first, second = source(tokens).logits[0].double(), exact(tokens).logits[0].double()
        for module in exact.modules():
            if type(module).__name__ == "QuantLinear":
                module.register_forward_pre_hook(lambda _, given: (in_groups(given[0], 32),))
        third = exact(tokens).logits[0].double()
    assert record["tokens"] == tokens.shape[1]
    assert record["kld_of_artifact"] == pytest.approx(divergence(first, second), rel=1e-3)
    assert record["kld"] == pytest.approx(divergence(second, third), rel=0.02, abs=1e-8)


def in_groups(x, size):
    split = x.reshape(*x.shape[:-1], -1, size)
    step = split.abs().amax(dim=-1, keepdim=True) / 127.5
    return torch.where(step > 0, (split / step).round().clamp(-128, 127) * step, split).reshape(
        x.shape
    )


def divergence(left, right):
    p = left.log_softmax(dim=-1)
    return float((p.exp() * (p - right.log_softmax(dim=-1))).sum(dim=-1).mean())


def test_what_ran_no_model_is_measured_where_that_is_asked_for(artifacts):
    assert "rounded_inputs" not in read_manifest(artifacts["rtn"])
    record = read_manifest(artifacts["asked"])["rounded_inputs"]
    assert 0 < record["kld"] < record["kld_of_artifact"] and record["tokens"] == 64


@pytest.mark.parametrize(("kld", "taken"), [(1.0, True), (1.001, False)])
def test_inputs_are_rounded_where_that_costs_a_twentieth_or_less_and_never_with_exact(
    artifacts, tmp_path, kld, taken
):
    folder = copied(artifacts["rtn"], tmp_path, {"kld": kld, "kld_of_artifact": 20.0, "tokens": 64})
    assert rounds_inputs(read_manifest(folder)) == taken
    stored = with_group_size(PRESETS["W4A16"], 32)
    usual, exact = load(folder), load(folder, exact=True)
    assert usual.artifact.linears[LINEAR].scheme == (
        with_rounded_inputs(stored) if taken else stored
    )
    assert exact.artifact.linears[LINEAR].scheme == stored
    tokens = torch.arange(3, 19)[None]
    same = torch.equal(usual.model(tokens).logits, exact.model(tokens).logits)
    assert same != taken


@pytest.mark.parametrize("scheme", ["MXFP4A16", "NVFP4A16"])
def test_the_cost_is_measured_of_values_of_e2m1_too(scheme, llama, tmp_path):
    line = ("--scheme", scheme, "--algorithm", "rtn", "--no-export", "-q")
    assert run("quantize", llama, "-o", tmp_path / "q", *line) == 0
    assert run("export", tmp_path / "q", "-o", tmp_path / "a", "--measure-inputs", "-q") == 0
    record = read_manifest(tmp_path / "a")["rounded_inputs"]
    assert 0 < record["kld"] < record["kld_of_artifact"] / 20  # so inputs are rounded
    assert load(tmp_path / "a").artifact.linears[LINEAR].scheme == with_rounded_inputs(
        PRESETS[scheme]
    )


def test_inputs_are_rounded_whatever_it_costs_where_that_is_asked_for(artifacts, tmp_path, llama):
    folder = copied(artifacts["rtn"], tmp_path, {"kld": 9.0, "kld_of_artifact": 1.0, "tokens": 64})
    assert load(folder).rounded_inputs == 0
    asked = load(folder, rounded_inputs=True)
    assert asked.rounded_inputs == len(asked.artifact.linears) > 0
    with pytest.raises(UsageError, match="^exact and rounded_inputs together; leave one"):
        load(folder, exact=True, rounded_inputs=True)
    with pytest.raises(UsageError, match=": rounded inputs of no quantized linear; leave"):
        load(llama, rounded_inputs=True)
    with pytest.raises(UsageError, match=": rounded inputs of linears of W4A16, run by int4_pack"):
        load(folder, rounded_inputs=True, backend="int4_pack")


def test_validate_judges_with_rounded_inputs_where_that_is_asked_for(
    artifacts, llama, text_files, tmp_path
):
    line = ("--baseline", llama, "--text", text_files["heldout"], "--tokens", "128", "-q")
    line += ("--sequence-length", "32", "--allow-inconclusive")
    found = {}
    for flag in ("--exact", "--rounded-inputs"):
        report = tmp_path / flag
        assert run("validate", artifacts["rtn"], *line, flag, "--report", report) in (0, 4)
        found[flag] = json.loads((report / "validation.json").read_text())
    assert [each["rounded_inputs"] for each in found.values()] == [False, True]
    exact, rounded = (each["metrics"]["mean_kld"]["value"] for each in found.values())
    assert exact != rounded


def copied(artifact: Path, folder: Path, record: dict | None = None) -> Path:
    """Copy an artifact, with another record in its manifest."""
    made = folder / "copied"
    shutil.copytree(artifact, made)
    if record is not None:
        write_manifest(made, with_note(read_manifest(made), "rounded_inputs", record))
    return made


def test_a_kernel_that_multiplies_integers_gets_them_and_the_reference_where_it_is_asked_for(
    artifacts, tmp_path, monkeypatch
):
    folder = copied(artifacts["rtn"], tmp_path, {"kld": 0.0, "kld_of_artifact": 1.0, "tokens": 64})
    rounded = with_rounded_inputs(with_group_size(PRESETS["W4A16"], 32))
    asked = open_artifact(folder, backend="reference", inputs="usual").linears[LINEAR]
    assert (asked.scheme, asked.backend.name) == (rounded, "reference")
    named = open_artifact(folder, backend="int4_pack", inputs="usual").linears[LINEAR]
    assert (named.scheme.input, named.backend.name) == (None, "int4_pack")
    monkeypatch.setattr("quantflow.backends.native.why_not", lambda *_, **__: "no compiler")
    without = open_artifact(folder, inputs="usual").linears[LINEAR]
    assert (without.scheme.input, without.backend.name) == (None, "int4_pack")


def test_the_decoders_and_a_pack_compute_what_the_reference_does_with_rounded_inputs(
    artifacts, tmp_path
):
    folder = copied(artifacts["rtn"], tmp_path, {"kld": 0.0, "kld_of_artifact": 1.0, "tokens": 64})
    tokens = torch.arange(64, 192).reshape(32, 4)
    expected = load(folder, backend="reference").model(tokens).logits
    exact = load(folder, backend="reference", exact=True).model(tokens).logits
    scale = (expected - exact).norm(dim=-1)  # [rows, tokens]
    for options in ({}, {"pack": True}, {"pack": True}):  # made, and read again
        decoder = load(folder, decoder="auto", **options).decoder
        decoder.begin(rows=32, capacity=8)
        off = (decoder.forward(tokens, last_only=False) - expected).norm(dim=-1) / scale
        # Sums in another order round a few inputs to another code, which moves the rest of their
        # row; other tokens are equal.
        assert (off < 1e-3).float().mean() > 0.5
    # not the pack of rounded inputs
    decoder = load(folder, decoder="auto", pack=True, exact=True).decoder
    decoder.begin(rows=32, capacity=8)
    assert torch.allclose(decoder.forward(tokens, last_only=False), exact, atol=1e-4, rtol=1e-4)
