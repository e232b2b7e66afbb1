"""Every row of the original systems' options for generation is a test by its number, or a line of docs/generate.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    *(f"H{number}" for number in (*range(4, 17), *range(25, 34))),
    *(f"B{number}" for number in range(8, 34)),
    *(f"I{number}" for number in range(6, 13)),
}


def test_every_row_is_tested_or_explained():
    tests = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    tested = {part for name in tests for part in name.split("_") if re.fullmatch(r"[HBI]\d+", part)}
    table = re.findall(r"^\| ((?:[HBI]\d+(?:, )?)+) \|", (ROOT / "docs/generate.md").read_text(), re.MULTILINE)
    explained = {row for cell in table for row in cell.split(", ")}
    assert ROWS - tested - explained == set()
    assert tested & ROWS
