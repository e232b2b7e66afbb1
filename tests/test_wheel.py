"""The distribution `quantflow-llm` has one package and one command, `quantflow`.

Its command runs in any folder, whatever packages that folder holds.

Slow are the tests that build the wheel and a virtual environment for it.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from quantflow.errors import DISTRIBUTION
from quantflow.models import tokenizer

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tiny-llama"
HASHED = ROOT / "examples" / "ci" / "requirements.txt"
ENTRY = "{name: w4a16, scheme: W4A16, algorithm: gptq}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy with its links.

    setuptools leaves a build folder beside its source.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("quantflow", "stages", "configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "source" / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(command, check=True, cwd=folder)
    (path,) = folder.glob("quantflow_llm-*.whl")
    return path


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q"]
    if (sys.version_info[:2], platform.machine()) == ((3, 11), "x86_64"):
        # as the workflow of examples/ci does
        subprocess.run([*pip, "--require-hashes", "--no-deps", "-r", str(HASHED)], check=True)
    pinned = [*pip, "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pinned, "torch==2.13.0"], check=True)
    subprocess.run([*pinned, str(wheel)], check=True)
    return folder / "bin"


def foreign_folder(folder: Path) -> Path:
    """Make a folder as research repositories are.

    It has packages of its own that are called configs and stages.
    """
    for name in ("configs", "stages"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"raise ImportError('{name} is of another project')\n"
        )
    return folder


def output_of(command: list[str | Path], folder: Path, **environment: str) -> str:
    words, variables = list(map(str, command)), {**os.environ, **environment}
    result = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_command_runs_in_a_folder_that_has_packages_of_the_same_names(
    llama: Path, tmp_path: Path
) -> None:
    """An installed command has its own folder first on the path, not the current one."""
    program = tmp_path / "bin" / "quantflow"
    program.parent.mkdir()
    program.write_text("import sys\nfrom quantflow.stages.cli import main\nsys.exit(main())\n")
    quantflow, folder = [sys.executable, program], foreign_folder(tmp_path / "project")
    installed = {"PYTHONPATH": str(ROOT)}
    recipe = output_of(
        [*quantflow, "run", "tiny-llama", "--dry-run", "--json"], folder, **installed
    )
    assert json.loads(recipe)["quantize"]
    # proved by a second process
    made = ["quantize", llama, "-o", "made", "--scheme", "W8A16", "--export", "artifact", "-q"]
    assert output_of([*quantflow, *made], folder, **installed).strip() == "artifact"
    assert output_of([*quantflow, "verify", "artifact"], folder, **installed).startswith("intact: ")


@pytest.mark.slow
def test_the_installed_command_runs_in_a_folder_that_has_packages_of_the_same_names(
    binaries: Path, tmp_path: Path
) -> None:
    """With ranks, which are processes that torchrun starts."""
    quantflow, folder = binaries / "quantflow", foreign_folder(tmp_path / "project")
    assert json.loads(output_of([quantflow, "run", "tiny-llama", "--dry-run", "--json"], folder))[
        "quantize"
    ]
    made = ["quantize", MODEL, "-o", "shards", "--scheme", "W8A16", "--ranks", "2", "-q"]
    assert output_of([quantflow, *made], folder).strip() == "shards"
    assert (
        output_of([quantflow, "unify", "-m", "shards", "-o", "made", "-q"], folder).splitlines()[-1]
        == "made"
    )
    assert (
        output_of([quantflow, "export", "made", "-o", "artifact", "-q"], folder).strip()
        == "artifact"
    )


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_recipes_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"quantflow"}
    assert len(names) == len(set(names))
    for shipped in sorted(
        [*(ROOT / "configs").glob("*/*.yaml"), *(ROOT / "configs").glob("*/*.json")]
    ):
        assert f"quantflow/{shipped.relative_to(ROOT).as_posix()}" in names
    for verb in (ROOT / "stages").rglob("*.py"):
        assert f"quantflow/{verb.relative_to(ROOT).as_posix()}" in names
    assert "quantflow/py.typed" in names
    package = ROOT / "quantflow"
    for source in [*package.rglob("*.c"), *package.rglob("*.jinja")]:
        assert source.relative_to(ROOT).as_posix() in names


@pytest.mark.slow
def test_a_shipped_recipe_runs_from_another_folder(binaries: Path, tmp_path: Path) -> None:
    text = [
        sys.executable,
        str(ROOT / "examples" / "tiny-llama" / "stdlib_text.py"),
        "--samples",
        "16",
    ]
    subprocess.run(
        [*text, "--output", str(tmp_path / "text")], check=True, stdout=subprocess.DEVNULL
    )
    settings = {
        "model": MODEL,
        "calibration.source": tmp_path / "text" / "calibration.jsonl",
        "calibration.samples": 16,
        "calibration.sequence_length": 256,
        "quantize": f"[{ENTRY}]",
        "validate.text": tmp_path / "text" / "heldout.jsonl",
        "validate.tokens": 2048,
        "validate.sequence_length": 256,
    }
    command = [str(binaries / "quantflow"), "run", "tiny-llama", "-o", "out", "--json"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    work = tmp_path / "work"
    work.mkdir()
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 4), result.stderr  # so little text may leave the gate undecided
    (validation,) = json.loads(result.stdout)
    assert validation["artifact"] == "w4a16"
    assert validation["perplexity"]["candidate"] < 2 * validation["perplexity"]["baseline"]

    artifact = work / "out" / "4-export" / "w4a16"
    manifest = json.loads((artifact / "quantflow.json").read_text())
    assert manifest["digest"] == validation["digest"]
    assert (work / "out" / "3-unify").is_dir()  # the recipe measures on two ranks
    verified = subprocess.run(
        [str(binaries / "quantflow"), "verify", str(artifact)],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.startswith("intact: ")

    prompt = [
        "generate",
        str(artifact),
        "--prompt",
        "def main():",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    generated = subprocess.run(
        [str(binaries / "quantflow"), *prompt], cwd=work, capture_output=True, text=True, check=True
    )
    assert len(json.loads(generated.stdout)["outputs"][0]["tokens"]) == 8


def test_packages_are_pinned_and_those_of_tasks_and_servers_are_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }

    def names(lines):
        return {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}

    base = names(project["dependencies"])
    assert names(extras["eval"]) == {"lm-eval"} and {"starlette", "uvicorn"} <= names(
        extras["serve"]
    )
    assert base <= pinned
    # what LangChain needs is in no environment of the tests
    for name in ("eval", "inc", "serve", "sign", "tokenizers", "dev"):
        assert names(extras[name]) <= pinned and not names(extras[name]) & base, name


def pip_name(line: str) -> str:
    """The name of a requirement as pip compares names."""
    return re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")


def test_files_of_the_workflow_have_the_hash_of_each_package_but_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in HASHED.read_text().splitlines() if not line.startswith("#")]
    form = re.compile(r"[\w.-]+==([\w.]+) --hash=sha256:[0-9a-f]{64}")
    hashed = {pip_name(line): form.fullmatch(line)[1] for line in lines}
    pinned = {
        pip_name(line): line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert {*map(pip_name, project["dependencies"])} - {"torch"} <= set(hashed)
    assert "torch" not in hashed and hashed.pop("setuptools")  # which builds quantflow
    assert hashed == {name: pinned[name] for name in hashed}


# A file's words, and the packages that a line of it would fetch by a bare name.
LINES = {
    "pip install quantflow": ["quantflow"],
    "  - run: pip install --no-deps quantflow && pip install click": ["quantflow"],
    "RUN python -m pip install -U 'quantflow[serve]>=0.1'": ["quantflow[serve]>=0.1"],
    "uv pip install torch quantflow==0.1.0": ["quantflow==0.1.0"],
    'raise Error("install quantflow[serve]")': ["quantflow[serve]"],
    "the extra `quantflow[sign]`": ["quantflow[sign]"],
    "pip install \\\n    quantflow": ["quantflow"],
    "uvx quantflow serve": ["quantflow"],
    "pip install 'quantflow-llm[serve]' ./quantflow-source": [],
    "`pip install '.[sign]'` in the top folder. `quantflow sign ARTIFACT`": [],
    "`pip install quantflow` installs it": ["quantflow"],
    "pip uninstall -qq -y quantflow": [],
    "pip install -c constraints.txt . installs quantflow": [],
    "docker build -t quantflow .": [],
}
_EXTRA = re.compile(r"(?<![\w./-])quantflow\[[a-z_,]+\][\w<>=!~.]*")
_COMMAND = re.compile(
    r"\b(?:(?:pip3?|pipx|poetry|conda|pdm|uv)\s[^\n;|]*?\b(?:install|add|download)|uvx)\b"
)


def fetched(text: str) -> list[str]:
    """The other project's name, with extras and version, wherever `text` would install it."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if "quantflow" not in line:
            continue
        for command in _COMMAND.finditer(line):
            # the words of this command alone, up to the prose behind it
            for word in re.split(r"\s+", line[command.end() :].strip()):
                bare = word.strip("'\"`,;.)")
                if re.fullmatch(r"quantflow(\[[\w,]+\])?([<>=!~].*)?", bare):
                    found.append(bare)
                if re.match(r"[&|;#]|installs?$|.*`", word):
                    break
        found += [extra for extra in _EXTRA.findall(line) if extra not in found]
    return found


@pytest.mark.parametrize("line", LINES)
def test_the_finder_of_install_lines_sees_the_name_wherever_it_would_be_fetched(line):
    assert fetched(line) == LINES[line]


def texts() -> Iterator[Path]:
    """The files of the repository that have words, without this one."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__) and path.stat().st_size < 4 << 20:
            yield path


def test_no_line_of_the_repository_installs_the_other_project_of_this_name():
    """The index's `quantflow` is of another maker; a runner that installs it runs foreign code.

    mozilla-ai/otari#1513 found its error messages' extras under the names of two other projects,
    and CEA-COSMIC/pysap#42 its page of instructions.
    """
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    assert fetched(f"pip install {DISTRIBUTION}") == [] and DISTRIBUTION != "quantflow"
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in texts()
        if (names := fetched(path.read_bytes().decode("utf-8", "replace")))
    }
    assert not found


def test_each_extra_that_a_remedy_names_is_one_of_the_distribution():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = "".join(path.read_text() for path in (ROOT / "quantflow").rglob("*.py"))
    named = set(re.findall(r"\bextra\(\"(\w+)\"\)", sources))
    assert {"eval", "openvino", "serve", "sign"} <= named <= set(extras)
    assert {row[1] for row in tokenizer._PACKAGES.values()} <= set(extras)


def test_the_workflow_installs_from_a_commit_and_compares_hashes():
    jobs = yaml.safe_load((ROOT / "examples/ci/github-actions.yaml").read_text())["jobs"]
    for job in jobs.values():
        (source,) = (step for step in job["steps"] if "ref" in step.get("with", {}))
        assert source["with"]["path"] == "quantflow-source"
        installs = [step["run"] for step in job["steps"] if "pip install" in step.get("run", "")]
        assert (
            "--require-hashes --no-deps -r quantflow-source/examples/ci/requirements.txt"
            in (installs[0])
        )
        assert installs[-1] == "pip install --no-deps --no-build-isolation ./quantflow-source"
        versions = [
            step["with"]["python-version"] for step in job["steps"] if "python" in str(step)
        ]
        assert versions == ["3.11"]
