"""One check of a whole JSON value where it is read, against a shape that is spelled as types.

    class Source(TypedDict):
        name: str
        revision: NotRequired[str | None]

    check(value, Source, where="quantflow.json: source")

A shape is `Any`, None, bool, int, float, str, `Literal[...]`, `list[...]`, `dict[str, ...]`, a
TypedDict, a union of these, or one `Annotated` with `Between`. As in JSON, an int is also a float,
and a bool is neither. A TypedDict may have more keys than it names.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantflow.errors import InputError

AGAIN = "restore the file from where it came from"


@dataclass(frozen=True)
class Between:
    """The least and the largest number that are allowed."""

    least: float
    most: float


def check(value: Any, shape: Any, *, where: str, remedy: str = AGAIN) -> None:
    """Refuse a value that does not have a shape.

    Args:
        value: value of a JSON file.
        shape: shape, see the module's header.
        where: the file, and the key in it, for the message.
        remedy: remedy for the message.

    Raises:
        InputError: a value has another shape; the message names the first such key and what it
            needs.
    """
    mismatch = _wrong(value, shape)
    if mismatch is not None:
        path, wrong, needed = mismatch
        shown = repr(wrong)
        place = f"{where}: {path.removeprefix('.')}" if path else where
        cause = f"{place}: {shown if len(shown) <= 60 else shown[:57] + '...'}, {needed} is needed"
        raise InputError(cause, remedy)


def _wrong(value: Any, shape: Any) -> tuple[str, Any, str] | None:
    """The first part of a value that lacks its shape: (path, part, needed); else None."""
    kind = typing.get_origin(shape)
    if kind is typing.Annotated:
        inner, *limits = typing.get_args(shape)
        mismatch = _wrong(value, inner)
        if mismatch is not None or value is None:
            return mismatch
        (limit,) = limits
        return (
            None
            if limit.least <= value <= limit.most
            else ("", value, f"{limit.least} to {limit.most}")
        )
    if kind in (types.UnionType, typing.Union):
        options = typing.get_args(shape)
        tries = [_wrong(value, option) for option in options]
        if None in tries:
            return None
        deepest = max(
            (mismatch for mismatch in tries if mismatch is not None),
            key=lambda mismatch: len(mismatch[0]),
        )
        return deepest if deepest[0] else ("", value, " or ".join(map(_word, options)))
    if kind is typing.Literal:
        known = typing.get_args(shape)
        return (
            None
            if any(value == word and type(value) is type(word) for word in known)
            else ("", value, _word(shape))
        )
    if kind is list:
        if not isinstance(value, list):
            return "", value, "a list"
        return _first((f"[{i}]", item, typing.get_args(shape)[0]) for i, item in enumerate(value))
    if kind is dict:
        if not isinstance(value, Mapping):
            return "", value, "a table"
        return _first((f".{key}", item, typing.get_args(shape)[1]) for key, item in value.items())
    if typing.is_typeddict(shape):
        return _wrong_table(value, shape)
    return None if _is(value, shape) else ("", value, _word(shape))


def _wrong_table(value: Any, shape: Any) -> tuple[str, Any, str] | None:
    if not isinstance(value, Mapping):
        return "", value, "a table"
    missing = sorted(shape.__required_keys__ - value.keys())
    if missing:
        return f".{missing[0]}", None, "a value"
    return _first(
        (f".{key}", value[key], hint) for key, hint in _hints(shape).items() if key in value
    )


def _first(items: Any) -> tuple[str, Any, str] | None:
    for path, item, shape in items:
        mismatch = _wrong(item, shape)
        if mismatch is not None:
            return f"{path}{mismatch[0]}", mismatch[1], mismatch[2]
    return None


def _is(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return type(value) in (int, float) and -(2**1023) < value < 2**1023  # NaN is not
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) is kind


@cache
def _hints(shape: Any) -> dict[str, Any]:
    """Types of a TypedDict's keys, without `NotRequired`."""
    found = typing.get_type_hints(shape, include_extras=True)
    return {
        key: typing.get_args(hint)[0] if typing.get_origin(hint) is typing.NotRequired else hint
        for key, hint in found.items()
    }


def _word(shape: Any) -> str:
    """The words for a shape in a message."""
    kind = typing.get_origin(shape)
    if kind is typing.Literal:
        return " or ".join(repr(word) for word in typing.get_args(shape))
    if kind is typing.Annotated:
        inner, limit = typing.get_args(shape)
        return f"{_word(inner)} from {limit.least} to {limit.most}"
    if kind is list:
        return "a list"
    if kind is dict or typing.is_typeddict(shape):
        return "a table"
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        None: "null",
        type(None): "null",
    }
    return names.get(shape, str(shape))
