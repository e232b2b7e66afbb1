"""Schemes of a quantized KV cache, as plain data; quantflow.core.kv computes with them.

They have 8 bits. The runtime's caches of 4 and 5 bits (quantflow.runtime.kv_cache) have no measured
scales.
"""

from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

NAMES = {"FP8": "float", "INT8": "int"}  # name in recipes -> TensorScheme.kind
GRANULARITIES = ("per_tensor", "per_head")
SCHEMES = tuple(
    TensorScheme(kind=kind, num_bits=8, granularity=granularity)  # type: ignore[arg-type]
    for kind in NAMES.values()
    for granularity in GRANULARITIES
)


def kv_scheme(name: str, granularity: str) -> TensorScheme:
    """The scheme of a key of NAMES and one of GRANULARITIES.

    Raises:
        SchemeError: one of the two is unknown.
    """
    for scheme in SCHEMES:
        if (scheme.kind, scheme.granularity) == (NAMES.get(name), granularity):
            return scheme
    raise SchemeError(
        f"kv_cache scheme {name!r} {granularity!r} is unknown",
        f"use {' or '.join(NAMES)}, {' or '.join(GRANULARITIES)}",
    )


def kv_words(scheme: TensorScheme) -> str:
    """A scheme's name and granularity, for people: `FP8 per_head`."""
    return (
        f"{next(name for name, kind in NAMES.items() if kind == scheme.kind)} {scheme.granularity}"
    )
