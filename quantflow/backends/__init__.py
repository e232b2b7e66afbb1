"""Ways to compute `x @ W.T + bias` with a quantized weight, one kernel per file.

reference.py is the oracle of the others. Every file exports

    NAME
    why_not(scheme, device, *, shape, dtype) -> None when it can run this linear, otherwise the reason in a sentence
    prepare(linear, dtype) -> Prepared     the weight in the kernel's own layout; dtype is the one of the inputs
    linear(x, prepared, bias) -> Tensor    x [..., in_features] -> [..., out_features], in x's dtype

Nothing falls back silently: a kernel that cannot run a linear says why, and `choose` returns the reasons with its choice.
Their order is that of preference: our own kernels (C, compiled on first use, AVX512-VNNI), torch's, the oracle, which runs
everything. Those behind the oracle compute something else than the scheme says and are taken by name only.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from quantflow.backends import (
    fp8,
    hpu,
    int4_pack,
    int8_mm,
    int8_pack,
    reference,
    w4a8,
    w4a16,
    w4a16_int8,
    w8a8,
    w8a16,
)
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import UsageError


class Backend(Protocol):
    """What every file of this package exports; `Prepared` is a record of the file's own."""

    @property
    def NAME(self) -> str:
        """The backend's name, the key in BACKENDS."""

    def why_not(self, scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run such a linear, or None when it can."""

    def prepare(self, linear: QuantizedLinear, dtype: torch.dtype) -> Any:
        """Return the weight in the kernel's own layout."""

    def linear(self, x: Tensor, prepared: Any, bias: Tensor | None) -> Tensor:
        """Return x @ W.T + bias."""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.NAME: backend
        for backend in (hpu, w8a8, w4a8, w4a16, w8a16, fp8, int8_mm, int4_pack, int8_pack, reference, w4a16_int8)
    }
)


def choose(
    scheme: LinearScheme,
    device: torch.device,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    backend: str = "auto",
) -> tuple[Backend, dict[str, str]]:
    """Return the backend for a linear, and why each backend that is preferred over it cannot run.

    Args:
        scheme: the linear's scheme.
        device: where it runs.
        shape: (out_features, in_features).
        dtype: the dtype of its inputs.
        backend: a key of BACKENDS, or `auto` for the first of them that can; several with commas are tried in turn, such as
            `w4a16_int8,auto` where linears are quantized differently.

    Raises:
        UsageError: the backend is unknown, or cannot run this linear.
    """
    words = backend.split(",")
    for word in words:
        if word not in ("auto", *BACKENDS):
            raise UsageError(f"backend {word!r} is unknown", f"use one of auto, {', '.join(BACKENDS)}")
    reasons: dict[str, str] = {}
    for name in [name for word in words for name in (BACKENDS if word == "auto" else (word,))]:
        reason = BACKENDS[name].why_not(scheme, device, shape=shape, dtype=dtype)
        if reason is None:
            return BACKENDS[name], reasons
        reasons[name] = reason
    told = "; ".join(reasons[word] for word in words)  # `auto` ends at the oracle
    raise UsageError(f"backend {backend}: {told}", "use backend auto or reference")
