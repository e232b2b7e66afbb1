"""Distance of a candidate's predictions from its baseline's: KL divergence, agreement, likelihoods.

    KL(baseline || candidate) = sum_v p(v) * (log p(v) - log q(v))

in nats, over the whole vocabulary. p is the baseline's distribution of the next token, q the
candidate's. Positions that predict a token of the text are scored: all but the last of each
sequence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.core.device import Device
from quantflow.errors import InputError
from quantflow.numerics.perplexity import LogitsOf, check_logits, row_blocks, token_nll


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Scores of every predicted token, sequence after sequence.

    Attributes:
        lengths: [n] int64, predicted tokens per sequence; T is their sum.
        kld: [T] float64, KL(baseline || candidate), nats.
        agreement: [T] bool, whether both have the same most likely token.
        nll_baseline: [T] float64, nats.
        nll_candidate: [T] float64, nats.
    """

    lengths: Tensor
    kld: Tensor
    agreement: Tensor
    nll_baseline: Tensor
    nll_candidate: Tensor


def token_kld(baseline: Tensor, candidate: Tensor) -> Tensor:
    """KL(baseline || candidate) of every row, in nats.

    Log probabilities are float32, their products are summed in float64; a negative sum, which only
    rounding can leave, becomes zero.

    Args:
        baseline: finite logits, [T, V].
        candidate: finite logits, [T, V].

    Returns:
        [T] float64.
    """
    parts = [torch.zeros(0, dtype=torch.float64, device=baseline.device)]
    for rows in row_blocks(baseline):
        log_p = baseline[rows].float().log_softmax(dim=-1)
        parts.append(_kld(log_p.exp(), log_p, candidate[rows].float().log_softmax(dim=-1)))
    return torch.cat(parts)


def score(baseline: Tensor, candidate: Tensor, tokens: Tensor) -> Comparison:
    """Compare two models' logits for one sequence: `scores` with one candidate."""
    return scores(baseline, {"candidate": candidate}, tokens)["candidate"]


def scores(
    baseline: Tensor, candidates: Mapping[str, Tensor], tokens: Tensor
) -> dict[str, Comparison]:
    """Compare several models' logits for one sequence with those of one.

    Args:
        baseline: logits, [S, V].
        candidates: name -> logits of another model, [S, V].
        tokens: [S] int64, S at least 2; on the device of the logits.

    Returns:
        name -> a Comparison of one sequence with T = S - 1, where the logits are.

    Raises:
        InputError: vocabularies differ, or `check_logits` refuses any of the logits.
    """
    check_logits(baseline, tokens, name="baseline")
    for name, candidate in candidates.items():
        check_logits(candidate, tokens, name=name)
        if baseline.shape[1] != candidate.shape[1]:
            raise InputError(
                f"{name}: a vocabulary of {candidate.shape[1]}, the baseline has "
                f"{baseline.shape[1]}",
                "compare an artifact with the model it was made from",
            )
    baseline_nll = token_nll(baseline, tokens)
    kld: dict[str, list[Tensor]] = {name: [] for name in candidates}
    agreement: dict[str, list[Tensor]] = {name: [] for name in candidates}
    for rows in row_blocks(baseline[:-1]):
        log_p = baseline[rows].float().log_softmax(dim=-1)
        likeliest = baseline[rows].argmax(dim=-1)
        p = log_p.exp()
        for name, candidate in candidates.items():
            kld[name].append(_kld(p, log_p, candidate[rows].float().log_softmax(dim=-1)))
            agreement[name].append(likeliest == candidate[rows].argmax(dim=-1))
    return {
        name: Comparison(
            lengths=torch.tensor([tokens.shape[0] - 1]),
            kld=torch.cat(kld[name]),
            agreement=torch.cat(agreement[name]),
            nll_baseline=baseline_nll,
            nll_candidate=token_nll(candidate, tokens),
        )
        for name, candidate in candidates.items()
    }


def _kld(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence of every row, [T] float64.

    p, log_p and log_q are [T, V] float32; log_q is overwritten.
    """
    torch.sub(log_p, log_q, out=log_q)
    return log_q.mul_(p).sum(dim=-1, dtype=torch.float64).clamp_min(0)


def brought_back(comparison: Comparison, device: Device) -> Comparison:
    """A comparison with its tensors in host memory."""
    return replace(
        comparison,
        kld=device.fetch(comparison.kld),
        agreement=device.fetch(comparison.agreement),
        nll_baseline=device.fetch(comparison.nll_baseline),
        nll_candidate=device.fetch(comparison.nll_candidate),
    )


def join(comparisons: Iterable[Comparison]) -> Comparison:
    """Put the sequences of several comparisons one after the other.

    Raises:
        InputError: there is none.
    """
    parts = list(comparisons)
    if not parts:
        raise InputError("evaluation: no sequences", "give an evaluation text")
    return Comparison(
        lengths=torch.cat([part.lengths for part in parts]),
        kld=torch.cat([part.kld for part in parts]),
        agreement=torch.cat([part.agreement for part in parts]),
        nll_baseline=torch.cat([part.nll_baseline for part in parts]),
        nll_candidate=torch.cat([part.nll_candidate for part in parts]),
    )


def compare(baseline: LogitsOf, candidate: LogitsOf, sequences: Iterable[Tensor]) -> Comparison:
    """Run both models over the sequences, one at a time, and compare them.

    Args:
        baseline: token ids [S] -> logits [S, V]; logits of one sequence at a time are in memory.
        candidate: token ids [S] -> logits [S, V].
        sequences: int64 [S] each, S at least 2.

    Raises:
        InputError: there is no sequence, or `score` refuses one.
    """
    return join(score(baseline(tokens), candidate(tokens), tokens) for tokens in sequences)
