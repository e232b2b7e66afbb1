"""The programs that runtime.py and busy.py compare: processes that hold a model and answer.

An artifact of ours, and what a peer loads, are made from the checkpoint unless they are there. A
mixture runs as it is published, its experts in MXFP4, here and in the GGUF file that llama.cpp
loads.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _mixture import MIXTURES
from _quantflow import QUANTFLOW

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).parent / "peers"
SCHEMES = ("W4A16", "W4A8", "W8A8", "FP8_DYNAMIC")
HEAD = "W8A16"  # of all of them: OpenVINO's head has 8 bits too


class Ended(Exception):
    """A program that ended instead of answering."""


@dataclass(kw_only=True)
class Program:
    """A process that holds one model and answers.

    Attributes:
        name: in the tables.
        python: of its environment.
        script: in peers/.
        settings: what it is started with.
        environment: variables beside those that every program gets.
        found: (what, how many at once) -> tokens per second of each round.
    """

    name: str
    python: Path
    script: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    found: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, threads: int, log: Path) -> None:
        """Start it and wait until its model is loaded.

        Its output goes to a log beside the others.
        """
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
        }
        environment |= {"PYTHONPATH": str(ROOT), "HOME": str(Path.home()), "TQDM_DISABLE": "1"}
        environment |= self.environment
        command = [
            str(self.python),
            str(SCRIPTS / self.script),
            json.dumps(self.settings | {"threads": threads}),
        ]
        with log.open("w") as errors:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, text=True, env=environment, **pipes)
        self.ready = self._answer(f"see {log}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question."""
        assert self.process is not None and self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer("see its log")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()

    def _answer(self, told: str) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"{self.name} ended: {told}")
        return dict(json.loads(line))


def programs_of(given: argparse.Namespace, model: Path, work: Path) -> list[Program]:
    """Return the programs whose environment is there, with what they load made."""
    if given.size in MIXTURES:
        return _programs_of_mixture(given, model, work)
    peers, here = given.peers.resolve(), Path(sys.executable)
    runs = [("", scheme, False) for scheme in SCHEMES] + [(" exact", "W4A16", True)]
    programs = [
        Program(
            name=f"quantflow {scheme}{suffix}",
            python=here,
            script="runtime_quantflow.py",
            settings={
                "artifact": str(_artifact(model, work, scheme)),
                "dtype": given.dtype,
                "exact": exact,
                "kv_cache": given.kv_cache,
            },
        )
        for suffix, scheme, exact in runs
        if wanted(f"quantflow {scheme}{suffix}", given.only)
    ]
    transformers = {"model": str(model), "dtype": "bfloat16"}
    programs.append(
        Program(
            name="transformers bf16",
            python=here,
            script="runtime_transformers.py",
            settings=transformers,
        )
    )
    python = peers / "llamacpp/bin/python"
    if _there(python) and wanted("llama.cpp", given.only):
        source = work / "gguf"
        if not source.exists():
            _quantflow("export", model, "-o", source, "--format", "gguf", "--dtype", "bf16", "-q")
        file = next(source.glob("*.gguf"))
        for kind in ("Q4_0", "Q8_0"):
            settings = {"gguf": str(file), "type": kind, "output": str(work / f"{kind}.gguf")}
            settings["rows"] = max(given.batches)
            programs.append(
                Program(
                    name=f"llama.cpp {kind}",
                    python=python,
                    script="runtime_llamacpp.py",
                    settings=settings,
                )
            )
    python = peers / "openvino/bin/python"
    for bits in (4, 8) if _there(python) else ():
        settings = {"model": str(model), "bits": bits, "output": str(work / f"openvino-int{bits}")}
        programs.append(
            Program(
                name=f"OpenVINO int{bits}",
                python=python,
                script="runtime_openvino.py",
                settings=settings,
            )
        )
    python = peers / "onnx/bin/python"
    if _there(python):
        settings = {"model": str(model), "output": str(work / "onnx-int4")}
        programs.append(
            Program(
                name="ONNX Runtime int4", python=python, script="runtime_onnx.py", settings=settings
            )
        )
    python = peers / "ipex/bin/python"
    if _there(python) and wanted("IPEX int4", given.only):
        settings = {"model": str(model), "gptq": str(_gptq(model, work))}
        programs.append(
            Program(name="IPEX int4", python=python, script="runtime_ipex.py", settings=settings)
        )
    return programs


def _programs_of_mixture(given: argparse.Namespace, model: Path, work: Path) -> list[Program]:
    """The published folder in quantflow, and in llama.cpp what is exported from it."""
    shape = MIXTURES[given.size]
    share = shape.chosen / shape.experts  # of the experts' bytes that a token reads
    programs = []
    for inputs in ("exact", "rounded"):  # llama.cpp rounds them
        settings: dict[str, Any] = {"artifact": str(model), "dtype": given.dtype, "exact": False}
        settings |= {"kv_cache": given.kv_cache, "share": share, "rounded": inputs == "rounded"}
        name = f"quantflow MXFP4 {inputs}"
        program = Program(
            name=name, python=Path(sys.executable), script="runtime_quantflow.py", settings=settings
        )
        if wanted(name, given.only):
            programs.append(program)
    python, name = given.peers.resolve() / "llamacpp/bin/python", "llama.cpp MXFP4"
    if _there(python) and wanted(name, given.only):
        file = work / "gguf/model-mxfp4.gguf"
        if not file.exists():
            _quantflow("export", model, "-o", file.parent, "--format", "gguf", "-q")
        settings = {"output": str(file), "rows": max(given.batches), "share": share}
        program = Program(name=name, python=python, script="runtime_llamacpp.py", settings=settings)
        programs.append(program)
    return programs


def _there(python: Path) -> bool:
    if not python.exists():
        print(
            f"{python.parent.parent.name}: not installed below {python.parent.parent.parent}, "
            "left out",
            flush=True,
        )
    return python.exists()


def _artifact(model: Path, work: Path, scheme: str) -> Path:
    """An artifact of the checkpoint, rounded to nearest, its head to 8 bits.

    It is made unless it is there.
    """
    folder, quantized = work / f"{scheme}-head-{HEAD}", work / f"quantized-{scheme}"
    if not (folder / "quantflow.json").exists():
        recipe = work / f"{scheme}.yaml"
        entry = {
            "name": "artifact",
            "scheme": scheme,
            "algorithm": "rtn",
            "transforms": [],
            "head": {"scheme": HEAD},
        }
        recipe.write_text(json.dumps({"model": str(model), "quantize": [entry]}))  # JSON is YAML
        _quantflow("quantize", model, "-o", quantized, "--recipe", recipe, "--no-export", "-q")
        _quantflow("export", quantized, "-o", folder, "--measure-inputs", "-q")
        for path in sorted(quantized.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        quantized.rmdir()
    return folder


def _gptq(model: Path, work: Path) -> Path:
    """A folder of the checkpoint in GPTQ's layout, 4 bits rounded to nearest.

    It is made unless it is there.
    """
    artifact, folder = work / "W4A16", work / "gptq"
    if not (folder / "DONE.json").exists():
        _quantflow(
            "quantize", model, "-o", artifact, "--scheme", "W4A16", "--algorithm", "rtn", "-q"
        )
        _quantflow("export", artifact, "-o", folder, "--format", "gptq", "-q")
    return folder


def _quantflow(*words: str | Path) -> None:
    subprocess.run([*QUANTFLOW, *words], check=True, cwd=ROOT)


def wanted(program: Program | str, only: Sequence[str]) -> bool:
    name = program if isinstance(program, str) else program.name
    return not only or any(word in name or name in word for word in only)
