"""Writes docs/coverage.md from coverage.toml: what five programs' documents describe, row by row.

python docs/make_coverage.py                          write it
python docs/make_coverage.py --check                  exit 1 where the file is stale
python docs/make_coverage.py --break                  break features in a copy, run their tests
python docs/make_coverage.py --break --rows H1,B2     those rows alone
python docs/make_coverage.py --break --stale          rows without a result of their mutation

A row works where it names tests and misses nothing, is there in part where it names tests and what
is missing, and is not there where it names no test. A row with `advice` asks for nothing that a
program of this kind could have: it is advice, or is about other parts and programs. A row that
works also has a mutation: a small change that breaks its feature, with which one of its tests fails
(mutations.py). So no row can claim what no test shows.
"""

import argparse
import ast
import json
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mutations

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
DATA, PAGE, RESULTS = DOCS / "coverage.toml", DOCS / "coverage.md", DOCS / "mutations.json"
KEYS = ("advice", "asks", "break", "here", "missing", "tests")
WORKS, IN_PART, NOT, NO_FEATURE = "works", "in part", "not", "no feature"

Row = dict[str, Any]
Records = dict[str, dict[str, str]]


def read() -> tuple[dict[str, Row], dict[str, Row]]:
    """The documents by their letter, and the rows by id.

    Rows have `asks`, and `tests`, `here`, `missing` where they are filled.
    """
    data = tomllib.loads(DATA.read_text())
    return data.pop("documents"), data


def results() -> Records:
    """Results by row: the `mutation`'s digest and the test that `failed`, "" where none did."""
    records: Records = json.loads(RESULTS.read_text())
    return records


def ids(documents: dict[str, Row]) -> list[str]:
    """Return the id of every row that the documents have, in their order."""
    return [
        f"{letter}{number}"
        for letter, document in documents.items()
        for number in range(1, document["rows"] + 1)
    ]


def state(row: Row) -> str:
    """Return what a row's tests and gaps make of it."""
    if "advice" in row:
        return NO_FEATURE
    if not row.get("tests"):
        return NOT
    return IN_PART if "missing" in row else WORKS


def mistakes(documents: dict[str, Row], rows: dict[str, Row]) -> list[str]:
    """Problems of the data: rows missing or strange, tests that are absent, gaps without a name."""
    wanted = ids(documents)
    found = [f"{name}: no such row" for name in rows if name not in wanted]
    found += [f"{name}: not accounted for" for name in wanted if name not in rows]
    for name, row in rows.items():
        found += [f"{name}: {key!r} is no key" for key in row if key not in KEYS]
        if not row.get("asks"):
            found.append(f"{name}: does not say what is asked")
        if state(row) == NOT and not row.get("missing"):
            found.append(f"{name}: neither a test nor a reason")
        if state(row) == NO_FEATURE and {"here", "missing"} & row.keys():
            found.append(f"{name}: is no feature, and says how it is here or what is missing")
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


def working(rows: dict[str, Row]) -> list[str]:
    """Ids of the rows that work."""
    return [name for name, row in rows.items() if state(row) == WORKS]


def page(documents: dict[str, Row], rows: dict[str, Row], records: Records) -> str:
    """Return the page."""
    counts = Counter(state(row) for row in rows.values())
    lines = [
        f"# Coverage: {counts[WORKS]} of {len(rows)} rows work, {counts[IN_PART]} in part, "
        f"{counts[NOT]} not; {counts[NO_FEATURE]} ask for nothing",
        "",
        f"The documents of five programs describe {len(rows)} features, a row each; this page "
        "says what quantflow has of them.",
        "`python docs/make_coverage.py` makes it from coverage.toml; a test checks that all rows "
        "and tests of it",
        "are there. What works on other devices than CPUs was tried with stand-ins alone "
        "([not-run.md](not-run.md)).",
        "",
        "The feature of every row that works was broken once on purpose, in a copy of the "
        "repository, as the column *broken*",
        "says; the test in bold failed, and passes without that (`python docs/make_coverage.py "
        "--break`).",
        "",
        "| state | when |",
        "|---|---|",
        "| works | the named tests cover it, and nothing asked for is missing; the column *here* "
        "has differences |",
        "| in part | the column *here* says what is missing of what is asked; the tests cover the "
        "rest |",
        "| not | the column *here* says why |",
        "| no feature | advice, or a part of other programs and devices; the column *here* says "
        "which |",
    ]
    for letter, document in documents.items():
        own = {name: row for name, row in rows.items() if name.rstrip("0123456789") == letter}
        counts = Counter(state(row) for row in own.values())
        lines += ["", f"## {document['name']}", ""]
        lines += [
            f"{counts[WORKS]} of {len(own)} work, {counts[IN_PART]} in part, {counts[NOT]} not, "
            f"{counts[NO_FEATURE]} ask for nothing.",
            "",
        ]
        lines += [
            "| row | what is asked | state | here | broken | tests |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(name, rows, records) for name in own]
    return "\n".join(lines) + "\n"


def _line(name: str, rows: dict[str, Row], records: Records) -> str:
    row, mutation = rows[name], mutations.of_row(name, rows)
    told = "; ".join(row[key] for key in ("here", "missing", "advice") if key in row)
    failed = records.get(name, {}).get("failed", "")
    tests = "<br>".join(_test(test, failed) for test in row.get("tests", ()))
    cells = (name, row["asks"], state(row), told, mutation.says if mutation else "", tests)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _test(test: str, failed: str) -> str:
    """A test's cell, in bold where the test failed; files move, so its name alone is compared."""
    return f"**`{test}`**" if test.partition("::")[2] == failed else f"`{test}`"


def main() -> int:
    """Write the page, or say whether it is stale, or run the mutations first."""
    options = _options().parse_args()
    documents, rows = read()
    wrong = mistakes(documents, rows)
    if wrong:
        return _refuse(wrong)
    records = results() if RESULTS.exists() else {}
    if options.breaks:
        names = options.rows.split(",") if options.rows else working(rows)
        if options.stale:
            found = mutations.mistakes(ROOT, rows, working(rows), records)
            names = [name for name in names if name in {line.partition(":")[0] for line in found}]
        wrong = [f"{name}: no row that works" for name in names if name not in working(rows)]
        wrong += [] if wrong else _inapplicable(rows, names)
        if wrong:
            return _refuse(wrong)
        records = _break(rows, names, records, options)
    wrong = mutations.mistakes(ROOT, rows, working(rows), records)
    if options.rows:  # the others are not asked about
        wrong = [line for line in wrong if line.partition(":")[0] in options.rows.split(",")]
    wanted = page(documents, rows, records)
    if options.check:
        if not PAGE.exists() or PAGE.read_text() != wanted:
            wrong.append(f"{PAGE}: stale; run `python docs/{Path(__file__).name}`")
    else:
        PAGE.write_text(wanted)
    return _refuse(wrong) if wrong else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 where something is stale"
    )
    parser.add_argument(
        "--break",
        action="store_true",
        dest="breaks",
        help="run the mutations, write mutations.json",
    )
    parser.add_argument("--rows", metavar="H1,B2", help="rows to break; all that work if not given")
    parser.add_argument(
        "--stale", action="store_true", help="of these, rows without a result that holds"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="mutations at once, each in a copy of its own (1)"
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=600,
        metavar="SECONDS",
        help="for the tests of a mutation (600)",
    )
    return parser


def _inapplicable(rows: dict[str, Row], names: list[str]) -> list[str]:
    found = []
    for name in names:
        mutation = mutations.of_row(name, rows)
        reasons = ["no mutation that can be read"] if mutation is None else mutation.mistakes(ROOT)
        found += [f"{name}: {reason}" for reason in reasons]
    return found


def _break(
    rows: dict[str, Row], names: list[str], records: Records, options: argparse.Namespace
) -> Records:
    """Records with those of the rows `names` taken anew; the file is written every now and then."""
    kept = {name: record for name, record in records.items() if name in working(rows)}
    done = 0
    for outcomes in (
        mutations.run(ROOT, rows, names, options.jobs, options.timeout) if names else ()
    ):
        for name, outcome in outcomes.items():
            mutation = mutations.of_row(name, rows)
            assert mutation is not None
            kept[name] = {"mutation": mutation.digest, "failed": outcome.failed.partition("::")[2]}
            verdict = f"{outcome.failed} fails" if outcome.failed else "SURVIVES"
            print(f"{name}: {mutation.says}: {verdict} ({outcome.detail[:160]})", flush=True)
        done += len(outcomes)
        print(f"{done} of {len(names)} rows", flush=True)
        RESULTS.write_text(
            json.dumps({name: kept[name] for name in rows if name in kept}, indent=1) + "\n"
        )
    return kept


def _refuse(wrong: list[str]) -> int:
    print("\n".join(wrong), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
