"""Gated delta nets: the rule, their states, and what may be done with them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
)

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import ResourceError, UnsupportedError, UsageError
from quantflow.models import architecture
from quantflow.models.architecture import Delta, Heads
from quantflow.models.family import FAMILIES
from quantflow.runtime import delta_net
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.decoding import Draft, generate
from quantflow.runtime.generate_job import Beams, Contrastive, Lookup
from quantflow.runtime.kv_cache import DeltaStates, KVCache
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load
from quantflow.runtime.operations import DecoderBlock, Operations
from quantflow.runtime.ranks.tensor_parallel import spans_of
from tests.shared import slow

W4A16, FP8 = with_group_size(PRESETS["W4A16"], 32), PRESETS["FP8_DYNAMIC"]
RELEASED = Path(__file__).resolve().parents[3] / "benchmarks/released"
NAMES = FAMILIES["qwen3_5_text"].delta
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 96,
    "eos_token_id": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 256,
}
DENSE = CONFIG_MAPPING["qwen3_5_text"](**SIZES, architectures=["Qwen3_5ForCausalLM"])
MIXTURE = CONFIG_MAPPING["qwen3_next"](
    **SIZES,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
    num_experts=6,
    num_experts_per_tok=2,
    architectures=["Qwen3NextForCausalLM"],
)


def ids(rows: int, count: int) -> torch.Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(rows))


def net_of(sizes: Delta, seed: int) -> delta_net.DeltaNet:
    """A gated delta net with random weights, but for the products around it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return delta_net.DeltaNet(
        sizes=sizes,
        scores=lambda x: x,
        convolution=draw(sizes.kernel, sizes.channels),
        rate=draw(sizes.value_heads).exp(),
        shift=draw(sizes.value_heads),
        norm=draw(sizes.value_dim),
    )


def walked(net: delta_net.DeltaNet, x, scores, counts: list[int], padding: list[int]):
    """What decode.c makes of columns that come in pieces, [B, T, value_heads * value_dim]."""
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0, eps=1e-6)
    operations = Operations(heads, [DecoderBlock(products=(), delta_net=net, rope=None)])
    rows, found = len(padding), []
    states = DeltaStates(net.sizes, layers=1, sequences=rows)
    for tensor in (*states.inputs, *states.states):
        tensor.fill_(torch.nan)  # nothing may be read that was not written
    cache = KVCache(
        kind="float32",
        layers=0,
        rows=rows,
        kv_heads=1,
        capacity=x.shape[1],
        head_dim=16,
        states=states,
    )
    cache.padding.copy_(torch.tensor(padding))
    operations.begin(cache, [])
    for count in counts:
        operations.step(count)
        part = slice(cache.length, cache.length + count)
        pieces = (each[:, part].reshape(rows * count, -1).clone() for each in (x, scores))
        found.append(operations.delta_rule(*pieces, 0).view(rows, count, -1).clone())
        cache.length += count
    return torch.cat(found, dim=1)


def rule(net: delta_net.DeltaNet, x, scores):
    """The rule on the columns of one sequence by its formula, in float64."""
    sizes, x, scores = net.sizes, x.double(), scores.double()
    mixed, gates = x[:, : sizes.channels], x[:, sizes.channels :]
    before = functional.pad(mixed, (0, 0, sizes.kernel - 1, 0))
    mixed = functional.silu(
        sum(net.convolution[j] * before[j : j + len(x)] for j in range(sizes.kernel))
    )
    width = sizes.key_heads * sizes.key_dim
    q, k, v = mixed.split([width, width, sizes.value_heads * sizes.value_dim], dim=1)
    q, k = (each.view(len(x), sizes.key_heads, -1) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    repeats = sizes.value_heads // sizes.key_heads
    q, k = (each.repeat_interleave(repeats, dim=1) for each in (q / sizes.key_dim**0.5, k))
    v, gates = (each.view(len(x), sizes.value_heads, -1) for each in (v, gates))
    counts, stays = scores.sigmoid().chunk(2, dim=1)[0], scores.chunk(2, dim=1)[1]
    stays = torch.exp(-net.rate * functional.softplus(stays + net.shift))
    state, out = torch.zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim).double(), []
    for t in range(len(x)):
        state = stays[t, :, None, None] * state
        known = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], counts[t, :, None] * (v[t] - known))
        put = torch.einsum("hkv,hk->hv", state, q[t])
        put = net.norm * put / (put.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        out.append((put * functional.silu(gates[t])).flatten())
    return torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 2, 3, 9, 40]), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 6)]),
    dims=st.sampled_from([(16, 16), (48, 16), (16, 80), (32, 128)]),
    kernel=st.sampled_from([1, 2, 4, 8]),
    padding=st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=3),
    seed=st.integers(0, 3),
)
def test_every_token_has_the_rule_of_its_sequence_whatever_the_steps(
    counts, heads, dims, kernel, padding, seed
):
    sizes = Delta(
        names=NAMES,
        key_heads=heads[0],
        value_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        kernel=kernel,
    )
    net, generator = net_of(sizes, seed), torch.Generator().manual_seed(seed)
    shape, columns = (len(padding), sum(counts)), sum(counts)
    width = sizes.channels + sizes.value_heads * sizes.value_dim
    x = torch.randn(*shape, width, generator=generator)
    scores = torch.randn(*shape, 2 * sizes.value_heads, generator=generator)
    found = walked(net, x, scores, counts, padding)
    assert torch.equal(found, walked(net, x, scores, [columns], padding))
    for row, skip in enumerate(padding):
        skip = min(skip, columns)
        assert not found[row, :skip].any()
        if skip < columns:
            expected = rule(net, x[row, skip:], scores[row, skip:])
            assert (found[row, skip:].double() - expected).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("scheme", "config"),
    [(W4A16, DENSE), slow((W4A16, MIXTURE)), slow((FP8, DENSE)), (FP8, MIXTURE)],
    ids=["W4A16-dense", "W4A16-mixture", "FP8_DYNAMIC-dense", "FP8_DYNAMIC-mixture"],
)
def test_one_artifact_says_the_same_in_both_decoders(config, scheme, tmp_path, make_artifact):
    make_artifact(tmp_path, config, scheme)
    prompts, padding = ids(3, 20), torch.tensor([0, 7, 3])
    lean = load(tmp_path, decoder="lean", backend="reference").decoder
    theirs = load(tmp_path, decoder="transformers", backend="reference").decoder
    for decoder in (lean, theirs):
        decoder.begin(rows=3, capacity=20)
    found, expected = (each.forward(prompts, padding=padding) for each in (lean, theirs))
    if scheme is FP8:
        # it rounds inputs: another order of sums can move one over a boundary
        assert (found - expected).norm() < 0.05 * expected.norm()
    else:
        assert torch.allclose(found, expected, atol=2e-5, rtol=2e-5)
        for options in ({}, {"method": Beams(count=2)}):
            ours, other = (
                generate(each, prompts, padding=padding, max_new_tokens=8, **options)
                for each in (lean, theirs)
            )
            assert torch.equal(ours, other)


def test_beams_and_contrastive_search_copy_the_states_of_the_rows_they_keep(
    tmp_path, make_artifact
):
    make_artifact(tmp_path, DENSE, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    texts = ids(2, 9)
    decoder.begin(rows=2, capacity=12)
    decoder.forward(texts)
    decoder.keep(torch.tensor([1, 0, 1]))  # more rows than there was storage for
    step = torch.tensor([[5], [6], [7]])
    found = decoder.forward(step)
    for row, text in enumerate((1, 0, 1)):
        decoder.begin(rows=1, capacity=12)
        alone = decoder.forward(torch.cat([texts[text : text + 1], step[row : row + 1]], dim=1))
        assert torch.allclose(found[row], alone[0], atol=2e-5, rtol=2e-5)
    searched = generate(decoder, texts, max_new_tokens=3, method=Contrastive(top_k=3, alpha=0.5))
    assert searched.shape == (2, 12)


def test_a_state_is_cropped_to_nothing_alone_and_guessed_tokens_are_refused(
    tmp_path, make_artifact
):
    make_artifact(tmp_path, DENSE, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    text = ids(1, 9)
    decoder.begin(rows=1, capacity=12)
    first = decoder.forward(text)
    decoder.crop(9)
    with pytest.raises(
        UsageError, match=r"crop to 5 positions of 9: a gated delta net has the state of all"
    ):
        decoder.crop(5)
    decoder.crop(0)
    assert torch.equal(decoder.forward(text), first)
    for model, method in (
        (decoder, Lookup()),
        (
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=96,
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                )
            ),
            Draft(decoder=decoder),
        ),
    ):
        with pytest.raises(UnsupportedError, match="speculation: a gated delta net cannot take"):
            generate(model, text, max_new_tokens=3, method=method)


def test_a_row_of_an_engine_has_the_same_bits_alone_and_beside_others(tmp_path, make_artifact):
    make_artifact(tmp_path, MIXTURE, with_group_size(PRESETS["W4A8"], 16))
    decoder = LeanDecoder(open_artifact(tmp_path))
    if decoder.why_not_invariant is not None:
        pytest.skip(decoder.why_not_invariant)
    begin = ids(1, 64)[0].tolist()
    asked = [
        BatchRequest(
            # prompts that begin alike, in more than a block
            input_ids=(*begin, *range(3, 3 + length)),
            max_new_tokens=12,
            lookup=Lookup(tokens=3),
        )
        for length in (1, 5, 30, 2, 17)
    ]

    def answers(limits: BatchLimits, requests: list[BatchRequest]):
        with Engine(decoder, limits=limits) as engine:
            streams = [engine.submit(request) for request in requests]
            return [list(stream) for stream in streams], engine.counters()

    alone = []
    for request in asked:
        found, _ = answers(BatchLimits(max_batch_size=1, max_total_tokens=120), [request])
        alone += found
    limits = BatchLimits(max_batch_size=3, max_total_tokens=120, prefill_chunk=7)
    # twice: what a row leaves in its slot is not seen by the next
    together, counters = answers(limits, asked * 2)
    assert together == alone * 2
    assert counters.pool.hit_tokens == counters.pool.cached == counters.pool.used == 0


def test_the_memory_of_a_server_holds_the_states_of_its_rows(tmp_path, make_artifact):
    make_artifact(tmp_path, DENSE, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    # 3 layers: 3 inputs of 256 channels, and 4 states of 32 x 32, in float32
    states = 2 * 3 * (3 * 256 + 4 * 32 * 32) * 4
    limits = BatchLimits(max_batch_size=2, max_total_tokens=64)
    # one layer: keys and values of 2 heads of 32; 4 blocks of 32 columns and one more of each row
    columns = 6 * 32 * 2 * 2 * 32 * 4
    with Engine(decoder, limits=limits, kv_memory=states + columns) as engine:
        assert engine.counters().pool.blocks == 6
    with pytest.raises(ResourceError, match="kv memory"):
        Engine(decoder, limits=limits, kv_memory=states + 2 * 32 * 2 * 2 * 32 * 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"linear_key_head_dim": 24}, "heads of a gated delta net's keys have 24"),
        ({"linear_value_head_dim": 1040}, "heads of a gated delta net's values have 1040"),
        ({"linear_conv_kernel_dim": 9}, "convolutions of 8 tokens at most, this model's has 9"),
        ({"linear_num_value_heads": 3}, "linear_num_key_heads of config.json is 2, which does not"),
        ({"hidden_act": "gelu"}, "with silu, not with 'gelu'"),
        ({"layer_types": ["linear_attention"] * 4}, "has no layer with attention"),
        ({"layer_types": ["mamba"] * 4}, "layer_types of config.json has 'mamba'"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_what_a_gated_delta_net_is_not_is_said(change, why):
    found = architecture.read(DENSE.to_dict() | change)
    reason = found if isinstance(found, str) else delta_net.why_not(found)
    assert reason is not None and why in reason


def test_adapters_by_request_and_several_processes_are_refused(tmp_path, make_artifact):
    make_artifact(tmp_path, DENSE, W4A16)
    artifact = open_artifact(tmp_path)
    with pytest.raises(UnsupportedError, match="not the gated delta nets of qwen3_5_text"):
        spans_of(artifact, 2)
    with pytest.raises(UnsupportedError, match="the layers of a gated delta net have none"):
        LeanDecoder(artifact).adapt(artifact, {"a": tmp_path})


def test_a_model_that_reads_images_too_runs_its_text(tmp_path):
    # as Qwen3.5 is released: names of model.language_model, positions of text in all three axes
    grid = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = CONFIG_MAPPING["qwen3_5"](
        text_config={**SIZES, "rope_parameters": {**grid, "mrope_section": [2, 1, 1]}},
        vision_config={**vision, "out_hidden_size": 64, "num_position_embeddings": 16},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    logits = []
    for name in ("auto", "transformers"):
        loaded = load(tmp_path, decoder=name)
        loaded.decoder.begin(rows=2, capacity=12)
        logits.append(loaded.decoder.forward(ids(2, 12), last_only=False))
        assert loaded.name == ("lean" if name == "auto" else name), loaded.reasons
    assert torch.allclose(*logits, atol=2e-5, rtol=2e-5)


def test_transformers_modules_run_where_guesses_may_be_wrong(tmp_path, make_artifact):
    make_artifact(tmp_path, DENSE, W4A16)
    text, tokens = ids(1, 9), []
    for crops, method in ((False, None), (True, Lookup(tokens=2))):
        loaded = load(tmp_path, decoder="auto", backend="reference", crops=crops)
        assert loaded.name == ("transformers" if crops else "lean")
        assert crops == any("wrong guess" in reason for reason in loaded.reasons)
        tokens.append(generate(loaded.decoder, text, max_new_tokens=8, method=method))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_released_configurations_are_run(name):
    config = json.loads((RELEASED / f"{name}.json").read_text())["config"]
    found = architecture.read(config)
    assert not isinstance(found, str), found
    assert delta_net.why_not(found) is None
    assert sum(found.linear) * 4 == found.layers * 3 and found.ropes[0].dim == 64
