"""A model opened as files, and the graph of its linears, without transformers where a row says it.

This module stands above those that make a graph. It imports transformers' model code inside a
function alone, since that takes seconds and a family whose graph comes from its row needs none of
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.files.layers_ahead import lost_words
from quantflow.files.safetensors_header import SplitTensor
from quantflow.models.graph import UNTRACED, Graph, named_graph, row_graph
from quantflow.models.matching import matching
from quantflow.models.model_tensors import ModelTensors, listed, require_shapes
from quantflow.models.reading import check_stored
from quantflow.models.source import PlainConfig, refuse_stacked_experts
from quantflow.models.tokenizer_vocabulary import beyond_embedding
from quantflow.models.unused import OTHER, reason_of, unused_words


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
        UnsupportedError: the family is not supported, or named linears are stored as [I, O].
        UsageError: a pattern that matches no matrix.
    """
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    if linears:
        chosen, others = _chosen(checkpoint, linears)
        graph = named_graph(checkpoint.config, chosen, others=others)
        return ModelFiles(checkpoint=checkpoint, config=NamedLinears(checkpoint.config, graph))
    config = config_of(checkpoint)
    return ModelFiles(checkpoint=compared(checkpoint, config), config=config)


def _chosen(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The matrices `NAME.weight` that patterns match, and the others, in the checkpoint's order."""
    matrices = [
        name.removesuffix(".weight")
        for name, (_, info) in checkpoint.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight")
    ]
    chosen = {name for pattern in patterns for name in matching(pattern, matrices, "linears")}
    _refuse_transposed(checkpoint, matrices)
    return [name for name in matrices if name in chosen], [
        name for name in matrices if name not in chosen
    ]


def _refuse_transposed(checkpoint: Checkpoint, matrices: Sequence[str]) -> None:
    """Refuse a model that stores matrices as [I, O], as GPT-2's Conv1D: rows would be inputs.

    A bias tells it, which has a value for each output. Square matrices of such a model do not.

    Raises:
        UnsupportedError: naming the first matrix that a bias tells.
    """
    for name in matrices:
        bias = checkpoint.tensors.get(f"{name}.bias")
        shape = tuple(checkpoint.tensors[f"{name}.weight"][1].shape)
        if bias is not None and tuple(bias[1].shape) == shape[1:] and shape[0] != shape[1]:
            raise UnsupportedError(
                f"{name}: weight {list(shape)} is stored as [in, out], its bias has {shape[1]}; "
                "named linears are [out, in]",
                "leave --linears out where the family is known: its graph turns them",
            )


def compared(checkpoint: Checkpoint, config: Any) -> Checkpoint:
    """A checkpoint that was compared with its model, by headers alone.

    Its tensors have the names that transformers writes, every linear that the graph names is a
    tensor [O, I] of its own, and tensors that no module has are apart, as `unused`.

    Raises:
        InputError: a parameter without a tensor, a tensor that its module does not have, or one of
            another shape than the model's.
        UnsupportedError: experts in one tensor, in a family whose graph comes from its row; a
            tensor that is merged or split on load; or as `graph_for`.
    """
    layout = listed(checkpoint.config)
    if layout is not None and config.model_type in UNTRACED:
        try:
            found = _accounted(checkpoint, layout)
        except InputError:
            pass  # the module tree knows older names, and says what is wrong
        else:
            if all(one.reason != OTHER for one in found.unused.values()):
                return found
    # here: they import transformers' model code
    from quantflow.models.configuration import load_config
    from quantflow.models.module_tensors import ModuleTensors

    own = load_config(checkpoint) if isinstance(config, PlainConfig) else config
    modules = ModuleTensors(own, graph=lambda: graph_for(own))
    split: Mapping[str, SplitTensor] = {}
    if config.model_type in UNTRACED:
        refuse_stacked_experts(checkpoint)
    else:
        graph = graph_for(own)
        split = {**graph.split, **graph.stacked}
    checkpoint = checkpoint.renamed(modules.spelled(checkpoint.tensors, split))
    return _accounted(checkpoint.in_parts(split), modules)


def _accounted(checkpoint: Checkpoint, tensors: ModelTensors) -> Checkpoint:
    """The checkpoint with its unused tensors apart.

    Raises:
        InputError, UnsupportedError: as `ModelTensors.bind`; a shape that is not the model's.
    """
    bound = tensors.bind(tuple(checkpoint.tensors), quantized=())
    require_shapes(checkpoint.infos, bound.parameters)
    reasons = {name: reason_of(name, checkpoint.config) for name in bound.unused}
    return checkpoint.without(reasons) if reasons else checkpoint


def notes_of(checkpoint: Checkpoint, graph: Graph) -> list[str]:
    """Sentences about a compared checkpoint that its user should read, most often none.

    They are of what was left over in the folder, tensors that no module has, layers that predict
    further tokens and are not there, and a tokenizer with more tokens than the embedding has rows.
    """
    lost = lost_words(checkpoint.config, checkpoint.infos_with_unused)
    more = (unused_words(checkpoint), lost, beyond_embedding(checkpoint, graph))
    return [*checkpoint.notes, *(note for note in more if note is not None)]


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
