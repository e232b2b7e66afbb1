"""Decoding one sequence, greedily or sampled with a generator of its own, with the model's own key-value cache."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quantflow.errors import InputError, UsageError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The filters apply in this order: temperature, top_k, top_p.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens whose probabilities together reach p, 0 < p <= 1; None keeps all.
        seed: of the generator; the same seed gives the same tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}", "use a positive number, or greedy decoding")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k={self.top_k}", "use 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}", "use 0 < top_p <= 1")


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities that a token is drawn with.

    Args:
        logits: [V].
        sampling: temperature, top_k and top_p are read.

    Returns:
        [V] float32, sum 1. Tokens as likely as the k-th are kept with it, as transformers does.
    """
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[0]:
        smallest = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = scores.sort()  # least likely first; the last is always kept
        beyond = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        beyond[-1] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter_(0, order, beyond), float("-inf"))
    return scores.softmax(dim=-1)


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_token_id: int | Collection[int] | None = None,
    stream: Callable[[int], None] | None = None,
) -> Tensor:
    """Continue a prompt.

    The prompt is one forward, every further token another; logits of the last position only are computed.

    Args:
        model: a Hugging Face causal LM, or one whose linears are QuantLinear.
        input_ids: [1, S] int64, S at least 1.
        max_new_tokens: at most so many tokens are added.
        sampling: None decodes greedily.
        eos_token_id: stop after any of these; it is part of the result.
        stream: called with each new token as soon as it is known.

    Returns:
        [1, S + n] int64, the prompt included.

    Raises:
        UsageError: shapes or counts that cannot be decoded, or that exceed the model's positions.
        InputError: the model's logits hold NaN.
    """
    _check(model, input_ids, max_new_tokens=max_new_tokens)
    stops = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    generator = None if sampling is None else torch.Generator(input_ids.device).manual_seed(sampling.seed)
    cache = DynamicCache(config=model.config)
    tokens, step = input_ids, input_ids
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]  # [V]
            if logits.isnan().any():
                raise InputError(
                    f"logits after {tokens.shape[1]} tokens hold NaN",
                    "verify the artifact, its weights or scales are damaged; or the dtype overflows, try float32",
                )
            if sampling is None:
                step = logits.argmax()[None, None]
            else:
                step = torch.multinomial(distribution(logits, sampling), 1, generator=generator)[None]
            tokens = torch.cat([tokens, step], dim=1)
            token = int(step)
            if stream is not None:
                stream(token)
            if token in stops:
                break
    return tokens


def _check(model: nn.Module, input_ids: Tensor, *, max_new_tokens: int) -> None:
    """Refuse what cannot be decoded.

    Raises:
        UsageError: naming the shape or the count.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise UsageError(f"input_ids: shape {list(input_ids.shape)}, [1, S] is decoded", "give one prompt of a token or more")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens={max_new_tokens}", "use 1 or more")
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    length = input_ids.shape[1] + max_new_tokens
    if positions is not None and length > positions:
        raise UsageError(
            f"prompt of {input_ids.shape[1]} + max_new_tokens={max_new_tokens}: the model has {positions} positions",
            "shorten the prompt or use fewer new tokens",
        )
