"""docs/versions.md names the versions of constraints.txt and of the tests of other programs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "versions.md").read_text()


def test_a_version_is_the_one_that_is_pinned_or_that_its_tests_ask_for():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    rows = re.findall(
        r"^\| ([\w-]+) \| ([\d.]+) \| .+ \| `(tests/[\w/]+\.py)` \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == len(re.findall(r"^\| [\w-]+ \| \d", PAGE, re.MULTILINE)) > 9
    for name, version, path in rows:
        test = (ROOT / path).read_text()
        assert pins.get(name) == version or (name not in pins and f'"{version}"' in test), name


def test_the_other_programs_of_the_tests_are_on_the_page():
    asked = {
        re.search(r'VARIABLE, RELEASE = "\w+", "([\d.]+)"', path.read_text())
        for path in sorted((ROOT / "tests" / "parity").glob("test_*.py"))
    }
    versions = {found[1] for found in asked if found is not None}
    assert len(versions) >= 3 and all(f"| {version} |" in PAGE for version in versions)
