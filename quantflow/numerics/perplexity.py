"""Perplexity: exp of the mean negative log likelihood of each next token, in nats."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from quantflow.core.groups import spans
from quantflow.errors import InputError

# Logits processed at once: 4 MiB in float32. The C library maps larger blocks anew each time, and
# touching fresh pages takes three times as long as the arithmetic. Rows do not depend on each
# other, so this number changes no bit.
_AT_ONCE = 2**20

# token ids [S] int64 -> logits [S, V]
LogitsOf = Callable[[Tensor], Tensor]


def row_blocks(logits: Tensor) -> list[slice]:
    """Rows of logits [T, V] in blocks of at most `_AT_ONCE` logits."""
    return spans(logits.shape[0], max(1, _AT_ONCE // logits.shape[1]))


def logits_of(model: nn.Module) -> LogitsOf:
    """The function from token ids [S] to logits [S, V] of a Hugging Face causal LM.

    It records no gradients and keeps no cache.
    """

    def logits(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            output: Tensor = model(input_ids=tokens[None], use_cache=False).logits
        return output[0]  # [S, V]

    return logits


def check_logits(logits: Tensor, tokens: Tensor, *, name: str) -> None:
    """Refuse logits that do not belong to the tokens or hold NaN or Inf.

    Args:
        logits: [S, V].
        tokens: [S] int64.
        name: the logits' model, for the message.

    Raises:
        InputError: shapes differ, there is nothing to predict, a token lies outside the vocabulary,
            or a logit is not finite.
    """
    if (
        tokens.ndim != 1
        or logits.ndim != 2
        or logits.shape[0] != tokens.shape[0]
        or tokens.shape[0] < 2
    ):
        raise InputError(
            f"{name}: logits {list(logits.shape)} for tokens {list(tokens.shape)}",
            "give logits [S, V] for token ids [S], S at least 2",
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= logits.shape[1]:
        raise InputError(
            f"{name}: token ids span {low}..{high}, the vocabulary has {logits.shape[1]}",
            "use the model's own tokenizer",
        )
    # [S]
    finite = torch.cat([torch.isfinite(logits[rows]).all(dim=-1) for rows in row_blocks(logits)])
    if not finite.all():
        position = int((~finite).nonzero()[0])
        raise InputError(
            f"{name}: logits at position {position} hold NaN or Inf",
            "the weights or scales are damaged, or the dtype overflows; verify the artifact and "
            "try dtype float32",
        )


def token_nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """The negative log likelihood of every token after the first, in nats.

    Args:
        logits: [S, V]; row i predicts token i + 1, the last row is not used.
        tokens: [S] int64.

    Returns:
        [S - 1] float64.
    """
    parts = []
    for rows in row_blocks(logits[:-1]):
        predictions = logits[rows].float()  # [R, V]
        chosen = predictions.gather(1, tokens[1:][rows, None])[:, 0]
        parts.append((predictions.logsumexp(dim=-1) - chosen).double())
    return torch.cat(parts)


def perplexity(logits: LogitsOf, sequences: Iterable[Tensor], *, name: str = "model") -> float:
    """exp(sum of nll / number of predicted tokens) over all sequences.

    Args:
        logits: token ids [S] -> logits [S, V].
        sequences: int64 [S] each, S at least 2.
        name: the logits' model, for messages.

    Raises:
        InputError: there is no sequence, or `check_logits` refuses.
    """
    total, count = 0.0, 0
    for tokens in sequences:
        output = logits(tokens)
        check_logits(output, tokens, name=name)
        total += token_nll(output, tokens).sum().item()
        count += tokens.shape[0] - 1
    if not count:
        raise InputError("evaluation: no sequences", "give an evaluation text")
    return math.exp(total / count)
