"""The quantized key-value cache of one artifact: what the recipe asks for, and the scales that the measurement gives it.

    <attention>|k_cache|amax, v_cache            one scale per tensor
    <attention>|k_heads|channel_amax, v_heads    one scale per head

Scales are in the layer's file beside its weights (`k_scale`, `v_scale`), and in its record what they were made from:

    "kv_cache": {"k_amax": [...], "v_amax": [...]}

They belong to keys and values as the model makes them, so transforms that change values are refused: what was measured is
then another tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quantflow.core.kv import KVScales, kv_scales, kv_scheme, kv_words
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError, StatisticsError, UnsupportedError, UsageError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.measurements.keys import HEADS
from quantflow.measurements.record import Measurement
from quantflow.models.graph import Graph, Layer
from quantflow.observers.amax import AMAX
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.planning.compatibility import KNOWN
from quantflow.planning.recipe import Quantize

FORMAT = FORMATS[DEFAULT]
_SITES = {"per_tensor": (("k_cache", "v_cache"), AMAX.name), "per_head": (HEADS, CHANNEL_AMAX.name)}


def kv_cache_of(
    entry: Quantize, graph: Graph, transforms: Sequence[tuple[str, Mapping[str, Any]]], *, ranks: int
) -> TensorScheme | None:
    """Return how an entry of the recipe keeps keys and values; None is as they are.

    Args:
        entry: the recipe's words.
        graph: of the model.
        transforms: name and options of each.
        ranks: how many cards quantize.

    Raises:
        UsageError: a transform changes the values that were measured, or several cards share the work.
        UnsupportedError: no loader knows scales in such an attention.
    """
    if entry.kv_cache is None:
        return None
    scheme = kv_scheme(entry.kv_cache.scheme, entry.kv_cache.granularity)
    told = f"{entry.name}: kv_cache {kv_words(scheme)}"
    if not any(name.endswith(".k_proj") for name in graph.linears):
        raise UnsupportedError(
            f"{told} of a {graph.family.model_type}, whose keys and values come from one linear",
            "leave kv_cache out: compressed-tensors 0.20 does not look for scales there",
        )
    if ranks > 1:
        raise UsageError(f"{told} with --ranks {ranks}", "quantize with one process, or leave kv_cache out")
    if entry.float8 not in (None, "e4m3fn") and scheme.kind == "float":
        raise UsageError(f"{told} with float8={entry.float8}", "use INT8, or leave float8 out: caches hold e4m3fn")
    for name, options in transforms:
        option = KNOWN[name].CHANGES_VALUES
        if options[option]:
            raise UsageError(
                f"{told} with {name}, which changes the values that were measured ({option}: true)",
                f"write {name}: {{{option}: false}}, or leave kv_cache out",
            )
    return scheme


def kv_scales_of(measurement: Measurement | None, layer: Layer, scheme: TensorScheme | None) -> KVScales | None:
    """Return the scales of a layer's cache, None where it keeps keys and values as they are.

    Raises:
        StatisticsError: the measurement does not hold what they are made from.
        UnsupportedError: a layer that has none.
    """
    if scheme is None:
        return None
    if layer.attention is None:
        cause = f"{layer.prefix}: keeps no keys and values, kv_cache {kv_words(scheme)} is asked of every layer"
        raise UnsupportedError(cause, "leave kv_cache out")
    keys, values = _maxima(measurement, layer, scheme)
    try:
        return kv_scales(scheme, keys=keys, values=values)
    except SchemeError as error:
        raise StatisticsError(f"{layer.attention}: {error.cause}", error.remedy) from error


def kv_record(measurement: Measurement | None, layer: Layer, scheme: TensorScheme | None) -> dict[str, Any]:
    """Return what a layer's record says of its cache; nothing where it is not quantized."""
    if scheme is None:
        return {}
    keys, values = _maxima(measurement, layer, scheme)
    return {"kv_cache": {"k_amax": keys.tolist(), "v_amax": values.tolist()}}


def kv_tensors(layer: Layer, scales: KVScales | None) -> dict[str, Tensor]:
    """Return what a layer's file holds of its cache."""
    return {} if scales is None or layer.attention is None else FORMAT.encode_kv(layer.attention, scales)


def kv_names(graph: Graph, scheme: TensorScheme | None) -> tuple[str, ...]:
    """Return the names of all tensors that describe caches in an artifact."""
    if scheme is None:
        return ()
    return tuple(name for attention in graph.attentions for name in FORMAT.kv_tensor_names(attention))


def _maxima(measurement: Measurement | None, layer: Layer, scheme: TensorScheme) -> list[Tensor]:
    """Return the largest magnitudes of keys and of values, [1] or [kv_heads] each."""
    sites, statistic = _SITES[scheme.granularity]
    found = []
    for site in sites:
        key = f"{layer.attention}|{site}|{statistic}"
        if measurement is None or key not in measurement.statistics:
            raise StatisticsError(
                f"{key}: the measurement does not hold it, kv_cache {kv_words(scheme)} is made from it",
                "run `quantflow measure` again with --stats amax or more"
                + (", or use per_tensor: Gaudi's files hold one maximum of a cache" if statistic != AMAX.name else ""),
            )
        found.append(measurement.statistics[key].reshape(-1))
    return found
