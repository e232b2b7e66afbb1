"""Rows together on transformers' modules in padded batches, against each text alone."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
)

from quantflow.core.kv import KVScales, kv_scheme
from quantflow.errors import ResourceError, UsageError
from quantflow.runtime import modules, row_modules
from quantflow.runtime.batch_shapes import Buckets, prompt_length
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, FinishReason
from quantflow.runtime.decoding import generate
from quantflow.runtime.row_modules import PROMPT, STEP, RowModules
from quantflow.runtime.transformers_decoder import TransformersDecoder

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **ENDS),
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=48),
}
BUCKETS = Buckets(step_rows=4, prompt_rows=2, pad_to=8)
LIMITS = BatchLimits(max_input_tokens=20, max_total_tokens=32, max_batch_size=6)
LENGTHS = (3, 20, 7, 8, 1, 15, 19, 4, 11)  # of prompts
NEW = (12, 3, 9, 1, 12, 5, 2, 7, 11)  # tokens that follow each


def random_model(config=LLAMA):
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 64, (1, length), generator=generator) for length in LENGTHS]


def alone(model, asked=NEW, **options):
    """The tokens of each text by itself, over transformers' own cache."""
    decoder = TransformersDecoder(model, **options)
    return [
        generate(decoder, prompt, max_new_tokens=new)[0, prompt.shape[1] :].tolist()
        for prompt, new in zip(prompts(), asked, strict=True)
    ]


def together(engine, asked=NEW):
    """The tokens of all texts, that were asked for at once."""
    streams = [
        engine.submit(BatchRequest(input_ids=tuple(prompt[0].tolist()), max_new_tokens=new))
        for prompt, new in zip(prompts(), asked, strict=True)
    ]
    return [[event.id for event in stream if event.id is not None] for stream in streams]


def engine_of(model, *, buckets=BUCKETS, limits=LIMITS, **options):
    return Engine(RowModules(model, device=CPU, **options), limits=limits, buckets=buckets)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_together_say_the_tokens_of_each_alone_in_shapes_that_were_warmed_up(config):
    model = random_model(config)
    with engine_of(model) as engine:
        assert together(engine) == alone(model)
        shapes = engine.shapes()
        assert max(engine.counters().batch_sizes) > 1
    rows = {kind: {shape[1] for shape in shapes.run if shape[0] == kind} for kind in (PROMPT, STEP)}
    assert rows == {PROMPT: {2, 4, 6}, STEP: {4, 8}}
    assert {columns for kind, _, columns in shapes.run if kind == PROMPT} == {7, 15, 19, 20}
    assert shapes.run.keys() == shapes.warmed
    assert shapes.line == ("12 shapes of prompts and 2 of steps were run, 0 of them not warmed up")


def test_without_a_warm_up_the_shapes_come_with_the_requests_and_are_the_same_few():
    model = random_model()
    with engine_of(model, buckets=replace(BUCKETS, warm_up=False)) as engine:
        assert engine.shapes().run == {}
        assert together(engine) == alone(model)
        shapes = engine.shapes()
    assert shapes.warmed == frozenset()
    assert all(rows % 4 == 0 for kind, rows, _ in shapes.run if kind == STEP)
    assert all(rows % 2 == 0 for kind, rows, _ in shapes.run if kind == PROMPT)


def test_without_buckets_there_is_a_shape_for_each_number_of_rows_and_each_length():
    model = random_model()
    with engine_of(model, buckets=Buckets()) as engine:
        assert together(engine) == alone(model)
        shapes = engine.shapes().run
    assert any(rows % 4 for kind, rows, _ in shapes if kind == STEP)
    assert {columns for kind, _, columns in shapes if kind == PROMPT} <= {*LENGTHS}


def test_no_mask_of_a_prompt_outlives_it():
    """Clients send prompts of every length, and a mask has the square of one."""
    rows = RowModules(random_model(), device=CPU)
    rows.begin(slots=1, tokens=40)
    made, of_shape = [], rows._of_shape

    def watched(*shape):
        inputs = of_shape(*shape)
        made.append(weakref.ref(inputs.mask))
        return inputs

    rows._of_shape = watched
    for length in range(3, 9):
        rows.prompts([[1] * length], [0], rows=1, columns=length)
    gc.collect()
    assert len(made) == 6 and all(mask() is None for mask in made)


@pytest.mark.parametrize(("count", "rows"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 24)])
def test_rows_of_a_step_are_the_next_multiple(count, rows):
    rules = Buckets(step_rows=8).rules("cpu", rows=24, longest=16, prefill_tokens=64)
    assert rules.step(count) == rows


@pytest.mark.parametrize(("count", "rows"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_prompts_together_are_the_next_multiple(count, rows):
    rules = Buckets(prompt_rows=4).rules("cpu", rows=24, longest=16, prefill_tokens=128)
    assert rules.prompts(count, 9) == (rows, 9)


@pytest.mark.parametrize(
    ("length", "pad_to", "columns"),
    [
        *((1, 128, 127), (126, 128, 127), (127, 128, 127), (128, 128, 255), (255, 128, 255)),
        *((896, 128, 1023), (1022, 128, 1023), (1023, 128, 1023), (1024, 128, 1024)),
        *((900, 300, 1023), (600, 300, 899), (5, 0, 5), (5, 1, 5)),
    ],
)
def test_prompts_are_padded_to_a_multiple_less_one_and_the_longest_has_its_own_length(
    length, pad_to, columns
):
    assert prompt_length(length, pad_to=pad_to, longest=1024) == columns


def test_a_multiple_that_no_prompt_reaches_is_refused():
    with pytest.raises(UsageError, match="pad_sequence_to_multiple_of=21: prompts have 20 tokens"):
        engine_of(random_model(), buckets=Buckets(pad_to=21))


def test_a_gaudi_has_the_sizes_of_its_own_server_where_nothing_is_asked():
    rules = Buckets().rules("hpu", rows=16, longest=1024, prefill_tokens=4096)
    assert (rules.step_rows, rules.prompt_rows, rules.pad_to) == (8, 4, 128)
    assert rules.together == 4  # 4096 tokens of prompts of 1024
    assert [*rules.steps()] == [8, 16]
    lengths = [127, 255, 383, 511, 639, 767, 895, 1023, 1024]
    assert [*rules.every_prompt()] == [(4, length) for length in lengths]


def test_the_warm_up_has_every_shape_that_requests_can_have_and_no_other():
    asked = Buckets(step_rows=4, prompt_rows=2, pad_to=8)
    rules = asked.rules("cpu", rows=10, longest=21, prefill_tokens=100)
    assert [*rules.steps()] == [4, 8, 12]
    assert {rules.step(count) for count in range(1, 11)} == {*rules.steps()}
    assert [*rules.every_prompt()] == [
        *((2, 7), (2, 15), (2, 20), (2, 21)),
        *((4, 7), (4, 15), (4, 20), (4, 21)),
    ]
    possible = {rules.prompts(count, length) for count in (1, 2, 3, 4) for length in range(1, 22)}
    assert possible == {*rules.every_prompt()}


def test_rows_that_end_make_room_and_the_steps_become_smaller():
    asked = (12, 1, 1, 1, 1, 1, 1, 1, 1)
    model = random_model()
    with engine_of(model, buckets=Buckets(step_rows=2, warm_up=False)) as engine:
        assert together(engine, asked) == alone(model, asked)
        assert engine.shapes().run[STEP, 2, 1] >= 6
        assert engine.counters().pool.used == 0


def test_a_cancelled_row_leaves_the_others_as_they_are():
    model, (first, second) = random_model(), prompts()[:2]
    with engine_of(model) as engine:
        cancelled = engine.submit(
            BatchRequest(input_ids=tuple(first[0].tolist()), max_new_tokens=12)
        )
        stays = engine.submit(BatchRequest(input_ids=tuple(second[0].tolist()), max_new_tokens=12))
        cancelled.cancel()
        found = [event.id for event in stays if event.id is not None]
    whole = generate(TransformersDecoder(model), second, max_new_tokens=12)
    assert found == whole[0, second.shape[1] :].tolist()
    assert [event.finish for event in cancelled][-1] == FinishReason.CANCELLED


def test_log_probabilities_of_a_prompt_are_those_of_the_model():
    model, (prompt, other) = random_model(), prompts()[:2]
    logits = model(input_ids=prompt).logits.log_softmax(-1)
    expected = logits[0, torch.arange(2), prompt[0, 1:]]
    with engine_of(model) as engine:
        engine.submit(BatchRequest(input_ids=tuple(other[0].tolist()), max_new_tokens=9))
        found = engine.prompt_logprobs(tuple(prompt[0].tolist()))
    assert [token.id for token in found] == prompt[0].tolist() and found[0].logprob is None
    given = torch.tensor([token.logprob for token in found[1:]])
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_keys_and_values_are_rounded_by_measured_scales():
    model = random_model()
    scales = [
        KVScales(scheme=scheme, keys=torch.tensor([0.3]), values=torch.tensor([0.2]))
        for scheme in (kv_scheme("INT8", "per_tensor"),) * 2
    ]
    with engine_of(model, kv_scales=scales) as engine:
        found = together(engine)
    assert found == alone(model, kv_scales=scales) and found != alone(model)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_each_shape_is_compiled_once_and_none_after_the_warm_up(warm, monkeypatch):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    model = random_model(LlamaConfig(**SIZES | {"num_hidden_layers": 1}, intermediate_size=48))
    expected = alone(model)
    modules._compile_(SimpleNamespace(device=CPU), model, dynamic=False)
    buckets = Buckets(step_rows=6, prompt_rows=6, pad_to=8, warm_up=warm)
    with engine_of(model, buckets=buckets, compilations=modules.compilations()) as engine:
        at_start = len(graphs)
        assert together(engine) == expected
        shapes = engine.shapes()
    assert len(graphs) == len(shapes.run) == shapes.compilations[0]
    assert shapes.compilations[1] == len(graphs) - at_start
    if warm:
        assert shapes.compilations[1] == 0 and "0 of them after the warm-up" in shapes.line
    torch._dynamo.reset()


def test_listed_steps_are_captured_once_each_and_replayed(monkeypatch):
    model, captured, replays = random_model(), [], Counter()

    def capture(step):
        number = len(captured)
        captured.append(len(step()))

        def replay():
            replays[captured[number]] += 1
            return step()

        return replay

    rules = Buckets(graph_sizes="4,1,2").rules("cuda", rows=6, longest=20, prefill_tokens=60)
    assert [rules.step(count) for count in range(1, 7)] == [1, 2, 4, 4, 5, 6]
    assert [*rules.steps()] == [1, 2, 4] and [*rules.every_prompt()] == []
    monkeypatch.setattr(Buckets, "rules", lambda *_, **__: rules)
    with engine_of(model, buckets=Buckets(graph_sizes="4,1,2"), capture=capture) as engine:
        assert captured == [1, 2, 4]
        assert together(engine) == alone(model)
    assert len({*captured}) == len(captured) and sum(replays.values()) >= 11


def test_sizes_of_graphs_have_a_default_and_0_captures_none():
    sizes = {"rows": 12, "longest": 20, "prefill_tokens": 60}
    assert Buckets().rules("cuda", **sizes).graph_sizes == (1, 2, 4, 8)
    none = Buckets(graph_sizes="0").rules("cuda", **sizes)
    assert none.graph_sizes == () and none.step(5) == 5
    assert Buckets(graph_sizes="1,2").rules("cpu", **sizes).graph_sizes == ()
    for wrong in ("1,", "x", "-1", "0,1", ""):
        with pytest.raises(UsageError, match="cuda_graphs="):
            Buckets(graph_sizes=wrong)


def test_memory_bounds_the_rows_and_too_little_is_refused():
    rows = RowModules(random_model(), device=CPU)
    assert rows.token_bytes() == 2 * 2 * 2 * 8 * 4  # K and V, layers, kv heads, head dim, float32
    slot = 32 * rows.token_bytes()
    limits = replace(LIMITS, max_batch_size=None)
    for slots, most in ((8, 4), (9, 8), (12, 8)):
        with Engine(rows, limits=limits, buckets=BUCKETS, kv_memory=slots * slot) as engine:
            assert engine.limits.max_batch_size == most
    with pytest.raises(ResourceError, match="0 rows of 32 tokens, 64 are asked for"):
        Engine(rows, limits=limits, buckets=BUCKETS, kv_memory=4 * slot)
    with pytest.raises(ResourceError, match="4 rows of 32 tokens, 6 are asked for"):
        Engine(rows, limits=LIMITS, buckets=BUCKETS, kv_memory=7 * slot)


def test_what_cannot_run_together_has_a_reason():
    windows = MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=4)
    bloom = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    for config, said in ((windows, "slides"), (bloom, "ALiBi"), (LLAMA, None)):
        reason = row_modules.why_not(SimpleNamespace(config=config, device=CPU))
        assert reason is None if said is None else said in reason
