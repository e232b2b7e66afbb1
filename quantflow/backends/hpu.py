"""Gaudi: float8 weights and float8 inputs, multiplied on the device with the scales that were measured.

    y = (q_x @ q_w.T) * scale_x * scale_w,    q_x = cast(x / scale_x)

Everything here was written from the published signatures of Gaudi's PyTorch bridge and tested against a stand-in for it;
docs/gaudi.md says, line by line, what was never run on the device. `habana_frameworks` is looked for, never required.
Source: neural_compressor's and vllm-hpu-extension's calls of `torch.ops.hpu`, for names and arguments.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.core.backend import BFLOAT16, E4M3_WEIGHTS, Backend, Case, is_e4m3, need, on, weights_per
from quantflow.core.float8 import FLAVOURS
from quantflow.core.qtensor import QuantizedLinear
from quantflow.errors import UnsupportedError

NAME = "hpu"
PACKAGE = "habana_frameworks"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight as the device multiplies it.

    Attributes:
        weight: [O, I], codes of e4m3fn.
        weight_scale: [1] or [O], in the dtype of the inputs' scales, float32.
        input_scale: [1] float32.
        input_inverse: [1] float32, 1 / input_scale: what the cast multiplies by.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_inverse: Tensor


def missing_here() -> str | None:
    """Return what this machine lacks to run on Gaudi, in words, or None."""
    if find_spec(PACKAGE) is None:
        return f"the package {PACKAGE}, which comes with Gaudi's software and is not installed"
    try:
        available = bool(_habana("hpu").is_available())
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"{PACKAGE} in working order; importing it failed: {error}"
    return None if available else f"a Gaudi device; {PACKAGE} finds none"


def require() -> None:
    """Load Gaudi's bridge, which makes torch know the device.

    Raises:
        UnsupportedError: saying what is missing.
    """
    missing = missing_here()
    if missing is not None:
        raise UnsupportedError(f"device hpu: needs {missing}", "use device cpu, or a machine with Gaudi's software")


def device_name() -> str:
    """Return the generation as the bridge names it: GAUDI2, GAUDI3."""
    return str(_habana("hpu").get_device_name()).upper()


def wrap_in_graph(model: nn.Module) -> nn.Module:
    """Return the model on its way through Gaudi's graphs: each shape of inputs is compiled once and replayed."""
    wrapped: nn.Module = _habana("hpu").wrap_in_hpu_graph(model)
    return wrapped


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Keep the codes and the scales that were measured; `dtype` is not needed, scales are float32."""
    assert linear.input_scale is not None  # why_not refuses such a scheme
    return Prepared(
        weight=linear.weight.qvalue.contiguous(),
        weight_scale=linear.weight.scale.reshape(-1),
        input_scale=linear.input_scale,
        input_inverse=1.0 / linear.input_scale,
    )


def _linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] bfloat16; returns [..., O]."""
    rows = x.reshape(-1, x.shape[-1])  # [M, I]
    operators: Any = torch.ops.hpu
    codes, _ = operators.cast_to_fp8_v2(rows, prepared.input_inverse, False, False, torch.float8_e4m3fn)
    result: Tensor = operators.fp8_gemm_v2(
        A=codes,
        trans_A=False,
        B=prepared.weight,
        trans_B=True,
        D=None,
        out_dtype=x.dtype,
        A_scale_inv=prepared.input_scale,  # the bridge calls the step an inverse: it undoes the cast
        B_scale_inv=prepared.weight_scale,
        bias=bias,
        accumulate=False,
    )
    return result.reshape(*x.shape[:-1], prepared.weight.shape[0])  # [..., O]


def _habana(part: str) -> Any:
    """Return a part of habana_frameworks.torch; importing it registers the device."""
    return getattr(import_module(f"{PACKAGE}.torch"), part)


def _absent(case: Case) -> str | None:
    missing = missing_here()
    return None if missing is None else f"{case.name} needs {missing}"


def _static(case: Case) -> bool:
    inputs = case.scheme.input
    return inputs is not None and is_e4m3(inputs) and not inputs.dynamic


def _too_large(case: Case) -> str | None:
    """Return why the device does not hold codes of this flavour: the second generation's end at 240."""
    flavour, name = case.scheme.weights.float8, device_name()
    largest, held = FLAVOURS[flavour].largest, FLAVOURS["gaudi2" if name.startswith("GAUDI2") else "e4m3fn"].largest
    reach = f"weights in {flavour} reach {largest:g}, {name} holds {held:g}; quantize with float8 gaudi2"
    return f"{case.name}: {reach}" if largest > held else None


BACKEND = Backend(
    name=NAME,
    needs=(
        on(NAME),
        _absent,
        E4M3_WEIGHTS,
        weights_per("per_tensor", "per_channel"),
        need("needs a measured float8 input scale, {c.inputs}", _static),
        BFLOAT16,
        _too_large,
    ),
    prepare=_prepare,
    linear=_linear,
)
