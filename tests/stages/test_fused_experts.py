"""Experts that a release keeps in a few tensors are quantized one by one: Llama 4's and DBRX'."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from quantflow.models.family import FAMILIES
from quantflow.models.open import graph_for
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded
from tests.conftest import write_tokenizer
from tests.shared import run

COMMON = {"vocab_size": 300, "pad_token_id": 0}
CONFIGS = {
    "llama4_text": {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "max_position_embeddings": 64,
    },
    "dbrx": {
        **COMMON,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
EXPERTS = 2 * 4 * 3  # linears of experts: of two layers, four in each
IDS = torch.randint(3, 300, (1, 14), generator=torch.Generator().manual_seed(1))
RTN = ("--algorithm", "rtn", "-q")


@pytest.mark.parametrize("scheme", ["W4A16", pytest.param("FP8_DYNAMIC", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_artifact_runs_as_transformers_with_its_weights(family, scheme, tmp_path):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**CONFIGS[family])
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # transformers leaves some as they were in memory
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    group = ("--group-size", "32") if scheme == "W4A16" else ()
    line = ("--scheme", scheme, *group, *RTN, "--export", tmp_path / "a")
    assert run("quantize", tmp_path / "model", "-o", tmp_path / "q", *line) == 0
    entries = json.loads((tmp_path / "a" / "quantflow.json").read_text())["ledger"]["tensors"]
    done = {entry["name"]: entry["action"] for entry in entries}
    experts = {done[name] for name in done if ".experts." in name}
    routers = {done[name] for name in done if ".router." in name}
    assert (experts, routers) == ({"quantized"}, {"copied"})
    artifact = load(tmp_path / "a", exact=True, backend="reference").artifact
    assert sum(".experts." in name for name in artifact.linears) == EXPERTS
    with torch.inference_mode():
        before = model.eval()(IDS).logits
        put_into_(model, artifact)
        expected = model(IDS).logits
        assert (expected - before).norm() > 1e-3 * before.norm()
        found, from_disk = (
            opened(tmp_path / "a", exact=True, backend="reference").model(IDS).logits
            for opened in (load, load_offloaded)
        )
    assert torch.equal(found, from_disk)
    # the other rounds inputs too, between the products of an expert
    near = 1e-5 if scheme == "W4A16" else 2e-2
    if scheme == "W4A16":
        assert (found - expected).norm() < near * expected.norm()
    if family in FAMILIES:
        lean = load(tmp_path / "a", decoder="lean", backend="reference").decoder
        lean.begin(rows=1, capacity=IDS.shape[1])
        ours = lean.forward(IDS, last_only=False)
        assert (ours - found).norm() < near * found.norm()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["FP8", "W8A8", "W4A16"])
def test_the_text_of_a_llama_4_that_reads_images_runs_from_an_artifact(scheme, tmp_path):
    """Names begin with `language_model`, the head's too, and what sees images lies beside."""
    text = {**CONFIGS["llama4_text"], "num_hidden_layers": 2, "no_rope_layer_interval": 2}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "intermediate_size": 128, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    config = CONFIG_MAPPING["llama4"](text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a text to calibrate on " * 40)
    line = ("--scheme", scheme, *(("--group-size", "32") if scheme == "W4A16" else ()), *RTN)
    if scheme == "FP8":
        line += ("--experts", "share_max")
    line += ("--calibration", tmp_path / "text.txt", "--samples", "4", "--sequence-length", "8")
    line += ("--export", tmp_path / "a")
    assert run("quantize", tmp_path / "model", "-o", tmp_path / "q", *line) == 0
    logits = []
    for folder, backend in ((tmp_path / "model", "auto"), (tmp_path / "a", "reference")):
        lean, peer = (
            load(folder, decoder=name, backend=backend) for name in ("auto", "transformers")
        )
        assert lean.name == "lean", lean.reasons
        for decoder in (lean.decoder, peer.decoder):
            decoder.begin(rows=1, capacity=IDS.shape[1])
            logits.append(decoder.forward(IDS, last_only=False))
    ours, theirs, quantized, peers = logits
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)
    assert (quantized - theirs).norm() > 1e-3 * theirs.norm()
    # an input may be rounded the other way after a sum in another order
    near = 1e-5 if scheme == "W4A16" else 2e-2
    assert (quantized - peers).norm() < near * peers.norm()


def put_into_(model, artifact):
    """Give transformers' own model the dequantized weights of an artifact."""
    split = graph_for(model.config).split
    parts = {part.name: (name, part) for name, one in split.items() for part in one.parts}
    parameters = dict(model.named_parameters())
    for linear in artifact.linears:
        weight = artifact.decode(linear).weight.dequantize()
        name, part = parts.get(f"{linear}.weight", (f"{linear}.weight", None))
        place = parameters[name].data
        if part is not None:
            place = place.as_strided(part.shape, part.strides, part.start)
        place.copy_(weight)
