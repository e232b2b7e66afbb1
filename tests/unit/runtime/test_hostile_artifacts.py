"""Artifacts with right hashes whose tensors or numbers contradict the configuration: refused.

Whoever makes an artifact can recompute every hash in it, so `verify` passes here.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from quantflow.core.scheme import PRESETS
from quantflow.errors import InputError, QuantflowError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import build_manifest, read_manifest, write_manifest
from quantflow.files.verify import verify
from quantflow.runtime import lean
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
BIASED = LlamaConfig(
    **SIZES,
    **HEADS,
    tie_word_embeddings=False,
    attention_bias=True,
    architectures=["LlamaForCausalLM"],
)
QWEN3 = Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
ATTENTION = "model.layers.1.self_attn"
PROMPT = torch.tensor([[3, 5, 7]])


def reseal(folder):
    """Make the hashes of a changed artifact right again, and its ledger of copied tensors."""
    body, headers = read_manifest(folder), open_checkpoint(folder).infos
    ledger, entries = Ledger.from_json(body["ledger"]), []
    for entry in ledger.tensors:
        info = headers[entry.name]
        copied = entry.action == "copied"
        entries.append(
            replace(entry, dtype=info.dtype, shape=info.shape, nbytes=info.nbytes)
            if copied
            else entry
        )
    body["ledger"] = replace(ledger, tensors=tuple(entries)).to_json()
    for key in ("digest", "files", "layout_version"):
        body.pop(key, None)
    write_manifest(folder, build_manifest(folder, body=body))
    verify(folder)


def changed(make_artifact, folder, config, *, tensors=(), **numbers):
    """An artifact with a quantized first layer, and with other tensors and numbers."""
    make_artifact(folder, config, lambda name: PRESETS["W8A8"] if ".layers.0." in name else None)
    held = load_file(folder / "model.safetensors")
    held |= {name: make(held[name]).contiguous() for name, make in dict(tensors).items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | numbers))
    reseal(folder)
    return folder


def runs(folder, decoder):
    """Return the first logits of an artifact."""
    loaded = load(folder, decoder=decoder)
    loaded.decoder.begin(rows=1, capacity=3)
    return loaded.decoder.forward(PROMPT)


def test_an_artifact_that_is_only_sealed_again_runs(tmp_path, make_artifact):
    folder = changed(make_artifact, tmp_path / "a", LLAMA)
    assert torch.allclose(runs(folder, "lean"), runs(folder, "transformers"), atol=1e-4)


# the attacks of a review, which ended in a double free, SIGSEGV, or another text with exit 0
CASES = [
    (LLAMA, "model.embed_tokens.weight", lambda t: t[:, :8]),
    (LLAMA, "model.embed_tokens.weight", lambda t: t[:5]),
    (LLAMA, "model.norm.weight", lambda t: t[:1]),
    (LLAMA, "model.layers.1.input_layernorm.weight", lambda t: t[:1]),
    (LLAMA, "model.layers.0.post_attention_layernorm.weight", lambda t: t.repeat(2)),
    (LLAMA, "lm_head.weight", lambda t: t.T[:, :64]),
    (LLAMA, "lm_head.weight", lambda t: t.T),
    (LLAMA, "lm_head.weight", lambda t: t[..., None]),
    (LLAMA, f"{ATTENTION}.q_proj.weight", lambda t: t[:8]),
    (LLAMA, f"{ATTENTION}.k_proj.weight", lambda t: t.repeat(2, 1)),
    (LLAMA, f"{ATTENTION}.o_proj.weight", lambda t: t[:, :16]),
    (LLAMA, "model.layers.1.mlp.gate_proj.weight", lambda t: t[:1]),
    (LLAMA, "model.layers.1.mlp.down_proj.weight", lambda t: t.T),
    (LLAMA, "model.norm.weight", lambda t: t.to(torch.int32)),
    (LLAMA, "model.norm.weight", lambda t: torch.tensor(1.0)),
    (LLAMA, "model.layers.0.self_attn.q_proj.weight", lambda t: t[:8]),  # quantized
    (LLAMA, "model.layers.0.self_attn.q_proj.weight_scale", lambda t: t[:8]),
    (
        LLAMA,
        "model.layers.0.self_attn.q_proj.weight_scale",
        lambda t: torch.ones_like(t, dtype=torch.bool),
    ),
    (LLAMA, "model.layers.0.mlp.down_proj.weight", lambda t: t.T),
    (BIASED, f"{ATTENTION}.q_proj.bias", lambda t: t[:1]),
    (BIASED, "model.layers.0.self_attn.v_proj.bias", lambda t: t.repeat(3)),
    (QWEN3, f"{ATTENTION}.q_norm.weight", lambda t: t[:4]),
    (QWEN3, "model.layers.0.self_attn.k_norm.weight", lambda t: t.repeat(4)),
]


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
@pytest.mark.parametrize(
    ("config", "name", "make"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_tensor_of_another_shape_is_an_input_error_whatever_runs_it(
    decoder, config, name, make, tmp_path, make_artifact
):
    folder = changed(make_artifact, tmp_path / "a", config, tensors={name: make})
    with pytest.raises(
        InputError, match=name.removesuffix(".weight").removesuffix("_scale").replace(".", r"\.")
    ):
        runs(folder, decoder)


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": -2},
        {"num_attention_heads": 6, "num_key_value_heads": 4},
        {"num_attention_heads": 0},
        {"num_attention_heads": True},
        {"num_attention_heads": "4"},
        {"head_dim": 0},
        {"head_dim": 2.5},
        {"head_dim": 131072},
        {"hidden_size": 32},
        {"intermediate_size": 97},
        {"vocab_size": 200},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_numbers_that_the_weights_do_not_have_are_an_error_and_never_a_crash(
    decoder, numbers, tmp_path, make_artifact
):
    with pytest.raises(QuantflowError) as caught:  # some are numbers that not even `verify` takes
        runs(changed(make_artifact, tmp_path / "a", LLAMA, **numbers), decoder)
    assert caught.value.exit_code in (2, 3, 6)


def test_heads_wider_than_the_stack_of_c_go_through_transformers(tmp_path, make_artifact):
    wide = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2048,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(
        **{**SIZES, **wide}, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    )
    make_artifact(tmp_path / "a", config, PRESETS["W8A8"])
    assert (
        lean.why_not(open_artifact(tmp_path / "a"))
        == "it works on heads of 1024 features at most, these have 2048"
    )
    assert load(tmp_path / "a", decoder="auto").name == "transformers"


def test_the_widest_heads_have_the_logits_of_transformers(tmp_path, make_artifact):
    wide = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 1024,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(
        **{**SIZES, **wide}, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    )
    make_artifact(tmp_path / "a", config, PRESETS["W8A16"])
    assert torch.allclose(
        runs(tmp_path / "a", "lean"), runs(tmp_path / "a", "transformers"), atol=1e-4
    )


def test_a_rotation_of_a_part_of_each_head_goes_through_transformers(tmp_path, make_artifact):
    """A table of fewer columns than a head has features would be read beyond its end."""
    folder = changed(make_artifact, tmp_path / "a", LLAMA)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    }
    path.write_text(json.dumps(config))
    reseal(folder)
    opened = open_artifact(folder)
    assert lean.why_not(opened) == "it rotates all 16 features of a head, this model 8"
