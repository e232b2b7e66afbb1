"""Breaks the feature of a row of coverage.toml once, in a copy of the tree, and runs its tests.

A mutation replaces a text that stands exactly once in a file. It shows something where a test of
its row passes without it and fails with it. mutations.json keeps the result of each row with a
digest of its mutation, so that a result of another mutation is seen. The digest leaves the path of
the file out, and the result the path of the test: files may move.
"""

import ast
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

KEYS = {"file", "replace", "with", "says"}
OPTIONAL = {"test"}
CHUNK = 20  # mutations whose failing tests share one run without a mutation
# Times of files that are broken begin here; zip files know no year before 1980.
EPOCH = 1_000_000_000


@dataclass(frozen=True)
class Mutation:
    """A feature broken in one place.

    Args:
        file: path below the repository.
        old: text that stands exactly once in the file.
        new: text in its place.
        says: phrase for the page, such as "the batch is not repeated".
        test: name of the one test to run, or "" for all of the row.
    """

    file: str
    old: str
    new: str
    says: str
    test: str = ""

    @property
    def digest(self) -> str:
        """Digest of what is replaced and by what."""
        return hashlib.sha256(f"{self.old}\0{self.new}".encode()).hexdigest()[:12]

    def places(self, text: str) -> list[re.Match[str]]:
        """Places of the old text; white space does not count, nor a comma before a bracket.

        So a formatter may break a line in two without making the mutation stale.
        """
        words = re.findall(r"\w+|[^\w\s]", self.old)
        parts = [
            rf"(?:,\s*)?{re.escape(word)}" if word in ")]}" else re.escape(word) for word in words
        ]
        return list(re.finditer(r"\s*".join(parts), text))

    def applied(self, text: str) -> str:
        """A file's text with the mutation."""
        (place,) = self.places(text)
        return text[: place.start()] + self.new + text[place.end() :]

    def mistakes(self, root: Path) -> list[str]:
        """Reasons why it cannot be applied to the repository at `root`."""
        path = root / self.file
        if not path.is_file():
            return [f"there is no file {self.file} to break"]
        text = path.read_text()
        if (times := len(self.places(text))) != 1:
            return [f"{self.old!r} stands {times} times in {self.file}, not once"]
        if self.old == self.new:
            return [f"{self.old!r} is replaced by itself"]
        if path.suffix == ".py":
            try:
                ast.parse(self.applied(text))
            except SyntaxError as error:
                return [f"{self.file} is no Python when broken: {error}"]
        return []


@dataclass(frozen=True)
class Outcome:
    """What the tests of a row did when its feature was broken.

    Args:
        failed: id of the test that failed, or "" where none did.
        detail: first line of its failure, or the reason why nothing failed.
    """

    failed: str
    detail: str


def of_row(name: str, rows: dict[str, dict[str, Any]]) -> Mutation | None:
    """Mutation of a row; `break = "H5"` is that of row H5, which asks for the same."""
    given = rows[name].get("break")
    if isinstance(given, str):
        given = rows.get(given, {}).get("break")
    if not isinstance(given, dict) or not given.keys() >= KEYS or given.keys() - KEYS - OPTIONAL:
        return None
    return Mutation(
        given["file"], given["replace"], given["with"], given["says"], given.get("test", "")
    )


def tests_of(row: dict[str, Any], mutation: Mutation) -> tuple[str, ...]:
    """Ids of the row's tests that are run against its mutation, in order."""
    tests = tuple(row["tests"])
    return tuple(test for test in tests if test.partition("::")[2] == mutation.test) or tests


def mistakes(
    root: Path,
    rows: dict[str, dict[str, Any]],
    working: Sequence[str],
    records: dict[str, dict[str, str]],
) -> list[str]:
    """What is wrong with the mutations and the records of the rows that work."""
    found = [
        f"{name}: is broken, but does not work"
        for name, row in rows.items()
        if "break" in row and name not in working
    ]
    found += [
        f"{name}: has a result in mutations.json, but does not work"
        for name in records
        if name not in working
    ]
    for name in working:
        mutation = of_row(name, rows)
        if mutation is None:
            keys = ", ".join(sorted(KEYS))
            found.append(
                f"{name}: `break` must have {keys}, and may name a `test`, or be another row's id"
            )
            continue
        found += [f"{name}: {mistake}" for mistake in mutation.mistakes(root)]
        names = [test.partition("::")[2] for test in rows[name]["tests"]]
        if mutation.test and mutation.test not in names and isinstance(rows[name]["break"], dict):
            found.append(f"{name}: the test of `break`, {mutation.test}, is none of the row's")
        record = records.get(name, {})
        if record.get("mutation") != mutation.digest:
            found.append(
                f"{name}: its mutation was not run; `python docs/make_coverage.py --break --rows "
                f"{name}`"
            )
        elif record["failed"] not in names:
            found.append(f"{name}: its tests do not fail where {mutation.says}")
    return found


def run(
    root: Path, rows: dict[str, dict[str, Any]], names: Sequence[str], jobs: int, seconds: int
) -> Iterator[dict[str, Outcome]]:
    """Outcomes of the rows `names`, some at a time; the tree at `root` is only read.

    Rows of the same mutation and tests share one run. A failing test counts where it passes without
    the mutation.
    """
    groups: dict[tuple[Mutation, tuple[str, ...]], list[str]] = {}
    for name in names:
        mutation = of_row(name, rows)
        assert mutation is not None, f"{name} has no mutation"
        groups.setdefault((mutation, tests_of(rows[name], mutation)), []).append(name)
    entries = list(groups.items())
    with (
        _ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="broken-", ignore_cleanup_errors=True) as folder,
    ):
        copies = [
            _Copy(root, Path(folder) / str(index), seconds)
            for index in range(min(jobs, len(entries)))
        ]
        copies[0].check_import()
        for start in range(0, len(entries), CHUNK):
            chunk = entries[start : start + CHUNK]
            found = _all(copies, [key for key, _ in chunk])
            broken = sorted({outcome.failed for outcome in found if outcome.failed})
            passed = copies[0].passing(broken) if broken else set()
            outcomes: dict[str, Outcome] = {}
            for (_, group), outcome in zip(chunk, found, strict=True):
                if outcome.failed and outcome.failed not in passed:
                    outcome = Outcome(
                        "", f"{outcome.failed} does not pass without the mutation either"
                    )
                outcomes |= dict.fromkeys(
                    group, Outcome(outcome.failed.partition("[")[0], outcome.detail)
                )
            yield outcomes


def _all(copies: "list[_Copy]", keys: "list[tuple[Mutation, tuple[str, ...]]]") -> list[Outcome]:
    """Outcome of each mutation; each copy has one mutation at a time."""
    free = list(copies)
    lock = threading.Lock()

    def one(key: tuple[Mutation, tuple[str, ...]]) -> Outcome:
        with lock:
            copy = free.pop()
        try:
            return copy.broken(*key)
        finally:
            with lock:
                free.append(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        waiting = [pool.submit(one, key) for key in keys]
        try:
            return [future.result() for future in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C, so that copies are removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Copy:
    """Copy of a repository's files: those that git tracks, and new ones that it does not ignore."""

    def __init__(self, root: Path, folder: Path, seconds: int) -> None:
        self.folder, self.seconds = folder, seconds
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False
        self._writes = 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=root, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(root / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        self.environment["PYTHONPATH"] = str(folder)
        self.report = folder.with_suffix(".xml")

    def check_import(self) -> None:
        """Refuse to run where another package than the copy's would be imported."""
        command = [sys.executable, "-c", "import quantflow; print(quantflow.__file__)"]
        shown = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        if not Path(shown.stdout.strip()).is_relative_to(self.folder):
            raise RuntimeError(
                f"{shown.stdout.strip()} would be imported in place of the copy's package"
            )

    def broken(self, mutation: Mutation, tests: Sequence[str]) -> Outcome:
        """Outcome of the tests with the mutation, up to the first that fails."""
        path = self.folder / mutation.file
        before = path.read_text()
        self._write(path, mutation.applied(before))
        try:
            code, cases = self._pytest(["-x", *tests], self.seconds)
        finally:
            self._write(path, before)
        for test, (state, line) in cases.items():
            if state == "failed" and "::" in test:
                return Outcome(test, line)
        if code in (None, 0):
            return Outcome(
                "", "no test fails" if code == 0 else f"took longer than {self.seconds} s"
            )
        return Outcome("", f"pytest ended with {code}: no test ran to its end")

    def passing(self, tests: Sequence[str]) -> set[str]:
        """Tests that pass without a mutation."""
        _, cases = self._pytest(tests, self.seconds * len(tests))
        return {test for test, (state, _) in cases.items() if state == "passed"}

    def stop(self) -> None:
        """End the running tests with the processes that they started."""
        self.stopped = True
        process = self.process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: Python takes compiled code by time and size."""
        path.write_text(text)
        self._writes += 1
        os.utime(path, (EPOCH + self._writes, EPOCH + self._writes))

    def _pytest(
        self, arguments: Sequence[str], seconds: int
    ) -> tuple[int | None, dict[str, tuple[str, str]]]:
        """Exit code of pytest, None after too long; state and first line of failure per test."""
        self.report.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            "--tb=short",
        ]
        command += [f"--junitxml={self.report}", "-o", "junit_family=xunit1", *arguments]
        with (self.folder.with_suffix(".out")).open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )
            if self.stopped:
                self.stop()
            try:
                code: int | None = self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end_group()
        return code, _cases(self.report) if self.report.exists() else {}

    def _end_group(self) -> None:
        """End what the tests left running."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _cases(report: Path) -> dict[str, tuple[str, str]]:
    """State and first line of failure of each test of a report of pytest."""
    cases: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        line = "" if problem is None else (problem.get("message") or "").partition("\n")[0]
        state = (
            "failed"
            if problem is not None
            else "skipped"
            if case.find("skipped") is not None
            else "passed"
        )
        name, file = case.get("name"), case.get("file")
        if file is None or line == "collection failure":
            continue  # a file that could not be collected is no test
        cases[f"{file}::{name}"] = (state, line)
    return cases
