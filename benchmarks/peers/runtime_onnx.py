"""ONNX Runtime GenAI for runtime.py; see _serve.py.

SETTINGS: model, output, threads. Needs onnxruntime-genai and onnx.

The model is built to `output` first with its model builder, 4 bits in its default groups, unless it
is there.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from _serve import Program, Timed, clocked, serve


def load(settings: dict[str, Any]) -> Program:
    """Load with so many threads and otherwise its defaults."""
    folder = Path(settings["output"])
    if not (folder / "genai_config.json").exists():
        build = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            settings["model"],
            "-o",
            str(folder),
        ]
        subprocess.run([*build, "-p", "int4", "-e", "cpu"], check=True, stdout=sys.stderr)
    described = json.loads((folder / "genai_config.json").read_text())
    described["model"]["decoder"]["session_options"] |= {
        "intra_op_num_threads": settings["threads"]
    }
    (folder / "genai_config.json").write_text(json.dumps(described, indent=1))
    model = og.Model(str(folder))
    weights = sum(path.stat().st_size for path in folder.glob("*.data"))

    def run(rows: list[list[int]], new: int) -> Timed:
        chosen = og.GeneratorParams(model)
        chosen.set_search_options(
            max_length=len(rows[0]) + new, min_length=len(rows[0]) + new, batch_size=len(rows)
        )
        generator = og.Generator(model, chosen)

        def forward(prompts: list[list[int]] | None) -> None:
            if prompts is not None:
                generator.append_tokens(np.array(prompts, dtype=np.int32))
            generator.generate_next_token()

        return clocked(forward, rows, new)

    return Program(version=version("onnxruntime-genai"), weight_bytes=weights, run=run)


if __name__ == "__main__":
    serve(load)
