"""Float8: the named flavours, and a cast that saturates on every machine.

| flavour  | exponent, mantissa | largest | infinities | codes for NaN | used by                   |
|----------|--------------------|---------|------------|---------------|---------------------------|
| e4m3fn   | 4, 3, bias 7       | 448     | none       | 0x7f, 0xff    | NVIDIA, Gaudi3, OCP       |
| e5m2     | 5, 2, bias 15      | 57344   | yes        | 6             | gradients, wide ranges    |
| e4m3fnuz | 4, 3, bias 8       | 240     | none       | 0x80          | AMD MI300                 |
| gaudi2   | e4m3fn's codes     | 240     | not used   | 0x7f, 0xff    | Gaudi2: top binade unused |

Source: Micikevicius et al. 2022, arXiv:2209.05433; Noune et al. 2022, arXiv:2206.02915 (fnuz).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flavour:
    """A float8 format: the torch dtype that holds its codes and its largest finite value."""

    dtype: torch.dtype
    largest: float


FLAVOURS = {
    "e4m3fn": Flavour(torch.float8_e4m3fn, 448.0),
    "e5m2": Flavour(torch.float8_e5m2, 57344.0),
    "e4m3fnuz": Flavour(torch.float8_e4m3fnuz, 240.0),
    "gaudi2": Flavour(torch.float8_e4m3fn, 240.0),
}


def cast(x: Tensor, flavour: str) -> Tensor:
    """Return `x` rounded to the nearest float8 value, ties to even mantissa.

    Args:
        x: any shape, float32.
        flavour: a key of FLAVOURS.

    Returns:
        Same shape, the flavour's dtype. Values beyond the largest, infinities included, saturate; NaN stays NaN.
        torch's own cast saturates on some machines and not on others, so the clamp is ours.
    """
    kind = FLAVOURS[flavour]
    return x.clamp(-kind.largest, kind.largest).to(kind.dtype)
