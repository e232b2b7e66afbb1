"""Refusals of requests: TGI's kinds, their statuses, and their texts.

    {"error": text, "error_type": kind}

is the body on TGI's routes. OpenAI's routes wrap it as OpenAI's clients read it (`openai_body`) and
name fields as their bodies do. A prompt that is too long has OpenAI's own status and code there.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

STATUS: Mapping[str, int] = MappingProxyType(
    {
        "validation": 422,
        "generation": 424,
        "overloaded": 429,
        "incomplete_generation": 500,
        "template_error": 422,
        "tool_error": 422,
        "batch size exceeded": 422,
        "no fast tokenizer": 404,
        "model_not_found": 404,
        "not_found": 404,
        "method_not_allowed": 405,
        "healthcheck": 503,
        "unauthorized": 401,
        "forbidden_host": 421,
        "bad_json": 400,
        "bad_request": 400,
        "timeout": 408,
        "payload_too_large": 413,
        "unsupported_media_type": 415,
        "headers_too_large": 431,
        "not_implemented": 501,
        "internal": 500,
    }
)

INVALID = "Input validation error: "
_NAME = re.compile(r"`(\w+)`")


class Refused(Exception):
    """A request that is not answered.

    Attributes:
        kind: a key of `STATUS`.
        text: message for the client. It names a field of the request as TGI does, between
            backticks.
        param: the field that is wrong; None stands for the first name between backticks.
        overflow: the message of OpenAI's error `context_length_exceeded`, for a prompt, or a prompt
            and a text, of too many tokens; None for other refusals.
    """

    def __init__(
        self, kind: str, text: str, *, param: str | None = None, overflow: str | None = None
    ) -> None:
        """Keep the kind, and the whole message for the client."""
        super().__init__(text)
        self.kind, self.text, self.param, self.overflow = kind, text, param, overflow

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]

    def body(self) -> dict[str, Any]:
        """TGI's body."""
        return {"error": self.text, "error_type": self.kind}

    @property
    def openai_status(self) -> int:
        """The HTTP status on OpenAI's routes."""
        return self.status if self.overflow is None else 400

    def openai_body(self, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """OpenAI's body, with TGI's kind beside it.

        Args:
            names: TGI's name of a field -> the name that the client knows.
        """
        prompt = names.get("inputs", "inputs")
        param = self.param
        if self.overflow is None:
            text = _NAME.sub(lambda found: f"`{names.get(found[1], found[1])}`", self.text)
            first = _NAME.search(text) if self.kind == "validation" else None
            if first is not None:
                param = param or first[1]
            kind = code = self.kind
        else:
            # clients look for these words and this code, to cut the prompt or ask another model
            text, param = self.overflow.format(prompt=prompt), prompt
            kind, code = "invalid_request_error", "context_length_exceeded"
        error = {"message": text, "type": kind, "param": param, "code": code}
        return {"error": error, "error_type": self.kind}


def invalid(text: str) -> Refused:
    """The refusal of a request whose content is wrong."""
    return Refused("validation", f"{INVALID}{text}")


def too_many_characters(*, most: int, given: int, tokens: int, total: int) -> Refused:
    """The refusal of a text that is too long for the tokens of a prompt, before it has any.

    Args:
        most: characters that so many tokens can be.
        given: characters of the text.
        tokens: tokens that a prompt may have.
        total: tokens that a prompt may have with the added ones.
    """
    told = f"at most {tokens} tokens, and so at most {most} characters"
    return _overflow(
        f"`inputs` must have {told}. Given: {given} characters",
        total,
        f"your {{prompt}} has {given} characters, and may have {told}",
    )


def too_many_prompt_tokens(*, given: int, most: int, total: int) -> Refused:
    """The refusal of a prompt of more than `most` tokens; `total` are those with the added ones."""
    return _overflow(
        f"`inputs` must have less than {most + 1} tokens. Given: {given}",
        total,
        f"your {{prompt}} resulted in {given} tokens, and may have {most}",
    )


def too_many_tokens(*, prompt: int, new: int, total: int) -> Refused:
    """The refusal of a prompt that has no room for the tokens to be added."""
    parts = f"{prompt} in the {{prompt}}, {new} in the completion"
    return _overflow(
        f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {prompt} `inputs` tokens "
        f"and {new} `max_new_tokens`",
        total,
        f"you requested {prompt + new} tokens ({parts})",
    )


def _overflow(text: str, total: int, however: str) -> Refused:
    told = f"This model's maximum context length is {total} tokens. However, {however}."
    remedy = " Please reduce the length of the {prompt} or completion."
    return Refused("validation", f"{INVALID}{text}", overflow=told + remedy)


def failed(text: str) -> Refused:
    """The refusal of a request that the engine could not finish."""
    return Refused("generation", f"Request failed during generation: {text}")


def overloaded() -> Refused:
    """The refusal of a request above `max_concurrent_requests`."""
    return Refused("overloaded", "Model is overloaded")


def bad_template(text: str) -> Refused:
    """The refusal of messages that the chat template cannot render."""
    return Refused("template_error", f"Template error: {text}")


def bad_tool(text: str) -> Refused:
    """The refusal of tools or a tool choice."""
    return Refused("tool_error", f"Tool error: {text}")
