"""The quantized KV cache of a recipe's entry: its scheme, and what it goes with.

Its scales belong to keys and values as the model makes them. Transforms that change values are
therefore refused: the measurement would be of another tensor. quantflow/quantizing/cache_scales.py
computes the scales.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantflow.core.kv import kv_scheme, kv_words
from quantflow.core.scheme import TensorScheme
from quantflow.errors import UnsupportedError, UsageError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Graph
from quantflow.planning.compatibility import KNOWN
from quantflow.planning.recipe import Quantize

FORMAT = FORMATS[DEFAULT]


def kv_cache_of(
    entry: Quantize,
    graph: Graph,
    transforms: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    ranks: int,
) -> TensorScheme | None:
    """Scheme of keys and values of an entry; None leaves them as they are.

    Args:
        entry: entry of the recipe.
        graph: graph of the model.
        transforms: (name, options) of each transform.
        ranks: number of ranks that quantize.

    Raises:
        UsageError: a transform changes the values that were measured, or several ranks share the
            work.
        UnsupportedError: no loader looks for scales in such an attention.
    """
    if entry.kv_cache is None:
        return None
    scheme = kv_scheme(entry.kv_cache.scheme, entry.kv_cache.granularity)
    setting = f"{entry.name}: kv_cache {kv_words(scheme)}"
    if not any(name.endswith(".k_proj") for name in graph.linears):
        raise UnsupportedError(
            f"{setting} of a {graph.family.model_type}, whose keys and values come from one linear",
            "leave kv_cache out: compressed-tensors 0.20 does not look for scales there",
        )
    if ranks > 1:
        raise UsageError(
            f"{setting} with --ranks {ranks}", "quantize with one process, or leave kv_cache out"
        )
    if entry.float8 not in (None, "e4m3fn") and scheme.kind == "float":
        raise UsageError(
            f"{setting} with float8={entry.float8}",
            "use INT8, or leave float8 out: caches hold e4m3fn",
        )
    for name, options in transforms:
        option = KNOWN[name].CHANGES_VALUES
        if options[option]:
            raise UsageError(
                f"{setting} with {name}, which changes the values that were measured "
                f"({option}: true)",
                f"write {name}: {{{option}: false}}, or leave kv_cache out",
            )
    return scheme


def kv_names(graph: Graph, scheme: TensorScheme | None) -> tuple[str, ...]:
    """Names of all tensors in an artifact that describe its caches."""
    if scheme is None:
        return ()
    return tuple(
        name for attention in graph.attentions for name in FORMAT.kv_tensor_names(attention)
    )
