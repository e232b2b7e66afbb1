"""Casts to narrower dtypes, and what a tensor loses in one.

A cast rounds, and a value that underflows is rounded like any other. Two losses are no rounding: a
finite value that becomes infinite, and a row of values that becomes zero altogether.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core.dtypes import NAMES
from quantflow.errors import UsageError

# of a tensor that a transform changes and quantize stores in the source's dtype
WIDER_MODEL = "store the model in bfloat16 or float32, or leave the transform out"
_WIDER = {torch.float16: "give --dtype bf16", torch.bfloat16: "give --dtype f32"}


@dataclass
class Cast:
    """A cast of one tensor, piece by piece, and what it has lost so far.

    Attributes:
        name: name of the tensor, for messages.
        dtype: dtype that the values get.
        values, beyond, largest: number of values, of those that became infinite, and the largest
            magnitude of these.
        rows, vanished, left: number of rows, of those that became zero, and the largest magnitude
            in these. A row is what lies along the last dimension.
    """

    name: str
    dtype: torch.dtype
    values: int = 0
    beyond: int = 0
    largest: float = 0.0
    rows: int = 0
    vanished: int = 0
    left: float = 0.0

    def __call__(self, piece: Tensor) -> Tensor:
        """A piece of the tensor, whole rows, in the dtype."""
        stored = piece.to(self.dtype)
        if not _covers(self.dtype, piece.dtype):
            self.compare(piece, stored)
        return stored

    def compare(self, piece: Tensor, stored: Tensor) -> None:
        """Count what a piece has lost.

        Args:
            piece: finite values, of any shape.
            stored: the same values as they read back.
        """
        before, after = (
            each.reshape(-1, each.shape[-1] if each.ndim else 1) for each in (piece, stored)
        )
        self.values, self.rows = self.values + before.numel(), self.rows + len(before)
        if not before.numel():
            return
        lost = ~torch.isfinite(after)
        if lost.any():
            self.beyond += int(lost.sum())
            self.largest = max(self.largest, before[lost].double().abs().amax().item())
        gone = (after == 0).all(dim=1)
        if gone.any():
            left = before[gone].double().abs().amax(dim=1)
            self.vanished += int(left.count_nonzero())
            self.left = max(self.left, left.amax().item())

    def require_held(self, remedy: str | None = None) -> None:
        """Refuse a tensor that the dtype does not hold.

        Args:
            remedy: remedy of the error; None names an option `--dtype` that holds it.

        Raises:
            UsageError: a value became infinite, or a row zero.
        """
        kind, limits = NAMES[self.dtype], torch.finfo(self.dtype)
        remedy = remedy or _WIDER.get(self.dtype, "quantize the weight again")
        if self.beyond:
            cause = (
                f"{self.name}: {self.largest:.6g} does not fit {kind}, whose largest is "
                f"{limits.max:.6g} ({self.beyond:,} of {self.values:,} values)"
            )
            raise UsageError(cause, remedy)
        if self.vanished:
            cause = (
                f"{self.name}: {self.vanished:,} of {self.rows:,} rows become 0 in {kind}, whose "
                f"smallest is {limits.tiny * limits.eps:.3g} (their largest value is "
                f"{self.left:.3g})"
            )
            raise UsageError(cause, remedy)


def cast(name: str, values: Tensor, dtype: torch.dtype, *, remedy: str | None = None) -> Tensor:
    """A whole tensor in a dtype that holds it.

    Args:
        name: name of the tensor, for messages.
        values: floating tensor, finite.
        dtype: dtype of the result.
        remedy: remedy of the error; None names an option `--dtype` that holds it.

    Raises:
        UsageError: a value became infinite, or a row zero.
    """
    narrow = Cast(name, dtype)
    stored = narrow(values)
    narrow.require_held(remedy)
    return stored


def _covers(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype has the range of another, so that a cast loses nothing but digits."""
    wide, narrow = torch.finfo(dtype), torch.finfo(other)
    return wide.max >= narrow.max and wide.tiny * wide.eps <= narrow.tiny * narrow.eps
