"""The direction of imports, as a test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    "errors",
    "artifact",
    "core",
    "observers",
    "transforms",
    "algorithms",
    "measurements",
    "formats",
    "models",
    "backends",
    "runtime",
    "evaluation",
]  # low to high; stages/ is above them all
INDEPENDENT = {"observers", "transforms", "algorithms", "formats", "backends"}  # siblings never import siblings
TORCH_FREE = {"artifact", "errors"}
# May import the project's own modules inside functions: the first two start without torch, the others without
# transformers' model code when no model runs.
LAZY = {
    "quantflow/__init__.py",
    "stages/cli/__init__.py",
    "quantflow/quantization/quantize.py",
    "quantflow/exporting/proof_process.py",
}
# Read the environment: options of a run, and where compiled code is kept, which no function below the stages is told.
ENVIRONMENT = {"quantflow/planning/recipe.py", "quantflow/backends/native.py"}
FILES = sorted([*(ROOT / "quantflow").rglob("*.py"), *(ROOT / "stages").rglob("*.py")])


def imported_names(tree: ast.AST, where: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree):  # walk: imports inside functions count too
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}:{node.lineno}: relative import; write the full path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(ROOT / "quantflow")], ids=lambda p: p.name)
def test_imports_point_downwards(path):
    own = path.relative_to(ROOT / "quantflow").parts[0].removesuffix(".py")
    for name in sorted(imported_names(ast.parse(path.read_text()), path)):
        package, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        assert package not in ("stages", "configs"), f"{path} imports {name}: the library never imports the application"
        assert own not in TORCH_FREE or package not in ("torch", "numpy", "safetensors"), f"{path} imports {name}"
        if package != "quantflow" or own not in LAYERS:
            continue
        assert LAYERS.index(layer) <= LAYERS.index(own), f"{path}: {own} may not import {name}"
        sibling = layer == own and own in INDEPENDENT and path.name != "__init__.py" and rest.count(".") > 1
        assert not sibling, f"{path}: {name} is a sibling; move the shared part to quantflow.core"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_own_package_import_hides_inside_a_function(path):
    if path.relative_to(ROOT).as_posix() in LAZY:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = [n for n in imported_names(node, path) if n.partition(".")[0] in ("quantflow", "stages", "configs")]
            assert not hidden, f"{path}: {node.name} imports {hidden}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_file_over_300_lines_says_why(path):
    text = path.read_text()
    if text.count("\n") > 300:
        assert "onger than 300 lines because" in text, f"{path}: {text.count(chr(10))} lines and no reason"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_environment_is_read_in_these_places(path):
    if path.relative_to(ROOT).as_posix() in ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), f"{path}:{node.lineno}"
