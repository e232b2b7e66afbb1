"""The codes of microscaled formats: e2m1 values two to a byte, and scales as exponents.

| code  | 0 | 1   | 2 | 3   | 4 | 5 | 6 | 7 |   8 more: the negative values, -0 among them
|-------|---|-----|---|-----|---|---|---|---|
| value | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 |

A byte holds two columns, the even one in its lower half. An e8m0 scale is 2^(code - 127); 255 is
NaN. Unpacked, e2m1 values are held as float8_e4m3fn, which has all of them. Source: OCP
Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4.1.
"""

import functools

import torch
from torch import Tensor

from quantflow.errors import SchemeError

NAN_E8M0 = 255
_NONE = 255


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes of e4m3fn by e2m1's, uint8 [16], and codes of e2m1 by e4m3fn's, uint8 [256]."""
    number = torch.arange(8, device=device)
    exponent, half = number // 2, number % 2 / 2
    magnitudes = torch.where(exponent == 0, half, torch.ldexp(1 + half, exponent - 1))
    values = torch.cat([magnitudes, -magnitudes]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.full((256,), _NONE, dtype=torch.uint8, device=device)
    codes[values.long()] = torch.arange(16, dtype=torch.uint8, device=device)
    return values, codes


def holds_e2m1(values: Tensor) -> bool:
    """Whether all values, float8_e4m3fn of any shape, are e2m1's."""
    _, codes = _tables(values.device)
    return not bool((codes[values.view(torch.uint8).int()] == _NONE).any())


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
    codes = _tables(values.device)[1][values.view(torch.uint8).int()]
    if (codes == _NONE).any():
        raise SchemeError("a value is none of e2m1's", "round to e2m1 first")
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo `pack_e2m1`: [O, I / 2] uint8 to [O, I] float8_e4m3fn; every byte has a meaning."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)  # [O, I]
    return _tables(packed.device)[0][pairs.int()].view(torch.float8_e4m3fn)


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
    scale = torch.ldexp(torch.ones(code.shape, device=code.device), code.int() - 127)
    return scale.masked_fill(code == NAN_E8M0, torch.nan)
