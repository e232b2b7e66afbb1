"""llama.cpp for runtime.py; see _serve.py.

SETTINGS: gguf and type, output, rows, threads, share. Needs llama-cpp-python and gguf.

Unless `output` is there, `gguf` (in bf16) is quantized to it as `type`, such as Q4_0. `share` is
the share of a mixture's experts that a token is sent to.

Where gcc 12 builds llama.cpp for a CPU with AMX, build it with

    CXXFLAGS="-fno-tree-dse -fno-dse" pip install --no-binary llama-cpp-python llama-cpp-python

since that compiler's LDTILECFG says that it reads 8 of the 64 bytes of a tile configuration. It
leaves out the stores of the others, and what lies there by chance ends the process with a general
protection fault.
"""

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from _serve import Program, Timed, clocked, serve
from gguf import GGUFReader

CONTEXT = 640  # positions of a sequence


def load(settings: dict[str, Any]) -> Program:
    """Load a file; the cache is llama.cpp's default, float16."""
    path = Path(settings["output"])
    if not path.exists():
        quantize(settings["gguf"], path, settings["type"])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    chosen, most = llama_cpp.llama_context_default_params(), settings["rows"]
    chosen.n_ctx = chosen.n_batch = CONTEXT * most
    chosen.n_seq_max, chosen.n_ubatch = most, 512
    chosen.n_threads = chosen.n_threads_batch = settings["threads"]
    context = llama_cpp.llama_init_from_model(model, chosen)
    if not model or not context:
        raise SystemExit(f"{path}: llama.cpp does not load it")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(CONTEXT * most, 0, 1)

    def run(rows: list[list[int]], new: int) -> Timed:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        length = 0

        def forward(ids: list[list[int]]) -> list[list[int]]:
            nonlocal length
            count = len(ids[0])
            for row, tokens in enumerate(ids):
                for column, token in enumerate(tokens):
                    at = row * count + column
                    batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, length + column, 1
                    batch.seq_id[at][0], batch.logits[at] = row, column == count - 1
            batch.n_tokens, length = len(ids) * count, length + count
            if llama_cpp.llama_decode(context, batch):
                raise SystemExit(f"{path}: llama_decode fails")
            ends = [
                llama_cpp.llama_get_logits_ith(context, (row + 1) * count - 1)
                for row in range(len(ids))
            ]
            return [[int(np.ctypeslib.as_array(end, shape=(size,)).argmax())] for end in ends]

        return clocked(forward, rows, new)

    tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    read = sum(
        size * (settings.get("share", 1.0) if "_exps." in name else 1.0)
        for name, size in tensors.items()
    )
    return Program(version=version("llama-cpp-python"), weight_bytes=round(read), run=run)


def quantize(source: str, path: Path, kind: str) -> None:
    """Quantize with llama.cpp's own rules, which choose the head's type too."""
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    partial = path.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(source.encode(), str(partial).encode(), ctypes.byref(chosen)):
        raise SystemExit(f"{source}: llama.cpp does not quantize it to {kind}")
    partial.rename(path)


if __name__ == "__main__":
    serve(load)
