"""Writes docs/coverage.md from coverage.toml.

It holds what five programs' documents describe, row by row, and the tests of it here.

python docs/make_coverage.py            write it
python docs/make_coverage.py --check    exit 1 where the file is stale

A row works where it names tests and misses nothing, is there in part where it names tests and what
is missing, and is not there where it names no test. So no row can claim what no test shows.
"""

import ast
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA, PAGE = DOCS / "coverage.toml", DOCS / "coverage.md"
WORKS, IN_PART, NOT = "works", "in part", "not"

Row = dict[str, Any]


def read() -> tuple[dict[str, Row], dict[str, Row]]:
    """The documents by their letter, and the rows by id.

    Rows have `asks`, and `tests`, `here`, `missing` where they are filled.
    """
    data = tomllib.loads(DATA.read_text())
    return data.pop("documents"), data


def ids(documents: dict[str, Row]) -> list[str]:
    """Return the id of every row that the documents have, in their order."""
    return [
        f"{letter}{number}"
        for letter, document in documents.items()
        for number in range(1, document["rows"] + 1)
    ]


def state(row: Row) -> str:
    """Return what a row's tests and gaps make of it."""
    if not row.get("tests"):
        return NOT
    return IN_PART if "missing" in row else WORKS


def mistakes(documents: dict[str, Row], rows: dict[str, Row]) -> list[str]:
    """Problems of the data: rows missing or strange, tests that are absent, gaps without a name."""
    wanted = ids(documents)
    found = [f"{name}: no such row" for name in rows if name not in wanted]
    found += [f"{name}: not accounted for" for name in wanted if name not in rows]
    for name, row in rows.items():
        found += [
            f"{name}: {key!r} is no key"
            for key in row
            if key not in ("asks", "here", "missing", "tests")
        ]
        if not row.get("asks"):
            found.append(f"{name}: does not say what is asked")
        if state(row) == NOT and not row.get("missing"):
            found.append(f"{name}: neither a test nor a reason")
        if "here" in row and state(row) == NOT:
            found.append(f"{name}: says how it is here, and it is not")
        for test in row.get("tests", ()):
            path, _, function = test.partition("::")
            if function not in _tests_of(path):
                found.append(f"{name}: there is no test {test}")
    return found


@cache
def _tests_of(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def page(documents: dict[str, Row], rows: dict[str, Row]) -> str:
    """Return the page."""
    counts = Counter(state(row) for row in rows.values())
    lines = [
        f"# Coverage: {counts[WORKS]} of {len(rows)} rows work, {counts[IN_PART]} in part, "
        f"{counts[NOT]} not",
        "",
        f"The documents of five programs describe {len(rows)} features, a row each; this page "
        "says what quantflow has of them.",
        "`python docs/make_coverage.py` makes it from coverage.toml; a test checks that all rows "
        "and tests of it",
        "are there. What works on other devices than CPUs was tried with stand-ins alone "
        "([not-run.md](not-run.md)).",
        "In twenty rows, drawn at random, the feature was broken on purpose. The named tests of "
        "fourteen failed. The tests of",
        "six passed; for three of these a test was written (bfloat16, H18, G11), three now name "
        "one that was there (H30, B40,",
        "I1), so that all twenty fail. The tests of the other rows were not tried so.",
        "",
        "| state | when |",
        "|---|---|",
        "| works | the named tests cover it, and nothing asked for is missing; the column *here* "
        "has differences |",
        "| in part | the column *here* says what is missing; the tests cover the rest |",
        "| not | the column *here* says why |",
    ]
    for letter, document in documents.items():
        own = {name: row for name, row in rows.items() if name.rstrip("0123456789") == letter}
        counts = Counter(state(row) for row in own.values())
        lines += ["", f"## {document['name']}", ""]
        lines += [
            f"{counts[WORKS]} of {len(own)} work, {counts[IN_PART]} in part, {counts[NOT]} not.",
            "",
        ]
        lines += [
            "| row | what is asked | state | here | tests |",
            "|---|---|---|---|---|",
            *map(_line, own, own.values()),
        ]
    return "\n".join(lines) + "\n"


def _line(name: str, row: Row) -> str:
    told = "; ".join(row[key] for key in ("here", "missing") if key in row)
    tests = "<br>".join(f"`{test}`" for test in row.get("tests", ()))
    cells = (name, row["asks"], state(row), told, tests)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    """Write the page, or say whether it is stale."""
    documents, rows = read()
    wrong = mistakes(documents, rows)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    wanted = page(documents, rows)
    if "--check" in sys.argv[1:]:
        stale = not PAGE.exists() or PAGE.read_text() != wanted
        if stale:
            print(f"{PAGE}: stale; run `python docs/{Path(__file__).name}`", file=sys.stderr)
        return int(stale)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
