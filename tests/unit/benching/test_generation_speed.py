"""Timings of a decoder whose clock the test owns."""

from types import SimpleNamespace

import pytest
import torch

from quantflow.benching import generation_speed
from quantflow.benching.generation_speed import random_prompts, spread, time_generation, time_run
from quantflow.errors import UsageError
from quantflow.runtime import timed_decoder
from quantflow.runtime.decoding import Beams, Lookup, Sampling


class Clocked:
    """A decoder of tokens 3, 4, 5, ... that takes 2 s for a prompt, then 0.1 s, 0.2 s, ..."""

    vocab_size, positions, device = 16, 12, torch.device("cpu")

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        for module in (generation_speed, timed_decoder):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def begin(self, *, rows: int, capacity: int) -> None:
        self.now += 50  # not timed
        self.rows, self.capacity, self.calls = rows, capacity, 0

    def forward(self, input_ids, *, padding=None, last_only=True):
        self.now += 0.1 * self.calls if self.calls else 2.0
        self.calls += 1
        said = [3 + self.calls - 1 + row for row in range(self.rows)]
        return torch.nn.functional.one_hot(torch.tensor(said), self.vocab_size).float()


def test_the_first_token_and_each_further_one_are_timed_alone(monkeypatch):
    decoder = Clocked(monkeypatch)
    run = time_run(decoder, torch.ones(2, 5, dtype=torch.int64), new_tokens=4)
    assert decoder.capacity == 9
    assert run.first_seconds == pytest.approx(2.0)
    assert run.step_seconds == pytest.approx((0.1, 0.2, 0.3))
    assert run.seconds == pytest.approx(2.6)
    assert (run.requested, run.produced) == (8, 8)


def test_tokens_that_were_asked_for_and_those_that_came_are_counted_apart(monkeypatch):
    run = time_run(
        Clocked(monkeypatch), torch.ones(2, 5, dtype=torch.int64), new_tokens=7, ends=[5]
    )
    # Row 0 says 3 4 5, row 1 says 4 5: the batch ends with the later of the two.
    assert (run.requested, run.produced, len(run.step_seconds)) == (14, 5, 2)


class Choosing(Clocked):
    """The same, with a cache for beams and speculation, and logits of all positions."""

    def forward(self, input_ids, *, padding=None, last_only=True):
        self.rows = len(input_ids)
        logits = super().forward(input_ids)
        return logits if last_only else logits[:, None].expand(-1, input_ids.shape[1], -1)

    def keep(self, rows) -> None:
        self.rows = len(rows)

    def crop(self, length) -> None:
        pass


@pytest.mark.parametrize("method", [None, Beams(count=2)])
def test_of_several_sequences_and_of_beams_a_token_is_known_when_the_next_forward_begins(
    monkeypatch, method
):
    prompts = torch.ones(2, 5, dtype=torch.int64)
    run = time_generation(
        Choosing(monkeypatch), prompts, new_tokens=4, method=method, sampling=Sampling(top_k=3)
    )
    assert run.first_seconds == pytest.approx(2.0)
    assert run.step_seconds == pytest.approx((0.1, 0.2, 0.3))
    assert (run.requested, run.produced) == (8, 8)


def test_tokens_that_were_confirmed_together_are_known_together(monkeypatch):
    decoder = Choosing(monkeypatch)
    # After the prompt but its last token (2 s) a forward in 0.1 s says 4 everywhere; it is proposed
    # from then on.
    decoder.forward = lambda ids, **words: _always_4(decoder, ids, **words)
    run = time_generation(
        decoder, torch.tensor([[4, 4, 4]]), new_tokens=6, method=Lookup(tokens=2, ngram=1)
    )
    assert run.first_seconds == pytest.approx(2.1)
    assert run.step_seconds == pytest.approx((0.0, 0.0, 0.2, 0.0, 0.0))
    assert (run.requested, run.produced) == (6, 6)


def _always_4(decoder, ids, *, padding=None, last_only=True):
    logits = Choosing.forward(decoder, ids, last_only=False)
    logits = torch.nn.functional.one_hot(
        torch.full(logits.shape[:2], 4), decoder.vocab_size
    ).float()
    return logits[:, -1] if last_only else logits


def test_a_sequence_that_ends_early_produces_up_to_its_end(monkeypatch):
    run = time_generation(
        Choosing(monkeypatch),
        torch.ones(2, 5, dtype=torch.int64),
        new_tokens=7,
        sampling=Sampling(top_k=1),
        ends=[5],
    )
    assert (run.requested, run.produced) == (14, 5)  # row 0 says 3 4 5, row 1 says 4 5


@pytest.mark.parametrize(("length", "new"), [(9, 4), (3, 0)])
def test_more_than_the_model_has_positions_for_is_an_error(monkeypatch, length, new):
    with pytest.raises(
        UsageError, match=rf"{length} prompt tokens \+ {new} new ones: the model has 12 positions"
    ):
        time_run(Clocked(monkeypatch), torch.ones(1, length, dtype=torch.int64), new_tokens=new)


def test_percentiles_are_elements_of_the_sorted_times():
    found = spread([5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 10.0])
    assert (found.average, found.lowest, found.highest) == (5.5, 1.0, 10.0)
    assert found.percentiles == (6.0, 10.0, 10.0)  # elements 5, 9 and 9 of 1..10


def test_unsorted_they_are_what_text_generation_benchmark_prints_which_can_lie_below_the_average():
    found = spread([5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 1.5], ordered=False)
    assert found.percentiles == (2.0, 1.5, 1.5)  # elements 5, 9 and 9 as they came
    assert found.percentiles[2] < found.average


def test_nothing_has_no_spread():
    assert spread([]) is None


def test_prompts_are_other_ones_for_every_seed():
    one, again, other = (random_prompts(2, 8, vocab_size=50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.shape == (2, 8) and int(one.min()) >= 0 and int(one.max()) < 50
