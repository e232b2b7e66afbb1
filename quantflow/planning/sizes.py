"""The sizes of a model, from its shard headers and config.json alone.

The formulas of `quantflow.planning.cost` compute with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantflow.core.dtypes import DTYPES
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Spec
from quantflow.formats import DEFAULT, FORMATS
from quantflow.formats.llama_cpp import gguf
from quantflow.models.graph import Graph, text_config
from quantflow.planning.head import HeadPlan, is_tied
from quantflow.planning.mtp import MtpPlan

FORMAT = FORMATS[DEFAULT]
# Bytes of tensors up to which export writes one file. Above, links to the layer files cost nothing
# and copies cost seconds.
ONE_FILE = 512 << 20
FLOAT = 4  # bytes of a float32, in which every layer runs
# source names, output features of each, input features
Group = tuple[tuple[str, ...], tuple[int, ...], int]


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One decoder layer.

    Attributes:
        stored: bytes of its tensors in the checkpoint.
        elements: number of elements of its tensors.
        groups: linears that share an input; none in a skipped layer.
        largest: (elements, stored bytes) of its largest tensor.
        folds: for each group, whether factors can be folded into what makes its input.
        shares: for each group, the share of the tokens that goes through it; for an expert, chosen
            experts / experts.
        turns: for each group, what `quantflow.models.graph.Layer.turn` says of it.
        sparse: whether the layer has experts.
    """

    stored: int
    elements: int
    groups: tuple[Group, ...]
    largest: tuple[int, int]
    folds: tuple[bool, ...]
    shares: tuple[float, ...]
    turns: tuple[int, ...]
    sparse: bool

    @property
    def features(self) -> float:
        """Input features of all groups that one token goes through, on average."""
        return sum(k * share for (_, _, k), share in zip(self.groups, self.shares, strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model.

    Attributes:
        hidden, vocabulary: features of the hidden state, rows of the head.
        between: features that a layer hands to the next: the hidden state and what is carried
            beside it.
        heads, kv_heads, head_dim: sizes of the attention.
        layers: sizes of the decoder layers.
        outside: stored bytes of the tensors outside the decoder layers.
        head: (elements, stored bytes) of the head's weight; of the embedding where they are tied.
        tied: whether the head and the embedding are one tensor.
        infos: every source tensor by name.
    """

    hidden: int
    between: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSize, ...]
    outside: int
    head: tuple[int, int]
    tied: bool
    infos: Mapping[str, TensorInfo]

    @property
    def stored(self) -> int:
        """Bytes of all tensors."""
        return self.outside + sum(layer.stored for layer in self.layers)

    @property
    def layer(self) -> LayerSize:
        """The largest decoder layer among those that run."""
        return max(
            (layer for layer in self.layers if layer.groups), key=lambda layer: layer.elements
        )

    @property
    def sparse(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.sparse for layer in self.layers)


def model_size(infos: Mapping[str, TensorInfo], config: Any, graph: Graph) -> ModelSize:
    """Sizes of a model.

    Args:
        infos: every source tensor, from the shard headers.
        config: configuration of the model; `hidden_size`, `num_attention_heads`, `vocab_size` and
            the names that stand for heads are read.
        graph: linears of the model.

    Raises:
        InputError: a layer of the configuration, or the part outside the layers, has no tensor.
    """
    text = text_config(config)
    first = next(layer for layer in graph.layers if layer.groups)
    heads, kv_heads = heads_of(config, graph)
    hidden = int(getattr(text, "hidden_size", None) or _group(first.groups[0].linears, infos)[2])
    head_dim = (
        first.head_dim
        if graph.family.discovered
        else int(getattr(text, "head_dim", None) or hidden // heads)
    )
    layers = []
    inside: set[str] = set()
    for layer in graph.layers:
        layer_infos = [info for name, info in infos.items() if name.startswith(f"{layer.prefix}.")]
        inside.update(info.name for info in layer_infos)
        if not layer_infos:
            raise InputError(
                f"config.json: {len(graph.layers)} layers, the checkpoint has no tensor of "
                f"{layer.prefix}",
                "restore config.json from its source, or download the model again",
            )
        largest = max(layer_infos, key=elements_of)
        layers.append(
            LayerSize(
                stored=sum(info.nbytes for info in layer_infos),
                elements=sum(map(elements_of, layer_infos)),
                groups=tuple(_group(group.linears, infos) for group in layer.groups),
                largest=(elements_of(largest), largest.nbytes),
                folds=tuple(group.folds for group in layer.groups),
                shares=tuple(
                    1.0 if group.expert is None else layer.chosen / layer.experts
                    for group in layer.groups
                ),
                turns=tuple(map(layer.turn, layer.groups)),
                sparse=layer.experts > 0,
            )
        )
    outside = [info for name, info in infos.items() if name not in inside]
    if not outside:
        raise InputError(
            "the checkpoint has no tensor outside of its layers", "download the model again"
        )
    head = max(outside, key=elements_of)
    carried = graph.family.carried
    return ModelSize(
        hidden=hidden,
        between=hidden if carried is None else carried.features + carried.width,
        vocabulary=int(getattr(text, "vocab_size", None) or 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(layers),
        outside=sum(info.nbytes for info in outside),
        head=(elements_of(head), head.nbytes),
        tied=is_tied(graph, infos),
        infos=infos,
    )


def heads_of(config: Any, graph: Graph) -> tuple[int, int]:
    """Numbers of attention heads, and of heads of keys and values."""
    text = text_config(config)
    first = next(layer for layer in graph.layers if layer.groups)
    # where layers differ, the heads of the first one stand for all
    uneven = bool(getattr(text, "is_heterogeneous", False))
    num_kv_heads = None if uneven else getattr(text, "num_key_value_heads", None)
    heads = int(
        (None if uneven else getattr(text, "num_attention_heads", None))
        or first.kv_heads * first.repeats
    )
    return heads, int(num_kv_heads or (first.kv_heads if uneven else heads))


def elements_of(info: TensorInfo) -> int:
    """Number of elements of a tensor."""
    count = 1
    for size in info.shape:
        count *= size
    return count


def quantized_bytes(name: str, scheme: LinearScheme, info: TensorInfo) -> int:
    """Exact bytes of the tensors that the linear `name` becomes in the artifact."""
    return sum(
        _spec_bytes(dtype, shape) for dtype, shape in quantized_specs(name, scheme, info).values()
    )


def counted_bits(name: str, scheme: LinearScheme, info: TensorInfo) -> int:
    """Bits of the linear `name` where it will run: of the artifact's tensors, or of GGUF blocks.

    An artifact holds a qvalue of llama.cpp's types in more bits than a block does.
    """
    kind = scheme.weights.block
    if kind is None:
        return 8 * quantized_bytes(name, scheme, info)
    _, blocks = gguf.BLOCKS[kind.name]
    return 8 * blocks.nbytes * (elements_of(info) // blocks.elements)


def quantized_specs(name: str, scheme: LinearScheme, info: TensorInfo) -> dict[str, Spec]:
    """Dtypes and shapes of the tensors that the linear `name` becomes in the artifact.

    Raises:
        UnsupportedError: torch has no name for the dtype.
    """
    if info.dtype not in DTYPES:
        raise UnsupportedError(
            f"{info.name}: dtype {info.dtype} is not known", f"use one of {', '.join(DTYPES)}"
        )
    specs: dict[str, Spec] = FORMAT.tensor_specs(name, scheme, info.shape, DTYPES[info.dtype])
    return specs


def outside_bytes(
    model: ModelSize, head: HeadPlan | None, mtp: MtpPlan | None, *, rotated: bool
) -> int:
    """Bytes of the tensors outside the layers after quantization, quantized ones included."""
    untied = untied_bytes(model, head, rotated=rotated)
    replaced = 0 if head is None or head.tied else model.infos[head.tensor].nbytes
    for name in () if mtp is None else mtp.schemes:
        replaced += model.infos[f"{name}.weight"].nbytes
    apart = head_file_bytes(model, head) + mtp_file_bytes(model, mtp)
    return model.outside + untied + apart - replaced


def untied_bytes(model: ModelSize, head: HeadPlan | None, *, rotated: bool) -> int:
    """Bytes of the tensor that a rotation makes of a tied head which is not quantized; else 0."""
    return model.head[1] if rotated and model.tied and head is None else 0


def mtp_file_bytes(model: ModelSize, mtp: MtpPlan | None) -> int:
    """Bytes of the tensors that linears of MTP layers become; 0 where they stay as they are."""
    schemes = {} if mtp is None else mtp.schemes
    return sum(
        quantized_bytes(name, scheme, model.infos[f"{name}.weight"])
        for name, scheme in schemes.items()
    )


def head_file_bytes(model: ModelSize, head: HeadPlan | None) -> int:
    """Bytes of the tensors that the head becomes; 0 where it stays as it is."""
    return (
        0 if head is None else quantized_bytes(head.linear, head.scheme, model.infos[head.tensor])
    )


def layer_bytes(
    model: ModelSize,
    schemes: Mapping[str, LinearScheme | None],
    *,
    kv_cache: TensorScheme | None = None,
) -> list[int]:
    """Bytes of each decoder layer's tensors after quantization, scales of its cache included.

    File headers are not counted.
    """
    specs = {} if kv_cache is None else FORMAT.kv_tensor_specs("", kv_cache, model.kv_heads)
    scales = sum(_spec_bytes(dtype, shape) for dtype, shape in specs.values())
    result = []
    for layer in model.layers:
        size = layer.stored + scales
        for names, _, _ in layer.groups:
            for name in names:
                scheme = schemes[name]
                if scheme is not None:
                    info = model.infos[f"{name}.weight"]
                    size += quantized_bytes(name, scheme, info) - info.nbytes
        result.append(size)
    return result


def _spec_bytes(dtype: str, shape: Sequence[int]) -> int:
    count = DTYPES[dtype].itemsize
    for size in shape:
        count *= size
    return count


def _group(names: tuple[str, ...], infos: Mapping[str, TensorInfo]) -> Group:
    shapes = []
    for name in names:
        info = infos.get(f"{name}.weight")
        if info is None or len(info.shape) != 2:
            problem = (
                "no such tensor" if info is None else f"shape {list(info.shape)}, [O, I] is needed"
            )
            raise InputError(
                f"{name}.weight: {problem}", "check that config.json belongs to these weights"
            )
        shapes.append(info.shape)
    return names, tuple(shape[0] for shape in shapes), shapes[0][1]
