"""docs/gpu-results.md, made of docs/gpu-results.json."""

from collections.abc import Mapping
from typing import Any

from _report import table

_WITHOUT = (
    "No GPU has run what this page shows: the CPU ran every check in the device's place, with "
    "less to do. "
    "Its seconds and speeds say nothing of a GPU."
)
_WITH = "{device} ran what this page shows."


def page(results: Mapping[str, Any]) -> str:
    """Return the page of a results file."""
    checks = results["checks"]
    lines = [
        _WITHOUT if results["device"] == "cpu" else _WITH.format(device=results["name"]),
        "",
        "# What `make gpu` found",
        "",
        f"    {results['command']}",
        "",
        f"{results['date']}, size `{results['size']}`, {_number(results['seconds'])} of at most "
        f"{results['budget']:.0f} s. "
        "This page is made of [gpu-results.json](gpu-results.json); [gpu.md](gpu.md) says what "
        "the checks are about.",
        "",
        table(
            ("check", "state", "seconds", "claims held", "bars met"),
            [_row(check) for check in checks],
        ),
    ]
    for check in checks:
        lines += _section(check)
    return "\n".join(lines) + "\n"


def _row(check: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = "" if check["seconds"] is None else f"{check['seconds']:.0f}"
    return (
        check["name"],
        check["state"],
        seconds,
        *(_share(check["found"][kind]) for kind in ("claim", "bar")),
    )


def _share(lines: list[Mapping[str, Any]]) -> str:
    return f"{sum(line['met'] for line in lines)} of {len(lines)}" if lines else ""


def _section(check: Mapping[str, Any]) -> list[str]:
    found = check["found"]
    lines = ["", f"## {check['name']}", "", check["asks"]]
    if check["reason"]:
        lines += ["", f"{check['state'].capitalize()}: {_cell(check['reason'])}"]
    judged = [
        (
            _cell(line["what"]),
            _cell(line["promised"]),
            _cell(line["found"]),
            "yes" if line["met"] else "NO",
        )
        for line in (*found["claim"], *found["bar"])
    ]
    if judged:
        lines += ["", table(("promised", "how far", "found", "holds"), judged)]
    if found["figure"]:
        rows = [
            (_cell(line["what"]), f"{_number(line['value'])} {line['unit']}".strip())
            for line in found["figure"]
        ]
        lines += ["", table(("figure", "found"), rows)]
    if found["absent"]:
        lines += [
            "",
            "Not run:",
            "",
            *(f"- {_cell(line['what'])}: {_cell(line['why'])}." for line in found["absent"]),
        ]
    return lines


def _number(value: float | str) -> str:
    """Return a number with three digits or more, and a word as it is."""
    if isinstance(value, str):
        return _cell(value)
    if isinstance(value, int) or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    """Return text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|")
