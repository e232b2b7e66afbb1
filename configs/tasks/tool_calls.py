"""A call that a model writes beside the one in the document: JSON with a name and arguments.

A task names it with `process_results: !function tool_calls.scores`; its documents have `call`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def scores(document: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Of the first result, 0 or 1 each.

    Returns:
        valid: it is a call in JSON; name: of the right tool; call: with the right arguments too,
        words compared without case, outer blanks and a full stop at the end.
    """
    found, expected = _call(results[0]), _call(document["call"])
    assert expected is not None
    named = found is not None and found["name"] == expected["name"]
    alike = named and found is not None and _plain(found) == _plain(expected)
    return {"valid": float(found is not None), "name": float(named), "call": float(alike)}


def _call(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value if isinstance(value.get("arguments"), dict) else None


def _plain(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.strip().rstrip(".").casefold() if isinstance(value, str) else value
        for key, value in call["arguments"].items()
    }
