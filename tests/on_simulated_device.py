"""Layers on a device: the tensors that cross, the functions that move them, the bits.

The device is simulated; no GPU ran this.

test_device.py runs these tests in a process of their own.
"""

import dataclasses
import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import Backend

import quantflow
from quantflow.core import device_scales
from quantflow.core.device import HOST, Device, open_device
from quantflow.core.kv import KVScales
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scale_rules import SCALE_METHODS
from quantflow.core.scheme import preset
from quantflow.errors import QuantflowError, ResourceError, UnsupportedError, UsageError
from quantflow.exporting.canary import rounder
from quantflow.measuring import measure, observe
from quantflow.measuring.job import MeasureJob
from quantflow.models import capture, read_ahead, stand_ins
from quantflow.models.load import Source
from quantflow.observers import of_gradients
from quantflow.planning.recipe import (
    Calibration,
    Compute,
    HeadSettings,
    KVCacheSettings,
    Measure,
    Quantize,
    Recipe,
    Resources,
    Validate,
)
from quantflow.progress import SILENT
from quantflow.stages import run
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.validating import layerwise, validate
from tests.simulated_gpu import GPU, KIND, AcrossError, SimulatedGpu

SIMULATED = Device(kind=GPU, model="simulated", capability="0.0")
STATS = (
    "amax",
    "channel_amax",
    "min_max",
    "mean_abs",
    "histogram",
    "hessian",
    "fisher",
    "gradient",
)
ON_GPU = Compute(device="cuda")
CROSSINGS = (Device.put, Device.fetch, QTensor.to, QuantizedLinear.to, KVScales.to)
ARTIFACTS: dict[str, dict[str, Any]] = {
    "zero points": {"scheme": "W4A16_ASYM", "algorithm": "rtn", "group_size": 32},
    "inputs, heads and caches": {
        "scheme": "FP8",
        "kv_cache": KVCacheSettings(scheme="FP8", granularity="per_head"),
        "head": HeadSettings(scheme="W8A16"),
    },
    "asymmetric inputs": {"scheme": "W8A8_STATIC", "algorithm": "rtn"},
}


def _measure(
    model: Path, output: Path, text: Path, stats: tuple[str, ...] = STATS, **words: Any
) -> dict[str, torch.Tensor]:
    calibration = Calibration(source=str(text), samples=3, sequence_length=32)
    quantflow.measure(model, output, calibration=calibration, options=Measure(stats=stats), **words)
    return load_file(output / "rank-000-of-001" / "statistics.safetensors")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """The device that `cuda` is, entered by the test.

    Tensors cross in `put` and `fetch`, and a quantized linear as a whole.
    """
    for stage in (measure, validate):
        monkeypatch.setattr(stage, "open_device", lambda name: HOST if name == "cpu" else SIMULATED)
    return SimulatedGpu(*CROSSINGS)


@pytest.fixture(scope="module")
def on_cpu(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    return _measure(llama, tmp_path_factory.mktemp("cpu") / "m", text_files["calibration"])


def test_measure_finds_the_same_on_a_device_and_no_tensor_crosses_without_a_name(
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    on_cpu: dict[str, torch.Tensor],
) -> None:
    with simulated:
        found = _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)
    assert found.keys() == on_cpu.keys()
    for name, expected in on_cpu.items():  # kernels differ by the order of their sums
        if name.endswith("counts"):
            assert found[name].sum() == expected.sum()
        else:
            torch.testing.assert_close(
                found[name],
                expected,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert simulated.operators > 1000
    assert simulated.fetched_bytes >= sum(
        tensor.nbytes for tensor in set(found.values()) if tensor.ndim == 2
    )


@pytest.mark.parametrize(
    "broken", ["masks stay in host memory", "weights stay there", "statistics are not fetched"]
)
def test_the_simulation_fails_where_one_crossing_is_forgotten(
    broken: str,
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken == "masks stay in host memory":
        monkeypatch.setattr(capture, "TensorPool", lambda _device: stand_ins.TensorPool())
    elif broken == "weights stay there":
        fill = Source.fill_
        monkeypatch.setattr(Source, "fill_", lambda *of, dtype, device=HOST: fill(*of, dtype=dtype))
        monkeypatch.setattr(capture, "placed", lambda module, device: nullcontext())
    else:
        monkeypatch.setattr(observe, "fetched", lambda tensors, device: tensors)
    with (
        simulated,
        pytest.raises(
            (AcrossError, RuntimeError), match="two devices|crosses outside|subclass|numpy"
        ),
    ):
        _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)


def test_a_layer_is_read_while_the_one_before_it_runs_and_the_bits_stay(
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second, run, readers = threading.Event(), capture.LayerStream.run, set[str]()
    read = read_ahead.read_tensor

    def reading(path: Path, info: Any, **words: Any) -> torch.Tensor:
        readers.add(threading.current_thread().name)
        tensor = read(path, info, **words)
        if info.name.endswith("layers.1.mlp.down_proj.weight"):
            second.set()
        return tensor

    def running(self: capture.LayerStream, *of: Any, **words: Any) -> torch.Tensor:
        assert second.wait(60), "layer 1 is not read while layer 0 runs"
        return run(self, *of, **words)

    with monkeypatch.context() as patched, simulated:
        patched.setattr(read_ahead, "read_tensor", reading)
        patched.setattr(capture.LayerStream, "run", running)
        found = _measure(llama, tmp_path / "ahead", text_files["calibration"], compute=ON_GPU)
    assert {name.rpartition("_")[0] for name in readers} == {read_ahead.THREAD}
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith(read_ahead.THREAD)
    ]
    with SimulatedGpu(*CROSSINGS):
        monkeypatch.setattr(measure, "reading_ahead", lambda source, _device: nullcontext(source))
        expected = _measure(llama, tmp_path / "after", text_files["calibration"], compute=ON_GPU)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_what_a_device_has_no_room_for_is_refused_before_a_layer_is_read(
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Source, "fill_", lambda *_of, **_words: pytest.fail("a weight was read"))
    with (
        simulated,
        pytest.raises(
            ResourceError, match="tensors take .* of simulated:0 .*--max-device-memory 100KB"
        ) as refused,
    ):
        _measure(
            llama,
            tmp_path / "m",
            text_files["calibration"],
            compute=ON_GPU,
            resources=Resources(max_device_memory="100KB"),
        )
    assert refused.value.exit_code == 5
    assert simulated.put_bytes == 0


def test_a_stopped_measurement_begins_again_on_another_device(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, simulated: SimulatedGpu
) -> None:
    _measure(llama, tmp_path / "m", text_files["calibration"])
    with simulated, pytest.raises(QuantflowError, match="made from other inputs|device"):
        _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)


def test_a_run_in_bfloat16_has_float32_statistics_near_those_of_float32(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, on_cpu: dict[str, torch.Tensor]
) -> None:
    forward = tuple(name for name in STATS if not of_gradients(name))
    found = _measure(
        llama,
        tmp_path / "m",
        text_files["calibration"],
        compute=Compute(dtype="bfloat16"),
        stats=forward,
    )
    on_cpu = {name: tensor for name, tensor in on_cpu.items() if name in found}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in on_cpu.items()
    }
    sums = [name for name in found if name.endswith("hessian_sum")]
    assert any(not torch.equal(found[name], on_cpu[name]) for name in sums)
    for name in sums:
        assert (found[name] - on_cpu[name]).norm() < 0.02 * on_cpu[name].norm(), name


def test_the_host_hands_back_the_tensor_that_it_is_given() -> None:
    tensor = torch.ones(3)
    assert HOST.put(tensor) is tensor
    assert HOST.fetch(tensor) is tensor
    assert HOST.key() == {}
    assert not HOST.host_empty((2,), dtype=torch.float32).is_pinned()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has what the test says it lacks"
)
def test_cuda_without_cuda_says_what_torch_says() -> None:
    with pytest.raises(
        UnsupportedError, match=r"--device cuda:1: torch .* finds no device"
    ) as refused:
        open_device("cuda:1")
    assert refused.value.exit_code == 6


@pytest.mark.parametrize(("given", "kept"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", None)])
def test_a_workspace_of_cublas_without_one_order_of_sums_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="A", major=9, minor=0)
    )
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if given is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    if kept is None:
        with pytest.raises(UnsupportedError, match=f"CUBLAS_WORKSPACE_CONFIG={given}"):
            open_device("cuda")
        return
    assert open_device("cuda").key()["device"]["workspace"] == kept


@pytest.mark.parametrize("name", SCALE_METHODS)
def test_scales_of_gaudis_rules_are_computed_where_the_weight_is(name: str) -> None:
    method, target = SCALE_METHODS[name], device_scales.target("gaudi2")
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    expected = device_scales.weight_scale(weight, method.weight, target=target)
    with SimulatedGpu(*CROSSINGS):
        scale = device_scales.weight_scale(SIMULATED.put(weight), method.weight, target=target)
        assert scale.device == GPU
        assert torch.equal(SIMULATED.fetch(scale), expected)


def test_a_linear_whose_weight_is_on_a_device_already_goes_there_whole() -> None:
    scheme = preset("FP8")
    codes = torch.ones(8, 32).to(torch.float8_e4m3fn)
    weight = QTensor(qvalue=codes, scale=torch.ones(1, 1), zero_point=None, scheme=scheme.weights)
    linear = QuantizedLinear(weight=weight, scheme=scheme, input_scale=torch.ones(1))
    with SimulatedGpu(*CROSSINGS):
        there = replace(linear, weight=linear.weight.to(GPU)).to(GPU)
        assert there.input_scale is not None and there.input_scale.device == GPU


def test_gaudi_is_refused_with_a_reason() -> None:
    with pytest.raises(UnsupportedError, match="Gaudi has no float64"):
        open_device("hpu")


@pytest.mark.parametrize("words", [{"device": "gpu"}, {"device": "cuda:x"}, {"dtype": "float16"}])
def test_a_word_that_is_no_device_and_no_dtype_is_refused(words: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="device=|compute: dtype="):
        Compute(**words)


def test_ranks_on_one_device_or_on_devices_without_a_way_between_and_bfloat16_gradients_are_refused(
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words: dict[str, Any] = {"calibration": Calibration(source=str(text_files["calibration"]))}
    with pytest.raises(UsageError, match="2 ranks with --device cuda:0, which they would share"):
        quantflow.measure(
            llama,
            tmp_path / "m",
            options=Measure(ranks=2),
            compute=Compute(device="cuda:0"),
            **words,
        )
    monkeypatch.delitem(Backend.default_device_backend_map, KIND)
    with pytest.raises(
        UnsupportedError,
        match="share a model with --device cuda, whose sums torch .* cannot make there",
    ):
        quantflow.measure(
            llama, tmp_path / "m", options=Measure(ranks=2, tp=2), compute=ON_GPU, **words
        )
    with pytest.raises(UnsupportedError, match="gradients go back through layers in float32"):
        quantflow.measure(
            llama,
            tmp_path / "m",
            options=Measure(stats=("gradient",)),
            compute=Compute(dtype="bfloat16"),
            **words,
        )


def test_run_hands_the_device_of_a_recipe_to_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[MeasureJob] = []
    monkeypatch.setattr(
        MeasureJob,
        "run",
        lambda job, progress: seen.append(job) or SimpleNamespace(folder=tmp_path),
    )
    run._measure(
        Recipe(model="m", compute=Compute(device="cuda:1")), tmp_path, run.StageTimes(), SILENT
    )
    assert [job.compute for job in seen] == [Compute(device="cuda:1")]


def test_deterministic_kernels_are_asked_for_and_the_setting_is_put_back() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with SIMULATED.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before
    with HOST.deterministic():
        assert torch.are_deterministic_algorithms_enabled() == before


def test_memory_that_ends_on_a_device_is_no_defect_of_the_program() -> None:
    with (
        pytest.raises(ResourceError, match="simulated:0: its memory ended") as refused,
        SIMULATED.deterministic(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
    assert refused.value.exit_code == 5


@pytest.fixture(scope="module")
def artifacts(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Artifacts whose layers, heads, inputs and caches are quantized in many ways.

    Each way puts other tensors on a device.
    """
    folder, made = tmp_path_factory.mktemp("artifacts"), {}
    calibration = Calibration(source=str(text_files["calibration"]), samples=3, sequence_length=32)
    measured = quantflow.measure(llama, folder / "1", calibration=calibration).folder
    for name, words in ARTIFACTS.items():
        entry = Quantize(name="a", **words)
        quantflow.quantize(llama, folder / "2" / name, entry=entry, measurement=measured)
        made[name] = quantflow.export(folder / "2" / name, folder / name).folder
    return made


def _validate(
    artifact: Path, model: Path, report: Path, text: Path, *, exact: bool = False, **words: Any
) -> dict[str, Any]:
    options = Validate(text=str(text), tokens=160, sequence_length=40, exact=exact)
    return dict(quantflow.validate(artifact, model, options=options, report=report, **words).values)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_validate_finds_the_same_on_a_device_and_no_tensor_crosses_without_a_name(
    name: str,
    artifacts: dict[str, Path],
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
) -> None:
    exact = name == "zero points"  # weights alone are quantized
    expected = _validate(
        artifacts[name], llama, tmp_path / "cpu", text_files["heldout"], exact=exact
    )
    with simulated:
        found = _validate(
            artifacts[name],
            llama,
            tmp_path / "gpu",
            text_files["heldout"],
            exact=exact,
            compute=ON_GPU,
        )
    assert found["protocol"]["device"] == {
        "kind": "simulated",
        "model": "simulated",
        "capability": "0.0",
    }
    assert "device" not in expected["protocol"]
    assert found["windows"].keys() == expected["windows"].keys()
    # Where inputs are rounded, another order of sums turns some to the other neighbour.
    apart = {
        metric: abs(found["metrics"][metric]["value"] / bound["value"] - 1)
        for metric, bound in expected["metrics"].items()
    }
    assert max(apart.values()) < (1e-4 if exact else 0.05), apart
    assert found["noise_floor"]["mean_kld"]["value"] == pytest.approx(
        expected["noise_floor"]["mean_kld"]["value"], rel=0.05
    )
    assert simulated.operators > 1000
    # divergence, agreement and both likelihoods of each token; candidate and noise
    scored = 4 * 39 * (8 + 1 + 8 + 8) * 2
    assert simulated.fetched_bytes > scored


@pytest.mark.parametrize(
    "broken",
    ["linears stay in host memory", "scales of caches stay there", "scores are not fetched"],
)
def test_the_simulation_fails_where_a_crossing_of_validate_is_forgotten(
    broken: str,
    artifacts: dict[str, Path],
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken == "linears stay in host memory":

        def forgetful(record: Any, **changes: Any) -> Any:
            on_device = changes.keys() == {"linears_device"}
            return record if on_device else dataclasses.replace(record, **changes)

        monkeypatch.setattr(validate, "replace", forgetful)
    elif broken == "scales of caches stay there":
        monkeypatch.setattr(validate, "rounder", lambda artifact, device: rounder(artifact))
    else:
        monkeypatch.setattr(layerwise, "brought_back", lambda comparison, device: comparison)
    with (
        simulated,
        pytest.raises(
            (AcrossError, RuntimeError), match="two devices|crosses outside|subclass|numpy"
        ),
    ):
        _validate(
            artifacts["inputs, heads and caches"],
            llama,
            tmp_path / "r",
            text_files["heldout"],
            compute=ON_GPU,
        )


def test_a_validation_of_another_device_or_dtype_is_refused_and_nothing_of_it_is_used(
    artifacts: dict[str, Path],
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact, text, seen = artifacts["zero points"], text_files["heldout"], []
    advance = capture.LayerStream.advance
    monkeypatch.setattr(
        capture.LayerStream,
        "advance",
        lambda self, *args, **words: seen.append(self.device.name) or advance(self, *args, **words),
    )
    _validate(artifact, llama, tmp_path / "r", text)
    assert seen == ["cpu"] * 6  # two layers of the source, the artifact, and the source in bfloat16
    for other in (ON_GPU, Compute(dtype="bfloat16")):
        with (
            simulated,
            pytest.raises(
                QuantflowError, match="holds a finished result with (device|dtype) = null, now"
            ),
        ):
            _validate(artifact, llama, tmp_path / "r", text, compute=other)
    seen.clear()
    with simulated:
        _validate(artifact, llama, tmp_path / "r", text, compute=ON_GPU, force=True)
    # what the source's layers put out on the CPU was kept, for the CPU
    assert seen == ["simulated:0"] * 6


def test_a_stopped_validation_begins_again_on_another_device(
    artifacts: dict[str, Path],
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact, text, seen = artifacts["zero points"], text_files["heldout"], []
    advance = capture.LayerStream.advance

    def stopped(self: capture.LayerStream, *args: Any, **words: Any) -> None:
        seen.append(self.device.name)
        if seen == ["cpu"] * 4:
            raise KeyboardInterrupt
        advance(self, *args, **words)

    monkeypatch.setattr(capture.LayerStream, "advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        _validate(artifact, llama, tmp_path / "r", text)
    with simulated:
        _validate(artifact, llama, tmp_path / "r", text, compute=ON_GPU)
    assert seen == ["cpu"] * 4 + ["simulated:0"] * 6


def test_validations_of_two_devices_are_not_compared(
    artifacts: dict[str, Path],
    llama: Path,
    text_files: dict[str, Path],
    tmp_path: Path,
    simulated: SimulatedGpu,
) -> None:
    artifact, text = artifacts["zero points"], text_files["heldout"]
    _validate(artifact, llama, tmp_path / "cpu", text)
    with (
        simulated,
        pytest.raises(QuantflowError, match=r"device .*simulated.* and None: validated otherwise"),
    ):
        _validate(
            artifact, llama, tmp_path / "gpu", text, compute=ON_GPU, previous=tmp_path / "cpu"
        )


def test_the_cpu_by_name_is_the_cpu_by_default(
    artifacts: dict[str, Path], llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    artifact, text = artifacts["zero points"], text_files["heldout"]
    before = _validate(artifact, llama, tmp_path / "r", text)
    made = (tmp_path / "r" / "validation.json").stat().st_mtime_ns
    assert (
        _validate(
            artifact, llama, tmp_path / "r", text, compute=Compute(device="cpu", dtype="float32")
        )
        == before
    )
    assert (tmp_path / "r" / "validation.json").stat().st_mtime_ns == made
    known = {
        "windows",
        "tokens",
        "sequence_length",
        "text",
        "dtype",
        "bound",
        "resamples",
        "seed",
        "hash",
    }
    # another key would make every validation of before another one
    assert before["protocol"].keys() == known


def test_a_validation_in_bfloat16_is_near_that_in_float32_by_the_noise(
    artifacts: dict[str, Path], llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    artifact, text = artifacts["zero points"], text_files["heldout"]
    exact = _validate(artifact, llama, tmp_path / "32", text)
    found = _validate(artifact, llama, tmp_path / "16", text, compute=Compute(dtype="bfloat16"))
    assert found["protocol"]["dtype"] == "bfloat16"
    noise = exact["noise_floor"]["mean_kld"]["value"]
    assert 0 < found["noise_floor"]["mean_kld"]["value"] == pytest.approx(noise, rel=0.2)
    difference = abs(found["metrics"]["mean_kld"]["value"] - exact["metrics"]["mean_kld"]["value"])
    assert 0 < difference < 10 * noise
    assert (
        "the baseline in float32 against itself in bf16"
        in (tmp_path / "16" / "report.html").read_text()
    )


def test_a_diagnosis_is_refused_on_a_device_and_in_bfloat16(llama: Path, tmp_path: Path) -> None:
    for compute in (ON_GPU, Compute(dtype="bfloat16")):
        with pytest.raises(
            UnsupportedError, match="--diagnose with --device .* probes run in float32 on the CPU"
        ):
            quantflow.validate(
                llama, llama, options=Validate(diagnose=40), report=tmp_path / "r", compute=compute
            )


def test_validate_takes_the_device_of_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "validate",
        "artifact",
        "--baseline",
        "model",
        "--device",
        "cuda:1",
        "--dtype",
        "bfloat16",
        "--dry-run",
        "--json",
    ]
    assert exit_code(cli, words) == 0
    assert json.loads(capsys.readouterr().out)["compute"] == {
        "device": "cuda:1",
        "dtype": "bfloat16",
    }
