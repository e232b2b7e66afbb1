import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, UsageError
from quantflow.numerics.divergence import Comparison
from quantflow.validating.bootstrap import bootstrap


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def comparison(lengths: list[int], *, seed: int = 0) -> Comparison:
    """Return random scores; every sequence has a level of its own, so that sequences differ."""
    rng = generator(seed)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    level = torch.rand(len(lengths), generator=rng, dtype=torch.float64)[owner]
    total = sum(lengths)
    return Comparison(
        lengths=torch.tensor(lengths),
        kld=level * torch.rand(total, generator=rng, dtype=torch.float64) ** 4,
        agreement=torch.rand(total, generator=rng, dtype=torch.float64) > level / 4,
        nll_baseline=torch.rand(total, generator=rng, dtype=torch.float64),
        nll_candidate=level + torch.rand(total, generator=rng, dtype=torch.float64),
    )


def slowly(
    given: Comparison, *, resamples: int, seed: int
) -> dict[str, tuple[float, float, float]]:
    """The same resampling with lists: draw sequences, join their tokens, compute each metric."""
    count = len(given.lengths)
    drawn = [
        torch.arange(count),
        *torch.randint(count, (resamples, count), generator=generator(seed)),
    ]
    ends = given.lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    values: dict[str, list[float]] = {
        "ppl_ratio": [],
        "mean_kld": [],
        "kld_p999": [],
        "top1_agreement": [],
    }
    for sample in drawn:
        tokens = numpy.concatenate([numpy.arange(starts[i], ends[i]) for i in sample.tolist()])
        kld = given.kld.numpy()[tokens]
        values["mean_kld"].append(kld.mean())
        values["kld_p999"].append(numpy.sort(kld)[math.ceil(999 * len(kld) / 1000) - 1])
        values["top1_agreement"].append(given.agreement.numpy()[tokens].mean())
        candidate = numpy.exp(given.nll_candidate.numpy()[tokens].mean())
        values["ppl_ratio"].append(candidate / numpy.exp(given.nll_baseline.numpy()[tokens].mean()))
    return {
        name: (
            column[0],
            float(numpy.quantile(column[1:], 0.05, method="lower")),
            float(numpy.quantile(column[1:], 0.95, method="higher")),
        )
        for name, column in values.items()
    }


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=40), st.integers(0, 2**20))
def test_the_bounds_are_those_of_resampling_the_tokens_themselves(lengths, seed):
    scores = comparison(lengths, seed=seed)
    actual = bootstrap(scores, generator=generator(seed), resamples=40)
    expected = slowly(scores, resamples=40, seed=seed)
    assert actual.keys() == expected.keys()
    for name, bounds in actual.items():
        assert (bounds.value, bounds.lower, bounds.upper) == pytest.approx(expected[name], rel=1e-9)


def test_a_percentile_over_many_tokens_is_computed_in_pieces_with_the_same_result(monkeypatch):
    scores = comparison([50] * 30)
    whole = bootstrap(scores, generator=generator(), resamples=50)
    monkeypatch.setattr("quantflow.validating.bootstrap._CHUNK", 7 * 1500)
    assert bootstrap(scores, generator=generator(), resamples=50) == whole


@pytest.mark.parametrize(("tokens", "rank"), [(1000, 999), (1001, 1000), (2000, 1998), (10, 10)])
def test_the_percentile_is_the_smallest_value_that_enough_tokens_do_not_exceed(tokens, rank):
    # KL of token i is i, for i = 1..tokens: the 99.9 percentile is ceil(0.999 * tokens).
    kld = torch.arange(tokens, dtype=torch.float64).flip(0) + 1
    flat = torch.ones(tokens, dtype=torch.float64)
    scores = Comparison(
        lengths=torch.tensor([tokens - 4, 4]),
        kld=kld,
        agreement=flat > 0,
        nll_baseline=flat,
        nll_candidate=flat,
    )
    assert bootstrap(scores, generator=generator(), resamples=2)["kld_p999"].value == rank


def test_equal_sequences_leave_no_doubt_and_equal_models_give_one_and_zero():
    flat = torch.full((12,), 0.5, dtype=torch.float64)
    scores = Comparison(
        lengths=torch.tensor([3, 4, 5]),
        kld=flat * 0,
        agreement=flat > 0,
        nll_baseline=flat,
        nll_candidate=flat,
    )
    expected = {"ppl_ratio": 1.0, "mean_kld": 0.0, "kld_p999": 0.0, "top1_agreement": 1.0}
    for name, bounds in bootstrap(scores, generator=generator()).items():
        assert (bounds.lower, bounds.value, bounds.upper) == (expected[name],) * 3


def test_the_mean_is_over_tokens_and_not_over_sequences():
    # 9 tokens of 0 and 1 token of 1: 0.1 over tokens, 0.5 over sequences.
    kld = torch.tensor([0.0] * 9 + [1.0], dtype=torch.float64)
    flat = torch.ones(10, dtype=torch.float64)
    scores = Comparison(
        lengths=torch.tensor([9, 1]),
        kld=kld,
        agreement=kld == 0,
        nll_baseline=flat,
        nll_candidate=flat,
    )
    result = bootstrap(scores, generator=generator(), resamples=5)
    assert result["mean_kld"].value == pytest.approx(0.1)
    assert result["top1_agreement"].value == pytest.approx(0.9)


def test_the_same_seed_gives_the_same_bounds_and_another_seed_others():
    scores = comparison([20] * 20)
    first = bootstrap(scores, generator=generator(1), resamples=100)
    assert bootstrap(scores, generator=generator(1), resamples=100) == first
    assert bootstrap(scores, generator=generator(2), resamples=100) != first


def test_the_upper_bound_covers_the_truth_about_as_often_as_it_says():
    # Sequences of one token with KL from an exponential distribution of mean 1: the bound should
    # hold in 95 % of texts.
    rng = generator(5)
    covered = 0
    for _ in range(200):
        kld = -torch.rand(100, generator=rng, dtype=torch.float64).log()
        flat = torch.ones(100, dtype=torch.float64)
        scores = Comparison(
            lengths=torch.ones(100, dtype=torch.int64),
            kld=kld,
            agreement=kld > 0,
            nll_baseline=flat,
            nll_candidate=flat,
        )
        covered += bootstrap(scores, generator=rng, resamples=300)["mean_kld"].upper >= 1
    assert 0.88 <= covered / 200 <= 0.99


def test_one_sequence_and_no_resamples_are_refused():
    with pytest.raises(
        InputError, match=r"^evaluation: 1 sequences, bounds need 2; give more text"
    ):
        bootstrap(comparison([9]), generator=generator())
    with pytest.raises(UsageError, match=r"^bootstrap: resamples=0; use 2000"):
        bootstrap(comparison([9, 9]), generator=generator(), resamples=0)
