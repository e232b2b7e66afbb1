"""FP8 through the stages.

There are calibrated weights, searched scales, scales of powers of two, and flavours that no file
holds.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from quantflow.core.scheme import preset
from quantflow.errors import StatisticsError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.verify import verify
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Measure, Quantize
from quantflow.planning.requirements import statistics_for
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_artifact
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow

QUIET = ProgressLine(quiet=True)
LINEARS = 14


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    return measure.run(
        MeasureJob(
            model=llama, output=tmp_path_factory.mktemp("1") / "out", calibration=calibration
        ),
        QUIET,
    )


def made(model, folder, measured, **words):
    entry = Quantize(name="x", **words)
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=entry, measurement=measured), QUIET
    )


def tensors(folder):
    return {
        name: tensor
        for path in sorted((folder / "layers").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def decisions(folder):
    records = [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]
    return {name: told for record in records for name, told in record["decisions"].items()}


def weight_errors(folder):
    records = [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]
    return {
        name: errors["weight"] for record in records for name, errors in record["errors"].items()
    }


@pytest.mark.parametrize(
    ("scheme", "size"),
    [slow(("FP8", None)), ("FP8_DYNAMIC", None), slow(("FP8_BLOCK", 32))],
    ids=["tensor", "channel", "block"],
)
def test_gptq_chooses_float8_and_the_artifact_holds_it(llama, measured, tmp_path, scheme, size):
    folder = made(llama, tmp_path / "2", measured, scheme=scheme, group_size=size, algorithm="gptq")
    told = decisions(folder)
    assert len(told) == LINEARS and not any(of["same_as_rtn"] for of in told.values())
    better = [of["output_error"] < of["output_error_rtn"] for of in told.values()]
    assert sum(better) == LINEARS
    artifact = export.run(ExportJob(source=folder, output=tmp_path / "artifact"), QUIET)
    verify(artifact)
    opened = open_artifact(artifact, backend="reference")
    for name in told:
        linear = opened.decode(name)
        assert linear.weight.qvalue.dtype == torch.float8_e4m3fn
        assert torch.equal(
            linear.weight.qvalue.view(torch.uint8),
            tensors(folder)[f"{name}.weight"].view(torch.uint8),
        )


@pytest.mark.parametrize(
    ("scheme", "size"), [("FP8_DYNAMIC", None), ("FP8_BLOCK", 32)], ids=["channel", "block"]
)
def test_searched_scales_lose_less_and_go_file_to_file(llama, tmp_path, scheme, size):
    searched, plain = (
        made(llama, tmp_path / algorithm, None, scheme=scheme, group_size=size, algorithm=algorithm)
        for algorithm in ("rtn_mse", "rtn")
    )
    assert not (searched / "canary.json").exists()  # no forward pass ran
    ours, theirs = weight_errors(searched), weight_errors(plain)
    assert all(ours[name] < theirs[name] for name in theirs) and len(theirs) == LINEARS


@pytest.mark.parametrize("algorithm", ["rtn", slow("gptq")])
def test_scales_of_powers_of_two_are_those_that_are_stored(llama, measured, tmp_path, algorithm):
    words = {"scheme": "FP8", "algorithm": algorithm}
    rounded = made(llama, tmp_path / "pow2", measured, scale_rounding="pow2", **words)
    plain = tensors(made(llama, tmp_path / "plain", measured, **words))
    scales = {name: tensor for name, tensor in tensors(rounded).items() if name.endswith("_scale")}
    assert len(scales) == 2 * LINEARS  # of weights and of inputs
    for name, scale in scales.items():
        assert math.frexp(scale.item())[0] == 0.5
        assert plain[name] <= scale < 2 * plain[name]
    artifact = export.run(ExportJob(source=rounded, output=tmp_path / "artifact"), QUIET)
    opened = open_artifact(artifact, backend="reference")
    # a loader needs no word for it
    assert {placement.scheme for placement in opened.linears.values()} == {preset("FP8")}
    resolved = json.loads((artifact / "quantflow.json").read_text())["recipe"]["resolved"][
        "schemes"
    ].values()
    assert {
        scheme[part]["scale_rounding"] for scheme in resolved for part in ("weights", "input")
    } == {"pow2"}


def test_dynamic_inputs_keep_their_scales(llama, tmp_path):
    folder = made(llama, tmp_path / "out", None, scheme="FP8_DYNAMIC", scale_rounding="pow2")
    plan = json.loads((folder / "quantize.json").read_text())["plan"]["schemes"].values()
    assert {
        (scheme["weights"]["scale_rounding"], scheme["input"]["scale_rounding"]) for scheme in plan
    } == {("pow2", "none")}
    scales = torch.cat(
        [
            tensor.flatten()
            for name, tensor in tensors(folder).items()
            if name.endswith("weight_scale")
        ]
    )
    assert (torch.frexp(scales)[0] == 0.5).all() and len(scales.unique()) > 1


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (
            ("FP8", "--set", "quantize.0.float8=e5m2"),
            6,
            "float8 flavour 'e5m2', the layout holds e4m3fn codes",
        ),
        (("FP8_DYNAMIC", "--set", "quantize.0.float8=e4m3fnuz"), 6, "flavour 'e4m3fnuz'"),
        (
            ("W8A16", "--set", "quantize.0.scale_rounding=pow2"),
            2,
            "integer weights, scale_rounding='pow2'",
        ),
        (("FP8", "--set", "quantize.0.scale_rounding=pow3"), 2, "did you mean 'pow2'"),
        (("FP8", "--algorithm", "rtn_mse"), 2, "whose weights share one scale"),
    ],
)
def test_what_no_file_could_hold_is_refused_before_anything_is_written(
    llama, measured, tmp_path, capsys, options, code, told
):
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "out",
        "--measurement",
        measured,
        "--scheme",
        *options,
    )
    assert exit_code(cli, [str(word) for word in line]) == code
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["fp8", "modelopt"])
def test_layouts_of_other_programs_have_no_words_for_a_flavour(
    llama, measured, tmp_path, capsys, layout
):
    quantized = made(llama, tmp_path / "q", measured, scheme="FP8", float8="gaudi2")
    artifact = export.run(ExportJob(source=quantized, output=tmp_path / "artifact"), QUIET)
    line = ("export", artifact, "-o", tmp_path / "out", "--format", layout, "-q")
    assert exit_code(cli, [str(word) for word in line]) == 6
    said = capsys.readouterr().err
    assert (
        f"model.layers.0.mlp.down_proj: {layout}: scheme FP8 " in said
        and "check the disk" not in said
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flavour", "instead"),
    [("e5m2", "a mantissa bit more"), ("e4m3fnuz", "vLLM doubles the scales")],
)
def test_run_and_plan_refuse_such_a_flavour_before_they_measure(
    llama, text_files, tmp_path, capsys, flavour, instead
):
    recipe, folder = tmp_path / "r.yaml", tmp_path / "out"
    entry = {"name": "x", "scheme": "FP8", "float8": flavour}
    texts = {
        "calibration": {"source": str(text_files["calibration"])},
        "validate": {"text": str(text_files["heldout"])},
    }
    recipe.write_text(json.dumps({"model": str(llama), "quantize": [entry], **texts}))
    for line in (("run", recipe, "-o", folder), ("plan", recipe)):
        assert exit_code(cli, [str(word) for word in line]) == 6
        told = capsys.readouterr().err
        assert f"float8 flavour '{flavour}'" in told and instead in told
    assert not (folder / "1-measure").exists()


@pytest.fixture(scope="module")
def counted(tmp_path_factory, llama, text_files):
    """A measurement with histograms."""
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    folder, stats = tmp_path_factory.mktemp("counted") / "out", ("amax", "min_max", "histogram")
    return measure.run(
        MeasureJob(
            model=llama, output=folder, calibration=calibration, options=Measure(stats=stats)
        ),
        QUIET,
    )


@pytest.mark.parametrize("scheme", ["FP8", "W8A8_STATIC"])
@pytest.mark.parametrize("observer", ["mse", "percentile"])
def test_the_range_of_a_static_input_is_what_the_observer_says(
    llama, counted, tmp_path, scheme, observer
):
    words = {"scheme": scheme, "algorithm": "rtn", "transforms": ()}
    cut = made(llama, tmp_path / "cut", counted, input_observer=observer, **words)
    whole = tensors(made(llama, tmp_path / "whole", counted, **words))
    for name, told in decisions(cut).items():
        assert (
            told["input_reach"] <= (1.125 if observer == "percentile" else 1.0) * told["input_amax"]
        )
        scale = tensors(cut)[f"{name}.input_scale"]
        assert scale <= whole[f"{name}.input_scale"]
        if scheme == "FP8":
            assert scale.item() == pytest.approx(min(told["input_reach"], told["input_amax"]) / 448)
    if scheme == "W8A8_STATIC" and observer == "mse":
        assert any(told["input_reach"] < told["input_amax"] for told in decisions(cut).values())


def test_what_an_observer_needs_is_asked_for(llama, text_files, tmp_path, capsys):
    calibration = Calibration(source=str(text_files["calibration"]), samples=2, sequence_length=48)
    job = MeasureJob(
        model=llama,
        output=tmp_path / "1",
        calibration=calibration,
        options=Measure(stats=("amax",)),
    )
    measured = measure.run(job, QUIET)

    def refused(code, *options):
        line = ("quantize", llama, "-o", tmp_path / "out", "--measurement", measured, *options)
        assert exit_code(cli, [str(word) for word in line]) == code
        return capsys.readouterr().err

    mse = ("--set", "quantize.0.input_observer=mse")
    assert "no static input, input_observer='mse'" in refused(2, "--scheme", "FP8_DYNAMIC", *mse)
    assert "give `transforms: []`" in refused(2, "--scheme", "W8A8_STATIC", *mse)
    assert "did you mean 'mse'" in refused(
        2, "--scheme", "FP8", "--set", "quantize.0.input_observer=mes"
    )
    entry = Quantize(name="x", scheme="FP8", input_observer="mse")
    assert statistics_for([entry]) == ("amax", "histogram")
    with pytest.raises(StatisticsError, match="counts"):
        quantize.run(
            QuantizeJob(model=llama, output=tmp_path / "out", entry=entry, measurement=measured),
            QUIET,
        )
