"""Writes the table of other programs' confirmations into docs/formats.md.

The tests of tests/parity recorded them.

python docs/make_proofs.py            write it
python docs/make_proofs.py --check    exit 1 where the file is stale

A row is a test that has the mark `proof`: its words say which format, in which direction, and what
was compared. What is not words was recorded by a run with RECORD_PROOFS=docs/proofs.json
(tests/conftest.py): how many of its cases passed, and the versions of the programs that were there.
A test that no run recorded says so, and so does one that failed.
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests" / "parity"
DATA, PAGE = DOCS / "proofs.json", DOCS / "formats.md"
BEGIN, END = "<!-- proofs: begin -->", "<!-- proofs: end -->"
WORDS = {"formats", "direction", "programs", "compared", "environment"}
DIRECTIONS = ("written", "read", "both")

Words = dict[str, Any]
Record = dict[str, Any]


def marked() -> dict[str, Words]:
    """The words of each test that has the mark, by `file::test`, in order of files and lines."""
    found = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proof":
                    words = {
                        str(keyword.arg): ast.literal_eval(keyword.value)
                        for keyword in mark.keywords
                    }
                    found[f"{path.name}::{node.name}"] = words  # type: ignore[attr-defined]
    return found


def read() -> dict[str, Record]:
    """The records of runs: test -> `cases`, case -> outcome, and `with`, package -> version."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def mistakes(tests: dict[str, Words], records: dict[str, Record]) -> list[str]:
    """Problems of marks and records.

    Words are missing or strange, or a record's test has no mark.
    """
    found = [
        f"{test}: recorded, and no test with the mark" for test in records if test not in tests
    ]
    for test, words in tests.items():
        if set(words) - {"environment"} != WORDS - {"environment"}:
            found.append(f"{test}: has {sorted(words)}, {sorted(WORDS)} are known")
        elif words["direction"] not in DIRECTIONS:
            found.append(
                f"{test}: direction {words['direction']!r} is none of {', '.join(DIRECTIONS)}"
            )
    return found


def outcome(record: Record | None) -> str:
    """Return how many cases passed, in words."""
    if record is None:
        return "not run"
    counts = Counter(record["cases"].values())
    if set(counts) == {"passed"}:
        return str(counts["passed"])
    return ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))


def table(tests: dict[str, Words], records: dict[str, Record]) -> str:
    """Return the table, by format."""
    lines = [
        "| format | direction | program | what was compared | cases passed | test |",
        "|---|---|---|---|---:|---|",
    ]
    for test, words in sorted(
        tests.items(), key=lambda item: (item[1]["formats"], item[1]["direction"], item[0])
    ):
        record = records.get(test)
        versions = {} if record is None else record["with"]
        named = [
            " ".join(filter(None, (name, versions.get(package))))
            for name, package in words["programs"].items()
        ]
        cells = (
            words["formats"],
            words["direction"],
            ", ".join(named),
            words["compared"],
            outcome(record),
            f"`{test}`",
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def page(text: str, tests: dict[str, Words], records: dict[str, Record]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(tests, records)}\n{END}{after}"


def main() -> int:
    """Write the table, or say whether it is stale."""
    tests, records = marked(), read()
    if wrong := mistakes(tests, records):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    wanted = page(PAGE.read_text(), tests, records)
    if "--check" in sys.argv[1:]:
        stale = PAGE.read_text() != wanted
        if stale:
            print(f"{PAGE}: stale; run `python docs/{Path(__file__).name}`", file=sys.stderr)
        return int(stale)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
