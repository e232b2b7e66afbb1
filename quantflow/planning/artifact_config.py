"""The config.json of an artifact: the source's and the layout's quantization_config."""

from collections.abc import Collection, Mapping
from typing import Any

from quantflow.files.checkpoint import UnusedTensor
from quantflow.files.layers_ahead import layers_ahead
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Graph
from quantflow.planning.plan import Plan
from quantflow.planning.stock_transformers import for_transformers

FORMAT = FORMATS[DEFAULT]
_HEADS = ("lm_head", "embed_out")
TIED = "tie_word_embeddings"
_TEXTS = ("text_config", "llm_config", "language_config", "thinker_config")


def artifact_config(
    config: Mapping[str, Any],
    graph: Graph,
    plan: Plan,
    *,
    infos: Mapping[str, TensorInfo],
    unused: Mapping[str, UnusedTensor],
    untied: bool = False,
) -> dict[str, Any]:
    """Content of an artifact's config.json.

    Everything else of the source stays. Only a head that is quantized or rotated changes a key: no
    embedding can be tied to it.

    Args:
        config: config.json of the source.
        graph: linears of the model.
        plan: plan of the artifact.
        infos: tensors of the source.
        unused: tensors of the source that no module has.
        untied: whether a head that was tied in the source is a tensor of its own.
    """
    schemes = plan.quantized
    own = dict(config)
    if plan.head is not None or untied:
        own = {**_untied(config), TIED: False}
    drafts = _of_drafts(unused) if plan.mtp is None else []
    own["quantization_config"] = FORMAT.quantization_config(
        schemes,
        ignore=[*left_alone(graph, schemes, infos=infos, unused=unused), *drafts],
        model_type=graph.family.model_type,
        kv_cache=plan.kv_cache,
        modules=module_names(graph),
    ) | for_transformers(graph, schemes)
    return own


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which nothing says that the head is tied.

    A model of text and images says it of its text, in a configuration inside its own, and engines
    read either. Other models inside it keep their heads.
    """
    own = dict(config)
    if TIED in own:
        own[TIED] = False
    for name in _TEXTS:
        if isinstance(own.get(name), Mapping):
            own[name] = _untied(own[name])
    return own


def left_alone(
    graph: Graph,
    quantized: Collection[str],
    *,
    infos: Mapping[str, TensorInfo],
    unused: Mapping[str, UnusedTensor],
) -> list[str]:
    """Source names of the linears that are not quantized.

    Linears outside the layers are listed by every name under which loaders look for them: an
    engine that finds none there takes a matrix for a quantized one. Unused matrices are among
    them, since engines run what a causal forward does not (MTP), and a head that is tied to the
    embedding: it is a linear of the model without a tensor.

    Args:
        graph: linears of the model.
        quantized: source names of the quantized linears; all their names where a folder's names may
            differ from the graph's.
        infos: tensors of the folder.
        unused: tensors of the folder that no module has.
    """
    modules = module_names(graph)
    heads = list(_HEADS)
    inside = [*graph.linears, *graph.routers, *graph.idle]
    if graph.family.discovered:
        inside += [*graph.others, *_matrices_outside(graph, infos)]
        heads += [graph.family.head]
    left = [
        name
        for name in inside
        if name not in quantized and modules.get(name, name) not in quantized
    ]
    if not any(head in quantized for head in heads):
        # a head that is tied to the embedding may still have a bias of its own
        stored = {name.rpartition(".")[0] for name in infos}
        named = [name for name in dict.fromkeys(heads) if name in stored]
        place = graph.family.head_place
        # the module that makes logits may lie inside of the one that has the bias (lm_head.decoder)
        known = {modules.get(name, name) for name in named}
        left += named if place in known else [*named, place]
    beside = [name for name in _unused_linears(unused) if name not in quantized]
    return list(dict.fromkeys([*left, *beside]))


def _matrices_outside(graph: Graph, infos: Mapping[str, TensorInfo]) -> list[str]:
    """Modules of the matrices outside the layers, by the names that the checkpoint has.

    The towers of released checkpoints have older names than those of today's modules. The token
    embedding is no linear; a table of positions is listed, which does no harm.
    """
    layers = tuple(f"{layer.prefix}." for layer in graph.layers)
    beside = (graph.family.embedding, graph.family.head)
    modules = [
        name.removesuffix(".weight")
        for name, info in infos.items()
        if name.endswith(".weight") and len(info.shape) == 2 and not name.startswith(layers)
    ]
    return [name for name in modules if name not in beside]


def _unused_linears(unused: Mapping[str, UnusedTensor]) -> list[str]:
    """Modules of the unused tensors that may be linears: matrices, and stacks of experts."""
    linears = []
    for name, tensor in unused.items():
        if name.endswith(".weight") and len(tensor.info.shape) == 2:
            linears.append(name.removesuffix(".weight"))
        elif ".experts." in name and len(tensor.info.shape) == 3:
            linears += [name, name.rpartition(".")[0]]
    return linears


def _of_drafts(unused: Mapping[str, UnusedTensor]) -> list[str]:
    """The pattern of modules in which SGLang runs a layer beyond the last, its draft model (NextN).

    vLLM runs it under the checkpoint's names. A linear that neither name leaves out would be taken
    for a quantized one, since it is of a class that is.
    """
    beyond = any(ahead.joint.endswith(".eh_proj") for ahead in layers_ahead(unused))
    return [r"re:model\.decoder\..*"] if beyond else []


def module_names(graph: Graph) -> dict[str, str]:
    """Source name -> name of the module in memory, for linears whose two names differ."""
    names = {graph.family.head: graph.family.head_place}
    if graph.family.discovered:
        for layer in graph.layers:
            names |= {
                name: layer.module(name) for name in (*layer.linears, *layer.routers, *layer.idle)
            }
    return {name: module for name, module in names.items() if module != name}
