"""The pieces of an answer: text, reasoning, and calls of tools whose arguments come bit by bit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """The beginning of a call of a tool."""

    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON of the last call's arguments."""

    text: str


Delta = TextDelta | ReasoningDelta | CallDelta | ArgumentsDelta
