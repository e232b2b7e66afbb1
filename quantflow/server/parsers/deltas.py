"""The pieces of an answer: text, reasoning, and calls of tools whose arguments come bit by bit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a call of a tool."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON of the last call's arguments."""

    text: str


Delta = Text | Thought | Call | Arguments
