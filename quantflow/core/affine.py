"""The equation, both ways:  real = scale * (qvalue - zero_point).

`scale` is the step, in units of the real tensor, float32, positive, never its inverse. The scale of
a symmetric integer weight may be negative; its qvalues then have the sign of -real. `zero_point` is
an integer in the range of qvalue, or None when symmetric. Rounding is half to even. Everything
broadcasts; nothing here knows about groups or layers.

The symmetric integer rule is compressed-tensors': scale = amax / 127.5 (int8), amax / 7.5 (int4),
amax / 3.5 (int3) or amax / 1.5 (int2), clamped to -128..127, -8..7, -4..3 or -2..1. A float8 scale
is amax / largest. A range of zero (an all-zero group, an unseen input) has scale 1: any positive
scale reproduces it, and 1 is readable. Where zero is no point, as in IQ4_NL, such a group has the
smallest scale.

A scale in e8m0 is the power of two that OCP's rule gives: 2^(floor(log2 amax) - floor(log2
largest)). amax is rounded to one bit of mantissa before, so that e2m1's largest value, 6, clips
only values that round to 6 anyway (up to 7). Source: compressed-tensors 0.20,
`quantization/utils/mxfp_utils.py`, which is vLLM's rule; Rouhani et al. 2023, arXiv:2310.10537.
Scales in e4m3 are divided by a global scale, which puts the largest of them in the top binade of
e4m3. Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1.
"""

import math

import torch
from torch import Tensor

from quantflow.core import blocks, device_scales, float8
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

_SMALLEST_E4M3 = 2.0**-9


def half_range(scheme: TensorScheme) -> float:
    """The qvalue, before rounding, to which a symmetric scale maps the largest magnitude."""
    return (
        float8.FLAVOURS[scheme.float8].largest
        if scheme.kind == "float"
        else (scheme.qmax - scheme.qmin) / 2
    )


def scale_from_amax(amax: Tensor, scheme: TensorScheme) -> Tensor:
    """The symmetric scale for a largest magnitude, same shape, float32, positive; NaN stays NaN.

    With `scale_rounding` pow2 it is the smallest power of two that is not below that scale. With a
    `scale_rule` the rule sets it.

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
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()).where(
        scale.isfinite(), scale
    )


def _power_of_two(amax: Tensor, scheme: TensorScheme) -> Tensor:
    mantissa, exponent = torch.frexp(amax)  # mantissa in [0.5, 1)
    reach = math.frexp(half_range(scheme))[1]
    exponent = (exponent + (mantissa >= 0.875).int() - reach).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where(amax <= 0, torch.ones_like(amax), scale.where(amax.isfinite(), amax))


def global_scale_from_amax(amax: Tensor, scheme: TensorScheme) -> Tensor:
    """The global scale of a tensor, [1] float32: the factor of its groups' scales in e4m3.

    It is a power of two, so products and quotients with it are exact: the largest one by which the
    scale of a group that reaches amax stays within e4m3. It is 1 for a tensor of zeros.

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
    """Scales of groups as e4m3 codes, to nearest and never zero.

    Args:
        scale: float32, any shape.
        global_scale: [1].
    """
    return float8.cast((scale * global_scale).clamp_min(_SMALLEST_E4M3), "e4m3fn")


def scale_and_zero_point_from_range(
    min_val: Tensor, max_val: Tensor, scheme: TensorScheme
) -> tuple[Tensor, Tensor]:
    """The asymmetric scale and zero point of a range widened to hold zero, of the range's shape.

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
    """The zero point that maps `min_val` (at most zero) to qmin; int8, the shape of `scale`.

    Where the scheme has minima it is the float32 that maps the minimum, as its block stores that,
    to 0; both are [O, G] then.
    """
    if scheme.minima and scheme.block is not None:
        return blocks.stored_minima(-min_val, scheme.block) / scale
    return (scheme.qmin - min_val / scale).round().clamp(scheme.qmin, scheme.qmax).to(torch.int8)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it reads back after being stored in `dtype`; float32, its sign kept.

    A layout stores its scales in a dtype of its own, and qvalues are chosen with the scale that a
    loader will see. A scale that would be stored as zero becomes the dtype's smallest value of its
    sign. One too large for the dtype becomes Inf, which `QTensor.validate` refuses.
    """
    # subnormal; `tiny` is the smallest normal number
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return scale.abs().to(dtype).float().clamp_min(smallest).copysign(scale)


def stored_scale(
    scale: Tensor, scheme: TensorScheme, dtype: torch.dtype, *, global_scale: Tensor | None = None
) -> Tensor:
    """The scales of a weight as they read back from the layout's dtype, or from its blocks.

    Args:
        scale: [O, G] float32; whole rows, since the scales of a block depend on each other.
        scheme: scheme of the weight; with scale_format e8m0 the nearest powers of two are returned.
        dtype: dtype in which the layout stores scales.
        global_scale: [1], beside scales in e4m3.
    """
    if scheme.scale_format == "e8m0":
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
        exponent = (exponent - (mantissa < math.sqrt(0.5)).int()).clamp(-127, 127)
        return torch.ldexp(torch.ones_like(scale), exponent).where(scale.isfinite(), scale)
    if scheme.scale_format == "e4m3":
        assert global_scale is not None  # every grid of such a scheme has it
        return float8.widen(local_scales(scale, global_scale)) / global_scale
    return stored(scale, dtype) if scheme.block is None else blocks.stored(scale, scheme.block)


def moved_zero_point(zero_point: Tensor, scale: Tensor, scheme: TensorScheme) -> Tensor:
    """The zero points of a weight whose scales have become `scale`, both [O, G].

    Integers stay as they are. A minimum grows and shrinks with its scale, and is then rounded to a
    value that its block can hold.
    """
    if not scheme.minima or scheme.block is None:
        return zero_point
    return blocks.stored_minima(scale * zero_point, scheme.block) / scale


def is_scale(scale: Tensor, scheme: TensorScheme) -> Tensor:
    """Whether each scale of a weight is valid, bool of its shape.

    A valid scale is finite and positive; that of symmetric integers may have either sign.
    """
    size = scale.abs() if scheme.kind == "int" and scheme.symmetric else scale
    return torch.isfinite(scale) & (size > 0)


def sign_of_scales(scheme: TensorScheme) -> str:
    """The condition of `is_scale` on the sign, in words."""
    return "not zero" if scheme.kind == "int" and scheme.symmetric else "positive"


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: TensorScheme,
    *,
    importance: Tensor | None = None,
) -> Tensor:
    """The qvalues of `x`: int8 (of fewer bits too) or the flavour's float8 dtype, saturating.

    NaN stays NaN in float8. Integers have no code for it, so a caller that quantizes to int refuses
    NaN first.

    Args:
        x: float, any shape.
        scale: float32, broadcastable against x.
        zero_point: int8, of scale's shape, or None.
        scheme: its kind, num_bits and float8 are read.
        importance: as in `round_`.
    """
    scaled = x.float() / scale
    if scheme.kind == "float":
        return float8.cast_(scaled, scheme.float8)
    return round_(scaled, zero_point, scheme, importance=importance).to(torch.int8)


def round_(
    scaled: Tensor,
    zero_point: Tensor | None,
    scheme: TensorScheme,
    *,
    importance: Tensor | None = None,
) -> Tensor:
    """Replace x / scale by the qvalue of x, as a float32; return it.

    The part of `quantize` that an algorithm may do in memory of its own, to the same bits.

    Args:
        scaled: x / scale, float32.
        zero_point: any dtype that holds its integers, broadcastable against scaled, or None.
        scheme: its kind, num_bits and float8 are read.
        importance: importance of each value, broadcastable against scaled; it matters to the
            entries of a codebook alone. None counts all values alike.
    """
    if scheme.kind == "float":
        return float8.round_(scaled, scheme.float8)
    if scheme.block is not None and scheme.block.points:
        return blocks.round_(scaled, scheme.block, importance)
    if zero_point is not None:
        scaled += zero_point
    return scaled.round_().clamp_(scheme.qmin, scheme.qmax)


def dequantize(qvalue: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The real values scale * (qvalue - zero_point), float32."""
    real = float8.widen(qvalue) if zero_point is None else qvalue - zero_point.float()
    return real * scale


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: TensorScheme
) -> Tensor:
    """`x` after quantize and dequantize, in x's dtype; NaN stays NaN, so that it is noticed."""
    rounded = dequantize(quantize(x, scale, zero_point, scheme), scale, zero_point).to(x.dtype)
    return torch.where(x.isnan(), x, rounded)


def fake_quantize_per_token(x: Tensor, scheme: TensorScheme) -> Tensor:
    """Each row of `x` [..., features], fake-quantized with a symmetric scale of its own."""
    return fake_quantize(x, scale_per_token(x, scheme), None, scheme)


def scale_per_token(x: Tensor, scheme: TensorScheme) -> Tensor:
    """The symmetric scale of each row of `x` [..., features], [..., 1] float32."""
    return scale_from_amax(x.abs().amax(dim=-1, keepdim=True), scheme)


def fake_quantize_input(
    x: Tensor, scheme: TensorScheme | None, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """The input of a linear as the quantized linear sees it, in x's dtype.

    Args:
        x: [..., features].
        scheme: scheme of the input; None leaves it as it is.
        scale: [1], scale of a static input; the global scale where scales are e4m3; else None.
        zero_point: [1], zero point of a static asymmetric input; else None.
    """
    if scheme is None:
        return x
    if scheme.dynamic and scheme.group_size is not None:
        # [..., G, g]
        split = x.reshape(*x.shape[:-1], x.shape[-1] // scheme.group_size, scheme.group_size)
        of_groups = scale_per_token(split, scheme)
        if scheme.scale_format == "e4m3":
            assert scale is not None  # QuantizedLinear refuses such an input without it
            local = float8.widen(float8.cast(of_groups * scale, "e4m3fn"))
            # A group whose scale rounds to zero becomes zeros, as on hardware: any scale of at
            # least this size does that.
            of_groups = local.masked_fill(local == 0, 0.125) / scale
        return fake_quantize(split, of_groups, None, scheme).flatten(-2)
    if scheme.dynamic:
        return fake_quantize_per_token(x, scheme)
    assert scale is not None  # QuantizedLinear refuses a static input without it
    return fake_quantize(x, scale, zero_point, scheme)
