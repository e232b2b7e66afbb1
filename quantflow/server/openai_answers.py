"""Answers as OpenAI's clients read them: whole, or as the chunks of a stream."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from quantflow.runtime.batching import FinishReason, TokenLogprob
from quantflow.server import tools as tooling
from quantflow.server.generation import Answer, AnswerPiece, Continuation
from quantflow.server.models import ServedModel

_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


class AnswerWriter(Protocol):
    """Makes JSON of answers; the two interfaces differ in what a choice is."""

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Return answers as a whole, of each the best `count` continuations."""

    def begin(self, index: int) -> list[str]:
        """Return the events before the tokens of a choice."""

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """Return the events of one token."""

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """Return one event with these choices."""


class Head:
    """What all JSON of one answer begins with."""

    def __init__(self, model: ServedModel, *, name: str, prefix: str) -> None:
        """Name the answer, and what answers."""
        digest = str(model.manifest.get("digest", ""))[:16]
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"fp_{digest}",
        }

    def whole(self, kind: str, choices: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a whole answer."""
        numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
        return {"object": kind, **self._head, "choices": numbered, "usage": usage(answers)}

    def event(self, kind: str, choices: list[dict[str, Any]], usage: Any) -> str:
        """Return an event of a stream."""
        more = {} if usage is None else {"usage": usage}
        return json.dumps({"object": kind, **self._head, "choices": choices, **more}, ensure_ascii=False)


class ChatWriter:
    """Choices of a chat. A text that may be a call of a tool is held back until it is known whether it is."""

    def __init__(self, model: ServedModel, *, name: str, tools: Sequence[Any], holds_back: bool, logprobs: bool) -> None:
        """Take what the answer may hold.

        Args:
            model: that answers.
            name: of the model or of its adapter, as the request has it.
            tools: that it was shown.
            holds_back: the answer is a call for certain.
            logprobs: tokens have their log-probabilities.
        """
        self._model, self._tools, self._holds_back, self._logprobs = model, tools, holds_back and bool(tools), logprobs
        self._head, self._told = Head(model, name=name, prefix="chatcmpl"), dict[int, int]()

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Return answers as a whole."""
        choices = [self._choice(row) for answer in answers for row in best_rows(answer, count)]
        return self._head.whole("chat.completion", choices, answers)

    def begin(self, index: int) -> list[str]:
        """Return the event that says who speaks."""
        return [self.event([_chunk(index, {"role": "assistant", "content": ""})])]

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """Return the events of one token."""
        row, events = answer.rows[piece.row], []
        calls = self._calls(row.text.text) if piece.finish else []
        told, logprobs = self._told.get(index, 0), None
        if self._logprobs and not _ends(piece):
            logprobs = {"content": [chat_logprob(self._model, piece)]}
        held = self._holds_back or (self._tools and tooling.may_be_call(row.text.text)) or calls
        shown = "" if held and not (piece.finish and not calls) else row.text.text[told:]
        if shown or (logprobs and not piece.finish):
            self._told[index] = told + len(shown)
            events.append(self.event([_chunk(index, {"content": shown}, logprobs=logprobs)]))
            logprobs = None
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            events.append(self.event([_chunk(index, {"tool_calls": numbered})]))
        if piece.finish:
            events.append(self.event([_chunk(index, {}, logprobs=logprobs, reason=_reason(row, calls))]))
        return events

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """Return one event."""
        return self._head.event("chat.completion.chunk", choices, usage)

    def _choice(self, row: Continuation) -> dict[str, Any]:
        calls = self._calls(row.text.text)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else row.text.text}
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [chat_logprob(self._model, piece) for piece in row.pieces if not _ends(piece)]}
        return {"message": message, "finish_reason": _reason(row, calls), "logprobs": logprobs}

    def _calls(self, text: str) -> list[dict[str, Any]]:
        return tooling.calls_in(text, self._tools) if self._tools else []


class CompletionWriter:
    """Choices of a completion."""

    def __init__(self, model: ServedModel, *, name: str, echo: bool, logprobs: bool) -> None:
        """Take what the answer may hold.

        Args:
            model: that answers.
            name: of the model or of its adapter, as the request has it.
            echo: a text begins with its prompt.
            logprobs: tokens have their log-probabilities.
        """
        self._model, self._echo, self._logprobs = model, echo, logprobs
        self._head = Head(model, name=name, prefix="cmpl")

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Return answers as a whole."""
        choices = []
        for answer in answers:
            for row in best_rows(answer, count):
                before = self._prompt(answer)
                logprobs = self._logprobs_of(answer, row.pieces, whole=True) if self._logprobs else None
                reason = _REASONS[row.finish]
                choices.append({"text": before + row.text.text, "logprobs": logprobs, "finish_reason": reason})
        return self._head.whole("text_completion", choices, answers)

    def begin(self, index: int) -> list[str]:
        """Return nothing: the first token comes first."""
        del index
        return []

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """Return the event of one token."""
        before = self._prompt(answer) if piece.index == 0 else ""
        logprobs = self._logprobs_of(answer, [piece], whole=piece.index == 0) if self._logprobs else None
        choice = {"index": index, "text": before + piece.shown, "logprobs": logprobs}
        return [self.event([{**choice, "finish_reason": _REASONS[piece.finish] if piece.finish else None}])]

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """Return one event."""
        return self._head.event("text_completion", choices, usage)

    def _prompt(self, answer: Answer) -> str:
        return str(answer.model.tokenizer.decode(answer.prompt, skip_special_tokens=True)) if self._echo else ""

    def _logprobs_of(self, answer: Answer, pieces: Sequence[AnswerPiece], *, whole: bool) -> dict[str, Any]:
        """Return the table of tokens, with those of an echoed prompt where `whole` is true."""
        words = self._model.vocabulary.text
        prompt = answer.prefill if self._echo and whole else ()
        tokens = [words(one.id) for one in prompt] + [words(piece.id) for piece in pieces]
        tops: list[Any] = [None if one.logprob is None else {words(one.id): one.logprob} for one in prompt]
        tops += [{words(one.id): one.logprob for one in piece.top} for piece in pieces]
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            place += len(token)
        logprobs = [one.logprob for one in prompt] + [piece.logprob for piece in pieces]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def best_rows(answer: Answer, count: int) -> list[Continuation]:
    """Return the continuations that are returned: all, or those with the highest mean log-probability."""
    if count >= len(answer.rows):
        return answer.rows
    return sorted(answer.rows, key=lambda row: -row.mean_logprob)[:count]


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return how many tokens were read and written."""
    prompt = sum(len(answer.prompt) for answer in answers)
    written = sum(len(row.pieces) for answer in answers for row in answer.rows)
    cached = sum(answer.rows[0].stream.cached_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprob(model: ServedModel, piece: AnswerPiece) -> dict[str, Any]:
    """Return a token of a chat with its log-probability and those of the likeliest."""
    own = _token(model, TokenLogprob(id=piece.id, logprob=piece.logprob))
    return {**own, "top_logprobs": [_token(model, one) for one in piece.top]}


def _token(model: ServedModel, one: TokenLogprob) -> dict[str, Any]:
    words = model.vocabulary
    return {"token": words.text(one.id), "logprob": one.logprob, "bytes": words.bytes_of(one.id)}


def _chunk(index: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _reason(row: Continuation, calls: Sequence[Any]) -> str:
    return "tool_calls" if calls else _REASONS[row.finish]


def _ends(piece: AnswerPiece) -> bool:
    """Return whether a token is the end of its text, which is no part of it."""
    return piece.finish is FinishReason.EOS
