"""Mistral's calls, in both forms.

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[CALL_ID]8xYz12AbC[ARGS]{}

Its templates take ids of nine letters and digits alone.
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, arguments, json_calls
from quantflow.server.parsers.source import AnswerSource, Steps

OPENING, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Mistral."""
    while (yield from source.until(OPENING, wrap=TextDelta)) is not None:
        source.record()
        source.take(len(OPENING))
        yield from source.space()
        if (yield from source.character()) in ("[", "{"):
            if not (yield from json_calls(source, tools)):
                yield TextDelta(source.recorded())
            continue
        name, mark = yield from source.collect(ID, ARGS, "{", OPENING)
        if mark == ID:
            _, mark = yield from source.collect(ARGS, "{", OPENING)
        if mark not in (ARGS, "{") or name.strip() not in tools:
            yield TextDelta(source.recorded())
            continue
        yield from source.accept(ARGS)
        yield from source.space()
        source.recorded()
        yield CallDelta(name.strip())
        yield from arguments(source)
