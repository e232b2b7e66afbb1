"""Arguments that come as names and bare texts: each becomes what the tool's schema says.

AnswerParsers that write arguments between tags say nothing of types: `5` may be a number or a text.
"""

import json
from collections.abc import Mapping
from typing import Any

from quantflow.server.parsers.deltas import ArgumentsDelta
from quantflow.server.parsers.json_calls import properties
from quantflow.server.parsers.pythonic import read_literal
from quantflow.server.parsers.source import AnswerSource, Steps

_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


class TypedArguments:
    """The JSON object of a call's arguments, argument by argument."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Begin the object; `schema` is the tool's."""
        self._schema = schema
        self._count = 0

    def begin(self, name: str) -> ArgumentsDelta:
        """The beginning of an argument: its name."""
        before = ", " if self._count else "{"
        self._count += 1
        return ArgumentsDelta(f"{before}{json.dumps(name, ensure_ascii=False)}: ")

    def end(self) -> ArgumentsDelta:
        """The end of the object."""
        return ArgumentsDelta("}" if self._count else "{}")

    def value(
        self, source: AnswerSource, name: str, *ends: str, kinds: set[str] | None = None
    ) -> Steps[str | None]:
        """Read a value up to one of some ends, which is not read; a text is handed on as it comes.

        Args:
            source: source of the answer.
            name: name of the argument.
            ends: ends of the value.
            kinds: its JSON types, where the answer says them; None is those of the schema.

        Returns:
            The end; None where the text ended without one.
        """
        if kinds is None:
            kinds = kinds_of(properties(self._schema).get(name), self._schema)
        if kinds == {"string"}:
            yield ArgumentsDelta('"')
            end = yield from source.until(*ends, wrap=in_string)
            if end is not None:
                yield ArgumentsDelta('"')
            return end
        text, end = yield from source.collect(*ends)
        if end is not None:
            yield ArgumentsDelta(json.dumps(typed(text, kinds), ensure_ascii=False))
        return end


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows, as far as it says them; none where it says nothing.

    Args:
        schema: schema of a value.
        root: schema that its references lead into.
    """
    kinds: set[str] = set()
    met: set[str] = set()  # references, which may lead to each other
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        said = one.get("type")
        values = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(said, str | list):
            kinds.update([said] if isinstance(said, str) else map(str, said))
        elif isinstance(values, list):
            kinds.update(_KINDS[type(value)] for value in values)
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in met:
            met.add(reference)
            waiting.append(_referred(reference, root))
        for key in ("anyOf", "oneOf", "allOf"):
            waiting.extend(parts if isinstance(parts := one.get(key), list) else ())
    return kinds


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def typed(text: str, kinds: set[str]) -> Any:
    """A value of one of some types; the text itself where it is of none of them."""
    if not kinds:
        value = read_literal(text)
        return text if isinstance(value, str) else value
    value = read_literal(text)
    kind = _KINDS.get(type(value), "")
    if kind == "integer" and "integer" not in kinds and "number" in kinds:
        return value
    if kind == "number" and "number" not in kinds and value == int(value) and "integer" in kinds:
        return int(value)
    if kind in kinds and kind != "string":
        return value
    return text if "string" in kinds or isinstance(value, str) else value


def in_string(piece: str) -> ArgumentsDelta:
    """A piece of a text inside a JSON string."""
    return ArgumentsDelta(json.dumps(piece, ensure_ascii=False)[1:-1])
