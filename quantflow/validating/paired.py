"""Two artifacts over the same windows: the loss of one against the other, with one-sided bounds.

Both have the text in common, and a difference has it no more. Windows are drawn with replacement,
the same ones for both, and every draw gives one difference of each metric. The bounds are
quantiles of these differences. The module imports no torch.

Bootstrap quantiles are too narrow for few windows: the spread of a resample is that of n
windows divided by n, not by n - 1, and has no Student's t. So the quantiles stand further out,
where a mean of n normal values would have its t interval (Hesterberg 2015, What Teachers Should
Know About the Bootstrap, section 5.3: expanded percentiles).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantflow.errors import InputError

if TYPE_CHECKING:
    from quantflow.numerics.divergence import Comparison

RESAMPLES = 4000
ALPHA = 0.05
# the sign of a change for the worse
WORSE = {"ppl_ratio": 1.0, "mean_kld": 1.0, "kld_p999": 1.0, "top1_agreement": -1.0}
_DIGITS = 9  # of what is kept of a token

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WindowScores:
    """An artifact's comparison with its source, window by window, as metrics and resamples need it.

    Attributes:
        tokens: [n] predicted tokens of each window.
        kld: [n] sums of KL(source || artifact), nats.
        agreements: [n] tokens whose most likely token is the source's.
        nll_difference: [n] sums of the artifact's negative log likelihoods minus the source's,
            nats.
        tail: largest divergences of each window, in nats, at least as many as a resample's
            99.9 % quantile reaches down to.
    """

    tokens: Counts
    kld: Floats
    agreements: Counts
    nll_difference: Floats
    tail: tuple[Floats, ...]

    def metric(self, name: str, times: Counts) -> Floats:
        """A metric of resamples, [R].

        Args:
            name: key of the metric.
            times: [R, n] number of times that each window was drawn.
        """
        tokens = times @ self.tokens  # [R]
        if name == "kld_p999":
            return self._p999(times, tokens)
        sums = {
            "ppl_ratio": self.nll_difference,
            "mean_kld": self.kld,
            "top1_agreement": self.agreements.astype(np.float64),
        }[name]
        means: Floats = times.astype(np.float64) @ sums / tokens
        if name == "ppl_ratio":
            means = np.exp(means)
        return means

    def _p999(self, times: Counts, tokens: Counts) -> Floats:
        """The smallest divergence that 99.9 % of each resample's tokens do not exceed, [R]."""
        values = np.concatenate(self.tail)
        owner = np.repeat(np.arange(len(self.tail)), [len(part) for part in self.tail])
        order = np.argsort(-values, kind="stable")
        values, owner = values[order], owner[order]
        place = tokens - (999 * tokens + 999) // 1000 + 1  # from the largest, which is 1
        at = [
            int(np.searchsorted(np.cumsum(row[owner]), rank))
            for row, rank in zip(times, place, strict=True)
        ]
        quantiles: Floats = values[np.asarray(at)]
        return quantiles


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A metric of the newer artifact minus that of the older one, turned so that more is worse.

    Attributes:
        value: difference on the text as it is.
        lower: lower bound, which holds for all metrics together with a confidence of 95 %.
        upper: upper bound, which holds with a confidence of 95 %.
    """

    value: float
    lower: float
    upper: float


def recorded(comparison: "Comparison") -> dict[str, Any]:
    """A comparison's windows as validation.json keeps them."""
    lengths = comparison.lengths.numpy()
    ends = np.cumsum(lengths)[:-1]
    kld, agreement, nll = (
        np.split(values.double().numpy(), ends)
        for values in (
            comparison.kld,
            comparison.agreement,
            comparison.nll_candidate - comparison.nll_baseline,
        )
    )
    # a resample may draw the longest window alone
    reach = len(lengths) * int(lengths.max()) // 1000 + 1
    return {
        "tokens": lengths.tolist(),
        "kld": [float(part.sum()) for part in kld],
        "agreements": [int(part.sum()) for part in agreement],
        "nll_difference": [float(part.sum()) for part in nll],
        "kld_tail": [
            [float(f"{value:.{_DIGITS}g}") for value in np.sort(part)[::-1][:reach]] for part in kld
        ],
    }


def window_scores(record: Mapping[str, Any], *, name: str) -> WindowScores:
    """The windows that `recorded` wrote.

    Raises:
        InputError: a list is missing, has another length, or holds something else than finite
            numbers.
    """
    try:
        count = len(record["tokens"])
        scores = WindowScores(
            tokens=np.asarray(record["tokens"], dtype=np.int64),
            kld=np.asarray(record["kld"], dtype=np.float64),
            agreements=np.asarray(record["agreements"], dtype=np.int64),
            nll_difference=np.asarray(record["nll_difference"], dtype=np.float64),
            tail=tuple(np.asarray(part, dtype=np.float64) for part in record["kld_tail"]),
        )
        parts = (scores.tokens, scores.kld, scores.agreements, scores.nll_difference)
        whole = (
            all(part.shape == (count,) and np.isfinite(part).all() for part in parts)
            and len(scores.tail) == count
        )
        whole = whole and all(
            part.ndim == 1 and len(part) and np.isfinite(part).all() for part in scores.tail
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        whole = False
    if not whole or count < 2 or scores.tokens.min() < 1:
        raise InputError(
            f"{name}: the scores of its windows are missing or damaged",
            "run `quantflow validate --force` again",
        )
    return scores


def differences(
    newer: WindowScores,
    older: WindowScores,
    *,
    metrics: Sequence[str],
    seed: int,
    others: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, PairedDifference]:
    """The loss of the newer artifact against the older one in some metrics.

    Args:
        newer: n windows of the newer artifact.
        older: same windows of the older artifact.
        metrics: keys of `WORSE`. Their lower bounds hold together with 95 %.
        seed: seed of the draws.
        others: number of other tests that share these 95 %.
        resamples: number of times that n windows are drawn.
    """
    alpha = ALPHA / (len(metrics) + others)  # Bonferroni
    count = len(newer.tokens)
    drawn = np.random.default_rng(seed).multinomial(
        count, np.full(count, 1 / count), size=resamples
    )
    # [1 + R, n], the text as it is first
    times = np.concatenate([np.ones((1, count), dtype=np.int64), drawn])
    by_metric = {}
    for metric in metrics:
        # [1 + R]
        worse = WORSE[metric] * (newer.metric(metric, times) - older.metric(metric, times))
        by_metric[metric] = PairedDifference(
            value=float(worse[0]),
            lower=float(np.quantile(worse[1:], expanded(alpha, count), method="lower")),
            upper=float(np.quantile(worse[1:], 1 - expanded(ALPHA, count), method="higher")),
        )
    return by_metric


def mcnemar(newer: str, older: str) -> tuple[int, int, float]:
    """The answers lost and won, and the chance to lose so many where neither artifact is better.

    The exact test, one-sided: of the answers that differ each is a loss with probability 1/2
    (McNemar 1947, Psychometrika 12).

    Args:
        newer: `1` for each right answer, `0` for each wrong one.
        older: digits of the older artifact, document for document.
    """
    lost = sum(pair == ("0", "1") for pair in zip(newer, older, strict=True))
    won = sum(pair == ("1", "0") for pair in zip(newer, older, strict=True))
    differ = lost + won
    logs = [
        math.lgamma(differ + 1)
        - math.lgamma(count + 1)
        - math.lgamma(differ - count + 1)
        - differ * math.log(2)
        for count in range(lost, differ + 1)
    ]
    return lost, won, min(1.0, sum(map(math.exp, logs)))


def recovery_bounds(artifact: str, baseline: str) -> tuple[float, float]:
    """One-sided 95 % bounds on the artifact's share of right answers over the source's; 1 is all.

    The answers are pairs. The bounds are the ratios r at which the mean of `artifact - r *
    baseline` is still zero within its normal error (Fieller 1954, J. R. Stat. Soc. B 16). Half an
    answer is added to each of the four kinds of pairs, as for differences of pairs (Agresti and Min
    2005, Stat. Med. 24): without it twelve equal answers would prove that none is lost.

    Args:
        artifact: `1` for each right answer, `0` for each wrong one.
        baseline: digits of the source, document for document.

    Returns:
        (lower, upper); (0, inf) where the source has too few right answers to divide by.
    """
    pairs = list(zip(artifact, baseline, strict=True))
    total = len(pairs) + 2
    both, right, source_right = (
        (sum(pair == ("1", "1") for pair in pairs) + 0.5) / total,
        (artifact.count("1") + 1) / total,
        (baseline.count("1") + 1) / total,
    )
    share = NormalDist().inv_cdf(1 - ALPHA) ** 2 / total
    # known² r² - 2 right known r + right² = share * variance of (artifact - r * baseline), a
    # quadratic in r
    square = source_right**2 - share * source_right * (1 - source_right)
    middle = right * source_right - share * (both - right * source_right)
    rest = right**2 - share * right * (1 - right)
    if square <= 0:
        return 0.0, math.inf
    spread = math.sqrt(max(0.0, middle**2 - square * rest))
    return max(0.0, (middle - spread) / square), (middle + spread) / square


def expanded(alpha: float, count: int) -> float:
    """The share of resamples outside of a one-sided bound of 1 - alpha over `count` windows.

    Student's quantile is Abramowitz and Stegun 26.7.5, four terms of a series in 1 / (count - 1).
    """
    z, freedom = NormalDist().inv_cdf(alpha), count - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    t = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    return NormalDist().cdf(t * math.sqrt(count / freedom))
