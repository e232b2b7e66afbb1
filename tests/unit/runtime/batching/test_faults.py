"""Requests that go away, fail or do not fit: the others are unchanged, and no block is lost."""

import random
import threading
import time

import pytest
import torch

from quantflow.backends import kernels, native
from quantflow.errors import EngineError, ResourceError
from quantflow.process_memory import usage
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, FinishReason
from quantflow.runtime.generate_job import Sampling
from quantflow.runtime.load import load

pytestmark = pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is not None,
    reason="our kernels do not run here",
)
SMALL = BatchLimits(
    max_batch_size=8,
    max_total_tokens=128,
    max_batch_total_tokens=512,
    max_concurrent_requests=64,
    prefill_chunk=32,
)


@pytest.fixture
def decoder(folders):
    return load(folders("W8A8"), decoder="lean", dtype=torch.bfloat16).decoder


class Exploding:
    """A grammar that allows everything, and fails after some tokens."""

    def __init__(self, after: int) -> None:
        self.after = after

    def allowed(self, tokens):
        return None

    def advance(self, token):
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("the grammar explodes")


def request(draw: random.Random, **options) -> BatchRequest:
    ids = tuple(draw.randrange(4, 4000) for _ in range(draw.choice([1, 20, 33, 90])))
    sampling = Sampling(seed=draw.randrange(99)) if draw.random() < 0.5 else None
    return BatchRequest(
        input_ids=ids, max_new_tokens=draw.randrange(1, 38), sampling=sampling, **options
    )


def torment(engine: Engine, count: int, *, seed: int) -> None:
    """Submit requests; other threads cancel many of them at any moment, and some fail."""
    draw, places = random.Random(seed), threading.Semaphore(60)

    def one(asked: BatchRequest, patience: int | None, wait: float) -> None:
        stream = engine.submit(asked)
        if patience is not None:
            time.sleep(wait)
        for index, event in enumerate(stream):
            if index == patience:
                stream.cancel()
            if event.finish is not None:
                ended.append(event.finish)
                last = event
        if asked.mask is not None and last.finish == FinishReason.ERROR:
            assert isinstance(last.error, RuntimeError)
        places.release()

    ended: list[FinishReason] = []
    threads = []
    for _ in range(count):
        mask = Exploding(draw.randrange(5)) if draw.random() < 0.1 else None
        patience = draw.randrange(12) if draw.random() < 0.7 else None
        places.acquire()
        threads.append(
            threading.Thread(
                target=one, args=(request(draw, mask=mask), patience, draw.random() * 0.01)
            )
        )
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == count
    assert {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.ERROR} <= set(ended)


def test_whoever_leaves_or_fails_leaves_no_block_behind(decoder):
    with Engine(decoder, limits=SMALL) as engine:
        torment(engine, 80, seed=0)
        counters = engine.counters()
        assert engine.failed is None
        assert (counters.running, counters.waiting, counters.pool.used) == (0, 0, 0)
        assert counters.finished + counters.cancelled + counters.failed == counters.submitted == 80


@pytest.mark.slow
def test_a_thousand_who_leave_or_fail_leave_no_block_and_no_memory_behind(decoder):
    with Engine(decoder, limits=SMALL) as engine:
        torment(engine, 200, seed=1)
        before = usage().resident
        for seed in range(2, 7):
            torment(engine, 200, seed=seed)
        assert engine.counters().pool.used == 0
        assert usage().resident - before < 16 << 20  # bytes, of 1,000 requests


def test_a_cancelled_row_is_free_before_the_next_step(decoder):
    steps = []
    forward = decoder.forward_rows

    def counting(*arguments, **options):
        steps.append(engine.counters().running)
        return forward(*arguments, **options)

    decoder.forward_rows = counting
    with Engine(decoder, limits=SMALL) as engine:
        stream = engine.submit(BatchRequest(input_ids=(5, 6, 7), max_new_tokens=100))
        other = engine.submit(BatchRequest(input_ids=(5, 6), max_new_tokens=100))
        events = iter(stream)
        next(events)
        stream.cancel()
        at = len(steps)
        assert list(events)[-1].finish == FinishReason.CANCELLED
        list(other)
        # the step that was running may still have had it
        assert all(running == 1 for running in steps[at + 1 :])


def test_an_engine_that_is_killed_tells_everybody_and_takes_no_more(decoder):
    engine = Engine(decoder, limits=SMALL)
    calls, forward = [], decoder.forward_rows
    # none may be refused because the engine failed before all were in
    submitted = threading.Event()

    def killed(*arguments, **options):
        calls.append(None)
        if len(calls) == 5:
            assert submitted.wait(timeout=60)
            raise MemoryError("inputs of 3 tokens")
        return forward(*arguments, **options)

    decoder.forward_rows = killed
    streams = [
        engine.submit(BatchRequest(input_ids=(5, 6, 7), max_new_tokens=100)) for _ in range(20)
    ]
    submitted.set()
    assert {list(stream)[-1].finish for stream in streams} == {FinishReason.ERROR}
    assert isinstance(engine.failed, MemoryError)
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(BatchRequest(input_ids=(5,), max_new_tokens=1))
    engine.close()


def test_more_than_the_pool_holds_waits_and_is_served(decoder):
    with Engine(decoder, limits=SMALL) as engine:
        streams = [
            engine.submit(BatchRequest(input_ids=(i + 4,) * 100, max_new_tokens=28))
            for i in range(30)
        ]
        most = 0
        for stream in streams:
            assert len(list(stream)) == 28
            most = max(most, engine.counters().reserved_tokens)
        assert most <= 512


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(decoder):
    with pytest.raises(
        ResourceError, match="kv memory of 1000 bytes: 0 tokens for 8 rows, 512 are asked for"
    ):
        Engine(decoder, limits=SMALL, kv_memory=1000)


def test_the_pool_takes_no_more_than_it_may(decoder):
    limits = BatchLimits(max_batch_size=2)
    with Engine(decoder, limits=limits, kv_memory=4 << 20) as engine:
        assert decoder.cache.nbytes <= 4 << 20
        assert engine.limits.max_batch_total_tokens == (engine.counters().pool.blocks - 2) * 32
