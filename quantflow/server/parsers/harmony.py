"""gpt-oss's answers: messages on channels, of which `analysis` is reasoning.

    <|channel|>analysis<|message|>The user asks...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}
    <|start|>assistant<|channel|>final<|message|>Sunny.

A call's tool may stand before its channel too. What the model says on `commentary` to nobody is a
text for the user.
"""

import re

from quantflow.server.parsers.deltas import ArgumentsDelta, CallDelta, ReasoningDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools
from quantflow.server.parsers.source import AnswerSource, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL_END, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL_END, RETURN, START, CHANNEL)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of gpt-oss, from behind `<|start|>assistant`."""
    first, said = True, False
    while (yield from source.character()):
        source.record()
        yield from source.accept(START)
        begun = yield from source.starts(CHANNEL)
        for word in ("assistant", " to="):
            begun = begun or (yield from source.starts(word))
        if first and not begun:
            yield TextDelta(source.recorded())
            yield from source.until(*_ENDS, wrap=TextDelta)
            said = True
        else:
            said = yield from _message(source, tools, said=said)
        first = False
        yield from source.space()
        for end in (END, CALL_END, RETURN):
            yield from source.accept(end)
        yield from source.space()


def _message(source: AnswerSource, tools: Tools, *, said: bool) -> Steps[bool]:
    """Read a message from its head on.

    Returns:
        Whether there was a text for the user, in this message or before it (`said`).
    """
    head, mark = yield from source.collect(MESSAGE)
    if mark is None:
        yield TextDelta(source.recorded())
        return True
    source.take(len(MESSAGE))
    to = _TO.search(head)
    if to is not None and to[1] in tools:
        source.recorded()
        yield CallDelta(to[1])
        yield from source.until(*_ENDS, wrap=ArgumentsDelta)
        return said
    unknown = "" if to is None else source.recorded()  # the call of a tool that nobody offered
    source.recorded()
    if to is None and "analysis" in head:
        yield from source.until(*_ENDS, wrap=ReasoningDelta)
        yield ReasoningDelta("\n")  # before the next one; at the end it is none
        return said
    yield TextDelta("\n" * said + unknown)
    yield from source.until(*_ENDS, wrap=TextDelta)
    return True
