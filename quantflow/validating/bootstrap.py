"""Bounds on metrics of another text of the same kind: a percentile bootstrap over sequences.

Tokens of one sequence depend on each other, so whole sequences are drawn with replacement, as many
as there are. Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.errors import InputError, UsageError
from quantflow.numerics.divergence import Comparison

CONFIDENCE = 0.95
_CHUNK = 1 << 22  # token weights in work at once


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A number and its one-sided bounds.

    Attributes:
        value: the number on the text as it is.
        lower: bound that the number reaches with a confidence of 95 %.
        upper: bound that it does not exceed with 95 %; both together hold with 90 %.
    """

    value: float
    lower: float
    upper: float


def bootstrap(
    comparison: Comparison, *, generator: torch.Generator, resamples: int = 2000
) -> dict[str, Bounds]:
    """The metrics of a comparison with their bounds.

    Every mean is over tokens, so a long sequence counts more than a short one.

    - `ppl_ratio`: candidate's perplexity / baseline's, exp(mean(nll_candidate - nll_baseline)).
    - `mean_kld`: mean KL(baseline || candidate), nats.
    - `kld_p999`: 99.9 percentile of the tokens' KL, nats: the smallest value that at least 99.9 %
      of them do not exceed.
    - `top1_agreement`: share of tokens with the same most likely next token, 0..1.

    Args:
        comparison: n sequences, T tokens.
        generator: a CPU generator; the same state gives the same bounds.
        resamples: number of times that n sequences are drawn.

    Raises:
        UsageError: fewer than one resample.
        InputError: fewer than two sequences, of which every resample would be the same.
    """
    count = comparison.lengths.shape[0]
    if resamples < 1:
        raise UsageError(f"bootstrap: resamples={resamples}", "use 2000")
    if count < 2:
        raise InputError(
            f"evaluation: {count} sequences, bounds need 2",
            "give more text, or a smaller sequence_length",
        )
    drawn = torch.randint(count, (resamples, count), generator=generator)
    times = torch.zeros(resamples, count, dtype=torch.int64).scatter_add_(
        1, drawn, torch.ones_like(drawn)
    )
    # [1 + R, n], the text as it is first
    times = torch.cat([torch.ones(1, count, dtype=torch.int64), times])
    owner = torch.repeat_interleave(torch.arange(count), comparison.lengths)  # [T]
    tokens = (times * comparison.lengths).sum(dim=1)  # [1 + R]

    def mean(values: Tensor) -> Tensor:
        sums = torch.zeros(count, dtype=torch.float64).index_add_(0, owner, values.double())  # [n]
        return (times * sums).sum(dim=1) / tokens  # [1 + R]

    metrics = {
        "ppl_ratio": mean(comparison.nll_candidate - comparison.nll_baseline).exp(),
        "mean_kld": mean(comparison.kld),
        "kld_p999": _p999(comparison.kld, owner, times=times, tokens=tokens),
        "top1_agreement": mean(comparison.agreement),
    }
    return {name: _bounds(values) for name, values in metrics.items()}


def _p999(kld: Tensor, owner: Tensor, *, times: Tensor, tokens: Tensor) -> Tensor:
    """The 99.9 percentile of the tokens' KL in every resample.

    The tokens are sorted once. In a resample the percentile stands where the running sum of how
    often each token was drawn reaches the rank ceil(0.999 * tokens); the rank is an integer, so no
    rounding decides it.

    Args:
        kld: [T] float64.
        owner: [T] int64, the sequence of each token.
        times: [R, n] int64, the number of times that each sequence was drawn.
        tokens: [R] int64, the number of tokens in each resample.

    Returns:
        [R] float64.
    """
    ordered, order = kld.sort()
    ranks = (999 * tokens + 999) // 1000
    columns = owner[order]
    step = max(1, _CHUNK // len(kld))
    positions = [
        torch.searchsorted(
            times[row : row + step, columns].cumsum(dim=1), ranks[row : row + step, None]
        )[:, 0]
        for row in range(0, len(times), step)
    ]
    return ordered[torch.cat(positions)]


def _bounds(values: Tensor) -> Bounds:
    """The first value, and the 5 % and 95 % quantiles of the others.

    Args:
        values: [1 + R] float64.
    """
    resampled = values[1:]
    return Bounds(
        value=values[0].item(),
        lower=torch.quantile(resampled, 1 - CONFIDENCE, interpolation="lower").item(),
        upper=torch.quantile(resampled, CONFIDENCE, interpolation="higher").item(),
    )
