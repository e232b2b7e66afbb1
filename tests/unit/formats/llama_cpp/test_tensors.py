"""A model in llama.cpp's words: one place for every tensor, interleaved rows of q and k, sizes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.llama_cpp.metadata import metadata, rope_factors
from quantflow.formats.llama_cpp.tensors import Place, places, row_order, rows_at_once

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = {  # of one key head of 4
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
BLOCK = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
]
OUTSIDE = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}
YARN = {"factor": 2.0, "original_max_position_embeddings": 32}


def llama(**changes):
    return LlamaConfig(**{**SHAPE, "num_key_value_heads": 1, **changes})


def shapes(layer=LAYER, outside=OUTSIDE, prefix="model.layers"):
    return {
        **outside,
        **{f"{prefix}.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }


def test_every_tensor_of_a_llama_has_its_name():
    found = {place.name: place.source for place in places(llama(), shapes())}
    expected = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    expected |= {"output.weight": "lm_head.weight"}
    for i in range(2):
        expected |= {
            f"blk.{i}.{a}.weight": f"model.layers.{i}.{b}"
            for a, b in zip(BLOCK, LAYER, strict=True)
        }
    assert found == expected


def test_only_queries_and_keys_of_a_llama_change_their_rows():
    order = {
        place.name: (place.order, place.heads)
        for place in places(llama(), shapes())
        if place.order != "stored"
    }
    assert order == {
        f"blk.{i}.attn_{x}.weight": ("rotary", heads)
        for i in range(2)
        for x, heads in (("q", 2), ("k", 1))
    }
    qwen = Qwen2Config(**SHAPE, num_key_value_heads=1)
    biases = {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", 8), ("k", 4), ("v", 4))}
    assert {place.order for place in places(qwen, shapes({**LAYER, **biases}))} == {"stored"}


def test_rows_of_two_heads_are_interleaved_as_worked_by_hand():
    # A head's halves (0 1 2 | 3 4 5) become pairs (0 3, 1 4, 2 5); the second head, from 6 on,
    # likewise.
    place = Place(name="q", source="q", shape=(12, 1), order="rotary", heads=2)
    assert row_order(place).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert rows_at_once(place) == 6


def test_fused_rows_of_two_heads_are_sorted_as_worked_by_hand():
    # Two heads of two rows: q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1.
    place = Place(name="qkv", source="qkv", shape=(12, 1), order="fused", heads=2)
    assert row_order(place).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert rows_at_once(place) == 2


@given(heads=st.integers(1, 5), half=st.integers(1, 6))
def test_rotating_neighbours_after_the_permutation_is_rotating_halves_before_it(heads, half):
    generator = torch.Generator().manual_seed(heads * 10 + half)
    x = torch.randn(heads, 2 * half, generator=generator, dtype=torch.float64)
    angle = torch.randn(half, generator=generator, dtype=torch.float64)
    a, b = x[:, :half], x[:, half:]
    # [heads, d]
    halves = torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1
    )
    order = row_order(
        Place(name="q", source="q", shape=(heads * 2 * half,), order="rotary", heads=heads)
    )
    pairs = x.flatten()[order].view(heads, half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    neighbours = torch.stack(
        [even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], dim=-1
    )
    assert torch.equal(neighbours.flatten(), halves.flatten()[order])


def test_a_tied_head_is_written_once():
    tied = {name: shape for name, shape in OUTSIDE.items() if name != "lm_head.weight"}
    for outside in (tied, OUTSIDE):
        names = [
            place.name for place in places(llama(tie_word_embeddings=True), shapes(outside=outside))
        ]
        assert "token_embd.weight" in names and "output.weight" not in names
    with pytest.raises(InputError, match="lm_head.weight: not in the checkpoint, llama needs it"):
        places(llama(), shapes(outside=tied))


def test_biases_follow_their_weights():
    layer = {**LAYER, "self_attn.q_proj.bias": (8,), "mlp.down_proj.bias": (8,)}
    found = {place.name: place for place in places(llama(), shapes(layer))}
    assert found["blk.1.attn_q.bias"] == Place(
        name="blk.1.attn_q.bias",
        source="model.layers.1.self_attn.q_proj.bias",
        shape=(8,),
        order="rotary",
        heads=2,
    )
    assert found["blk.0.ffn_down.bias"].order == "stored"
    with pytest.raises(
        InputError,
        match=r"model.layers.0.self_attn.q_proj.bias: not in the checkpoint, qwen2 needs it",
    ):
        places(Qwen2Config(**SHAPE, num_key_value_heads=1), shapes())


def test_the_norms_of_qwen3s_heads_and_what_its_architecture_lacks():
    config = Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=4)
    layer = {**LAYER, "self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
    found = {place.name for place in places(config, shapes(layer))}
    assert {"blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"} <= found
    with pytest.raises(
        UnsupportedError, match=r"self_attn.o_proj.bias: llama.cpp's qwen3 has no such bias"
    ):
        places(config, shapes({**layer, "self_attn.o_proj.bias": (8,)}))


def test_a_neox_has_biases_everywhere_and_three_parts_in_one():
    layer = {
        "input_layernorm": (8,),
        "attention.query_key_value": (24, 8),
        "attention.dense": (8, 8),
        "post_attention_layernorm": (8,),
        "mlp.dense_h_to_4h": (12, 8),
        "mlp.dense_4h_to_h": (8, 12),
    }
    layer = {
        f"{name}.{part}": shape[: 1 if part == "bias" else 2]
        for name, shape in layer.items()
        for part in ("weight", "bias")
    }
    outside = {"gpt_neox.embed_in.weight": (32, 8), "embed_out.weight": (32, 8)}
    outside |= {"gpt_neox.final_layer_norm.weight": (8,), "gpt_neox.final_layer_norm.bias": (8,)}
    found = {
        place.name: place
        for place in places(GPTNeoXConfig(**SHAPE), shapes(layer, outside, "gpt_neox.layers"))
    }
    assert len(found) == 2 * 12 + 4
    assert found["blk.1.attn_qkv.weight"].order == found["blk.1.attn_qkv.bias"].order == "fused"
    assert (
        found["blk.0.ffn_up.bias"].shape == (12,)
        and found["output_norm.bias"].source == "gpt_neox.final_layer_norm.bias"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            "model.layers.1.mlp.up_proj.weight: not in the checkpoint",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": (12, 7)},
            r"up_proj.weight: \[12, 7\] in the checkpoint, config.json says \[12, 8\]",
        ),
        (
            {"model.layers.2.mlp.up_proj.weight": (12, 8)},
            "model.layers.2.mlp.up_proj.weight: in the checkpoint, llama has no place",
        ),
        (
            {"model.embed_tokens.weight": (33, 8)},
            r"\[33, 8\] in the checkpoint, config.json says \[32, 8\]",
        ),
    ],
)
def test_a_tensor_too_many_too_few_or_too_large_is_named(change, said):
    found = {name: shape for name, shape in {**shapes(), **change}.items() if shape is not None}
    with pytest.raises(InputError, match=said):
        places(llama(), found)


def test_the_sizes_of_a_llama_are_told():
    config = llama(
        rms_norm_eps=1e-6, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}
    )
    assert metadata(config) == {
        "general.architecture": ("string", "llama"),
        "llama.context_length": ("u32", 64),
        "llama.embedding_length": ("u32", 8),
        "llama.block_count": ("u32", 2),
        "llama.feed_forward_length": ("u32", 12),
        "llama.attention.head_count": ("u32", 2),
        "llama.attention.head_count_kv": ("u32", 1),
        "llama.attention.key_length": ("u32", 4),
        "llama.attention.value_length": ("u32", 4),
        "llama.rope.dimension_count": ("u32", 4),
        "llama.rope.freq_base": ("f32", 500000.0),
        "llama.vocab_size": ("u32", 32),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-6),
    }
    assert rope_factors(config) is None


def test_what_the_other_families_say_besides():
    neox = metadata(
        GPTNeoXConfig(**SHAPE, rotary_pct=0.5, layer_norm_eps=1e-3, use_parallel_residual=False)
    )
    assert neox["gptneox.rope.dimension_count"] == ("u32", 2) and neox[
        "gptneox.use_parallel_residual"
    ] == ("bool", False)
    assert neox["gptneox.attention.layer_norm_epsilon"] == ("f32", 1e-3)
    assert neox["gptneox.attention.head_count_kv"] == ("u32", 2)
    assert metadata(MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=16))[
        "llama.context_length"
    ] == ("u32", 16)
    assert metadata(MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=None))[
        "llama.context_length"
    ] == ("u32", 64)
    assert metadata(Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=6))[
        "qwen3.attention.key_length"
    ] == ("u32", 6)
    linear = metadata(
        llama(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0})
    )
    assert linear["llama.rope.scaling.type"] == ("string", "linear") and linear[
        "llama.rope.scaling.factor"
    ] == ("f32", 2.0)


def test_llama_3s_factors_give_transformers_frequencies():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    config = llama(head_dim=128, rope_parameters=rope, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    factors = rope_factors(config)
    assert factors.dtype == torch.float32 and factors.shape == (64,)
    assert factors[0] == 1 and factors[-1] == 8 and len(set(factors.tolist())) > 4
    torch.testing.assert_close(plain / factors.double(), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (llama(hidden_act="gelu"), "hidden_act 'gelu', llama.cpp computes 'silu' for llama"),
        (llama(head_dim=3), "heads of 3, llama.cpp rotates pairs"),
        (
            llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **YARN}),
            "rope_type 'yarn'",
        ),
        (
            llama(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            ),
            "partial_rotary",
        ),
        (
            SimpleNamespace(model_type="gemma2"),
            "model_type 'gemma2' has no architecture in GGUF here",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(config, said):
    with pytest.raises(UnsupportedError, match=said):
        metadata(config)
