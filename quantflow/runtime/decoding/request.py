"""A request, and the three steps that all methods share.

The steps apply the rules, choose a token, and see whether a row has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.errors import InputError, UsageError
from quantflow.runtime.decoding import logits as on
from quantflow.runtime.decoding.options import distribution
from quantflow.runtime.generate_job import Rules, Sampling


@dataclass(kw_only=True)
class Counts:
    """How many tokens speculation proposed, and how many of them were taken."""

    proposed: int = 0
    taken: int = 0

    @property
    def acceptance(self) -> float | None:
        """The share of proposed tokens that were taken; None where none was proposed."""
        return self.taken / self.proposed if self.proposed else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Prompts, and how they are continued.

    Attributes:
        input_ids: [B, S] int64, prompts padded on the left.
        padding: [B] int64, number of padding tokens at the left of each; None: none.
        max_new_tokens: tokens that are added at most.
        sampling: how tokens are drawn; None takes the most likely token.
        rules: penalties and forbidden tokens.
        ends: tokens that end a text, and are its last.
        stop: function from the new tokens of a row to whether its text ends there; None: it does
            not.
        pad: fills a row after its end.
        returned: sequences per prompt.
        stream: called with each token of the only row as soon as it is known.
        counts: numbers of proposed and taken tokens, which speculation adds to.
    """

    input_ids: Tensor
    padding: Tensor | None = None
    max_new_tokens: int
    sampling: Sampling | None = None
    rules: Rules = Rules()
    ends: tuple[int, ...] = ()
    stop: Callable[[Sequence[int]], bool] | None = None
    pad: int = 0
    returned: int = 1
    stream: Callable[[int], None] | None = None
    counts: "Counts | None" = None

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt, S, padding included."""
        return self.input_ids.shape[1]

    @property
    def capacity(self) -> int:
        """Columns of the longest result."""
        return self.prompt_length + self.max_new_tokens

    def generator(self) -> torch.Generator | None:
        """The seeded generator that tokens are drawn with; None where none are drawn."""
        return (
            None
            if self.sampling is None
            else torch.Generator(self.input_ids.device).manual_seed(self.sampling.seed)
        )

    def repeated(self, times: int) -> "Request":
        """The request with every prompt `times` times, one after the other."""
        padding = None if self.padding is None else self.padding.repeat_interleave(times)
        return replace(
            self, input_ids=self.input_ids.repeat_interleave(times, dim=0), padding=padding
        )

    def row(self, index: int) -> "Request":
        """The request with one prompt only, its padding taken off."""
        begin = 0 if self.padding is None else int(self.padding[index])
        return replace(self, input_ids=self.input_ids[index : index + 1, begin:], padding=None)

    def canvas(self) -> Tensor:
        """The prompts with room for what follows, [B, S + max_new_tokens], filled with `pad`."""
        room = self.input_ids.new_full((self.input_ids.shape[0], self.max_new_tokens), self.pad)
        return torch.cat([self.input_ids, room], dim=1)


def allowed(logits: Tensor, tokens: Tensor, request: Request) -> Tensor:
    """The logits with the rules applied.

    Args:
        logits: [B, V], scores of the token after `tokens`.
        tokens: [B, L], prompts and generated tokens, in the rows of `request`.
        request: rules, prompts and ends.

    Raises:
        InputError: logits that hold NaN.
        UsageError: rules that forbid every token.
    """
    length, rules = tokens.shape[1], request.rules
    if logits.isnan().any():
        raise InputError(
            f"logits after {length} tokens hold NaN",
            "verify the artifact, its weights or scales are damaged; or the dtype overflows, try "
            "float32",
        )
    if rules == Rules():
        return logits
    if rules.repetition_penalty != 1:
        logits = on.repetition_penalty(
            logits, tokens, rules.repetition_penalty, padding=request.padding
        )
    if rules.frequency_penalty or rules.presence_penalty:
        generated = tokens[:, request.prompt_length :]
        logits = on.frequency_penalty(
            logits, generated, frequency=rules.frequency_penalty, presence=rules.presence_penalty
        )
    if rules.no_repeat_ngram_size:
        logits = on.no_repeat_ngrams(
            logits, tokens, rules.no_repeat_ngram_size, padding=request.padding
        )
    if rules.bad_words:
        logits = on.ban_words(logits, tokens, rules.bad_words, padding=request.padding)
    logits = on.ban_tokens(logits, request.ends, rows=_too_short(tokens, request))
    if (logits.amax(dim=-1) == on.NEVER).any():
        raise UsageError(
            f"rules: every token is forbidden after {length} tokens",
            "forbid fewer words or n-grams",
        )
    return logits


def choose(scores: Tensor, request: Request, generator: torch.Generator | None) -> Tensor:
    """The next token of each row, [B] int64. scores: [B, V]."""
    if request.sampling is None:
        return scores.argmax(dim=-1)
    return torch.multinomial(distribution(scores, request.sampling), 1, generator=generator)[:, 0]


def ended(tokens: Tensor, request: Request) -> Tensor:
    """Whether each row ends with its last token, [N] bool.

    Args:
        tokens: [N, L] with at least one new token.
        request: ends and stop strings.
    """
    last = tokens[:, -1]
    done = torch.zeros_like(last, dtype=torch.bool)
    for end in request.ends:
        done |= last == end
    if request.stop is not None:
        stopped = [request.stop(row) for row in tokens[:, request.prompt_length :].tolist()]
        done |= torch.tensor(stopped, device=done.device)
    return done


def _too_short(tokens: Tensor, request: Request) -> Tensor:
    """Whether each row is too short to end, [B] bool; padding is not counted. tokens: [B, L]."""
    rules, length = request.rules, tokens.shape[1]
    real = torch.full_like(tokens[:, 0], length)
    if request.padding is not None:
        real = real - request.padding
    return (real < rules.min_length) | (length - request.prompt_length < rules.min_new_tokens)
