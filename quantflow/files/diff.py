"""The comparison of two manifests, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantflow.files.canonical import canonical_json

ABSENT = "(absent)"
_FIRST = (
    "kind",
    "layout_version",
    "source",
    "recipe",
    "measurement",
    "float8",
    "tools",
    "made_from",
    "proof",
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field in which two manifests differ.

    Attributes:
        path: the field, such as `recipe.scheme` or `ledger.tensors[lm_head.weight].action`.
        left: its value in the first manifest, or ABSENT.
        right: its value in the second, or ABSENT.
    """

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        """`path: left -> right` on one line, long values shortened."""
        return f"{self.path}: {_short(self.left)} -> {_short(self.right)}"


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Compare two manifests; the list is empty exactly when their digests agree.

    Causes come before effects: source and recipe first, then files, layers and ledger. Rows with a
    name (those of the ledger) are compared with the row of the same name, in any place. `digest` is
    left out: it follows from the rest.
    """
    keys = sorted(
        (a.keys() | b.keys()) - {"digest"},
        key=lambda key: (_FIRST.index(key) if key in _FIRST else 99, key),
    )
    return [
        difference
        for key in keys
        for difference in _compare(key, a.get(key, ABSENT), b.get(key, ABSENT))
    ]


def _compare(path: str, left: Any, right: Any) -> Iterator[Difference]:
    if (
        isinstance(left, list)
        and isinstance(right, list)
        and _have_names(left)
        and _have_names(right)
    ):
        names = [[row["name"] for row in rows] for rows in (left, right)]
        same_set = sorted(names[0]) == sorted(names[1])
        if same_set and names[0] != names[1]:
            yield Difference(path=f"{path} (order)", left=names[0], right=names[1])
        left, right = ({row["name"]: row for row in rows} for rows in (left, right))
    elif isinstance(left, list) and isinstance(right, list):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            child = (
                f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key}]"
            )
            yield from _compare(child, left.get(key, ABSENT), right.get(key, ABSENT))
    elif canonical_json(left) != canonical_json(right):
        yield Difference(path=path, left=left, right=right)


def _have_names(rows: list[Any]) -> bool:
    """Whether rows are tables with different names."""
    names = [row.get("name") for row in rows if isinstance(row, dict)]
    strings = {name for name in names if isinstance(name, str)}
    return len(rows) == len(names) == len(strings)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:60]}... ({len(text)} characters)"
