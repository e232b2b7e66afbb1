"""llama.cpp's own quantizer for accuracy.py; see _shared.py for the arguments.

Needs gguf and llama-cpp-python.

    accuracy_llamacpp.py run FILE WINDOWS OUTPUT        not timed

FILE is a GGUF file, WINDOWS .jsonl with `input_ids`.

SETTINGS: type, such as Q4_K_M; importance, whether an importance matrix is made of the calibration
tokens first; gguf, the model in bf16; names, which tensor and rows of the checkpoint each linear of
that file is. After `dequantize` what a type does with embeddings and the head is not compared.
`run` runs a whole file: it writes OUTPUT/logits.f32, float32 [V] for each token of each window, and
OUTPUT/file.json with the vocabulary's size, the `bytes` of the file's tensors and their `elements`.
"""

import ctypes
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from _llama import Importance, as_parameter, run
from _shared import Report, Saved, main
from gguf import GGUFReader
from gguf import dequantize as real

FILE = "model.gguf"


def quantize(_model: str, rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Quantize the file with llama.cpp's default number of threads."""
    output.mkdir()
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{settings['type']}")
    begin = time.monotonic()
    matrix = importance(Path(settings["gguf"]), rows) if settings["importance"] else {}
    if matrix:
        chosen.imatrix = as_parameter(matrix)
    code = llama_cpp.llama_model_quantize(
        settings["gguf"].encode(), str(output / FILE).encode(), ctypes.byref(chosen)
    )
    if code:
        raise SystemExit(f"{settings['type']}: llama_model_quantize returned {code}")
    return Report(version=version("llama-cpp-python"), seconds=time.monotonic() - begin)


def importance(path: Path, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """The importance matrix of every linear of the layers, of all tokens of the rows."""
    tensors = GGUFReader(path).tensors
    seen = Importance(
        [
            tensor.name
            for tensor in tensors
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2
        ]
    )
    for _ in run(path, rows, watch=seen.watch):
        pass
    return seen.matrix(sum(map(len, rows)))


def dequantize(_model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """The file by gguf's own dequantization, with rows back in the checkpoint's order."""
    names, weights, stored = json.loads(Path(settings["names"]).read_text()), {}, 0
    for tensor in GGUFReader(folder / FILE).tensors:
        if tensor.name not in names:
            continue
        source, rows = names[tensor.name]
        # [O, I]
        values = real(tensor.data, tensor.tensor_type).reshape(
            tuple(int(size) for size in tensor.shape[::-1])
        )
        weight = np.empty(values.shape, dtype=np.float32)
        weight[rows] = values
        weights[source.removesuffix(".weight")] = weight
        stored += int(tensor.n_bytes)
    return Saved(weights=weights, stored=stored)


def write_logits(path: Path, windows: list[list[int]], output: Path) -> None:
    """Run a file and write what `run` writes."""
    size = 0
    with (output / "logits.f32").open("wb") as file:
        for logits in run(path, windows):
            size = logits.shape[1]
            file.write(np.ascontiguousarray(logits, dtype="<f4"))
    tensors = GGUFReader(path).tensors
    counted = {
        key: sum(int(getattr(tensor, f"n_{key}")) for tensor in tensors)
        for key in ("bytes", "elements")
    }
    (output / "file.json").write_text(json.dumps({"vocabulary": size, **counted}) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        gguf, windows, output = map(Path, sys.argv[2:])
        write_logits(
            gguf,
            [json.loads(line)["input_ids"] for line in windows.read_text().splitlines()],
            output,
        )
    else:
        main(quantize, dequantize)
