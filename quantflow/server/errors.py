"""Refusals of requests: TGI's kinds, their statuses, and their texts.

    {"error": text, "error_type": kind}

is the body on TGI's routes. OpenAI's routes wrap it as OpenAI's clients read it (`openai_body`).
"""

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
        "timeout": 408,
        "payload_too_large": 413,
        "unsupported_media_type": 415,
        "internal": 500,
    }
)


class Refused(Exception):
    """A request that is not answered.

    Attributes:
        kind: a key of `STATUS`.
        text: message for the client.
    """

    def __init__(self, kind: str, text: str) -> None:
        """Keep the kind, and the whole message for the client."""
        super().__init__(text)
        self.kind, self.text = kind, text

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]

    def body(self) -> dict[str, Any]:
        """TGI's body."""
        return {"error": self.text, "error_type": self.kind}

    def openai_body(self) -> dict[str, Any]:
        """OpenAI's body, with TGI's kind beside it."""
        error = {"message": self.text, "type": self.kind, "param": None, "code": self.kind}
        return {"error": error, "error_type": self.kind}


def invalid(text: str) -> Refused:
    """The refusal of a request whose content is wrong."""
    return Refused("validation", f"Input validation error: {text}")


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
