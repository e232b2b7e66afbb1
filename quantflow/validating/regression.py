"""A newer artifact beside an older one of the same model: pass, regression, or inconclusive.

    {"previous": {"artifact", "digest"}, "outcome", "reasons",
     "metrics": {name: {"previous", "current", "worse", "lower", "upper",
                        "max_regression", "outcome"}},
     "tasks": {name: {"lost", "won", "chance", "outcome"}}}

`worse` is the newer value minus the older one, turned so that more is worse;
quantflow.validating.paired bounds it. A metric passes when the upper bound is at most
`max_regression`, is a regression when the lower bound is above it, and is inconclusive otherwise.
The lower bounds hold for all metrics together with 95 %: an artifact that is worse by no more than
allowed is called a regression in at most one of twenty comparisons, however many metrics
are judged. No correction is needed for a pass, which needs every metric. Tasks that both were asked
share these 5 %: McNemar's test on their answers finds a loss. Its pass says no more than that no
loss was seen.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from quantflow.errors import InputError
from quantflow.files.canonical import read_json
from quantflow.files.schema import check
from quantflow.validating.gate import METRICS, Gate
from quantflow.validating.paired import ALPHA, differences, mcnemar, window_scores

# of the way from the source to the gate's threshold, which a metric may get worse where a gate
# names nothing
SHARE = 0.1
# the source itself
PERFECT = {"ppl_ratio": 1.0, "mean_kld": 0.0, "kld_p999": 0.0, "top1_agreement": 1.0}
# the tail's quantile differs too much between windows to decide
BY_DEFAULT = ("ppl_ratio", "mean_kld", "top1_agreement")
COLUMNS = (
    "metric",
    "beside",
    "verdict",
    "previous",
    "current",
    "worse by",
    "at least",
    "at most",
    "allowed",
)
# of two protocols, so that their windows are pairs
_SAME = ("text", "windows", "tokens", "sequence_length", "scored", "dtype", "device")
_AGAIN = "give a validation.json as `quantflow validate` wrote it, or run it again"
_KEYS = (
    "artifact",
    "digest",
    "baseline",
    "metrics",
    "gate",
    "protocol",
    "windows",
    "outcome",
    "reasons",
    "expect",
)


class _Bounds(TypedDict):
    value: float
    lower: float
    upper: float


class _GateRecord(TypedDict):
    name: str
    thresholds: dict[str, float]
    note: NotRequired[str]
    max_regression: NotRequired[dict[str, float]]
    min_recovery: NotRequired[dict[str, float]]


class _Protocol(TypedDict):
    seed: NotRequired[int]


class _Seeded(TypedDict):
    seed: int


class _Answers(TypedDict):
    baseline: str
    artifact: str


class _Score(TypedDict):
    metric: str
    recovery: float | None
    answers: _Answers | None


class _Tasks(TypedDict):
    protocol: Any
    scores: dict[str, _Score]


class _Previous(TypedDict):
    artifact: str
    digest: str


class _Change(TypedDict):
    previous: float
    current: float
    worse: float
    lower: float
    upper: float
    max_regression: float
    outcome: str


class _Regression(TypedDict):
    previous: _Previous
    outcome: str
    reasons: list[str]
    metrics: dict[str, _Change]


class _Validation(TypedDict):
    artifact: str
    digest: str
    metrics: dict[str, _Bounds]
    gate: _GateRecord
    protocol: _Protocol
    windows: dict[str, Any]
    outcome: str
    reasons: list[str]
    expect: str
    allow_inconclusive: NotRequired[bool]
    tasks: NotRequired[_Tasks]
    regression: NotRequired[_Regression]


def read_validation(path: Path) -> dict[str, Any]:
    """The content of a validation.json.

    Args:
        path: file, or the folder that holds it.

    Raises:
        InputError: it is missing, no JSON, or not what validate of this version writes.
    """
    file = path / "validation.json" if path.is_dir() else path
    values = read_json(file)
    missing = [key for key in _KEYS if not isinstance(values, dict) or key not in values]
    if missing:
        raise InputError(
            f"{file}: has no {missing[0]!r}",
            "give a validation.json; an old one: run `quantflow validate` again",
        )
    check(values, _Validation, where=str(file), remedy=_AGAIN)
    if set(METRICS) - (values["metrics"].keys() & values["gate"]["thresholds"].keys()):
        raise InputError(
            f"{file}: lacks a metric of {', '.join(METRICS)}", "run `quantflow validate` again"
        )
    unknown = (
        {*values["gate"], *values["gate"]["thresholds"]}
        - {field.name for field in fields(Gate)}
        - METRICS.keys()
    )
    if unknown:
        raise InputError(f"{file}: gate: {min(unknown)!r} is not known", _AGAIN)
    for name, score in values.get("tasks", {"scores": {}})["scores"].items():
        written = score["answers"] or {"baseline": "", "artifact": ""}
        letters = {*written["baseline"], *written["artifact"]}
        if len(written["baseline"]) != len(written["artifact"]) or not letters <= {"0", "1"}:
            raise InputError(f"{file}: task {name}: answers are no pairs of 0 and 1", _AGAIN)
    result: dict[str, Any] = values
    return result


def allowances(gate: Gate) -> dict[str, float]:
    """The allowed loss of each judged metric.

    It is what the gate names, or a tenth of the way to its thresholds.
    """
    if gate.max_regression:
        return dict(gate.max_regression)
    return {metric: SHARE * abs(gate.thresholds[metric] - PERFECT[metric]) for metric in BY_DEFAULT}


def compare_with(
    previous: Mapping[str, Any], current: Mapping[str, Any], *, gate: Gate
) -> dict[str, Any]:
    """The comparison of two validations, see the module's head.

    Args:
        previous: content of the older artifact's validation.json.
        current: content of the newer artifact's validation.json.
        gate: gate with the allowed losses.

    Raises:
        InputError: they are of different models or texts, or their windows are damaged.
    """
    _refuse_strangers(previous, current)
    check(
        current["protocol"],
        _Seeded,
        where=f"validation of {current['artifact']}: protocol",
        remedy=_AGAIN,
    )
    allowed = allowances(gate)
    newer, older = (
        window_scores(values["windows"], name=f"validation of {values['artifact']}")
        for values in (current, previous)
    )
    if newer.tokens.tolist() != older.tokens.tolist():
        raise InputError(
            f"{current['artifact']}: its windows are not those of {previous['artifact']}",
            "validate both again",
        )
    answers = _answers(previous, current)
    by_metric = differences(
        newer, older, metrics=list(allowed), seed=current["protocol"]["seed"], others=len(answers)
    )
    metrics, reasons = {}, {}
    for metric, most in allowed.items():
        difference = by_metric[metric]
        outcome = (
            "regression"
            if difference.lower > most
            else "pass"
            if difference.upper <= most
            else "inconclusive"
        )
        metrics[metric] = {
            "previous": previous["metrics"][metric]["value"],
            "current": current["metrics"][metric]["value"],
            "worse": difference.value,
            "lower": difference.lower,
            "upper": difference.upper,
            "max_regression": most,
            "outcome": outcome,
        }
        if outcome == "regression":
            reasons[metric] = (
                f"{metric}: worse by at least {difference.lower:.3g}, {most:.3g} is allowed"
            )
        elif outcome == "inconclusive":
            reasons[metric] = (
                f"{metric}: worse by {difference.lower:.3g} to {difference.upper:.3g}, "
                f"{most:.3g} is allowed"
            )
    tasks = {}
    for name, (new, old) in answers.items():
        lost, won, chance = mcnemar(new, old)
        lower = chance <= ALPHA / (len(allowed) + len(answers))
        tasks[name] = {
            "lost": lost,
            "won": won,
            "chance": chance,
            "outcome": "regression" if lower else "pass",
        }
        reasons[name] = (
            f"{name}: {lost} answers lost and {won} won, by chance in {chance:.2g} of cases"
        )
    judged = metrics | tasks
    outcomes = {values["outcome"] for values in judged.values()}
    outcome = next(word for word in ("regression", "inconclusive", "pass") if word in outcomes)
    return {
        "previous": {"artifact": previous["artifact"], "digest": previous["digest"]},
        "outcome": outcome,
        "reasons": [
            text
            for metric, text in reasons.items()
            if judged[metric]["outcome"] == outcome and outcome != "pass"
        ],
        "metrics": metrics,
        "tasks": tasks,
    }


def cells(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table for people, in the order of COLUMNS."""
    regression = result["regression"]
    rows = []
    for metric, values in regression["metrics"].items():
        numbers = [
            values[key]
            for key in ("previous", "current", "worse", "lower", "upper", "max_regression")
        ]
        rows.append(
            (
                metric,
                str(regression["previous"]["artifact"]),
                values["outcome"],
                *(f"{number:.4g}" for number in numbers),
            )
        )
    return rows


def _answers(previous: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Both artifacts' answers to each task that they were asked in the same way."""
    new, old = current.get("tasks"), previous.get("tasks")
    if new is None or old is None or new["protocol"] != old["protocol"]:
        return {}
    pairs = {}
    for name in new["scores"].keys() & old["scores"].keys():
        newer, older = new["scores"][name], old["scores"][name]
        same = all(newer.get(key) == older.get(key) for key in ("metric", "version", "samples"))
        if same and newer["answers"] is not None and older["answers"] is not None:
            pairs[name] = (newer["answers"]["artifact"], older["answers"]["artifact"])
            if len(pairs[name][0]) != len(pairs[name][1]):
                cause = (
                    f"{current['artifact']}, {previous['artifact']}: task {name}: "
                    f"{len(pairs[name][0])} and "
                )
                raise InputError(
                    f"{cause}{len(pairs[name][1])} answers", "validate both with the same tasks"
                )
    return dict(sorted(pairs.items()))


def _refuse_strangers(previous: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    if previous["baseline"] != current["baseline"]:
        raise InputError(
            f"{current['artifact']}, {previous['artifact']}: "
            "were validated beside different models",
            "compare artifacts of one model",
        )
    for key in _SAME:
        old, new = previous["protocol"].get(key), current["protocol"].get(key)
        if old != new:
            how = "otherwise" if key in ("dtype", "device") else "on different text"
            raise InputError(
                f"{current['artifact']}, {previous['artifact']}: {key} {new} and {old}: "
                f"validated {how}",
                "validate both with the same --text, --tokens, --sequence-length, --base, --device "
                "and --dtype",
            )
