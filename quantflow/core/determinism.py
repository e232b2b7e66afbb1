"""What decides the bits of a result besides its inputs: one thread inside torch, the libraries, the instruction set."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch

from quantflow.core.device import HOST, Device


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch on one thread: GEMM, Cholesky and reductions give other bits on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def products(device: Device = HOST) -> torch.dtype:
    """Return the dtype of products that need not be exact: bfloat16 where the device multiplies it faster than float32.

    Those are CPUs with AVX512-BF16 or AMX, on which it takes half of the time, and every GPU. What
    is computed so names it in its key.
    """
    if not device.is_host:
        return torch.bfloat16
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if there else torch.float32


def tools() -> dict[str, str]:
    """Return what else decides the bits: library versions and the instruction set."""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
