"""Bytes and seconds on GPUs by arithmetic, worked by hand for a model of 8 B weights."""

import math

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from quantflow.core.scheme import PRESETS
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models.open import graph_for
from quantflow.planning.cards import CARDS, has_kernel, speed_of, token_bytes
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import HeadSettings, Quantize
from quantflow.planning.sizes import model_size

LINEAR = 218_103_808  # 2 x 4096 x 4096 + 2 x 1024 x 4096 + 3 x 14336 x 4096, of a layer
NORMS = 2 * 2 * 4096
HEAD = 128_256 * 4096


def sized(config, shapes):
    infos = {
        name: TensorInfo(
            name=name, dtype="BF16", shape=shape, offset=0, nbytes=2 * math.prod(shape)
        )
        for name, shape in shapes.items()
    }
    graph = graph_for(config)
    return model_size(infos, config, graph), graph, shapes


@pytest.fixture(scope="module")
def of_8b():
    """The shapes of Llama 3 8B."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        architectures=["LlamaForCausalLM"],
    )
    shapes = {"model.embed_tokens.weight": (128_256, 4096), "lm_head.weight": (128_256, 4096)}
    shapes["model.norm.weight"] = (4096,)
    for index in range(32):
        layer = f"model.layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", 4096, 4096),
            ("self_attn.k_proj", 1024, 4096),
            ("self_attn.v_proj", 1024, 4096),
            ("self_attn.o_proj", 4096, 4096),
            ("mlp.gate_proj", 14336, 4096),
            ("mlp.up_proj", 14336, 4096),
            ("mlp.down_proj", 4096, 14336),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (4096,)
    return sized(config, shapes)


def planned(model, scheme, **options):
    _, graph, shapes = model
    return resolve(Quantize(name="a", scheme=scheme, **options), graph, shapes)


def test_a_token_reads_its_weights_as_they_are_stored_and_the_head(of_8b):
    # 4 bits a weight, a scale in bfloat16 for 128, two int64 of each linear's shape
    layer = LINEAR // 2 + 2 * LINEAR // 128 + 7 * 16 + NORMS
    found = token_bytes(of_8b[0], planned(of_8b, "W4A16"))
    assert found.weights == 32 * layer + 2 * HEAD == 4_649_913_856
    assert found.position == 2 * 8 * 128 * 2 * 32  # keys and values of 8 heads in 32 layers
    # 4.65 GB at 3.35 TB/s
    assert 1 / found.least_seconds(CARDS["H100"], positions=0) == pytest.approx(720.4, abs=0.1)
    assert found.least_seconds(CARDS["H100"], positions=8192) == pytest.approx(
        (4_649_913_856 + 8192 * 131_072) / 3.35e12
    )


def test_a_weight_without_a_kernel_is_read_as_bfloat16_and_a_quantized_head_as_its_codes(of_8b):
    in_bfloat16 = 32 * (2 * LINEAR + NORMS)
    for scheme in ("NVFP4", "W4A8"):
        found = token_bytes(of_8b[0], planned(of_8b, scheme))
        assert found.weights == in_bfloat16 + 2 * HEAD
    head = planned(of_8b, "W4A8", head=HeadSettings(scheme="W8A16"))
    assert token_bytes(of_8b[0], head).weights < in_bfloat16 + 1.001 * HEAD + 1e6


def test_the_schemes_with_a_kernel_are_those_of_the_page():
    assert {name for name, scheme in PRESETS.items() if has_kernel(scheme)} == {
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W8A8",
        "W8A8_STATIC",
        "W8A16",
        "W4A16",
        "W4A16_ASYM",
    }


def test_experts_count_by_the_share_of_tokens_that_go_to_one():
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=320,
        architectures=["MixtralForCausalLM"],
    )
    layer = "model.layers.0"
    shapes = {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64)}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (64, 64) for name in "qo"}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (32, 64) for name in "kv"}
    shapes[f"{layer}.block_sparse_moe.gate.weight"] = (8, 64)
    for expert in range(8):
        for name, shape in (("w1", (128, 64)), ("w2", (64, 128)), ("w3", (128, 64))):
            shapes[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    model = sized(config, shapes)
    found = token_bytes(model[0], planned(model, "MXFP4")).weights
    attention, router, experts = 2 * 64 * 64 + 2 * 32 * 64, 8 * 64, 3 * 64 * 128
    assert found == 2 * (attention + router + 2 * experts + 320 * 64)


def test_the_rates_of_a_card_are_its_operations_and_bytes(of_8b):
    model, plan = of_8b[0], planned(of_8b, "W4A16")
    h100 = CARDS["H100"]
    slow, fast = (
        speed_of(h100, model, [plan], dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert slow.token == slow.run == fast.token == 2 * LINEAR / 67e12
    assert fast.run == 2 * LINEAR / 989e12
    assert slow.observed["amax"] == 4 / 3.35e12
    # x^T x of a token: groups of 4096, 4096, 4096 and 14336 features, half of each
    tokens, squares = 1000, 3 * 4096**2 + 14336**2
    features = 3 * 4096 + 14336
    assert tokens * features * slow.observed["hessian"] == pytest.approx(tokens * squares / 67e12)
    gptq = slow.gptq["a"]
    # Cholesky of 4096: K^3 / 3; 1024 rows: half of a product, and 4 instructions for each of 128
    expected = 4096**3 / 3 + 1024 * 4096**2 + 2 * 4 * 128 * 1024 * 4096
    assert gptq.seconds(1024, 4096) == pytest.approx(expected / 67e12)
    assert speed_of(h100, model, [planned(of_8b, "FP8_DYNAMIC")], dtype=torch.float32).gptq == {}


def test_text_in_bfloat16_is_counted_by_the_cards_products_of_bfloat16(of_8b):
    model, plan = of_8b[0], planned(of_8b, "W4A16")
    h100 = CARDS["H100"]
    lengths = [2048] * 128
    wide, narrow = (
        speed_of(h100, model, [plan], dtype=torch.float32, narrow=names).quantize(
            model, plan, lengths
        )
        for names in ((), ("a",))
    )
    # two passes of the text; a multiply-add for each pair of features
    work = sum(lengths) * len(model.layers) * (2 * 2 * LINEAR + 3 * 4096**2 + 14336**2)
    assert wide - narrow == pytest.approx(work / 67e12 - work / 989e12)


def test_a_faster_card_takes_no_longer_for_any_stage(of_8b):
    model, plan = of_8b[0], planned(of_8b, "W4A16")

    def seconds(name):
        speed = speed_of(CARDS[name], model, [plan], dtype=torch.bfloat16)
        lengths = [2048] * 128
        return (
            speed.measure(model, lengths, ["hessian"]),
            speed.quantize(model, plan, lengths),
            speed.validate(model, lengths),
        )

    for slower, faster in (("A100", "H100"), ("H100", "H200"), ("H200", "B200")):
        pairs = list(zip(seconds(faster), seconds(slower), strict=True))
        assert all(fast <= slow for fast, slow in pairs)
    assert seconds("H100")[1] < seconds("A100")[1] / 2  # its float32 is 3.4 times as fast
