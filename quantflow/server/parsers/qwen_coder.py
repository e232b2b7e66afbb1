"""Qwen-Coder's calls, which Qwen 3.5 and Nemotron 3 write too.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Models leave out the first tag, or the end of the last parameter; JSON as Hermes has it is read too.
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, json_calls
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.typed_arguments import TypedArguments

TAG, TAG_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END, TAG_END)
_VALUE_ENDS = (*(f"\n{end}" for end in _ENDS), *_ENDS)


def qwen_coder(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Qwen-Coder."""
    while (mark := (yield from source.until(TAG, FUNCTION, wrap=TextDelta))) is not None:
        source.record()
        if mark == TAG:
            source.take(len(TAG))
            yield from source.space()
        if (yield from source.character()) == "{":
            called = yield from json_calls(source, tools)
        else:
            called = yield from _function(source, tools)
        if not called:
            yield TextDelta(source.recorded())
            continue
        yield from source.space()
        yield from source.accept(TAG_END)


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
        elif (yield from source.accept(FUNCTION_END)) or (yield from source.starts(TAG_END)):
            yield arguments.end()
            return True
        elif not (yield from source.character()):
            if source.complete:
                yield arguments.end()
            return True
        else:  # something between the parameters, which belongs to none
            source.take(1)
            yield from source.collect("<")
