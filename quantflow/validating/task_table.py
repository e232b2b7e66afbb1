"""The scores of tasks as a table for people. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from quantflow.validating.recovery import bounds

COLUMNS = ("task", "metric", "documents", "source", "artifact", "recovery", "at least")


def cells(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table for people, in the order of COLUMNS."""
    rows = []
    for name, score in record["scores"].items():
        recovery = "" if score["recovery"] is None else f"{score['recovery']:.1f} %"
        least = "" if score["answers"] is None else f"{bounds(score)[0]:.1f} %"
        numbers = [f"{score[key]:.4f}" for key in ("baseline", "artifact")]
        rows.append((name, score["metric"], str(score["samples"]), *numbers, recovery, least))
    return rows
