"""Bytes that tensors take on a device, beside the plan.

The device is simulated and counts what is on it.

test_device_quantize.py runs these tests in a process of their own.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import quantflow
from quantflow.core.device import HOST, WORKSPACE_BYTES, Device
from quantflow.core.kv import KVScales
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.errors import ResourceError, UnsupportedError
from quantflow.measuring import measure
from quantflow.planning import forecast
from quantflow.planning.recipe import (
    Calibration,
    Compute,
    Measure,
    Quantize,
    Recipe,
    Resources,
    SignRound,
    Tune,
    Validate,
)
from quantflow.quantizing import file_to_file, quantize
from quantflow.stages.plan import text
from quantflow.validating import validate
from tests.simulated_gpu import GPU, SimulatedGpu

SIMULATED = Device(kind=GPU, model="simulated", capability="0.0")
ON_GPU = Compute(device="cuda")
STATS = ("amax", "channel_amax", "min_max", "mean_abs", "histogram", "hessian", "gradient")
W4 = {"scheme": "W4A16", "group_size": 32}
ENTRIES: dict[str, dict[str, Any]] = {
    "gptq": {**W4, "algorithm": "gptq"},
    "awq": {**W4, "algorithm": "rtn", "transforms": ({"awq": {}},)},
    "smoothquant": {"scheme": "W8A8", "transforms": ({"smoothquant": {"alpha": "auto"}},)},
    "signround": {
        **W4,
        "algorithm": "signround",
        "signround": SignRound(iterations=2, sequences=2, start="gptq"),
    },
    "best": {**W4, "algorithm": "best", "tune": Tune(steps=1, sequences=2)},
    "hqq": {**W4, "algorithm": "hqq"},
}


@pytest.fixture(scope="module")
def wide(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, whose weights outweigh what the formulas round up."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 320,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
    }
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    folder = tmp_path_factory.mktemp("wide") / "m"
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**shape, **heads, max_position_embeddings=128)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in llama.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    for stage in (measure, quantize, validate):
        monkeypatch.setattr(stage, "open_device", lambda name: HOST if name == "cpu" else SIMULATED)
    # the simulation is of one thread
    monkeypatch.setattr(file_to_file, "Workers", lambda _count: Workers(1))
    return SimulatedGpu(Device.put, Device.fetch, QTensor.to, QuantizedLinear.to, KVScales.to)


@pytest.fixture
def calibration(text_files: dict[str, Path]) -> Calibration:
    return Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=96)


@pytest.fixture(scope="module")
def measured(
    wide: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=96)
    folder = tmp_path_factory.mktemp("measured") / "m"
    return quantflow.measure(
        wide, folder, calibration=calibration, options=Measure(stats=STATS)
    ).folder


def _planned(stage: str, model: Path, calibration: Calibration, **words: Any) -> int:
    recipe = Recipe(model=str(model), calibration=calibration, compute=ON_GPU, **words)
    (found,) = [
        each for each in quantflow.plan(recipe, measured=True)["stages"] if each["stage"] == stage
    ]
    return int(found["device_memory"])


def _tensors(planned: int) -> int:
    """Return what is planned without cuBLAS' workspace, which a simulated device has not."""
    return planned - WORKSPACE_BYTES


@pytest.mark.parametrize(
    "stats",
    [
        STATS,
        pytest.param(("amax", "hessian"), marks=pytest.mark.slow),
        pytest.param(("amax", "gradient"), marks=pytest.mark.slow),
    ],
)
def test_measure_takes_what_is_planned(
    stats: tuple[str, ...],
    wide: Path,
    calibration: Calibration,
    tmp_path: Path,
    simulated: SimulatedGpu,
) -> None:
    entry = Quantize(name="a", **W4)
    planned = _tensors(
        _planned("measure", wide, calibration, measure=Measure(stats=stats), quantize=(entry,))
    )
    with simulated:
        quantflow.measure(
            wide,
            tmp_path / "m",
            calibration=calibration,
            options=Measure(stats=stats),
            compute=ON_GPU,
        )
    assert planned / 2 < simulated.peak <= planned


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "signround" else pytest.mark.slow) for name in ENTRIES],
)
def test_quantize_takes_what_is_planned(
    name: str,
    wide: Path,
    measured: Path,
    calibration: Calibration,
    tmp_path: Path,
    simulated: SimulatedGpu,
) -> None:
    entry = Quantize(name="a", **ENTRIES[name])
    planned = _tensors(_planned("quantize", wide, calibration, quantize=(entry,)))
    given = None if name == "hqq" else measured
    with simulated:
        quantflow.quantize(wide, tmp_path / "q", entry=entry, measurement=given, compute=ON_GPU)
    assert planned / 3 < simulated.peak <= planned


@pytest.mark.slow
def test_validate_takes_what_is_planned(
    wide: Path,
    text_files: dict[str, Path],
    calibration: Calibration,
    tmp_path: Path,
    simulated: SimulatedGpu,
) -> None:
    entry = Quantize(name="a", scheme="W4A16_ASYM", algorithm="rtn", group_size=32)
    made = quantflow.export(
        quantflow.quantize(wide, tmp_path / "q", entry=entry).folder, tmp_path / "a"
    ).folder
    options = Validate(text=str(text_files["heldout"]), tokens=192, sequence_length=96)
    planned = _tensors(_planned("validate", wide, calibration, quantize=(entry,), validate=options))
    with simulated:
        quantflow.validate(made, wide, options=options, report=tmp_path / "r", compute=ON_GPU)
    assert planned / 2 < simulated.peak <= planned


def test_a_plan_says_what_each_stage_takes_of_a_device_and_what_does_not_fit(
    wide: Path, calibration: Calibration
) -> None:
    recipe = {
        "model": str(wide),
        "calibration": calibration,
        "quantize": (Quantize(name="a", **ENTRIES["gptq"]),),
    }
    plain = quantflow.plan(Recipe(**recipe))
    assert not any(
        "device_memory" in stage for stage in plain["stages"]
    ) and "on device" not in text(plain)
    found = quantflow.plan(Recipe(**recipe, compute=ON_GPU))
    told = {stage["stage"]: stage["device_memory"] for stage in found["stages"]}
    assert told["export"] is None and told["measure"] > 0 and told["quantize"] > 0
    assert "on device" in text(found)
    refused = quantflow.plan(
        Recipe(**recipe, compute=ON_GPU, resources=Resources(max_device_memory="1MB"))
    )
    by_stage = {stage["stage"]: stage["refused"] for stage in refused["stages"]}
    assert (
        f"tensors of quantize take {told['quantize']} bytes on cuda, --max-device-memory is 1MB"
        == by_stage["quantize"]
    )
    assert by_stage["export"] is None


def test_a_plan_for_a_device_times_a_layer_there_and_its_stages_add_up(
    wide: Path, calibration: Calibration, simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tuple(Quantize(name=name, **ENTRIES[name]) for name in ("gptq", "best", "hqq"))
    compute = Compute(device="cuda", dtype="bfloat16")
    recipe = Recipe(model=str(wide), calibration=calibration, quantize=entries, compute=compute)
    monkeypatch.setattr(forecast, "open_device", lambda _name: SIMULATED)
    with simulated:
        found = quantflow.plan(recipe, probe=True)
    layer = sum(
        tensor.nbytes
        for name, tensor in load_file(wide / "model.safetensors").items()
        if ".layers.0." in name
    )
    assert simulated.put_bytes > 2 * layer  # in both dtypes, and pieces that are rounded
    assert simulated.operators > 500 and simulated.fetched_bytes > 0
    assert simulated.live < simulated.peak / 10, "what was timed is let go of"
    seconds = {(stage["stage"], stage["artifact"]): stage["seconds"] for stage in found["stages"]}
    assert {stage for stage, _ in seconds} == {"measure", "quantize", "export", "validate"}
    assert all(math.isfinite(each) and each > 0 for each in seconds.values())
    assert found["total"]["seconds"] == pytest.approx(sum(seconds.values()))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has what the test says it lacks"
)
def test_a_probe_needs_the_device_and_a_plan_of_memory_does_not(wide: Path) -> None:
    with pytest.raises(UnsupportedError, match="--device cuda: torch .* finds no device"):
        quantflow.plan(Recipe(model=str(wide), compute=ON_GPU), probe=True)
    assert quantflow.plan(Recipe(model=str(wide), compute=ON_GPU))["total"]["seconds"] is None


def test_quantize_refuses_what_a_device_has_no_room_for_before_a_layer_is_read(
    wide: Path, measured: Path, calibration: Calibration, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    entry = Quantize(name="a", **ENTRIES["gptq"])
    planned = _planned("quantize", wide, calibration, quantize=(entry,))
    told, resources = (
        f"quantize: tensors take {planned} bytes",
        Resources(max_device_memory=str(planned - 1)),
    )
    with (
        simulated,
        pytest.raises(ResourceError, match=f"{told} .* is --max-device-memory") as refused,
    ):
        quantflow.quantize(
            wide,
            tmp_path / "q",
            entry=entry,
            measurement=measured,
            compute=ON_GPU,
            resources=resources,
        )
    assert refused.value.exit_code == 5
    assert simulated.put_bytes == 0
