"""Layers on a device: what crosses, by which functions, and with which bits; the device is simulated, no GPU ran this.

test_device.py runs these tests in a process of their own.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantflow import api
from quantflow.calibration import measure, observe
from quantflow.core.device import HOST, Device, open_device
from quantflow.errors import QuantflowError, UnsupportedError, UsageError
from quantflow.models import capture, stand_ins
from quantflow.planning.recipe import Calibration, Compute, Measure, Recipe
from quantflow.progress import SILENT
from quantflow.stages import run
from tests.simulated_gpu import GPU, AcrossError, SimulatedGpu

SIMULATED = Device(kind=GPU, model="simulated", capability="0.0")
STATS = ("amax", "channel_amax", "min_max", "mean_abs", "histogram", "hessian")
ON_GPU = Compute(device="cuda")


def _measure(model: Path, output: Path, text: Path, **words: Any) -> dict[str, torch.Tensor]:
    calibration = Calibration(source=str(text), samples=3, sequence_length=32)
    api.measure(model, output, calibration=calibration, measuring=Measure(stats=STATS), **words)
    return load_file(output / "rank-000-of-001" / "statistics.safetensors")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """The device that `cuda` is, entered by the test; tensors cross in `put` and `fetch` alone."""
    monkeypatch.setattr(measure, "open_device", lambda name: HOST if name == "cpu" else SIMULATED)
    return SimulatedGpu(Device.put, Device.fetch)


@pytest.fixture(scope="module")
def on_cpu(llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return _measure(llama, tmp_path_factory.mktemp("cpu") / "m", text_files["calibration"])


def test_measure_finds_the_same_on_a_device_and_no_tensor_crosses_without_a_name(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, simulated: SimulatedGpu, on_cpu: dict[str, torch.Tensor]
) -> None:
    with simulated:
        found = _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)
    assert found.keys() == on_cpu.keys()
    for name, expected in on_cpu.items():  # kernels differ by the order of their sums
        if name.endswith("counts"):
            assert found[name].sum() == expected.sum()
        else:
            torch.testing.assert_close(
                found[name], expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert simulated.operators > 1000
    assert simulated.fetched_bytes >= sum(tensor.nbytes for tensor in set(found.values()) if tensor.ndim == 2)


@pytest.mark.parametrize("broken", ["masks stay in host memory", "weights stay there", "statistics are not fetched"])
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
        monkeypatch.setattr(capture, "placed", lambda module, device: nullcontext())
    else:
        monkeypatch.setattr(observe, "fetched", lambda tensors, device: tensors)
    with simulated, pytest.raises((AcrossError, RuntimeError), match="two devices|crosses outside|subclass|numpy"):
        _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)


def test_a_stopped_measurement_begins_again_on_another_device(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, simulated: SimulatedGpu
) -> None:
    _measure(llama, tmp_path / "m", text_files["calibration"])
    with simulated, pytest.raises(QuantflowError, match="made from other inputs|device"):
        _measure(llama, tmp_path / "m", text_files["calibration"], compute=ON_GPU)


def test_a_run_in_bfloat16_has_float32_statistics_near_those_of_float32(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, on_cpu: dict[str, torch.Tensor]
) -> None:
    found = _measure(llama, tmp_path / "m", text_files["calibration"], compute=Compute(dtype="bfloat16"))
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test says it lacks")
def test_cuda_without_cuda_says_what_torch_says() -> None:
    with pytest.raises(UnsupportedError, match=r"--device cuda:1: torch .* finds no device") as refused:
        open_device("cuda:1")
    assert refused.value.exit_code == 6


def test_gaudi_is_refused_with_a_reason() -> None:
    with pytest.raises(UnsupportedError, match="compiled for shapes known beforehand"):
        open_device("hpu")


@pytest.mark.parametrize("words", [{"device": "gpu"}, {"device": "cuda:x"}, {"dtype": "float16"}])
def test_a_word_that_is_no_device_and_no_dtype_is_refused(words: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="compute: "):
        Compute(**words)


def test_ranks_and_gradients_are_refused_on_a_device(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, simulated: SimulatedGpu
) -> None:
    words: dict[str, Any] = {"calibration": Calibration(source=str(text_files["calibration"])), "compute": ON_GPU}
    with pytest.raises(UsageError, match="2 ranks with --device"):
        api.measure(llama, tmp_path / "m", measuring=Measure(ranks=2), **words)
    with pytest.raises(UnsupportedError, match="gradients go back in float32 on the CPU"):
        api.measure(llama, tmp_path / "m", measuring=Measure(stats=("gradient",)), **words)


def test_run_hands_the_device_of_a_recipe_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(run.api, "measure", lambda *_, **words: seen.update(words) or SimpleNamespace(folder=tmp_path))
    run._measure(Recipe(model="m", compute=Compute(device="cuda:1")), tmp_path, run.StageTimes(), SILENT)
    assert seen["compute"] == Compute(device="cuda:1")


def test_deterministic_kernels_are_asked_for_and_the_setting_is_put_back() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with SIMULATED.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before
    with HOST.deterministic():
        assert torch.are_deterministic_algorithms_enabled() == before
