"""The config.json of an artifact: the source's, with the layout's quantization_config."""

from collections.abc import Collection, Mapping
from typing import Any

from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Graph
from quantflow.planning.plan import Plan

FORMAT = FORMATS[DEFAULT]
_HEADS = ("lm_head", "embed_out")


def artifact_config(config: Mapping[str, Any], graph: Graph, plan: Plan, *, names: Collection[str]) -> dict[str, Any]:
    """Return the content of an artifact's config.json.

    Nothing of the source's is changed but for a head that is quantized: no embedding can be tied to that.

    Args:
        config: the source's.
        graph: its linears.
        plan: what becomes of them.
        names: the source's tensors.
    """
    schemes, own = plan.quantized, dict(config)
    modules: Mapping[str, str] = {}
    ignored = [name for name in (*graph.linears, *graph.routers, *graph.idle) if name not in schemes]
    if graph.family.discovered:  # loaders know these by what the model calls them, and others outside the layers
        inside = {name: layer.module(name) for layer in graph.layers for name in (*layer.linears, *layer.routers, *layer.idle)}
        modules = {name: module for name, module in inside.items() if module != name}
        ignored += graph.others
    if plan.head is None:
        heads = dict.fromkeys([*_HEADS, *([graph.family.head] if graph.family.discovered else [])])
        stored = {name.rpartition(".")[0] for name in names}  # a bias alone, where the head is the embedding
        ignored += [name for name in heads if name in stored] or _HEADS[:1]
    else:
        own["tie_word_embeddings"] = False
    own["quantization_config"] = FORMAT.quantization_config(
        schemes, ignore=ignored, model_type=graph.family.model_type, kv_cache=plan.kv_cache, modules=modules
    )
    return own
