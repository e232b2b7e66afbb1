"""Validations as tables and files for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quantflow.files import disk
from quantflow.files.manifest import read_manifest
from quantflow.validating import diagnosis_table, junit, regression, report, task_table
from quantflow.validating.job import ValidateResult

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # columns, rows


def verdicts(results: Sequence[ValidateResult]) -> Table:
    """Size, divergence and verdict of each artifact."""
    return report.COLUMNS, [report.cells(result.values) for result in results]


def tasks(result: ValidateResult) -> Table | None:
    """Scores of both models in tasks, where there were any."""
    values = result.values
    return (task_table.COLUMNS, task_table.cells(values["tasks"])) if "tasks" in values else None


def diagnosis(result: ValidateResult) -> Table | None:
    """The linears that cost an artifact most, where a diagnosis was asked for."""
    if "diagnosis" not in result.values:
        return None
    return diagnosis_table.COLUMNS, diagnosis_table.cells(result.values["diagnosis"])


def regressions(result: ValidateResult) -> Table | None:
    """The comparison with an older artifact, where there was one."""
    if "regression" not in result.values:
        return None
    return regression.COLUMNS, regression.cells(result.values)


def mend_hint(result: ValidateResult) -> str | None:
    """The sentence that says how to mend an artifact, where a diagnosis was asked for."""
    return diagnosis_table.hint(result.values) if "diagnosis" in result.values else None


def write_tasks(path: Path, result: ValidateResult) -> None:
    """Copy lm-eval's own document of an artifact's tasks out of a validation."""
    disk.write_atomic(path, (result.folder / "tasks.json").read_bytes())


def write_junit(path: Path, result: ValidateResult) -> None:
    """Write JUnit XML: a test per metric of the gate, and per metric beside an older artifact."""
    junit.write_junit(path, result.values)


def write_report(path: Path, results: Mapping[Path, ValidateResult]) -> None:
    """Write one HTML page about several artifacts, whose folders are the keys."""
    rows = [report.row_of(one.values, read_manifest(folder)) for folder, one in results.items()]
    report.write_report(path, rows)
