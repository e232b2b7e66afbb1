"""Qwen-Coder's calls, which Qwen 3.5, Nemotron 3 and Seed-OSS write too.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Seed-OSS has `<seed:tool_call>` around them. Models leave out the first tag, or the end of the last
parameter; JSON as Hermes has it is read too.
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, json_calls
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.typed_arguments import TypedArguments

TAGS = {"<tool_call>": "</tool_call>", "<seed:tool_call>": "</seed:tool_call>"}
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END, *TAGS.values())
_VALUE_ENDS = (*(f"\n{end}" for end in _ENDS), *_ENDS)


def qwen_coder(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Qwen-Coder."""
    while (mark := (yield from source.until(*TAGS, FUNCTION, wrap=TextDelta))) is not None:
        source.record()
        if mark in TAGS:
            source.take(len(mark))
            yield from source.space()
        if (yield from source.character()) == "{":
            called = yield from json_calls(source, tools)
        else:
            called = yield from _function(source, tools)
        if not called:
            yield TextDelta(source.recorded())
            continue
        yield from source.space()
        for end in TAGS.values():
            yield from source.accept(end)


def _function(source: AnswerSource, tools: Tools) -> Steps[bool]:
    if not (yield from source.accept(FUNCTION)):
        return False
    name, end = yield from source.collect(">", "\n", "<")
    name = name.strip().strip("\"'")
    if end != ">" or name not in tools:
        return False
    source.take(1)
    source.recorded()
    yield CallDelta(name)
    arguments = TypedArguments(tools[name])
    while True:
        yield from source.space()
        if (yield from source.accept(PARAMETER)):
            key, end = yield from source.collect(">", "\n")
            if end != ">":
                return True
            source.take(1)
            yield from source.accept("\n")
            key = key.strip().strip("\"'")
            yield arguments.begin(key)
            if (yield from arguments.value(source, key, *_VALUE_ENDS)) is None:
                return True
            yield from source.accept("\n")
            yield from source.accept(PARAMETER_END)
        elif (yield from source.accept(FUNCTION_END)) or (yield from _starts_any(source)):
            yield arguments.end()
            return True
        elif not (yield from source.character()):
            if source.complete:
                yield arguments.end()
            return True
        else:  # something between the parameters, which belongs to none
            source.take(1)
            yield from source.collect("<")


def _starts_any(source: AnswerSource) -> Steps[bool]:
    """Whether the end of a tag comes next."""
    for end in TAGS.values():
        if (yield from source.starts(end)):
            return True
    return False
