"""OpenVINO GenAI for runtime.py; see _serve.py.

SETTINGS: model, bits, output, threads. Needs openvino-genai, optimum-intel.

The model is exported to `output` first with optimum-intel, unless it is there: 4 bits in symmetric
groups of 128 in every linear, or 8 bits; its head has 8 bits in both.
"""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from _serve import Program, Timed, serve

INT4 = ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0")


def load(settings: dict[str, Any]) -> Program:
    """Load with so many threads and otherwise OpenVINO's defaults."""
    folder = Path(settings["output"])
    if not (folder / "openvino_model.bin").exists():
        kind = INT4 if settings["bits"] == 4 else ("--weight-format", "int8")
        command = [
            str(Path(sys.executable).with_name("optimum-cli")),
            "export",
            "openvino",
            "-m",
            settings["model"],
        ]
        subprocess.run(
            [*command, "--task", "text-generation-with-past", *kind, str(folder)],
            check=True,
            stdout=sys.stderr,
        )
    pipeline = openvino_genai.LLMPipeline(
        str(folder), "CPU", INFERENCE_NUM_THREADS=settings["threads"]
    )
    config = json.loads((folder / "config.json").read_text())
    embedding = config["vocab_size"] * config["hidden_size"]  # in 8 bits
    weights = (folder / "openvino_model.bin").stat().st_size - embedding

    def run(rows: list[list[int]], new: int) -> Timed:
        ids = np.array(rows, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        chosen = openvino_genai.GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, ignore_eos=True
        )
        begin = time.perf_counter()
        found = pipeline.generate(inputs, chosen)
        seconds, first = time.perf_counter() - begin, found.perf_metrics.get_ttft().mean / 1e3
        return first, [(seconds - first) / (new - 1)] * (new - 1)

    return Program(version=version("openvino-genai"), weight_bytes=weights, run=run)


if __name__ == "__main__":
    serve(load)
