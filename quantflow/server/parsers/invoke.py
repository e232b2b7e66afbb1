"""Calls as `invoke` with a `parameter` each: MiniMax M2's, and DeepSeek's from V3.2 on (DSML).

    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Rome</parameter>
    </invoke>
    </minimax:tool_call>

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

DeepSeek V4 has `tool_calls` in place of `function_calls`. A value with `string="true"` is a text
whatever the tool's schema says; any other becomes what the schema says.
"""

import re
from dataclasses import dataclass

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.typed_arguments import TypedArguments

MINIMAX, DSML = "<minimax:tool_call>", "｜DSML｜"
_PARAMETER = re.compile(r"""["']?(?P<key>[^"']*)["']?(?:\s+string=["'](?P<text>\w+)["'])?\Z""")


@dataclass(frozen=True)
class _Marks:
    """The marks of a family; `calls` are around all calls of an answer, as beginning and end."""

    calls: tuple[tuple[str, str], ...]
    prefix: str = ""  # of the names of tags

    def begin(self, name: str) -> str:
        return f"<{self.prefix}{name} name="

    def end(self, name: str) -> str:
        return f"</{self.prefix}{name}>"

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(opening for opening, _ in self.calls)

    @property
    def closings(self) -> tuple[str, ...]:
        return tuple(closing for _, closing in self.calls)


_MINIMAX = _Marks(calls=((MINIMAX, "</minimax:tool_call>"),))
_DSML = _Marks(
    calls=tuple(
        (f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")
    ),
    prefix=DSML,
)
MINIMAX_MARKS, DSML_MARKS = (*_MINIMAX.openings, *_MINIMAX.closings), _DSML.openings


def minimax(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of MiniMax M2."""
    yield from _answer(source, tools, _MINIMAX)


def dsml(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of DeepSeek V3.2 or V4."""
    yield from _answer(source, tools, _DSML)


def _answer(source: AnswerSource, tools: Tools, marks: _Marks) -> Steps[None]:
    begins = (*marks.openings, marks.begin("invoke"))
    while (mark := (yield from source.until(*begins, wrap=TextDelta))) is not None:
        source.record()
        if mark in marks.openings:
            source.take(len(mark))
            yield from source.space()
        if not (yield from _call(source, tools, marks)):
            yield TextDelta(source.recorded())
            continue
        yield from source.space()
        for closing in marks.closings:
            yield from source.accept(closing)


def _call(source: AnswerSource, tools: Tools, marks: _Marks) -> Steps[bool]:
    """Read one call; whether it calls a known tool. If not, what was read is still recorded."""
    if not (yield from source.accept(marks.begin("invoke"))):
        return False
    name, end = yield from source.collect(">", "\n")
    name = name.strip().strip("\"'")
    if end != ">" or name not in tools:
        return False
    source.take(1)
    source.recorded()
    yield CallDelta(name)
    ends = (marks.end("parameter"), marks.end("invoke"), *marks.closings)
    arguments = TypedArguments(tools[name])
    while True:
        yield from source.space()
        if not (yield from source.accept(marks.begin("parameter"))):
            break
        head, end = yield from source.collect(">", "\n")
        parameter = _PARAMETER.match(head.strip())
        if end != ">" or parameter is None:
            return True
        source.take(1)
        yield arguments.begin(parameter["key"])
        kinds = {"string"} if parameter["text"] == "true" else None
        end = yield from arguments.value(source, parameter["key"], *ends, kinds=kinds)
        if end is None:
            return True
        yield from source.accept(marks.end("parameter"))
    closed = yield from source.accept(marks.end("invoke"))
    for closing in marks.closings:
        closed = closed or (yield from source.starts(closing))
    if closed or source.complete:
        yield arguments.end()
    return True
