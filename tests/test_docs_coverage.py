"""docs/coverage.md accounts for every row of five programs' documents.

A row has tests that exist, or a reason.
"""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)  # for its module of mutations
    spec = importlib.util.spec_from_file_location("make_coverage", DOCS / "make_coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_of_the_documents_is_accounted_for_once(coverage):
    documents, rows = coverage.read()
    assert {name: document["rows"] for name, document in documents.items()} == {
        "H": 61,
        "G": 31,
        "B": 42,
        "I": 37,
        "A": 20,
    }
    assert len(rows) == 191
    assert coverage.mistakes(documents, rows) == []


def test_the_page_is_made_from_the_data(coverage):
    documents, rows = coverage.read()
    assert (DOCS / "coverage.md").read_text() == coverage.page(
        documents, rows, coverage.results()
    ), "run `python docs/make_coverage.py`"


def test_each_row_that_works_was_broken_once_and_a_test_of_it_failed(coverage):
    _, rows = coverage.read()
    assert (
        coverage.mutations.mistakes(coverage.ROOT, rows, coverage.working(rows), coverage.results())
        == []
    )


def test_a_row_without_a_test_works_nowhere_and_mistakes_are_named(coverage):
    test = "tests/test_docs_coverage.py::test_the_page_is_made_from_the_data"
    rows = {
        "X1": {"asks": "a", "tests": [test]},
        "X2": {"asks": "b", "tests": [test], "missing": "some"},
        "X3": {"asks": "c", "missing": "all"},
        "X4": {"asks": "d", "advice": "of others", "tests": [test]},
    }
    assert [coverage.state(row) for row in rows.values()] == [
        "works",
        "in part",
        "not",
        "no feature",
    ]
    assert coverage.mistakes({"X": {"rows": 4}}, rows) == []
    rows |= {
        "X4": {"asks": "d"},
        "X7": {"asks": "f", "advice": "of others", "missing": "all"},
        "X6": {"asks": "e", "tests": [f"{test}_not", "tests/nowhere.py::test_a"], "state": "works"},
    }
    assert coverage.mistakes({"X": {"rows": 5}}, rows) == [
        "X7: no such row",
        "X6: no such row",
        "X5: not accounted for",
        "X4: neither a test nor a reason",
        "X7: is no feature, and says how it is here or what is missing",
        "X6: 'state' is no key",
        f"X6: there is no test {test}_not",
        "X6: there is no test tests/nowhere.py::test_a",
    ]


def test_what_cannot_be_broken_is_refused_before_anything_is_copied(coverage, monkeypatch, capsys):
    monkeypatch.setattr(coverage.mutations, "run", None)
    before = coverage.RESULTS.read_bytes(), coverage.PAGE.read_bytes()
    monkeypatch.setattr("sys.argv", ["make_coverage.py", "--break", "--rows", "H1,A13,Z9"])
    assert coverage.main() == 1
    assert capsys.readouterr().err == "A13: no row that works\nZ9: no row that works\n"
    assert (coverage.RESULTS.read_bytes(), coverage.PAGE.read_bytes()) == before
