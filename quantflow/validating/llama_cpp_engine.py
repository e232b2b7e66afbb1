"""GGUF files run by llama.cpp itself, for comparisons: token ids -> logits.

`llama-cpp-python` is llama.cpp with its Python binding; nothing else of it is used. It runs files
of families and types that quantflow does not import, and shows what a user of llama.cpp gets,
whose kernels round activations too.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantflow import cpu_threads
from quantflow.errors import InputError, UnsupportedError

ENGINE = "llama.cpp"


def binding() -> ModuleType:
    """The package `llama_cpp`.

    Raises:
        UnsupportedError: it is not installed, or its library cannot be loaded.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"--engine {ENGINE}: {error}",
            "install llama-cpp-python in the environment of quantflow",
        ) from error
    module: ModuleType = llama_cpp
    return module


@dataclass(frozen=True, kw_only=True)
class LlamaCppModel:
    """A GGUF file that llama.cpp holds in memory; safe to use from threads, one at a time.

    Attributes:
        path: the file.
        vocabulary: tokens that its head knows.
        bos: token that its tokenizer puts before a text; None where it puts none.
        model: llama.cpp's model with a context.
    """

    path: Path
    vocabulary: int
    bos: int | None
    model: Any
    lock: threading.Lock = field(default_factory=threading.Lock)

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of a sequence, [S, V] float32; `tokens` are [S] int64.

        Raises:
            InputError: llama.cpp could not evaluate it.
        """
        with self.lock:
            self.model.reset()
            try:
                self.model.eval(tokens.tolist())
            except RuntimeError as error:
                raise InputError(
                    f"{self.path}: llama.cpp evaluates {len(tokens)} tokens: {error}",
                    "give a smaller --sequence-length",
                ) from error
            return torch.from_numpy(self.model.scores[: len(tokens)].copy())

    def close(self) -> None:
        """Give the memory back."""
        self.model.close()


def open_model(path: Path, *, longest: int) -> LlamaCppModel:
    """Have llama.cpp load a file.

    Args:
        path: a GGUF file.
        longest: tokens of the longest sequence.

    Raises:
        UnsupportedError: llama.cpp is not installed.
        InputError: it cannot load the file.
    """
    llama_cpp = binding()
    try:
        model = llama_cpp.Llama(
            model_path=str(path),
            n_ctx=longest,
            n_batch=longest,
            n_threads=cpu_threads.usable_cores(),
            n_threads_batch=cpu_threads.usable_cores(),
            n_gpu_layers=0,
            logits_all=True,
            verbose=False,
        )
    except (ValueError, RuntimeError, AssertionError) as error:
        raise InputError(f"{path}: llama.cpp: {error}", "give a file that it runs") from error
    added = llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(model.model))
    bos = int(model.token_bos()) if added else None
    return LlamaCppModel(path=path, vocabulary=int(model.n_vocab()), bos=bos, model=model)


def about(path: Path) -> tuple[str, int, int]:
    """What a file stores: its types, the most frequent first, its tensors' bytes, their elements.

    Raises:
        InputError: it is no GGUF file.
    """
    from gguf import GGUFReader

    try:
        tensors: Sequence[Any] = GGUFReader(path).tensors
    except (ValueError, OSError, IndexError) as error:
        raise InputError(f"{path}: {error}", "give a GGUF file") from error
    elements: dict[str, int] = {}
    for tensor in tensors:
        kind = tensor.tensor_type.name
        elements[kind] = elements.get(kind, 0) + int(tensor.n_elements)
    if not elements:
        raise InputError(f"{path}: has no tensor", "give a GGUF file of a model")
    kinds = sorted(elements, key=lambda kind: (-elements[kind], kind))
    return (
        ", ".join(kinds),
        sum(int(tensor.n_bytes) for tensor in tensors),
        sum(elements.values()),
    )
