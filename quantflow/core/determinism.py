"""What decides the bits of a result besides its inputs: one thread inside torch, the libraries, the instruction set."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch on one thread: GEMM, Cholesky and reductions give other bits on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tools() -> dict[str, str]:
    """Return what else decides the bits: library versions and the instruction set."""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
