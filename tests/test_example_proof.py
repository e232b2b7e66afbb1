"""Proofs on the example model.

A mend keeps what it predicts, and another seed of calibration is no regression.
"""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize, Validate, read_yaml, recipe_from
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.validating import validate
from quantflow.validating.job import ValidateJob

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (EXAMPLE / "model.safetensors").is_file(),
        reason="the example model is part of the repository",
    ),
]
STDLIB = runpy.run_path(str(EXAMPLE / "stdlib_text.py"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, pieces in (
        ("calibration", STDLIB["excerpts"](24)),
        ("heldout", STDLIB["documents"](heldout=True)[:16]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """The example model with outliers planted in its activations, the same function."""
    folder = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("models") / "outliers")
    tensors = load_file(EXAMPLE / "model.safetensors")
    runpy.run_path(str(EXAMPLE / "plant_outliers.py"))["plant_outliers_"](tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measured(model, texts, output, *, seed=0):
    calibration = Calibration(
        source=str(texts / "calibration.jsonl"), samples=8, sequence_length=256
    )
    return measure.run(
        MeasureJob(model=model, output=output, calibration=calibration, seed=seed), SILENT
    )


def artifact_of(model, measurement, entry, folder):
    job = QuantizeJob(model=model, output=folder / "2", entry=entry, measurement=measurement)
    quantize.run(job, SILENT)
    return export.run(ExportJob(source=folder / "2", output=folder / entry.name), SILENT)


def validated(artifact, model, texts, report, **options):
    words = {
        "text": str(texts / "heldout.jsonl"),
        "tokens": 2560,
        "sequence_length": 256,
        **options,
    }
    job = ValidateJob(artifact=artifact, baseline=model, report=report, options=Validate(**words))
    return validate.run(job, SILENT)


@pytest.mark.parametrize(("scheme", "algorithm"), [("W4A16", "gptq"), ("W8A8_STATIC", "rtn")])
def test_the_mend_of_the_model_with_outliers_lowers_the_divergence_as_predicted(
    outliers, texts, tmp_path, scheme, algorithm
):
    measurement = measured(outliers, texts, tmp_path / "1")
    entry = Quantize(name="plain", scheme=scheme, algorithm=algorithm, transforms=())
    before = validated(
        artifact_of(outliers, measurement, entry, tmp_path / "plain"),
        outliers,
        texts,
        tmp_path / "before",
        diagnose=64,
    )
    mend = before["diagnosis"]["mend"]
    (mended,) = recipe_from(read_yaml(tmp_path / "before" / mend["recipe"])).quantize
    after = validated(
        artifact_of(outliers, measurement, mended, tmp_path / "mended"),
        outliers,
        texts,
        tmp_path / "after",
    )
    now, then = (result["metrics"]["mean_kld"]["value"] for result in (before, after))
    print(
        f"\n{scheme}: {mend['scheme']} for {len(mend['linears'])} linears, {mend['bytes']:+,} "
        f"bytes: mean KLD {now:.5f}, "
        f"predicted {mend['mean_kld']:.5f}, measured {then:.5f}; gain {mend['gain']:.5f} and "
        f"{now - then:.5f}"
    )
    assert mend["gain"] > 0.1 * now
    assert now - then == pytest.approx(mend["gain"], rel=1 / 3)


def test_two_seeds_of_calibration_are_no_regression_in_either_direction(texts, tmp_path):
    entry = Quantize(name="a", scheme="W4A16", algorithm="gptq")
    found = []
    for seed in (0, 1):
        measurement = measured(EXAMPLE, texts, tmp_path / f"1-{seed}", seed=seed)
        artifact = artifact_of(EXAMPLE, measurement, entry, tmp_path / str(seed))
        found.append(
            (artifact, validated(artifact, EXAMPLE, texts, tmp_path / f"r{seed}", tokens=4096))
        )
    (one, first), (other, second) = found
    assert first["digest"] != second["digest"]
    for newer, older in ((other, tmp_path / "r0"), (one, tmp_path / "r1")):
        job = ValidateJob(
            artifact=newer,
            baseline=EXAMPLE,
            report=tmp_path / f"beside-{older.name}",
            options=Validate(text=str(texts / "heldout.jsonl"), tokens=4096, sequence_length=256),
            previous=older / "validation.json",
        )
        regression = validate.run(job, SILENT)["regression"]
        print(
            older.name,
            {name: (f["worse"], f["outcome"]) for name, f in regression["metrics"].items()},
        )
        assert regression["outcome"] != "regression"
