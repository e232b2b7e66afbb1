"""A conversation with an artifact in this process, or with a server over HTTP.

Both yield the text of an answer as it grows.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from quantflow.errors import InputError, ResourceError, UsageError
from quantflow.files.origin import origin_of
from quantflow.models.chat_template import chat_tokens
from quantflow.progress import Progress
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, FinishReason
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.decoding.text import TextStream
from quantflow.runtime.load import load
from quantflow.sources.models import model_folder

Messages = Sequence[Mapping[str, str]]


class Partner(Protocol):
    """The side that answers.

    Attributes:
        name: name for people.
        tokens: tokens of the last answer.
    """

    name: str
    tokens: int

    def answer(self, messages: Messages) -> Iterator[str]:
        """Yield the pieces of the next message; closing the iterator ends it."""

    def close(self) -> None:
        """Let go of the model or the connection."""


class LocalPartner:
    """An artifact in this process.

    The prefix that an earlier turn computed is not computed again.
    """

    def __init__(self, job: ChatJob) -> None:
        """Load the artifact.

        Raises:
            QuantflowError: it cannot be loaded.
            UsageError: it has no chat template.
        """
        assert job.artifact is not None
        job.signature.check(job.artifact)
        dtype: torch.dtype = getattr(torch, job.dtype)
        loaded = load(
            job.artifact,
            decoder=job.decoder,
            kv_cache=job.kv_cache,
            backend=job.backend,
            dtype=dtype,
            exact=job.exact,
        )
        if loaded.tokenizer is None:
            raise InputError(
                f"{job.artifact}: no tokenizer", "export it with its tokenizer's files"
            )
        self.name, self.tokens = origin_of(job.artifact).name, 0
        self._job, self._loaded, self._tokenizer = job, loaded, loaded.tokenizer
        self._template = None if job.chat_template is None else job.chat_template.read_text()
        if self._template is None and self._tokenizer.chat_template is None:
            raise UsageError(
                f"{job.artifact}: no chat template",
                "give --chat-template, or use `quantflow generate`",
            )
        self._engine = Engine(
            loaded.decoder, limits=BatchLimits(max_batch_size=1), tokenizer=self._tokenizer
        )
        self._seed = secrets.randbits(32) if job.seed is None else job.seed

    def answer(self, messages: Messages) -> Iterator[str]:
        """Yield the pieces of the next message.

        Raises:
            UsageError: the conversation is longer than the model's positions.
            InputError: the template refuses it (quantflow.models.chat_template).
        """
        ids = chat_tokens(
            self._tokenizer, messages, where="conversation", answer=True, template=self._template
        )
        most = int(self._engine.limits.max_total_tokens or 0)
        if len(ids) >= most:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, the model reads {most}",
                "begin a new one with /reset",
            )
        request = BatchRequest(
            input_ids=tuple(ids),
            max_new_tokens=min(self._job.max_new_tokens, most - len(ids)),
            sampling=self._job.sampling(self._seed),
            ends=self._loaded.eos_token_ids,
        )
        self._seed += 1
        stream, pieces = self._engine.submit(request), list[str]()
        text = TextStream(self._tokenizer, ids, tell=pieces.append)
        self.tokens = 0
        try:
            for event in stream:
                if event.error is not None:
                    raise event.error
                if event.id is not None:
                    self.tokens += 1
                    text.put(event.id)
                if event.finish not in (None, FinishReason.CANCELLED):
                    text.end()
                yield from pieces
                pieces.clear()
        finally:
            stream.cancel()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class RemotePartner:
    """A server with OpenAI's routes."""

    def __init__(self, job: ChatJob) -> None:
        """Ask the server what it serves.

        Raises:
            ResourceError: it does not answer.
            InputError: its answer is none of OpenAI's.
        """
        self._job, self.tokens = job, 0
        parts = urlsplit(str(job.url).rstrip("/").removesuffix("/v1"))
        self._secure, self._place, self._path = parts.scheme == "https", parts.netloc, parts.path
        self._seed = job.seed
        if job.model is not None:
            self.name = job.model
            return
        answer = self._ask("GET", "/v1/models", None)
        try:
            self.name = str(json.load(answer)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{job.url}/v1/models: no list of models",
                "give the URL of a server with OpenAI's routes",
            ) from error

    def answer(self, messages: Messages) -> Iterator[str]:
        """Yield the pieces of the next message.

        Raises:
            QuantflowError: the server refuses the conversation, or goes away.
        """
        job = self._job
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"temperature": job.temperature, "max_tokens": job.max_new_tokens}
        body |= {
            name: value for name in ("top_k", "top_p") if (value := getattr(job, name)) is not None
        }
        if self._seed is not None:
            body["seed"], self._seed = self._seed, self._seed + 1
        self.tokens = 0
        with self._ask("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise InputError(
                        f"{job.url}: {_message(event)}", "begin a new conversation with /reset"
                    )
                if event.get("usage"):
                    self.tokens = int(event["usage"]["completion_tokens"])
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        yield piece

    def close(self) -> None:
        """Do nothing: every answer has a connection of its own."""

    def _ask(self, method: str, path: str, body: Any) -> HTTPResponse:
        job = self._job
        kind = HTTPSConnection if self._secure else HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers |= {} if job.api_key is None else {"Authorization": f"Bearer {job.api_key}"}
        try:
            connection = kind(self._place, timeout=600)
            connection.request(
                method, self._path + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status == 200:
                return response
            with response:
                answer = _message(json.load(response))
        except (OSError, HTTPException) as error:
            raise ResourceError(
                f"{job.url}: {error}", "check that the server runs there"
            ) from error
        except ValueError:
            answer = f"status {response.status}"
        raise InputError(f"{job.url}{path}: {answer}", "change what was asked")


def partner_of(job: ChatJob, progress: Progress) -> Partner:
    """Who answers: an artifact that is loaded here, or a server.

    Raises:
        QuantflowError: the artifact cannot be loaded, or the server does not answer.
    """
    if job.artifact is not None:
        folder = model_folder(job.artifact, revision=job.revision, progress=progress)
        job = replace(job, artifact=folder)
    return LocalPartner(job) if job.url is None else RemotePartner(job)


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream.

    Raises:
        QuantflowError: it breaks off, or an event is no JSON.
    """
    try:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if line.startswith(b"data:") and data != "[DONE]":
                yield json.loads(data)
    except (OSError, HTTPException, ValueError) as error:
        raise ResourceError(f"the server's answer broke off: {error}", "ask again") from error


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)
