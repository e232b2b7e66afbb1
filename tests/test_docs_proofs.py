"""docs/formats.md has the table of other programs' confirmations.

It is made from tests' marks and the records of their runs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKED = """
import pytest

@pytest.mark.proof(formats="gptq", direction="read", programs={"pytest": "pytest"}, compared="a, b")
@pytest.mark.parametrize("case", ["good", "bad", "away"])
def test_one(case):
    if case == "away":
        pytest.skip("not here")
    assert case == "good"

@pytest.mark.proof(formats="awq", direction="read", programs={"x": "x"}, compared="c")
def test_skipped():
    pytest.skip("not here")

def test_other():
    pass
"""


@pytest.fixture
def proofs():
    spec = importlib.util.spec_from_file_location("make_proofs", DOCS / "make_proofs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_marks_and_the_records(proofs):
    tests, records = proofs.marked(), proofs.read()
    assert len(tests) >= 15 and proofs.mistakes(tests, records) == []
    text = (DOCS / "formats.md").read_text()
    assert text == proofs.page(text, tests, records), "run `python docs/make_proofs.py`"


def test_a_row_says_what_passed_and_that_nothing_was_run_or_failed(proofs):
    words = {
        "formats": "gptq",
        "direction": "read",
        "programs": {"A": "a", "B": "b"},
        "compared": "x | y",
    }
    tests = {"f.py::test_a": words, "f.py::test_b": words, "f.py::test_c": words}
    records = {
        "f.py::test_a": {"cases": {"": "passed", "x": "passed"}, "with": {"a": "1.5", "b": None}},
        "f.py::test_b": {"cases": {"x": "failed", "y": "passed"}, "with": {"a": "2"}},
    }
    rows = proofs.table(tests, records).splitlines()[2:]
    assert rows[0] == r"| gptq | read | A 1.5, B | x \| y | 2 | `f.py::test_a` |"
    assert (
        "| 1 failed, 1 passed |" in rows[1] and "| A, B |" in rows[2] and "| not run |" in rows[2]
    )


def test_strange_words_and_records_are_named(proofs):
    words = {"formats": "gptq", "direction": "there", "programs": {}, "compared": "x"}
    tests = {"f.py::test_a": words, "f.py::test_b": {"formats": "gptq"}}
    assert proofs.mistakes(tests, {"f.py::test_c": {}}) == [
        "f.py::test_c: recorded, and no test with the mark",
        "f.py::test_a: direction 'there' is none of written, read, both",
        "f.py::test_b: has ['formats'], ['compared', 'direction', 'environment', 'formats', "
        "'programs'] are known",
    ]


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "2"), id="two workers", marks=pytest.mark.slow),
    ],
)
def test_a_run_records_its_cases_and_keeps_those_of_others(tmp_path, workers):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "proof_records.py").read_text())
    (tmp_path / "test_it.py").write_text(MARKED)
    data = tmp_path / "proofs.json"
    data.write_text(
        json.dumps({"test_it.py::test_one": {"cases": {"older": "passed"}, "with": {}}})
    )
    environment = {**os.environ, "RECORD_PROOFS": str(data)}
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        *workers,
        str(tmp_path),
    ]
    subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, check=False)
    (test, found), *others = json.loads(data.read_text()).items()
    assert (test, others) == ("test_it.py::test_one", [])
    assert found["cases"] == {"older": "passed", "good": "passed", "bad": "failed"}
    assert found["with"] == {"pytest": pytest.__version__}
