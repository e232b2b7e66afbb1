"""Weights from file to file: the bytes of memory's way, cut and continued anywhere, bounded."""

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from quantflow.algorithms import ALGORITHMS
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.canonical import digest_of
from quantflow.files.digests import Digests
from quantflow.formats import compressed_tensors
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Override, Quantize
from quantflow.quantizing import weight_rows
from quantflow.quantizing.file_to_file import quantize_files
from quantflow.quantizing.hashes_ahead import HashesAhead
from quantflow.quantizing.layer_error import relative_error
from quantflow.quantizing.weight_rows import row_step
from quantflow.reporting.progress_line import ProgressLine
from tests.shared import slow_but

SCHEMES = [
    "FP8_DYNAMIC",
    "W8A8",
    "W8A16",
    "W4A16",
    "W4A16_ASYM",
    "W4A8",
    "W3A16_ASYM",
    "W2A16",
    "FP8_BLOCK",
]
FITTED = [
    (name, algorithm)
    for name in ("W8A16", "W4A16", "W4A16_ASYM")
    for algorithm in ("rtn_mse", "hqq")
]
QUIET = ProgressLine(quiet=True)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Cut the tiny model's weights into many units: 8 or 16 rows each, norms into pieces."""
    monkeypatch.setattr(weight_rows, "UNIT", 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def entry(scheme: str, algorithm: str = "rtn", **options) -> Quantize:
    size = 32 if PRESETS[scheme].weights.group_size else None
    return Quantize(
        name="x", scheme=scheme, algorithm=algorithm, transforms=(), group_size=size, **options
    )


def quantize(
    model: Path, output: Path, recipe: Quantize, *, workers: int = 1, key: str = "key"
) -> Path:
    source = open_source(model)
    graph = graph_for(source.config)
    plan = resolve(
        recipe,
        graph,
        {name: info.shape for name, info in source.checkpoint.infos.items()},
        measured=False,
    )
    assert plan.file_to_file
    (output / "layers").mkdir(parents=True, exist_ok=True)
    told = {"allowance": SimpleNamespace(workers=workers), "progress": QUIET}
    quantize_files(output, plan, source=source, graph=graph, key=key, digests=Digests(), **told)
    return output / "layers"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored(model: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(model / "model.safetensors")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def change(model: Path, **tensors: torch.Tensor) -> None:
    safetensors.torch.save_file(
        stored(model) | tensors, model / "model.safetensors", metadata={"format": "pt"}
    )


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        *((name, "rtn") for name in SCHEMES),
        *slow_but(FITTED, ("W8A16", "rtn_mse"), ("W4A16_ASYM", "rtn_mse"), ("W4A16_ASYM", "hqq")),
    ],
)
def test_rows_from_file_to_file_are_the_weight_quantized_whole(llama, tmp_path, name, algorithm):
    layers = quantize(llama, tmp_path, entry(name, algorithm))
    source = stored(llama)
    scheme = (
        with_group_size(PRESETS[name], 32) if PRESETS[name].weights.group_size else PRESETS[name]
    )
    scale_dtype = compressed_tensors.scale_dtype(scheme, torch.bfloat16)
    for index in range(2):
        found = safetensors.torch.load_file(layers / f"{index:05d}.safetensors")
        record = json.loads((layers / f"{index:05d}.json").read_text())
        assert (
            record["sha256"]
            == hashlib.sha256((layers / f"{index:05d}.safetensors").read_bytes()).hexdigest()
        )
        files = {
            "model.safetensors": hashlib.sha256(
                (llama / "model.safetensors").read_bytes()
            ).hexdigest()
        }
        assert record["key"] == digest_of(["key", index, files]) and record["changed"] == []
        expected = {}
        for key, tensor in source.items():
            if not key.startswith(f"model.layers.{index}."):
                continue
            linear = key.removesuffix(".weight")
            if not linear.endswith("_proj"):
                expected[key] = tensor
                continue
            told = {"statistics": {}, "scale_dtype": scale_dtype}
            whole = ALGORITHMS[algorithm].quantize_group({linear: tensor}, scheme, **told)[linear]
            quantized = QuantizedLinear(weight=whole.weight, scheme=scheme)
            expected |= compressed_tensors.encode(linear, quantized, scale_dtype=scale_dtype)
            error = relative_error(tensor, whole.weight.dequantize(), name=linear)
            assert record["errors"][linear]["weight"] == pytest.approx(error, rel=1e-5)
            assert record["decisions"][linear] == whole.decisions
        assert found.keys() == expected.keys() and len(record["values"]) == 7
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype and raw(found[key]) == raw(tensor), key


@pytest.mark.parametrize("algorithm", slow_but(["rtn", "rtn_mse", "hqq"], "rtn", "rtn_mse"))
def test_nothing_of_the_result_depends_on_how_many_units_run_at_once(llama, tmp_path, algorithm):
    one = contents(quantize(llama, tmp_path / "1", entry("W4A16_ASYM", algorithm)))
    for workers in (2, 5):
        assert (
            contents(
                quantize(
                    llama, tmp_path / str(workers), entry("W4A16_ASYM", algorithm), workers=workers
                )
            )
            == one
        )


def test_the_values_digest_is_that_of_the_rows_however_they_are_cut(llama, tmp_path, monkeypatch):
    first = quantize(llama, tmp_path / "a", entry("W4A16_ASYM"))
    monkeypatch.setattr(weight_rows, "UNIT", 1 << 20)
    second = quantize(llama, tmp_path / "b", entry("W4A16_ASYM"))
    records = [json.loads((folder / "00001.json").read_text()) for folder in (first, second)]
    assert (
        records[0]["values"] == records[1]["values"]
        and records[0]["sha256"] == records[1]["sha256"]
    )
    assert len(set(records[0]["values"].values())) == 7


@pytest.mark.parametrize("family", ["gpt_neox", "qwen2"])
def test_biases_and_ignored_linears_are_copied(family_model, tmp_path, family):
    model = family_model(family)
    ignored = {"gpt_neox": "re:.*dense_h_to_4h", "qwen2": "re:.*gate_proj"}[family]
    layers = quantize(
        model,
        tmp_path,
        entry("W8A8", ignore=(ignored,), overrides=(Override(match="re:.*0.*", scheme="W8A16"),)),
    )
    source = stored(model)
    kept = 0
    for path in layers.glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(path).items():
            if name.endswith((".bias", "norm.weight", "h_to_4h.weight", "gate_proj.weight")):
                assert raw(tensor) == raw(source[name]), name
                kept += 1
    assert kept >= 10
    assert "model.layers.0.mlp.down_proj.weight_packed" in safetensors.torch.load_file(
        layers / "00000.safetensors"
    ) or (family == "gpt_neox")


def test_a_finished_layer_is_left_alone_and_a_damaged_one_made_again(llama, tmp_path):
    layers = quantize(llama, tmp_path, entry("W8A8"))
    before = contents(layers)
    untouched = (layers / "00000.safetensors").stat().st_mtime_ns
    data = bytearray(before["00001.safetensors"])
    data[-1] ^= 1
    (layers / "00001.safetensors").write_bytes(data)
    quantize(llama, tmp_path, entry("W8A8"))
    assert (
        contents(layers) == before
        and (layers / "00000.safetensors").stat().st_mtime_ns == untouched
    )
    quantize(llama, tmp_path, entry("W8A8"), key="other")
    assert (layers / "00000.safetensors").stat().st_mtime_ns != untouched
    assert contents(layers)["00000.safetensors"] == before["00000.safetensors"]


def test_layers_of_a_file_that_changed_are_made_again_and_no_others(llama, tmp_path):
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(llama, model)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    parts = {"first": {}, "second": {}}
    for name, tensor in tensors.items():
        parts["second" if name.startswith("model.layers.1.") else "first"][name] = tensor
    (model / "model.safetensors").unlink()
    index = {name: f"{part}.safetensors" for part, held in parts.items() for name in held}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    for part, held in parts.items():
        safetensors.torch.save_file(held, model / f"{part}.safetensors", metadata={"format": "pt"})
    layers = quantize(model, output, entry("W8A8"))
    times = {path.name: path.stat().st_mtime_ns for path in layers.iterdir()}
    before = contents(layers)
    parts["second"]["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    safetensors.torch.save_file(
        parts["second"], model / "second.safetensors", metadata={"format": "pt"}
    )
    quantize(model, output, entry("W8A8"))
    assert (layers / "00000.safetensors").stat().st_mtime_ns == times["00000.safetensors"]
    assert contents(layers)["00001.safetensors"] != before["00001.safetensors"]


def test_a_layer_is_quantized_while_its_file_is_hashed(llama, tmp_path, monkeypatch):
    read, of, read_unit = threading.Event(), Digests.of, weight_rows.Unit.read

    def waits(self, path):
        assert read.wait(timeout=30), "nothing is read before the hash is known"
        return of(self, path)

    def tells(self):
        read.set()
        return read_unit(self)

    monkeypatch.setattr(Digests, "of", waits)
    monkeypatch.setattr(weight_rows.Unit, "read", tells)
    assert contents(quantize(llama, tmp_path, entry("FP8_DYNAMIC")))


def test_the_file_of_the_next_layers_is_hashed_ahead_and_every_file_once(tmp_path):
    seen = []

    class Recorded(Digests):
        def of(self, path):
            seen.append(path.name)
            return super().of(path)

    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    expected = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abc"}
    with HashesAhead([["a"], ["a", "b"], ["c"]], folder=tmp_path, digests=Recorded()) as hashes:
        assert hashes.of(["a"]) == {"a": expected["a"]}
        assert set(hashes._known) == {"a", "b"}
        assert hashes.of(["a", "b"]) == {"a": expected["a"], "b": expected["b"]}
        assert hashes.of(["c"]) == {"c": expected["c"]}
    assert seen == ["a", "b", "c"]


class Killed(BaseException):
    pass


# per layer: its own name, its record, and within that the record's name
@pytest.mark.parametrize("at", range(6))
def test_what_a_kill_before_any_commit_leaves_continues_to_the_same_bytes(
    llama, tmp_path, monkeypatch, at
):
    expected = contents(quantize(llama, tmp_path / "whole", entry("W4A16")))
    calls = iter(range(100))

    def killed_in(real):
        def call(*arguments):
            if next(calls) == at:
                raise Killed
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "write_atomic"):
            patch.setattr(disk, name, killed_in(getattr(disk, name)))
        with pytest.raises(Killed):
            quantize(llama, tmp_path / "out", entry("W4A16"))
    layers = tmp_path / "out" / "layers"
    assert {
        path.name for path in layers.iterdir() if not path.name.startswith(".")
    } < expected.keys()
    for path in layers.glob(".*"):
        path.unlink()  # the stage does that before it continues
    assert contents(quantize(llama, tmp_path / "out", entry("W4A16"))) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"]
)
def test_a_tensor_that_holds_nan_or_inf_is_named_and_earlier_layers_stay(
    llama, tmp_path, name, value
):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    tensor = stored(model)[name].clone()
    tensor.view(-1)[-1] = value
    change(model, **{name: tensor})
    with pytest.raises(InputError, match=name.removesuffix(".weight")):
        quantize(model, tmp_path / "out", entry("FP8_DYNAMIC"), workers=2)
    assert sorted(contents(tmp_path / "out" / "layers")) == ["00000.json", "00000.safetensors"]


def test_a_source_that_ends_early_while_it_is_read_is_an_input_error(llama, tmp_path):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    source = open_source(model)
    graph = graph_for(source.config)
    plan = resolve(
        entry("W8A8"),
        graph,
        {name: info.shape for name, info in source.checkpoint.infos.items()},
        measured=False,
    )
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(200_000)
    (tmp_path / "layers").mkdir()
    with pytest.raises(InputError, match="model.safetensors ends"):
        quantize_files(
            tmp_path,
            plan,
            source=source,
            graph=graph,
            key="k",
            digests=Digests(),
            allowance=SimpleNamespace(workers=2),
            progress=QUIET,
        )
    assert not list((tmp_path / "layers").glob(".*"))


@pytest.mark.parametrize("room", [0, 20_000, 45_000, 70_000])
def test_a_full_disk_leaves_finished_layers_and_no_part_of_another(
    llama, tmp_path, monkeypatch, room
):
    expected = contents(quantize(llama, tmp_path / "whole", entry("W8A8")))
    real, left = os.pwrite, [room]

    def limited(descriptor, view, offset):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, view[: left[0]], offset)
        left[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", limited)
        with pytest.raises(OSError) as caught:
            quantize(llama, tmp_path / "out", entry("W8A8"), workers=2)
    assert caught.value.errno == errno.ENOSPC
    found = contents(tmp_path / "out" / "layers")
    assert found == {name: expected[name] for name in list(expected)[: len(found)]} and len(
        found
    ) in (0, 2)
    assert contents(quantize(llama, tmp_path / "out", entry("W8A8"))) == expected


@pytest.mark.parametrize(
    ("schemes", "steps"),
    [
        (["FP8_DYNAMIC", "W8A16", "W4A16_ASYM"], [1 << 20, 1048, 256, 184, 8, 8]),
        (["W3A16", "W3A16_ASYM"], [1 << 20, 1024, 256, 160, 32, 32]),
        (["W2A16_ASYM"], [1 << 20, 1040, 256, 176, 16, 16]),
        (["FP8_BLOCK"], [1 << 20, 1024, 256, 128, 128, 128]),
    ],
)
def test_rows_of_a_unit_fill_whole_words_of_packed_zero_points(monkeypatch, schemes, steps):
    monkeypatch.setattr(weight_rows, "UNIT", 1 << 20)
    for scheme in schemes:
        assert [
            row_step(columns, PRESETS[scheme])
            for columns in (1, 1000, 4096, 5632, 1 << 20, 1 << 23)
        ] == steps
