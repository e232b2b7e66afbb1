"""The codes of microscaled formats: e2m1 values two to a byte, and scales as exponents.

| code  | 0 | 1   | 2 | 3   | 4 | 5 | 6 | 7 |   8 more: the negative values, -0 among them
|-------|---|-----|---|-----|---|---|---|---|
| value | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 |

A byte holds two columns, the even one in its lower half. An e8m0 scale is 2^(code - 127); 255 is
NaN. Unpacked, e2m1 values are held as float8_e4m3fn, which has all of them. Source: OCP
Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4.1.
"""

import torch
from torch import Tensor

from quantflow.errors import SchemeError

NAN_E8M0 = 255
_HALF = 48  # the bits of 0.5 in e4m3fn: code 1; code c from 2 on has _HALF + 4 c


def _bits_of_codes(codes: Tensor) -> Tensor:
    """The bits of e4m3fn for e2m1's codes, uint8 of any shape.

    They are computed, not looked up: an index of 4 or 8 bytes for each value takes ten times as
    long, and a checkpoint has billions of them.
    """
    magnitudes = codes & 7
    bits = (magnitudes << 2).add_(_HALF).sub_((magnitudes == 1).to(torch.uint8).mul_(4))
    return bits.mul_(magnitudes != 0).add_((codes & 8) << 4)


def _codes_of_bits(bits: Tensor) -> Tensor:
    """Undo `_bits_of_codes`; what are no bits of e2m1's values gives the code of another value."""
    magnitudes = bits & 0x7F
    codes = (magnitudes - _HALF).bitwise_right_shift_(2).clamp_(min=1).mul_(magnitudes != 0)
    return codes.bitwise_and_(7).add_((bits & 0x80) >> 4)


def holds_e2m1(values: Tensor) -> bool:
    """Whether all values, float8_e4m3fn of any shape, are e2m1's."""
    bits = values.view(torch.uint8)
    return torch.equal(_bits_of_codes(_codes_of_bits(bits)), bits)


def codes_of_e2m1(values: Tensor) -> Tensor:
    """The code of each value, uint8 from 0 to 15.

    Raises:
        SchemeError: a value is between those of e2m1.
    """
    bits = values.view(torch.uint8)
    codes = _codes_of_bits(bits)
    if not torch.equal(_bits_of_codes(codes), bits):
        raise SchemeError("a value is none of e2m1's", "round to e2m1 first")
    return codes


def pack_e2m1(values: Tensor) -> Tensor:
    """Two values of e2m1 to a byte, row by row.

    Args:
        values: [O, I] float8_e4m3fn, all of them e2m1's, I even.

    Returns:
        [O, I / 2] uint8.

    Raises:
        SchemeError: I is odd, or a value is between those of e2m1.
    """
    if values.shape[1] % 2:
        raise SchemeError(
            f"{values.shape[1]} columns of e2m1",
            "a byte holds two; use an even number of input features",
        )
    codes = codes_of_e2m1(values)
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo `pack_e2m1`: [O, I / 2] uint8 to [O, I] float8_e4m3fn; every byte has a meaning."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)  # [O, I]
    return _bits_of_codes(pairs).view(torch.float8_e4m3fn)


def pack_e8m0(scale: Tensor) -> Tensor:
    """The codes of scales that are powers of two from 2^-127 to 2^127; uint8 of scale's shape.

    Raises:
        SchemeError: a scale is no such power.
    """
    mantissa, exponent = torch.frexp(scale)
    code = exponent + 126
    wrong = (mantissa != 0.5) | (code < 0) | (code >= NAN_E8M0)
    if wrong.any():
        raise SchemeError(
            f"scale {scale[wrong][0].item()} in e8m0",
            "e8m0 holds the powers of two from 2^-127 to 2^127",
        )
    return code.to(torch.uint8)


def unpack_e8m0(code: Tensor) -> Tensor:
    """Undo `pack_e8m0`: float32 of code's shape; 255 gives NaN."""
    # the code is the exponent of a float32; 2^-127 alone is below the least normal one
    bits = code.int().bitwise_left_shift_(23).masked_fill_(code == 0, 1 << 22)
    return bits.view(torch.float32).masked_fill_(code == NAN_E8M0, torch.nan)
