"""llama.cpp's own quantizer for accuracy.py; see _shared.py for the arguments. Needs gguf and llama-cpp-python.

SETTINGS: type, such as Q4_K_M, without an importance matrix; gguf, the model in bf16; names, which tensor and rows of the
checkpoint each linear of that file is. What a type does with embeddings and the head is not compared.
"""

import ctypes
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from _shared import Report, Saved, main
from gguf import GGUFReader
from gguf import dequantize as real

FILE = "model.gguf"


def quantize(_model: str, _rows: list[list[int]], output: Path, settings: dict[str, Any]) -> Report:
    """Quantize the file with llama.cpp's default number of threads."""
    output.mkdir()
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{settings['type']}")
    begin = time.monotonic()
    code = llama_cpp.llama_model_quantize(settings["gguf"].encode(), str(output / FILE).encode(), ctypes.byref(chosen))
    if code:
        raise SystemExit(f"{settings['type']}: llama_model_quantize returned {code}")
    return Report(version=version("llama-cpp-python"), seconds=time.monotonic() - begin)


def dequantize(_model: Path, folder: Path, settings: dict[str, Any]) -> Saved:
    """Read the file with gguf's own dequantization, and put rows back into the checkpoint's order."""
    names, weights, stored = json.loads(Path(settings["names"]).read_text()), {}, 0
    for tensor in GGUFReader(folder / FILE).tensors:
        if tensor.name not in names:
            continue
        source, rows = names[tensor.name]
        values = real(tensor.data, tensor.tensor_type).reshape(tuple(int(size) for size in tensor.shape[::-1]))  # [O, I]
        weight = np.empty(values.shape, dtype=np.float32)
        weight[rows] = values
        weights[source.removesuffix(".weight")] = weight
        stored += int(tensor.n_bytes)
    return Saved(weights=weights, stored=stored)


if __name__ == "__main__":
    main(quantize, dequantize)
