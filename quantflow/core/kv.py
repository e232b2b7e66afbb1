"""A quantized KV cache: 8 bits for keys and values, with measured scales.

    qvalue = round(clamp(k / scale)),   k' = qvalue * scale

and the same for values. Keys are those after rotary embedding, which is how a cache stores them.
There is one scale per tensor, or one per kv head. It is that of any symmetric tensor
(quantflow.core.affine): amax / 448 of e4m3fn, amax / 127.5 of int8, 1 where only zeros were
measured. Values beyond the measured amax saturate.
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
        keys, values: [1], or per head [kv_heads]; float32, positive, on the device of the keys and
            values.
    """

    scheme: TensorScheme
    keys: Tensor
    values: Tensor

    def round_keys(self, keys: Tensor) -> Tensor:
        """Keys as the cache returns them, in their dtype.

        keys are [..., kv_heads, T, D], after rotary embedding.
        """
        return self._round(keys, self.keys)

    def round_values(self, values: Tensor) -> Tensor:
        """Values as the cache returns them, in their dtype.

        values are [..., kv_heads, T, D].
        """
        return self._round(values, self.values)

    def to(self, device: torch.device) -> "KVScales":
        """The scales on a device; themselves where they are there.

        They are moved once, so that none crosses for every token.
        """
        if self.keys.device == device:
            return self
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        return affine.fake_quantize(x, scale.reshape(-1, 1, 1), None, self.scheme)


def kv_scales(scheme: TensorScheme, *, keys: Tensor, values: Tensor) -> KVScales:
    """The scales for measured largest magnitudes.

    Args:
        scheme: one of SCHEMES.
        keys: amax of the keys after rotary embedding, [1] or per head [kv_heads].
        values: amax of the values, [1] or per head [kv_heads].

    Raises:
        SchemeError: a magnitude is negative or not finite.
    """
    for name, amax in (("keys", keys), ("values", values)):
        if not (torch.isfinite(amax) & (amax >= 0)).all():
            raise SchemeError(
                f"{name}: amax {amax.tolist()}",
                "magnitudes are finite and not negative; measure again",
            )
    scales = (affine.scale_from_amax(amax, scheme) for amax in (keys, values))
    return KVScales(scheme=scheme, keys=next(scales), values=next(scales))
