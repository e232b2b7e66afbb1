"""Memory, cores and interruptions change when things happen, never a byte of what comes out."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.errors import InputError
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize, SignRound
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine

QUIET = ProgressLine(quiet=True)
ENTRIES = {
    "gptq": Quantize(name="x", scheme="W4A16", group_size=32),
    "gptq on quantized inputs": Quantize(
        name="x", scheme="W4A16", group_size=32, quantized_inputs=True
    ),
    "smoothquant": Quantize(name="x", scheme="W8A8_STATIC"),
    "searched smoothquant": Quantize(
        name="x", scheme="W8A8", transforms=({"smoothquant": {"alpha": "auto"}},)
    ),
    "awq": Quantize(
        name="x", scheme="W4A16", group_size=32, algorithm="rtn", transforms=({"awq": {}},)
    ),
    "signround": Quantize(
        name="x",
        scheme="W4A16",
        group_size=32,
        algorithm="signround",
        signround=SignRound(iterations=3),
    ),
    "hadamard": Quantize(
        name="x", scheme="W8A8_STATIC", algorithm="gptq", transforms=({"hadamard": {"down": True}},)
    ),
}
SLOW = ("gptq", "searched smoothquant", "awq", "signround", "hadamard")  # the others run by default
EVERY = [
    pytest.param(entry, id=name, marks=[pytest.mark.slow] * (name in SLOW))
    for name, entry in ENTRIES.items()
]


def limit(monkeypatch, *, workers):
    """Give every stage this allowance."""
    for module, name in ((measure, "allow_measure"), (quantize, "allow_quantize")):
        original = getattr(module, name)

        def allow(*args, original=original, **options):
            return replace(original(*args, **options), workers=workers, in_flight=workers)

        monkeypatch.setattr(module, name, allow)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def measured(model, text_files, folder):
    calibration = Calibration(source=str(text_files["calibration"]), samples=5, sequence_length=48)
    measure.run(MeasureJob(model=model, output=folder, calibration=calibration), QUIET)
    return rank_folder(folder, 0, 1)


def quantized(model, measurement, folder, entry):
    return quantize.run(
        QuantizeJob(model=model, output=folder, entry=entry, measurement=measurement),
        QUIET,
    )


@pytest.fixture(scope="module")
def measurement(llama, text_files, tmp_path_factory):
    return measured(llama, text_files, tmp_path_factory.mktemp("measured"))


@pytest.fixture(scope="module")
def result(llama, measurement, tmp_path_factory):
    """A function from an entry to the files of its result, made on first use."""
    found = {}

    def make(entry):
        name = next(name for name, each in ENTRIES.items() if each == entry)
        if name not in found:
            folder = tmp_path_factory.mktemp("result") / "out"
            found[name] = files_of(quantized(llama, measurement, folder, entry))
        return found[name]

    return make


class Stopped(BaseException):
    """What ends a run between two layers."""


class StopAfter(ProgressLine):
    """A run that is stopped when a number of its layers are finished."""

    def __init__(self, layers: int) -> None:
        super().__init__(quiet=True)
        object.__setattr__(self, "layers", layers)

    def steps(self, items, **options):
        for number, item in enumerate(items):
            if number == self.layers:
                raise Stopped
            yield item


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_measurement_does_not_depend_on_cores(llama, text_files, tmp_path, monkeypatch, workers):
    expected = files_of(measured(llama, text_files, tmp_path / "expected"))
    limit(monkeypatch, workers=workers)
    assert files_of(measured(llama, text_files, tmp_path / "found")) == expected
    assert sorted(path.name for path in (tmp_path / "found").iterdir() if path.is_dir()) == [
        "rank-000-of-001"
    ]


@pytest.mark.parametrize("entry", EVERY)
def test_quantized_layers_do_not_depend_on_cores(
    llama, measurement, result, tmp_path, monkeypatch, entry
):
    expected = result(entry)
    for workers in (1, 2):
        limit(monkeypatch, workers=workers)
        folder = quantized(llama, measurement, tmp_path / f"found-{workers}", entry)
        assert files_of(folder) == expected
        assert not (folder.parent / f".{folder.name}.hidden").exists()


def test_a_measurement_goes_on_at_the_layer_where_it_was_stopped(llama, text_files, tmp_path):
    expected = files_of(measured(llama, text_files, tmp_path / "expected"))
    calibration = Calibration(source=str(text_files["calibration"]), samples=5, sequence_length=48)
    job = MeasureJob(model=llama, output=tmp_path / "found", calibration=calibration)
    with pytest.raises(Stopped):
        measure.run(job, StopAfter(1))
    first = tmp_path / "found" / ".rank-000-of-001.work" / "layers" / "00000.safetensors"
    before = first.stat().st_mtime_ns
    with pytest.raises(Stopped):
        measure.run(job, StopAfter(0))  # goes on at the second layer, of which it runs none
    assert first.stat().st_mtime_ns == before
    measure.run(job, QUIET)
    assert files_of(rank_folder(tmp_path / "found", 0, 1)) == expected


QUICK = {  # what is lost -> of which entry by default
    "nothing": "smoothquant",
    "hidden states": "gptq on quantized inputs",
    "damaged hidden states": "smoothquant",
    "first layer": "signround",
}


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        pytest.param(entry, lost, id=f"{lost}-{name}", marks=[pytest.mark.slow] * (name != quick))
        for lost, quick in QUICK.items()
        for name, entry in ENTRIES.items()
    ],
)
def test_quantize_goes_on_where_it_was_stopped_to_the_same_bytes(
    llama, measurement, result, tmp_path, entry, lost
):
    expected = result(entry)
    job = QuantizeJob(model=llama, output=tmp_path / "found", entry=entry, measurement=measurement)
    with pytest.raises(Stopped):
        quantize.run(job, StopAfter(1))
    (kept,) = (tmp_path / ".found.hidden").glob("*.hidden")
    assert kept.name == "00001.hidden"
    layers = tmp_path / "found" / "layers"
    before = (layers / "00000.safetensors").stat().st_mtime_ns
    if lost == "hidden states":
        kept.unlink()
    if lost == "damaged hidden states":
        content = bytearray(kept.read_bytes())
        content[5] ^= 1
        kept.write_bytes(content)
    if lost == "first layer":
        (layers / "00000.safetensors").unlink()
    quantize.run(job, QUIET)
    assert files_of(tmp_path / "found") == expected
    assert ((layers / "00000.safetensors").stat().st_mtime_ns == before) == (lost != "first layer")


def test_an_unfinished_result_of_other_inputs_is_named_and_made_again(
    llama, text_files, tmp_path, capsys
):
    measurement = measured(llama, text_files, tmp_path / "measured")
    entry = ENTRIES["gptq"]
    with pytest.raises(Stopped):
        quantize.run(
            QuantizeJob(
                model=llama,
                output=tmp_path / "found",
                entry=replace(entry, group_size=64),
                measurement=measurement,
            ),
            StopAfter(1),
        )
    quantize.run(
        QuantizeJob(model=llama, output=tmp_path / "found", entry=entry, measurement=measurement),
        ProgressLine(),
    )
    assert "the unfinished result was made with plan." in capsys.readouterr().err
    assert files_of(tmp_path / "found") == files_of(
        quantized(llama, measurement, tmp_path / "expected", entry)
    )


def test_a_weight_that_is_not_finite_in_a_later_layer_leaves_the_finished_layers(
    llama, text_files, tmp_path
):
    """The repaired model is another one: its layers are made anew. Nothing final is written."""
    measurement = measured(llama, text_files, tmp_path / "measured")
    model = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    job = QuantizeJob(model=model, output=tmp_path / "found", entry=ENTRIES["gptq"])
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj"):
        quantize.run(replace(job, entry=Quantize(name="x", scheme="W8A16")), QUIET)
    assert not (tmp_path / "found" / "DONE.json").exists()
    assert measurement.exists()
