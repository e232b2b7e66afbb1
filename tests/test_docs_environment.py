"""docs/environment.md has every variable that the code reads or sets.

It also has those that `serve` does not read.
"""

import ast
import re
from pathlib import Path

import click
import pytest

from quantflow.stages.cli.environment import UNREAD, unread_variables
from quantflow.stages.cli.other_programs import FLOAT8_VARIABLES, SERVE_VARIABLES
from quantflow.stages.serve import command as serve

ROOT = Path(__file__).resolve().parents[1]
READERS = (  # tests/test_layers.py lets these read the environment and no other
    "quantflow/child_process.py",
    "quantflow/process_memory.py",
    "quantflow/cpu_threads.py",
    "quantflow/distributed/launch.py",
    "quantflow/backends/native.py",
    "quantflow/core/device.py",
    "quantflow/server/vllm.py",
    "stages/cli/environment.py",
)
# What people set for the programs that they come from: each is on the page, whoever reads it.
KNOWN = """
HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES PT_HPU_LAZY_MODE PT_HPU_ENABLE_LAZY_COLLECTIVES
PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES PT_HPU_MAX_COMPOUND_OP_SIZE PT_ENABLE_INT64_SUPPORT
WA_INDEX_COPY HCL_USE_IN_ORDER_COLLECTIVE_GAUDI2 ENABLE_EXPERIMENTAL_FLAGS
OMPI_MCA_btl_vader_single_copy_mechanism HUGGING_FACE_HUB_TOKEN HF_HUB_ENABLE_HF_TRANSFER
USE_DEFAULT_QUANT_PARAM UPDATE_GRAPH_OUTPUT_MME
ENABLE_CALC_DYNAMIC_RANGE UPDATE_MME_OUTPUT_PRECISION_FILTER EXPERIMENTAL_WEIGHT_SHARING
QUANT_CONFIG TQDM_DISABLE OMP_NUM_THREADS
KMP_AFFINITY PYTORCH_TUNABLEOP_ENABLED
"""


def rows(heading):
    """Return the variables of a section's table."""
    section = (
        (ROOT / "docs/environment.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    )
    return [
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    ]


def literals(path):
    """The strings of a file that look like variables.

    Those of `os.sysconf` and of the table of unread variables are none.
    """
    tree = ast.parse((ROOT / path).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "UNREAD":
            tree.body.remove(node)
            break
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(?!SC_)[A-Z][A-Z0-9_]+", node.value)
    } | {
        name.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for name in node.keywords
        if (name.arg or "").isupper()
    }


def test_the_page_has_every_variable_that_is_read_or_set():
    read = set().union(*map(literals, READERS))
    read |= {
        option.envvar
        for option in serve.params
        if isinstance(option, click.Option) and option.envvar
    } | {*SERVE_VARIABLES, *FLOAT8_VARIABLES}
    found = rows("Read or set here")
    assert sorted(found) == sorted(read)
    assert len(set(found)) == len(found)


def test_the_page_says_of_variables_that_are_not_read_why():
    section = (
        (ROOT / "docs/environment.md").read_text().split("## Of other servers, and not read\n")[1]
    )
    assert [f"| `{name}` | {why} |" for name, why in UNREAD.items()] == [
        line for line in section.splitlines() if line.startswith("| `")
    ]


def test_what_people_set_for_other_programs_is_on_the_page():
    page = (ROOT / "docs/environment.md").read_text()
    assert [name for name in KNOWN.split() if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", UNREAD)
def test_a_variable_that_is_set_and_not_read_is_said(monkeypatch, name):
    for other in UNREAD:
        monkeypatch.delenv(other, raising=False)
    assert unread_variables() == []
    monkeypatch.setenv(name, "7")
    assert unread_variables() == [f"{name}=7 is not read: {UNREAD[name]}"]
