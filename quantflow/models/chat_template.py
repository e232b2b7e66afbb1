"""A chat template, rendered in a process with limits on time and memory.

A template is a program of its maker:

    {{ 'x'.center(2 * 10 ** 9) }}
    {% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}

transformers runs templates in a sandbox that keeps them from Python, not from memory and time. So
the process has seconds and a gigabyte. It starts with the first conversation and serves all that
follow. One that does not answer is ended, and the next conversation gets another. A command has one
process. A server has one for each model, so that a template delays conversations of its own model
alone.
"""

import atexit
import json
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantflow import child_process
from quantflow.errors import InputError
from quantflow.models import chat_form
from quantflow.models.token_ids import tokens_of

SECONDS = 5.0  # most seconds of a conversation
START = 120.0  # most seconds of the process's imports
LONGEST = 1 << 24  # characters of a rendered conversation
_REMEDY = "give the roles it expects, or use the template of a model that you trust"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


_PROBE = "quantflow-asks-whether-this-is-shown"


class NotRendered(Exception):
    """A template made no text of a conversation; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of a conversation.

    Attributes:
        text: text that the template made.
        template: template, as text.
        unread: variables that were given and that the template never reads.
    """

    text: str
    template: str
    unread: tuple[str, ...] = ()


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    where: str,
    answer: bool,
    continues: bool = False,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The tokens of a conversation, as `apply_chat_template` makes them.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: messages, each with `role` and `content`.
        where: name of the conversation, for messages.
        answer: whether the text ends where the answer begins.
        continues: whether the answer is the rest of the last message.
        template: template in place of the tokenizer's own.
        tools: JSON schemas of functions.

    Raises:
        InputError: the template refuses the conversation, is none, or exceeds its time, memory or
            characters.
    """
    try:
        rendered = render(
            tokenizer,
            messages,
            answer=answer,
            continues=continues,
            formed=answer or continues,
            template=template,
            tools=tools,
        )
    except NotRendered as error:
        raise InputError(f"{where}: refused by the chat template ({error})", _REMEDY) from error
    return tokens_of(tokenizer, rendered.text, where=where, special=False)


def with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """An earlier call whose JSON arguments are an object, as templates expect it."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(written := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool,
    continues: bool = False,
    formed: bool = True,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_prompt: str | None = None,
    options: Mapping[str, Any] = _NOTHING,
    renderer: "Renderer | None" = None,
) -> Rendered:
    """The text of a conversation, as `apply_chat_template(..., tokenize=False)` makes it.

    Args:
        tokenizer: tokenizer, with a chat template unless `template` is one.
        messages: messages of JSON values; a key whose value is None is left out.
        answer: whether the text ends where the answer begins (transformers'
            `add_generation_prompt`).
        continues: whether the text ends with the last message, which the answer goes on with
            (transformers' `continue_final_message`).
        formed: whether messages and tools are put into the form that the template knows
            (quantflow.models.chat_form), and refused where it leaves them out.
        template: template in place of the tokenizer's own.
        tools: JSON schemas of functions.
        tool_prompt: text behind tools that the template does not know; None is TGI's.
        options: further variables of the template; they replace special tokens of the same name.
        renderer: process that renders; None is that of this command.

    Raises:
        NotRendered: the template refuses the conversation or leaves messages out, is none, or
            exceeds its time, memory or characters.
    """
    if not messages:
        raise NotRendered("there is no message")
    process = renderer or _renderer()
    shown = None if tools is None else [dict(tool) for tool in tools]
    try:
        chosen = tokenizer.get_chat_template(template, shown)
        if formed:
            messages = chat_form.with_known_roles(messages, chosen)
            messages = chat_form.with_short_ids(messages, chosen)
            messages = chat_form.with_counted_ids(messages, chosen)
    except ValueError as error:
        raise NotRendered(str(error)) from error
    read = process.variables(chosen) if shown or options else frozenset[str]()
    if shown and "tools" not in read and formed:
        messages, shown = chat_form.with_tools(messages, shown, prompt=tool_prompt), None
    options = chat_form.with_read_names(options, read) if formed else options
    order = {
        "template": chosen,
        "messages": [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ],
        "tools": shown,
        "answer": answer and not continues,
        "continues": continues,
        "variables": {**tokenizer.special_tokens_map, **options},
        "longest": LONGEST,
        "seconds": SECONDS,
    }
    text = _text(order, process)
    if formed:
        for role in chat_form.doubtful_roles(messages, chosen, text):
            _require_shown(role, order, process)
    unread = tuple(sorted(name for name in options if name not in read))
    return Rendered(text=text, template=chosen, unread=unread)


def _text(order: Mapping[str, Any], process: "Renderer") -> str:
    """The text of a conversation; arguments of calls are objects, or texts where that fails.

    DeepSeek's templates put them together with other texts.

    Raises:
        NotRendered: the template refuses both.
    """
    try:
        return process.text(order)
    except NotRendered:
        messages = chat_form.with_written_arguments(order["messages"])
        if messages == order["messages"]:
            raise
        try:
            return process.text({**order, "messages": messages})
        except NotRendered:
            pass
        raise


def _require_shown(role: str, order: Mapping[str, Any], process: "Renderer") -> None:
    """Refuse a role whose messages the template leaves out.

    Raises:
        NotRendered: it does.
    """
    probes = [
        {**message, "content": _PROBE} if message.get("role") == role else message
        for message in order["messages"]
    ]
    try:
        shown = _PROBE in process.text({**order, "messages": probes})
    except NotRendered:
        return  # it looks at the content, and has taken the real one
    if not shown:
        raise NotRendered(f"it leaves out the messages of the role {role!r}")


class Renderer:
    """The rendering process, started by the first conversation.

    One conversation is rendered at a time; threads wait for their turn.
    """

    def __init__(self) -> None:
        """Begin without a process."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._variables: dict[str, frozenset[str]] = {}  # of the templates that were met

    def text(self, order: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Raises:
            NotRendered: there is none.
        """
        reply = self.ask(order)
        if "text" not in reply:
            raise NotRendered(reply["why"])
        return str(reply["text"])

    def variables(self, template: str) -> frozenset[str]:
        """The names of the variables that a template reads.

        Raises:
            NotRendered: it is no template.
        """
        if template not in self._variables:
            reply = self.ask({"template": template, "reads": True, "seconds": SECONDS})
            if "reads" not in reply:
                raise NotRendered(reply["why"])
            self._variables[template] = frozenset(reply["reads"])
        return self._variables[template]

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The reply: `text` or `reads`, or `why` there is none."""
        try:
            line = _written(order)
        except (TypeError, ValueError, RecursionError) as error:
            return {"why": f"the conversation is not JSON: {error}"}
        with self._lock:
            try:
                return self._answer(line)
            except BaseException:
                # Otherwise the next conversation would read the answer of this one.
                self._end()
                raise

    def close(self) -> None:
        """End the process, if there is one. A conversation that it renders is refused."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = child_process.python_module("quantflow.models.chat_process")
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=quiet, env=child_process.environment()
            )
            if not self._line(START):
                self._end()
                return {"why": "the process that renders it did not start"}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            said = self._line(SECONDS)
        except OSError:
            said = b""
        if said is None:
            self._end()
            return {"why": f"it takes more than {SECONDS:g} s"}
        if not said:
            code = self._process.wait()
            self._end()
            return {"why": f"it ended the process that renders it ({_ending(code)})"}
        answer: dict[str, Any] = json.loads(said)
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _line(self, seconds: float) -> bytes | None:
        """The next line; None where there is none in time, empty where the process ended."""
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        end = time.monotonic() + seconds
        line = bytearray()
        # select() takes no descriptor above 1,023, and a server may have more connections
        with selectors.PollSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = end - time.monotonic()
                if left <= 0 or not ready.select(left):
                    return None
                piece = stream.read1(1 << 20)  # type: ignore[attr-defined]
                if not piece:
                    return b""
                line += piece
        return bytes(line)


def _written(order: Mapping[str, Any]) -> bytes:
    """The line of an order.

    Long lists and objects are written item by item: other threads of a server run in between.
    """
    return b"{%b}\n" % b",".join(
        json.dumps(name).encode() + b":" + _items(value) for name, value in order.items()
    )


def _items(value: Any) -> bytes:
    if isinstance(value, list):
        return b"[%b]" % b",".join(json.dumps(item).encode() for item in value)
    if isinstance(value, dict):
        return b"{%b}" % b",".join(json.dumps({k: v})[1:-1].encode() for k, v in value.items())
    return json.dumps(value).encode()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@cache
def _renderer() -> Renderer:
    made = Renderer()
    atexit.register(made.close)
    return made
