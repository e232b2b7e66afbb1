"""Layers that predict further tokens: kept by default, quantized where a recipe says so."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantflow
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.manifest import read_manifest
from quantflow.files.verify import verify
from quantflow.planning.recipe import (
    Calibration,
    MtpSettings,
    Quantize,
    Recipe,
    head_flag,
    mtp_flag,
)
from quantflow.runtime.decoding import Further, generate
from quantflow.runtime.load import load
from quantflow.runtime.mtp import AheadLayer
from tests.mtp_models import FAMILIES, ids, write

TINY = Path(__file__).resolve().parents[3] / "examples/tiny-llama"
LAYER = "model.layers.2"
KEPT = ["eh_proj", "mlp.gate", "shared_head.head"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random model with a layer ahead, and the example's tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "model"
    config = copy.deepcopy(FAMILIES["deepseek_v3"])
    config.vocab_size = 4096
    write(folder, config)
    for path in TINY.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def made(source, work, **entry):
    quantized = quantflow.quantize(source, work / "2", entry=Quantize(name="x", **entry))
    return quantflow.export(quantized.folder, work / "4").folder


@pytest.fixture(scope="module")
def artifact(source, tmp_path_factory):
    """The model in 8 bits, its layer ahead too; export has proven it."""
    return made(
        source, tmp_path_factory.mktemp("made"), scheme="W8A16", mtp=MtpSettings(scheme="W8A16")
    )


def matrices(source):
    """The matrices of the layer ahead, without `.weight`."""
    infos = open_checkpoint(source).infos
    names = [name for name in infos if name.startswith(f"{LAYER}.") and len(infos[name].shape) == 2]
    return {name.removesuffix(".weight") for name in names}


def test_its_linears_are_quantized_and_everything_says_so(source, artifact):
    verify(artifact)
    kept = {f"{LAYER}.{name}" for name in KEPT}
    quantized = matrices(source) - kept
    assert len(quantized) > 15  # of attention, of each expert, and of the shared one
    table = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert kept <= set(table["ignore"]) and not quantized & set(table["ignore"])
    # SGLang's name of the layer stands for quantized linears now
    assert not any("decoder" in name for name in table["ignore"])
    entries = {entry["name"]: entry for entry in read_manifest(artifact)["ledger"]["tensors"]}
    for name in quantized:
        entry = entries[f"{name}.weight"]
        assert entry["action"] == "quantized"
        assert entry["reason"] == "unused: predicts tokens further ahead (MTP), W8A16"
        assert entry["becomes"][0] == f"{name}.weight_packed"
    for name in kept:
        assert entries[f"{name}.weight"]["action"] == "copied"
    card = (artifact / "README.md").read_text()
    words = "linears of layers that predict further tokens (MTP) are W8A16 by rtn."
    assert f"{len(quantized)} {words}" in card
    stored = load_file(artifact / "model.safetensors")
    assert not any(f"{name}.weight" in stored for name in quantized)


def test_the_quantized_layer_runs(source, artifact, tmp_path):
    """Its states are those of a plain layer with the rounded weights."""
    tensors = load_file(source / "model.safetensors")
    for name in matrices(source) - {f"{LAYER}.{kept}" for kept in KEPT}:
        weight = tensors[f"{name}.weight"]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127.5
        tensors[f"{name}.weight"] = (weight / scale).round().clamp(-128, 127) * scale
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    states = []
    for folder in (artifact, tmp_path, source):
        loaded = load(folder, decoder="lean", exact=True)
        layer = AheadLayer(loaded.artifact, loaded.decoder.shared)
        hidden = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
        layer.begin(12)
        states.append(layer.forward(hidden, ids(12, 2)[0]))
    assert torch.allclose(states[0], states[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states[0], states[2], atol=1e-4, rtol=1e-4)
    loaded = load(artifact, decoder="lean")
    assert loaded.artifact.mtp.keys().isdisjoint(loaded.artifact.linears)
    layer = AheadLayer(loaded.artifact, loaded.decoder.shared)
    plain = generate(loaded.decoder, ids(6, 3), max_new_tokens=20)
    method = Further(layer=layer, tokens=2)
    assert torch.equal(generate(loaded.decoder, ids(6, 3), max_new_tokens=20, method=method), plain)


def test_it_is_quantized_beside_a_model_that_runs(source, tmp_path):
    """The proof of its values comes beside that of the canary, and finds what differs."""
    save_file({"input_ids": ids(64, 5).view(2, 32)}, tmp_path / "text.safetensors")
    calibration = Calibration(source=str(tmp_path / "text.safetensors"), samples=2)
    measurement = quantflow.measure(source, tmp_path / "1", calibration=calibration).folder
    entry = Quantize(
        name="x",
        scheme="W8A16",
        mtp=MtpSettings(scheme="W4A16", algorithm="rtn", group_size=16),
    )
    quantized = quantflow.quantize(source, tmp_path / "2", entry=entry, measurement=measurement)
    folder = quantflow.export(quantized.folder, tmp_path / "4").folder
    manifest = read_manifest(folder)
    assert manifest["proof"]["kind"] == "canary" and len(manifest["mtp"]["errors"]) > 15
    loaded = load(folder, decoder="lean")
    assert {one.scheme.weights.num_bits for one in loaded.artifact.mtp.values()} == {4}
    assert {one.scheme.weights.num_bits for one in loaded.artifact.linears.values()} == {8}
    AheadLayer(loaded.artifact, loaded.decoder.shared)


def test_the_plan_counts_its_bytes(source, artifact):
    size = 0
    for mtp in (None, MtpSettings(scheme="W8A16")):
        recipe = Recipe(model=str(source), quantize=(Quantize(name="x", scheme="W8A16", mtp=mtp),))
        (found,) = quantflow.plan(recipe)["artifacts"]
        rows = [row for row in found["schemes"] if "(MTP)" in row["tensors"]]
        assert len(rows) == (mtp is not None)
        size = found["tensor_bytes"]
    (path,) = artifact.glob("*.safetensors")
    assert size == sum(tensor.nbytes for tensor in load_file(path).values())
    assert rows[0]["bytes_after"] < rows[0]["bytes_before"] / 2


def test_without_the_setting_it_stays_as_it_is(source, tmp_path):
    folder = made(source, tmp_path, scheme="W8A16")
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert matrices(source) <= set(table["ignore"])
    assert r"re:model\.decoder\..*" in table["ignore"]
    before, after = (load_file(each / "model.safetensors") for each in (source, folder))
    for name in before:
        if name.startswith(f"{LAYER}."):
            assert torch.equal(before[name], after[name])
    assert "mtp" not in read_manifest(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheme": "W4A16"}, "mtp: algorithm gptq of scheme W4A16 reads the calibration text"),
        ({"scheme": "FP8"}, "mtp: scheme FP8 has a static input"),
        ({"scheme": "NVFP4A16"}, "mtp: scheme NVFP4A16 has a scale of a whole weight"),
        ({"scheme": "W4A16", "algorithm": "rtn"}, "has 32 inputs, W4A16 groups of 128"),
    ],
)
def test_what_cannot_be_rounded_by_itself_is_refused(source, tmp_path, settings, words):
    entry = Quantize(name="x", scheme="W8A16", mtp=MtpSettings(**settings))
    with pytest.raises((UsageError, UnsupportedError), match=words):
        quantflow.quantize(source, tmp_path / "2", entry=entry)
    assert not (tmp_path / "2").exists()


def test_it_is_refused_where_there_is_no_layer_or_it_would_not_follow(source, tmp_path):
    entry = Quantize(name="x", scheme="W8A16", mtp=MtpSettings(scheme="W8A16"))
    with pytest.raises(UsageError, match="the model has no layer that predicts further tokens"):
        quantflow.quantize(TINY, tmp_path / "2", entry=entry)
    with pytest.raises(UsageError, match="with --ranks 2"):
        quantflow.quantize(source, tmp_path / "2", entry=entry, ranks=2)


@pytest.mark.parametrize("mtp", [None, MtpSettings(scheme="W8A16")])
def test_a_rotation_of_a_model_with_such_a_layer_is_refused(source, tmp_path, mtp):
    entry = Quantize(name="x", scheme="W8A16", mtp=mtp, transforms=({"hadamard": {}},))
    with pytest.raises(UnsupportedError, match=r"whose model.layers.2 predicts further tokens"):
        quantflow.quantize(source, tmp_path / "2", entry=entry)


def test_a_word_that_is_no_scheme_is_refused():
    with pytest.raises(UsageError, match="mtp: scheme 'W9' is unknown"):
        MtpSettings(scheme="W9")
    with pytest.raises(UsageError, match="--mtp W8A16:a:b: 2 words"):
        mtp_flag("W8A16:a:b")
    assert mtp_flag("W4A16:hqq:64") == head_flag("W4A16:hqq:64")
