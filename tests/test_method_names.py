"""A method is added in its own package and in a table.

Nowhere else does its name stand as a string.
"""

import ast
from pathlib import Path

import pytest

from quantflow.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, COMBINATIONS, TUNE
from quantflow.exporting.exporters import EXPORTERS
from quantflow.observers import OBSERVERS, STATISTICS
from quantflow.observers.rows import NAME as ROWS
from quantflow.planning.compatibility import KNOWN

ROOT = Path(__file__).resolve().parents[1]
# Words that are names of statistics or observers and, more often, something else: a field `count`,
# rows of a matrix, the `counts` of samples and tokens in a measurement's record, the site
# `gradient` at which observers look.
HOMONYMS = {"count", "counts", "rows", "gradient"}
# `fp8` is a scheme's name, and more often meant so; `imatrix` is a field of jobs too.
HOMES = {  # kind -> its names, and the package and table where they may stand
    "algorithm": (
        {*ALGORITHMS, *BLOCK_ALGORITHMS, TUNE, *COMBINATIONS},
        ("quantflow/algorithms/",),
    ),
    "transform": (set(KNOWN), ("quantflow/transforms/",)),
    "observer or statistic": (
        {*OBSERVERS, *STATISTICS, ROWS} - HOMONYMS,
        ("quantflow/observers/",),
    ),
    "format": (
        set(EXPORTERS) - {*ALGORITHMS, *KNOWN, "fp8", "imatrix"},
        ("quantflow/formats/", "quantflow/exporting/exporters.py"),
    ),
}
# file or folder -> names that stand there, and why. Lines of it that are not needed any more fail
# too.
ALLOWED = {
    "quantflow/core/scheme.py": (
        {"rtn", "gptq", "smoothquant", "amax"},
        "presets name their usual method, and core is below all methods",
    ),
    "quantflow/numerics/": (
        {"amax", "channel_amax", "min_val", "max_val", "abs_sum", "hessian_sum"},
        "reads dictionaries of statistics by key, and is below observers",
    ),
    "quantflow/planning/recipe.py": (
        {"rtn", "smoothquant", "compressed-tensors"},
        "words of recipes and their defaults: a policy for experts, a start of learning, what a "
        "flag means, a format",
    ),
    "quantflow/files/checkpoint.py": (
        {"gptq", "awq", "compressed-tensors"},
        "words of `quant_method`; it is below formats",
    ),
    "quantflow/formats/compressed_tensors/config.py": (
        {"hadamard"},
        "the layout's own word in `transform_config`",
    ),
    "quantflow/formats/gptq/layout.py": ({"gptq"}, "the layout's own name in `quant_method`"),
    "quantflow/formats/awq.py": ({"awq"}, "the layout's own name in `quant_method`"),
    "quantflow/backends/ipex.py": (
        {"ipex"},
        "the backend and the layout have the extension's name",
    ),
    "quantflow/exporting/exporters.py": (
        {"gptq", "awq"},
        "layouts that have the names of an algorithm and a transform",
    ),
    "quantflow/unifying/unify.py": ({"amax"}, "a key of unify's record of outliers, on disk"),
    "stages/plan.py": ({"tune"}, "a key of the plan's JSON"),
    "stages/cli/other_programs.py": (
        {"gptq", "rtn", "inc"},
        "words of --algorithm and --format in a command line, as other programs' options become",
    ),
    "stages/cli/quant_config_layer.py": (
        {"amax", "channel_amax"},
        "Gaudi's observers in our words",
    ),
}
# links are not followed
FILES = sorted([*(ROOT / "quantflow").rglob("*.py"), *(ROOT / "stages").rglob("*.py")])


def strings(path):
    """Return (line, text) of every string of a file that is no docstring."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def names_outside(path):
    """Return (line, kind, name) of every name of a method outside its package and table."""
    where = path.relative_to(ROOT).as_posix()
    for line, text in strings(path):
        for kind, (names, homes) in HOMES.items():
            if text in names and not any(where.startswith(home) for home in homes):
                yield line, kind, text


def allowed(path):
    where = path.relative_to(ROOT).as_posix()
    return {
        name for place, (names, _) in ALLOWED.items() if where.startswith(place) for name in names
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_methods_name_is_a_string_in_its_own_package_and_table_alone(path):
    outside = [
        (line, kind, name) for line, kind, name in names_outside(path) if name not in allowed(path)
    ]
    assert not outside, (
        f"{path}: use the module's NAME, or a fact that the method says of itself: {outside}"
    )


@pytest.mark.parametrize("place", ALLOWED)
def test_an_exception_that_nothing_needs_is_taken_out(place):
    files = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(place)]
    seen = {name for path in files for _, _, name in names_outside(path)}
    assert seen >= ALLOWED[place][0], f"{place}: {ALLOWED[place][0] - seen} do not stand there"
