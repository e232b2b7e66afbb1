"""A checkpoint of a supported family as files: its config.json, and its fingerprint.

Nothing here imports torch or transformers, or runs a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.canonical import digest_of, file_digest
from quantflow.files.checkpoint import CONFIG, Checkpoint
from quantflow.files.digests import Digests
from quantflow.models.graph import family_for

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_HEADS = ("num_key_value_heads", "head_dim")  # which a family may leave out


def require_numbers(numbers: Mapping[str, Any], path: Path) -> None:
    """Refuse sizes and heads that make no model, since every program counts on whole ones.

    Args:
        numbers: key of config.json -> its value.
        path: path of config.json, for messages.

    Raises:
        InputError: a number that is no positive integer, or query heads that the kv heads do not
            divide.
    """
    remedy = "restore config.json from its source, or download it again"
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{path}: {name} is {value!r}", remedy)
    heads, kv_heads = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise InputError(
            f"{path}: {heads} attention heads, {kv_heads} of keys and values do not divide them",
            remedy,
        )


class PlainConfig:
    """config.json with its keys as attributes: transformers' own class without its defaults."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Keep the content of config.json.

        Raises:
            InputError: a size that every supported family has is missing; or as `require_numbers`.
            UnsupportedError: the family is not supported.
        """
        family_for(checkpoint.config.get("model_type"), checkpoint.config.get("architectures"))
        self._values = checkpoint.config
        optional = [key for key in _HEADS if self._values.get(key) is not None]
        require_numbers(
            {key: self._values.get(key) for key in (*_SIZES, *optional)}, checkpoint.folder / CONFIG
        )

    def __getattr__(self, name: str) -> Any:
        """The value of a key."""
        try:
            return self._values[name]
        except KeyError as error:
            raise AttributeError(name) from error


def refuse_stacked_experts(checkpoint: Checkpoint) -> None:
    """Refuse a mixture whose experts are one tensor, as transformers has them in memory.

    Raises:
        UnsupportedError: naming the tensor.
    """
    for name, (file, info) in checkpoint.tensors.items():
        if len(info.shape) == 3 and ".experts." in name:
            raise UnsupportedError(
                f"{file}: {name} {list(info.shape)} holds all experts of a layer",
                "use a checkpoint with a tensor per expert and projection, as save_pretrained of "
                "transformers writes it",
            )


def fingerprint(checkpoint: Checkpoint, digests: Digests | None = None) -> str:
    """The sha256 that identifies a model: config.json, tensor headers and weight files.

    Args:
        checkpoint: the opened folder.
        digests: hashes that are known already; None reads every weight file.
    """
    tensors = {
        name: [file, info.dtype, list(info.shape)]
        for name, (file, info) in checkpoint.located.items()
    }
    hash_of = file_digest if digests is None else digests.of
    files = {file: hash_of(checkpoint.folder / file) for file in checkpoint.shards}
    return digest_of({"config": checkpoint.config, "tensors": tensors, "files": files})
