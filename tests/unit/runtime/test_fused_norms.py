"""Norms that a kernel computes: which modules they are, and that the model's bits stay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quantflow.core.scheme import preset
from quantflow.runtime import modules
from quantflow.runtime.fused_norms import FORMS, NormForm, fuse_norms_
from quantflow.runtime.load import load

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LLAMA, OLMO, GEMMA = FORMS


def made(config, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones hide where a family rounds
            nn.init.normal_(parameter)
    return model


class Kernel:
    """A kernel with the values of the equation, which keeps the forms that it was asked for."""

    def __init__(self):
        self.forms = []

    def __call__(self, x, weight, *, eps, offset, early):
        self.forms.append(NormForm(offset=offset, early=early))
        return self.forms[-1].compute(x, weight, eps=eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("config", "norms", "form"),
    [
        (LlamaConfig(intermediate_size=48, **SIZES), 2 * 2 + 1, LLAMA),
        (Qwen3Config(intermediate_size=48, head_dim=8, **SIZES), 2 * 4 + 1, LLAMA),
        (Olmo2Config(intermediate_size=48, **SIZES), 2 * 4 + 1, OLMO),
        (Gemma2Config(intermediate_size=48, head_dim=8, **SIZES), 2 * 4 + 1, GEMMA),
    ],
    ids=["Llama", "Qwen3", "OLMo 2", "Gemma 2"],
)
@torch.no_grad()
def test_norms_of_a_family_are_computed_by_the_kernel_of_its_form(config, norms, form, dtype):
    model, kernel = made(config, dtype), Kernel()
    ids = torch.arange(12).reshape(2, 6)
    expected = model(ids).logits
    assert fuse_norms_(model, rms_norm=kernel) == norms
    assert torch.equal(model(ids).logits, expected)
    assert len(kernel.forms) == norms
    # in float32 nothing is rounded, so Llama's form and OLMo's are one
    assert set(kernel.forms) == {LLAMA if dtype == torch.float32 and form == OLMO else form}


def test_norms_of_another_kind_and_norms_that_differ_stay_as_they_are():
    model = made(OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **SIZES), torch.bfloat16)
    assert fuse_norms_(model, rms_norm=Kernel()) == 0

    class ThriceRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 3 * super().forward(hidden_states)

    class GatedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states, gate):
            return super().forward(hidden_states) * gate

    both = nn.ModuleList([ThriceRMSNorm(32), GatedRMSNorm(32), nn.RMSNorm(32)])
    assert fuse_norms_(both, rms_norm=Kernel()) == 0


def test_inputs_of_another_dtype_are_left_to_torch():
    norm, kernel = LlamaRMSNorm(32).to(torch.bfloat16), Kernel()
    x = torch.randn(3, 32)
    expected = norm(x)
    assert fuse_norms_(norm, rms_norm=kernel) == 1
    assert torch.equal(norm(x), expected) and kernel.forms == []


@pytest.mark.parametrize("triton", [True, False])
def test_an_artifacts_norms_are_fused_where_tritons_kernels_run(
    monkeypatch, make_artifact, tmp_path, triton
):
    kernel, config = Kernel(), LlamaConfig(intermediate_size=64, **SIZES)
    expected = make_artifact(tmp_path, config, preset("W8A16"))
    monkeypatch.setattr(modules, "runs_triton", lambda kind: triton and kind == "cpu")
    kernels = SimpleNamespace(rms_norm=kernel, rotary=None, gated=None)
    monkeypatch.setattr(modules, "import_module", lambda name: kernels)
    monkeypatch.setattr(modules, "fuse_rotary_", lambda *_, **__: None)
    monkeypatch.setattr(modules, "fuse_gates_", lambda *_, **__: None)
    loaded = load(tmp_path, decoder="transformers", backend="reference")
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, expected(ids).logits)
    assert len(kernel.forms) == (2 * 2 + 1 if triton else 0)
