"""A conversation with a server that has OpenAI's routes.

Its answers are strangers' input: a response, a body and an event have a length at most, JSON is
read strictly, and each value is compared with its shape before it is used.
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import socket
from typing import Any, NotRequired, TypedDict

from quantflow.errors import InputError, ResourceError
from quantflow.files.canonical import parse_json
from quantflow.files.schema import check
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.partner import ConversationTooLong, Messages, TextPiece, Thinking

LONGEST_BODY = 1 << 20  # bytes of an answer in one piece, and of an event
LONGEST_RESPONSE = 1 << 26  # bytes of a response, its headers included
_SHOWN = 1000  # characters of a server's error
_SECONDS = 600.0  # most seconds without a byte
_WRONG = "give the URL of a server with OpenAI's routes"
# OpenAI, vLLM and this server have the code, llama.cpp the type; the words are of vLLM, of TGI and
# of servers that have neither.
_TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_TOO_LONG_WORDS = re.compile(
    r"context (length|size|window)|`inputs` (tokens|must have less than)", re.IGNORECASE
)

# ValueError: a name of a host that cannot be looked up, the size of a chunk
_BROKEN = (OSError, HTTPException, ValueError)


class _Counted(io.RawIOBase):
    """What a socket receives, up to LONGEST_RESPONSE bytes.

    `http.client` itself reads interim responses, trailers and a chunk of -1 bytes without an end.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._taken = raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count: int | None = self._raw.readinto(buffer)
        self._taken += count or 0
        if self._taken > LONGEST_RESPONSE:
            raise HTTPException(f"an answer of more than {LONGEST_RESPONSE} bytes")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """A response of bounded length."""

    def __init__(self, sock: socket, *arguments: Any, **words: Any) -> None:
        super().__init__(sock, *arguments, **words)
        self.fp.close()
        self.fp = io.BufferedReader(_Counted(sock.makefile("rb", buffering=0)))


class _Model(TypedDict):
    id: str


class _Models(TypedDict):
    data: list[_Model]


class _Delta(TypedDict):
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]  # vLLM's newer name


class _Choice(TypedDict):
    delta: NotRequired[_Delta | None]
    finish_reason: NotRequired[str | None]


class _Usage(TypedDict):
    completion_tokens: NotRequired[int]


class _Event(TypedDict):
    choices: NotRequired[list[_Choice] | None]
    usage: NotRequired[_Usage | None]


class RemotePartner:
    """A server with OpenAI's routes."""

    def __init__(self, job: ChatJob) -> None:
        """Ask the server what it serves.

        Raises:
            ResourceError: it does not answer.
            InputError: its answer is none of OpenAI's.
        """
        self._job, self.tokens = job, 0
        self._secure, self._place, self._path = job.place
        self._seed = job.seed
        if job.model is not None:
            self.name = job.model
            return
        with self._ask("GET", "/v1/models", None) as response:
            found = self._parsed(self._body(response), _Models, "/v1/models")
        if not found["data"]:
            raise InputError(f"{job.url}/v1/models: no model", "give --model NAME")
        self.name = found["data"][0]["id"]

    def answer(self, messages: Messages) -> Iterator[TextPiece]:
        """Yield the pieces of the next message.

        Raises:
            ConversationTooLong: the server says that its context does not hold the conversation.
            QuantflowError: the server refuses the conversation, goes away, or answers with
                something else than OpenAI's events.
        """
        job = self._job
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body["max_tokens"] = job.max_new_tokens
        settings = ("temperature", "top_k", "top_p")  # what is left out is the server's to say
        body |= {name: value for name in settings if (value := getattr(job, name)) is not None}
        if self._seed is not None:
            body["seed"], self._seed = self._seed, self._seed + 1
        self.tokens = 0
        thinking, finished = Thinking(), False
        with self._ask("POST", "/v1/chat/completions", body) as response:
            for data in self._events(response):
                if data == b"[DONE]":
                    finished = True
                    break
                event = self._event(data)
                if event.get("usage"):
                    self.tokens = event["usage"].get("completion_tokens", 0)
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if reason := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield TextPiece(reason, reasoning=True)
                    if text := delta.get("content"):
                        yield from thinking.put(text)
                    finished |= choice.get("finish_reason") is not None
        yield from thinking.end()
        if not finished:
            raise ResourceError(f"{job.url}: the server's answer broke off", "ask again")

    def close(self) -> None:
        """Do nothing: every answer has a connection of its own."""

    def _ask(self, method: str, path: str, body: Any) -> HTTPResponse:
        """The response to a request, whose status is 200.

        Raises:
            QuantflowError: see `answer`.
        """
        job = self._job
        kind = HTTPSConnection if self._secure else HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers |= {} if job.api_key is None else {"Authorization": f"Bearer {job.api_key}"}
        data, said = None if body is None else json.dumps(body), None
        try:
            connection = kind(self._place, timeout=_SECONDS)
            connection.response_class = _Response
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
        except _BROKEN as error:
            raise self._gone(error) from error
        if response.status == 200:
            return response
        if 300 <= response.status < 400:  # not followed: the key is for this server alone
            with response:
                place = response.getheader("Location", "nowhere")[:_SHOWN]
            raise InputError(
                f"{job.url}{path}: status {response.status}, which leads to {place}",
                "give the URL of the server that answers",
            )
        with response, suppress(InputError):
            said = parse_json(self._body(response), "error")
        text = _message(said)[:_SHOWN] or f"status {response.status}"
        cause = f"{job.url}{path}: {text}"
        if _says_too_long(said):
            raise ConversationTooLong(
                cause, "write a shorter message, or give a smaller --max-new-tokens"
            )
        raise InputError(cause, "change what was asked")

    def _body(self, response: HTTPResponse) -> bytes:
        """The body of a short answer.

        Raises:
            QuantflowError: it breaks off, or is longer than LONGEST_BODY.
        """
        try:
            data = response.read(LONGEST_BODY + 1)
        except _BROKEN as error:
            raise self._gone(error) from error
        self._require_short(data)
        return data

    def _events(self, response: HTTPResponse) -> Iterator[bytes]:
        """Yield the data of the events of a stream.

        Raises:
            QuantflowError: it breaks off, or a line is longer than LONGEST_BODY.
        """
        while True:
            try:
                line = response.readline(LONGEST_BODY + 1)
            except _BROKEN as error:
                raise self._gone(error) from error
            self._require_short(line)
            if not line:
                return
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()

    def _require_short(self, data: bytes) -> None:
        if len(data) > LONGEST_BODY:
            raise InputError(
                f"{self._job.url}: an answer or event of more than {LONGEST_BODY} bytes", _WRONG
            )

    def _event(self, data: bytes) -> Any:
        """An event of OpenAI's.

        Raises:
            InputError: it is none, or one that says what went wrong.
        """
        value = self._parsed(data, dict[str, Any], "an event")
        if value.get("error") is not None:
            raise InputError(
                f"{self._job.url}: {_message(value)[:_SHOWN]}",
                "begin a new conversation with /reset",
            )
        check(value, _Event, where=f"{self._job.url}: an event", remedy=_WRONG)
        return value

    def _parsed(self, data: bytes, shape: Any, name: str) -> Any:
        """A value of a shape.

        Raises:
            InputError: it is not JSON, or has another shape.
        """
        where = f"{self._job.url}: {name}"
        try:
            value = parse_json(data, where)
        except InputError as error:
            raise InputError(error.cause, _WRONG) from error
        check(value, shape, where=where, remedy=_WRONG)
        return value

    def _gone(self, error: Exception) -> ResourceError:
        return ResourceError(
            f"{self._job.url}: {str(error) or type(error).__name__}",
            "check that the server runs there",
        )


def _error(value: Any) -> Any:
    return value.get("error", value) if isinstance(value, dict) else value


def _message(value: Any) -> str:
    """The text of a server's error; empty where there is none."""
    error = _error(value)
    return str((error.get("message") or error if isinstance(error, dict) else error) or "")


def _says_too_long(value: Any) -> bool:
    """Whether an error says that the context does not hold the conversation."""
    error = _error(value)
    words = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return bool(_TOO_LONG.intersection(word for word in words if isinstance(word, str))) or bool(
        _TOO_LONG_WORDS.search(_message(value))
    )
