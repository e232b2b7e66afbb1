"""Gates: thresholds as data, and the verdict that statistics allow.

Each metric has a point value and a one-sided 95 % bound on either side
(quantflow.validating.bootstrap). A gate passes when every metric's bound on the bad side is inside
its threshold, fails when any metric's bound on the good side is outside, and is inconclusive
otherwise: more tokens would decide.

`max_regression` names the metrics in which an artifact is compared with an older one, and how much
worse each may get (quantflow.validating.regression). `min_recovery` names how much of the source's
score each task must keep, in percent (quantflow.validating.recovery). A file without thresholds has
those of `auto`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from quantflow.errors import UsageError, nearest
from quantflow.files.canonical import file_digest
from quantflow.planning.recipe import read_yaml
from quantflow.shipped import SHIPPED, find_config

METRICS = {"ppl_ratio": "<=", "mean_kld": "<=", "kld_p999": "<=", "top1_agreement": ">="}
KEYS = (
    *(
        "schemes",
        "algorithms",
        "thresholds",
        "ppl_ratio_below_3e9_parameters",
        "lower_top1_by_noise",
        "max_regression",
    ),
    "min_recovery",
    "note",
)
EVERY = "all"  # tasks, in min_recovery


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Thresholds by metric.

    Attributes:
        name: name that the user gave.
        thresholds: metric -> limit on the bad side.
        note: remark on the thresholds for readers of the report.
        max_regression: metric -> allowed loss against an older artifact; empty is a share of the
            thresholds.
        min_recovery: task -> least percent of the source's score; EVERY stands for the tasks that
            are not named.
    """

    name: str
    thresholds: Mapping[str, float]
    note: str = ""
    max_regression: Mapping[str, float] = field(default_factory=dict)
    min_recovery: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The gate as validation.json has it."""
        return {
            key: dict(sorted(value.items())) if isinstance(value, Mapping) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A gate's outcome, and per metric the bound that decided it."""

    outcome: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LoadedGate:
    """A gate as its file has it, before the model's noise is measured.

    Attributes:
        gate: the gate without the noise.
        lowers_top1: whether the model's disagreement with itself is taken off the top-1 threshold.
    """

    gate: Gate
    lowers_top1: bool

    def for_noise(self, noise_top1: float) -> Gate:
        """The gate of a model whose top-1 agreement with itself in another dtype is measured."""
        if not self.lowers_top1:
            return self.gate
        gate = self.gate
        floor = gate.thresholds["top1_agreement"] - (1 - noise_top1)
        note = (
            f"demo gate: as {gate.name}, but top-1 lowered from "
            f"{gate.thresholds['top1_agreement']:.4f} to {floor:.4f}, "
            f"by the {1 - noise_top1:.4f} in which this model in bf16 disagrees with itself in fp32"
        )
        return replace(
            gate,
            name=f"demo ({gate.name})",
            thresholds={**gate.thresholds, "top1_agreement": floor},
            note=note,
        )


def read_gate(name: str, *, scheme: str, algorithm: str, parameters: int) -> LoadedGate:
    """The gate for an artifact.

    Args:
        name: `auto` (the shipped gate whose schemes and algorithms fit), `demo` (auto, with top-1
            lowered by the model's own disagreement between bf16 and fp32), another shipped name, or
            a file.
        scheme: the scheme of the artifact.
        algorithm: the algorithm of the artifact.
        parameters: number of the model's parameters; small models are allowed a larger perplexity
            ratio.

    Raises:
        UsageError: the gate does not exist, has unknown keys, or none fits the scheme.
    """
    content = check_gate(name)
    if "thresholds" in content:
        gate = _gate(name, content, parameters)
    else:
        gate = _fitting(scheme, algorithm, parameters)
        if {"max_regression", "min_recovery"} & content.keys():
            gate = replace(
                gate,
                name=f"{name} ({gate.name})",
                max_regression=_max_regression(name, content),
                min_recovery=_min_recovery(name, content),
            )
    return LoadedGate(gate=gate, lowers_top1=bool(content.get("lower_top1_by_noise")))


def load_gate(
    name: str, *, scheme: str, algorithm: str, parameters: int, noise_top1: float
) -> Gate:
    """The gate for an artifact of a model whose noise is measured.

    Args:
        name: as in `read_gate`, like `scheme`, `algorithm` and `parameters`.
        scheme: the scheme of the artifact.
        algorithm: the algorithm of the artifact.
        parameters: number of the model's parameters.
        noise_top1: top-1 agreement of the baseline with itself in bf16.

    Raises:
        UsageError: the gate does not exist, has unknown keys, or none fits the scheme.
    """
    loaded = read_gate(name, scheme=scheme, algorithm=algorithm, parameters=parameters)
    return loaded.for_noise(noise_top1)


def check_gate(name: str) -> dict[str, Any]:
    """The content of a gate's file after every check, empty for `auto`.

    Raises:
        InputError: it cannot be read.
        UsageError: the gate does not exist, has unknown keys or metrics, or lacks one.
    """
    if name == "auto":
        return {}
    data = read_yaml(find_config("gates", name))
    _check_keys(name, data)
    if not {"thresholds", "lower_top1_by_noise", "max_regression", "min_recovery"} & data.keys():
        raise UsageError(
            f"gate {name}: no thresholds", "give all four metrics, max_regression or min_recovery"
        )
    _max_regression(name, data)
    _min_recovery(name, data)
    if "thresholds" in data:
        _gate(name, data, parameters=0)
    return data


def gate_files(name: str) -> dict[str, str]:
    """The hash of every file that `read_gate` may read: another threshold is another verdict.

    Raises:
        UsageError: the gate does not exist.
    """
    paths = {path.stem: path for path in (SHIPPED / "gates").glob("*.yaml")}
    if name != "auto":
        paths[name] = find_config("gates", name)
    return {key: file_digest(path) for key, path in sorted(paths.items())}


def judge(
    gate: Gate,
    bounds: Mapping[str, tuple[float, float]],
    recovered: Mapping[str, tuple[float, float, float]] = MappingProxyType({}),
) -> Verdict:
    """The verdict of a gate.

    Args:
        gate: gate with the thresholds.
        bounds: metric -> (lower, upper) one-sided 95 % bounds.
        recovered: task -> (percent asked, lower, upper), as `recovery.asked` has them.
    """
    failed, undecided = [], []
    for metric, threshold in gate.thresholds.items():
        lower, upper = bounds[metric]
        good, bad = (lower, upper) if METRICS[metric] == "<=" else (upper, lower)
        sign = 1.0 if METRICS[metric] == "<=" else -1.0
        if not sign * good <= sign * threshold:
            failed.append(
                f"{metric}: 95 % bound {good:.5g} is outside {METRICS[metric]} {threshold:.5g}"
            )
        elif not sign * bad <= sign * threshold:
            undecided.append(
                f"{metric}: bounds {lower:.5g} to {upper:.5g} straddle {threshold:.5g}"
            )
    for task, (least, lower, upper) in recovered.items():
        if not upper >= least:
            failed.append(f"recovery of {task}: at most {upper:.4g} %, {least:g} % is asked")
        elif not lower >= least:
            undecided.append(
                f"recovery of {task}: {lower:.4g} to {upper:.4g} %, {least:g} % is asked"
            )
    outcome = "fail" if failed else "inconclusive" if undecided else "pass"
    return Verdict(outcome=outcome, reasons=tuple(failed or undecided))


def _fitting(scheme: str, algorithm: str, parameters: int) -> Gate:
    for path in sorted((SHIPPED / "gates").glob("*.yaml")):
        data = read_yaml(path)
        if scheme in data.get("schemes", ()) and algorithm in data.get("algorithms", (algorithm,)):
            return _gate(path.stem, data, parameters)
    raise UsageError(
        f"gate auto: no shipped gate for scheme {scheme} with {algorithm}",
        "name a gate or a gate file",
    )


def _gate(name: str, data: Mapping[str, Any], parameters: int) -> Gate:
    _check_keys(name, data)
    if not isinstance(data["thresholds"], Mapping):
        raise UsageError(
            f"gate {name}: thresholds: {data['thresholds']!r} is not a mapping",
            "give all four metrics",
        )
    thresholds = dict(data["thresholds"])
    _check_metrics(name, list(thresholds))
    if parameters < 3_000_000_000:
        thresholds["ppl_ratio"] = data.get(
            "ppl_ratio_below_3e9_parameters", thresholds["ppl_ratio"]
        )
    for metric, value in thresholds.items():
        if not isinstance(value, float | int) or isinstance(value, bool):
            raise UsageError(f"gate {name}: {metric}: {value!r} is not a number", "give a number")
    return Gate(
        name=name,
        thresholds=thresholds,
        note=str(data.get("note", "")),
        max_regression=_max_regression(name, data),
        min_recovery=_min_recovery(name, data),
    )


def _max_regression(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    limits = data.get("max_regression", {})
    if not isinstance(limits, Mapping) or ("max_regression" in data and not limits):
        raise UsageError(
            f"gate {name}: max_regression: {limits!r} is no mapping of metrics",
            "give `mean_kld: 0.002`",
        )
    for metric, value in limits.items():
        if metric not in METRICS:
            raise UsageError(
                f"gate {name}: max_regression: unknown metric {metric!r}",
                nearest(str(metric), list(METRICS)),
            )
        if (
            not isinstance(value, float | int)
            or isinstance(value, bool)
            or not 0 <= value < float("inf")
        ):
            raise UsageError(
                f"gate {name}: max_regression: {metric}: {value!r} is not 0 or more",
                "give how much worse it may get",
            )
    return dict(limits)


def _min_recovery(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    limits = data.get("min_recovery", {})
    if isinstance(limits, float | int):
        limits = {EVERY: limits}
    if not isinstance(limits, Mapping) or ("min_recovery" in data and not limits):
        raise UsageError(
            f"gate {name}: min_recovery: {limits!r} is no mapping of tasks",
            "give `piqa: 98`, or 98 for all",
        )
    for task, value in limits.items():
        if not isinstance(task, str):
            raise UsageError(
                f"gate {name}: min_recovery: {task!r} is no name of a task",
                "give `piqa: 98`, or 98 for all",
            )
        if (
            not isinstance(value, float | int)
            or isinstance(value, bool)
            or not 1 < value < float("inf")
        ):
            raise UsageError(
                f"gate {name}: min_recovery: {task}: {value!r} is no percentage above 1",
                "give percent of the source's score: 98",
            )
    return dict(limits)


def _check_keys(name: str, data: Mapping[str, Any]) -> None:
    for key in data:
        if key not in KEYS:
            raise UsageError(f"gate {name}: unknown key {key!r}", nearest(str(key), KEYS))


def _check_metrics(name: str, metrics: Sequence[str]) -> None:
    for metric in metrics:
        if metric not in METRICS:
            raise UsageError(
                f"gate {name}: unknown metric {metric!r}", nearest(str(metric), list(METRICS))
            )
    for metric in METRICS:
        if metric not in metrics:
            raise UsageError(f"gate {name}: metric {metric!r} has no threshold", "give all four")
