"""An engine whose model ranks share, here threads, answers with the bits of one process."""

import json
from dataclasses import replace
from functools import partial

import pytest

from quantflow.backends import kernels, native
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.batching import BatchLimits, Engine
from quantflow.runtime.batching.paged import BlockRunner
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.ranks.leader import Leader, follow
from quantflow.runtime.ranks.tensor_parallel import Ranks
from quantflow.runtime.step_trace import StepTrace, TracedSteps
from tests.unit.runtime.batching.test_invariance import requests, together

pytestmark = pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is not None,
    reason="our kernels do not run here",
)


@pytest.fixture
def led(folders, among):
    """Return what gives what `work` makes of a leader of so many ranks."""
    folder = folders("W4A16")  # made here, once, and not by threads at the same time

    def over_ranks(world, work, traced=None):
        def of_rank(wire):
            ranks = Ranks(open_artifact(folder, verify=False), wire)
            decoder = LeanDecoder(ranks.artifact, ranks=ranks)
            if wire.rank:
                return follow(decoder, wire, trace=traced and StepTrace(traced))
            leader = Leader(decoder, wire)
            found = work(leader)
            leader.end()
            return found

        return among(world, of_rank)[0]

    return over_ranks


def test_requests_together_get_the_bits_of_one_process(folders, tokenizer, led):
    asked = requests(tokenizer, 4, seed=3)
    longest = max(asked, key=lambda request: len(request.input_ids))
    again = replace(longest, prompt_logprobs=False, max_new_tokens=3)
    asked += [again, again]  # of which one takes over what the other has computed
    alone = LeanDecoder(open_artifact(folders("W4A16"), verify=False))
    run = partial(together, tokenizer=tokenizer, asked=asked, seed=1, max_batch_size=2)
    expected, _ = run(alone)
    found, counted = led(2, run)
    assert found == expected
    assert counted.pool.hit_tokens > 0 and max(counted.batch_sizes) > 1


def test_a_rank_that_follows_traces_the_steps_that_it_computes(tokenizer, led, tmp_path):
    asked = [replace(one, max_new_tokens=4, stop=()) for one in requests(tokenizer, 2, seed=3)]
    run = partial(together, tokenizer=tokenizer, asked=asked, seed=1, max_batch_size=2)
    path = tmp_path / "rank1.json"
    expected, _ = led(2, run)
    found, counted = led(2, run, TracedSteps(path=path, skip=1, count=2))
    assert found == expected and counted.steps > 3
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "step" for event in events) == 2


def test_the_cache_of_all_ranks_fits_into_its_memory(folders, led):
    limits = BatchLimits(max_batch_size=1, max_total_tokens=64)
    alone = LeanDecoder(open_artifact(folders("W4A16"), verify=False))
    held = BlockRunner(alone, limits=limits, kv_memory=1 << 20).counters().blocks

    def blocks(leader):
        runner = BlockRunner(leader, limits=limits, kv_memory=1 << 20)
        assert leader.own.cache.nbytes * 2 <= 1 << 20
        return runner.counters().blocks

    assert led(2, blocks) == held  # each rank has half of every block


def test_the_engine_takes_no_adapters_of_ranks(folders, led):
    def names(leader):
        with Engine(leader, limits=BatchLimits(max_total_tokens=64)):
            return leader.adapters, leader.processes

    assert led(2, names) == ((), 2)
