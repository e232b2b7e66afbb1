"""Gemma 4's calls: an object without quotes around its keys, and with marks around its texts.

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2],hot:true}<tool_call|>

Nothing is escaped within the marks of a text.
"""

import json

from quantflow.server.parsers.deltas import ArgumentsDelta, CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, loaded
from quantflow.server.parsers.pythonic import read_literal
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.typed_arguments import in_string

GEMMA_CALL, CALL_END, QUOTE = GEMMA_MARKS = "<|tool_call>", "<tool_call|>", '<|"|>'
_DEEPEST = 64  # objects and lists inside each other


def gemma(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Gemma 4."""
    while (yield from source.until(GEMMA_CALL, wrap=TextDelta)) is not None:
        source.record()
        source.take(len(GEMMA_CALL))
        yield from source.space()
        yield from source.accept("call:")
        name, end = yield from source.collect("{", "\n", CALL_END)
        if end != "{" or (name := name.strip()) not in tools:
            yield TextDelta(source.recorded())
            continue
        source.recorded()
        yield CallDelta(name)
        yield from _value(source, depth=0)
        yield from source.space()
        yield from source.accept(CALL_END)
        yield from source.space()


def _value(source: AnswerSource, *, depth: int) -> Steps[bool]:
    """Yield a value as JSON, as it comes; whether it is whole."""
    yield from source.space()
    if (yield from source.accept(QUOTE)):
        yield ArgumentsDelta('"')
        if (yield from source.until(QUOTE, wrap=in_string)) is None:
            return False
        source.take(len(QUOTE))
        yield ArgumentsDelta('"')
        return True
    first = yield from source.character()
    if first in ("{", "["):
        return (yield from _several(source, depth=depth))
    if first == '"':  # a text with JSON's quotes
        text = yield from source.json_text()
        if text is not None:
            yield ArgumentsDelta(json.dumps(loaded(text), ensure_ascii=False))
        return text is not None
    text, end = yield from source.collect(",", "}", "]", CALL_END)
    if end is not None:
        yield ArgumentsDelta(json.dumps(read_literal(text.strip()), ensure_ascii=False))
    return end is not None


def _several(source: AnswerSource, *, depth: int) -> Steps[bool]:
    """Yield an object or a list; see `_value`."""
    opening = source.take(1)
    named, closing = opening == "{", "}" if opening == "{" else "]"
    yield ArgumentsDelta(opening)
    between = ""
    while depth < _DEEPEST:
        yield from source.space()
        if (yield from source.accept(",")):
            continue
        if (yield from source.accept(closing)) or source.complete:
            yield ArgumentsDelta(closing)
            return True
        if (yield from source.character()) == "":
            return False
        if named:
            key = yield from _key(source)
            if key is None:
                return False
            yield ArgumentsDelta(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        elif between:
            yield ArgumentsDelta(between)
        between = ", "
        if not (yield from _value(source, depth=depth + 1)):
            return False
    return False


def _key(source: AnswerSource) -> Steps[str | None]:
    """The name before a value, bare or as a text; None where none comes."""
    if (yield from source.accept(QUOTE)):
        key, end = yield from source.collect(QUOTE)
        source.take(len(end or ""))
        _, end = yield from source.collect(":")
    else:
        key, end = yield from source.collect(":", "}", CALL_END)
        key = key.strip().strip('"')
    if end != ":":
        return None
    source.take(1)
    return key
