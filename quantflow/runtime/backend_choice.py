"""The backends of an artifact's linears, and why those before them cannot run, from headers."""

from pathlib import Path
from typing import Any

import torch

from quantflow.runtime.artifact import open_artifact


def backends(folder: Path, *, dtype: str) -> list[dict[str, Any]]:
    """The linears of an artifact, those that are alike as one row with their count and first name.

    Linears are alike in scheme, shape, backend and reasons.

    Raises:
        InputError: the folder is not an artifact.
    """
    artifact = open_artifact(folder, dtype=getattr(torch, dtype), verify=False, inputs="usual")
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
