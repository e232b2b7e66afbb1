"""Linears that the user names: any model's weights are rounded from file to file, unrun."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow.exporting.exporters import exporter
from quantflow.exporting.job import ExportJob
from quantflow.files.manifest import read_manifest
from quantflow.planning.recipe import Export
from quantflow.progress import SILENT
from quantflow.runtime.load import load
from tests.shared import run

PATTERN = "re:transformer[.](attentions|ffns)[.]"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose layers no trace reads: XLM has attentions and feed-forwards in two lists."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["xlm"](vocab_size=96, emb_dim=64, n_layers=2, n_heads=4)
    folder = tmp_path_factory.mktemp("xlm") / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_without_names_the_refusal_says_what_stood_in_the_way_and_names_the_option(
    model, tmp_path, capsys
):
    assert run("quantize", model, "-o", tmp_path / "q", "--scheme", "W8A16") == 6
    told = capsys.readouterr().err
    assert "xlm: transformer.attentions.1 does not read what the layer before it returned" in told
    assert "--algorithm rtn --linears PATTERN" in told


def test_named_matrices_are_rounded_and_everything_else_is_the_source(model, tmp_path):
    quantized, artifact = tmp_path / "q", tmp_path / "a"
    assert run("quantize", model, "-o", quantized, "--scheme", "W8A16", "--linears", PATTERN) == 0
    assert run("export", quantized, "-o", artifact) == 0
    assert run("verify", artifact) == 0
    source, found = (
        load_file(model / "model.safetensors"),
        load_file(artifact / "model.safetensors"),
    )
    linears = [
        name for name in source if name.startswith(("transformer.attentions.", "transformer.ffns."))
    ]
    linears = [name for name in linears if name.endswith(".weight")]
    assert len(linears) == 12
    for name, tensor in source.items():
        if name not in linears:
            assert torch.equal(found[name], tensor)
            continue
        # four qvalues + 128 in a word
        packed = found[f"{name}_packed"].contiguous().view(torch.uint8)
        rows = packed.to(torch.int32) - 128
        scale = found[f"{name}_scale"].float()
        assert torch.equal(
            scale[:, 0], (tensor.abs().amax(dim=1) / 127.5).to(found[f"{name}_scale"].dtype).float()
        )
        assert (rows * scale - tensor).abs().max() <= scale.max() / 2 * 1.001
    ignored = json.loads((artifact / "config.json").read_text())["quantization_config"]["ignore"]
    # a loader takes every linear for quantized otherwise
    assert {"pred_layer.proj", "transformer.embeddings"} & {*ignored}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--linears", "nothing", "--scheme", "W8A16"], "linears: 'nothing' matches none of"),
        (
            ["--linears", PATTERN, "--scheme", "W4A16"],
            "linears are named, and gptq with W4A16 runs the model",
        ),
    ],
)
def test_what_needs_the_model_or_matches_nothing_is_refused(given, told, model, tmp_path, capsys):
    assert run("quantize", model, "-o", tmp_path / "q", *given) == 2
    assert told in capsys.readouterr().err


def dequantized(artifact, output):
    request = ExportJob(
        source=artifact, output=output, options=Export(format="dequantized", dtype="f32")
    )
    return exporter("dequantized").run(request, SILENT)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        (
            "gpt_oss",
            {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            }
            | {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
    ],
)
@torch.no_grad()
def test_dequantized_weights_load_where_the_source_does(kind, more, tmp_path):
    """Matrices that the source keeps transposed, and experts in one tensor, have its form again."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](
        vocab_size=96, bos_token_id=0, eos_token_id=1, pad_token_id=1, **more
    )
    source = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source.save_pretrained(tmp_path / "m")
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q", "--scheme", "W8A16") == 0
    assert run("export", tmp_path / "q", "-o", tmp_path / "a") == 0
    plain = dequantized(tmp_path / "a", tmp_path / "plain")
    expected, found = (
        load_file(tmp_path / "m/model.safetensors"),
        load_file(plain / "model.safetensors"),
    )
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= tensor.abs().max() / 127.5 * 0.51
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    ids = torch.randint(2, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids).logits
    ours = load(tmp_path / "a", decoder="transformers").decoder
    ours.begin(rows=1, capacity=12)
    assert float((ours.forward(ids, last_only=False) - logits).norm() / logits.norm()) < 1e-5
    ledger = read_manifest(tmp_path / "a")["ledger"]["bytes"]
    assert ledger["source"] == sum(tensor.nbytes for tensor in expected.values())
    assert ledger["quantized"] > ledger["source"] / 2


@pytest.mark.parametrize("which", ["model", "released"])
def test_dequantized_experts_stand_as_their_source_has_them(which, qwen3_vl_mixture, tmp_path):
    _, folders = qwen3_vl_mixture
    assert (
        run(
            "quantize",
            folders[which],
            "-o",
            tmp_path / "a",
            "--scheme",
            "W8A16",
            "--algorithm",
            "rtn",
        )
        == 0
    )
    found = load_file(dequantized(tmp_path / "a", tmp_path / "plain") / "model.safetensors")
    for name, tensor in load_file(folders[which] / "model.safetensors").items():
        assert found[name].shape == tensor.shape
        assert (found[name] - tensor).abs().max() <= tensor.abs().max() / 127.5 * 0.51


@torch.no_grad()
def test_a_folder_of_another_layout_dequantized_has_transposed_weights_as_the_source_does(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4}
    config = CONFIG_MAPPING["gpt2"](
        vocab_size=96, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    line = ("--scheme", "W4A16", "--algorithm", "rtn", "--group-size", "32")
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "a", *line) == 0
    assert (
        run("export", tmp_path / "a", "-o", tmp_path / "g", "--format", "gptq", "--dtype", "f32")
        == 0
    )
    own, other = (
        dequantized(tmp_path / name, tmp_path / f"plain-{name}") / "model.safetensors"
        for name in ("a", "g")
    )
    found, expected = load_file(other), load_file(own)
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
