"""Gaudi: float8 weights and float8 inputs, multiplied on the device with measured scales.

    y = (q_x @ q_w.T) * scale_x * scale_w,    q_x = cast(x / scale_x)

Everything here was written from the published signatures of Gaudi's PyTorch bridge and tested
against a stand-in for it; docs/gaudi.md says, line by line, what was never run on the device.
`habana_frameworks` is looked for, never required. Source: neural_compressor's and
vllm-hpu-extension's calls of `torch.ops.hpu`, for names and arguments.
"""

from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.backends.backend import (
    BFLOAT16,
    E4M3_WEIGHTS,
    Backend,
    Case,
    is_e4m3,
    on,
    requirement,
    weights_per,
)
from quantflow.core.float8 import FLAVOURS
from quantflow.core.qtensor import QuantizedLinear

NAME = "hpu"
PACKAGE = "habana_frameworks"
_ROWS_BY_ROWS = MappingProxyType(
    {"trans_A": False, "trans_B": True, "D": None, "accumulate": False}
)


def missing_here() -> str | None:
    """What this machine lacks to run on Gaudi, in words; None when nothing is missing.

    Asking makes torch know the device.
    """
    if find_spec(PACKAGE) is None:
        return f"the package {PACKAGE}, which comes with Gaudi's software and is not installed"
    try:
        available = bool(_habana("hpu").is_available())
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"{PACKAGE} in working order; importing it failed: {error}"
    return None if available else f"a Gaudi device; {PACKAGE} finds none"


def wrap_in_graph(model: nn.Module) -> None:
    """Send a model's forward through Gaudi's graphs.

    Each shape of inputs is compiled once and replayed.
    """
    _habana("hpu").wrap_in_hpu_graph(model)


def compile_(model: nn.Module) -> None:
    """Have torch.compile compile a model's forward for eager mode when it runs first."""
    model.forward = torch.compile(
        model.forward, dynamic=False, backend="hpu_backend", options={"keep_input_mutations": True}
    )


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    fast_softmax: bool,
    recompute: bool,
) -> Tensor:
    """Gaudi's attention in one kernel, FusedSDPA.

    Args:
        query: [B, heads, T, D].
        key: [B, heads, columns, D].
        value: as `key`.
        mask: which columns are attended to, broadcast to [B, heads, T, columns]; None: all.
        causal: each token attends to those before it; without a mask.
        scale: factor of the scores; None: 1 / sqrt(D).
        fast_softmax: the kernel's faster softmax.
        recompute: the softmax is not kept.

    Returns:
        [B, heads, T, D].
    """
    kernels = import_module(f"{PACKAGE}.torch.hpex.kernels")
    mode = "fast" if fast_softmax else "None"
    result: Tensor = kernels.FusedSDPA.apply(
        query, key, value, mask, 0.0, causal, scale, mode, recompute
    )
    return result


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> tuple[QuantizedLinear, Tensor]:
    """The linear, and the factor that the cast multiplies its inputs by, [1]."""
    del dtype
    assert linear.input_scale is not None  # a requirement refuses such a scheme
    return linear, 1.0 / linear.input_scale


def _linear(x: Tensor, prepared: tuple[QuantizedLinear, Tensor], bias: Tensor | None) -> Tensor:
    """The product x @ W.T + bias. x: [..., I] bfloat16; returns [..., O]."""
    (linear, factor), operators = prepared, torch.ops.hpu
    # [M, I]
    codes, _ = operators.cast_to_fp8_v2(
        x.reshape(-1, x.shape[-1]), factor, False, False, torch.float8_e4m3fn
    )
    # the operator takes the scales as keywords alone; A_scale_inv is the scale itself, the inverse
    # of the factor above
    steps = {"A_scale_inv": linear.input_scale, "B_scale_inv": linear.weight.scale.reshape(-1)}
    result: Tensor = operators.fp8_gemm_v2(
        A=codes, B=linear.weight.qvalue, out_dtype=x.dtype, bias=bias, **steps, **_ROWS_BY_ROWS
    )
    return result.reshape(*x.shape[:-1], result.shape[1])  # [..., O]


def _habana(part: str) -> Any:
    """A part of habana_frameworks.torch; importing it registers the device."""
    return getattr(import_module(f"{PACKAGE}.torch"), part)


def _too_large(case: Case) -> str | None:
    """Why the device cannot hold codes of this flavour: the second generation's end at 240."""
    flavour = case.weights.float8
    name = str(_habana("hpu").get_device_name()).upper()  # GAUDI2, GAUDI3
    largest = FLAVOURS[flavour].largest
    held = FLAVOURS["gaudi2" if name.startswith("GAUDI2") else "e4m3fn"].largest
    if largest <= held:
        return None
    return (
        f"holds {held:g} on {name}, weights in {flavour} reach {largest:g}; "
        "quantize with float8 gaudi2"
    )


_REQUIREMENTS = (
    on(NAME),
    lambda _: None if (missing := missing_here()) is None else f"needs {missing}",
    E4M3_WEIGHTS,
    weights_per("per_tensor", "per_channel"),
    requirement(
        "needs a measured e4m3fn input scale, {c.taken}",
        lambda c: is_e4m3(c.scheme.input) and not c.scheme.input.dynamic,
    ),
    BFLOAT16,
    _too_large,
)
BACKEND = Backend(name=NAME, requirements=_REQUIREMENTS, prepare=_prepare, linear=_linear)
