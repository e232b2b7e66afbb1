"""The share of the source's score that an artifact keeps in each task, as a gate judges it.

    min_recovery: 98                        every task that was asked, one at least
    min_recovery: {lambada_openai: 99, all: 97}

A task whose answers are right or wrong has one-sided 95 % bounds of its recovery, from the pairs of
answers of both models (quantflow.validating.paired). It passes when the lower one is at least what
is asked, fails when the upper one is below it, and is inconclusive otherwise: more documents would
decide. Of a task with other scores (ROUGE, F1) the recovery is judged as it is.
"""

import math
from collections.abc import Mapping
from typing import Any

from quantflow.errors import InputError, UsageError
from quantflow.validating.gate import EVERY, Gate
from quantflow.validating.paired import recovery_bounds


def bounds(score: Mapping[str, Any]) -> tuple[float, float]:
    """One-sided bounds of a task's recovery, in percent; (0, inf) where the source has no score."""
    if score["answers"] is not None:
        lower, upper = recovery_bounds(score["answers"]["artifact"], score["answers"]["baseline"])
        return 100 * lower, 100 * upper
    recovery = score["recovery"]
    return (0.0, math.inf) if recovery is None else (recovery, recovery)


def asked(gate: Gate, validation: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """The percent that a gate asks of each task, and the bounds of the recovery.

    The result maps a task to (asked, lower, upper).

    Args:
        gate: gate that names tasks.
        validation: content of validation.json.

    Raises:
        InputError: it has no score of a task that the gate names.
    """
    scores = validation.get("tasks", {"scores": {}})["scores"]
    lacking = _lacking(gate, list(scores))
    if lacking is not None:
        cause = (
            f"validation of {validation['artifact']}: has no score of {lacking[0]}, "
            f"gate {gate.name} asks for it"
        )
        raise InputError(cause, f"run `quantflow validate` with --tasks {lacking[1]}")
    limits = {name: gate.min_recovery.get(name, gate.min_recovery.get(EVERY)) for name in scores}
    return {
        name: (least, *bounds(scores[name])) for name, least in limits.items() if least is not None
    }


def refuse_unasked(gate: Gate, tasks: list[str]) -> None:
    """Refuse a gate that names tasks which will not be asked, before anything runs.

    Raises:
        UsageError: naming the first.
    """
    lacking = _lacking(gate, tasks)
    if lacking is not None:
        raise UsageError(
            f"gate {gate.name}: min_recovery of {lacking[0]}, which is not asked",
            f"give --tasks {lacking[1]}",
        )


def _lacking(gate: Gate, tasks: list[str]) -> tuple[str, str] | None:
    """A task that the gate names and nobody asked, in words and as --tasks takes it."""
    for name in gate.min_recovery:
        if name == EVERY and not tasks:
            return "any task", "NAMES"
        if name not in (EVERY, *tasks):
            return f"task {name}", name
    return None
