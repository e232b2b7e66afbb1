"""Causes of a result's bits besides its inputs: threads, libraries, instruction set."""

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
    """The dtype of products that need not be exact.

    It is bfloat16 where the device multiplies it faster than float32: on CPUs with AVX512-BF16 or
    AMX, where it takes half of the time, and on every GPU. A result computed with it names it in
    its key.
    """
    if not device.is_host:
        return torch.bfloat16
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if there else torch.float32


def tools() -> dict[str, str]:
    """Library versions and the instruction set, which decide the bits of a result too."""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
