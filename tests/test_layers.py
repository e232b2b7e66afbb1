"""The house, as tests: what may import what, and where names may stand."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = [
    "__version__",  # a name of the package itself
    "errors",
    "units",
    "plain_text",
    "progress",
    "accelerators",
    "settings",
    "control_group",
    "cpu_threads",
    "process_memory",
    "child_process",
    "configs",
    "shipped",
    "svg_plot",
    "files",
    "reporting",
    "core",
    "backends",
    "numerics",
    "observers",
    "transforms",
    "algorithms",
    "models",
    "formats",
    "sources",
    "distributed",
    "runtime",
    "benching",
    "planning",
    "measuring",
    "quantizing",
    "unifying",
    "exporting",
    "validating",
    "publishing",
    "langchain",
    "server",
]  # low to high; quantflow.stages is above them all
# members of a table never import each other
INDEPENDENT = {"observers", "transforms", "algorithms", "formats", "backends"}
SHARED = {  # what the members of a table stand on
    "backends": {"backend", "kernels", "native"},
    "formats": {"weight_layout"},
    "observers": {"keys"},
}
WITHOUT_TORCH = {
    "errors",
    "units",
    "plain_text",
    "progress",
    "accelerators",
    "settings",
    "process_memory",
    "child_process",
    "shipped",
    "artifact",
}
APPLICATION = {"stages", "click", "rich"}  # what the library never imports
# May import the project's own modules inside functions: they start without torch, or without
# transformers' model code.
LAZY = {
    "quantflow/models/open.py",
    "quantflow/__init__.py",
    "quantflow/measuring/job.py",
    "quantflow/measuring/continue_job.py",
    "quantflow/unifying/job.py",
    "quantflow/quantizing/job.py",
    "quantflow/exporting/job.py",
    "quantflow/validating/job.py",
    "quantflow/validating/compare_job.py",
    "quantflow/publishing/job.py",
    "quantflow/planning/plan_job.py",
    "quantflow/planning/forecast.py",
    "quantflow/planning/file_size.py",
    "quantflow/runtime/generate_job.py",
    "quantflow/runtime/chat_job.py",
    "quantflow/benching/bench_job.py",
    "quantflow/server/settings.py",
    "quantflow/sources/models.py",
    "quantflow/quantizing/quantize.py",
    "quantflow/validating/task_scores.py",
    "quantflow/exporting/proof_process.py",
    "quantflow/runtime/artifact.py",
    "quantflow/runtime/decoding/__init__.py",
    "quantflow/runtime/generation.py",
    "quantflow/runtime/load.py",
    "quantflow/runtime/loaded_mtp.py",
    "quantflow/server/__init__.py",
}
# Read or set the environment: what a child gets of it, which rank a process is, and where compiled
# code is kept.
ENVIRONMENT = {
    "quantflow/process_memory.py",  # torch reads there alone how large its pages are
    "quantflow/cpu_threads.py",  # torch's libgomp reads there alone how long threads wait
    "quantflow/child_process.py",
    "quantflow/distributed/launch.py",
    "quantflow/backends/native.py",
    "quantflow/core/device.py",  # cuBLAS reads its workspace there alone
    "quantflow/server/vllm.py",  # what vLLM gets of it
    "stages/cli/environment.py",
}
# links are not followed
MODULE_NAME = re.compile(r"quantflow(\.[a-z_0-9]+)+")
FILES = sorted([*(ROOT / "quantflow").rglob("*.py"), *(ROOT / "stages").rglob("*.py")])


@pytest.fixture(scope="module", autouse=True)
def trees_are_let_go_of() -> Iterator[None]:
    """Every test reads the same files: each is parsed once, and none is kept after the last."""
    yield
    for kept in (parsed, nodes, is_module):
        kept.cache_clear()


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree, which nobody may change."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, those inside functions too."""
    return tuple(ast.walk(parsed(path)))


def imported_names(nodes: Iterable[ast.AST], where: Path) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}:{node.lineno}: relative import; write the full path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def named_modules(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules by their names as text, which a table imports or a child process runs."""
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts = {value for value in constants if isinstance(value, str)}
    return {text for text in texts if MODULE_NAME.fullmatch(text) and is_module(text)}


@cache
def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.is_relative_to(ROOT / "quantflow")], ids=relative
)
def test_imports_point_downwards(path):
    own = path.relative_to(ROOT / "quantflow").parts[0].removesuffix(".py")
    for name in sorted(imported_names(nodes(path), path) | named_modules(nodes(path))):
        package, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        assert package not in APPLICATION, (
            f"{path} imports {name}: the library never imports the application"
        )
        if own == "__main__":  # the command line's own door
            continue
        assert package != "quantflow" or layer != "stages", (
            f"{path} imports {name}: stages are above the library"
        )
        assert own not in WITHOUT_TORCH or package not in ("torch", "numpy", "safetensors"), (
            f"{path} imports {name}"
        )
        if package != "quantflow" or own == "__init__":
            continue
        assert layer in LIBRARY, f"{path} imports {name}, a package without a place in the order"
        assert LIBRARY.index(layer) <= LIBRARY.index(own), f"{path}: {own} may not import {name}"


def member_of(path: Path) -> tuple[str, str] | None:
    """The table that a file belongs to and its member there, a file or a folder.

    None for others.
    """
    if not path.is_relative_to(ROOT / "quantflow"):
        return None
    package, *rest = path.relative_to(ROOT / "quantflow").with_suffix("").parts
    if package not in INDEPENDENT or rest in ([], ["__init__"]):
        return None
    return package, rest[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_first(path: Path) -> set[str]:
    """The own modules that a module has to have whole, imports in functions left out.

    A package's own file comes before a module in it, unless it is the importer's too: then it has
    begun already.
    """
    own, modules = module_of(path), set()
    for name in imported_names(parsed(path).body, path):
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            if is_module(module) and not f"{own}.".startswith(f"{module}."):
                modules.add(module)
    return modules


def test_modules_do_not_import_each_other_in_a_circle():
    needed = {module_of(path): imported_first(path) for path in FILES}
    whole: set[str] = set()
    while ready := {name for name, modules in needed.items() if modules & needed.keys() <= whole}:
        whole |= ready
        needed = {name: modules for name, modules in needed.items() if name not in whole}
    assert not needed, {name: sorted(modules & needed.keys()) for name, modules in needed.items()}


@pytest.mark.parametrize("path", [p for p in FILES if member_of(p) is not None], ids=relative)
def test_members_of_a_table_never_import_each_other(path):
    package, own = member_of(path)
    allowed = {own, *SHARED.get(package, ())}
    for name in imported_names(nodes(path), path):
        if name.split(".")[:2] != ["quantflow", package]:
            continue
        module = name.split(".")[2]
        folder = ROOT / "quantflow" / package
        if (folder / module).is_dir() or (folder / f"{module}.py").is_file():
            assert module in allowed, f"{path}: {name} is a sibling"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.is_relative_to(ROOT / "quantflow")], ids=relative
)
def test_no_own_package_import_hides_inside_a_function(path):
    if relative(path) in LAZY:
        return
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = [
                name
                for name in imported_names(ast.walk(node), path)
                if name.partition(".")[0] == "quantflow"
            ]
            assert not hidden, f"{path}: {node.name} imports {hidden}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_environment_is_read_in_these_places(path):
    if relative(path) in ENVIRONMENT:
        return
    for node in nodes(path):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), (
            f"{path}:{node.lineno}"
        )


# What the command line may import of the library: jobs, the records of their settings, how their
# results are shown, files without torch, and words.
OFFERED = {
    "quantflow.__version__",
    "quantflow.errors",
    "quantflow.progress",
    "quantflow.units",
    "quantflow.plain_text",
    "quantflow.settings",
    "quantflow.shipped",
    "quantflow.process_memory",
    "quantflow.cpu_threads",
    "quantflow.files",
    "quantflow.reporting",
    "quantflow.distributed.launch",  # which rank this process is
    "quantflow.distributed.rank",
    "quantflow.planning.recipe",
    "quantflow.planning.plan_job",
    "quantflow.planning.survey",
    "quantflow.measuring.job",
    "quantflow.measuring.continue_job",
    "quantflow.measuring.text_inspection",
    "quantflow.unifying.job",
    "quantflow.quantizing.job",
    "quantflow.quantizing.quant_config_defaults",
    "quantflow.publishing.job",
    "quantflow.exporting.job",
    "quantflow.exporting.artifact_job",
    "quantflow.exporting.dequantized_export",
    "quantflow.exporting.merged_adapter",
    "quantflow.exporting.proof",
    "quantflow.validating.job",
    "quantflow.validating.tables",
    "quantflow.validating.recipe_check",
    "quantflow.validating.sample_text",
    "quantflow.validating.folder_diff",
    "quantflow.formats.gaudi.quant_config",
    "quantflow.sources.models",
    "quantflow.sources.headers",
    "quantflow.sources.hub",
    "quantflow.runtime.generate_job",
    "quantflow.runtime.chat_job",
    "quantflow.runtime.partner",
    "quantflow.runtime.backend_choice",
    "quantflow.runtime.inspection",
    "quantflow.benching.bench_job",
    "quantflow.validating.compare_job",
    "quantflow.validating.compare_page",
    "quantflow.server.serve",
    "quantflow.server.vllm_command",  # the second front door, and its records
    "quantflow.server.settings",
    "quantflow.stages",
}
# Packages of which a verb needs one at least; the others are words and settings.
WORKING = {"files", "measuring", "unifying", "quantizing", "exporting", "validating", "planning"}
WORKING |= {"runtime", "benching", "publishing", "server"}
STAGES = [path for path in FILES if path.is_relative_to(ROOT / "stages")]


@pytest.mark.parametrize("path", STAGES, ids=relative)
def test_a_stage_is_public_and_calls_the_library_through_its_front_door(path):
    assert not path.name.startswith("_") or path.name in ("__init__.py", "__main__.py")
    for name in sorted(imported_names(nodes(path), path)):
        assert name.partition(".")[0] not in ("torch", "numpy", "transformers", "safetensors"), (
            f"{path} imports {name}"
        )
        if name.partition(".")[0] == "quantflow":
            assert any(f"{name}.".startswith(f"{offered}.") for offered in OFFERED), (
                f"{path} imports {name}"
            )


def test_a_verb_is_a_file_that_says_what_it_reads_and_writes():
    from quantflow.stages.cli import VERBS

    for verb in VERBS:
        path = ROOT / "stages" / f"{verb}.py"
        library = imported_names(nodes(path), path) - {"quantflow.stages"}
        assert any(
            name.startswith("quantflow.") and name.split(".")[1] in WORKING for name in library
        ), f"{verb} calls nothing of the library"
        if verb not in ("inspect", "verify", "diff"):
            lines = ast.get_docstring(parsed(path)).splitlines()
            words = [line.split()[0] for line in lines if line.split() and line[0].isalpha()]
            assert [word for word in words if word in ("Reads", "Writes", "Resumes", "Fails")] == [
                "Reads",
                "Writes",
                "Resumes",
                "Fails",
            ], verb


def test_a_public_class_name_stands_for_one_class():
    homes = defaultdict(list)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(relative(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


IMPORT = re.compile(
    r"^ *from ((?:quantflow|stages)[\w.]*) import (\([^)]*\)|[^\n(]+)", re.MULTILINE
)
# Tests and benchmarks that a process of their own runs, where another program is installed, too.
AROUND = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


@cache
def defined(module: str) -> frozenset[str]:
    """The names that a module of ours has, those of its submodules left out."""
    place = ROOT.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names = {alias.asname or alias.name for alias in imports_of(path)}
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def imports_of(path: Path) -> list[ast.alias]:
    return [
        alias
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]


def test_what_tests_and_benchmarks_import_is_there():
    """Many run seldom: beside a program that is not installed here, or in its interpreter."""
    missing, found = [], 0
    for path in AROUND:
        for module, names in IMPORT.findall(path.read_text()):
            for name in re.findall(
                r"^\s*(\w+)", names.strip("()").replace(",", "\n"), re.MULTILINE
            ):
                found += 1
                there = is_module(module) and (
                    is_module(f"{module}.{name}") or name in defined(module)
                )
                missing += [] if there else [f"{relative(path)}: {module}.{name}"]
    assert missing == [] and found > 1000


def test_no_module_replaces_a_foreign_one():
    for path in FILES:
        for node in nodes(path):
            assert not (
                isinstance(node, ast.Attribute)
                and node.attr == "modules"
                and ast.unparse(node) == "sys.modules"
            ), path


# Print text as it is: a model's into a file, and a rank's into the pipe of who started it.
RAW = {("stages/cli/output.py", "write_piece"), ("quantflow/distributed/rank.py", "_write")}


def raw_prints(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines where something is printed that has not gone through `plain` or `one_line`."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in (
                "print",
                "click.echo",
                "click.secho",
                "sys.stdout.write",
                "sys.stderr.write",
            ):
                found += [node.lineno for value in node.args if not is_escaped(value)]
            elif name.startswith("traceback.print"):
                found.append(node.lineno)
    return found


def is_escaped(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Call(func=function, args=arguments, keywords=keywords):
            name = ast.unparse(function)
            if name == "json.dumps":  # escapes all that is not ASCII, unless it is told not to
                return all(word.arg != "ensure_ascii" for word in keywords)
            return name in ("plain", "one_line") or (
                name == "click.style" and is_escaped(arguments[0])
            )
        case ast.JoinedStr(values=parts):
            return all(map(is_escaped, parts))
        case ast.FormattedValue(value=value) | ast.Subscript(value=value):
            return is_escaped(value)
        case ast.IfExp(body=one, orelse=other):
            return is_escaped(one) and is_escaped(other)
    return False


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_all_that_is_printed_goes_through_the_one_escape(path):
    """A name, an error or a text of a stranger holds escapes that steer a terminal.

    Reports: vercel/ai#20052 and marmot-protocol/mdk#993, whose terminal programs escaped on some
    paths and printed raw on others.
    """
    allowed = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef) and (relative(path), node.name) in RAW:
            allowed |= {inner for part in node.body for inner in ast.walk(part)}
    assert raw_prints(node for node in nodes(path) if node not in allowed) == []


def test_a_raw_print_is_found():
    for line, raw in (
        ("print(name)", True),
        ("click.echo(f'{partner.name}. {plain(HELP)}.', err=True)", True),
        ("click.echo(click.style(piece, dim=True))", True),
        ("print(json.dumps(value, ensure_ascii=False))", True),
        ("traceback.print_exc()", True),
        ("sys.stderr.write(f'\\r{one_line(text)[: width - 1]}')", False),
        ("print(plain(text), file=sys.stderr)", False),
        ("click.echo()", False),
    ):
        assert bool(raw_prints(ast.walk(ast.parse(line)))) == raw, line
