"""What a quantized cache keeps of keys and values: 8 bits, with scales that were measured.

    qvalue = round(clamp(k / scale)),   k' = qvalue * scale

and the same for values; keys as they are after the rotation of positions, which is how a cache stores them. One scale per
tensor, or one per key/value head. The scale is that of any symmetric tensor (quantflow.core.affine): amax / 448 of e4m3fn,
amax / 127.5 of int8, 1 where nothing but zeros was seen. What is larger than what was measured saturates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

NAMES = {"FP8": "float", "INT8": "int"}  # in recipes -> TensorScheme.kind
GRANULARITIES = ("per_tensor", "per_head")
SCHEMES = tuple(
    TensorScheme(kind=kind, num_bits=8, granularity=granularity)  # type: ignore[arg-type]
    for kind in NAMES.values()
    for granularity in GRANULARITIES
)


def kv_scheme(name: str, granularity: str) -> TensorScheme:
    """Return the scheme that a recipe spells with a key of NAMES and one of GRANULARITIES.

    Raises:
        SchemeError: there is none of these words.
    """
    for scheme in SCHEMES:
        if (scheme.kind, scheme.granularity) == (NAMES.get(name), granularity):
            return scheme
    raise SchemeError(
        f"kv_cache scheme {name!r} {granularity!r} is unknown", f"use {' or '.join(NAMES)}, {' or '.join(GRANULARITIES)}"
    )


def kv_words(scheme: TensorScheme) -> str:
    """Return what people call a scheme: `FP8 per_head`."""
    return f"{next(name for name, kind in NAMES.items() if kind == scheme.kind)} {scheme.granularity}"


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScales:
    """The scales of one layer's cache.

    Attributes:
        scheme: one of SCHEMES.
        keys, values: [1], or per head [kv_heads]; float32, positive.
    """

    scheme: TensorScheme
    keys: Tensor
    values: Tensor

    def round_keys(self, keys: Tensor) -> Tensor:
        """Return keys as the cache gives them back, in their dtype.  keys: [..., kv_heads, T, D], rotated."""
        return self._round(keys, self.keys)

    def round_values(self, values: Tensor) -> Tensor:
        """Return values as the cache gives them back, in their dtype.  values: [..., kv_heads, T, D]."""
        return self._round(values, self.values)

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        return affine.fake_quantize(x, scale.to(x.device).reshape(-1, 1, 1), None, self.scheme)


def kv_scales(scheme: TensorScheme, *, keys: Tensor, values: Tensor) -> KVScales:
    """Return the scales for the largest magnitudes that were measured.

    Args:
        scheme: one of SCHEMES.
        keys: amax of the keys after their rotation, [1] or per head [kv_heads].
        values: of the values, likewise.

    Raises:
        SchemeError: a magnitude is negative or not finite.
    """
    for name, amax in (("keys", keys), ("values", values)):
        if not (torch.isfinite(amax) & (amax >= 0)).all():
            raise SchemeError(f"{name}: amax {amax.tolist()}", "magnitudes are finite and not negative; measure again")
    found = (affine.scale_from_amax(amax, scheme) for amax in (keys, values))
    return KVScales(scheme=scheme, keys=next(found), values=next(found))
