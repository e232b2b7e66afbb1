"""Adapters as PEFT writes them, made by hand: PEFT itself is not needed to run one."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from quantflow.core.scheme import preset
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.runtime.adapters import AdaptedLinear, attach_
from quantflow.runtime.linear import QuantLinear
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded

CONFIG = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=61,
    intermediate_size=48,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
)
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]
SHAPES = {NAMES[0]: (32, 32), NAMES[1]: (32, 48), NAMES[2]: (61, 32)}  # out, in
IDS = torch.arange(1, 12)[None]


def write_adapter(folder, *, names=NAMES, rank=4, extra=(), **config):
    """Write random factors; return name -> scaling * B A with scaling alpha / r."""
    generator = torch.Generator().manual_seed(5)
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 12,
        "target_modules": ["q_proj"],
        "bias": "none",
    } | config
    tensors, deltas = {}, {}
    for name in names:
        rows, columns = SHAPES.get(name, (32, 32))
        a, b = (
            torch.randn(rank, columns, generator=generator) * 0.2,
            torch.randn(rows, rank, generator=generator) * 0.2,
        )
        tensors |= {
            f"base_model.model.{name}.lora_A.weight": a,
            f"base_model.model.{name}.lora_B.weight": b,
        }
        deltas[name] = (12 / rank) * (b @ a)
    folder.mkdir(exist_ok=True)
    save_file(tensors | dict(extra), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return deltas


@pytest.fixture(scope="module")
def made(tmp_path_factory, make_artifact):
    """An artifact of 8-bit linears and a float lm_head, and transformers' model of its weights."""
    folder = tmp_path_factory.mktemp("artifact")
    return folder, make_artifact(folder, CONFIG, preset("W8A16"))


def by_hand(model, deltas):
    """Logits of the model with the deltas added to its weights, which are put back."""
    for name, delta in deltas.items():
        model.get_submodule(name).weight.data += delta
    with torch.no_grad():
        logits = model(IDS).logits
    for name, delta in deltas.items():
        model.get_submodule(name).weight.data -= delta
    return logits


@pytest.mark.parametrize("opened", [load, load_offloaded])
@pytest.mark.parametrize("merge", [False, True])
def test_logits_are_those_of_the_delta_merged_by_hand(made, tmp_path, opened, merge):
    folder, peer = made
    deltas = write_adapter(tmp_path / "lora")
    model = opened(folder, backend="reference").model
    with torch.no_grad():
        before = model(IDS).logits
        adapted = attach_(model, tmp_path / "lora", merge=merge)
        found = model(IDS).logits
    assert torch.allclose(found, by_hand(peer, deltas), atol=2e-4)
    assert not torch.allclose(found, before, atol=1e-2)
    inside = merge and opened is load  # what is read from disk has no weight to merge into
    assert adapted.merged == (("lm_head",) if inside else ())
    assert adapted.beside == tuple(NAMES[:2] if inside else sorted(NAMES))
    assert isinstance(model.get_submodule(NAMES[0]), AdaptedLinear)


def test_a_quantized_base_keeps_its_weights(made, tmp_path):
    model = load(made[0], backend="reference").model
    base = model.get_submodule(NAMES[0])
    write_adapter(tmp_path / "lora")
    attach_(model, tmp_path / "lora", merge=True)
    assert isinstance(base, QuantLinear)
    assert model.get_submodule(NAMES[0]).base is base


def test_alpha_may_differ_by_pattern_and_be_divided_by_the_root_of_the_rank(made, tmp_path):
    folder, peer = made
    deltas = write_adapter(
        tmp_path / "lora",
        rank=9,
        use_rslora=True,
        alpha_pattern={"1.mlp.down_proj": 24, "proj": 99},
    )
    factors = {NAMES[0]: math.sqrt(9), NAMES[1]: 2 * math.sqrt(9), NAMES[2]: math.sqrt(9)}
    model = load(folder, backend="reference").model
    attach_(model, tmp_path / "lora")
    with torch.no_grad():
        found = model(IDS).logits
    expected = by_hand(peer, {name: delta * factors[name] for name, delta in deltas.items()})
    assert torch.allclose(found, expected, atol=2e-4)


def test_the_factors_have_the_dtype_of_the_model(made, tmp_path):
    write_adapter(tmp_path / "lora")
    model = load(made[0], backend="reference", dtype=torch.bfloat16).model
    attach_(model, tmp_path / "lora")
    with torch.no_grad():
        assert model(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type IA3; give a LoRA adapter"),
        (
            {"use_dora": True},
            UnsupportedError,
            "use_dora is True, False is supported; give a plain LoRA adapter",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            UnsupportedError,
            "modules_to_save is \\['lm_head'\\], None is supported",
        ),
        ({"lora_alpha": None}, InputError, "lora_alpha: None, a number is needed"),
        (
            {"alpha_pattern": {"(": 1}},
            InputError,
            "adapter_config.json: alpha_pattern: pattern .* is no regular expression",
        ),
        (
            {"names": ["model.layers.9.self_attn.q_proj"]},
            InputError,
            "layers.9.self_attn.q_proj is no linear of the model",
        ),
        (
            {"names": ["model.layers.0.mlp.up_proj"]},
            InputError,
            r"up_proj maps 32 to 48, A \[4, 32\], B \[32, 4\]; give an",
        ),
        ({"names": []}, InputError, "holds no tensor; give an adapter that was trained"),
        (
            {"extra": {"base_model.model.lm_head.lora_embedding_A": torch.zeros(1)}.items()},
            UnsupportedError,
            "lora_embedding_A is no factor of a linear",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)
                }.items()
            },
            InputError,
            "layers.1.mlp.up_proj has lora_A alone; restore",
        ),
    ],
)
def test_what_is_no_plain_adapter_of_this_model_is_refused(made, tmp_path, change, error, message):
    write_adapter(tmp_path / "lora", **change)
    model = load(made[0], backend="reference").model
    with pytest.raises(error, match=message):
        attach_(model, tmp_path / "lora")


def test_a_missing_adapter_is_an_input_error(made, tmp_path):
    with pytest.raises(InputError, match="adapter_config.json: No such file"):
        attach_(load(made[0], backend="reference").model, tmp_path / "lora")


def test_a_weight_that_the_embedding_shares_is_not_merged_into(made, tmp_path):
    write_adapter(tmp_path / "lora")
    model = load(made[0], backend="reference").model
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(
        UsageError,
        match=r"^lm_head: its weight is the embedding's too; leave the adapter beside it$",
    ):
        attach_(model, tmp_path / "lora", merge=True)
