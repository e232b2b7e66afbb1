"""One hash for the values of a quantized weight, before a layout packs them and after it is decoded."""

import hashlib

from torch import Tensor

from quantflow.artifact.canonical import digest_of
from quantflow.core.qtensor import QTensor
from quantflow.models.reading import bytes_of


class ValuesDigest:
    """The sha256 of a quantized weight's values, added row by row; where the rows are cut makes no difference."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._parts = {name: hashlib.sha256() for name in ("qvalue", "scale", "zero_point")}

    def update(self, weight: QTensor) -> None:
        """Add the rows that follow."""
        for name, digest in self._parts.items():
            tensor: Tensor | None = getattr(weight, name)
            if tensor is not None:
                digest.update(bytes_of(tensor))

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return digest_of({name: digest.hexdigest() for name, digest in self._parts.items()})
