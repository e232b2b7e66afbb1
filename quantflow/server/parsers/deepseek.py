"""DeepSeek's calls: those of V3 and R1, and the shorter ones of V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, arguments
from quantflow.server.parsers.source import AnswerSource, Steps

CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def deepseek(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of DeepSeek."""
    while (mark := (yield from source.until(CALLS, CALL, CALLS_END, wrap=TextDelta))) is not None:
        source.record()
        source.take(len(mark))
        yield from source.space()
        if mark != CALL and not (yield from source.starts(CALL)):
            if mark == CALLS:
                yield TextDelta(source.recorded())
            continue
        yield from source.accept(CALL)
        head, found = yield from source.collect(SEPARATOR, CALL_END)
        if found != SEPARATOR:
            yield TextDelta(source.recorded())
            continue
        source.take(len(SEPARATOR))
        yield from source.space()
        name = head.strip()
        if (yield from source.character()) != "{":
            name, _ = yield from source.collect("\n", "`", CALL_END)
            yield from source.space()
            yield from source.accept("```json")
            yield from source.space()
        if name.strip() not in tools:
            yield TextDelta(source.recorded())
            continue
        source.recorded()
        yield CallDelta(name.strip())
        yield from arguments(source)
        yield from source.space()
        yield from source.accept("```")
        yield from source.space()
        yield from source.accept(CALL_END)
        yield from source.space()
