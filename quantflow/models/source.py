"""A checkpoint of a supported family as files: headers and config.json. Nothing here imports transformers or runs a model.

Work that needs no forward pass starts with this alone; transformers' model code takes seconds to
import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.canonical import digest_of, file_digest
from quantflow.files.checkpoint import CONFIG, Checkpoint, open_checkpoint, refuse_quantized
from quantflow.files.digests import Digests
from quantflow.models.graph import FAMILIES, Graph, NamedLinears, family_for, graph_for, named_graph
from quantflow.models.matching import matching

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_HEADS = ("num_key_value_heads", "head_dim")  # which a family may leave out


def require_numbers(numbers: Mapping[str, Any], path: Path) -> None:
    """Refuse sizes and heads that make no model: every program that runs it counts on whole numbers of them, one at least.

    Args:
        numbers: key of config.json -> its value.
        path: of config.json, for messages.

    Raises:
        InputError: a number that is no positive integer, or query heads that the heads of keys and
            values do not divide.
    """
    remedy = "restore config.json from its source, or download it again"
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{path}: {name} is {value!r}", remedy)
    heads, shared = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        raise InputError(
            f"{path}: {heads} attention heads, {shared} of keys and values do not divide them",
            remedy,
        )


class PlainConfig:
    """config.json, its keys as attributes: what transformers' own class has, without its defaults."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Keep the table.

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
        """Return the value of a key."""
        try:
            return self._values[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """An opened checkpoint.

    Attributes:
        checkpoint: its files and tensor headers.
        config: config.json, for `graph_for` and the like.
    """

    checkpoint: Checkpoint
    config: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name."""
        return tuple(self.checkpoint.tensors)


def open_files(folder: str | Path, *, linears: Sequence[str] = ()) -> ModelFiles:
    """Open a Hugging Face folder that is to be quantized; reads headers and config.json, no weight.

    Args:
        folder: the model's.
        linears: names or `re:` patterns of linears, for a model that no graph is made of; none
            makes one.

    Raises:
        InputError: the folder, a header or config.json cannot be used, or the weights are already
            quantized.
        UnsupportedError: the family is not supported.
        UsageError: a pattern that matches no matrix.
    """
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    if linears:
        found, others = _named(checkpoint, linears)
        graph = named_graph(checkpoint.config, found, others=others)
        return ModelFiles(checkpoint=checkpoint, config=NamedLinears(checkpoint.config, graph))
    config = config_of(checkpoint)
    return ModelFiles(checkpoint=as_linears(checkpoint, config), config=config)


def _named(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the matrices `NAME.weight` that the patterns match, and the others, in the checkpoint's order."""
    matrices = [
        name.removesuffix(".weight")
        for name, (_, info) in checkpoint.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight")
    ]
    chosen = {name for pattern in patterns for name in matching(pattern, matrices, "linears")}
    return [name for name in matrices if name in chosen], [
        name for name in matrices if name not in chosen
    ]


def as_linears(checkpoint: Checkpoint, config: Any) -> Checkpoint:
    """Return a checkpoint in which every linear that the graph names is a tensor [O, I] of its own.

    Raises:
        UnsupportedError: experts in one tensor in a family of the table, or as `graph_for`.
        InputError: as `Checkpoint.in_parts`.
    """
    if config.model_type in FAMILIES:
        refuse_stacked_experts(checkpoint)
        return checkpoint
    return checkpoint.in_parts(graph_for(config).split)


def config_of(checkpoint: Checkpoint) -> Any:
    """Return what `graph_for` reads: config.json as it is for a family of the table, transformers' own for any other.

    Raises:
        InputError: a size that is missing, or what transformers refuses.
        UnsupportedError: no causal language model.
    """
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return PlainConfig(checkpoint)
    from quantflow.models.configuration import load_config  # here: it imports transformers

    return load_config(checkpoint)


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


def refuse_not_finite(checkpoint: Checkpoint, graph: Graph) -> None:
    """Refuse NaN and Inf in what lies outside of the layers: no stage computes with all of an embedding, export copies it.

    Raises:
        InputError: naming the tensor.
    """
    from quantflow.models.reading import check_stored  # here: it imports torch

    inside = tuple(f"{layer.prefix}." for layer in graph.layers)
    for name, (file, info) in checkpoint.tensors.items():
        if not name.startswith(inside):
            check_stored(checkpoint.folder / file, info)


def fingerprint(checkpoint: Checkpoint, digests: Digests | None = None) -> str:
    """Return the sha256 that identifies a model: its config.json, its tensor headers and its weight files' contents.

    Args:
        checkpoint: the opened folder.
        digests: the hashes that are known already; None reads every weight file.
    """
    tensors = {
        name: [file, info.dtype, list(info.shape)]
        for name, (file, info) in checkpoint.located.items()
    }
    hash_of = file_digest if digests is None else digests.of
    files = {file: hash_of(checkpoint.folder / file) for file in checkpoint.shards}
    return digest_of({"config": checkpoint.config, "tensors": tensors, "files": files})
