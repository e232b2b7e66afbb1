"""llama.cpp's calls that its programs share: load a file, and run sequences through it.

Needs llama-cpp-python and numpy.

What `cb_eval` is shown are tensors of llama.cpp's C interface, of which `Tensor` has the fields up
to the name (ggml.h).
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# a pointer to a Tensor; whether it is asked for or computed; go on
Watched = Callable[[Any, bool], bool]


class Tensor(ctypes.Structure):
    """The beginning of `struct ggml_tensor`, of which `src` and `view_src` point to others."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def run(path: Path, rows: list[list[int]], *, watch: Watched | None = None) -> Iterator[Floats]:
    """Yield the logits of each sequence, [S, V], overwritten by the next.

    llama.cpp keeps keys and values as it does usually.

    Args:
        path: the file.
        rows: token ids.
        watch: is shown every tensor of the computation, as `cb_eval` is.

    Raises:
        SystemExit: llama.cpp does not load the file, or does not run a sequence.
    """
    longest = max(map(len, rows))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    chosen = llama_cpp.llama_context_default_params()
    chosen.n_ctx = chosen.n_batch = chosen.n_ubatch = longest
    chosen.n_threads = chosen.n_threads_batch = len(os.sched_getaffinity(0))

    def observed(tensor: int, ask: bool, _: int) -> bool:
        return watch is None or watch(ctypes.cast(tensor, ctypes.POINTER(Tensor)), ask)

    callback = llama_cpp.ggml_backend_sched_eval_callback(observed)  # lives as long as the context
    if watch is not None:
        chosen.cb_eval = callback
    context = llama_cpp.llama_init_from_model(model, chosen) if model else None
    if not context:
        raise SystemExit(f"{path}: llama.cpp does not load it")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(longest, 0, 1)
    for number, row in enumerate(rows):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for at, token in enumerate(row):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, True
        batch.n_tokens = len(row)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"{path}: llama_decode fails on sequence {number}")
        yield np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(row), size))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


class Importance:
    """llama.cpp's importance matrix.

    It is the mean square of every input of each linear of the layers, as `llama-imatrix` has it.

    Args:
        names: of the linears' weights in the file.
    """

    def __init__(self, names: list[str]) -> None:
        """Start with nothing seen."""
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts = dict.fromkeys(names, 0)

    def watch(self, tensor: Any, ask: bool) -> bool:
        """Take in what a linear reads, at the product that reads it; `cb_eval` of `run`."""
        product = tensor.contents
        if not product.src[0] or not product.src[1]:
            return not ask
        name, entering = product.src[0].contents.name.decode(), product.src[1].contents
        if name not in self._counts or entering.type != llama_cpp.GGML_TYPE_F32:
            return not ask
        if ask:
            return True
        features, count = entering.ne[0], entering.ne[1]
        floats = ctypes.cast(entering.data, ctypes.POINTER(ctypes.c_float))
        whole = np.ctypeslib.as_array(floats, shape=(count, entering.nb[1] // 4))[:, :features]
        self._sums[name] = self._sums.get(name, 0.0) + np.square(whole, dtype=np.float64).sum(
            axis=0
        )
        self._counts[name] += count
        return True

    def matrix(self, tokens: int) -> dict[str, Floats]:
        """Return name of a weight -> [I] float32.

        Args:
            tokens: how many ran.

        Raises:
            SystemExit: a linear was shown another number of them.
        """
        for name, count in self._counts.items():
            if count != tokens:
                raise SystemExit(
                    f"{name}: {count} inputs seen, {tokens} tokens ran; its importance is not known"
                )
        return {name: (total / tokens).astype(np.float32) for name, total in self._sums.items()}


def as_parameter(matrix: dict[str, Floats]) -> Any:
    """An importance matrix for `llama_model_quantize_params.imatrix`.

    It points into `matrix`.
    """
    # a name that is null ends it
    entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries
