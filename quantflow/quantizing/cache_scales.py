"""The scales of a quantized KV cache, made from the measurement's largest keys and values.

    <attention>|k_cache|amax, v_cache            one scale per tensor
    <attention>|k_heads|channel_amax, v_heads    one scale per head

Scales are in the layer's file beside its weights (`k_scale`, `v_scale`), and in its record what
they were made from:

    "kv_cache": {"k_amax": [...], "v_amax": [...]}
"""

from typing import Any

from torch import Tensor

from quantflow.core.kv import KVScales, kv_scales, kv_words
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError, StatisticsError, UnsupportedError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.measuring.record import Measurement
from quantflow.models.graph import Layer
from quantflow.observers.amax import AMAX
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.observers.keys import HEADS

FORMAT = FORMATS[DEFAULT]


_SITES = {"per_tensor": (("k_cache", "v_cache"), AMAX.name), "per_head": (HEADS, CHANNEL_AMAX.name)}


def kv_scales_of(
    measurement: Measurement | None, layer: Layer, scheme: TensorScheme | None
) -> KVScales | None:
    """The scales of a layer's cache, None where it keeps keys and values as they are.

    Raises:
        StatisticsError: the measurement does not hold what they are made from.
        UnsupportedError: a layer that has none.
    """
    if scheme is None:
        return None
    if layer.attention is None:
        cause = (
            f"{layer.prefix}: keeps no keys and values, kv_cache {kv_words(scheme)} is asked of "
            "every layer"
        )
        raise UnsupportedError(cause, "leave kv_cache out")
    keys, values = _maxima(measurement, layer, scheme)
    try:
        return kv_scales(scheme, keys=keys, values=values)
    except SchemeError as error:
        raise StatisticsError(f"{layer.attention}: {error.cause}", error.remedy) from error


def kv_record(
    measurement: Measurement | None, layer: Layer, scheme: TensorScheme | None
) -> dict[str, Any]:
    """The entries of a layer's record about its KV cache; none where the cache is not quantized."""
    if scheme is None:
        return {}
    keys, values = _maxima(measurement, layer, scheme)
    return {"kv_cache": {"k_amax": keys.tolist(), "v_amax": values.tolist()}}


def kv_tensors(layer: Layer, scales: KVScales | None) -> dict[str, Tensor]:
    """The tensors of a layer's file about its KV cache."""
    return (
        {}
        if scales is None or layer.attention is None
        else FORMAT.encode_kv(layer.attention, scales)
    )


def _maxima(measurement: Measurement | None, layer: Layer, scheme: TensorScheme) -> list[Tensor]:
    """The largest magnitudes of keys and of values, [1] or [kv_heads] each."""
    sites, statistic = _SITES[scheme.granularity]
    found = []
    for site in sites:
        key = f"{layer.attention}|{site}|{statistic}"
        if measurement is None or key not in measurement.statistics:
            raise StatisticsError(
                f"{key}: the measurement does not hold it, kv_cache {kv_words(scheme)} is made "
                "from it",
                "run `quantflow measure` again with --stats amax or more"
                + (
                    ", or use per_tensor: Gaudi's files hold one maximum of a cache"
                    if statistic != AMAX.name
                    else ""
                ),
            )
        found.append(measurement.statistics[key].reshape(-1))
    return found
