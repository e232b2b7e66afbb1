"""Rotary embeddings and gates that a kernel computes: in which modules, and that bits stay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)
from transformers.models.llama import modeling_llama

from quantflow.core.scheme import preset
from quantflow.runtime import modules
from quantflow.runtime.fused_gates import ACTIVATIONS, activation_of, fuse_gates_
from quantflow.runtime.fused_rope import fuse_rotary_, turned_halves, turns_halves
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
IDS = torch.arange(12).reshape(2, 6)


class Kernels:
    """Kernels with the values of the equations; they count their calls."""

    def __init__(self):
        self.turned, self.gated = [], []

    def rotary(self, q, k, cos, sin):
        self.turned.append((q.shape, k.shape))
        return turned_halves(q, k, cos, sin)

    def product(self, gate, up, *, activation):
        self.gated.append(gate.shape)
        return ACTIVATIONS[activation](gate) * up


def made(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("config", "turned", "gated"),
    [
        (LlamaConfig(**SIZES), 2, 2),
        (MistralConfig(**SIZES), 2, 2),
        (Qwen2Config(**SIZES), 2, 2),
        (Qwen3Config(head_dim=8, **SIZES), 2, 2),
        (GraniteConfig(**SIZES), 2, 2),
        # gated by nothing
        (Starcoder2Config(**SIZES), 2, 0),
        # gate and up in one linear
        (Phi3Config(pad_token_id=0, **SIZES), 2, 0),
        (GemmaConfig(head_dim=8, **SIZES), 2, 2),
        (Gemma2Config(head_dim=8, **SIZES), 2, 2),
        (Gemma3TextConfig(head_dim=8, **SIZES), 2, 2),
        # GELU by the error function
        (LlamaConfig(hidden_act="gelu", **SIZES), 2, 0),
        # experts in one tensor
        (
            Qwen3MoeConfig(
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                **SIZES,
            ),
            2,
            0,
        ),
        (OlmoeConfig(num_experts=4, num_experts_per_tok=2, **SIZES), 2, 0),
        # neither halves of that form nor one linear for each
        (GptOssConfig(head_dim=8, num_local_experts=4, num_experts_per_tok=2, **SIZES), 0, 0),
        # neighbours turn together
        (CohereConfig(**SIZES), 0, 2),
        # a quarter of each head turns, whose angles are of that quarter
        (GPTNeoXConfig(**SIZES), 0, 0),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
@torch.no_grad()
def test_layers_call_the_kernels_where_these_have_the_familys_values(config, turned, gated, dtype):
    model, kernels = made(config, dtype), Kernels()
    expected = model(IDS).logits
    fuse_rotary_(model, rotary=kernels.rotary)
    fuse_gates_(model, gated=kernels.product)
    assert torch.equal(model(IDS).logits, expected)
    assert (len(kernels.turned), len(kernels.gated)) == (turned, gated)


@torch.no_grad()
def test_angles_in_float32_are_left_to_torch_beside_bfloat16():
    model, kernels = made(Olmo2Config(**SIZES)), Kernels()
    expected = model(IDS).logits
    fuse_rotary_(model, rotary=kernels.rotary)
    assert torch.equal(model(IDS).logits, expected) and kernels.turned == []


@torch.no_grad()
def test_other_models_of_the_family_keep_torchs_operators():
    before, kernels = modeling_llama.apply_rotary_pos_emb, Kernels()
    first, second = made(LlamaConfig(**SIZES)), made(LlamaConfig(**SIZES))
    assert fuse_rotary_(first, rotary=kernels.rotary) == 2
    assert fuse_gates_(first, gated=kernels.product) == 2
    second(IDS)
    assert kernels.turned == kernels.gated == []
    assert modeling_llama.apply_rotary_pos_emb is before


@torch.no_grad()
def test_a_model_whose_operators_are_fused_generates_over_a_cache():
    model, kernels = made(LlamaConfig(**SIZES)), Kernels()
    words = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **words)
    fuse_rotary_(model, rotary=kernels.rotary)
    fuse_gates_(model, gated=kernels.product)
    assert torch.equal(model.generate(IDS, **words), expected)
    assert kernels.turned[-1] == ((2, 4, 1, 8), (2, 2, 1, 8))


def test_a_modules_operators_are_fused_once():
    model, kernels = made(LlamaConfig(**SIZES)), Kernels()
    assert fuse_rotary_(model, rotary=kernels.rotary) == 2
    assert fuse_rotary_(model, rotary=kernels.rotary) == 0
    assert fuse_gates_(model, gated=kernels.product) == 2
    assert fuse_gates_(model, gated=kernels.product) == 0


def test_functions_that_turn_otherwise_are_told_apart():
    assert turns_halves(modeling_llama.apply_rotary_pos_emb)

    def backwards(q, k, cos, sin):
        return turned_halves(q, k, cos, -sin)

    def keys_first(k, q, cos, sin):
        return turned_halves(q, k, cos, sin)

    def in_float32(q, k, cos, sin):
        wide = (tensor.float() for tensor in (q, k, cos, sin))
        return tuple(turned.bfloat16() for turned in turned_halves(*wide))

    def refuses(q, k, cos, sin):
        raise ValueError(q)

    for other in (backwards, keys_first, in_float32, refuses):
        assert not turns_halves(other)


@pytest.mark.parametrize("case", ["cos", "key", "token", "token by name"])
def test_tensors_that_the_kernel_does_not_read_are_left_to_torch(case):
    model, kernels = made(LlamaConfig(**SIZES)), Kernels()
    fuse_rotary_(model, rotary=kernels.rotary)
    function = model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((2, 5, 5, 8), (2, 5, 5, 8), (1, 5, 8), (1, 5, 8))  # heads as tokens
    )
    function(q, k, cos, sin)
    assert len(kernels.turned) == 1
    if case == "cos":
        cos, sin = cos.float(), sin.float()
    elif case == "key":  # channels that do not lie side by side
        k = k.mT.contiguous().mT
    else:  # tokens before heads
        words = {"unsqueeze_dim": 2} if case == "token by name" else {}
        more = () if words else (2,)
        found = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, *more, **words)
        expected = (turned.transpose(1, 2) for turned in turned_halves(q, k, cos, sin))
        assert all(map(torch.equal, found, expected))
    if "token" not in case:
        expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        assert all(map(torch.equal, function(q, k, cos, sin), expected))
    assert len(kernels.turned) == 1


def test_mlps_that_do_more_are_told_apart():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Doubled(Gated):
        def forward(self, x):
            return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Clamped(Gated):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))

    class Limited(Gated):
        limit = 7.0

        def forward(self, x):
            gate = self.gate_proj(x).clamp(max=self.limit)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    class Scaled(Gated):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    class Normed(Gated):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

    assert activation_of(Gated()) == "silu"
    for other in (Doubled, Clamped, Limited, Scaled, Normed):
        assert activation_of(other()) is None
    for activation, name in (
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.GELU(), None),
        (nn.ReLU(), None),
    ):
        module = Gated()
        module.act_fn = activation
        assert activation_of(module) == name


@pytest.mark.parametrize("triton", [True, False])
def test_an_artifacts_operators_are_fused_where_tritons_kernels_run(
    monkeypatch, make_artifact, tmp_path, triton
):
    kernels = Kernels()
    expected = make_artifact(tmp_path, LlamaConfig(**SIZES), preset("W8A16"))
    by_name = {
        "norm": SimpleNamespace(rms_norm=None),
        "rope": SimpleNamespace(rotary=kernels.rotary),
        "gate": SimpleNamespace(gated=kernels.product),
    }
    monkeypatch.setattr(modules, "runs_triton", lambda kind: triton and kind == "cpu")
    monkeypatch.setattr(modules, "import_module", lambda name: by_name[name.rpartition(".")[2]])
    monkeypatch.setattr(modules, "fuse_norms_", lambda *_, **__: None)
    loaded = load(tmp_path, decoder="transformers", backend="reference")
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS).logits, expected(IDS).logits)
    assert (len(kernels.turned), len(kernels.gated)) == ((2, 2) if triton else (0, 0))
