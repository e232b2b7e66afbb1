"""The record of a backend, and the requirements of which each says why a linear cannot run there.

A backend is one way to compute `x @ W.T + bias` with a quantized weight; `quantflow.backends` has
the table. Requirements that several backends share stand here once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quantflow.accelerators import CUDA, GPUS, is_gpu
from quantflow.core.device import missing_gpu
from quantflow.core.float8 import FLAVOURS
from quantflow.core.qtensor import PackedLinear, QuantizedLinear
from quantflow.core.scheme import FLOAT4, LinearScheme, TensorScheme


@dataclass(frozen=True, kw_only=True)
class Case:
    """A linear that a backend is asked about.

    Attributes:
        scheme: scheme of the linear.
        device: device on which it would run.
        shape: (out_features, in_features).
        dtype: dtype of its inputs.
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
        """What the scheme does to inputs, in words."""
        return f"scheme {self.scheme.name} has {_called(self.scheme.input)}"


# Case -> None where the requirement is met, else a sentence without a subject: the backend's name
# is put in front of it.
Requirement = Callable[[Case], str | None]


def requirement(words: str, holds: Callable[[Case], bool]) -> Requirement:
    """A requirement that `holds` decides; `{c}` in its words is the case."""
    return lambda case: None if holds(case) else words.format(c=case)


def on(*kinds: str, capability: tuple[int, int] = (8, 0)) -> Requirement:
    """The requirement of one of these kinds of device.

    Of kind `cuda` the device has to be NVIDIA's, with at least this compute capability.
    """

    def lack(case: Case) -> str | None:
        device = case.device
        if device.type not in kinds:
            return f"runs on {' and '.join(kinds)}, not on {device.type}"
        if device.type != CUDA:
            return None
        if torch.version.cuda is None or not torch.cuda.is_available():
            return f"needs a GPU by NVIDIA, torch {torch.__version__} finds none"
        return _capability_short_of(device, capability)

    return lack


def on_any_gpu(*, capability: tuple[int, int] = (8, 0)) -> Requirement:
    """The requirement of a GPU that is here; NVIDIA's has at least this compute capability."""

    def lack(case: Case) -> str | None:
        device = case.device
        if not is_gpu(device.type):
            return f"runs on {' and '.join(GPUS)}, not on {device.type}"
        if missing := missing_gpu(device):
            return f"needs {missing}"
        nvidia = device.type == CUDA and torch.version.cuda is not None
        return _capability_short_of(device, capability) if nvidia else None

    return lack


def _capability_short_of(device: torch.device, least: tuple[int, int]) -> str | None:
    """The capability of NVIDIA's GPU beside the least one, where it has less."""
    present = torch.cuda.get_device_capability(device)
    message = "needs compute capability {}.{}, {} has {}.{}".format(*least, device, *present)
    return message if present < least else None


def divides(number: int, axis: int, *, where: str = "") -> Requirement:
    """The requirement that `number` divides out_features, axis 0, or in_features, axis 1."""
    features = ("out_features", "in_features")[axis]
    words = f"needs {features} that {number} divides{where}, not {{c.shape[{axis}]}}"
    return requirement(words, lambda c: c.shape[axis] % number == 0)


def sums_in_int32(most: int) -> Requirement:
    """The requirement of at most `most` input features where inputs are int8 too."""
    words = f"sums in int32, which holds {most} input features, not {{c.shape[1]}}"
    return requirement(words, lambda c: not is_int(c.scheme.input, 8) or c.shape[1] <= most)


def weights_per(*granularities: str) -> Requirement:
    """The requirement of weights with one of these granularities."""
    words = " or ".join(granularities).replace("_", " ")
    return requirement(
        f"needs weights {words}, {{c.stored}}", lambda c: c.weights.granularity in granularities
    )


def is_int(tensor: TensorScheme | None, *bits: int) -> bool:
    """Whether a tensor is quantized to integers of one of these widths.

    Its zero points, if it has any, are integers too.
    """
    return (
        tensor is not None
        and tensor.kind == "int"
        and tensor.num_bits in bits
        and not tensor.minima
    )


def is_e4m3(tensor: TensorScheme | None) -> TypeGuard[TensorScheme]:
    """Whether a tensor is quantized to e4m3fn codes, with scales that are floats."""
    if tensor is None or tensor.kind != "float" or tensor.scale_format != "float":
        return False
    return FLAVOURS[tensor.float8].dtype == torch.float8_e4m3fn


def is_e2m1(tensor: TensorScheme) -> bool:
    """Whether a tensor is quantized to e2m1, floats of 4 bits."""
    return tensor.kind == "float" and tensor.float8 == FLOAT4


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
    if tensor.rounds_at_run_time:
        scales = " with scales that are rounded up to powers of two"
    return f"{kind} {tensor.granularity.replace('_', ' ')}{scales}"


INT8_WEIGHTS = requirement(
    "needs symmetric int8 weights, {c.stored}",
    lambda c: is_int(c.weights, 8) and c.weights.symmetric,
)
INT8_INPUTS = requirement("needs int8 inputs, {c.taken}", lambda c: is_int(c.scheme.input, 8))
E4M3_WEIGHTS = requirement("needs e4m3fn weights, {c.stored}", lambda c: is_e4m3(c.weights))
INPUTS_AS_THEY_ARE = requirement(
    "needs inputs in the model's dtype, {c.taken}", lambda c: c.scheme.input is None
)
FLOATS = requirement(
    "needs float32 or bfloat16 inputs, not {c.dtype}",
    lambda c: c.dtype in (torch.float32, torch.bfloat16),
)
BFLOAT16 = requirement(
    "needs bfloat16 inputs on {c.device.type}, not {c.dtype}", lambda c: c.dtype == torch.bfloat16
)


def keep(linear: QuantizedLinear, dtype: torch.dtype) -> QuantizedLinear:
    """The linear itself, for a backend that multiplies qvalues and rescales in float32."""
    del dtype
    return linear


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend.

    Attributes:
        name: key in `quantflow.backends.BACKENDS`.
        prepare: (linear, dtype of the inputs) -> the weight in the kernel's own layout, a record.
        linear: (x [..., in_features], the prepared weight, bias [out_features] or None) -> [...,
            out_features] in x's dtype.
        requirements: of a linear; the first that is not met is the reason why it cannot run.
        round_input: (x, the prepared weight) -> x in the form that the product takes, such as codes
            and scales. It depends on x and on the quantization of inputs alone, so linears of one
            input may share it: `linear` takes it as a fourth argument. None: the product takes x.
        prepare_packed: (linears whose rows stand below each other, dtype of the inputs) -> what
            `prepare` makes of them, from packed codes. None: `prepare` alone.
    """

    name: str
    prepare: Callable[[QuantizedLinear, torch.dtype], Any]
    linear: Callable[..., Tensor]
    requirements: tuple[Requirement, ...] = ()
    round_input: Callable[[Tensor, Any], Any] | None = None
    prepare_packed: Callable[[Sequence[PackedLinear], torch.dtype], Any] | None = None

    def why_not(self, case: Case) -> str | None:
        """Why the backend cannot run a linear, in a sentence; None when it can."""
        return next(
            (
                f"{self.name} {reason}"
                for lack in self.requirements
                if (reason := lack(case)) is not None
            ),
            None,
        )
