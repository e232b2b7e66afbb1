"""Export: which file holds what, what is linked and what copied, and what the proof notices."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from quantflow.core.parallel import SEQUENTIAL
from quantflow.errors import InputError, IntegrityError, ResourceError
from quantflow.exporting import export as export_stage
from quantflow.exporting import proof_process, weight_files
from quantflow.exporting.proof import proving
from quantflow.exporting.proof_process import prove
from quantflow.exporting.weight_files import Stored, shard_names, shards_for
from quantflow.files.canonical import file_digest
from quantflow.files.checkpoint import INDEX
from quantflow.files.manifest import build_manifest, read_manifest, write_manifest
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.verify import verify
from quantflow.quantizing import weight_rows
from tests.shared import run


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, llama) -> dict[str, Path]:
    """Quantize folders of both kinds: file to file, and through the model's layers."""
    folder = tmp_path_factory.mktemp("quantized")
    assert run("quantize", "--no-export", llama, "-o", folder / "tensors", "--scheme", "W8A16") == 0
    text = llama.parent / "calibration.txt"
    text.write_text("a scale and a value\n\n" * 8)
    assert run("measure", llama, "-o", folder / "m", "--calibration", text, "--samples", "2") == 0
    assert (
        run(
            "quantize",
            llama,
            "-o",
            folder / "canary",
            "--scheme",
            "W8A8",
            "--measurement",
            folder / "m",
        )
        == 0
    )
    return {"tensors": folder / "tensors", "canary": folder / "canary"}


@pytest.fixture
def export(monkeypatch, tmp_path):
    """Export without a fresh process and return the artifact."""

    def call(quantized: Path, name: str = "a", size: str = "4GiB") -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(export_stage, "_prove", lambda *_: {})
            assert run("export", quantized, "-o", tmp_path / name, "--shard-size", size) == 0
        return tmp_path / name

    return call


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        a.dtype == right[name].dtype
        and torch.equal(a.flatten().view(torch.uint8), right[name].flatten().view(torch.uint8))
        for name, a in left.items()
    )


def damage(path: Path, *, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # a link's other name keeps its content
    path.write_bytes(data)


def remade(artifact: Path) -> None:
    """Make the manifest vouch for whatever the files hold now."""
    manifest = read_manifest(artifact)
    body = {
        key: value
        for key, value in manifest.items()
        if key not in ("layout_version", "files", "digest")
    }
    write_manifest(artifact, build_manifest(artifact, body=body))


def stored(name: str, nbytes: int, path: str = "f") -> Stored:
    return Stored(
        path=Path(path),
        info=TensorInfo(name=name, dtype="U8", shape=(nbytes,), offset=0, nbytes=nbytes),
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (24, [["e", "h", "a", "b", "c", "d"]]),
        (23, [["e", "h"], ["a", "b"], ["c", "d"]]),
        (9, [["e"], ["h"], ["a", "b"], ["c", "d"]]),
        (5, [["e"], ["h"], ["a"], ["b"], ["c"], ["d"]]),
        (1, [["e"], ["h"], ["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_files_of_at_most_the_largest_size_hold_whole_layers_where_they_fit(limit, expected):
    layers = [
        [stored("a", 2, "0"), stored("b", 4, "0")],
        [stored("c", 3, "1"), stored("d", 5, "1")],
    ]
    shards = shards_for([stored("e", 6), stored("h", 4)], layers, limit=limit)
    assert [[t.info.name for t in shard.tensors] for shard in shards] == expected
    whole = {0: Path("0"), 1: Path("1")}
    for shard in shards:
        names = [t.info.name for t in shard.tensors]
        assert shard.link == (
            whole[0] if names == ["a", "b"] else whole[1] if names == ["c", "d"] else None
        )
    assert shard_names(shards)[0] == (
        "model.safetensors" if len(shards) == 1 else f"model-00001-of-{len(shards):05d}.safetensors"
    )


@pytest.mark.parametrize("kind", ["tensors", "canary"])
def test_layers_become_shards_without_being_copied_and_the_tensors_are_those_of_one_file(
    quantized, export, kind
):
    single, sharded = export(quantized[kind], "single"), export(quantized[kind], "sharded", "60KiB")
    assert [path.name for path in single.glob("*.safetensors")] == ["model.safetensors"]
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    for index, name in enumerate(files[-2:]):
        assert os.path.samefile(
            sharded / name, quantized[kind] / "layers" / f"{index:05d}.safetensors"
        )
    assert equal(tensors_of(single), tensors_of(sharded))
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors_of(sharded).values())}
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(sharded / file)
    manifest = read_manifest(sharded)
    assert {name: manifest["files"][name]["sha256"] for name in files} == {
        name: file_digest(sharded / name) for name in files
    }
    assert manifest["proof"]["kind"] == kind and manifest["proof"]["layers"] == 2
    assert verify(sharded)["tensors"] == len(index["weight_map"])


def test_a_layer_larger_than_a_file_is_split(quantized, export):
    whole, split = (
        export(quantized["tensors"], "whole"),
        export(quantized["tensors"], "split", "20KiB"),
    )
    sizes = [path.stat().st_size for path in split.glob("*.safetensors")]
    assert len(sizes) > 4 and equal(tensors_of(whole), tensors_of(split))
    verify(split)


def test_without_links_the_layers_are_copied_to_the_same_artifact(quantized, export, monkeypatch):
    linked = read_manifest(export(quantized["tensors"], "linked", "60KiB"))

    def no_links(*_arguments):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    copied = export(quantized["tensors"], "copied", "60KiB")
    assert read_manifest(copied)["digest"] == linked["digest"]
    assert all(path.stat().st_nlink == 1 for path in copied.iterdir())


def test_no_more_than_a_piece_of_a_tensor_is_in_memory(quantized, export, monkeypatch):
    expected = tensors_of(export(quantized["tensors"], "whole"))
    pieces = []
    real = weight_files.read_into

    def record(path, tensor, offset, *, name):
        pieces.append(tensor.nbytes)
        real(path, tensor, offset, name=name)

    monkeypatch.setattr(weight_files, "read_into", record)
    monkeypatch.setattr(weight_files, "COPY_BYTES", 512)
    assert equal(tensors_of(export(quantized["tensors"], "pieces")), expected)
    assert max(pieces) == 512 and len(pieces) > 100


def test_a_source_with_nan_outside_the_layers_is_refused_by_name(
    quantized, llama, tmp_path, capsys
):
    model = Path(shutil.copytree(llama, tmp_path / llama.name))
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run("quantize", "--no-export", model, "-o", tmp_path / "q", "--scheme", "W8A16") == 3
    assert "model.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "q" / "DONE.json").exists()


def test_what_nobody_reads_changes_nothing_in_an_artifact_and_is_said(
    quantized, export, llama, tmp_path, capsys
):
    model = Path(shutil.copytree(llama, tmp_path / llama.name))
    config = json.loads((model / "config.json").read_text())
    left = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": left}))
    (model / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").symlink_to("gone")
    assert run("quantize", model, "-o", tmp_path / "b", "--scheme", "W8A16") == 0
    told = capsys.readouterr().err
    assert "config.json: quantization_config says that the model is quantized" in told
    clean = export(quantized["tensors"])
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (clean / name).read_bytes()
    files = {each["name"]: each for each in read_manifest(tmp_path / "b")["ledger"]["files"]}
    assert files["pytorch_model.bin"]["action"] == "dropped"
    assert files["config.json"]["reason"].endswith("the source's was left over")
    for words in (("verify", tmp_path / "b"), ("inspect", model), ("plan", model, "--for", "FP8")):
        assert run(*words) == 0
    assert capsys.readouterr().out.count("left over, it is neither read nor copied") == 2


@pytest.mark.parametrize("size", ["4GiB", "60KiB"])
def test_a_damaged_layer_is_named_and_nothing_is_published(quantized, tmp_path, capsys, size):
    copy = Path(shutil.copytree(quantized["tensors"], tmp_path / "q"))
    damage(copy / "layers" / "00001.safetensors")
    # 60KiB: the process of the proof finds it
    assert run("export", copy, "-o", tmp_path / "a", "--shard-size", size) == 7
    told = capsys.readouterr().err
    assert (
        f"{copy}/layers/00001.safetensors: differs from the hash in DONE.json" in told
        and "quantflow quantize" in told
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["tensors", "canary"])
@pytest.mark.parametrize("size", ["4GiB", "60KiB"])
def test_the_proof_of_an_intact_artifact_holds(quantized, export, llama, kind, size):
    prove(export(quantized[kind], size=size), quantized[kind], llama, workers=SEQUENTIAL)


def change(artifact: Path, name: str) -> None:
    """Change one bit of a tensor and make the manifest vouch for it."""
    path = artifact / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[name].view(-1)[:1].view(torch.uint8)[0] ^= 1
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    remade(artifact)


@pytest.mark.parametrize(
    ("kind", "tensor", "said"),
    [
        (
            "tensors",
            "model.layers.1.mlp.down_proj.weight_packed",
            "model.layers.1.mlp.down_proj: the exported artifact decodes",
        ),
        (
            "tensors",
            "model.layers.0.self_attn.q_proj.weight_scale",
            "model.layers.0.self_attn.q_proj: the exported artifact",
        ),
        (
            "tensors",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.input_layernorm.weight: differs from the source",
        ),
        (
            "tensors",
            "model.embed_tokens.weight",
            "model.embed_tokens.weight: differs from the source",
        ),
        ("canary", "model.layers.1.mlp.down_proj.weight", "layer 1: the artifact computes"),
        # it absorbed a smoothing
        ("canary", "model.layers.0.input_layernorm.weight", "layer 0: the artifact computes"),
        ("canary", "lm_head.weight", "lm_head.weight: differs from the source"),
    ],
)
def test_one_changed_bit_is_found_and_named(quantized, export, llama, kind, tensor, said):
    artifact = export(quantized[kind])
    change(artifact, tensor)
    with pytest.raises(IntegrityError, match=said):
        prove(artifact, quantized[kind], llama, workers=SEQUENTIAL)


def test_rows_are_decoded_some_at_a_time(quantized, export, llama, monkeypatch):
    artifact, shapes = export(quantized["tensors"]), []
    real = weight_rows._rows

    def record(path, info, first, count):
        shapes.append((count, first))
        return real(path, info, first, count)

    monkeypatch.setattr(weight_rows, "_rows", record)
    monkeypatch.setattr("quantflow.quantizing.weight_rows.UNIT", 1024)
    prove(artifact, quantized["tensors"], llama, workers=SEQUENTIAL)
    assert max(count for count, _ in shapes) == 16 and max(first for _, first in shapes) == 112


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tensors", "every weight of 2 layers decoded from this folder"),
        ("canary", "canary, 2 layers recomputed from this folder"),
    ],
)
@pytest.mark.usefixtures("proof_by_a_new_interpreter")
def test_the_fresh_process_agrees_and_an_artifact_says_which_proof_was_given(
    quantized, tmp_path, kind, told
):
    assert run("export", quantized[kind], "-o", tmp_path / "a", "--shard-size", "60KiB") == 0
    assert read_manifest(tmp_path / "a")["proof"]["kind"] == kind
    assert told in (tmp_path / "a" / "README.md").read_text()


@pytest.mark.parametrize(
    ("code", "told", "kind", "said"),
    [
        (7, '{"cause": "x: y", "remedy": "z"}', IntegrityError, "x: y"),
        (3, '{"cause": "x: y", "remedy": "z"}', InputError, "x: y"),
        (5, 'noise\n{"cause": "x: y", "remedy": "z"}', ResourceError, "x: y"),
        (-9, "", ResourceError, "ended by signal 9"),
        (1, "Traceback\nKeyError: 3", InputError, "ended with 1: KeyError: 3"),
        (1, "3", InputError, "ended with 1: 3"),
    ],
)
@pytest.mark.usefixtures("proof_by_a_new_interpreter")
def test_what_the_fresh_process_met_is_told_as_it_is(monkeypatch, tmp_path, code, told, kind, said):
    process = SimpleNamespace(returncode=code, communicate=lambda _: ("", told))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(kind) as caught, proving() as prover:
        prover.prove(tmp_path, tmp_path, tmp_path, workers=1, measures=False)
    assert type(caught.value) is kind and said in caught.value.cause


@pytest.mark.usefixtures("proof_by_a_new_interpreter")
def test_the_process_ends_with_an_export_that_has_nothing_to_prove(monkeypatch):
    started, real = [], subprocess.Popen

    def record(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    with pytest.raises(InputError), proving():
        raise InputError("a", "b")
    assert started[0].returncode is not None
    assert proof_process.main("") == 0


QUERY = "model.layers.0.self_attn.q_proj"


def resealed(folder: Path, name: str, change) -> None:
    """Change a JSON file of a quantized folder and make its hash in DONE.json right again."""
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    done = json.loads((folder / "DONE.json").read_text())
    if name != "DONE.json":
        done["files"][name] = {
            "sha256": file_digest(folder / name),
            "bytes": (folder / name).stat().st_size,
        }
        (folder / "DONE.json").write_text(json.dumps(done))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("quantize.json", lambda value: value.pop("plan"), "plan"),
        ("quantize.json", lambda value: value["plan"].update(schemes=[]), "plan.schemes"),
        (
            "quantize.json",
            lambda value: next(iter(value["plan"]["schemes"].values())).update(more=1),
            "more",
        ),
        (
            "quantize.json",
            lambda value: value["plan"]["schemes"].pop(QUERY),
            f"plan.schemes: nothing of {QUERY}",
        ),
        (
            "quantize.json",
            lambda value: value["plan"]["schemes"][QUERY]["weights"].update(symmetric=[]),
            "weights.symmetric",
        ),
        ("quantize.json", lambda value: value.update(proof="none"), "proof"),
        ("quantize.json", lambda value: value["source"].pop("folder"), "source.folder"),
        ("layers/00000.json", lambda value: value.pop("changed"), "layers/00000.json: changed"),
        ("layers/00000.json", lambda value: value.update(errors=5), "layers/00000.json: errors"),
        ("DONE.json", lambda value: value["inputs"].pop("model"), "inputs: model"),
        ("DONE.json", lambda value: value["files"].update({"quantize.json": 5}), "quantize.json"),
        (
            "DONE.json",
            lambda value: value["files"].pop("quantize.json"),
            "files: has no quantize.json",
        ),
        ("DONE.json", lambda value: value.update(files={}), "files: has no layers/00000.json"),
    ],
)
def test_a_record_of_a_quantized_folder_that_is_none_is_refused_with_its_key(
    quantized, tmp_path, capsys, name, change, said
):
    folder = Path(shutil.copytree(quantized["tensors"], tmp_path / "q"))
    resealed(folder, name, change)
    assert run("export", folder, "-o", tmp_path / "a") == 3
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    assert not (tmp_path / "a").exists()
