"""The record of one way to compute `x @ W.T + bias` with a quantized weight, and the sentences that say why it cannot.

`quantflow.backends` has them all. What several of them need of a linear is named here once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quantflow.core.float8 import FLAVOURS
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme


@dataclass(frozen=True, kw_only=True)
class Case:
    """A linear that a backend is asked about.

    Attributes:
        scheme: the linear's.
        device: where it would run.
        shape: (out_features, in_features).
        dtype: of its inputs.
    """

    scheme: LinearScheme
    device: torch.device
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def weights(self) -> TensorScheme:
        """The scheme of the weights."""
        return self.scheme.weights

    @property
    def stored(self) -> str:
        """What the scheme stores, in words."""
        return f"scheme {self.scheme.name} has {_called(self.scheme.weights)}"

    @property
    def taken(self) -> str:
        """What the scheme makes of inputs, in words."""
        return f"scheme {self.scheme.name} has {_called(self.scheme.input)}"


# what a case lacks, in a sentence about the backend; None where it is met
Need = Callable[[Case], str | None]


def need(words: str, holds: Callable[[Case], bool]) -> Need:
    """Return a need that `holds` decides; in its words `{c}` is the case."""
    return lambda case: None if holds(case) else words.format(c=case)


def on(*kinds: str, capability: tuple[int, int] = (8, 0)) -> Need:
    """Return the need of one of these devices; of `cuda` one by NVIDIA, of at least this compute capability."""

    def lack(case: Case) -> str | None:
        device = case.device
        if device.type not in kinds:
            return f"runs on {' and '.join(kinds)}, not on {device.type}"
        if device.type != "cuda":
            return None
        if torch.version.cuda is None or not torch.cuda.is_available():
            return f"needs a GPU by NVIDIA, torch {torch.__version__} finds none"
        present = torch.cuda.get_device_capability(device)
        message = "needs compute capability {}.{}, {} has {}.{}".format(
            *capability, device, *present
        )
        return message if present < capability else None

    return lack


def divides(number: int, axis: int, *, where: str = "") -> Need:
    """Return the need of out_features, axis 0, or in_features, axis 1, that `number` divides."""
    words = f"needs {('out_features', 'in_features')[axis]} that {number} divides{where}, not {{c.shape[{axis}]}}"
    return need(words, lambda c: c.shape[axis] % number == 0)


def sums_in_int32(most: int) -> Need:
    """Return the need of at most so many input features where these are int8 too."""
    words = f"sums in int32, which holds {most} input features, not {{c.shape[1]}}"
    return need(words, lambda c: not is_int(c.scheme.input, 8) or c.shape[1] <= most)


def weights_per(*granularities: str) -> Need:
    """Return the need of weights with one of these granularities."""
    words = " or ".join(granularities).replace("_", " ")
    return need(
        f"needs weights {words}, {{c.stored}}", lambda c: c.weights.granularity in granularities
    )


def is_int(tensor: TensorScheme | None, *bits: int) -> bool:
    """Return whether a tensor is quantized to integers of so many bits, with zero points that are integers too if any."""
    return (
        tensor is not None
        and tensor.kind == "int"
        and tensor.num_bits in bits
        and not tensor.minima
    )


def is_e4m3(tensor: TensorScheme | None) -> TypeGuard[TensorScheme]:
    """Return whether a tensor is quantized to codes of e4m3fn, with scales that are floats."""
    if tensor is None or tensor.kind != "float" or tensor.scale_format != "float":
        return False
    return FLAVOURS[tensor.float8].dtype == torch.float8_e4m3fn


def _called(tensor: TensorScheme | None) -> str:
    if tensor is None:
        return "none"
    kind = (
        tensor.float8
        if tensor.kind == "float"
        else f"{'' if tensor.symmetric else 'asymmetric '}int{tensor.num_bits}"
    )
    if tensor.minima:
        kind = f"int{tensor.num_bits} with minima"
    scales = "" if tensor.scale_format == "float" else f" with {tensor.scale_format} scales"
    return f"{kind} {tensor.granularity.replace('_', ' ')}{scales}"


INT8_WEIGHTS = need(
    "needs symmetric int8 weights, {c.stored}",
    lambda c: is_int(c.weights, 8) and c.weights.symmetric,
)
INT8_INPUTS = need("needs int8 inputs, {c.taken}", lambda c: is_int(c.scheme.input, 8))
E4M3_WEIGHTS = need("needs e4m3fn weights, {c.stored}", lambda c: is_e4m3(c.weights))
INPUTS_AS_THEY_ARE = need(
    "needs inputs in the model's dtype, {c.taken}", lambda c: c.scheme.input is None
)
FLOATS = need(
    "needs float32 or bfloat16 inputs, not {c.dtype}",
    lambda c: c.dtype in (torch.float32, torch.bfloat16),
)
BFLOAT16 = need(
    "needs bfloat16 inputs on {c.device.type}, not {c.dtype}", lambda c: c.dtype == torch.bfloat16
)


def keep(linear: QuantizedLinear, dtype: torch.dtype) -> QuantizedLinear:
    """Return the linear itself: what multiplies codes and rescales in float32 prepares nothing."""
    del dtype
    return linear


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend.

    Attributes:
        name: the key in `quantflow.backends.BACKENDS`.
        prepare: (linear, dtype of the inputs) -> the weight in the kernel's own layout, a record.
        linear: (x [..., in_features], what was prepared, bias [out_features] or None) -> [...,
            out_features] in x's dtype.
        needs: of a linear that it can run; the first that is not met is the reason.
    """

    name: str
    prepare: Callable[[QuantizedLinear, torch.dtype], Any]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    needs: tuple[Need, ...] = ()

    def why_not(self, case: Case) -> str | None:
        """Return why it cannot run a linear, in a sentence; None when it can."""
        return next(
            (f"{self.name} {reason}" for lack in self.needs if (reason := lack(case)) is not None),
            None,
        )
