"""The identity of a model and of a tensor: fingerprint and hash."""

from hashlib import sha256

from torch import Tensor

from quantflow import cpu_threads
from quantflow.core.parallel import Workers
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.digests import Digests
from quantflow.models.reading import bytes_of
from quantflow.models.source import fingerprint

CANARY_TOKENS = 64  # tokens of the calibration text by which an artifact is proved


def tensor_hash(tensor: Tensor) -> str:
    """The sha256 of a tensor's bytes."""
    return sha256(bytes_of(tensor)).hexdigest()


def identify(checkpoint: Checkpoint, digests: Digests) -> str:
    """The model's fingerprint; files whose hashes are not cached are read, several at once."""
    with Workers(cpu_threads.usable_cores()) as workers:
        digests.of_all(
            [checkpoint.folder / name for name in checkpoint.shards], map_all=workers.map
        )
    return fingerprint(checkpoint, digests)
