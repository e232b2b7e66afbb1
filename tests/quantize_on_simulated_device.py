"""Quantizing on a device: the tensors that cross, the functions that move them, the results.

The device is simulated; no GPU ran this.

test_device_quantize.py runs these tests in a process of their own.
"""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quantflow
from quantflow.core.device import HOST, Device
from quantflow.core.kv import KVScales
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.distributed.launch import launched_environment
from quantflow.errors import QuantflowError, UnsupportedError, UsageError
from quantflow.exporting import canary, proof_process
from quantflow.measuring import measure
from quantflow.models import capture
from quantflow.planning.recipe import (
    Calibration,
    Compute,
    HeadSettings,
    KVCacheSettings,
    Measure,
    Quantize,
    Resources,
    SignRound,
    Tune,
)
from quantflow.quantizing import file_to_file, quantize
from quantflow.quantizing.layer_by_layer import Forward
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.rank_on_simulated_device import APART
from tests.simulated_gpu import GPU, AcrossError, SimulatedGpu

SIMULATED = Device(kind=GPU, model="simulated", capability="0.0")
ON_GPU = Compute(device="cuda")  # the calibration text in bfloat16
IN_FLOAT32 = Compute(device="cuda", dtype="float32")
STATS = ("amax", "channel_amax", "min_max", "mean_abs", "histogram", "gradient")
W4 = {"scheme": "W4A16", "group_size": 32}
FILES: dict[str, dict[str, Any]] = {  # rounded row by row
    "rtn": {"scheme": "W4A16_ASYM", "group_size": 32, "algorithm": "rtn"},
    "rtn_mse": {"scheme": "W8A16", "algorithm": "rtn_mse"},
    "hqq": {**W4, "algorithm": "hqq"},
    "one scale": {"scheme": "FP8_DYNAMIC"},
    "exponents": {"scheme": "MXFP4A16"},
}
LAYERS: dict[str, dict[str, Any]] = {  # with the calibration text
    "gptq": {
        **W4,
        "algorithm": "gptq",
        "kv_cache": KVCacheSettings(scheme="FP8", granularity="per_head"),
    },
    "zero points": {
        "scheme": "W4A16_ASYM",
        "group_size": 32,
        "algorithm": "gptq",
        "quantized_inputs": True,
    },
    "hadamard": {
        **W4,
        "algorithm": "gptq",
        "transforms": ({"hadamard": {}},),
        "head": HeadSettings(scheme="W8A16"),
    },
    "awq": {**W4, "algorithm": "rtn", "transforms": ({"awq": {}},)},
    "smoothquant": {"scheme": "W8A8", "transforms": ({"smoothquant": {"alpha": "auto"}},)},
    "static": {"scheme": "W8A8_STATIC", "transforms": ({"smoothquant": {"alpha": "auto"}},)},
    "signround": {
        **W4,
        "algorithm": "signround",
        "signround": SignRound(iterations=2, sequences=2, start="gptq"),
    },
    "best": {**W4, "algorithm": "best", "tune": Tune(steps=2, sequences=2)},
}


QUICK = ("gptq", "hadamard")


class HereProver:
    """The proof of an export in this process, where the simulated device is."""

    def expect(self, kind: str) -> None:
        """Import nothing: all is there."""

    def prove(
        self, artifact: Path, quantized: Path, source: Path, *, workers: int, measures: bool
    ) -> dict[str, Any]:
        """Prove an artifact."""
        with torch.no_grad():
            return proof_process.prove(
                artifact, quantized, source, workers=SEQUENTIAL, measures=measures
            )


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """The device that `cuda` is, entered by the test.

    Tensors cross in `put` and `fetch`, a quantized weight as a whole.
    """
    for stage in (measure, quantize, canary):
        monkeypatch.setattr(stage, "open_device", lambda name: HOST if name == "cpu" else SIMULATED)
    # the simulation is of one thread
    monkeypatch.setattr(file_to_file, "Workers", lambda _count: Workers(1))
    return SimulatedGpu(Device.put, Device.fetch, QTensor.to, QuantizedLinear.to, KVScales.to)


@pytest.fixture(scope="module")
def measured(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    calibration = Calibration(source=str(text_files["calibration"]), samples=3, sequence_length=32)
    folder = tmp_path_factory.mktemp("measured") / "m"
    return quantflow.measure(
        llama, folder, calibration=calibration, options=Measure(stats=STATS)
    ).folder


def _quantize(model: Path, output: Path, words: dict[str, Any], **others: Any) -> Path:
    return quantflow.quantize(model, output, entry=Quantize(name="a", **words), **others).folder


def _layers(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted((folder / "layers").glob("*.safetensors"))]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "layers").glob("*.json"))]


@pytest.mark.parametrize("name", FILES)
def test_rows_that_are_rounded_on_a_device_are_those_of_the_cpu_and_the_proof_decodes_them(
    name: str, llama: Path, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    expected = _quantize(llama, tmp_path / "cpu", FILES[name])
    with simulated:
        found = _quantize(llama, tmp_path / "gpu", FILES[name], compute=ON_GPU)
    for left, right in zip(_layers(found), _layers(expected), strict=True):
        assert left.keys() == right.keys()
        for key in right:
            assert torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)), key
    assert [record["values"] for record in _records(found)] == [
        record["values"] for record in _records(expected)
    ]
    assert simulated.operators > 100 and simulated.fetched_bytes > 0
    quantflow.export(found, tmp_path / "a")  # tensors are compared: that needs no device


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYERS]
)
def test_layers_that_are_quantized_on_a_device_lose_what_those_of_the_cpu_lose_and_are_proved_there(
    name: str, llama: Path, measured: Path, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    words = LAYERS[name]
    expected = _quantize(llama, tmp_path / "cpu", words, measurement=measured)
    with simulated:
        found = _quantize(llama, tmp_path / "gpu", words, measurement=measured, compute=IN_FLOAT32)
    lost = [0.0, 0.0]
    for left, right in zip(_records(found), _records(expected), strict=True):
        assert left["decisions"].keys() == right["decisions"].keys()
        # sums have another order: some weights go to the other neighbour
        for linear, errors in right["errors"].items():
            assert left["errors"][linear]["weight"] == pytest.approx(errors["weight"], rel=0.05), (
                linear
            )
            lost = [lost[0] + left["errors"][linear]["output"], lost[1] + errors["output"]]
    assert lost[0] == pytest.approx(lost[1], rel=0.05)
    for left, right in zip(_layers(found), _layers(expected), strict=True):
        assert {key: (value.dtype, value.shape) for key, value in left.items()} == {
            key: (value.dtype, value.shape) for key, value in right.items()
        }
    assert simulated.operators > 1000
    assert simulated.live < simulated.peak / 10, "what a layer took is let go of"
    with simulated:
        artifact = quantflow.export(found, tmp_path / "a", prover=HereProver()).folder  # type: ignore[arg-type]
    proof = json.loads((artifact / "quantflow.json").read_text())["proof"]
    assert proof["kind"] == "canary"
    assert proof["device"] == {"kind": "simulated", "model": "simulated", "capability": "0.0"}


def test_the_proof_of_what_a_device_made_is_refused_where_that_device_is_not(
    llama: Path,
    measured: Path,
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated:
        found = _quantize(
            llama, tmp_path / "gpu", LAYERS["gptq"], measurement=measured, compute=ON_GPU
        )
    other = Device(kind=GPU, model="another", capability="0.0")
    monkeypatch.setattr(canary, "open_device", lambda _name: other)
    with (
        simulated,
        pytest.raises(
            UnsupportedError,
            match="simulated:0: the layers were computed with model 'simulated', here it is "
            "'another'",
        ),
    ):
        quantflow.export(found, tmp_path / "a", prover=HereProver())  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


BROKEN = [
    "Hessians stay in host memory",
    "quantized linears stay there",
    "statistics stay there",
    "nothing comes back",
]


@pytest.mark.parametrize("broken", BROKEN)
def test_the_simulation_fails_where_a_crossing_of_quantize_is_forgotten(
    broken: str,
    llama: Path,
    measured: Path,
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken == "Hessians stay in host memory":
        monkeypatch.setattr(Device, "factories", lambda _self: nullcontext())
    elif broken == "quantized linears stay there":
        monkeypatch.setattr(QuantizedLinear, "to", lambda self, _device: self)
    elif broken == "statistics stay there":
        of_device = Forward._measured
        monkeypatch.setattr(
            Forward, "_measured", lambda self, layer: of_device(replace(self, device=HOST), layer)
        )
    else:
        monkeypatch.setattr(Device, "fetch", lambda _self, tensor: tensor)
    words = LAYERS["smoothquant" if broken == "statistics stay there" else "gptq"]
    with (
        simulated,
        pytest.raises(
            (AcrossError, RuntimeError, TypeError), match="two devices|crosses|subclass|numpy"
        ),
    ):
        _quantize(llama, tmp_path / "q", words, measurement=measured, compute=ON_GPU)


def test_a_quantization_of_another_device_is_refused_and_a_stopped_one_begins_again_there(
    llama: Path,
    measured: Path,
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, seen = LAYERS["zero points"], list[str]()
    done = _quantize(llama, tmp_path / "q", words, measurement=measured)
    with simulated, pytest.raises(QuantflowError, match="device = null, now"):
        _quantize(llama, done, words, measurement=measured, compute=ON_GPU)
    opened = capture.LayerStream.layer

    def stopped(self: capture.LayerStream, index: int, **others: Any) -> Any:
        seen.append(f"{self.device.name} {index}")
        if seen[-1] == "cpu 1":
            raise KeyboardInterrupt
        return opened(self, index, **others)

    monkeypatch.setattr(capture.LayerStream, "layer", stopped)
    with pytest.raises(KeyboardInterrupt):
        _quantize(llama, tmp_path / "s", words, measurement=measured)
    with simulated:
        _quantize(llama, tmp_path / "s", words, measurement=measured, compute=ON_GPU)
    assert seen == ["cpu 0", "cpu 1", "simulated:0 0", "simulated:0 1"]


@pytest.mark.slow
def test_a_run_that_is_resumed_on_a_device_writes_the_bytes_of_one_that_was_not(
    llama: Path,
    measured: Path,
    tmp_path: Path,
    simulated: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words: dict[str, Any] = {"measurement": measured, "compute": ON_GPU}
    with simulated:
        whole = _quantize(llama, tmp_path / "whole", LAYERS["gptq"], **words)
        opened = capture.LayerStream.layer

        def stopped(self: capture.LayerStream, index: int, **others: Any) -> Any:
            if index == 1:
                raise KeyboardInterrupt
            return opened(self, index, **others)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(capture.LayerStream, "layer", stopped)
            _quantize(llama, tmp_path / "resumed", LAYERS["gptq"], **words)
        resumed = _quantize(llama, tmp_path / "resumed", LAYERS["gptq"], **words)
    names = sorted(
        path.relative_to(whole)
        for path in whole.rglob("*")
        if path.is_file() and path.name != ".hashes.json"
    )
    for name in names:
        if name.suffix in (".safetensors", ".json"):
            assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name


@pytest.mark.slow
def test_schemes_that_are_chosen_for_a_device_cost_what_those_of_the_cpu_cost(
    llama: Path, text_files: dict[str, Path], tmp_path: Path, simulated: SimulatedGpu
) -> None:
    calibration = Calibration(source=str(text_files["calibration"]), samples=3, sequence_length=32)
    words = {**W4, "algorithm": "rtn", "target_bpw": 5.0}
    entry = Quantize(name="a", **words)
    given = quantflow.measure(
        llama, tmp_path / "m", calibration=calibration, entries=(entry,)
    ).folder
    expected = _quantize(llama, tmp_path / "cpu", words, measurement=given)
    with simulated:
        found = _quantize(llama, tmp_path / "gpu", words, measurement=given, compute=ON_GPU)
    records = [
        json.loads((folder / "quantize.json").read_text())["recipe"]["chosen"]
        for folder in (found, expected)
    ]
    left, right = (record["rounds"][-1] for record in records)
    assert left == pytest.approx(right, rel=0.05)
    assert simulated.operators > 1000


def _ranks(
    words: list[str], folder: Path, *, world: int, apart: bool = False
) -> list[dict[str, Any]]:
    """Run a command line as ranks of one machine; return what each noted of its device.

    Args:
        words: behind the name of the program.
        folder: a new one, for what they note.
        world: how many.
        apart: torch has no backend between their devices.
    """
    (folder / "private").mkdir(parents=True)
    started = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "from tests.rank_on_simulated_device import main; main()"
    )
    command = [sys.executable, "-c", started, str(Path(__file__).resolve().parents[1])]
    words = [APART, *words] if apart else words
    ranks = [
        subprocess.Popen(
            [*command, str(folder / f"{rank}.json"), *words],
            env=launched_environment(str(folder / "private"), rank=rank, world=world),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, said
    noted = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return [{**note, "said": text} for note, text in zip(noted, said, strict=True)]


@pytest.mark.slow
def test_ranks_with_a_device_each_quantize_what_one_process_does(
    llama: Path, measured: Path, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    words = {**W4, "algorithm": "gptq", "transforms": ({"awq": {}},)}
    with simulated:
        whole = _quantize(llama, tmp_path / "whole", words, measurement=measured, compute=ON_GPU)
    flags = [
        "quantize",
        str(llama),
        "--measurement",
        str(measured),
        "--ranks",
        "2",
        "--name",
        "a",
        "--device",
        "cuda",
    ]
    flags += [
        "--scheme",
        "W4A16",
        "--group-size",
        "32",
        "--algorithm",
        "gptq",
        "--set",
        "quantize.0.transforms=[{awq: {}}]",
    ]
    told = {}
    for way in ("direct", APART):
        shards = tmp_path / way / "shards"
        told[way] = _ranks([*flags, "-o", str(shards)], tmp_path / way, world=2, apart=way == APART)
        assert [rank["asked"] for rank in told[way]] == [["cuda:0"], ["cuda:1"]]
        assert all(rank["operators"] > 1000 for rank in told[way])
        joined = quantflow.unify(shards, tmp_path / way / "joined", groups=("01",)).folder
        for left, right in zip(_layers(joined), _layers(whole), strict=True):
            assert left.keys() == right.keys()
            for key in right:
                assert torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)), key
    for direct, through_host in zip(told["direct"], told[APART], strict=True):
        assert direct["exchanged"] > 0 == through_host["exchanged"]
        assert direct["fetched"] < through_host["fetched"]  # by the inputs that the other rank got
    sentence = "torch has no backend for simulated:0, ranks exchange through host memory"
    assert [rank["said"].count(sentence) for rank in (*told["direct"], *told[APART])] == [
        0,
        0,
        1,
        0,
    ]


def _measure_with_ranks(
    model: Path, text: Path, folder: Path, *, tp: int
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]:
    """Measure with two ranks on devices and on the CPU.

    The result is the notes of the former, and both statistics of each rank.
    """
    stats, words = (
        ("amax", "min_max", "mean_abs", "hessian"),
        ["--samples", "4", "--sequence-length", "32", "--ranks", "2"],
    )
    flags = [
        "measure",
        str(model),
        "--calibration",
        str(text),
        *words,
        "--tp",
        str(tp),
        "--stats",
        ",".join(stats),
    ]
    told = _ranks([*flags, "-o", str(folder / "gpu"), "--device", "cuda"], folder / "seen", world=2)
    calibration = Calibration(source=str(text), samples=4, sequence_length=32)
    quantflow.measure(
        model,
        folder / "cpu",
        calibration=calibration,
        options=Measure(ranks=2, tp=tp, stats=stats),
    )
    ranks = [f"rank-00{rank}-of-002/statistics.safetensors" for rank in range(2)]
    return told, [
        (load_file(folder / "gpu" / name), load_file(folder / "cpu" / name)) for name in ranks
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_a_device_each_measure_what_ranks_of_the_cpu_do(
    tp: int, llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    """Ranks with a share of the sequences, and ranks with a slice of every linear.

    Slices add up their outputs.
    """
    told, measurements = _measure_with_ranks(llama, text_files["calibration"], tmp_path, tp=tp)
    assert [rank["asked"] for rank in told] == [["cuda:0"], ["cuda:1"]]
    assert all((rank["exchanged"] > 0) == (tp == 2) and rank["operators"] > 1000 for rank in told)
    for found, expected in measurements:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name],
                tensor,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_the_cpu_by_name_is_the_cpu_by_default(llama: Path, measured: Path, tmp_path: Path) -> None:
    done = _quantize(llama, tmp_path / "q", LAYERS["gptq"], measurement=measured)
    made = (done / "DONE.json").stat().st_mtime_ns
    _quantize(
        llama,
        done,
        LAYERS["gptq"],
        measurement=measured,
        compute=Compute(device="cpu", dtype="float32"),
    )
    assert (done / "DONE.json").stat().st_mtime_ns == made
    inputs = json.loads((done / "DONE.json").read_text())["inputs"]
    assert "device" not in inputs and "device" not in json.loads(
        (done / "quantize.json").read_text()
    )


def _lost(folder: Path) -> float:
    """Return the sum of all linears' output errors."""
    return sum(of["output"] for record in _records(folder) for of in record["errors"].values())


def test_text_in_bfloat16_loses_what_the_cpu_loses_and_hidden_states_that_stay_change_no_byte(
    llama: Path, measured: Path, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    words: dict[str, Any] = {"measurement": measured, "compute": ON_GPU}
    expected = _quantize(llama, tmp_path / "cpu", LAYERS["gptq"], measurement=measured)
    crossed, peaks = [], []
    with simulated:
        for name, room in (("away", None), ("resident", "1GiB")):
            before, simulated.peak = simulated.fetched_bytes, simulated.live
            _quantize(
                llama,
                tmp_path / name,
                LAYERS["gptq"],
                **words,
                resources=Resources(max_device_memory=room),
            )
            crossed.append(simulated.fetched_bytes - before)
            peaks.append(simulated.peak)
    for one, other in zip(_layers(tmp_path / "away"), _layers(tmp_path / "resident"), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one | other)
    assert crossed[1] < crossed[0] and peaks[1] > peaks[0]
    assert _lost(tmp_path / "resident") == pytest.approx(_lost(expected), rel=0.05)
    inputs = json.loads((tmp_path / "resident" / "DONE.json").read_text())["inputs"]
    assert inputs["dtype"] == "bfloat16"


@pytest.mark.slow
def test_quantize_says_why_its_layers_run_in_float32(
    llama: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "quantize",
        str(llama),
        "--measurement",
        str(measured),
        "--scheme",
        "W4A16",
        "--group-size",
        "32",
        "--name",
        "a",
        "--quantized-inputs",
    ]
    assert exit_code(cli, [*words, "-o", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert (
        "quantize a: layers run in float32, not bfloat16: the text passes through the quantized "
        "layers" in capsys.readouterr().err
    )
    assert exit_code(cli, [*words, "-o", str(tmp_path / "single")]) == 0
    assert "not bfloat16" not in capsys.readouterr().err
    for half, single in zip(_layers(tmp_path / "half"), _layers(tmp_path / "single"), strict=True):
        assert all(torch.equal(half[key], tensor) for key, tensor in single.items())


def test_what_does_not_go_with_a_device_is_refused(
    llama: Path, tmp_path: Path, simulated: SimulatedGpu
) -> None:
    with pytest.raises(UsageError, match="2 ranks with --device cuda:1, which they would share"):
        _quantize(llama, tmp_path / "q", FILES["rtn"], ranks=2, compute=Compute(device="cuda:1"))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has what the test says it lacks"
)
def test_quantize_without_cuda_ends_with_exit_code_6(llama: Path, tmp_path: Path) -> None:
    words = [
        "quantize",
        str(llama),
        "-o",
        str(tmp_path / "q"),
        "--scheme",
        "FP8_DYNAMIC",
        "--no-export",
        "--device",
        "cuda",
    ]
    assert exit_code(cli, words) == 6
    assert not (tmp_path / "q").exists()


def test_quantize_takes_the_device_of_its_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "quantize",
        "model",
        "-o",
        str(tmp_path / "a"),
        "--scheme",
        "W4A16",
        "--device",
        "cuda:1",
        "--dry-run",
        "--json",
    ]
    assert exit_code(cli, words) == 0
    assert json.loads(capsys.readouterr().out)["compute"] == {
        "device": "cuda:1",
        "dtype": None,  # bfloat16 on a GPU, float32 on the CPU
    }
