"""How the modules that open a model stand on each other."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import quantflow.models


def imports_of(path):
    """Return the modules of quantflow.models that a module imports, at its top or in a function."""
    prefix, names = "quantflow.models.", set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(prefix):
            names.add(node.module.removeprefix(prefix))
        elif isinstance(node, ast.ImportFrom) and node.module == prefix.rstrip("."):
            names |= {alias.name for alias in node.names}
    return names


def test_modules_import_each_other_in_one_direction_even_inside_functions():
    folder = Path(quantflow.models.__file__).parent
    graph = {path.stem: imports_of(path) for path in folder.glob("*.py")}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("graph") < order.index("discovery") < order.index("open")
    assert order.index("source") < order.index("open") < order.index("load")
