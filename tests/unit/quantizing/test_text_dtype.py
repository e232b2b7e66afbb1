"""Calibration text in bfloat16: the integers of float32, the same bits again, the same proof."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantflow.core.parallel import SEQUENTIAL
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.files.canonical import read_json
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.capture import LayerStream
from quantflow.models.hidden import HiddenStates
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.recipe import Calibration, Compute, Quantize, SignRound
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from tests.unit.quantizing.test_streaming import StopAfter, Stopped, files_of

QUIET = ProgressLine(quiet=True)
HALF = Compute(dtype="bfloat16")
GPTQ = Quantize(name="x", scheme="W4A16", group_size=32)


@pytest.fixture(scope="module")
def measurement(llama: Path, text_files: dict[str, Path], tmp_path_factory: Any) -> Path:
    calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=64)
    folder = tmp_path_factory.mktemp("measured") / "m"
    measure.run(MeasureJob(model=llama, output=folder, calibration=calibration), QUIET)
    return rank_folder(folder, 0, 1)


def job(model: Path, measurement: Path, folder: Path, **words: Any) -> QuantizeJob:
    return QuantizeJob(
        **{
            "model": model,
            "output": folder,
            "entry": GPTQ,
            "measurement": measurement,
            "compute": HALF,
            **words,
        }
    )


@pytest.fixture(scope="module")
def halved(llama: Path, measurement: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("halved") / "q"
    return quantize.run(job(llama, measurement, folder), QUIET)


def test_a_layer_beside_another_multiplies_its_weights_as_transformers_does_in_bfloat16(
    llama: Path,
) -> None:
    source, tokens = open_source(llama), torch.arange(3, 23)
    graph = graph_for(source.config)
    wide, narrow = LayerStream(source, graph), LayerStream(source, graph, dtype=torch.bfloat16)
    store = HiddenStates(2)
    (text,) = narrow.begin([tokens], hidden=store)
    (canary,) = wide.begin([tokens], hidden=store, first=1)
    for layer in graph.layers:
        with wide.layer(layer.index, as_stored=True) as module:
            with narrow.beside(layer.index, module) as other:
                owned = {parameter.data_ptr() for parameter in module.parameters()}
                for name in layer.linears:
                    relative = f"{layer.relative(name)}.weight"
                    assert other.get_parameter(relative).data_ptr() in owned
                narrow.advance(other, [text], workers=SEQUENTIAL)
            assert all(parameter.is_meta for parameter in other.parameters())
            wide.advance(module, [canary], workers=SEQUENTIAL)
    assert (text.hidden.dtype, canary.hidden.dtype) == (torch.bfloat16, torch.float32)
    from transformers import AutoModelForCausalLM  # here: the reference of this test alone

    for dtype, state in ((torch.bfloat16, text), (torch.float32, canary)):
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=dtype)
        with torch.no_grad():
            seen = model(tokens[None], output_hidden_states=True).hidden_states
            last = model.model.norm(state.hidden)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(last, seen[-1], atol=tolerance, rtol=tolerance)


def test_states_of_two_dtypes_are_kept_in_one_generation(tmp_path: Path) -> None:
    states = [torch.randn(1, 3, 8).bfloat16(), torch.randn(1, 5, 8)]
    store = HiddenStates(2, folder=tmp_path / "h")
    for index, state in enumerate(states):
        store.put(index, state)
    store.commit(4, key="k")
    again = HiddenStates(2, folder=tmp_path / "h")
    assert again.restore(4, key="k")
    for index, state in enumerate(states):
        assert again.get(index).dtype == state.dtype
        assert torch.equal(again.get(index), state)


def test_text_in_bfloat16_changes_some_integers_and_not_the_error(  # gptq hands an error on
    llama: Path, measurement: Path, halved: Path, tmp_path: Path
) -> None:
    wide = quantize.run(job(llama, measurement, tmp_path / "q", compute=Compute()), QUIET)
    equal = count = 0
    lost = {True: 0.0, False: 0.0}
    for path in sorted((wide / "layers").glob("*.safetensors")):
        one, other = load_file(path), load_file(halved / "layers" / path.name)
        for name in filter(lambda name: name.endswith("weight_packed"), one):
            codes = [
                torch.stack([part.view(torch.uint8) & 15, part.view(torch.uint8) >> 4])
                for part in (one[name], other[name])
            ]
            equal += int((codes[0] == codes[1]).sum())
            count += codes[0].numel()
        for folder in (wide, halved):
            record = read_json((folder / "layers" / path.name).with_suffix(".json"))
            lost[folder is wide] += sum(of["output"] for of in record["errors"].values())
    assert 0.9 < equal / count < 1
    assert lost[False] == pytest.approx(lost[True], rel=0.03)


def test_an_artifact_of_text_in_bfloat16_is_proved_in_float32(halved: Path, tmp_path: Path) -> None:
    made = export.run(ExportJob(source=halved, output=tmp_path / "a"), QUIET)
    assert read_json(made / "quantflow.json")["proof"]["kind"] == "canary"
    assert load_file(halved / "canary.safetensors")["logits"].dtype == torch.float32
    assert read_json(halved / "quantize.json")["dtype"] == "bfloat16"
    assert json.loads((halved / "DONE.json").read_text())["inputs"]["dtype"] == "bfloat16"


def test_a_stopped_run_in_bfloat16_goes_on_to_the_same_bytes(
    llama: Path, measurement: Path, halved: Path, tmp_path: Path
) -> None:
    asked = job(llama, measurement, tmp_path / "q")
    with pytest.raises(Stopped):
        quantize.run(asked, StopAfter(1))
    assert files_of(quantize.run(asked, QUIET)) == files_of(halved)


@pytest.mark.parametrize(
    "entry",
    [
        replace(GPTQ, quantized_inputs=True),
        replace(GPTQ, refit=True),
        replace(GPTQ, algorithm="signround", signround=SignRound(iterations=5)),
        replace(GPTQ, algorithm="rtn", transforms=({"awq": {}},)),
    ],
    ids=["quantized inputs", "refit", "signround", "awq"],
)
def test_a_result_names_the_dtype_in_which_its_text_ran(
    entry: Quantize, llama: Path, measurement: Path, tmp_path: Path
) -> None:
    found = quantize.run(job(llama, measurement, tmp_path / "q", entry=entry), QUIET)
    narrow = bool(entry.transforms)
    assert ("dtype" in json.loads((found / "DONE.json").read_text())["inputs"]) == narrow


def test_the_usual_dtype_is_that_of_the_device() -> None:
    assert Compute().text_dtype == "float32"
    assert Compute(device="cuda:1").text_dtype == "bfloat16"
    assert Compute(device="cuda", dtype="float32").text_dtype == "float32"
    assert Compute(device="cuda").model_dtype == "float32"
