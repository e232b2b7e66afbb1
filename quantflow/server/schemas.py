"""JSON schemas as people write them, made into what a model needs.

The specification lets an object have any further property where a schema does not say
`additionalProperties`. A small model then adds property after property and never ends. Nobody who
writes `properties` means that: pydantic, LangChain and MCP say nothing and expect the properties
alone. So an object that lists properties has no others, unless it says so.

Where schemas are combined (`allOf`, or `anyOf` beside `properties`), each part would forbid the
properties of the others. Such parts stay open, and the whole has the properties of all.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from quantflow.server.errors import invalid

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")
_SEVERAL = ("prefixItems", "items")
_PARTS = ("allOf", "anyOf", "oneOf")
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_OPEN = "x-open-"  # name of an open copy of a definition
_STEPS = 50_000  # parts and names that are looked at: parts that refer to each other make many


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that they list alone.

    An object that lists properties and says no type is an object. A property whose names are an
    enumeration becomes several.

    Raises:
        Refused: parts are combined in too many ways; kind validation.
    """
    closing = _Closing(schema)
    result: dict[str, Any] = closing.node(dict(schema), part=False)
    return closing.with_copies(result)


class _Closing:
    """One schema on its way.

    Attributes:
        root: the whole schema, in which references are looked up.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._copies: dict[str, str] = {}  # reference -> name of the open copy of its target
        self._left = _STEPS

    def node(self, node: Any, *, part: bool) -> Any:
        """A schema inside the whole one.

        Args:
            node: the schema.
            part: whether it is combined with others, which have properties of their own.
        """
        if not isinstance(node, dict):
            return node
        self._spend(1)
        mixes = part or _mixes(node)
        result = {key: self._value(key, value, part=mixes) for key, value in node.items()}
        if mixes and isinstance(reference := node.get("$ref"), str):
            result["$ref"] = self._open_copy(reference)
        if isinstance(node.get("properties"), dict):
            if not any(key in node for key in ("type", "const", "enum", "$ref", *_PARTS)):
                result["type"] = "object"
            if not part and not mixes and not any(key in node for key in _SAYS):
                result["additionalProperties"] = False
        if mixes and not part:
            result = self._whole(node, result)
        closes = result.get("unevaluatedProperties") is False and not mixes
        if closes and "additionalProperties" not in result:
            result["additionalProperties"] = result.pop("unevaluatedProperties")
        return self._named(result)

    def with_copies(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result with the open copies of definitions that its parts refer to."""
        done: dict[str, Any] = {}
        while left := [one for one in self._copies if self._copies[one] not in done]:
            for reference in left:
                done[self._copies[reference]] = self.node(self._target(reference), part=True)
        return result if not done else {**result, "$defs": {**result.get("$defs", {}), **done}}

    def _value(self, key: str, value: Any, *, part: bool) -> Any:
        if key in _BY_NAME and isinstance(value, dict):
            return {name: self.node(one, part=False) for name, one in value.items()}
        if key in _PARTS and isinstance(value, list):
            return [self.node(one, part=part) for one in value]
        if key in _SEVERAL and isinstance(value, list):
            return [self.node(one, part=False) for one in value]
        return self.node(value, part=False) if key in _ONE else value

    def _whole(self, node: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """A combination with the properties of all its parts, and no others."""
        parts = self._parts(node)
        names = [name for one in parts for name in one.get("properties", ())]
        if not names or any(key in one for one in parts for key in _SAYS):
            return result
        listed = {**dict.fromkeys(names, True), **result.get("properties", {})}
        # its own properties come first: llguidance writes them in the order of the schema
        return {"properties": listed, **result} | {
            "properties": listed,
            "additionalProperties": False,
        }

    def _parts(self, node: Any) -> list[dict[str, Any]]:
        """The object and all that is combined with it, references followed, in order."""
        found, left, seen = [], [node], set[str]()
        while left:
            one = left.pop()
            if not isinstance(one, dict):
                continue
            own = one.get("properties", {})
            listed = isinstance(own, dict)
            self._spend(1 + len(own) if listed else 1)
            found.append(one if listed else {})
            inner = [
                part for key in _PARTS if isinstance(parts := one.get(key), list) for part in parts
            ]
            reference = one.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                inner.append(self._target(reference))
            left += reversed(inner)
        return found

    def _spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            Refused: there were too many; kind validation.
        """
        self._left -= steps
        if self._left < 0:
            raise invalid("grammar is not valid: too many combined parts")

    def _open_copy(self, reference: str) -> str:
        """A reference to an open copy of its target; the same where it leads nowhere here."""
        if self._target(reference) is None:
            return reference
        name = self._copies.setdefault(reference, f"{_OPEN}{len(self._copies)}")
        return f"#/$defs/{name}"

    def _target(self, reference: str) -> Any:
        """The schema that a reference into this document leads to; None for any other."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found: Any = self.root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isascii() and name.isdigit():
                found = found[int(name)] if int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _named(self, node: dict[str, Any]) -> dict[str, Any]:
        """An object whose names are an enumeration, with a property for each of them."""
        names = node.get("propertyNames")
        if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
            names = self._target(reference)
        values = names.get("enum") if isinstance(names, dict) else None
        if not isinstance(values, list) or "properties" in node or "patternProperties" in node:
            return node
        rest = node.get("additionalProperties", True)
        left = {key: value for key, value in node.items() if key != "propertyNames"}
        listed = {name: rest for name in values if isinstance(name, str)}
        return {**left, "properties": listed, "additionalProperties": False}


def _mixes(node: Mapping[str, Any]) -> bool:
    """Whether the properties of an object stand in several places.

    A part alone, with nothing that lists properties beside it, is the object itself: pydantic
    writes `{"allOf": [{"$ref": ...}], "description": ...}`.
    """
    places = [key for key in (*_PARTS, "$ref") if key in node]
    everything = node.get("allOf")
    several = isinstance(everything, list) and len(everything) > 1
    return bool(places) and (several or len(places) > 1 or "properties" in node)
