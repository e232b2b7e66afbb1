"""Bytes of the weights' files that an artifact becomes, from headers and schemes alone.

A choice of schemes by `target_size` bounds these bytes. They are those of the safetensors files of
an artifact, or of its GGUF file where its schemes are llama.cpp's types.
"""

from collections.abc import Mapping, Sequence

from quantflow.files.canonical import readable_json
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Spec, layout
from quantflow.formats.llama_cpp.encoding import block_type_of
from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles
from quantflow.planning.head import is_tied
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Export, Quantize
from quantflow.planning.sizes import (
    FORMAT,
    ONE_FILE,
    counted_bits,
    heads_of,
    quantized_specs,
)
from quantflow.units import parse_size

# Bytes that the entry of a chosen linear may take more in its file, beside its own tensors: four
# numbers of six more digits and another dtype in a header, or what aligns a tensor of GGUF.
SPARE = 64
FILE = 256  # bytes of a file beside the entries of its tensors


def weight_bytes(
    infos: Mapping[str, TensorInfo], graph: Graph, plan: Plan, *, kv_heads: int, shard_size: int
) -> int:
    """Bytes of an artifact's safetensors files and of their index, headers included.

    Args:
        infos: every source tensor by name, unused ones among them.
        graph: linears of the model.
        plan: plan of the artifact.
        kv_heads: heads of keys and values.
        shard_size: bytes of a file at most.
    """
    schemes = plan.quantized
    replaced = {f"{linear}.weight" for linear in schemes}
    specs: dict[str, Spec] = {
        name: (info.dtype, info.shape) for name, info in infos.items() if name not in replaced
    }
    if plan.rotation is not None and plan.head is None and is_tied(graph, infos):
        embedding = infos[f"{graph.family.embedding}.weight"]
        specs[f"{graph.family.head}.weight"] = (embedding.dtype, embedding.shape)
    for linear, scheme in schemes.items():
        specs |= quantized_specs(linear, scheme, weight_of(infos, plan, linear))
    for layer in graph.layers if plan.kv_cache is not None else ():
        specs |= FORMAT.kv_tensor_specs(layer.attention or layer.prefix, plan.kv_cache, kv_heads)
    total = layout(specs).nbytes
    if total > min(shard_size, ONE_FILE):  # a file for each layer, beside those of the rest
        total += FILE * len(graph.layers)
        total += len(readable_json({name: "model-00001-of-00001.safetensors" for name in specs}))
    return total


def gguf_bytes(source: ModelFiles, plan: Plan, *, kind: str) -> int:
    """Bytes of the GGUF file of an artifact, the tokenizer in it included.

    Args:
        source: the model.
        plan: plan of the artifact.
        kind: name of the file, a key of gguf.FILE_TYPES.

    Raises:
        InputError: no tokenizer, or one of another model.
        UnsupportedError: a family, tokenizer or rotary embedding that is not written.
    """
    from quantflow.formats.llama_cpp.file_plan import FileSource, planned  # needs transformers

    infos = source.checkpoint.infos
    blocks = {
        f"{linear}.weight": block
        for linear, scheme in plan.quantized.items()
        if (block := block_type_of(scheme.weights)) is not None
    }
    wanted = FileSource(
        folder=source.checkpoint.folder,
        config=source.config,
        shapes={name: info.shape for name, info in infos.items()},
        dtypes={name: "F32" if name in blocks else info.dtype for name, info in infos.items()},
        blocks=blocks,
    )
    return planned(wanted, kind).layout.nbytes


def bytes_beside(
    entry: Quantize, plan: Plan, chosen: Sequence[str], *, source: ModelFiles, graph: Graph
) -> int:
    """Bytes of the weights' files without those of some linears, and `SPARE` for each of these.

    Args:
        entry: the artifact's part of the recipe.
        plan: plan with the entry's own scheme for every linear that is to be chosen for.
        chosen: these linears.
        source: the model.
        graph: names of its linears.

    Raises:
        InputError, UnsupportedError: no GGUF file can be written of the model.
    """
    schemes = plan.quantized
    if any(schemes[name].weights.block is not None for name in chosen):
        total = gguf_bytes(source, plan, kind=entry.scheme)
    else:
        _, kv_heads = heads_of(source.config, graph)
        total = weight_bytes(
            source.checkpoint.infos_with_unused,
            graph,
            plan,
            kv_heads=kv_heads,
            shard_size=parse_size(Export().shard_size),
        )
    infos = source.checkpoint.infos
    theirs = sum(counted_bits(name, schemes[name], infos[f"{name}.weight"]) for name in chosen)
    return total - theirs // 8 + SPARE * len(chosen)


def weight_of(infos: Mapping[str, TensorInfo], plan: Plan, linear: str) -> TensorInfo:
    """The source's weight of a linear; for a tied head the embedding's."""
    head = plan.head
    return infos[head.tensor if head is not None and head.linear == linear else f"{linear}.weight"]
