"""A calibration that changed nothing is an error; other changes are in manifest and card."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import StatisticsError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files import inspect
from quantflow.files.manifest import read_manifest
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.layer_by_layer import refuse_unchanged
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.shared import slow

QUIET = ProgressLine(quiet=True)
ENTRY = Quantize(name="int4", scheme="W4A16", algorithm="gptq", group_size=32)


def on_the_grid(folder, llama, text_files, *, but=()):
    """Write the model with weights on 4-bit grids, 15 steps in each group, and measure it.

    Every algorithm finds these values again; `but` names linears whose weights stay as they are.
    """
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, generator = load_file(llama / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "proj" in name and name.removesuffix(".weight") not in but:
            steps = torch.randint(-8, 8, tensor.shape, generator=generator)
            steps[:, ::32], steps[:, 1::32] = -8, 7
            tensors[name] = (steps / 64).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, measured_of(folder, folder.with_name(f"{folder.name}-measured"), text_files)


def measured_of(model, folder, text_files):
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
    return measure.run(MeasureJob(model=model, output=folder, calibration=calibration), QUIET)


@pytest.fixture(scope="module")
def flat(tmp_path_factory, llama, text_files):
    return on_the_grid(tmp_path_factory.mktemp("grid") / "model", llama, text_files)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, llama, text_files):
    return measured_of(llama, tmp_path_factory.mktemp("1") / "out", text_files)


def made(model, measured, folder, **words):
    job = QuantizeJob(
        model=model, output=folder, entry=replace(ENTRY, **words), measurement=measured
    )
    return quantize.run(job, QUIET)


def decisions(folder):
    records = [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]
    return {name: told for record in records for name, told in record["decisions"].items()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, True),
        ({"scheme": "W8A16", "group_size": None}, True),
        ({"algorithm": "rtn"}, False),  # has no Hessian
        # is what it would be compared with
        slow(({"algorithm": "rtn", "transforms": ({"awq": {}},)}, False)),
        ({"algorithm": "rtn_mse", "transforms": ({"awq": {}},)}, True),  # has one anyway
        ({"algorithm": "rtn_mse"}, False),
    ],
    ids=["gptq", "gptq-8", "rtn", "awq-rtn", "awq-rtn-mse", "rtn-mse"],
)
def test_errors_before_and_after_are_told_where_a_hessian_is_there(
    llama, measured, tmp_path, words, said
):
    for told in decisions(made(llama, measured, tmp_path / "out", **words)).values():
        assert (told.keys() >= {"output_error", "output_error_rtn", "same_as_rtn"}) is said
        if said:
            assert 0 < told["output_error"] < 1.2 * told["output_error_rtn"]


def test_manifest_inspect_and_card_show_them(llama, measured, tmp_path):
    made(llama, measured, tmp_path / "2")
    artifact = export.run(ExportJob(source=tmp_path / "2", output=tmp_path / "artifact"), QUIET)
    manifest = read_manifest(artifact)
    told = [of for layer in manifest["layers"] for of in layer["decisions"].values()]
    errors = sorted(of["output_error"] for of in told)
    found = inspect.summarize(artifact)["output_error"]
    assert found["linears"] == 14 and found["worst"] == errors[-1]
    assert found["median"] == (errors[6] + errors[7]) / 2
    assert found["same_as_rtn"] == 0 and found["median"] < found["median_rtn"]
    card = (artifact / "README.md").read_text()
    assert (
        f"median of 14 linears | gptq {found['median']:.2%}, rtn {found['median_rtn']:.2%}; worst"
        in card
    )


def test_a_run_that_changed_nothing_ends_with_an_error_resumed_or_not(flat, tmp_path, capsys):
    model, measured = flat
    for _ in range(2):  # the second time every layer is finished
        with pytest.raises(
            StatisticsError,
            match=r"int4: gptq with calibration \w{16} \(6 sequences, \d+ tokens\) changed nothing",
        ):
            made(model, measured, tmp_path / "out", scheme="W4A16_ASYM")
        assert not (tmp_path / "out" / "DONE.json").exists()
    given = (
        "quantize",
        model,
        "-o",
        tmp_path / "out",
        "--scheme",
        "W4A16_ASYM",
        "--group-size",
        32,
        "--measurement",
        measured,
    )
    assert exit_code(cli, [str(word) for word in given]) == 3
    error = capsys.readouterr().err
    assert (
        "all 14 linears are what rtn makes of them" in error and "or use --algorithm rtn" in error
    )
    assert (
        made(model, measured, tmp_path / "rtn", scheme="W4A16_ASYM", algorithm="rtn") / "DONE.json"
    ).exists()


def test_one_linear_that_changed_is_enough(llama, text_files, tmp_path):
    changed = "model.layers.1.mlp.down_proj"
    model, measured = on_the_grid(tmp_path / "model", llama, text_files, but=(changed,))
    told = decisions(made(model, measured, tmp_path / "out", scheme="W4A16_ASYM"))
    assert [name for name, of in told.items() if not of["same_as_rtn"]] == [changed]


def test_experts_that_a_policy_rounds_to_nearest_say_nothing_of_calibration():
    plan = SimpleNamespace(name="x", algorithm="gptq", method="gptq", learned=None)
    meta = {"counts": {"samples": 1, "tokens": 9}, "calibration": {"hash": "c" * 64}}
    rounded, same, other = {"zero_groups": 0}, {"same_as_rtn": True}, {"same_as_rtn": False}

    def check(*layers):
        refuse_unchanged(
            plan, [{"decisions": linears} for linears in layers], SimpleNamespace(meta=meta)
        )

    check({"q": other, "expert.0": rounded}, {"k": same})
    check({"expert.0": rounded}, {"expert.1": rounded})
    with pytest.raises(
        StatisticsError,
        match="x: gptq with calibration c{16} .1 sequences, 9 tokens. changed nothing: all 2 "
        "linears",
    ):
        check({"q": same, "expert.0": rounded}, {"k": same})
