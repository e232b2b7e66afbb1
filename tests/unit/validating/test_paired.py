"""Paired differences of two artifacts, and how often their bounds are wrong."""

import math

import numpy as np
import pytest
import torch

from quantflow.errors import InputError
from quantflow.numerics.divergence import Comparison
from quantflow.validating.paired import (
    WindowScores,
    differences,
    expanded,
    mcnemar,
    recorded,
    recovery_bounds,
    window_scores,
)
from tests.shared import slow

LENGTHS = [60, 90, 30, 80, 40]


def comparison(seed, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    draw = torch.rand(total, dtype=torch.float64, generator=generator)
    return Comparison(
        lengths=torch.tensor(lengths),
        kld=(-draw.log()) ** 3 / 50,
        agreement=torch.rand(total, generator=generator) > 0.1,
        nll_baseline=torch.rand(total, dtype=torch.float64, generator=generator),
        nll_candidate=torch.rand(total, dtype=torch.float64, generator=generator),
    )


def scores(found):
    return window_scores(recorded(found), name="x")


def drawn(values, lengths, times):
    """The tokens of a resample, one after the other: what a metric is of."""
    parts = np.split(values.double().numpy(), np.cumsum(lengths)[:-1])
    return np.concatenate(
        [part for part, count in zip(parts, times, strict=True) for _ in range(count)]
    )


@pytest.mark.parametrize(
    "times", [(1, 1, 1, 1, 1), (0, 3, 0, 2, 0), (0, 5, 0, 0, 0), (0, 0, 5, 0, 0)]
)
def test_windows_that_were_recorded_have_every_metric_of_a_resample(times):
    found = comparison(1)
    record, row = scores(found), np.array([times])
    kld, agreement, nll = (
        drawn(values, LENGTHS, times)
        for values in (found.kld, found.agreement, found.nll_candidate - found.nll_baseline)
    )
    rank = math.ceil(0.999 * len(kld))
    assert record.metric("kld_p999", row)[0] == pytest.approx(np.sort(kld)[rank - 1], rel=1e-8)
    assert record.metric("mean_kld", row)[0] == pytest.approx(kld.mean(), rel=1e-12)
    assert record.metric("top1_agreement", row)[0] == pytest.approx(agreement.mean(), rel=1e-12)
    assert record.metric("ppl_ratio", row)[0] == pytest.approx(math.exp(nll.mean()), rel=1e-12)


def test_an_artifact_beside_itself_differs_by_nothing_in_any_draw():
    same = scores(comparison(1))
    for difference in differences(
        same, same, metrics=["ppl_ratio", "mean_kld", "kld_p999", "top1_agreement"], seed=0
    ).values():
        assert (difference.value, difference.lower, difference.upper) == (0, 0, 0)


def test_fewer_equal_tokens_are_worse_and_less_divergence_is_better():
    older = WindowScores(
        tokens=np.full(4, 10),
        kld=np.full(4, 2.0),
        agreements=np.array([9, 8, 9, 8]),
        nll_difference=np.zeros(4),
        tail=(np.ones(1),) * 4,
    )
    newer = WindowScores(
        tokens=older.tokens,
        kld=np.full(4, 1.0),
        agreements=older.agreements - 1,
        nll_difference=np.full(4, 10 * math.log(1.5)),
        tail=older.tail,
    )
    found = differences(newer, older, metrics=["mean_kld", "top1_agreement", "ppl_ratio"], seed=0)
    for metric, worse in (("mean_kld", -0.1), ("top1_agreement", 0.1), ("ppl_ratio", 0.5)):
        difference = found[metric]  # of every window alike, so no draw differs
        assert [difference.value, difference.lower, difference.upper] == pytest.approx([worse] * 3)


def pair(generator, windows, *, worse=0.0):
    """Two artifacts with skewed, correlated differences over windows, `worse` on average."""
    tokens = np.full(windows, 511)
    hardness = generator.lognormal(0, 0.6, windows)  # what both have in common

    def one(shift):
        own = generator.lognormal(0, 0.5, windows) / math.exp(0.125) - 1  # mean 0
        kld = 511 * (0.02 * hardness * (1 + 0.3 * own) + shift)
        return WindowScores(
            tokens=tokens,
            kld=kld,
            agreements=generator.binomial(511, np.clip(0.95 - 0.01 * hardness * (1 + own), 0, 1)),
            nll_difference=511 * (0.01 * hardness * own + generator.normal(0, 0.005, windows)),
            tail=(np.ones(1),) * windows,
        )

    return one(worse), one(0.0)


@pytest.mark.slow
def test_a_thousand_pairs_that_do_not_differ_raise_the_false_alarms_that_the_bound_promises():
    generator = np.random.default_rng(7)
    metrics, alarms = ["ppl_ratio", "mean_kld", "top1_agreement"], 0
    for seed in range(1000):
        newer, older = pair(generator, 64)
        found = differences(newer, older, metrics=metrics, seed=seed, resamples=400)
        alarms += any(difference.lower > 0 for difference in found.values())
    print(f"{alarms} of 1000 pairs")
    assert alarms <= 71  # 5 % and three standard deviations of a thousand draws


@pytest.mark.parametrize("windows", [8, slow(64)])
def test_one_metric_alone_raises_five_alarms_in_a_hundred_also_for_few_windows(windows):
    generator = np.random.default_rng(11)
    alarms, passes = 0, 0
    for seed in range(1000):
        newer, older = pair(generator, windows, worse=0.004)
        (difference,) = differences(
            newer, older, metrics=["mean_kld"], seed=seed, resamples=400
        ).values()
        alarms += difference.lower > 0.004
        # a pass at the edge of what is allowed is the other mistake
        passes += difference.upper <= 0.004
    print(f"{windows} windows: {alarms} alarms, {passes} passes of 1000")
    assert 29 <= alarms <= 71
    # skewed values of eight windows: the upper bound is a little low
    assert passes <= 71 or windows == 8


def test_a_real_loss_is_seen():
    newer, older = pair(np.random.default_rng(3), 64, worse=0.01)
    assert differences(newer, older, metrics=["mean_kld"], seed=0)["mean_kld"].lower > 0.004


# a table of Student's t
@pytest.mark.parametrize(("count", "t"), [(6, 2.0150), (8, 1.8946), (31, 1.6973), (101, 1.6602)])
def test_a_quantile_stands_where_students_t_has_it(count, t):
    share = expanded(0.05, count)
    normal = math.sqrt(count / (count - 1)) * t
    assert share == pytest.approx(0.5 * math.erfc(normal / math.sqrt(2)), rel=2e-3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", [1]),
        ("tokens", []),
        ("kld", [1.0] * 4),
        ("kld", None),
        ("kld", [float("nan")] * 5),
        ("kld_tail", [[]] * 5),
    ],
)
def test_scores_that_are_damaged_are_refused(key, value):
    record = recorded(comparison(1)) | {key: value}
    with pytest.raises(InputError, match="x: the scores of its windows are missing or damaged"):
        window_scores(record, name="x")


@pytest.mark.parametrize(
    # the binomial by hand: of 5 that differ 5, 4 and more, and so on
    ("newer", "older", "lost", "won", "chance"),
    [
        ("00000", "11111", 5, 0, 1 / 32),
        ("00001", "11110", 4, 1, 6 / 32),
        ("11111", "00000", 0, 5, 1.0),
        ("0101", "0101", 0, 0, 1.0),
        ("1100", "1111", 2, 0, 1 / 4),
    ],
)
def test_answers_that_were_lost_are_weighed_against_those_that_were_won(
    newer, older, lost, won, chance
):
    assert mcnemar(newer, older) == (lost, won, pytest.approx(chance))


@pytest.mark.parametrize(
    ("documents", "lost", "won"),
    [(50, 0.05, 0.03), (200, 0.02, 0.01), (500, 0.06, 0.05), (200, 0.0, 0.0)],
)
def test_a_recovery_that_is_asked_exactly_passes_and_fails_by_mistake_in_five_of_a_hundred_draws(
    documents, lost, won
):
    generator = np.random.default_rng(5)
    kinds = np.array([("1", "1"), ("0", "1"), ("1", "0"), ("0", "0")])  # artifact, source
    shares = [0.6 - lost, lost, won, 0.4 - won]
    truth, passes, failures = (0.6 - lost + won) / 0.6, 0, 0
    for _ in range(1000):
        drawn = kinds[generator.choice(4, size=documents, p=shares)]
        lower, upper = recovery_bounds("".join(drawn[:, 0]), "".join(drawn[:, 1]))
        passes += lower > truth
        failures += upper < truth
    print(f"{documents} documents: {passes} passes, {failures} failures of 1000")
    assert passes <= 71 and failures <= 71  # 5 % and three standard deviations of a thousand draws
    if lost and documents > 100:
        assert passes + failures >= 20  # no bound that is too wide to say anything


def test_equal_answers_to_few_questions_prove_little_and_to_many_nearly_all():
    few, many = (recovery_bounds("10" * count, "10" * count)[0] for count in (6, 5000))
    assert few < 0.85 and 0.9995 < many < 1
    assert recovery_bounds("10" * 6, "10" * 6)[1] > 1


def test_a_source_without_a_right_answer_has_no_recovery_to_bound():
    assert recovery_bounds("0" * 20, "0" * 20) == (0.0, math.inf)


def test_the_bounds_of_a_hundred_pairs_are_those_worked_by_hand():
    # 60 both, 4 lost, 1 won, 35 neither; with half an answer more of each: 60.5, 4.5, 1.5, 35.5 of
    # 102
    artifact, source = "1" * 60 + "0" * 4 + "1" + "0" * 35, "1" * 64 + "0" * 36
    for ratio in recovery_bounds(artifact, source):
        values = np.repeat([1 - ratio, -ratio, 1.0, 0.0], [121, 9, 3, 71])  # each half answer once
        assert abs(values.mean()) / (values.std() / math.sqrt(102)) == pytest.approx(
            1.6448536, rel=1e-6
        )
