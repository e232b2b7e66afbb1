"""A request while it waits and runs: its tokens, the choice of the next one, the end of its text.

Everything here happens to one row alone, in tensors of one row, so that it gives the same bits
whatever else runs, and an exception is this row's alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.errors import UsageError
from quantflow.runtime.batching.request import FinishReason, PromptToken, TokenEvent, TokenLogprob
from quantflow.runtime.batching.stream import Stream
from quantflow.runtime.decoding.logits import NEVER
from quantflow.runtime.decoding.request import Request, allowed, choose
from quantflow.runtime.decoding.speculation import look_up
from quantflow.runtime.generate_job import Rules

_WORD = 32  # bits of an element of a mask

StopCheck = Callable[[Sequence[int]], str | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The model's scores after one position.

    Attributes:
        logits: [1, V] float32, which no reader changes.
        best: likeliest token, the lowest of several.
        log_total: log(sum(exp(logits))), so that logits - log_total are log-probabilities; NaN
            where a logit is.
    """

    logits: Tensor
    best: int
    log_total: float

    def logprob(self, token: int) -> float:
        """The log-probability of a token, in nats."""
        return float(self.logits[0, token]) - self.log_total

    def top(self, count: int) -> tuple[TokenLogprob, ...]:
        """The likeliest tokens, likeliest first."""
        if not count:
            return ()
        values, ids = self.logits[0].topk(min(count, self.logits.shape[1]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        return tuple(
            TokenLogprob(id=token, logprob=value - self.log_total) for token, value in pairs
        )


class BatchRow:
    """A request and how far it is.

    Attributes:
        stream: stream of its events.
        tokens: tokens of the prompt and generated tokens.
        computed: number of the tokens that have keys and values.
        guess: tokens that may follow, proposed by `request.lookup` or a draft; a step computes
            them beside the last token.
        input_tokens, total_tokens, priority, submitted, left, in_prefill: as in
            `quantflow.runtime.batching.scheduler.Schedulable`.
    """

    def __init__(self, stream: Stream, *, vocab_size: int, stop: StopCheck | None) -> None:
        """Begin with the prompt.

        Args:
            stream: stream that holds the request.
            vocab_size: V.
            stop: function from the generated tokens to the stop string that their text has come to
                hold; None: there are no stop strings.
        """
        request = stream.request
        self.stream = stream
        self.tokens = list(request.input_ids)
        self.computed = 0
        self.guess: list[int] = []
        self.input_tokens, self.total_tokens = len(request.input_ids), request.total_tokens
        self.priority, self.submitted = request.priority, stream.times.submitted
        self._vocab_size, self._stop = vocab_size, stop
        self._biased_ids = torch.tensor(list(request.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32)
        self._plain = request.sampling is None and request.mask is None and request.rules == Rules()
        self._prompt: list[PromptToken] = []
        # What quantflow/runtime/decoding computes on; the canvas is the text up to the last look,
        # and room for the rest.
        self._canvas = torch.zeros(1, request.total_tokens, dtype=torch.int64)
        self._drawn = 0
        self._decoding = Request(
            input_ids=self._text(),
            max_new_tokens=max(1, request.max_new_tokens),
            sampling=request.sampling,
            rules=request.rules,
            ends=request.ends,
        )
        self._generator = self._decoding.generator()

    @property
    def in_prefill(self) -> bool:
        """Whether tokens of the prompt are still to be computed."""
        return self.computed < self.input_tokens

    @property
    def left(self) -> int:
        """Tokens to compute before the next can be chosen, guessed tokens included."""
        return len(self.tokens) - self.computed + len(self.guess)

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.input_tokens

    @property
    def generated(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.input_tokens :]

    def wanted(self, count: int) -> int:
        """The number of the next `count` positions, the last ones, whose logits are needed."""
        if self.stream.request.prompt_logprobs and self.in_prefill:
            return count
        return 1 + len(self.guess) if count == self.left else 0

    def propose(self) -> None:
        """Guess what follows a text that is being decoded."""
        request = self.stream.request
        if request.lookup is not None:
            self.guess = look_up(
                self._text()[0], request.lookup, request.max_new_tokens - self.new_tokens - 1
            ).tolist()

    def prompt_scores(self, scores: Sequence[Scores], *, first: int) -> None:
        """Take the scores after prompt positions from `first` on.

        They give the log-probabilities of the tokens that follow these positions.
        """
        if not self._prompt:
            self._prompt.append(PromptToken(id=self.tokens[0], logprob=None))
        for position, score in enumerate(scores, start=first):
            if position + 1 < self.input_tokens:
                token = self.tokens[position + 1]
                top = score.top(self.stream.request.top_n)
                self._prompt.append(PromptToken(id=token, logprob=score.logprob(token), top=top))
        if len(self._prompt) == self.input_tokens:
            self.stream.prompt = tuple(self._prompt)

    def next(self, scores: Scores) -> TokenEvent:
        """Choose a token and append it.

        Raises:
            InputError: the logits hold NaN.
            UsageError: every token is forbidden.
            Exception: whatever the request's mask raises.
        """
        request, index = self.stream.request, self.new_tokens
        if request.max_new_tokens == 0:
            return TokenEvent(index=0, finish=FinishReason.LENGTH)
        token = self._choose(scores)
        event = TokenEvent(
            index=index, id=token, logprob=scores.logprob(token), top=scores.top(request.top_n)
        )
        self.tokens.append(token)
        if request.mask is not None:
            request.mask.advance(token)
        finish, stop = self._end(token)
        if finish is None:
            return event
        return TokenEvent(
            index=index, id=token, logprob=event.logprob, top=event.top, finish=finish, stop=stop
        )

    def _text(self) -> Tensor:
        """The tokens, [1, L] int64."""
        count = len(self.tokens)
        self._canvas[0, self._drawn : count] = torch.tensor(
            self.tokens[self._drawn :], dtype=torch.int64
        )
        self._drawn = count
        return self._canvas[:, :count]

    def _choose(self, scores: Scores) -> int:
        bias = self.stream.request.logit_bias
        if self._plain and scores.best not in bias and math.isfinite(scores.log_total):
            return self._best(scores)
        ruled = allowed(self._biased(scores.logits), self._text(), self._decoding)
        return int(choose(ruled, self._decoding, self._generator))

    def _best(self, scores: Scores) -> int:
        """The token with the highest biased logit, the lowest of several.

        The bias must not name `scores.best`. The biased tokens and `scores.best` are read alone: a
        pass over the vocabulary costs more than all else a row does.
        """
        if not len(self._biased_ids):
            return scores.best
        biased = scores.logits[0, self._biased_ids] + self._biases
        highest, own = biased.max(), scores.logits[0, scores.best]
        if highest < own:
            return scores.best
        lowest = int(self._biased_ids[biased == highest].min())
        return lowest if highest > own else min(lowest, scores.best)

    def _biased(self, logits: Tensor) -> Tensor:
        """The logits with the request's own bias and mask."""
        request = self.stream.request
        if request.logit_bias:
            logits = logits.clone()
            logits[0, self._biased_ids] += self._biases
        bits = None if request.mask is None else request.mask.allowed(self.generated)
        if bits is not None:
            logits = logits.masked_fill(~unpacked(bits, self._vocab_size), NEVER)
            if bool((logits == NEVER).all()):
                raise UsageError(
                    "mask: every token is forbidden", "use a grammar that the tokens can spell"
                )
        return logits

    def _end(self, token: int) -> tuple[FinishReason | None, str | None]:
        request = self.stream.request
        if token in request.ends:
            return FinishReason.EOS, None
        stop = None if self._stop is None else self._stop(self.generated)
        if stop is not None:
            return FinishReason.STOP, stop
        return (FinishReason.LENGTH if self.new_tokens == request.max_new_tokens else None), None


def unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """A mask [V] bool from [ceil(V / 32)] int32: token t is bit t % 32 of element t // 32.

    Raises:
        UsageError: another shape or dtype.
    """
    words = -(-vocab_size // _WORD)
    if bits.dtype != torch.int32 or bits.shape != (words,):
        raise UsageError(
            f"mask: {bits.dtype} {list(bits.shape)}, int32 [{words}] belongs",
            f"pack {vocab_size} tokens",
        )
    return (bits[:, None] >> torch.arange(_WORD) & 1).flatten()[:vocab_size].bool()
