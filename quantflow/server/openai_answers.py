"""Answers as OpenAI's clients read them: whole, or as the chunks of a stream."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantflow.runtime.batching import FinishReason, PromptToken, TokenLogprob
from quantflow.server.generation import Answer, AnswerPiece, Continuation
from quantflow.server.json_text import pieces
from quantflow.server.models import ServedModel
from quantflow.server.parsers import Reader
from quantflow.server.parsers.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from quantflow.server.parsers.json_calls import loaded

_encode = json.JSONEncoder(ensure_ascii=False).encode
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


class AnswerWriter(Protocol):
    """Writer of answers as JSON; the two interfaces differ in their choices."""

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Answers as a whole, with the best `count` continuations of each."""

    def begin(self, index: int) -> list[str]:
        """The events before the tokens of a choice."""

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """The events of one token."""

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """One event with these choices."""


class Head:
    """The beginning of all JSON of one answer."""

    def __init__(
        self, model: ServedModel, *, name: str, prefix: str, whole: str, piece: str
    ) -> None:
        """Name the answer and its model.

        Args:
            model: model that answers.
            name: name of the model or of its adapter in the request.
            prefix: prefix of the answer's id.
            whole: kind of object of a whole answer.
            piece: kind of object of an event in a stream.
        """
        digest = str(model.manifest.get("digest", ""))[:16]
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"fp_{digest}",
        }
        self._whole = whole
        # encoded once, since it is the same for every token
        self._event = _encode({"object": piece, **self._head}).removesuffix("}")

    def whole(self, choices: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
        """A whole answer."""
        numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
        return {"object": self._whole, **self._head, "choices": numbered, "usage": usage(answers)}

    def event(self, choices: list[dict[str, Any]], usage: Any, *, long: bool = False) -> str:
        """An event of a stream; a long one is written in steps that let other threads run."""
        value = {"choices": choices} | ({} if usage is None else {"usage": usage})
        text = "".join(pieces(value)) if long else _encode(value)
        return f"{self._event}, {text.removeprefix('{')}"


@dataclass(kw_only=True)
class _Reading:
    """What was read of a choice so far.

    Attributes:
        reader: reader of its text.
        calls: number of its calls.
        arguments: pieces of the last call's arguments.
    """

    reader: Reader
    calls: int = 0
    arguments: list[str] = field(default_factory=list)

    def reason(self, finish: FinishReason) -> str:
        """OpenAI's reason of its end: a call that is cut off is no call to make."""
        whole = loaded("".join(self.arguments)) is not None
        called = self.calls and (whole or finish is not FinishReason.LENGTH)
        return "tool_calls" if called else _REASONS[finish]


class ChatWriter:
    """Choices of a chat: text, reasoning and calls, as soon as it is certain which a piece is."""

    def __init__(
        self,
        model: ServedModel,
        *,
        name: str,
        reader: Callable[[], Reader],
        new_id: Callable[[str, int], str],
        earlier: int,
        older: bool,
        logprobs: bool,
    ) -> None:
        """Keep the form of the answer.

        Args:
            model: model that answers.
            name: name of the model or of its adapter in the request.
            reader: makes the reader of a choice.
            new_id: makes the id of a call; see `parsers.CallParser`.
            earlier: calls of the conversation before this answer.
            older: whether the one call is a `function_call`, as OpenAI's older form has it.
            logprobs: whether tokens have their log-probabilities.
        """
        self._model, self._reader = model, reader
        self._new_id, self._earlier, self._logprobs = new_id, earlier, logprobs
        self._older = older
        kinds = {"whole": "chat.completion", "piece": "chat.completion.chunk"}
        self._head = Head(model, name=name, prefix="chatcmpl", **kinds)
        self._streamed: dict[int, _Reading] = {}  # by choice

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Answers as a whole."""
        choices = [self._choice(row) for answer in answers for row in best_rows(answer, count)]
        return self._head.whole(choices, answers)

    def begin(self, index: int) -> list[str]:
        """The event that names the speaker."""
        self._streamed[index] = _Reading(reader=self._reader())
        return [self.event([_chunk(index, {"role": "assistant", "content": ""})])]

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """The events of one token."""
        del answer
        reading = self._streamed[index]
        deltas = reading.reader.feed(piece.shown)
        if piece.finish:
            deltas += reading.reader.end(cut=piece.finish is FinishReason.LENGTH)
        written = [self._delta(delta, reading) for delta in deltas]
        logprobs = None
        if self._logprobs and not _ends(piece):
            logprobs = {"content": [chat_logprob(self._model, piece)]}
            written = written or ([] if piece.finish else [{"content": ""}])
        events = []
        for delta in written:
            if self._older and "tool_calls" in delta:
                delta = {"function_call": delta["tool_calls"][0]["function"]}
            events.append(self.event([_chunk(index, delta, logprobs=logprobs)]))
            logprobs = None
        if piece.finish:
            reason = self._reason(reading, piece.finish)
            events.append(self.event([_chunk(index, {}, logprobs=logprobs, reason=reason)]))
        return events

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """One event."""
        return self._head.event(choices, usage)

    def _choice(self, row: Continuation) -> dict[str, Any]:
        reading = _Reading(reader=self._reader())
        deltas = reading.reader.feed(row.text.text)
        deltas += reading.reader.end(cut=row.finish is FinishReason.LENGTH)
        text = reasoning = ""
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                text += delta.text
            elif isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            else:
                (written,) = self._delta(delta, reading)["tool_calls"]
                if isinstance(delta, CallDelta):
                    del written["index"]
                    calls.append(written)
                else:
                    calls[-1]["function"]["arguments"] += delta.text
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            message |= (
                {"function_call": calls[0]["function"]} if self._older else {"tool_calls": calls}
            )
        logprobs = None
        if self._logprobs:
            logprobs = {
                "content": [
                    chat_logprob(self._model, piece) for piece in row.pieces if not _ends(piece)
                ]
            }
        reason = self._reason(reading, row.finish)
        return {"message": message, "finish_reason": reason, "logprobs": logprobs}

    def _reason(self, reading: _Reading, finish: FinishReason) -> str:
        reason = reading.reason(finish)
        return "function_call" if self._older and reason == "tool_calls" else reason

    def _delta(self, delta: Delta, reading: _Reading) -> dict[str, Any]:
        """A delta as OpenAI's clients read it: a call's id and name come before its arguments."""
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallDelta):
            number, reading.arguments = reading.calls, []
            reading.calls += 1
            identifier = self._new_id(delta.name, self._earlier + number)
            function = {"name": delta.name, "arguments": ""}
            call = {"index": number, "id": identifier, "type": "function", "function": function}
            return {"tool_calls": [call]}
        reading.arguments.append(delta.text)
        return {"tool_calls": [{"index": reading.calls - 1, "function": {"arguments": delta.text}}]}


class CompletionWriter:
    """Choices of a completion."""

    def __init__(
        self, model: ServedModel, *, name: str, echo: bool, logprobs: bool, by_ids: bool = False
    ) -> None:
        """Keep the form of the answer.

        Args:
            model: model that answers.
            name: name of the model or of its adapter in the request.
            echo: whether a text begins with its prompt.
            logprobs: whether tokens have their log-probabilities.
            by_ids: whether these name tokens by their ids.
        """
        self._model, self._echo, self._logprobs = model, echo, logprobs
        self._by_ids = by_ids
        kinds = dict.fromkeys(("whole", "piece"), "text_completion")
        self._head = Head(model, name=name, prefix="cmpl", **kinds)
        self._places: dict[int, int] = {}  # choice -> length of its text so far

    def whole(self, answers: Sequence[Answer], *, count: int) -> dict[str, Any]:
        """Answers as a whole."""
        choices: list[dict[str, Any]] = []
        for answer in answers:
            for row in best_rows(answer, count):
                before = self._prompt(answer)
                logprobs = (
                    self._logprobs_of(len(choices), answer, row.pieces, whole=True)
                    if self._logprobs
                    else None
                )
                reason = _REASONS[row.finish]
                choices.append(
                    {"text": before + row.text.text, "logprobs": logprobs, "finish_reason": reason}
                )
        return self._head.whole(choices, answers)

    def begin(self, index: int) -> list[str]:
        """No event: the first token comes first."""
        del index
        return []

    def token(self, index: int, answer: Answer, piece: AnswerPiece) -> list[str]:
        """The event of one token."""
        before = self._prompt(answer) if piece.index == 0 else ""
        logprobs = (
            self._logprobs_of(index, answer, [piece], whole=piece.index == 0)
            if self._logprobs
            else None
        )
        reason = _REASONS[piece.finish] if piece.finish else None
        choice = {"index": index, "text": before + piece.shown, "logprobs": logprobs}
        choices = [{**choice, "finish_reason": reason}]
        return [self._head.event(choices, None, long=piece.index == 0 and bool(answer.prefill))]

    def event(self, choices: list[dict[str, Any]], *, usage: Any = None) -> str:
        """One event."""
        return self._head.event(choices, usage)

    def _prompt(self, answer: Answer) -> str:
        return (
            str(answer.model.tokenizer.decode(answer.prompt, skip_special_tokens=True))
            if self._echo
            else ""
        )

    def _logprobs_of(
        self, index: int, answer: Answer, pieces: Sequence[AnswerPiece], *, whole: bool
    ) -> dict[str, Any]:
        """The table of tokens, with those of an echoed prompt where `whole` is true.

        The likeliest tokens have the chosen one among them or after them. A special token and
        an end token take no room in the text.
        """
        vocabulary = self._model.vocabulary
        shown: list[PromptToken | AnswerPiece] = [
            *(answer.prefill if self._echo and whole else ()),
            *pieces,
        ]
        named = _by_id if self._by_ids else vocabulary.within
        tokens = [vocabulary.within(one.id) for one in shown]
        tops = list[Any]()
        offsets = list[int]()
        place = self._places.get(index, 0)
        for one, token in zip(shown, tokens, strict=True):
            likeliest = {named(top.id): top.logprob for top in one.top}
            tops.append(None if one.logprob is None else {**likeliest, named(one.id): one.logprob})
            offsets.append(place)
            hidden = one.hidden if isinstance(one, AnswerPiece) else one.id in vocabulary.special
            place += 0 if hidden else len(token)
        self._places[index] = place
        logprobs = [one.logprob for one in shown]
        return {
            "tokens": [named(one.id) for one in shown],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _by_id(token: int) -> str:
    """A token's name by its id, as vLLM writes it."""
    return f"token_id:{token}"


def best_rows(answer: Answer, count: int) -> list[Continuation]:
    """The continuations to return: all, or those with the highest mean log-probability."""
    if count >= len(answer.rows):
        return answer.rows
    return sorted(answer.rows, key=lambda row: -row.mean_logprob)[:count]


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Numbers of tokens that were read and written."""
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
    """A token of a chat with its log-probability and those of the likeliest."""
    own = _token(model, TokenLogprob(id=piece.id, logprob=piece.logprob))
    return {**own, "top_logprobs": [_token(model, one) for one in piece.top]}


def _token(model: ServedModel, one: TokenLogprob) -> dict[str, Any]:
    words = model.vocabulary
    return {"token": words.within(one.id), "logprob": one.logprob, "bytes": words.bytes_of(one.id)}


def _chunk(
    index: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _ends(piece: AnswerPiece) -> bool:
    """Whether a token is the end of its text, which is no part of it."""
    return piece.finish is FinishReason.EOS
