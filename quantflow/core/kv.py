"""What a quantized cache keeps of keys and values: 8 bits, with scales that were measured.

    qvalue = round(clamp(k / scale)),   k' = qvalue * scale

and the same for values; keys as they are after the rotation of positions, which is how a cache
stores them. One scale per tensor, or one per key/value head. The scale is that of any symmetric
tensor (quantflow.core.affine): amax / 448 of e4m3fn, amax / 127.5 of int8, 1 where nothing but
zeros was seen. What is larger than what was measured saturates.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.kv_scheme import GRANULARITIES, NAMES, SCHEMES, kv_scheme, kv_words
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

__all__ = ["GRANULARITIES", "NAMES", "SCHEMES", "KVScales", "kv_scales", "kv_scheme", "kv_words"]


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScales:
    """The scales of one layer's cache.

    Attributes:
        scheme: one of SCHEMES.
        keys, values: [1], or per head [kv_heads]; float32, positive, where the keys and values are.
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

    def to(self, device: torch.device) -> "KVScales":
        """Return the scales on a device, once, so that none crosses for every token; themselves where they are there."""
        if self.keys.device == device:
            return self
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        return affine.fake_quantize(x, scale.reshape(-1, 1, 1), None, self.scheme)


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
            raise SchemeError(
                f"{name}: amax {amax.tolist()}",
                "magnitudes are finite and not negative; measure again",
            )
    found = (affine.scale_from_amax(amax, scheme) for amax in (keys, values))
    return KVScales(scheme=scheme, keys=next(found), values=next(found))
