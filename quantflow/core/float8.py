"""Float8 and float4: the named flavours, and a cast that saturates on every machine.

| flavour  | exponent, mantissa | largest | infinities | codes for NaN | used by                   |
|----------|--------------------|---------|------------|---------------|---------------------------|
| e4m3fn   | 4, 3, bias 7       | 448     | none       | 0x7f, 0xff    | NVIDIA, Gaudi3, OCP       |
| e5m2     | 5, 2, bias 15      | 57344   | yes        | 6             | gradients, wide ranges    |
| e4m3fnuz | 4, 3, bias 8       | 240     | none       | 0x80          | AMD MI300                 |
| gaudi2   | e4m3fn's codes     | 240     | not used   | 0x7f, 0xff    | Gaudi2: top binade unused |
| e2m1     | 2, 1, bias 1       | 6       | none       | none          | NVFP4, MXFP4              |

The 15 values of e2m1 are values of e4m3fn too, and are held as such in memory;
`quantflow.core.microscaling` packs them.

Source: Micikevicius et al. 2022, arXiv:2209.05433; Noune et al. 2022, arXiv:2206.02915 (fnuz).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flavour:
    """A float format: its torch dtype, its largest finite value, and the spacing of its values."""

    dtype: torch.dtype
    largest: float
    tiny: float  # the smallest normal number
    eps: float  # distance of 1 and the next value

    @classmethod
    def of(cls, dtype: torch.dtype, largest: float) -> "Flavour":
        """The flavour that has all codes of a torch dtype up to its largest value."""
        return cls(dtype, largest, torch.finfo(dtype).tiny, torch.finfo(dtype).eps)


FLAVOURS = {
    "e4m3fn": Flavour.of(torch.float8_e4m3fn, 448.0),
    "e5m2": Flavour.of(torch.float8_e5m2, 57344.0),
    "e4m3fnuz": Flavour.of(torch.float8_e4m3fnuz, 240.0),
    "gaudi2": Flavour.of(torch.float8_e4m3fn, 240.0),
    "e2m1": Flavour(torch.float8_e4m3fn, 6.0, tiny=1.0, eps=0.5),
}


_EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent


def cast(x: Tensor, flavour: str) -> Tensor:
    """`x` rounded to the nearest float8 value, ties to even mantissa.

    Args:
        x: any shape, float32.
        flavour: a key of FLAVOURS.

    Returns:
        Same shape, the flavour's dtype. Values beyond the largest, infinities included, saturate;
        NaN stays NaN. torch's own cast saturates on some machines and not on others, so the clamp
        is ours.
    """
    return cast_(x.clone(), flavour)


def cast_(x: Tensor, flavour: str) -> Tensor:
    """The result of `cast`, in another tensor; `x` is overwritten with saturated values.

    The caller no longer needs `x`, whose memory serves as scratch.
    """
    kind = FLAVOURS[flavour]
    # a finer dtype than the flavour: its own cast would give values that are none of the flavour's
    if kind.eps != torch.finfo(kind.dtype).eps:
        return round_(x, flavour).to(kind.dtype)
    return x.clamp_(-kind.largest, kind.largest).to(kind.dtype)


def round_(x: Tensor, flavour: str) -> Tensor:
    """Replace every value by the one that `cast` takes for it, still as float32; return x.

    It computes in float32, since torch converts to float8 and back one element after another: six
    times as fast.

    Args:
        x: any shape, float32.
        flavour: a key of FLAVOURS.
    """
    kind = FLAVOURS[flavour]
    x.clamp_(-kind.largest, kind.largest)
    # the exponent's bits alone are the largest power of two that is not above |x|
    binade = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = binade.clamp_min_(kind.tiny).mul_(kind.eps)
    return x.div_(step).round_().mul_(step)


def widen(x: Tensor) -> Tensor:
    """The float32 values of float8 codes, exactly; any shape.

    torch converts float8 to float32 one element after another. A code of e4m3fn, shifted, is the
    float16 of a 256th of its value, subnormals included, and that conversion is vectorised: fifteen
    times as fast. On other devices torch's own conversion is used. It does not wait for a number,
    as the check for NaN does, which a step that is captured as a graph must not.
    """
    if x.device.type != "cpu" or x.dtype != torch.float8_e4m3fn or not x.numel():
        return x.float()
    if (x.view(torch.uint8) & 0x7F).max() == 0x7F:  # NaN
        return x.float()
    half = x.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    half <<= 7
    half &= ~0x4000  # the top bit of float16's exponent, where a copy of the sign stands
    return half.view(torch.float16).float().mul_(256.0)


def largest_magnitude(x: Tensor) -> float:
    """The largest magnitude among float8 codes, at least one; NaN where one is NaN."""
    if x.dtype == torch.float8_e4m3fnuz:  # its NaN is the code that would be -0
        return x.float().abs().max().item()
    # magnitudes are in the order of their codes, NaN last
    code = (x.view(torch.uint8) & 0x7F).max()
    return code.view(x.dtype).float().item()
