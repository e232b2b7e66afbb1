"""Which backend runs which linears of an artifact, and why those before it do not; reads headers and no weight."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantflow.runtime.artifact import open_artifact
from stages._options import table


def backends(folder: Path, *, dtype: str) -> list[dict[str, Any]]:
    """Return linears that are alike (scheme, shape, backend, reasons) as one row each, with their count and first name.

    Raises:
        InputError: the folder is not an artifact.
    """
    artifact = open_artifact(folder, dtype=getattr(torch, dtype), verify=False)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, linear in artifact.linears.items():
        key = (linear.scheme, linear.shape, linear.backend.name)
        row = {
            "first": name,
            "count": 0,
            "scheme": linear.scheme.name,
            "shape": list(linear.shape),
            "backend": linear.backend.name,
            "why_not": linear.reasons,
        }
        rows.setdefault(key, row)["count"] += 1
    return list(rows.values())


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table, and every reason once."""
    cells = [(r["first"], r["scheme"], r["backend"], "x".join(map(str, r["shape"])), str(r["count"])) for r in rows]
    lines = [table(("first linear", "scheme", "backend", "shape", "linears"), cells)]
    for scheme, reasons in {r["scheme"]: r["why_not"] for r in rows}.items():
        lines += [f"\n{scheme}, not run by", *(f"  {name}: {reason}" for name, reason in reasons.items())]
    return "\n".join(lines)
