"""GLM's calls, from 4.5 on.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
</tool_call>
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.typed_arguments import TypedArguments

TAG, TAG_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def glm(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of GLM."""
    while (yield from source.until(TAG, wrap=TextDelta)) is not None:
        source.record()
        source.take(len(TAG))
        yield from source.space()
        name, _ = yield from source.collect("\n", KEY, TAG_END)
        name = name.strip()
        if name not in tools:
            yield TextDelta(source.recorded())
            continue
        source.recorded()
        yield CallDelta(name)
        arguments = TypedArguments(tools[name])
        while True:
            yield from source.space()
            if not (yield from source.accept(KEY)):
                break
            key, end = yield from source.collect(KEY_END)
            source.take(len(end or ""))
            yield from source.space()
            if not (yield from source.accept(VALUE)):
                break
            yield arguments.begin(key.strip())
            end = yield from arguments.value(source, key.strip(), VALUE_END)
            source.take(len(end or ""))
            if end is None:
                return
        if (yield from source.accept(TAG_END)) or source.complete:
            yield arguments.end()
