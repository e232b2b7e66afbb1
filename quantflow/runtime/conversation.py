"""A conversation with an artifact in this process."""

import secrets
from collections.abc import Iterator
from dataclasses import replace

import torch

from quantflow.errors import InputError, UsageError
from quantflow.files.origin import origin_of
from quantflow.models.chat_template import chat_tokens
from quantflow.progress import Progress
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, FinishReason
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.decoding.text import TextStream
from quantflow.runtime.generate_job import Rules
from quantflow.runtime.generation_config import NO_DEFAULTS, sampling_defaults
from quantflow.runtime.load import load
from quantflow.runtime.partner import ConversationTooLong, Messages, TextPiece, Thinking
from quantflow.sources.models import model_folder

_TAIL = 16  # tokens that hold the end of a prompt, also where each is a byte


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
        dtype: torch.dtype = getattr(torch, job.dtype)
        loaded = load(
            job.artifact,
            decoder=job.decoder,
            kv_cache=job.kv_cache,
            backend=job.backend,
            dtype=dtype,
            exact=job.exact,
            rounded_inputs=job.rounded_inputs,
            require_signature=job.signature.trusted,
        )
        if loaded.tokenizer is None:
            raise InputError(
                f"{job.artifact}: no tokenizer", "export it with its tokenizer's files"
            )
        self.name, self.tokens = origin_of(job.artifact).name, 0
        self._job, self._loaded, self._tokenizer = job, loaded, loaded.tokenizer
        self._defaults = (
            sampling_defaults(loaded.artifact.checkpoint)
            if job.generation_config == "auto"
            else NO_DEFAULTS
        )
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

    def answer(self, messages: Messages) -> Iterator[TextPiece]:
        """Yield the pieces of the next message.

        Where there are earlier turns to leave out, a quarter of the context is kept for the answer:
        one that ends after a few tokens since the context is full is of no use.

        Raises:
            ConversationTooLong: the conversation leaves no room for an answer.
            InputError: the template refuses it (quantflow.models.chat_template).
        """
        ids = chat_tokens(
            self._tokenizer, messages, where="conversation", answer=True, template=self._template
        )
        most = int(self._engine.limits.max_total_tokens or 0)
        earlier = any(message["role"] == "assistant" for message in messages)
        room = max(1, min(self._job.max_new_tokens, most // 4)) if earlier else 1
        if len(ids) + room > most:
            raise ConversationTooLong(
                f"the conversation has {len(ids)} tokens, the model reads {most}",
                "write a shorter message, or begin a new conversation with /reset",
            )
        request = BatchRequest(
            input_ids=tuple(ids),
            max_new_tokens=min(self._job.max_new_tokens, most - len(ids)),
            sampling=self._job.sampling(self._seed, **self._defaults.filters()),
            rules=Rules(repetition_penalty=self._defaults.repetition_penalty or 1.0),
            ends=self._loaded.eos_token_ids,
        )
        self._seed += 1
        stream, pieces = self._engine.submit(request), list[str]()
        text = TextStream(self._tokenizer, ids, tell=pieces.append)
        prompt = self._tokenizer.decode(ids[-_TAIL:])
        thinking = Thinking(begun=prompt.rstrip().endswith("<think>"))
        self.tokens = 0
        try:
            for event in stream:
                if event.error is not None:
                    raise event.error
                if event.id is not None:
                    self.tokens += 1
                    if event.finish is not FinishReason.EOS:  # an end token is no part of a text
                        text.put(event.id)
                if event.finish not in (None, FinishReason.CANCELLED):
                    text.end()
                for piece in pieces:
                    yield from thinking.put(piece)
                pieces.clear()
            yield from thinking.end()
        finally:
            stream.cancel()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def local_partner(job: ChatJob, progress: Progress) -> LocalPartner:
    """The artifact of a job, loaded.

    Raises:
        QuantflowError: it cannot be loaded.
    """
    assert job.artifact is not None
    folder = model_folder(job.artifact, revision=job.revision, progress=progress)
    return LocalPartner(replace(job, artifact=folder))
