"""The client of the fork server, and the small inputs of its cases.

Beside each stands the output of an uninterrupted run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quantflow.planning.recipe import Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine

SERVER = Path(__file__).with_name("server.py")
ALLOCATOR = Path(__file__).with_name("allocations.c")
AT_ONCE = 2  # cases
KEPT = (".lock", ".hashes.json", ".inputs.json")  # hidden files that a finished run may leave


@dataclass(frozen=True)
class Outcome:
    """How a case ended; see server.py."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    counts: dict[str, int]
    written: int
    alien: list[str]
    allocations: int

    @property
    def error(self) -> list[str]:
        """The two lines of the error, what was said before them left out."""
        return self.stderr.splitlines()[-2:]


@dataclass(frozen=True)
class Server:
    """A fork server that listens at `path`."""

    path: Path

    def run(
        self,
        arguments: Sequence[object],
        root: Path,
        *,
        kill_after: float | None = None,
        **faults: Any,
    ) -> Outcome:
        """Run one command line with faults below `root`."""
        words = [str(argument) for argument in arguments]
        request = {
            "arguments": words,
            "root": str(root),
            "faults": faults,
            "kill_after": kill_after,
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                return Outcome(**json.loads(stream.readline()))


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file under a final name: not hidden, in no hidden folder, and no log."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/")) and not name.endswith(".log")
    }


def leftovers(folder: Path) -> list[str]:
    """Return the hidden files and folders that a finished run should not have left."""
    return [str(path) for path in sorted(folder.rglob(".*")) if not path.name.endswith(KEPT)]


@dataclass
class Command:
    """A verb in a folder of its own, and what it makes there when nothing fails.

    Attributes:
        arguments: the command line, given that folder.
        before: what the folder holds first; None is nothing.
        also: what may be found there although an uninterrupted run does not leave it: the result
            that it replaces.
    """

    server: Server
    name: str
    arguments: Callable[[Path], list[object]]
    work: Path
    source: Path
    before: Path | None = None
    also: list[dict[str, str]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def learn(self) -> "Command":
        """Run it once without a fault."""
        with self.folder() as folder:
            self.outcome = self.run(folder)
            assert self.outcome.code == 0, self.outcome.stderr
            assert leftovers(folder) == []
            self.made = tree(folder)
        return self

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=self.work))
        if self.before is not None:
            shutil.copytree(self.before, folder, dirs_exist_ok=True)
        yield folder
        shutil.rmtree(folder)  # kept where the test failed

    def run(self, folder: Path, **faults: Any) -> Outcome:
        return self.server.run(self.arguments(folder), folder, source=str(self.source), **faults)

    def check_state(self, folder: Path) -> None:
        """Assert that nothing partial stands under a final name.

        Every file there is one of an uninterrupted run.
        """
        found = tree(folder)
        for whole in self.also:
            if found == whole:
                return
        strange = [name for name in found if name not in self.made]
        assert strange == [], "not a file that a finished run has"
        assert [name for name in found if found[name] != self.made[name]] == [], (
            "partial or different"
        )
        for name in found:  # what says that a folder is complete stands in a complete folder
            if name.endswith(("DONE.json", "quantflow.json")):
                inside = name.rpartition("/")[0] + "/"
                assert [
                    other for other in self.made if other.startswith(inside) and other not in found
                ] == []

    def check_continues(self, folder: Path) -> None:
        """Assert that the same command without a fault makes the same bytes.

        It leaves nothing else.
        """
        outcome = self.run(folder)
        assert outcome.code == 0, outcome.stderr
        self.check_made(folder)
        assert leftovers(folder) == []

    def check_made(self, folder: Path) -> None:
        """Assert that the output of an uninterrupted run is there.

        Nothing else stands under a final name.
        """
        found = tree(folder)
        assert sorted(found) == sorted(self.made)
        assert [name for name in found if found[name] != self.made[name]] == []

    def at_once(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """The results of a function for every item, two cases at a time.

        The first that fails ends the rest.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                return list(pool.map(function, items))
            finally:
                pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    path, library, environment = folder / "socket", folder / "allocations.so", dict(os.environ)
    if (compiler := shutil.which("cc")) is not None:
        subprocess.run(
            [compiler, "-O2", "-fPIC", "-shared", str(ALLOCATOR), "-o", str(library), "-ldl"],
            check=True,
        )
        environment["LD_PRELOAD"] = " ".join(
            filter(None, (os.environ.get("LD_PRELOAD"), str(library)))
        )
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield Server(path)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="session")
def inputs(
    llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A model, texts, a gate that everything passes, and a recipe of two artifacts."""
    folder = tmp_path_factory.mktemp("inputs")
    thresholds = {"ppl_ratio": 1e9, "mean_kld": 1e9, "kld_p999": 1e9, "top1_agreement": 0.0}
    (folder / "gate.json").write_text(json.dumps({"thresholds": thresholds}))
    recipe = {
        "model": str(llama),
        "calibration": {
            "source": str(text_files["calibration"]),
            "samples": 4,
            "sequence_length": 32,
        },
        "measure": {"stats": ["amax"]},
        "quantize": [
            {"name": "int4", "scheme": "W4A16", "algorithm": "gptq", "group_size": 32},
            {"name": "fp8", "scheme": "FP8_DYNAMIC"},
        ],
        "validate": {
            "text": str(text_files["heldout"]),
            "tokens": 128,
            "sequence_length": 32,
            "gate": str(folder / "gate.json"),
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return {
        "model": llama,
        "gate": folder / "gate.json",
        "recipe": folder / "recipe.yaml",
        **text_files,
    }


def quantize_as_ranks(model: Path, output: Path) -> None:
    """Quantize as two ranks would, one after the other in this process."""
    entry = Quantize(name="fp8_dynamic", scheme="FP8_DYNAMIC")
    job = QuantizeJob(model=model, output=output, entry=entry, ranks=2)
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantize, "die_with_parent", lambda: None)
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", "2")
            quantize.run(job, ProgressLine(quiet=True))


@pytest.fixture(scope="session")
def commands(
    server: Server, inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Command]:
    """Return a stage's command, which has run once without a fault; what it reads is made first."""
    work = tmp_path_factory.mktemp("faults")
    model, made = inputs["model"], work / "made"
    text = ["--calibration", inputs["calibration"], "--samples", 4, "--sequence-length", 32]
    judged = [
        "--text",
        inputs["heldout"],
        "--tokens",
        128,
        "--sequence-length",
        32,
        "--gate",
        inputs["gate"],
    ]
    int4 = ["--scheme", "W4A16", "--group-size", 32, "--measurement", made / "measure"]
    small = ["--shard-size", "30KB"]
    lines: dict[str, Callable[[Path], list[object]]] = {
        "measure": lambda out: ["measure", model, "-o", out, *text, "--stats", "amax"],
        "measure-gradients": lambda out: [
            "measure",
            model,
            "-o",
            out,
            *text,
            "--stats",
            "gradient",
        ],
        "quantize": lambda out: ["quantize", "--no-export", model, "-o", out, *int4],
        "file-to-file": lambda out: [
            "quantize",
            "--no-export",
            model,
            "-o",
            out,
            "--scheme",
            "FP8_DYNAMIC",
        ],
        "unify": lambda out: ["unify", "-g", "0", "-m", made / "measure", "-o", out],
        "unify-shards": lambda out: ["unify", "-m", made / "shards", "-o", out],
        "export": lambda out: ["export", made / "quantize", "-o", out],
        "export-shards": lambda out: ["export", made / "file-to-file", "-o", out, *small],
        "export-replace": lambda out: ["export", made / "file-to-file", "-o", out, "--force"],
        "validate": lambda out: [
            "validate",
            made / "export",
            "--baseline",
            model,
            *judged,
            "--report",
            out,
        ],
        "run": lambda out: ["run", inputs["recipe"], "-o", out],
    }
    reads = {
        "unify": ["measure"],
        "quantize": ["measure"],
        "export": ["quantize"],
        "export-shards": ["file-to-file"],
        "export-replace": ["file-to-file", "export"],
        "validate": ["export"],
    }
    known: dict[str, Command] = {}

    def command(name: str) -> Command:
        if name not in known:
            before = None
            if name == "unify-shards" and not (made / "shards").exists():
                quantize_as_ranks(model, made / "shards")
            for earlier in reads.get(name, []):
                command(earlier)
                if not (made / earlier).exists():
                    outcome = server.run(lines[earlier](made / earlier), made)
                    assert outcome.code == 0, outcome.stderr
            if name == "export-replace":
                before = work / "before"
                shutil.copytree(made / "export", before / "out")
            line = lines[name]
            found = Command(server, name, lambda folder: line(folder / "out"), work, model, before)
            if before is not None:
                found.also = [tree(before), {}]  # the old result, or for a moment none
            known[name] = found.learn()
        return known[name]

    return command
