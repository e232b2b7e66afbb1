"""A model whose weights stay on disk computes what the loaded model does, and holds few of them."""

import threading
import time

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import InputError, IntegrityError, ResourceError
from quantflow.runtime.decoding import generate
from quantflow.runtime.generate_job import Sampling
from quantflow.runtime.load import load
from quantflow.runtime.offload import Piece, Prefetch, load_offloaded
from tests.shared import slow, slow_but

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 700,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"intermediate_size": 576, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**GROUPED, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
CONFIGS = {
    "llama": LLAMA,
    "tied qwen2 with biases": Qwen2Config(
        **GROUPED, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=128, architectures=["GPTNeoXForCausalLM"]),
}
W4A16 = with_group_size(PRESETS["W4A16"], 32)
SCHEMES = {
    name: with_group_size(s, 32)
    if s.weights.group_size and s.weights.scale_format == "float"
    else s
    for name, s in PRESETS.items()
}
PROMPT = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory, make_artifact):
    folder = tmp_path_factory.mktemp("artifact")
    make_artifact(folder, LLAMA, W4A16)
    return folder


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=PROMPT).logits


@pytest.mark.parametrize(
    "name",
    slow_but(
        SCHEMES,
        "FP8",
        "FP8_BLOCK",
        "W8A8_STATIC",
        "W8A16",
        "W6A16_ASYM",
        "W4A16_ASYM",
        "W4A8",
        "W3A16_ASYM",
        "NVFP4",
        "MXFP8",
    ),
)
def test_logits_are_those_of_the_loaded_model_to_the_last_bit(name, tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, SCHEMES[name])
    for backend in ("auto", "reference"):
        expected = load(tmp_path, backend=backend)
        offloaded = load_offloaded(tmp_path, backend=backend)
        assert torch.equal(logits(offloaded.model), logits(expected.model))
        assert offloaded.artifact.linears == expected.artifact.linears


def test_an_embedding_that_multiplies_and_a_head_with_a_bias_do_so(tmp_path, make_artifact):
    gemma = GemmaConfig(**GROUPED, head_dim=16, architectures=["GemmaForCausalLM"])
    for config in (
        gemma,
        PhiConfig(**SIZES, intermediate_size=128, architectures=["PhiForCausalLM"]),
    ):
        make_artifact(tmp_path / config.model_type, config, SCHEMES["W8A16"])
        expected, found = (
            how(tmp_path / config.model_type, backend="reference") for how in (load, load_offloaded)
        )
        assert torch.equal(logits(found.model), logits(expected.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_decoding_gives_the_tokens_of_the_loaded_model(family, dtype, tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIGS[family], PRESETS["W8A8"])
    # greedy texts of random models repeat a token
    options = {"max_new_tokens": 16, "sampling": Sampling(seed=0)}
    expected = generate(load(tmp_path, dtype=dtype).model, PROMPT, **options)
    assert len(set(expected[0, 12:].tolist())) > 1
    assert torch.equal(
        generate(load_offloaded(tmp_path, dtype=dtype).model, PROMPT, **options), expected
    )


def test_linears_that_are_not_quantized_are_read_in_their_turn_as_well(tmp_path, make_artifact):
    def scheme_of(name):
        return None if name.endswith("gate_proj") else PRESETS["W8A16"]

    make_artifact(tmp_path, LLAMA, scheme_of)
    assert torch.equal(logits(load_offloaded(tmp_path).model), logits(load(tmp_path).model))


def test_the_model_holds_norms_and_nothing_else(w4a16):
    model = load_offloaded(w4a16).model
    assert sum(parameter.numel() for parameter in model.parameters()) == (2 * 3 + 1) * 64
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    logits(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == (2 * 3 + 1) * 64


def test_a_damaged_file_is_refused_before_the_first_token_if_verified_else_at_its_linear(
    w4a16, tmp_path, edit_tensors
):
    for path in w4a16.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "model.layers.2.mlp.down_proj.weight_scale"
    edit_tensors(tmp_path, lambda tensors: tensors[name].fill_(0))
    with pytest.raises(IntegrityError):
        load_offloaded(tmp_path)
    model = load_offloaded(tmp_path, verify=False).model
    for _ in range(2):  # an error in the thread is raised whenever the linear is asked for
        with pytest.raises(InputError, match=rf"^{name}: scale 0"):
            logits(model)


# families of mixtures: names of their own, shared experts, dense layers before the sparse ones,
# experts in one tensor with biases
MIXTURES = {
    "mixtral": MixtralConfig(
        **GROUPED,
        num_local_experts=6,
        num_experts_per_tok=2,
        architectures=["MixtralForCausalLM"],
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **GROUPED,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        architectures=["Qwen2MoeForCausalLM"],
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_key_value_heads=4,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        intermediate_size=32,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=8,
        architectures=["GptOssForCausalLM"],
    ),
}


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("mixtral", W4A16),
        ("qwen2_moe", PRESETS["FP8_DYNAMIC"]),
        slow(("deepseek_v3", W4A16)),
        ("gpt_oss", None),
    ],
    ids=MIXTURES,
)
def test_a_mixture_reads_chosen_experts_and_has_the_tokens_of_the_loaded_model(
    family, scheme, tmp_path, make_artifact
):
    def scheme_of(name):
        return scheme if ".experts." in name else PRESETS["W8A16"]

    make_artifact(tmp_path, MIXTURES[family], scheme_of)
    expected = load(tmp_path, backend="reference")
    offloaded = load_offloaded(tmp_path, backend="reference")
    cache = offloaded.experts
    cache._left, cache.budget = lambda held: 0, 0  # room for one token's experts of a layer
    assert torch.equal(logits(offloaded.model), logits(expected.model))
    options = {"max_new_tokens": 8, "sampling": Sampling(seed=0)}
    tokens = [generate(model, PROMPT, **options) for model in (expected.model, offloaded.model)]
    assert torch.equal(*tokens)
    counted = cache.summary()
    assert counted["misses"] > 0
    assert 0 < counted["expert_bytes"] <= counted["most_expert_bytes"] == cache.least


def test_with_room_for_all_experts_each_is_read_once(tmp_path, make_artifact):
    make_artifact(tmp_path, MIXTURES["mixtral"], W4A16)
    offloaded = load_offloaded(tmp_path)
    for _ in range(3):
        logits(offloaded.model)
    counted = offloaded.experts.summary()
    assert counted["misses"] <= 3 * 6
    assert counted["hits"] == 2 * counted["misses"]
    assert counted["hit_rate"] == pytest.approx(2 / 3)
    assert torch.equal(logits(offloaded.model), logits(load(tmp_path).model))


def test_a_linear_of_an_expert_that_the_router_skips_is_never_read(
    tmp_path, make_artifact, edit_tensors
):
    """Only the damaged expert's use is an error: what is not chosen is not looked at."""
    make_artifact(tmp_path, MIXTURES["mixtral"], W4A16)
    chosen = set()
    model = load_offloaded(tmp_path)
    for layer in model.model.model.layers:
        own = layer.mlp.experts.fetch
        layer.mlp.experts.fetch = lambda numbers, own=own, index=layer.self_attn.layer_idx: (
            chosen.update((index, number) for number in numbers),
            own(numbers),
        )[1]
    with torch.inference_mode():
        model.model(input_ids=PROMPT[:, :1])
    skipped = min({(i, n) for i in range(3) for n in range(1, 6)} - chosen)
    used = max(chosen - {(0, 0)})
    damaged = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight_scale"
    for (layer, number), fails in ((skipped, False), (used, True)):
        name = damaged.format(layer, number)
        edit_tensors(tmp_path, lambda tensors, name=name: tensors[name].fill_(0))
        streamed = load_offloaded(tmp_path, verify=False).model
        with torch.inference_mode():
            if not fails:
                streamed(input_ids=PROMPT[:, :1])
                continue
            with pytest.raises(InputError, match="scale 0"):
                streamed(input_ids=PROMPT[:, :1])


@pytest.mark.parametrize(("family", "what"), [("mixtral", "experts"), ("llama", "weights")])
def test_too_little_memory_is_refused_with_both_numbers(family, what, tmp_path, make_artifact):
    make_artifact(tmp_path, (MIXTURES | CONFIGS)[family], W4A16)
    refusal = rf"^generate: the {what} .* need \d+ bytes .* --max-memory 50MB leaves 0"
    with pytest.raises(ResourceError, match=refusal) as caught:
        load_offloaded(tmp_path, max_memory="50MB")
    enough = caught.value.remedy.removeprefix("give --max-memory ").removesuffix(" or more")
    load_offloaded(tmp_path, max_memory=f"{int(enough.removesuffix('MB')) + 200}MB")


def pieces(count: int, nbytes: int = 10) -> list[Piece]:
    return [
        Piece(linear=f"linear {index}", start=0, stop=1, nbytes=nbytes) for index in range(count)
    ]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pieces_are_made_ahead_up_to_the_limit_and_go_round():
    made: list[str] = []
    order = pieces(5)

    def make(piece):
        made.append(piece.linear)
        return lambda x: piece.linear

    prefetch = Prefetch(make, order, ahead=20)
    wait_until(lambda: made == ["linear 0", "linear 1"])
    assert [prefetch.take(piece)(None) for piece in (*order, order[0])] == [
        *(p.linear for p in order),
        "linear 0",
    ]
    wait_until(lambda: len(made) == 8)
    assert made == [f"linear {index % 5}" for index in range(8)]


def test_a_piece_larger_than_the_limit_is_still_made_ahead_and_one_out_of_order_is_made_at_once():
    made: list[str] = []
    order = pieces(4, nbytes=1000)
    prefetch = Prefetch(
        lambda piece: made.append(piece.linear) or (lambda x: piece.linear), order, ahead=1
    )
    wait_until(lambda: made == ["linear 0"])
    assert prefetch.take(order[2])(None) == "linear 2"
    wait_until(lambda: made == ["linear 0", "linear 2", "linear 3"])
    assert prefetch.take(order[3])(None) == "linear 3"


def test_pieces_are_made_in_another_thread_than_the_one_that_multiplies():
    threads: list[int] = []
    order = pieces(2)
    prefetch = Prefetch(
        lambda piece: threads.append(threading.get_ident()) or (lambda x: x), order, ahead=1
    )
    prefetch.take(order[0])
    assert threads
    assert threading.get_ident() not in threads
