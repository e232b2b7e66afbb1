"""Hooks of pytest that record the tests with the mark `proof`.

Their results on formats and other programs go into the file that RECORD_PROOFS names.

    {"test_gptqmodel.py::test_awq": {"cases": {"": "passed"}, "with": {"gptqmodel": "7.7.0"}}}

A case is what stands in brackets after the test's name. Skipped cases leave the file as it is, so
runs with one program each add up. Versions are those of the environment that the mark's variable
names, or of this one. docs/make_proofs.py reads it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "RECORD_PROOFS"
KEY = "proof"
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
_reports: dict[str, dict[str, Any]] = {}  # of this process: test -> its mark's words and its cases


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: object
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the words of the mark into the report.

    It goes from workers to the process that counts.
    """
    report = yield
    mark = item.get_closest_marker(KEY)
    if mark is not None:
        words = {name: mark.kwargs.get(name) for name in ("programs", "environment")}
        report.user_properties.append(
            (
                KEY,
                {"test": f"{item.path.name}::{getattr(item, 'originalname', item.name)}", **words},
            )
        )
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a case that passed or failed."""
    found = next((value for name, value in report.user_properties if name == KEY), None)
    if found is None or report.skipped or (report.passed and report.when != "call"):
        return
    _, _, case = report.nodeid.rpartition("::")[2].partition("[")
    kept = _reports.setdefault(found["test"], {"words": found, "cases": {}})
    kept["cases"][case.removesuffix("]")] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was counted beside what is there."""
    target = os.environ.get(VARIABLE)
    if not target or not _reports or hasattr(session.config, "workerinput"):
        return
    path = Path(target)
    records = json.loads(path.read_text()) if path.exists() else {}
    for test, kept in _reports.items():
        cases = {**records.get(test, {}).get("cases", {}), **kept["cases"]}
        records[test] = {"cases": cases, "with": _versions(kept["words"])}
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def _versions(words: dict[str, Any]) -> dict[str, str | None]:
    folder = os.environ.get(words["environment"] or "")
    python = str(Path(folder).absolute() / "bin" / "python") if folder else sys.executable
    line = [python, "-c", _VERSIONS, *words["programs"].values()]
    found: dict[str, str | None] = json.loads(
        subprocess.run(line, capture_output=True, text=True, check=True).stdout
    )
    return found
