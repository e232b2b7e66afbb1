"""The choice of attention against transformers' eager one, and Gaudi's kernel by a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, LlamaConfig, PhiConfig

from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime.attention import choose_
from quantflow.runtime.attention_choice import attention_of
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load
from quantflow.runtime.shapes import Shapes
from quantflow.runtime.static_shapes import StaticShapeDecoder
from quantflow.runtime.transformers_decoder import TransformersDecoder

CPU, HPU = torch.device("cpu"), torch.device("hpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)


def model_of(config, *words, device=CPU):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    return model, choose_(model, attention_of(words), device) if words else ()


def ids(*shape, seed=0):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, padding=None):
    """Logits after a prompt of two rows, and after two steps."""
    decoder = TransformersDecoder(model)
    decoder.begin(rows=2, capacity=9)
    found = [decoder.forward(ids(2, 7), padding=padding)]
    return torch.stack([*found, *(decoder.forward(ids(2, 1, seed=step)) for step in (1, 2))])


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 3])])
@pytest.mark.parametrize("words", [("sdpa",), ("fused",), ("fused", "causal")], ids=" ".join)
@pytest.mark.parametrize("config", [LLAMA, PhiConfig(**SIZES)], ids=lambda one: one.model_type)
def test_one_kernel_attends_as_the_formula_does(config, words, padding):
    model, reasons = model_of(config, *words)
    expected = logits(model_of(config, "eager")[0], padding)
    assert reasons == () and torch.allclose(logits(model, padding), expected, atol=1e-5)


def test_a_softmax_in_bfloat16_is_that_of_the_formula_with_its_bits():
    model, _ = model_of(LLAMA, "bfloat16-softmax")
    assert "bfloat16_softmax" in model.config._attn_implementation
    taken = []

    def softmax(scores, dim, dtype=None):
        taken.append(scores.dtype)
        return functional.softmax(scores, dim=dim, dtype=dtype)

    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    places = model.model.rotary_emb(x, torch.arange(5)[None])
    mask = torch.full((1, 1, 5, 5), -1e9).triu(1)
    found = layer(hidden_states=x, position_embeddings=places, attention_mask=mask)[0]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads = [
        projection(x).view(1, 5, -1, 8).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    q, k = apply_rotary_pos_emb(heads[0], heads[1], *places)
    k, v = (part.repeat_interleave(2, 1) for part in (k, heads[2]))
    scores = q @ k.transpose(2, 3) * 8**-0.5 + mask
    weights = softmax(scores.bfloat16(), dim=-1).float()
    expected = layer.o_proj((weights @ v).transpose(1, 2).reshape(1, 5, 32))
    assert taken == [torch.bfloat16] and torch.equal(found, expected)
    exact = softmax(scores, dim=-1) @ v
    assert not torch.equal(expected, layer.o_proj(exact.transpose(1, 2).reshape(1, 5, 32)))


def test_a_capped_score_and_a_window_are_kept_with_a_softmax_in_bfloat16():
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4)
    found = logits(model_of(config, "bfloat16-softmax")[0])
    assert torch.allclose(found, logits(model_of(config, "eager")[0]), atol=0.02)
    with pytest.raises(UnsupportedError, match="adds softcap"):
        logits(model_of(config, "fused")[0])


@pytest.fixture
def fused(monkeypatch):
    """A stand-in for Gaudi's kernel, which keeps what it was called with."""
    calls = []

    class FusedSDPA:
        @staticmethod
        def apply(query, key, value, mask, dropout, causal, scale, mode, recompute):
            calls.append(SimpleNamespace(mask=mask, causal=causal, mode=mode, recompute=recompute))
            assert dropout == 0.0
            return functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal, scale=scale
            )

    kernels = ModuleType("habana_frameworks.torch.hpex.kernels")
    kernels.FusedSDPA = FusedSDPA
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpex"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpex.kernels", kernels)
    return calls


def test_gaudis_kernel_is_called_as_the_words_say(fused):
    expected = logits(model_of(LLAMA, "eager")[0])
    for words, mode, recompute, causal in (
        (("fused",), "None", False, False),
        (("fused", "causal"), "None", False, True),
        (("fused", "fast-softmax", "recompute"), "fast", True, False),
    ):
        fused.clear()
        model, reasons = model_of(LLAMA, *words, device=HPU)
        assert torch.allclose(logits(model), expected, atol=1e-5) and reasons == ()
        prompt, step = fused[0], fused[-1]
        assert {(call.mode, call.recompute) for call in fused} == {(mode, recompute)}
        assert prompt.causal is causal and (prompt.mask is None) is causal
        assert step.causal is False


def test_rows_of_several_lengths_have_a_mask_beside_causal_too(fused):
    padding = torch.tensor([0, 3])
    expected = logits(model_of(LLAMA, "eager")[0], padding)
    model, _ = model_of(LLAMA, "fused", "causal", device=HPU)
    assert torch.allclose(logits(model, padding), expected, atol=1e-5)
    assert all(call.mask is not None and not call.causal for call in fused)


def test_what_a_cpu_does_not_have_is_said():
    assert model_of(LLAMA, "fused", "recompute", "fast-softmax")[1] == (
        "attention: recompute and fast-softmax: Gaudi's kernel alone has it",
    )
    (reason,) = model_of(LLAMA, "fused", "bfloat16-softmax")[1]
    assert "has a softmax of its own" in reason


@pytest.mark.parametrize("words", [("fused",), ("bfloat16-softmax",), ("eager",)], ids=" ".join)
def test_a_static_cache_goes_with_each(words):
    model, _ = model_of(LLAMA, *words)
    ours = StaticShapeDecoder(model, device=CPU, rules=Shapes(bucket_size=4))
    prompt = ids(2, 5)
    expected = generate(TransformersDecoder(model), prompt, max_new_tokens=6)
    assert torch.equal(generate(ours, prompt, max_new_tokens=6), expected)


def test_a_family_that_attends_in_its_own_way_has_no_choice(llama):
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    with pytest.raises(UnsupportedError, match="modules of bloom compute it in a way of their own"):
        model_of(config, "bfloat16-softmax")
    with pytest.raises(UsageError, match="attention with the lean decoder"):
        load(llama, decoder="lean", attention=attention_of(("sdpa",)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("flash",), "attention='flash'"),
        (("eager", "fused"), "attention=eager and fused"),
        (("causal",), "attention=causal with none of eager, sdpa and fused"),
        (("sdpa", "recompute"), "attention=recompute with sdpa"),
        (("sdpa", "bfloat16-softmax"), "bfloat16-softmax with sdpa"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, told):
    with pytest.raises(UsageError, match=told):
        attention_of(words)
