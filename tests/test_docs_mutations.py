"""Mutations break a feature in a copy, and only a test that fails by that counts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import mutations

    return mutations


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two features, two tests, and one that passes whatever the features do."""
    root = tmp_path / "repository"
    (root / "quantflow").mkdir(parents=True)
    (root / "quantflow/__init__.py").write_text("")
    (root / "quantflow/sums.py").write_text(
        "def twice(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n"
    )
    child = "import subprocess, sys\nSAY = 'from quantflow.sums import half; print(half(4))'\n"
    (root / "test_sums.py").write_text(
        f"{child}from quantflow.sums import twice\n\n\ndef test_twice():\n    assert twice(3) == "
        "6\n\n\n"
        "def test_half_in_a_child():\n    assert subprocess.check_output([sys.executable, '-c', "
        "SAY]) == b'2.0\\n'\n\n\n"
        "def test_nothing():\n    twice(1)\n\n\ndef test_always_fails():\n    assert twice(1) == "
        "5\n"
    )
    (root / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow: long\n")
    (root / ".gitignore").write_text("ignored*\n__pycache__\n")
    (root / "ignored.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    return root


def row(replace, new, *tests, file="quantflow/sums.py", **more):
    names = [f"test_sums.py::{test}" for test in tests]
    return {
        "tests": names,
        "break": {"file": file, "replace": replace, "with": new, "says": "it is broken", **more},
    }


def files(root):
    return {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".git/" not in str(path)
    }


@pytest.mark.slow
def test_a_test_counts_where_it_fails_with_the_mutation_and_passes_without(
    mutations, repository, tmp_path
):
    rows = {
        "X1": row("x * 2", "x * 3", "test_nothing", "test_twice"),
        "X2": row("x / 2", "x / 3", "test_half_in_a_child"),
        "X3": row("x * 2", "x * 3", "test_nothing"),
        "X4": row("x * 2", "x * 3", "test_always_fails"),
        "X5": row("x * 2", "x * y(", "test_twice", file="test_sums.py"),
        "X6": {"tests": ["test_sums.py::test_twice", "test_sums.py::test_nothing"], "break": "X3"},
        "X7": row("x * 2", "x * 3", "test_twice", "test_nothing", test="test_nothing"),
        "X8": row("def twice", "def thrice", "test_twice"),
    }
    before = files(repository)
    names = [name for name in rows if name != "X5"]
    outcomes = {}
    for some in mutations.run(repository, rows, names, 2, 60):
        outcomes |= some
    assert files(repository) == before
    assert list((tmp_path / "copies").iterdir()) == []
    assert {name: outcome.failed for name, outcome in outcomes.items()} == {
        "X1": "test_sums.py::test_twice",
        "X2": "test_sums.py::test_half_in_a_child",
        "X3": "",
        "X4": "",
        "X6": "test_sums.py::test_twice",
        "X7": "",
        "X8": "",
    }
    assert outcomes["X3"].detail == "no test fails"
    assert (
        outcomes["X4"].detail
        == "test_sums.py::test_always_fails does not pass without the mutation either"
    )
    assert outcomes["X8"].detail == "pytest ended with 4: no test ran to its end"


def test_what_is_wrong_with_a_mutation_or_its_result_is_named(mutations, repository):
    good = row("x * 2", "x * 3", "test_twice")
    digest = mutations.of_row("X", {"X": good}).digest
    rows = {
        "X1": good,
        "X2": row("return", "yield", "test_twice"),
        "X3": row("x * 2", "x * 2", "test_twice"),
        "X4": row("x * 2", "x *", "test_twice"),
        "X5": row("x", "y", "test_twice", file="nowhere.py"),
        "X6": {"tests": ["test_sums.py::test_twice"]},
        "X7": good,
        "X8": {"tests": ["test_sums.py::test_twice"], "break": "X1"},
        "X9": row("x / 2", "x / 3", "test_twice", test="test_half"),
        "X10": {"missing": "all", "break": "X1"},
    }
    held = {"mutation": digest, "failed": "test_twice"}
    records = {
        "X1": held,
        "X7": {"mutation": digest, "failed": ""},
        "X8": held,
        "X9": held,
        "X10": held,
    }
    records |= {
        name: {"mutation": mutations.of_row(name, rows).digest, "failed": "test_twice"}
        for name in ("X2", "X3", "X4", "X5")
    }
    found = mutations.mistakes(repository, rows, [name for name in rows if name != "X10"], records)
    assert found == [
        "X10: is broken, but does not work",
        "X10: has a result in mutations.json, but does not work",
        "X2: 'return' stands 2 times in quantflow/sums.py, not once",
        "X3: 'x * 2' is replaced by itself",
        "X4: quantflow/sums.py is no Python when broken: invalid syntax (<unknown>, line 2)",
        "X5: there is no file nowhere.py to break",
        "X6: `break` must have file, replace, says, with, and may name a `test`, or be another "
        "row's id",
        "X7: its tests do not fail where it is broken",
        "X9: the test of `break`, test_half, is none of the row's",
        "X9: its mutation was not run; `python docs/make_coverage.py --break --rows X9`",
    ]


def test_a_file_that_moves_keeps_its_result_and_another_change_does_not(mutations):
    here = mutations.Mutation("a.py", "x * 2", "x * 3", "says")
    assert (
        here.digest == mutations.Mutation("b.py", "x * 2", "x * 3", "says otherwise", "test").digest
    )
    assert here.digest != mutations.Mutation("a.py", "x * 2", "x * 4", "says").digest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_tests_and_removes_the_copies(mutations, repository, tmp_path, number):
    (repository / "test_sums.py").write_text(
        "import os, pathlib, time\nfrom quantflow.sums import twice\n\n\ndef test_long():\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    "
        "time.sleep(600)\n"
    )
    program = (  # whoever runs the tests in the background may have SIGINT ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys, tempfile; sys.path.insert(0, {str(DOCS)!r}); import mutations; from "
        "pathlib import Path\n"
        f"rows = {{'X1': {row('x * 2', 'x * 3', 'test_long')!r}}}\n"
        f"list(mutations.run(Path({str(repository)!r}), rows, ['X1'], 1, 600))"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    until = time.monotonic() + 120
    while (
        not (pid.exists() and pid.read_text()) and run.poll() is None and time.monotonic() < until
    ):
        time.sleep(0.05)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert list((tmp_path / "copies").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
