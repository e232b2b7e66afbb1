"""Calls as Python: `[weather(city="Rome", days=2), clock()]`, as Llama 3.2 and 4 write them.

Llama 4 puts them between `<|python_start|>` and `<|python_end|>`, LFM2 between
`<|tool_call_start|>` and `<|tool_call_end|>`. Both write JSON too. An argument is handed on
when its value is whole.
"""

import ast
import json
import re
import warnings
from typing import Any

from quantflow.server.parsers.deltas import ArgumentsDelta, CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, json_calls, properties
from quantflow.server.parsers.source import AnswerSource, Steps

OPENINGS = ("<|python_start|>", "<|tool_call_start|>")
CLOSINGS = ("<|python_end|>", "<|tool_call_end|>")
_WORD = re.compile(r"[A-Za-z_][\w.-]*\Z")


def pythonic(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer that is a list of calls, or holds one between marks."""
    source.record()
    yield from source.space()
    if (yield from source.character()) == "{":
        yield from json_calls(source, tools)
    else:
        yield from _list(source, tools)
    while (tag := (yield from source.until(*OPENINGS, wrap=TextDelta))) is not None:
        source.record()
        source.take(len(tag))
        yield from source.space()
        if (yield from _list(source, tools)):
            yield from source.space()
            for closing in CLOSINGS:
                yield from source.accept(closing)


def python_call(source: AnswerSource, tools: Tools) -> Steps[bool]:
    """Read one call and yield it.

    Returns:
        Whether it calls a known tool. If not, what was read is still recorded.
    """
    name, end = yield from source.collect("(", "\n", " ", '"', "[", "{")
    name = name.removesuffix(".call")  # Llama 3's built-in tools
    if end != "(" or not _WORD.match(name) or name not in tools:
        return False
    source.take(1)
    source.recorded()
    yield CallDelta(name)
    yield ArgumentsDelta("{")
    names = iter(properties(tools[name]))
    between = ""
    while True:
        yield from source.space()
        if (yield from source.accept(",")):
            continue
        if (yield from source.character()) in ("", ")"):
            break
        key, stop = yield from source.collect("=", ",", ")", "(", "[", "{", '"', "'")
        if stop == "=":
            source.take(1)
        text, whole = yield from _value(source)
        if stop != "=":  # a value alone belongs to the next name
            key, text = next(names, ""), key + text
        if not whole or not key:
            break
        written = json.dumps(read_literal(text), ensure_ascii=False)
        yield ArgumentsDelta(f"{between}{json.dumps(key.strip(), ensure_ascii=False)}: {written}")
        between = ", "
    if (yield from source.accept(")")) or source.complete:
        yield ArgumentsDelta("}")
    return True


def read_literal(text: str) -> Any:
    """The value of a JSON or Python literal; the text itself where it is neither."""
    for read in (json.loads, _python_literal):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _python_literal(text: str) -> Any:
    with warnings.catch_warnings():  # Python warns of escapes that it does not know
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def _list(source: AnswerSource, tools: Tools) -> Steps[bool]:
    """Read a list of calls; what is none is yielded as text."""
    called = False
    if (yield from source.accept("[")):
        yield from source.space()
        if (yield from source.character()) == "{":
            return (yield from json_calls(source, tools, listed=True))
        while True:
            yield from source.space()
            if not (yield from python_call(source, tools)):
                break
            called = True
            source.record()
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        if called and (yield from source.accept("]")):
            source.recorded()
            return True
    yield TextDelta(source.recorded())
    return called


def _value(source: AnswerSource) -> Steps[tuple[str, bool]]:
    """The text of a value up to the comma or bracket behind it, and whether that came."""
    pieces: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        for place, character in enumerate(source.text):
            if escaped:
                escaped = False
            elif quote:
                escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif depth and character in ")]}":
                depth -= 1
            elif not depth and character in ",)]}":
                pieces.append(source.take(place))
                return "".join(pieces), True
        pieces.append(source.take(len(source.text)))
        if source.ended:
            return "".join(pieces), False
        yield None
