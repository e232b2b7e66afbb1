"""The config.json of an artifact: the source's, with the layout's quantization_config, which lists what is not quantized."""

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
    """Return the content of an artifact's config.json.

    Nothing of the source's is changed but for a head that is quantized: no embedding can be tied to
    that.

    Args:
        config: the source's.
        graph: its linears.
        plan: what becomes of them.
        names: the source's tensors.
    """
    schemes, own = plan.quantized, dict(config)
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
    """Return the linears that are not quantized, by their source names; those outside the layers by all that loaders know.

    A head that is tied to the embedding is among them: it is a linear of the model without a
    tensor.

    Args:
        graph: the model's linears.
        quantized: those that are quantized: source names, or all their names where a folder's may
            not be the graph's.
        names: the tensors of the folder.
    """
    modules, heads = module_names(graph), list(_HEADS)
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
        # a bias alone, where the head is the embedding
        stored = {name.rpartition(".")[0] for name in names}
        left += [name for name in dict.fromkeys(heads) if name in stored] or [
            graph.family.head_place
        ]
    return left


def module_names(graph: Graph) -> dict[str, str]:
    """Return source name -> what the model in memory calls it, of linears whose names differ."""
    found = {graph.family.head: graph.family.head_place}
    if graph.family.discovered:
        for layer in graph.layers:
            found |= {
                name: layer.module(name) for name in (*layer.linears, *layer.routers, *layer.idle)
            }
    return {name: module for name, module in found.items() if module != name}
