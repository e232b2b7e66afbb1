"""The scheduler against a short model of TGI's rules (its router's queue), for any traffic."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.runtime.batching.limits import BatchLimits
from quantflow.runtime.batching.scheduler import MOST_PASSES, Scheduler


@dataclass(eq=False)
class Job:
    """A row that needs its prompt, then `new` steps of a token."""

    number: int
    input_tokens: int
    new: int
    priority: int
    submitted: float = 0.0
    computed: int = 0
    made: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.new

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.input_tokens

    @property
    def left(self) -> int:
        return self.input_tokens + self.made - self.computed


class Model:
    """The rows that join, by a model without structure: a waiting list and a running list."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits, self.waiting, self.running, self.since = limits, [], [], 0
        self.passes = Counter()

    def head(self) -> Job:
        classes = sorted({job.priority for job in self.waiting})
        starving = [priority for priority in classes if self.passes[priority] >= MOST_PASSES]
        chosen = starving[0] if starving else classes[-1]
        return next(job for job in self.waiting if job.priority == chosen)

    def admit(self) -> list[int]:
        limits, joined = self.limits, []
        enough = len(self.waiting) >= limits.waiting_served_ratio * len(self.running)
        if self.running and not enough and self.since < limits.max_waiting_tokens:
            return []
        while self.waiting and len(self.running) < limits.max_batch_size:
            job = self.head()
            prefill = (
                sum(other.input_tokens for other in self.running if other.in_prefill)
                + job.input_tokens
            )
            total = sum(other.total_tokens for other in self.running) + job.total_tokens
            if prefill > limits.max_batch_prefill_tokens or total > limits.max_batch_total_tokens:
                break
            self.waiting.remove(job)
            self.running.append(job)
            self.passes[job.priority] = 0
            for lower in {
                other.priority for other in self.waiting if other.priority < job.priority
            }:
                self.passes[lower] += 1
            joined.append(job.number)
        self.since = 0 if joined else self.since
        return joined


jobs = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 12),
        st.sampled_from([0, 0, 0, 1, 5]),
        st.integers(0, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)  # prompt, new tokens, class, steps after the one before, whether it is cancelled
bounds = st.builds(
    BatchLimits,
    max_total_tokens=st.just(52),
    max_input_tokens=st.just(40),
    max_batch_prefill_tokens=st.integers(40, 90),
    max_batch_total_tokens=st.integers(90, 300),
    max_batch_size=st.integers(1, 8),
    waiting_served_ratio=st.sampled_from([0.0, 0.3, 1.2]),
    max_waiting_tokens=st.integers(0, 5),
    prefill_chunk=st.integers(1, 50),
)


@settings(max_examples=200)
@given(traffic=jobs, limits=bounds)
def test_rows_join_as_the_rules_say_within_the_budgets_in_order_and_all_of_them(traffic, limits):
    scheduler, model = Scheduler(limits), Model(limits)
    arrivals, at = [], 0
    for number, (prompt, new, priority, gap, cancelled) in enumerate(traffic):
        at += gap
        arrivals.append((at, Job(number, prompt, new, priority), cancelled))
    joined, ended, step = [], set(), 0
    while len(ended) < len(traffic):
        for when, job, cancelled in arrivals:
            if when == step:
                scheduler.add(job)
                model.waiting.append(job)
            if cancelled and when + 3 == step and job.number not in ended:
                scheduler.remove(job)
                gone = model.waiting if job in model.waiting else model.running
                if (
                    gone is model.waiting
                    and model.waiting
                    and job is next(j for j in gone if j.priority == job.priority)
                ):
                    model.passes[job.priority] = 0
                gone.remove(job)
                ended.add(job.number)
        now = [job.number for job in scheduler.admit()]
        assert now == model.admit()
        assert [job.number for job in scheduler.running] == [job.number for job in model.running]
        joined += now
        assert len(scheduler.running) <= limits.max_batch_size
        assert scheduler.prefill_tokens <= limits.max_batch_prefill_tokens
        assert scheduler.reserved_tokens <= limits.max_batch_total_tokens
        work = scheduler.plan()
        model.since += 1
        assert sum(count for job, count in work if job.in_prefill) <= limits.prefill_chunk
        assert all(count == 1 for job, count in work if not job.in_prefill)
        assert {job.number for job, _ in work} >= {
            job.number for job in scheduler.running if not job.in_prefill
        }
        assert bool(work) == bool(scheduler.running)  # whatever runs gets on
        for job, count in work:
            job.computed += count
            if not job.in_prefill:
                job.made += 1
            if job.made == job.new:
                scheduler.remove(job)
                model.running.remove(job)
                ended.add(job.number)
        step += 1
        assert step < 3000, "somebody starves"
    for priority in {job.priority for _, job, _ in arrivals}:
        own = [number for number in joined if traffic[number][2] == priority]
        assert own == sorted(own)


def test_a_row_waits_until_there_is_room_for_its_tokens():
    limits = BatchLimits(max_batch_total_tokens=90, max_batch_prefill_tokens=90)
    scheduler = Scheduler(limits.resolved(positions=100, pool_tokens=1000))
    first, second = (Job(number, 10, 40, 0) for number in range(2))
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.admit() == [first]
    scheduler.remove(first)
    assert scheduler.admit() == [second]


def test_a_lower_class_is_passed_so_often_and_no_more():
    scheduler = Scheduler(BatchLimits(max_batch_size=1).resolved(positions=100, pool_tokens=1000))
    low = Job(-1, 4, 1, 0)
    scheduler.add(low)
    for number in range(100):
        scheduler.add(Job(number, 4, 1, 1))
    order = []
    while low not in order:
        (job,) = scheduler.admit()
        order.append(job)
        scheduler.remove(job)
    assert len(order) == MOST_PASSES + 1


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # nobody has waited for 120 ms: the shortest first, of equal ones the first that came
        (0.1, ["c", "d", "b", "e", "a"]),
        (0.125, ["e", "a", "c", "d", "b"]),  # two have, the shorter of them first
        (0.175, ["c", "b", "e", "a", "d"]),
        (1.0, ["c", "d", "b", "e", "a"]),  # all have
    ],
)
def test_short_prompts_join_first_but_for_those_that_have_waited(now, expected):
    limits = BatchLimits(max_batch_size=1, queue_threshold_ms=120).resolved(
        positions=100, pool_tokens=1000
    )
    scheduler = Scheduler(limits, clock=lambda: now)
    arrivals = {"a": (9, 0.0), "e": (7, 0.0), "b": (5, 0.05), "c": (3, 0.05), "d": (3, 0.06)}
    for name, (tokens, when) in arrivals.items():
        scheduler.add(Job(name, tokens, 1, 0, submitted=when))
    order = []
    for _ in arrivals:
        (job,) = scheduler.admit()
        order.append(job.number)
        scheduler.remove(job)
    assert order == expected


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"max_input_tokens": 10, "max_total_tokens": 10}, "max_input_tokens < max_total_tokens"),
        (
            {"max_input_tokens": 10, "max_batch_prefill_tokens": 9},
            "max_input_tokens <= max_batch_prefill_tokens",
        ),
        (
            {"max_batch_prefill_tokens": 10, "max_batch_total_tokens": 9},
            "max_batch_prefill_tokens <= max_batch_total_tokens",
        ),
        (
            {"max_total_tokens": 10, "max_batch_total_tokens": 9},
            "max_total_tokens <= max_batch_total_tokens",
        ),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"queue_threshold_ms": -1}, "queue_threshold_ms=-1"),
        ({"waiting_served_ratio": float("nan")}, "waiting_served_ratio=nan"),
        ({"waiting_served_ratio": -1.0}, "waiting_served_ratio=-1.0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(given_, told):
    with pytest.raises(Exception, match=told):
        BatchLimits(**given_)


def test_what_was_not_given_follows_from_the_model_and_its_memory():
    limits = BatchLimits().resolved(positions=2048, pool_tokens=10_000)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (2048, 2047)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_total_tokens) == (2047 + 50, 10_000)
    assert limits.max_batch_size == 64
    assert BatchLimits().resolved(positions=8192, pool_tokens=3000).max_batch_prefill_tokens == 3000
    several = BatchLimits(max_batch_size=4, max_input_tokens=512).resolved(
        positions=2048, pool_tokens=10_000
    )
    assert (several.max_batch_prefill_tokens, several.max_batch_size) == (4 * 512, 4)
    small = BatchLimits(max_batch_prefill_tokens=100).resolved(positions=2048, pool_tokens=1000)
    assert (small.max_total_tokens, small.max_input_tokens, small.max_batch_total_tokens) == (
        1000,
        100,
        1000,
    )
    with pytest.raises(Exception, match="the model has 64 positions"):
        BatchLimits(max_total_tokens=65).resolved(positions=64, pool_tokens=1000)
    with pytest.raises(Exception, match="the pool holds 1000"):
        BatchLimits(max_batch_total_tokens=1001).resolved(positions=64, pool_tokens=1000)
