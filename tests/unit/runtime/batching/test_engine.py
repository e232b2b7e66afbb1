"""The engine on the example model: what a request gets, in which order, and how it ends."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantflow.errors import EngineError, OverloadedError, UsageError
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, FinishReason
from quantflow.runtime.decoding import generate
from quantflow.runtime.generate_job import Rules, Sampling
from quantflow.runtime.transformers_decoder import TransformersDecoder

ROOT = Path(__file__).resolve().parents[4]
PROMPT = "class Stack:\n    def"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        ROOT / "examples/tiny-llama", dtype=torch.float32
    ).eval()


@pytest.fixture
def engine(model, tokenizer):
    with Engine(TransformersDecoder(model), tokenizer=tokenizer) as engine:
        yield engine


def request(tokenizer, text=PROMPT, **options) -> BatchRequest:
    return BatchRequest(
        input_ids=tuple(tokenizer(text)["input_ids"]), **{"max_new_tokens": 8} | options
    )


def test_tokens_are_those_of_generate(engine, model, tokenizer):
    asked = request(tokenizer, max_new_tokens=12)
    events = list(engine.submit(asked))
    expected = generate(model, torch.tensor([asked.input_ids]), max_new_tokens=12)
    assert [event.id for event in events] == expected[0, len(asked.input_ids) :].tolist()
    assert [event.index for event in events] == list(range(12))
    assert [event.finish for event in events] == [None] * 11 + [FinishReason.LENGTH]


def test_sampled_tokens_are_those_of_generate_with_the_same_seed(engine, model, tokenizer):
    sampling, rules = (
        Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=7),
        Rules(repetition_penalty=1.2),
    )
    asked = request(tokenizer, sampling=sampling, rules=rules)
    expected = generate(
        model, torch.tensor([asked.input_ids]), max_new_tokens=8, sampling=sampling, rules=rules
    )
    assert [event.id for event in engine.submit(asked)] == expected[
        0, len(asked.input_ids) :
    ].tolist()


def test_logprobs_are_those_of_the_whole_text(engine, model, tokenizer):
    asked = request(tokenizer, top_n=3, prompt_logprobs=True)
    stream = engine.submit(asked)
    events = list(stream)
    text = torch.tensor([[*asked.input_ids, *(event.id for event in events)]])
    with torch.no_grad():
        log_p = model(text).logits[0].double().log_softmax(dim=-1)
    expected = log_p[:-1].gather(1, text[0, 1:, None])[:, 0].tolist()
    told = [token.logprob for token in stream.prompt[1:]] + [event.logprob for event in events]
    assert told == pytest.approx(expected, abs=1e-4)
    assert stream.prompt[0].logprob is None
    assert [token.id for token in stream.prompt] == list(asked.input_ids)
    best = log_p[len(asked.input_ids) - 1].topk(3)
    assert [token.id for token in events[0].top] == best.indices.tolist()
    assert [token.logprob for token in events[0].top] == pytest.approx(
        best.values.tolist(), abs=1e-4
    )


def test_prompt_logprobs_of_a_text_alone(engine, tokenizer):
    asked = request(tokenizer, prompt_logprobs=True)
    stream = engine.submit(asked)
    list(stream)
    assert engine.prompt_logprobs(asked.input_ids) == stream.prompt


def test_a_stop_string_ends_the_text_and_is_named(engine, tokenizer):
    whole = list(engine.submit(request(tokenizer, max_new_tokens=20)))
    text = tokenizer.decode([event.id for event in whole])
    word = text[6:10]
    events = list(engine.submit(request(tokenizer, max_new_tokens=20, stop=("never said", word))))
    assert (events[-1].finish, events[-1].stop) == (FinishReason.STOP, word)
    assert word in tokenizer.decode([event.id for event in events])
    assert word not in tokenizer.decode([event.id for event in events[:-1]])


def test_an_end_token_ends_the_text(engine, tokenizer):
    third = list(engine.submit(request(tokenizer)))[2].id
    events = list(engine.submit(request(tokenizer, ends=(third,))))
    assert events[-1].finish == FinishReason.EOS
    assert events[-1].id == third


def test_bias_and_mask_choose_among_tokens(engine, tokenizer):
    only = [17, 40]

    class Two:
        taken: list[int] = []

        def allowed(self, tokens):
            assert list(tokens) == self.taken
            bits = torch.zeros(-(-len(tokenizer) // 32), dtype=torch.int32)
            for token in only:
                bits[token // 32] |= 1 << token % 32
            return bits

        def advance(self, token):
            self.taken.append(token)

    mask = Two()
    events = list(engine.submit(request(tokenizer, mask=mask, logit_bias={only[0]: -1e6})))
    assert [event.id for event in events] == [only[1]] * 8 == mask.taken


def test_an_exception_of_a_row_is_the_rows_alone(engine, tokenizer):
    class Broken:
        def allowed(self, tokens):
            raise ZeroDivisionError("a grammar's own")

        def advance(self, token):
            raise AssertionError

    bad, good = engine.submit(request(tokenizer, mask=Broken())), engine.submit(request(tokenizer))
    (event,) = bad
    assert event.finish == FinishReason.ERROR
    assert isinstance(event.error, ZeroDivisionError)
    assert list(good)[-1].finish == FinishReason.LENGTH
    assert engine.failed is None


def test_a_cancelled_request_ends_and_frees_its_place(engine, tokenizer):
    stream, other = (
        engine.submit(request(tokenizer, max_new_tokens=100)),
        engine.submit(request(tokenizer)),
    )
    events = iter(stream)
    next(events)
    stream.cancel()
    assert list(events)[-1].finish == FinishReason.CANCELLED
    assert list(other)[-1].finish == FinishReason.LENGTH
    counters = engine.counters()
    assert (counters.cancelled, counters.finished, counters.running, counters.pool.used) == (
        1,
        1,
        0,
        0,
    )


def test_events_reach_an_event_loop(engine, tokenizer):
    async def read(stream):
        return [event.id async for event in stream]

    async def both():
        streams = [engine.submit(request(tokenizer)) for _ in range(2)]
        return await asyncio.gather(*map(read, streams))

    first, second = asyncio.run(both())
    assert first == second == [event.id for event in engine.submit(request(tokenizer))]


def test_one_too_many_is_refused_at_once(model, tokenizer):
    with Engine(
        TransformersDecoder(model), limits=BatchLimits(max_concurrent_requests=1)
    ) as engine:
        stream = engine.submit(request(tokenizer, max_new_tokens=200))
        with pytest.raises(OverloadedError, match="1 requests wait or run, 1 may"):
            engine.submit(request(tokenizer))
        stream.cancel()
        list(stream)
        assert len(list(engine.submit(request(tokenizer)))) == 8


def test_a_forward_that_fails_ends_everything_with_it(model, tokenizer):
    decoder, both_came = TransformersDecoder(model), threading.Event()

    def forward(*_, **__):
        both_came.wait()
        raise ZeroDivisionError("the model's own")

    decoder.forward = forward
    engine = Engine(decoder)
    streams = [engine.submit(request(tokenizer)) for _ in range(2)]
    both_came.set()
    for stream in streams:
        (event,) = stream
        assert event.finish == FinishReason.ERROR
        assert isinstance(event.error, EngineError)
    assert isinstance(engine.failed, ZeroDivisionError)
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(request(tokenizer))
    engine.close()


def test_a_drained_engine_ends_what_runs_and_takes_no_more(engine, tokenizer):
    stream = engine.submit(request(tokenizer))
    assert engine.drain(60) == 0
    assert list(stream)[-1].finish == FinishReason.LENGTH
    with pytest.raises(OverloadedError, match="drains"):
        engine.submit(request(tokenizer))


def test_what_does_not_end_in_time_is_cancelled(engine, tokenizer):
    streams = [engine.submit(request(tokenizer, max_new_tokens=200)) for _ in range(3)]
    assert engine.drain(0) == 3
    assert {list(stream)[-1].finish for stream in streams} == {FinishReason.CANCELLED}


def test_a_closed_engine_has_no_thread(model, tokenizer):
    before = set(threading.enumerate())  # some may end meanwhile
    engine = Engine(TransformersDecoder(model))
    stream = engine.submit(request(tokenizer, max_new_tokens=200))
    assert set(threading.enumerate()) - before
    engine.close()
    assert list(stream)[-1].finish == FinishReason.CANCELLED
    assert not set(threading.enumerate()) - before
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request(tokenizer))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 10**6}, "max_new_tokens=1000000"),
        ({"text": "x " * 3000}, "prompt of"),
        ({"stop": ("a", "b", "c", "d", "e")}, "stop: 5 strings, 4 may be"),
        ({"adapter": "pirate"}, "adapter 'pirate'"),
        ({"logit_bias": {10**6: 1.0}}, "token 1000000"),
    ],
)
def test_what_the_limits_do_not_allow_is_refused(engine, tokenizer, options, told):
    with pytest.raises(UsageError, match=told):
        engine.submit(request(tokenizer, **options))


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 0}, {"top_n": -1}, {"stop": ("",)}, {"logit_bias": {3: float("nan")}}],
)
def test_what_no_engine_can_run_is_refused(tokenizer, options):
    with pytest.raises(UsageError):
        request(tokenizer, **options)
