"""The fresh process in which export proves an artifact: load it as a runtime would, run the canary, compare every layer.

Example: python -m stages._proof ARTIFACT QUANTIZED
"""

import json
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from quantflow.artifact.canonical import read_json
from quantflow.errors import IntegrityError, QuantflowError
from quantflow.evaluation.perplexity import logits_of
from quantflow.models.graph import graph_for
from quantflow.runtime.load import load
from stages.quantize import tensor_hash


def prove(artifact: Path, quantized: Path) -> None:
    """Compare the canary of an artifact with the one that quantize kept.

    Raises:
        IntegrityError: naming the first layer that differs.
    """
    canary = safetensors.torch.load((quantized / "canary.safetensors").read_bytes())
    expected = read_json(quantized / "canary.json")
    runtime = load(artifact, backend="reference", dtype=torch.float32)
    found: list[str] = []

    def remember(_module: object, _inputs: object, output: Tensor) -> None:
        found.append(tensor_hash(output))

    layers = runtime.model.get_submodule(graph_for(runtime.model.config).family.layers)
    for layer in layers.children():
        layer.register_forward_hook(remember)
    logits = logits_of(runtime.model)(canary["tokens"])
    for index, (left, right) in enumerate(zip(found, expected["layers"], strict=True)):
        if left != right:
            raise IntegrityError(
                f"layer {index}: the exported artifact computes {left[:16]} on the canary, quantize computed {right[:16]}",
                "this is a defect in the layout or the loader; keep the folder and report it",
            )
    if tensor_hash(logits[None]) != expected["logits"]:
        raise IntegrityError("logits: differ from quantize's on the canary", "keep the folder and report it")


def main() -> int:
    """Return 0 when the proof holds; otherwise write the cause as one line of JSON to stderr and return its exit code."""
    torch.set_num_threads(1)
    try:
        prove(Path(sys.argv[1]), Path(sys.argv[2]))
    except QuantflowError as error:
        print(json.dumps({"cause": error.cause, "remedy": error.remedy}), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
