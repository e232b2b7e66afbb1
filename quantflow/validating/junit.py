"""A validation as JUnit XML: a test per metric and task of the gate, and per compared metric."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from quantflow.files import disk
from quantflow.validating import recovery
from quantflow.validating.gate import METRICS, Gate, judge


def write_junit(path: Path, result: Mapping[str, Any]) -> None:
    """Write a validation.

    A metric outside of its threshold is a failure, one that is undecided as well, or a skipped test
    where the validation allows it. Where `expect: fail` was asked for, the gate is one test, which
    fails when the verdict is another.

    Args:
        path: path of the file.
        result: content of validation.json.
    """
    name = str(result["artifact"])
    cases = [*_gate(result), *_regression(result)]
    suite = ElementTree.Element("testsuite", name=f"quantflow {name}", tests=str(len(cases)))
    properties = ElementTree.SubElement(suite, "properties")
    for key in ("digest", "scheme", "algorithm", "model"):
        ElementTree.SubElement(properties, "property", name=key, value=str(result.get(key, "")))
    counts = {"failure": 0, "skipped": 0}
    for group, metric, outcome, text in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"{name}.{group}", name=metric)
        if outcome == "pass":
            continue
        kind = (
            "skipped"
            if outcome == "inconclusive" and result.get("allow_inconclusive")
            else "failure"
        )
        counts[kind] += 1
        item = ElementTree.SubElement(case, kind, message=text)
        if kind == "failure":
            item.set("type", outcome)
    suite.set("failures", str(counts["failure"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.set("errors", "0")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    disk.write_atomic(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _gate(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Group, metric, outcome and reason of each test."""
    if result["expect"] != "pass":
        outcome = "pass" if result["outcome"] == result["expect"] else str(result["outcome"])
        return [
            ("gate", f"expect {result['expect']}", outcome, f"the verdict is {result['outcome']}")
        ]
    cases = []
    for metric in METRICS:
        bounds = {metric: (result["metrics"][metric]["lower"], result["metrics"][metric]["upper"])}
        thresholds = {metric: result["gate"]["thresholds"][metric]}
        verdict = judge(Gate(name=result["gate"]["name"], thresholds=thresholds), bounds)
        cases.append(("gate", metric, verdict.outcome, "; ".join(verdict.reasons)))
    for task, recovered in recovery.asked(Gate(**result["gate"]), result).items():
        verdict = judge(Gate(name=result["gate"]["name"], thresholds={}), {}, {task: recovered})
        cases.append(("gate", f"recovery of {task}", verdict.outcome, "; ".join(verdict.reasons)))
    return cases


def _regression(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    regression = result.get("regression", {"metrics": {}})
    return [
        (
            "regression",
            metric,
            values["outcome"],
            f"worse by {values['lower']:.3g} to {values['upper']:.3g} than "
            f"{regression['previous']['artifact']}, "
            f"{values['max_regression']:.3g} is allowed",
        )
        for metric, values in regression["metrics"].items()
    ]
