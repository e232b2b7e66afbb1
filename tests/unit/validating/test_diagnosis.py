"""`validate --diagnose`: which probes run, what they say, and the mend that they name."""

import json
from dataclasses import replace

import pytest
import torch

import quantflow
from quantflow.errors import UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.recipe import (
    HeadSettings,
    Quantize,
    Resources,
    Validate,
    read_yaml,
    recipe_from,
)
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.validating import probes, tables, validate
from quantflow.validating.diagnosis_table import cells, hint
from quantflow.validating.job import ValidateJob
from quantflow.validating.layerwise import BASELINE
from quantflow.validating.swaps import Swapping


@pytest.fixture(scope="module")
def artifact_of(llama, tmp_path_factory, text_files):
    """Return an artifact of the tiny llama made by an entry of a recipe."""

    def make(**words):
        folder = tmp_path_factory.mktemp("artifact")
        entry = Quantize(
            **{"name": "a", "scheme": "W4A16", "algorithm": "rtn", "group_size": 32} | words
        )
        quantize.run(QuantizeJob(model=llama, output=folder / "2", entry=entry), SILENT)
        return export.run(ExportJob(source=folder / "2", output=folder / "4"), SILENT)

    return make


@pytest.fixture(scope="module")
def artifact(artifact_of):
    return artifact_of()


def job_of(artifact, llama, text_files, report, **options):
    words = {
        "text": str(text_files["heldout"]),
        "tokens": 400,
        "sequence_length": 40,
        "diagnose": 100,
    }
    return ValidateJob(
        artifact=artifact, baseline=llama, report=report, options=Validate(**words | options)
    )


@pytest.fixture
def passes(monkeypatch):
    """The swaps of each pass over the models."""
    seen, klds = [], Swapping.klds
    monkeypatch.setattr(
        Swapping, "klds", lambda self, swaps: seen.append(list(swaps)) or klds(self, swaps)
    )
    return seen


@pytest.fixture(scope="module")
def diagnosed(artifact, llama, text_files, tmp_path_factory):
    """The validation of an artifact with all probes: its job and what it found."""
    job = job_of(artifact, llama, text_files, tmp_path_factory.mktemp("diagnosed") / "r")
    return job, validate.run(job, SILENT)


def test_a_diagnosis_has_every_linear_both_ways_and_the_report_shows_it(diagnosed, llama, passes):
    job, result = diagnosed
    found = result["diagnosis"]
    units = {unit["name"]: unit for unit in found["probes"]["units"]}
    linears = graph_for(open_source(llama).config).linears
    assert set(units) == {*linears, "model.layers.0", "model.layers.1"}
    assert found["probes"]["run"] == 2 * len(units) + len(found["mend"]["tried"])
    # all windows are probed
    assert found["probes"]["mean_kld"] == pytest.approx(result["metrics"]["mean_kld"]["value"])
    for unit in units.values():
        assert unit["only_this"] > 0
        assert unit["gain"] == pytest.approx(found["probes"]["mean_kld"] - unit["all_but_this"])
    assert units["model.layers.0"]["only_this"] > units[linears[0]]["only_this"]
    predicted = result["protocol"]["tokens"] - result["protocol"]["windows"]
    for key in ("kinds", "positions", "frequency"):
        assert sum(part["tokens"] for part in found[key]) == predicted
        assert sum(part["share"] for part in found[key]) == pytest.approx(1)
    assert (
        len(found["windows"]) == 10
        and found["windows"][0]["mean_kld"] >= found["windows"][1]["mean_kld"]
    )
    assert all(
        isinstance(window[model], str)
        for window in found["windows"]
        for model in (BASELINE, "artifact")
    )
    page = (job.report / "report.html").read_text()
    assert (
        "<h2>Where the loss is</h2>" in page
        and "Gain of leaving this alone" in page
        and "whole layer" in page
    )
    assert validate.run(job, SILENT) == result and passes == []  # up to date


def test_the_mend_lowers_the_divergence_as_predicted(
    diagnosed, artifact, llama, text_files, tmp_path
):
    job, before = diagnosed
    mend = before["diagnosis"]["mend"]
    recipe = recipe_from(read_yaml(job.report / mend["recipe"]))
    (entry,) = recipe.quantize
    quantize.run(QuantizeJob(model=llama, output=tmp_path / "2", entry=entry), SILENT)
    mended = export.run(ExportJob(source=tmp_path / "2", output=tmp_path / "4"), SILENT)
    after = validate.run(
        job_of(mended, llama, text_files, tmp_path / "after", diagnose=None), SILENT
    )
    gain = before["metrics"]["mean_kld"]["value"] - after["metrics"]["mean_kld"]["value"]
    assert mend["gain"] > 0 and gain == pytest.approx(mend["gain"], rel=0.05)
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (artifact, mended)
    ]
    assert sizes[1] - sizes[0] == pytest.approx(mend["bytes"], abs=1500)  # names in the header
    assert mend["scheme"] in (None, "W5A16", "W6A16", "W8A16")


@pytest.mark.slow
def test_a_diagnosis_that_was_stopped_goes_on_after_its_last_pass(
    diagnosed, artifact, llama, text_files, tmp_path, monkeypatch
):
    _, whole = diagnosed
    monkeypatch.setattr("quantflow.validating.diagnosis._at_once", lambda *args, **words: 6)
    klds, ran = Swapping.klds, []

    def stop(self, swaps):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(len(swaps))
        return klds(self, swaps)

    monkeypatch.setattr(Swapping, "klds", stop)
    job = job_of(artifact, llama, text_files, tmp_path / "r")
    with pytest.raises(KeyboardInterrupt):
        validate.run(job, SILENT)
    again = []
    monkeypatch.setattr(
        Swapping, "klds", lambda self, swaps: again.append(len(swaps)) or klds(self, swaps)
    )
    assert validate.run(job, SILENT)["diagnosis"] == whole["diagnosis"]
    assert sum(ran) + sum(again) == whole["diagnosis"]["probes"]["run"] + 1 and ran == [1, 4, 6]


def test_few_probes_take_layers_first_and_then_the_linears_of_the_costliest(
    artifact, llama, text_files, tmp_path
):
    found = validate.run(job_of(artifact, llama, text_files, tmp_path / "r", diagnose=16), SILENT)[
        "diagnosis"
    ]["probes"]
    layers = {unit["name"]: unit["gain"] for unit in found["units"] if unit["whole"]}
    linears = [unit["name"] for unit in found["units"] if not unit["whole"]]
    assert len(layers) == 2 and len(linears) == 4 and found["run"] <= 16 and found["left_out"] == 10
    assert all(name.startswith(max(layers, key=layers.get)) for name in linears)


def test_a_number_of_probes_that_reaches_nothing_is_refused():
    with pytest.raises(UsageError, match="diagnose"):
        Validate(diagnose=3)


def test_linears_that_smoothing_tied_together_are_one_unit_with_their_norm(llama):
    graph = graph_for(open_source(llama).config)
    quantized = [name for name in graph.linears if not name.endswith("o_proj")]
    layer = "model.layers.0."
    folded = {f"{layer}self_attn.{name}_proj" for name in "qkv"}
    units = [
        unit
        for unit in probes.units_of(graph, quantized, folded=folded, head="lm_head")
        if unit.layer == 0
    ]
    assert [unit.linears for unit in units[1:]] == [
        (f"{layer}self_attn.q_proj", f"{layer}self_attn.k_proj", f"{layer}self_attn.v_proj"),
        (f"{layer}mlp.gate_proj",),
        (f"{layer}mlp.up_proj",),
        (f"{layer}mlp.down_proj",),
    ]
    assert (
        units[1].modules[0] == f"{layer}input_layernorm"
        and units[0].whole
        and units[0].modules[0] == units[1].modules[0]
    )
    down = {f"{layer}mlp.down_proj"}  # its factors went into up_proj
    (tied,) = [
        unit
        for unit in probes.units_of(graph, quantized, folded=down, head="lm_head")
        if down < set(unit.linears)
    ][1:]
    assert tied.linears == (f"{layer}mlp.up_proj", f"{layer}mlp.down_proj")


@pytest.mark.parametrize(
    ("lengths", "windows"), [([40] * 10, 10), ([512] * 64, 4), ([5000], 1), ([2000, 2000], 1)]
)
def test_windows_of_probes_are_spread_and_have_a_bound(lengths, windows):
    chosen = probes.sampled([torch.zeros(length, dtype=torch.int64) for length in lengths])
    assert len(chosen) == windows and chosen[0] == 0 and len(set(chosen)) == windows


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"head": HeadSettings(scheme="W8A16")}, marks=pytest.mark.slow),
        pytest.param({"scheme": "W8A16", "group_size": None}, marks=pytest.mark.slow),
    ],
)
def test_a_quantized_head_and_eight_bits_are_probed_too(
    artifact_of, llama, text_files, tmp_path, words
):
    result = validate.run(job_of(artifact_of(**words), llama, text_files, tmp_path / "r"), SILENT)
    names = [unit["name"] for unit in result["diagnosis"]["probes"]["units"]]
    assert ("lm_head" in names) == ("head" in words)
    if "scheme" in words:
        # nothing is finer than eight bits but the source
        assert result["diagnosis"]["mend"]["scheme"] is None
        assert "left as in the source" in hint(result)


def test_a_model_that_does_not_fit_into_memory_is_not_continued_and_says_so(
    artifact, llama, text_files, tmp_path, monkeypatch
):
    reason = "the weights take 9 GB"
    monkeypatch.setattr(
        "quantflow.validating.diagnosis.beyond_memory", lambda folder, resources: reason
    )
    job = replace(
        job_of(artifact, llama, text_files, tmp_path / "r", diagnose=16), resources=Resources()
    )
    found = validate.run(job, SILENT)["diagnosis"]
    assert (
        found["note"] == f"no continuations: {reason}" and found["windows"][0]["baseline"] is None
    )
    assert found["mend"] is not None


@pytest.mark.slow
def test_the_older_artifact_is_compared_without_a_diagnosis(
    artifact, artifact_of, llama, text_files, tmp_path, passes
):
    job = replace(
        job_of(artifact_of(group_size=64), llama, text_files, tmp_path / "r", diagnose=16),
        previous=artifact,
    )
    result = validate.run(job, SILENT)
    assert "regression" in result and "diagnosis" in result
    assert "diagnosis" not in json.loads((tmp_path / "r-previous" / "validation.json").read_text())
    assert sum(map(len, passes)) == result["diagnosis"]["probes"]["run"] + 1


def test_the_table_has_the_costliest_linears_first():
    units = [
        {
            "name": f"l{number}",
            "whole": number == 3,
            "only_this": 0.1,
            "all_but_this": 0.2,
            "gain": number / 100,
        }
        for number in range(14)
    ]
    rows = cells({"probes": {"units": units}})
    assert [row[0] for row in rows] == [f"l{number}" for number in range(13, 3, -1)]
    assert rows[0] == ("l13", "0.1", "0.2", "0.13")
    assert cells({"probes": None}) == []


def test_the_functions_offer_the_table_and_the_hint(diagnosed, artifact, llama):
    job, _ = diagnosed
    result = quantflow.validate(artifact, llama, options=job.options, report=job.report)
    columns, rows = tables.diagnosis(result)
    assert columns[0] == "quantized" and len(rows) == 10
    assert "mend.yaml is its recipe" in tables.mend_hint(result)
