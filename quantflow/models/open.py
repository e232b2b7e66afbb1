"""A model opened as files, and the graph of its linears, without transformers where a row says it.

This module stands above those that make a graph. It imports transformers' model code inside a
function alone, since that takes seconds and a family whose graph comes from its row needs none of
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.files.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.models.graph import UNTRACED, Graph, named_graph, row_graph
from quantflow.models.matching import matching
from quantflow.models.reading import check_stored
from quantflow.models.source import PlainConfig, refuse_stacked_experts


class NamedLinears:
    """The configuration of a model whose linears a user named: config.json, keys as attributes.

    Attributes:
        graph: the graph of the named linears.
    """

    def __init__(self, config: Mapping[str, Any], graph: Graph) -> None:
        """Keep both."""
        self._config, self.graph = config, graph

    def __getattr__(self, name: str) -> Any:
        """The value of a key."""
        try:
            return self._config[name]
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


def graph_for(config: Any) -> Graph:
    """The graph of a model: of the linears that a user named, of its family's row, or of a trace.

    Args:
        config: configuration of transformers, or that of `ModelFiles`.

    Raises:
        UnsupportedError: the family is not supported.
        InputError: a mixture without a number of experts.
    """
    if isinstance(config, NamedLinears):
        return config.graph
    if config.model_type in UNTRACED:
        return row_graph(config)
    from quantflow.models.discovery import graph_of  # here: it imports transformers' model code

    return graph_of(config)


def config_of(checkpoint: Checkpoint) -> Any:
    """The configuration that `graph_for` reads: config.json as it is, or transformers' own.

    Raises:
        InputError: a size that is missing, or what transformers refuses.
        UnsupportedError: no causal language model.
    """
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str) and model_type in UNTRACED:
        return PlainConfig(checkpoint)
    from quantflow.models.configuration import load_config  # here: it imports transformers

    return load_config(checkpoint)


def open_files(folder: str | Path, *, linears: Sequence[str] = ()) -> ModelFiles:
    """Open a Hugging Face folder that is to be quantized; reads headers and config.json, no weight.

    Args:
        folder: the model's.
        linears: names or `re:` patterns of linears, for a model that no graph can be made of; none
            makes a graph.

    Raises:
        InputError: the folder, a header or config.json cannot be used, or the weights are already
            quantized.
        UnsupportedError: the family is not supported.
        UsageError: a pattern that matches no matrix.
    """
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    if linears:
        chosen, others = _chosen(checkpoint, linears)
        graph = named_graph(checkpoint.config, chosen, others=others)
        return ModelFiles(checkpoint=checkpoint, config=NamedLinears(checkpoint.config, graph))
    config = config_of(checkpoint)
    return ModelFiles(checkpoint=as_linears(checkpoint, config), config=config)


def _chosen(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The matrices `NAME.weight` that patterns match, and the others, in the checkpoint's order."""
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
    """A checkpoint in which every linear that the graph names is a tensor [O, I] of its own.

    Raises:
        UnsupportedError: experts in one tensor, in a family whose graph comes from its row; or as
            `graph_for`.
        InputError: as `Checkpoint.in_parts`.
    """
    if config.model_type in UNTRACED:
        refuse_stacked_experts(checkpoint)
        return checkpoint
    return checkpoint.in_parts(graph_for(config).split)


def refuse_not_finite(checkpoint: Checkpoint, graph: Graph) -> None:
    """Refuse NaN and Inf outside of the layers, where no stage computes with all of a tensor.

    Of an embedding, for one, a forward reads some rows, and export copies all.

    Raises:
        InputError: naming the tensor.
    """
    inside = tuple(f"{layer.prefix}." for layer in graph.layers)
    for name, (file, info) in checkpoint.tensors.items():
        if not name.startswith(inside):
            check_stored(checkpoint.folder / file, info)


def words_in_float32(config: Any, *, float16: bool) -> tuple[str, ...]:
    """Patterns of the names of tensors that transformers keeps in float32 in a narrower model.

    Args:
        config: configuration of transformers.
        float16: whether that is float16, else bfloat16.
    """
    from quantflow.models.skeleton import as_written  # here: it imports transformers' model code

    model = as_written(config)
    words = set(model._keep_in_fp32_modules_strict or ())
    if float16:
        words |= set(model._keep_in_fp32_modules or ())
    return tuple(sorted(word.replace("*", ".*") for word in words))
