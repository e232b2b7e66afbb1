"""A request of a running batch, and the events that it is sent: frozen records without a tensor.

`Sampling` and `Rules` are those of `quantflow generate` (quantflow/runtime/generate_job.py), which
checks their ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from quantflow.runtime.generate_job import Lookup, Rules, Sampling, require


class FinishReason(StrEnum):
    """Why a request ended. The first three are TGI's words."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenMask(Protocol):
    """A grammar that follows one request and says which tokens may come next.

    The engine's thread alone calls it.
    """

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """The tokens that may come next.

        Args:
            tokens: generated tokens so far, without the prompt.

        Returns:
            [ceil(V / 32)] int32 on the CPU; token t may come where bit t % 32 of element t // 32 is
            set. None: any may.
        """

    def advance(self, token: int) -> None:
        """Take a token that was chosen; the next call, if any, is `allowed` with it at the end."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A prompt, and how it is continued.

    Attributes:
        input_ids: the prompt, one token or more.
        max_new_tokens: tokens that are added at most; 0 computes `Stream.prompt` alone.
        sampling: None takes the most likely token. A row draws with a generator of its own, seeded
            by `sampling.seed`.
        rules: penalties, bad words, shortest lengths.
        logit_bias: token -> number that is added to its logit, before the rules; minus infinity
            forbids the token.
        ends: tokens that end the text and are its last; empty ignores them.
        stop: strings that end the text as soon as it holds one; the engine needs a tokenizer then.
        top_n: tokens whose log-probabilities are sent beside the chosen one, likeliest first.
        prompt_logprobs: compute the log-probability of every token of the prompt. Such a request
            shares no prefix.
        mask: a grammar of this request alone, or None.
        lookup: speculation by the text itself; the tokens and their log-probabilities are the same
            without it.
        adapter: the name of a LoRA adapter that the decoder has (`LeanDecoder.adapt`), or None.
        priority: classes of higher priority are admitted first; see `Scheduler` for what keeps the
            others from starving.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    rules: Rules = Rules()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_n: int = 0
    prompt_logprobs: bool = False
    mask: TokenMask | None = None
    lookup: Lookup | None = None
    adapter: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        """Refuse a request that no engine can run.

        Raises:
            UsageError: naming the value.
        """
        require(len(self.input_ids) > 0, "input_ids: no token", "give a prompt of a token or more")
        least = 0 if self.prompt_logprobs else 1
        require(
            self.max_new_tokens >= least,
            f"max_new_tokens={self.max_new_tokens}",
            f"use {least} or more",
        )
        require(self.top_n >= 0, f"top_n={self.top_n}", "use 0 or more")
        require(all(self.stop), "stop: an empty string", "leave it out")
        # NaN is not less either
        usable = all(bias < float("inf") for bias in self.logit_bias.values())
        require(usable, f"logit_bias={dict(self.logit_bias)}", "use numbers, or minus infinity")

    @property
    def total_tokens(self) -> int:
        """Tokens that the request may come to, which budgets count."""
        return len(self.input_ids) + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and its log-probability in nats under the model's own distribution.

    That is the softmax of the logits as the model gives them, before bias, mask, penalties,
    temperature and filters, so that it says the same of a text however the text was drawn. The
    first token of a prompt has None.
    """

    id: int
    logprob: float | None


@dataclass(frozen=True, kw_only=True)
class PromptToken(TokenLogprob):
    """A token of a prompt.

    Attributes:
        top: the `top_n` likeliest tokens in its place, likeliest first; none in the first place.
    """

    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One generated token, or the end of a request that a token did not end.

    Attributes:
        index: number of the token among the generated ones, from 0; for an event without a token,
            the number of generated tokens.
        id: the token; None where the request was cancelled, failed, or asked for none.
        logprob: log-probability of the token, as `TokenLogprob` has it.
        top: the `top_n` likeliest tokens, likeliest first.
        finish: why the request ends with this event; None: it goes on.
        stop: the stop string that the text holds now, where that ended it. The text of all tokens
            up to this one holds it; the last token may go on beyond its end.
        error: what failed, with `finish` error.
    """

    index: int
    id: int | None = None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None
    error: Exception | None = None
