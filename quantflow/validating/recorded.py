"""Verdicts from validation.json files alone, for CI: no model, no text, no torch."""

from typing import Any, TypedDict

from quantflow.errors import InputError
from quantflow.files.schema import check
from quantflow.validating import recovery
from quantflow.validating.gate import Gate, judge, load_gate
from quantflow.validating.job import GateJob
from quantflow.validating.regression import compare_with, read_validation


def run(job: GateJob) -> dict[str, Any]:
    """The validation with its verdicts made again.

    Raises:
        InputError: a file cannot be read, has no score of a task that the gate names, or the two
            are not of one model and text.
        UsageError: the gate does not exist or is wrong.
    """
    result = read_validation(job.validation)
    earlier = None if job.previous is None else read_validation(job.previous)
    gate = _gate(job, result)
    bounds = {name: (bound["lower"], bound["upper"]) for name, bound in result["metrics"].items()}
    verdict = judge(gate, bounds, recovery.asked(gate, result))
    result |= {"gate": gate.record(), "outcome": verdict.outcome, "reasons": list(verdict.reasons)}
    if job.allow_inconclusive is not None:
        result["allow_inconclusive"] = job.allow_inconclusive
    if earlier is not None:
        result["regression"] = compare_with(earlier, result, gate=gate)
    return result


class _Floor(TypedDict):
    value: float


class _Judged(TypedDict):
    """The keys that another gate needs."""

    scheme: str
    algorithm: str
    parameters: int
    noise_floor: dict[str, _Floor]


def _gate(job: GateJob, result: dict[str, Any]) -> Gate:
    if job.gate is None:
        return Gate(**result["gate"])
    check(result, _Judged, where=str(job.validation), remedy="run `quantflow validate` again")
    if "top1_agreement" not in result["noise_floor"]:
        raise InputError(
            f"{job.validation}: noise_floor: has no top1_agreement",
            "run `quantflow validate` again",
        )
    return load_gate(
        job.gate,
        scheme=result["scheme"],
        algorithm=result["algorithm"].partition(" + ")[0],
        parameters=result["parameters"],
        noise_top1=result["noise_floor"]["top1_agreement"]["value"],
    )
