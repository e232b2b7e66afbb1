"""Parsers of answers: calls of tools and reasoning, as the families of models write them.

    template -> parsers_of(...) -> Reader(...) -> feed(text), ..., end() -> deltas

A whole answer and a stream go through the same `Reader`, so both hold the same. A family is a row
of `CALL_PARSERS` or `REASONING_PARSERS`; its module has the format. The chat template shows the
family, since it writes earlier calls as the model learned them.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quantflow.errors import UsageError
from quantflow.server.parsers.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR, deepseek
from quantflow.server.parsers.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from quantflow.server.parsers.gemma import GEMMA_CALL, GEMMA_MARKS, gemma
from quantflow.server.parsers.glm import glm
from quantflow.server.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, harmony
from quantflow.server.parsers.invoke import DSML, DSML_MARKS, MINIMAX, MINIMAX_MARKS, dsml, minimax
from quantflow.server.parsers.json_calls import Tools
from quantflow.server.parsers.kimi import KIMI_MARKS, SECTION, kimi, kimi_id
from quantflow.server.parsers.mistral import ARGS, ID, OPENING, mistral
from quantflow.server.parsers.pythonic import CLOSINGS, OPENINGS, pythonic
from quantflow.server.parsers.qwen_coder import TAGS, qwen_coder
from quantflow.server.parsers.reasoning import ReasoningMarks, thoughts
from quantflow.server.parsers.source import AnswerSource, Steps
from quantflow.server.parsers.tagged_json import (
    BAR,
    NEMOTRON,
    PYTHON,
    TAG,
    granite,
    hermes,
    llama,
    nemotron,
    untagged,
)

AUTO, NONE = "auto", "none"


def any_id(name: str, number: int) -> str:
    """The id of a call, for templates that take any."""
    del name, number
    return f"call_{secrets.token_hex(12)}"


def short_id(name: str, number: int) -> str:
    """The id of a call, for templates that take nine letters and digits alone."""
    del name, number
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True, kw_only=True)
class CallParser:
    """A way of writing calls.

    Attributes:
        read: reads an answer whose reasoning is over.
        signs: texts of which a template of the family has one.
        marks: texts that begin a call.
        kept: texts that a tokenizer may have as special tokens, and that reading needs.
        new_id: the id of a call, from its tool's name and the number of calls before it in the
            conversation.
        reasons: whether it reads reasoning too.
    """

    read: Callable[[AnswerSource, Tools], Steps[None]]
    signs: tuple[str, ...]
    marks: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    new_id: Callable[[str, int], str] = any_id
    reasons: bool = False


_TAGS = (TAG, "</tool_call>")
CALL_PARSERS: Mapping[str, CallParser] = MappingProxyType(
    {  # a template belongs to the first family of which it has a sign
        "harmony": CallParser(
            read=harmony,
            signs=("<|channel|>",),
            kept=(START, CHANNEL, MESSAGE, CONSTRAIN, END),
            reasons=True,
        ),
        "mistral": CallParser(
            read=mistral,
            signs=(OPENING,),
            marks=(OPENING,),
            kept=(OPENING, ID, ARGS),
            new_id=short_id,
        ),
        "deepseek": CallParser(
            read=deepseek,
            signs=(CALLS,),
            marks=(CALLS,),
            kept=(CALLS, CALL, SEPARATOR, CALL_END, CALLS_END),
        ),
        "dsml": CallParser(read=dsml, signs=(DSML,), marks=DSML_MARKS, kept=(DSML, *DSML_MARKS)),
        "kimi": CallParser(
            read=kimi,
            signs=(SECTION, "<|im_middle|>"),
            marks=(SECTION,),
            kept=KIMI_MARKS,
            new_id=kimi_id,
        ),
        "minimax": CallParser(read=minimax, signs=(MINIMAX,), marks=(MINIMAX,), kept=MINIMAX_MARKS),
        "gemma": CallParser(
            read=gemma,
            signs=(GEMMA_CALL,),
            marks=(GEMMA_CALL,),
            kept=GEMMA_MARKS,
        ),
        "qwen_coder": CallParser(
            read=qwen_coder,
            signs=("<parameter=",),
            marks=(*TAGS, "<function="),
            kept=(*TAGS, *TAGS.values()),
        ),
        "nemotron": CallParser(read=nemotron, signs=(NEMOTRON,), marks=(NEMOTRON,)),
        "glm": CallParser(
            read=glm,
            signs=("<arg_key>",),
            marks=(TAG,),
            kept=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        "granite": CallParser(
            read=granite, signs=(BAR,), marks=(BAR, TAG), kept=(BAR, "<|/tool_call|>", *_TAGS)
        ),
        "pythonic": CallParser(
            read=pythonic,
            signs=(*OPENINGS, "[func_name1("),
            marks=OPENINGS,
            kept=(*OPENINGS, *CLOSINGS),
        ),
        "hermes": CallParser(
            read=hermes, signs=(TAG, "<tool_calls>"), marks=(TAG, "<tool_calls>"), kept=_TAGS
        ),
        "llama": CallParser(
            read=llama,
            signs=(PYTHON, '"parameters":', "<function="),
            marks=(PYTHON,),
            kept=(PYTHON,),
        ),
    }
)
REASONING_PARSERS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {  # a template belongs to the first of which it has a sign
        "think": ReasoningMarks(
            openings=("<think>",), closing="</think>", signs=("<think>", "</think>")
        ),
        "mistral": ReasoningMarks(openings=("[THINK]",), closing="[/THINK]", signs=("[THINK]",)),
        "seed_oss": ReasoningMarks(
            openings=("<seed:think>",), closing="</seed:think>", signs=("<seed:think>",)
        ),
        "cohere": ReasoningMarks(
            openings=("<|START_THINKING|>",),
            closing="<|END_THINKING|>",
            signs=("<|START_THINKING|>",),
        ),
        "kimi": ReasoningMarks(openings=("◁think▷",), closing="◁/think▷", signs=("◁think▷",)),
        "gemma": ReasoningMarks(
            openings=("<|channel>thought",),
            closing="<channel|>",
            signs=("<|channel>",),
            tokens=("<|channel>",),
        ),
        "granite": ReasoningMarks(
            openings=("Here is my thought process:", "Here's my thought process:"),
            closing="Here is my response:",
            signs=("Here is my thought process:",),
        ),
        "deepseek_r1": ReasoningMarks(
            openings=("<think>",), closing="</think>", signs=(), silent=True
        ),
    }
)
# the names that vLLM and SGLang have for these
TOOL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "openai": "harmony",
        "gpt-oss": "harmony",
        "deepseek_v3": "deepseek",
        "deepseekv3": "deepseek",
        "deepseek_v31": "deepseek",
        "deepseekv31": "deepseek",
        "deepseek_v32": "dsml",
        "deepseekv32": "dsml",
        "deepseek_v4": "dsml",
        "deepseekv4": "dsml",
        "kimi_k2": "kimi",
        "minimax_m2": "minimax",
        "minimax-m2": "minimax",
        "gemma4": "gemma",
        "qwen3_coder": "qwen_coder",
        "qwen3_xml": "qwen_coder",
        "glm45": "glm",
        "glm47": "glm",
        "qwen": "hermes",
        "qwen25": "hermes",
        "llama3": "llama",
        "llama3_json": "llama",
        "llama4_json": "llama",
        "llama4_pythonic": "pythonic",
        "phi4_mini_json": "granite",
    }
)
REASONING_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "qwen3": "think",
        "glm45": "think",
        "deepseek_v3": "think",
        "deepseek-r1": "deepseek_r1",
        "deepseek-v3": "think",
        "openai_gptoss": "harmony",
        "gpt-oss": "harmony",
        "magistral": "mistral",
        "kimi_k2": "think",
        "minimax_m2": "think",
        "minimax": "think",
        "deepseek_v4": "think",
        "gemma4": "gemma",
    }
)


@dataclass(frozen=True, kw_only=True)
class AnswerParsers:
    """The families of a model.

    Attributes:
        calls: family of its calls; None where nothing but text is read.
        offers: whether calls are read; otherwise `calls` reads reasoning alone.
        marks: marks of its reasoning; None where that is not read, or `calls` reads it.
    """

    calls: CallParser | None
    offers: bool
    marks: ReasoningMarks | None

    def reader(
        self,
        tools: Tools,
        *,
        prompt: str = "",
        prefix: str = "",
        forced: bool = False,
        reasons: bool = True,
        parallel: bool = True,
    ) -> "Reader":
        """A reader of one answer.

        Args:
            tools: schemas of the arguments of the tools that the model may call, by name.
            prompt: prompt of the answer.
            prefix: beginning of the answer that the prompt ends with.
            forced: whether a grammar makes the answer a call, which is JSON then.
            reasons: whether the answer may begin with reasoning.
            parallel: whether several calls are handed on, or the first alone.
        """
        source = AnswerSource()
        tools = tools if self.offers or forced else {}
        calls = self.calls if self.calls is not None and (tools or self.calls.reasons) else None
        if forced:
            calls, steps = None, untagged(source, tools)
        else:
            steps = source.rest() if calls is None else calls.read(source, tools)
        if self.marks is not None and reasons:
            begun = self.marks.begun(prompt, prefix)
            ends = () if calls is None else calls.marks
            steps = _thinking(steps, thoughts(source, self.marks, begun=begun, calls=ends))
        reader = Reader(source, steps, parallel=parallel)
        _, begun_by, beginning = prompt.rpartition(f"{START}assistant")
        if calls is not None and calls.reasons and begun_by:
            reader.feed(beginning)  # a message that the prompt begins is gone on with
        return reader

    def closing(self, prompt: str, prefix: str) -> str | None:
        """The text that ends the reasoning within which an answer begins; None where it does not.

        Args:
            prompt: prompt of the answer.
            prefix: beginning of the answer that the prompt ends with.
        """
        marks = self.marks
        return None if marks is None or not marks.begun(prompt, prefix) else marks.closing

    def kept(self, *, tools: bool) -> tuple[str, ...]:
        """The texts that reading needs though they may be special tokens.

        Args:
            tools: whether the model may call tools.
        """
        calls, marks = self.calls, self.marks
        of_calls = (
            () if calls is None or not (calls.reasons or (tools and self.offers)) else calls.kept
        )
        return (
            of_calls
            if marks is None
            else (*of_calls, *marks.openings, *marks.tokens, marks.closing)
        )


def parsers_of(template: str, *, calls: str = AUTO, reasoning: str = AUTO) -> AnswerParsers:
    """The families of a chat template.

    Args:
        template: text of the template.
        calls: a key of `CALL_PARSERS` or `TOOL_NAMES`; `auto` finds it by the template, `none`
            reads no calls.
        reasoning: likewise, of `REASONING_PARSERS` or `REASONING_NAMES`, or `harmony`.

    Raises:
        KeyError: there is no such family.
    """
    calls, reasoning = TOOL_NAMES.get(calls, calls), REASONING_NAMES.get(reasoning, reasoning)
    names = (
        name for name, one in CALL_PARSERS.items() if any(sign in template for sign in one.signs)
    )
    shown = next(names, "hermes")
    family = None if calls == NONE else CALL_PARSERS[shown if calls == AUTO else calls]
    if reasoning == "harmony" or (reasoning == AUTO and shown == "harmony"):
        family = family or CALL_PARSERS["harmony"]
    marks = None
    if reasoning == AUTO:
        every = REASONING_PARSERS.values()
        marks = next((one for one in every if any(m in template for m in one.signs)), None)
    elif reasoning not in (NONE, "harmony"):
        marks = REASONING_PARSERS[reasoning]
    if family is not None and family.reasons:
        marks = None
    return AnswerParsers(calls=family, offers=calls != NONE, marks=marks)


def check_names(*, calls: str, reasoning: str) -> None:
    """Refuse names of no family; see `parsers_of`.

    Raises:
        UsageError: there is no such family; the message names the others.
    """
    for option, name, table, others in (
        ("tool_parser", calls, CALL_PARSERS, TOOL_NAMES),
        ("reasoning_parser", reasoning, (*REASONING_PARSERS, "harmony"), REASONING_NAMES),
    ):
        if name not in (AUTO, NONE, *table, *others):
            raise UsageError(
                f"{option}={name}", f"use one of {', '.join((AUTO, NONE, *table, *others))}"
            )


class Reader:
    """An answer that is read while it grows.

    White space around calls and around reasoning is no text.
    """

    def __init__(self, source: AnswerSource, steps: Steps[None], *, parallel: bool = True) -> None:
        """Begin to read; `parallel` is whether several calls are handed on."""
        self._source, self._steps, self._parallel = source, steps, parallel
        self._calls = 0
        self._said = self._thought = False  # whether text, whether reasoning was handed on
        self._space = ""  # white space that may be none of the text
        self._gap = ""  # the same of the reasoning

    def feed(self, text: str) -> list[Delta]:
        """What more text shows."""
        self._source.text += text
        return self._run()

    def end(self, *, cut: bool = False) -> list[Delta]:
        """What the end of the text shows; `cut` is whether it ended by its length."""
        self._source.ended, self._source.cut = True, cut
        found = self._run()
        if self._space and not (self._said or self._thought or self._calls):
            found.append(TextDelta(self._space))
        return found

    def _run(self) -> list[Delta]:
        found: list[Delta] = []
        for delta in self._steps:
            if delta is None:
                break
            if isinstance(delta, TextDelta):
                delta = TextDelta(self._text(delta.text))
            elif isinstance(delta, ReasoningDelta):
                delta = ReasoningDelta(self._reasoning(delta.text))
            else:
                self._calls += isinstance(delta, CallDelta)
                if self._calls > 1 and not self._parallel:
                    continue
            last = found[-1] if found else None
            if isinstance(delta, CallDelta):
                found.append(delta)
            elif isinstance(last, type(delta)) and not isinstance(last, CallDelta):
                found[-1] = type(delta)(last.text + delta.text)
            elif delta.text:
                found.append(delta)
        return found

    def _text(self, text: str) -> str:
        if self._said:
            return text
        self._space += text
        if not self._space.strip():
            return ""
        self._said = True
        return self._space

    def _reasoning(self, text: str) -> str:
        text = self._gap + text if self._thought else text.lstrip()
        end = text.rstrip()
        self._gap = text[len(end) :]
        self._thought = self._thought or bool(end)
        return end


def _thinking(steps: Steps[None], before: Steps[None]) -> Steps[None]:
    yield from before
    yield from steps
