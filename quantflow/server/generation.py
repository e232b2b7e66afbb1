"""The answer to one prompt: a request is checked, rows are submitted, tokens get their text.

    asked  ->  prepare: admission, checks, tokens, grammar  ->  Answer: rows of the engine
           ->  pieces, or all of it

A row that nobody waits for any more is cancelled: an `Answer` is a context manager, and its rows
end with it.
"""

import math
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from quantflow.errors import EngineError, OverloadedError, QuantflowError
from quantflow.runtime.batching import BatchRequest, FinishReason, PromptToken, Stream, TokenLogprob
from quantflow.runtime.generate_job import Lookup
from quantflow.server.errors import Refused, failed, invalid, overloaded
from quantflow.server.grammar import NOT_SUPPORTED, AfterReasoning, AllowedTokens
from quantflow.server.metrics import CountedRequest
from quantflow.server.models import ServedModel
from quantflow.server.request_log import current_request
from quantflow.server.settings import Limits
from quantflow.server.text import AnswerText
from quantflow.server.validation import Asked, Bias, check, check_truncate, new_tokens

LEFT_OUT = "x-grammar-left-out"

ENTRY_BYTES = 8  # of an entry of logit_bias, at least


@dataclass(frozen=True, kw_only=True)
class AnswerPiece:
    """One token of an answer.

    Attributes:
        row: number of its continuation.
        index: number of the token in the continuation, from 0.
        id, logprob: the token, and its log-probability.
        special: whether it is a special token, or the end token of the text.
        hidden: whether it has no text in the answer.
        text: decoded text that the token completes.
        shown: text that may be shown now, with stop strings treated as the request says.
        top: likeliest tokens.
        finish: reason why the continuation ends with it; None where it goes on.
    """

    row: int
    index: int
    id: int
    logprob: float
    special: bool
    hidden: bool
    text: str
    shown: str
    top: tuple[TokenLogprob, ...]
    finish: FinishReason | None


@dataclass(kw_only=True)
class Continuation:
    """One row of an answer.

    Attributes:
        stream: stream of the engine.
        seed: seed of its samples; None where tokens are not drawn.
        text: text so far.
        hidden: tokens that have no text.
        kept_ends: tokens whose text stays where they end the answer.
        pieces: tokens so far.
        times: time of each of them, in seconds of `time.monotonic`.
    """

    stream: Stream
    seed: int | None
    text: AnswerText
    hidden: frozenset[int] = frozenset()
    kept_ends: frozenset[int] = frozenset()
    pieces: list[AnswerPiece] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def finish(self) -> FinishReason:
        """The reason of its end; a prompt that is only echoed ends by its length."""
        return (self.pieces[-1].finish if self.pieces else None) or FinishReason.LENGTH

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability, by which TGI chooses the best of several."""
        return sum(piece.logprob for piece in self.pieces) / max(1, len(self.pieces))


@dataclass(kw_only=True)
class Timings:
    """Seconds of a request: until it was checked, until it ran, and while it ran."""

    begin: float = field(default_factory=time.monotonic)
    checked: float = 0.0
    queue: float = 0.0
    inference: float = 0.0
    total: float = 0.0

    @property
    def validation(self) -> float:
        """Seconds from the request to the end of its checks."""
        return self.checked - self.begin


class Admission:
    """The count of rows in the server; more than `most` are refused at once."""

    def __init__(self, most: int) -> None:
        """Begin with no rows."""
        self.most = most
        self.rows = 0

    def enter(self, count: int) -> None:
        """Add rows to the count.

        Raises:
            Refused: there would be too many; kind overloaded.
        """
        if not self.has_room(count):
            raise overloaded()
        self.rows += count

    def has_room(self, count: int) -> bool:
        """Whether so many rows may enter."""
        return self.rows + count <= self.most

    def leave(self, count: int) -> None:
        """Subtract rows from the count."""
        self.rows -= count

    @contextmanager
    def held(self, count: int) -> Iterator[None]:
        """Count other work, such as making tokens, as so many rows during the block.

        Raises:
            Refused: there would be too many; kind overloaded.
        """
        self.enter(count)
        try:
            yield
        finally:
            self.leave(count)


class Answer:
    """A prompt with its continuations.

    Attributes:
        model: model that answers.
        prompt: tokens of the prompt.
        rows: continuations.
        timings: timings of the request.
        new_tokens: largest number of tokens of a continuation.
        left_out: what the grammar's mask does not hold to, in sentences.
        counted: its request among the metrics; None where nothing counts it.
    """

    def __init__(
        self, model: ServedModel, admission: Admission, *, count: int, timings: Timings
    ) -> None:
        """Enter the rows into the count.

        Raises:
            Refused: there would be too many; kind overloaded.
        """
        admission.enter(count)
        self.model, self.timings = model, timings
        self.prompt: tuple[int, ...] = ()
        self.rows: list[Continuation] = []
        self.new_tokens = 0
        self.left_out: tuple[str, ...] = ()
        self.counted: CountedRequest | None = None
        self._admission, self._count = admission, count
        model.rows += count
        if (request := current_request()) is not None:
            request.answers.append(self)

    def __enter__(self) -> Self:
        """The answer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel rows that still run, let the next request in, and count how this one ended."""
        if self.counted is not None:
            self.counted.end(error, self)
        for row in self.rows:
            row.stream.cancel()
        self.rows_done()

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP header that says what a schema asked for and the answer does not hold to."""
        told = " ".join("; ".join(self.left_out).split()).encode("ascii", "replace").decode()
        return {LEFT_OUT: told[:500]} if told else {}

    def rows_done(self) -> None:
        """Leave the count of rows; a second call does nothing."""
        self._admission.leave(self._count)
        self.model.rows -= self._count
        self._count = 0

    @property
    def prefill(self) -> tuple[PromptToken, ...]:
        """The prompt's tokens with their log-probabilities, where the request wants them."""
        return self.rows[0].stream.prompt

    @property
    def size(self) -> int:
        """How much JSON the answer is: its tokens so far, and the likeliest ones beside each."""
        tokens = len(self.prefill) + sum(len(row.pieces) for row in self.rows)
        return tokens * (1 + self.rows[0].stream.request.top_n)

    async def pieces(self, row: int) -> AsyncIterator[AnswerPiece]:
        """Yield the tokens of a continuation as they come.

        Raises:
            Refused: of kind generation, when the engine fails it; of kind validation, when its
                grammar does.
        """
        one = self.rows[row]
        special = self.model.vocabulary.special
        async for event in one.stream:
            if event.finish is FinishReason.ERROR:
                raise refusal_of(event.error)
            if event.finish is FinishReason.CANCELLED:
                raise Refused("incomplete_generation", "Incomplete generation")
            if event.id is None:
                self._time()
                continue
            one.times.append(time.monotonic())
            # an end token is no part of the text, whether the tokenizer calls it special or not
            ends = event.finish is FinishReason.EOS
            hidden = ends and event.id not in one.kept_ends
            text, shown = ("", "") if hidden else one.text.put(event.id)
            if event.finish is not None:
                left, last = one.text.end(stopped=event.finish is FinishReason.STOP)
                text, shown = text + left, shown + last
            piece = AnswerPiece(
                row=row,
                index=event.index,
                id=event.id,
                logprob=event.logprob or 0.0,
                special=hidden or event.id in special,
                hidden=hidden or event.id in one.hidden,
                text=text
                or (self.model.vocabulary.text(event.id) if hidden or event.id in special else ""),
                shown=shown,
                top=event.top,
                finish=event.finish,
            )
            one.pieces.append(piece)
            if event.finish is not None:
                self._time()
            yield piece

    async def finish(self) -> None:
        """Wait for all continuations.

        Raises:
            Refused: see `pieces`; the others are cancelled.
        """
        for row in range(len(self.rows)):
            async for _ in self.pieces(row):
                pass

    def best(self) -> int:
        """The continuation with the highest mean log-probability."""
        return max(range(len(self.rows)), key=lambda row: self.rows[row].mean_logprob)

    def _time(self) -> None:
        now = time.monotonic()
        times = [row.stream.times for row in self.rows]
        admitted = max((one.admitted or now) for one in times)
        finished = max((one.finished or now) for one in times)
        self.timings.queue = max(0.0, admitted - self.timings.checked)
        self.timings.inference = finished - admitted
        self.timings.total = now - self.timings.begin


@dataclass(frozen=True, kw_only=True)
class Service:
    """The service that answers for every route.

    Attributes:
        limits: limits of requests.
        admission: count of rows.
        grammars: whether requests may have a grammar.
        lookup: settings of draft tokens; None without drafts.
    """

    limits: Limits
    admission: Admission
    grammars: bool = True
    lookup: Lookup | None = None

    async def answer(
        self,
        model: ServedModel,
        asked: Asked,
        *,
        text: str | None,
        adapter: str | None = None,
        tokens: Sequence[int] | None = None,
        rendered: bool = False,
        keeps_stop: bool = True,
        kept: Collection[str] = (),
        reasoning: str | None = None,
        timings: Timings | None = None,
    ) -> Answer:
        """Check a request and submit its rows.

        Args:
            model: model that answers.
            asked: request of the client.
            text: prompt; None where `tokens` is the prompt.
            adapter: one of the model's LoRA adapters, or None.
            tokens: tokens of the prompt.
            rendered: whether the text comes from a chat template, which writes special tokens
                itself.
            keeps_stop: whether an answer ends with its stop string, not before it.
            reasoning: text that ends the reasoning within which the answer begins; a grammar holds
                behind it.
            kept: texts of special tokens that are part of the answer's text.
            timings: timings that began when the request came.

        Returns:
            An answer to be used as a context manager, whose rows are submitted.

        Raises:
            Refused: the request is not answered; the error has the message for the client.
        """
        count = asked.rows
        timings = timings or Timings()
        check(asked, self.limits, text=text, float8=model.float8)
        asked = asked.with_defaults(model.defaults)
        answer = Answer(model, self.admission, count=count, timings=timings)
        try:
            check_truncate(asked, max_input_tokens=model.max_input_tokens)
            special = not rendered if asked.special is None else asked.special
            bounded = asked.truncate is None  # a text that is truncated may be of any length
            ids = (
                tuple(tokens or ())
                if text is None
                else await model.encode(text, rendered=not special, bounded=bounded)
            )
            ids = ids if asked.truncate is None else ids[-asked.truncate :]
            most = {
                "max_input_tokens": model.max_input_tokens,
                "max_total_tokens": model.max_total_tokens,
            }
            answer.new_tokens = new_tokens(asked, prompt=len(ids), **most)
            vocabulary = model.loaded.decoder.vocab_size
            wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise invalid(f"token {wrong} is not one of {vocabulary}")
            answer.prompt = ids
            masks = await self._masks(model, asked, count, reasoning)
            answer.left_out = getattr(masks[0], "left_out", ())
            given = asked.logit_bias or {}
            bias = await model.workers.sized(
                lambda: _bias(given, vocabulary), nbytes=ENTRY_BYTES * len(given)
            )
            hidden = frozenset[int]() if asked.shows_special else model.vocabulary.hidden_but(kept)
            ends = _ends(asked, model.loaded.eos_token_ids, vocabulary)
            rules = asked.rules(bad_words=await model.words(asked.bad_words))
            keeps_stop = keeps_stop if asked.keeps_stop is None else asked.keeps_stop
            kept_ends = set(asked.stop_token_ids) if asked.keeps_stop else set()
            timings.checked = time.monotonic()
            first_seed = secrets.randbits(63) if asked.seed is None else asked.seed
            for row in range(count):
                seed = (first_seed + row) % 2**64
                sampling = asked.sampling(seed)
                request = BatchRequest(
                    input_ids=ids,
                    max_new_tokens=answer.new_tokens,
                    sampling=sampling,
                    rules=rules,
                    logit_bias=bias,
                    ends=ends,
                    stop=asked.stop,
                    top_n=asked.top_n_tokens or 0,
                    # the first row's are enough; a row without new tokens holds nothing else
                    prompt_logprobs=asked.prefill and (row == 0 or not answer.new_tokens),
                    mask=masks[row],
                    lookup=self.lookup,
                    adapter=adapter,
                )
                grows = AnswerText(
                    model.tokenizer, ids, stops=asked.stop, keeps_stop=keeps_stop, hidden=hidden
                )
                answer.rows.append(
                    Continuation(
                        stream=_submit(model, request),
                        seed=None if sampling is None else seed,
                        text=grows,
                        hidden=model.vocabulary.special if hidden is None else hidden,
                        kept_ends=frozenset(kept_ends.difference(model.loaded.eos_token_ids)),
                    )
                )
        except BaseException:
            answer.__exit__(None, None, None)
            raise
        return answer

    async def _masks(
        self, model: ServedModel, asked: Asked, count: int, reasoning: str | None
    ) -> list[Any]:
        masks = await self._grammar_masks(model, asked, count, reasoning)
        tokens = asked.allowed_token_ids
        if tokens is None:
            return masks
        size = model.loaded.decoder.vocab_size
        return await model.workers.sized(
            lambda: [_only(tokens, size, mask) for mask in masks], nbytes=ENTRY_BYTES * len(tokens)
        )

    async def _grammar_masks(
        self, model: ServedModel, asked: Asked, count: int, reasoning: str | None
    ) -> list[Any]:
        if asked.grammar is None:
            return [None] * count
        if not self.grammars:
            raise invalid(NOT_SUPPORTED)
        masks = [await model.compiled(asked.grammar) for _ in range(count)]
        if reasoning is None:
            return masks
        return [AfterReasoning(mask, model.tokenizer, reasoning) for mask in masks]


def refusal_of(error: BaseException | None) -> Refused:
    """The refusal for an error that the engine raised for a row."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, QuantflowError):
        return failed(error.cause)
    # the message of a foreign error stays in the server
    return failed("" if error is None else type(error).__name__)


def _submit(model: ServedModel, request: BatchRequest) -> Stream:
    try:
        return model.engine.submit(request)
    except OverloadedError:
        raise overloaded() from None
    except EngineError as error:
        raise failed(error.cause) from error
    except QuantflowError as error:
        raise invalid(error.cause) from error


def _ends(asked: Asked, own: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end an answer: the model's own, and those of the request.

    A grammar ends at the model's own, also in a request that ignores them: nothing may follow.

    Raises:
        Refused: one is no token.
    """
    wrong = next((token for token in asked.stop_token_ids if token >= vocab_size), None)
    if wrong is not None:
        raise invalid(f"`stop_token_ids`: {wrong} is not one of {vocab_size} tokens")
    kept = () if asked.ignores_ends and asked.grammar is None else own
    return tuple(dict.fromkeys((*kept, *asked.stop_token_ids)))


def _only(tokens: Sequence[int], vocab_size: int, mask: Any) -> AllowedTokens:
    """The mask of a request's `allowed_token_ids`.

    Raises:
        Refused: one is no token.
    """
    if (highest := max(tokens)) >= vocab_size:
        raise invalid(f"`allowed_token_ids`: {highest} is not one of {vocab_size} tokens")
    return AllowedTokens(tokens, vocab_size=vocab_size, mask=mask)


def _bias(bias: Bias, vocab_size: int) -> dict[int, float]:
    """OpenAI's logit_bias by token; llama.cpp's pairs, whose `false` forbids a token.

    Raises:
        Refused: a key is no token, or a value lies outside -100 to 100.
    """
    by_token = {}
    for key, value in bias.items() if isinstance(bias, Mapping) else bias:
        name = str(key)
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= vocab_size:
            raise invalid(f"`logit_bias`: {name[:20]!r} is not one of {vocab_size} tokens")
        if value is not False and not -100 <= value <= 100:
            raise invalid("`logit_bias` must be >= -100.0 and <= 100.0")
        by_token[int(name)] = -math.inf if value is False else float(value)
    return by_token
