"""`quantize --adapter`: a model with a LoRA adapter in its weights, quantized."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.files.manifest import read_manifest
from quantflow.runtime.adapters import attach_
from quantflow.runtime.artifact import open_folder
from tests.shared import run

LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def weights(llama):
    return load_file(llama / "model.safetensors")


@pytest.fixture
def adapter(weights, write_adapter, tmp_path):
    """Return the folder of an adapter of two linears, and what it adds to each."""
    shapes = {name: tuple(weights[f"{name}.weight"].shape) for name in LINEARS}
    return tmp_path / "lora", write_adapter(tmp_path / "lora", shapes, seed=3)


def quantize(model, adapter, output, *more):
    return run(
        "quantize", model, "-o", output, "--scheme", "W8A16", "--adapter", adapter, "-q", *more
    )


def test_the_product_is_added_in_float32_and_rounded_once_and_the_artifact_has_it_inside(
    llama, weights, adapter, tmp_path
):
    folder, deltas = adapter
    assert quantize(llama, folder, tmp_path / "a") == 0
    merged = load_file(tmp_path / "a.work" / "0-merged" / "model.safetensors")
    expected = {f"{name}.weight": delta for name, delta in deltas.items()}
    assert merged.keys() == weights.keys()
    for name, weight in weights.items():
        if name in expected:
            wanted = (weight.double() + expected[name].double()).to(weight.dtype)
            assert (
                torch.allclose(merged[name].float(), wanted.float(), rtol=2**-7, atol=0)
                and merged[name].dtype == weight.dtype
            )
            assert (merged[name] == wanted).float().mean() > 0.999 and not torch.equal(
                merged[name], weight
            )
        else:
            assert torch.equal(merged[name], weight)
    artifact = open_folder(tmp_path / "a", backend="reference")
    for name in LINEARS:
        weight = merged[f"{name}.weight"].float()
        step = weight.abs().amax(dim=1, keepdim=True) / 127.5
        found = artifact.decode(name).dequantize()
        assert ((found - weight).abs() <= 0.51 * step + weight.abs() * 2**-8).all()
    assert read_manifest(tmp_path / "a")["source"]["name"] == f"{llama.name} + lora"


def test_its_logits_are_those_of_the_model_with_the_adapter_beside_it(llama, adapter, tmp_path):
    assert quantize(llama, adapter[0], tmp_path / "a", "--no-export") == 0
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a.work" / "0-merged", dtype=torch.float32
    )
    beside = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        before = beside(ids).logits
        attach_(beside, adapter[0])
        found, expected = merged(ids).logits, beside(ids).logits
    assert (found - expected).norm() < 0.02 * (before - expected).norm()  # bfloat16 of two weights


def test_it_is_made_once_and_an_artifact_is_validated_with_it_alone(
    llama, adapter, text_files, tmp_path, capsys
):
    assert quantize(llama, adapter[0], tmp_path / "a") == 0
    path = tmp_path / "a.work" / "0-merged" / "model.safetensors"
    before = path.stat().st_mtime_ns
    assert quantize(llama, adapter[0], tmp_path / "a") == 0 and path.stat().st_mtime_ns == before
    text = (
        "--text",
        text_files["heldout"],
        "--tokens",
        "130",
        "--sequence-length",
        "64",
        "--allow-inconclusive",
        "-q",
    )
    assert run("validate", tmp_path / "a", "--baseline", llama, *text) == 3
    assert "the artifact was made from other weights" in capsys.readouterr().err
    # the gate's
    assert run(
        "validate", tmp_path / "a", "--baseline", tmp_path / "a.work" / "0-merged", *text
    ) in (0, 4)
    assert (tmp_path / "a-validation" / "validation.json").is_file()


def test_what_does_not_belong_to_the_model_is_refused_before_anything_is_written(
    llama, weights, adapter, write_adapter, tmp_path, capsys
):
    folder = tmp_path / "other"
    head = tuple(weights["model.embed_tokens.weight"].shape)
    for shapes, config, code, told in (
        ({LINEARS[0]: (64, 8)}, {}, 3, f"{LINEARS[0]} maps 64 to 64"),
        (
            {"model.layers.9.mlp.up_proj": (8, 8)},
            {},
            3,
            "model.layers.9.mlp.up_proj.weight: no such tensor",
        ),
        ({"model.norm": (64, 64)}, {}, 3, "model.norm is no linear"),
        ({LINEARS[0]: (64, 64)}, {"use_dora": True}, 6, "use_dora is True"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        write_adapter(folder, shapes, seed=1)
        words = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(words | config))
        assert quantize(llama, folder, tmp_path / "a") == code
        assert told in capsys.readouterr().err
        assert not (tmp_path / "a.work" / "0-merged").exists() and not (tmp_path / "a").exists()
    tied = tmp_path / "tied"
    shutil.copytree(llama, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_file(
        {key: value for key, value in weights.items() if key != "lm_head.weight"},
        tied / "model.safetensors",
    )
    shutil.rmtree(folder)
    write_adapter(folder, {"lm_head": head}, seed=1)
    assert quantize(tied, folder, tmp_path / "a") == 2
    assert "lm_head has the embedding's weight, which would change too" in capsys.readouterr().err
    assert quantize(llama, tmp_path / "nowhere", tmp_path / "a") == 3
    assert "adapter_config.json" in capsys.readouterr().err
