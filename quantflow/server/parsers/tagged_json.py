"""AnswerParsers whose calls are JSON: behind a tag, or as the whole answer.

- Hermes, Qwen 2.5 and 3, SmolLM, Granite 4: `<tool_call>{...}</tool_call>`; Apriel and Jamba:
  `<tool_calls>[{...}, {...}]</tool_calls>`.
- Llama 3: `{"name": ..., "parameters": {...}}` alone, or behind `<|python_tag|>`; several with `;`
  between them; `<function=NAME>{...}</function>`; built-in tools as `NAME.call(query="...")`.
- Granite 3: `<|tool_call|>[{...}, {...}]`, or behind `<tool_call>` without its end. Phi-4-mini too.
- Nemotron Nano 2: `<TOOLCALL>[{...}]</TOOLCALL>`.

The end of a tag may be missing, as where the text was cut.
"""

from quantflow.server.parsers.deltas import CallDelta, TextDelta
from quantflow.server.parsers.json_calls import Tools, arguments, json_calls
from quantflow.server.parsers.pythonic import python_call
from quantflow.server.parsers.source import AnswerSource, Steps

TAG, PYTHON, BAR, FUNCTION = "<tool_call>", "<|python_tag|>", "<|tool_call|>", "<function="
NEMOTRON = "<TOOLCALL>"
TAGS = "<tool_calls>"
_ENDS = {TAG: "</tool_call>", TAGS: "</tool_calls>", BAR: "<|/tool_call|>", NEMOTRON: "</TOOLCALL>"}


def hermes(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer with `<tool_call>`, or one that is nothing but JSON."""
    yield from _answer(source, tools, (TAG, TAGS))


def llama(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Llama 3."""
    yield from _answer(source, tools, (PYTHON, FUNCTION))


def granite(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Granite."""
    yield from _answer(source, tools, (BAR, TAG))


def nemotron(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read an answer of Nemotron Nano 2."""
    yield from _answer(source, tools, (NEMOTRON,))


def untagged(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read the JSON of a call that a grammar forced."""
    yield from _answer(source, tools, ())


def _answer(source: AnswerSource, tools: Tools, tags: tuple[str, ...]) -> Steps[None]:
    source.record()
    yield from source.space()
    if (yield from source.character()) in ("{", "["):
        yield from json_calls(source, tools)
    else:
        yield TextDelta(source.recorded())
    while (tag := (yield from source.until(*tags, wrap=TextDelta))) is not None:
        source.record()
        source.take(len(tag))
        if tag == FUNCTION:
            yield from _function(source, tools)
            continue
        yield from source.space()
        first = yield from source.character()
        if first in ("{", "["):
            called = yield from json_calls(source, tools)
        elif tag == PYTHON:
            called = yield from python_call(source, tools)
        else:
            called = False
        if not called:
            yield TextDelta(source.recorded())
        elif tag in _ENDS:
            yield from source.space()
            yield from source.accept(_ENDS[tag])


def _function(source: AnswerSource, tools: Tools) -> Steps[None]:
    """Read `NAME>{...}</function>`."""
    name, end = yield from source.collect(">", "\n")
    if end != ">" or name not in tools:
        yield TextDelta(source.recorded())
        return
    source.take(1)
    yield from source.space()
    source.recorded()
    yield CallDelta(name)
    yield from arguments(source)
    yield from source.space()
    yield from source.accept("</function>")
