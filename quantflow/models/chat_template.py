"""A chat template, rendered in a process of its own that has seconds and a gigabyte: a template is a program of its maker.

    {{ 'x'.center(2 * 10 ** 9) }}        {% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}

transformers runs templates in a sandbox that keeps them from Python, not from memory and time. The process starts with the
first conversation and serves all that follow. One that does not answer is ended, and the next conversation gets another.
"""

import atexit
import json
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantflow import child_process
from quantflow.errors import InputError

SECONDS = 5.0  # of a conversation
START = 120.0  # seconds until the process has imported what it needs
LONGEST = 1 << 24  # characters of a rendered conversation
_REMEDY = "give the roles it expects, or use the template of a model that you trust"


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, where: str, answer: bool
) -> list[int]:
    """Return the tokens of a conversation, as `apply_chat_template` does.

    Args:
        tokenizer: with a chat template.
        messages: `role` and `content` of each.
        where: the conversation, for messages.
        answer: end where the answer begins.

    Raises:
        InputError: the template refuses the conversation, is none, or needs more time, memory or characters than it gets.
    """
    order = {
        "template": tokenizer.get_chat_template(),
        "messages": [dict(message) for message in messages],
        "answer": answer,
        "special": {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        "longest": LONGEST,
    }
    told = _renderer().ask(order)
    if "text" not in told:
        raise InputError(f"{where}: refused by the chat template ({told['why']})", _REMEDY)
    tokens: list[int] = tokenizer(told["text"], add_special_tokens=False, verbose=False)["input_ids"]
    return tokens


class Renderer:
    """The process, started when it is first asked."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, order: Mapping[str, Any]) -> dict[str, str]:
        """Return `text`, or `why` there is none."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                command = child_process.python_module("quantflow.models.chat_process")
                pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=quiet, env=child_process.environment()
                )
                if self._line(START) is None:
                    self.close()
                    return {"why": "the process that renders it did not start"}
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
                line = self._line(SECONDS)
            except OSError:
                line = b""
            if not line:
                self.close()
                return {"why": f"it takes more than {SECONDS:g} s" if line is None else "it takes more memory than it gets"}
            told: dict[str, str] = json.loads(line)
            return told

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _line(self, seconds: float) -> bytes | None:
        """Return the next line; None where there is none in time, nothing where the process ended."""
        assert self._process is not None and self._process.stdout is not None
        stream, end, line = self._process.stdout, time.monotonic() + seconds, bytearray()
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return None
            piece = stream.read1(1 << 20)  # type: ignore[attr-defined]
            if not piece:
                return b""
            line += piece
        return bytes(line)


@cache
def _renderer() -> Renderer:
    made = Renderer()
    atexit.register(made.close)
    return made
