"""The equation, both ways:  real = scale * (qvalue - zero_point).

`scale` is the step, in units of the real tensor, float32, positive, never its inverse; that of a
symmetric integer weight may be negative, and its qvalues then have the sign of -real. `zero_point`
is an integer in the range of qvalue, or None when symmetric. Rounding is half to even. Everything
broadcasts; nothing here knows about groups or layers.

The symmetric integer rule is compressed-tensors': scale = amax / 127.5 (int8), amax / 7.5 (int4),
amax / 3.5 (int3) or amax / 1.5 (int2), clamped to -128..127, -8..7, -4..3 or -2..1. A float8 scale
is amax / largest. A range of zero (an all-zero group, an unseen input) has scale 1: any positive
scale reproduces it, and 1 is readable. Where zero is no point, as in IQ4_NL, such a group has the
smallest scale.

A scale in e8m0 is the power of two that OCP's rule gives: 2^(floor(log2 amax) - floor(log2
largest)). amax is rounded to one bit of mantissa before, so that e2m1's largest, 6, cuts what
rounds to 6 anyway (up to 7). Source: compressed-tensors 0.20, `quantization/utils/mxfp_utils.py`,
which is vLLM's rule; Rouhani et al. 2023, arXiv:2310.10537. Scales in e4m3 are divided by a
global_scale, which puts the largest of them in the top binade of e4m3. Source: Jacob et al. 2018,
arXiv:1712.05877, section 2.1.
"""

import math

import torch
from torch import Tensor

from quantflow.core import blocks, device_scales, float8
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

_SMALLEST_E4M3 = 2.0**-9


def half_range(scheme: TensorScheme) -> float:
    """Return what a symmetric scale maps the largest magnitude to."""
    return (
        float8.FLAVOURS[scheme.float8].largest
        if scheme.kind == "float"
        else (scheme.qmax - scheme.qmin) / 2
    )


def scale_from_amax(amax: Tensor, scheme: TensorScheme) -> Tensor:
    """Return the symmetric scale for a largest magnitude, same shape, float32, positive; NaN stays NaN.

    With `scale_rounding` pow2 it is the smallest power of two that is not below that. With a
    `scale_rule` it is what that says.

    Raises:
        StatisticsError: amax is NaN, infinite or negative, and the scheme has a rule.
        SchemeError: the rule searches.
    """
    amax = amax.float()
    if scheme.scale_rule is not None:
        target = device_scales.target_of(scheme.float8)
        return device_scales.scale_from_amax(
            amax, scheme.scale_rule, target=target, arithmetic=scheme.scale_arithmetic
        )
    if scheme.scale_format == "e8m0":
        return _power_of_two(amax, scheme)
    smallest = torch.finfo(torch.float32).tiny
    of_zeros = smallest if scheme.block is not None and scheme.block.points else 1.0
    scale = torch.where(amax <= 0, of_zeros, (amax / half_range(scheme)).clamp_min(smallest))
    if scheme.scale_rounding == "none":
        return scale
    mantissa, exponent = torch.frexp(scale)  # of [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()).where(
        scale.isfinite(), scale
    )


def _power_of_two(amax: Tensor, scheme: TensorScheme) -> Tensor:
    mantissa, exponent = torch.frexp(amax)  # of [0.5, 1)
    reach = math.frexp(half_range(scheme))[1]
    exponent = (exponent + (mantissa >= 0.875).int() - reach).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where(amax <= 0, torch.ones_like(amax), scale.where(amax.isfinite(), amax))


def global_scale_from_amax(amax: Tensor, scheme: TensorScheme) -> Tensor:
    """Return the global_scale of a tensor, [1] float32: what the scales of its groups are multiplied with to be stored in e4m3.

    A power of two, the largest by which the scale of a group that reaches amax stays within e4m3:
    products and quotients with it are exact. 1 for a tensor of zeros.

    Args:
        amax: [], the tensor's largest magnitude.
        scheme: with scale_format e4m3.
    """
    mantissa, exponent = torch.frexp(
        float8.FLAVOURS["e4m3fn"].largest * half_range(scheme) / amax.double().reshape(1)
    )
    power = torch.ldexp(torch.ones_like(mantissa), (exponent - 1).clamp(-126, 126)).float()
    return torch.where(amax.reshape(1) <= 0, torch.ones_like(power), power)


def local_scales(scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return scales of groups as e4m3 codes, to nearest and never zero.  scale: float32, any shape; global_scale: [1]."""
    return float8.cast((scale * global_scale).clamp_min(_SMALLEST_E4M3), "e4m3fn")


def scale_and_zero_point_from_range(
    min_val: Tensor, max_val: Tensor, scheme: TensorScheme
) -> tuple[Tensor, Tensor]:
    """Return the asymmetric (scale, zero_point) for a range, each of its shape; the range is widened to hold zero.

    Raises:
        SchemeError: the scheme is symmetric or not int.
    """
    if scheme.symmetric or scheme.kind != "int":
        raise SchemeError(
            f"a range with symmetric={scheme.symmetric}, kind={scheme.kind!r}",
            "use scale_from_amax",
        )
    low, high = min_val.float().clamp_max(0), max_val.float().clamp_min(0)
    width = high - low
    scale = torch.where(width <= 0, torch.ones_like(width), width / (scheme.qmax - scheme.qmin))
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return scale, zero_point_for(low, scale, scheme)


def zero_point_for(min_val: Tensor, scale: Tensor, scheme: TensorScheme) -> Tensor:
    """Return the zero_point that maps `min_val` (at most zero) to qmin; int8, the shape of `scale`.

    Where the scheme has minima it is the float32 that maps the minimum to 0, as its block stores
    that; both are [O, G] then.
    """
    if scheme.minima and scheme.block is not None:
        return blocks.stored_minima(-min_val, scheme.block) / scale
    return (scheme.qmin - min_val / scale).round().clamp(scheme.qmin, scheme.qmax).to(torch.int8)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `scale` as it reads back after being stored in `dtype`; float32, its sign kept.

    A layout stores its scales in a dtype of its own; qvalues are chosen with the scale that a
    loader will see. A scale that would be stored as zero becomes the dtype's smallest value of its
    sign. One too large for the dtype becomes Inf, which `QTensor.validate` refuses.
    """
    # subnormal; `tiny` is the smallest normal number
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return scale.abs().to(dtype).float().clamp_min(smallest).copysign(scale)


def stored_scale(
    scale: Tensor, scheme: TensorScheme, dtype: torch.dtype, *, global_scale: Tensor | None = None
) -> Tensor:
    """Return the scales of a weight as they read back: `stored` in the layout's dtype, or such as a block can have.

    Args:
        scale: [O, G] float32; whole rows, since the scales of a block depend on each other.
        scheme: of the weight; with scale_format e8m0 the nearest powers of two are returned.
        dtype: in which the layout stores scales.
        global_scale: [1], beside scales in e4m3.
    """
    if scheme.scale_format == "e8m0":
        mantissa, exponent = torch.frexp(scale)  # of [0.5, 1)
        exponent = (exponent - (mantissa < math.sqrt(0.5)).int()).clamp(-127, 127)
        return torch.ldexp(torch.ones_like(scale), exponent).where(scale.isfinite(), scale)
    if scheme.scale_format == "e4m3":
        assert global_scale is not None  # every grid of such a scheme has it
        return float8.widen(local_scales(scale, global_scale)) / global_scale
    return stored(scale, dtype) if scheme.block is None else blocks.stored(scale, scheme.block)


def moved_zero_point(zero_point: Tensor, scale: Tensor, scheme: TensorScheme) -> Tensor:
    """Return the zero points of a weight whose scales have become `scale`, both [O, G].

    Integers stay as they are. A minimum grows and shrinks with its scale, and is then stored as its
    block stores it.
    """
    if not scheme.minima or scheme.block is None:
        return zero_point
    return blocks.stored_minima(scale * zero_point, scheme.block) / scale


def is_scale(scale: Tensor, scheme: TensorScheme) -> Tensor:
    """Return where the scale of a weight is one: finite and positive, or, of symmetric integers, of either sign; bool."""
    size = scale.abs() if scheme.kind == "int" and scheme.symmetric else scale
    return torch.isfinite(scale) & (size > 0)


def sign_of_scales(scheme: TensorScheme) -> str:
    """Return in words what `is_scale` asks of the sign."""
    return "not zero" if scheme.kind == "int" and scheme.symmetric else "positive"


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: TensorScheme) -> Tensor:
    """Return the qvalues of `x`: int8 (of fewer bits too) or the flavour's float8 dtype, saturating.

    NaN stays NaN in float8; integers have no code for it, so whoever quantizes to int refuses NaN
    first.

    Args:
        x: float, any shape.
        scale: float32, broadcastable against x.
        zero_point: int8, of scale's shape, or None.
        scheme: its kind, num_bits and float8 are read.
    """
    scaled = x.float() / scale
    if scheme.kind == "float":
        return float8.cast_(scaled, scheme.float8)
    return round_(scaled, zero_point, scheme).to(torch.int8)


def round_(scaled: Tensor, zero_point: Tensor | None, scheme: TensorScheme) -> Tensor:
    """Replace x / scale by the qvalue of x, as a float32; return it.

    The part of `quantize` that an algorithm may do in memory of its own, to the same bits.

    Args:
        scaled: x / scale, float32.
        zero_point: any dtype that holds its integers, broadcastable against scaled, or None.
        scheme: its kind, num_bits and float8 are read.
    """
    if scheme.kind == "float":
        return float8.round_(scaled, scheme.float8)
    if scheme.block is not None and scheme.block.points:
        return blocks.round_(scaled, scheme.block)
    if zero_point is not None:
        scaled += zero_point
    return scaled.round_().clamp_(scheme.qmin, scheme.qmax)


def dequantize(qvalue: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return scale * (qvalue - zero_point), float32."""
    real = float8.widen(qvalue) if zero_point is None else qvalue - zero_point.float()
    return real * scale


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: TensorScheme
) -> Tensor:
    """Return what is left of `x` after quantize and dequantize, in x's dtype; NaN stays NaN, so that it is noticed."""
    rounded = dequantize(quantize(x, scale, zero_point, scheme), scale, zero_point).to(x.dtype)
    return torch.where(x.isnan(), x, rounded)


def fake_quantize_per_token(x: Tensor, scheme: TensorScheme) -> Tensor:
    """Fake-quantize each row of `x` with a symmetric scale of its own.  x: [..., features]."""
    return fake_quantize(x, scale_per_token(x, scheme), None, scheme)


def scale_per_token(x: Tensor, scheme: TensorScheme) -> Tensor:
    """Return the symmetric scale of each row of `x`, [..., 1] float32.  x: [..., features]."""
    return scale_from_amax(x.abs().amax(dim=-1, keepdim=True), scheme)


def fake_quantize_input(
    x: Tensor, scheme: TensorScheme | None, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """Return the input of a linear as the quantized linear sees it, in x's dtype.

    Args:
        x: [..., features].
        scheme: of the input; None leaves it as it is.
        scale: [1], of a static input; the global_scale of one whose scales are e4m3.
        zero_point: [1], of a static asymmetric input.
    """
    if scheme is None:
        return x
    if scheme.dynamic and scheme.group_size is not None:
        # [..., G, g]
        split = x.reshape(*x.shape[:-1], x.shape[-1] // scheme.group_size, scheme.group_size)
        of_groups = scale_per_token(split, scheme)
        if scheme.scale_format == "e4m3":
            assert scale is not None  # its global_scale, likewise
            local = float8.widen(float8.cast(of_groups * scale, "e4m3fn"))
            # A group whose scale rounds to zero becomes zeros, as on hardware: any scale as large
            # as this makes them.
            of_groups = local.masked_fill(local == 0, 0.125) / scale
        return fake_quantize(split, of_groups, None, scheme).flatten(-2)
    if scheme.dynamic:
        return fake_quantize_per_token(x, scheme)
    assert scale is not None  # QuantizedLinear refuses a static input without it
    return fake_quantize(x, scale, zero_point, scheme)
