"""Pure functions on logits: [B, V] in, a new [B, V] out. A token at minus infinity is never chosen.

Filters and penalties agree with transformers' processors of the same name wherever those are
defined; frequency and presence penalties are OpenAI's, which count the generated tokens only.
Padding never counts as text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = float("-inf")
# tokens that are looked at first: a vocabulary of 32000 takes 50 times as long to sort
_NUCLEUS = 1024


def top_k(logits: Tensor, count: int, *, least: int = 1) -> Tensor:
    """Keep the `count` likeliest tokens, at least `least`.

    Tokens as likely as the last of them are kept too.
    """
    smallest = logits.topk(min(max(count, least), logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, NEVER)


def top_p(logits: Tensor, mass: float, *, least: int = 1) -> Tensor:
    """Keep the likeliest tokens that together reach `mass`.

    Nucleus sampling: Holtzman et al. 2020, section 3.1.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    for count in (min(_NUCLEUS, logits.shape[-1]), logits.shape[-1]):
        values, order = logits.topk(count)  # likeliest first
        share = (values - total).exp()
        before = share.cumsum(dim=-1) - share  # what the likelier ones hold
        if (before[..., -1] >= mass).all():
            break
    inside = before < mass
    inside[..., :least] = True
    return torch.full_like(logits, NEVER).scatter(-1, order, values.masked_fill(~inside, NEVER))


def min_p(logits: Tensor, share: float, *, least: int = 1) -> Tensor:
    """Keep tokens that are at least `share` times as likely as the likeliest.

    Source: Nguyen et al. 2024.
    """
    probabilities = logits.softmax(dim=-1)
    unlikely = probabilities < share * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(unlikely.scatter(-1, probabilities.topk(least).indices, False), NEVER)


def top_n_sigma(logits: Tensor, count: float, *, least: int = 1) -> Tensor:
    """Keep tokens whose logits lie at most `count` standard deviations below the highest.

    Mean and deviation are those of the tokens that are not forbidden, as in llama.cpp. Source: Tang
    et al. 2024, equation 4.
    """
    there = logits != NEVER
    number = there.sum(dim=-1, keepdim=True)
    mean = logits.where(there, 0).sum(dim=-1, keepdim=True) / number
    spread = (logits.where(there, mean) - mean).square().sum(dim=-1, keepdim=True) / number
    low = logits < logits.amax(dim=-1, keepdim=True) - count * spread.sqrt()
    return logits.masked_fill(low.scatter(-1, logits.topk(least).indices, False), NEVER)


def typical_p(logits: Tensor, mass: float, *, least: int = 1) -> Tensor:
    """Keep the tokens whose information is closest to the expected, until they reach `mass`.

    Source: Meister et al. 2022, equation 11.
    """
    log_p = logits.log_softmax(dim=-1)
    entropy = -(log_p * log_p.exp()).nansum(dim=-1, keepdim=True)  # 0 * log 0 is 0 here
    distance, order = (-log_p - entropy).abs().sort()
    reached = logits.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (reached < mass).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    unusual = distance > distance.gather(-1, last)
    unusual[..., :least] = False
    return logits.masked_fill(unusual.scatter(-1, order, unusual), NEVER)


def count_tokens(tokens: Tensor, padding: Tensor | None, *, vocab_size: int) -> Tensor:
    """The number of times that each token stands in each row, padding left out.

    Args:
        tokens: [B, L] int64.
        padding: [B], number of padding tokens at the left of each row; None: none.
        vocab_size: V; larger ids, of an embedding longer than the head, are not counted.

    Returns:
        [B, V] float32.
    """
    places = tokens.clamp(max=vocab_size)
    if padding is not None:
        places = places.masked_fill(
            torch.arange(tokens.shape[1], device=tokens.device) < padding[:, None], vocab_size
        )
    # a last column takes padding and larger ids, and is thrown away
    counts = torch.zeros(tokens.shape[0], vocab_size + 1, device=tokens.device)
    return counts.scatter_add(1, places, torch.ones_like(places, dtype=counts.dtype))[
        :, :vocab_size
    ]


def repetition_penalty(
    logits: Tensor, tokens: Tensor, penalty: float, *, padding: Tensor | None
) -> Tensor:
    """Make the tokens of the text so far less likely.

    Positive logits are divided by the penalty, negative ones multiplied (CTRL, section 4.1).
    """
    seen = count_tokens(tokens, padding, vocab_size=logits.shape[-1]) > 0
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def frequency_penalty(
    logits: Tensor, generated: Tensor, *, frequency: float, presence: float
) -> Tensor:
    """Subtract `frequency` for every time a token was generated, and `presence` once if it was.

    Args:
        logits: [B, V].
        generated: [B, n].
        frequency: penalty for each time.
        presence: penalty once.
    """
    counts = count_tokens(generated, None, vocab_size=logits.shape[-1])
    return logits - frequency * counts - presence * (counts > 0)


def no_repeat_ngrams(
    logits: Tensor, tokens: Tensor, size: int, *, padding: Tensor | None
) -> Tensor:
    """Forbid every token that would complete an n-gram of `size` tokens that the row already has.

    Args:
        logits: [B, V].
        tokens: [B, L].
        size: tokens of an n-gram.
        padding: [B], number of padding tokens at the left of each row; None: none.
    """
    length, vocab_size = tokens.shape[1], logits.shape[-1]
    if length < size:
        return logits
    windows = tokens.unfold(1, size, 1)  # [B, W, size]
    begun = (windows[..., :-1] == tokens[:, None, length + 1 - size :]).all(dim=-1)  # [B, W]
    if padding is not None:
        begun &= torch.arange(windows.shape[1], device=tokens.device) >= padding[:, None]
    lasts = torch.where(begun, windows[..., -1].clamp(max=vocab_size), vocab_size)
    banned = torch.zeros(
        logits.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device
    ).scatter(1, lasts, True)
    return logits.masked_fill(banned[:, :vocab_size], NEVER)


def ban_words(
    logits: Tensor, tokens: Tensor, words: Sequence[Sequence[int]], *, padding: Tensor | None
) -> Tensor:
    """Forbid the last token of each word where the row ends with the tokens before it.

    Args:
        logits: [B, V].
        tokens: [B, L].
        words: tokens of each word.
        padding: [B], number of padding tokens at the left of each row; None: none.
    """
    result = logits.clone()
    for word in words:
        start = tokens.shape[1] - (len(word) - 1)
        if start < 0:
            continue
        rows = torch.ones_like(tokens[:, 0], dtype=torch.bool)  # all rows for a word of one token
        for column, token in enumerate(word[:-1], start=start):
            rows &= tokens[:, column] == token
        if padding is not None:
            rows &= padding <= start
        result[:, word[-1]] = result[:, word[-1]].masked_fill(rows, NEVER)
    return result


def ban_tokens(logits: Tensor, banned: Sequence[int], *, rows: Tensor) -> Tensor:
    """Forbid tokens in the rows where `rows`, [B] bool, is true."""
    result = logits.clone()
    for token in banned:
        result[:, token] = result[:, token].masked_fill(rows, NEVER)
    return result
