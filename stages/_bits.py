"""What decides the bits of a result besides its inputs: one thread inside torch, the libraries, the instruction set."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version

import torch
from torch import Tensor

from quantflow.artifact.checkpoint import Checkpoint
from quantflow.artifact.digests import Digests
from quantflow.core.parallel import Workers
from quantflow.models.reading import bytes_of
from quantflow.models.source import fingerprint
from stages import _memory

CANARY_TOKENS = 64  # of the calibration text, which prove an artifact


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


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's bytes."""
    return sha256(bytes_of(tensor)).hexdigest()


def identify(checkpoint: Checkpoint, digests: Digests) -> str:
    """Return the model's fingerprint; files whose hashes are not known are read, several at once."""
    with Workers(_memory.usable_cores()) as workers:
        digests.of_all([checkpoint.folder / name for name in checkpoint.shards], map_all=workers.map)
    return fingerprint(checkpoint, digests)
