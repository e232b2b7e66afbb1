"""The second moment of a linear's input: what GPTQ compensates rounding errors with."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.core import statistics
from quantflow.errors import StatisticsError


class HessianObserver:
    """Sum of x^T x over all samples, and how many there were.

    The product of one call is computed in float32 and added to a float64 sum, so the order of the calls is part of the
    result's last digits: one call per sequence, in sample order, is the canonical one.

    Algebra: merge is commutative, and associative up to rounding in float64: fold in rank order. The count is exact.
    An unseen observer is neutral. Not idempotent: what is merged twice counts twice.
    Source: Frantar et al. 2022, arXiv:2210.17323, section 3. Its H = 2 X X^T; GPTQ does not see a constant factor,
    so the 2 is dropped here.

    Args:
        features: size K of the last dimension of every x.
    """

    NAME: ClassVar[str] = "hessian"
    STATISTICS: ClassVar[tuple[str, ...]] = ("hessian_sum", "count")

    def __init__(self, features: int) -> None:
        """Start with nothing seen."""
        self._sum = torch.zeros(features, features, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)

    @property
    def hessian(self) -> Tensor:
        """Mean of x^T x, [K, K] float64; zeros when unseen."""
        return self._sum / self._count.clamp_min(1)

    def update(self, x: Tensor) -> None:
        """Take in samples.  x: [..., K], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, holds NaN or Inf, or its product overflows; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._sum.shape[0], observer=self.NAME)
        product = rows.T @ rows  # [K, K]
        if not torch.isfinite(product.diagonal()).all():  # |p_ij| <= sqrt(p_ii p_jj): the diagonal overflows first
            raise StatisticsError(
                f"{self.NAME}: input {list(x.shape)} up to {rows.abs().max().item():.3g}, its square exceeds float32",
                "leave the layer unquantized, or repair the model",
            )
        self._sum += product.cpu()  # in place: a copy of a [14336, 14336] sum is 1.6 GB
        self._count = self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in what `other` has seen.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(self._sum, other._sum, observer=self.NAME)
        self._sum = self._sum + other._sum
        self._count = self._count + other._count

    def state(self) -> dict[str, Tensor]:
        """Return {"hessian_sum": [K, K] float64, "count": [] int64}; the sum itself, which the next update changes."""
        return {"hessian_sum": self._sum, "count": self._count}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Make the observer that had this state; the sum is copied.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"hessian_sum": (torch.float64, (None, None)), "count": (torch.int64, ())}
        hessian_sum, count = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(hessian_sum.diagonal(), "the diagonal of hessian_sum", observer=cls.NAME)
        statistics.refuse_negative(count, "count", observer=cls.NAME)
        observer = cls(0)
        observer._sum, observer._count = hessian_sum.clone(), count
        return observer
