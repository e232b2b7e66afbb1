"""The config.json of an artifact: the source's and the layout's quantization_config."""

from collections.abc import Collection, Mapping
from typing import Any

from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Graph
from quantflow.planning.plan import Plan

FORMAT = FORMATS[DEFAULT]
_HEADS = ("lm_head", "embed_out")


def artifact_config(
    config: Mapping[str, Any], graph: Graph, plan: Plan, *, names: Collection[str]
) -> dict[str, Any]:
    """Content of an artifact's config.json.

    Everything else of the source stays. Only a quantized head changes a key: no embedding can be
    tied to it.

    Args:
        config: config.json of the source.
        graph: linears of the model.
        plan: plan of the artifact.
        names: tensor names of the source.
    """
    schemes = plan.quantized
    own = dict(config)
    if plan.head is not None:
        own["tie_word_embeddings"] = False
    own["quantization_config"] = FORMAT.quantization_config(
        schemes,
        ignore=left_alone(graph, schemes, names=names),
        model_type=graph.family.model_type,
        kv_cache=plan.kv_cache,
        modules=module_names(graph),
    )
    return own


def left_alone(graph: Graph, quantized: Collection[str], *, names: Collection[str]) -> list[str]:
    """Source names of the linears that are not quantized.

    Linears outside the layers are listed by every name under which loaders look for them. A head
    that is tied to the embedding is among them: it is a linear of the model without a tensor.

    Args:
        graph: linears of the model.
        quantized: source names of the quantized linears; all their names where a folder's names may
            differ from the graph's.
        names: tensor names of the folder.
    """
    modules = module_names(graph)
    heads = list(_HEADS)
    inside = [*graph.linears, *graph.routers, *graph.idle]
    if graph.family.discovered:
        inside += graph.others
        heads += [graph.family.head]
    left = [
        name
        for name in inside
        if name not in quantized and modules.get(name, name) not in quantized
    ]
    if not any(head in quantized for head in heads):
        # a head that is tied to the embedding may still have a bias of its own
        stored = {name.rpartition(".")[0] for name in names}
        left += [name for name in dict.fromkeys(heads) if name in stored] or [
            graph.family.head_place
        ]
    return left


def module_names(graph: Graph) -> dict[str, str]:
    """Source name -> name of the module in memory, for linears whose two names differ."""
    names = {graph.family.head: graph.family.head_place}
    if graph.family.discovered:
        for layer in graph.layers:
            names |= {
                name: layer.module(name) for name in (*layer.linears, *layer.routers, *layer.idle)
            }
    return {name: module for name, module in names.items() if module != name}
