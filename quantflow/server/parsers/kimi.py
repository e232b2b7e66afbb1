"""Kimi K2's calls, whose ids name the tool and count the calls of the conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>
    {"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>

Its template writes the ids of earlier calls, and the model goes on as they are.
"""

import re

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, arguments
from quantflow.server.parsers.source import AnswerSource, Steps

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI_MARKS = (SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END)
_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?\Z", re.DOTALL)


def kimi(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Kimi K2."""
    while (
        mark := (yield from source.until(SECTION, CALL, SECTION_END, wrap=TextDelta))
    ) is not None:
        source.record()
        source.take(len(mark))
        yield from source.space()
        if mark != CALL and not (yield from source.starts(CALL)):
            if mark == SECTION:
                yield TextDelta(source.recorded())
            continue
        yield from source.accept(CALL)
        head, found = yield from source.collect(ARGUMENTS, CALL_END, SECTION_END)
        identifier = _ID.match(head.strip())
        name = "" if identifier is None else identifier[1]
        if found != ARGUMENTS or name not in tools:
            yield TextDelta(source.recorded())
            continue
        source.take(len(ARGUMENTS))
        yield from source.space()
        source.recorded()
        yield CallDelta(name)
        yield from arguments(source)
        yield from source.space()
        yield from source.accept(CALL_END)
        yield from source.space()


def kimi_id(name: str, number: int) -> str:
    """The id of a call; `number` counts the calls of the conversation before it."""
    return f"functions.{name}:{number}"
