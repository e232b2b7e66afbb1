"""How long the runtime is: whoever wants to know what runs an artifact has so much to read."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "quantflow"
RUNTIME = PACKAGE / "runtime"
# A LoRA beside a linear, weights that stay on disk, a model over several processes (rank 0 leads, each has some rows): not on
# the way from an artifact to a token. Nothing else stands aside.
ASIDE = {RUNTIME / name for name in ("adapters.py", "offload.py", "leader.py", "tensor_parallel.py")}
# Loading, linears, the cache, what decodes, every backend, and the glue to their C.
CORE = sorted({*RUNTIME.glob("*.py"), *(PACKAGE / "backends").glob("*.py")} - ASIDE)
CORE += [PACKAGE / "core" / name for name in ("backend.py", "kernels.py", "native.py")]
C = [PACKAGE / "core/kernels.c", RUNTIME / "decode.c"]
WAYS = sorted((RUNTIME / "decoding").glob("*.py"))


def code_lines(text: str) -> int:
    """Count the lines that hold code: neither blank, nor a comment alone, nor part of a docstring."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - told)


def whole_lines(text: str) -> int:
    return text.count("\n")


@pytest.mark.parametrize(
    ("files", "count", "most"),
    [
        (CORE, code_lines, 1500),
        (CORE, whole_lines, 2577),  # docstrings (shapes, errors, sources) and blank lines among them
        (WAYS, whole_lines, 1500),
        (C, whole_lines, 600),
        (sorted(ASIDE), whole_lines, 744),
    ],
    ids=["the core path, code", "the core path, all lines", "the ways of generating", "C", "what stands aside"],
)
def test_it_is_at_most_so_many_lines(files, count, most):
    lines = {path.relative_to(PACKAGE).as_posix(): count(path.read_text()) for path in files}
    assert sum(lines.values()) <= most, f"{sum(lines.values())} lines of {lines}"


def test_lines_of_code_worked_by_hand():
    text = '"""One\n\ntwo."""\n\nx = 1  # with code\n# alone\n\n\ndef f():\n    """Say."""\n    return (\n        "a"\n    )\n'
    assert code_lines(text) == 5  # x, def, and the three of the return
