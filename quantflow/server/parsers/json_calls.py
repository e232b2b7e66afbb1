"""Calls as JSON objects: `{"name": ..., "arguments" or "parameters": {...}}`, alone or in a list.

Arguments are handed on as they stand, so that they come as the model writes them. Functions here
read after `AnswerSource.record`, whose text is yielded where it turns out to be no call.
"""

import json
from collections.abc import Mapping
from typing import Any

from quantflow.server.parsers.deltas import ArgumentsDelta, CallDelta, TextDelta
from quantflow.server.parsers.source import AnswerSource, Steps

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id", "index")  # further keys of calls that models write


def json_calls(source: AnswerSource, tools: Tools, *, listed: bool = False) -> Steps[bool]:
    """Read calls that follow each other, or a list of them, and yield them.

    What is no call, or the call of an unknown tool, is yielded as text.

    Args:
        source: source of the answer.
        tools: schemas of the arguments by tool.
        listed: whether the beginning of a list was read already.

    Returns:
        Whether there was a call.
    """
    listed = listed or (yield from source.accept("["))
    if listed:
        yield from source.space()
    called = False
    while (yield from source.character()) == "{":
        one = yield from json_call(source, tools)
        called = called or one is True
        if one is None:
            break
        source.record()
        yield from source.space()
        if (yield from source.character()) in (",", ";"):  # the second is Llama's
            source.take(1)
            yield from source.space()
    rest = source.recorded()
    if not called or rest.strip():
        yield TextDelta(rest)
    if called and listed:
        yield from source.accept("]")
    return called


def json_call(source: AnswerSource, tools: Tools) -> Steps[bool | None]:
    """Read one object and yield it as a call.

    The call is yielded as soon as its name is known and its arguments begin.

    Returns:
        Whether a known tool is called. If not, the whole object was yielded as text; None where it
        is no call at all, and what was read is still recorded.
    """
    yield from source.accept("{")
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    called = False
    while True:
        yield from source.space()
        if (yield from source.accept(",")):
            continue
        if (yield from source.accept("}")):
            break
        key = loaded((yield from source.json_text()))
        yield from source.space()
        if not isinstance(key, str) or not (yield from source.accept(":")):
            return called or None
        yield from source.space()
        if called or key in _BESIDE:
            if (yield from source.json_text()) is None:
                return called or None
        elif key in ("name", "function"):
            name = loaded((yield from source.json_text()))
            if not isinstance(name, str):
                return None
            if name not in tools:
                yield TextDelta(source.recorded())
                yield from source.rest_of_object(wrap=TextDelta)
                return False
            if early is not None:
                source.recorded()
                yield CallDelta(name)
                yield ArgumentsDelta(unpacked(early))
                called = True
        elif key not in _ARGUMENTS:
            return None
        elif name is None:
            early = yield from source.json_text()
            if early is None:
                return None
        else:
            source.recorded()
            yield CallDelta(name)
            called = True
            if not (yield from arguments(source)):
                return True
    if called:
        return True
    if name is None:
        return None
    source.recorded()
    yield CallDelta(name)
    yield ArgumentsDelta("{}")
    return True


def arguments(source: AnswerSource) -> Steps[bool]:
    """Yield the value of arguments; a text that holds JSON is unpacked.

    Returns:
        Whether it is whole.
    """
    if (yield from source.character()) in ("{", "["):
        return (yield from source.json_value(wrap=ArgumentsDelta))
    value = yield from source.json_text()
    yield ArgumentsDelta("{}" if value is None else unpacked(value))
    return value is not None


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of a schema, which a client wrote: what is no object has none."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def loaded(text: str | None) -> Any:
    """The value of JSON; None where it is none."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def unpacked(text: str) -> str:
    """Arguments as an object's JSON, from a value that is that, a text of it, or null."""
    value = loaded(text)
    if isinstance(value, str):
        return value
    return "{}" if value is None else text
