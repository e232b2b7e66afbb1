"""The second moment of the gradient by a linear's output: which errors of its rows the model feels, and which together."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.core import statistics
from quantflow.errors import StatisticsError


class GradientObserver:
    """Sum of g^T g over all samples, and how many there were.

    It is shown the gradient of the loss by a linear's output, [..., O]. With the second moment of the linear's input it makes
    up the Kronecker-factored Fisher information of its weight: what rounding errors cost, the whole model considered.

    The sum is float32 and whole: one product per call, rounded once and added, as in the Hessian of an input.

    Algebra: merge is commutative, and associative up to rounding in float32: fold in rank order. The count is exact.
    An unseen observer is neutral. Not idempotent: what is merged twice counts twice.
    Source: Martens and Grosse 2015, arXiv:1503.05671 (K-FAC), section 3.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "gradient"
    STATISTICS: ClassVar[tuple[str, ...]] = ("gradient_sum", "count")

    def __init__(self, features: int) -> None:
        """Start with nothing seen; the first samples take the memory, 4 * C^2 bytes."""
        self._features = features
        self._sum: Tensor | None = None
        self._count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples.  x: [..., C], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, holds NaN or Inf, or the sum overflows; nothing is taken in.
        """
        rows = statistics.finite_rows(x, self._features, observer=self.NAME)
        more = (rows.T @ rows).cpu()
        # |s_ij| <= sqrt(s_ii s_jj): the diagonal overflows first.
        if not torch.isfinite(1.001 * more.diagonal() + self._whole().diagonal()).all():
            raise StatisticsError(
                f"{self.NAME}: gradient {list(x.shape)} up to {rows.abs().max().item():.3g}, its square exceeds float32",
                "leave the layer unquantized, or repair the model",
            )
        self._add(more)
        self._count = self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in what `other` has seen.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(self._shape, other._shape, observer=self.NAME)
        if other._sum is not None:
            self._add(other._sum)
        self._count = self._count + other._count

    def state(self) -> dict[str, Tensor]:
        """Return {"gradient_sum": [C, C] float32, "count": [] int64}."""
        return {"gradient_sum": self._whole(), "count": self._count}

    def _add(self, more: Tensor) -> None:
        self._sum = more.clone() if self._sum is None else self._sum.add_(more)

    def _whole(self) -> Tensor:
        return torch.zeros(self._shape) if self._sum is None else self._sum

    @property
    def _shape(self) -> tuple[int, int]:
        return self._features, self._features

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Make the observer that had this state; the sum is copied.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        expected = {"gradient_sum": (torch.float32, (None, None)), "count": (torch.int64, ())}
        gradient_sum, count = statistics.checked_state(state, expected, observer=cls.NAME)
        statistics.refuse_negative(gradient_sum.diagonal(), "the diagonal of gradient_sum", observer=cls.NAME)
        statistics.refuse_negative(count, "count", observer=cls.NAME)
        observer = cls(gradient_sum.shape[0])
        observer._sum, observer._count = gradient_sum.clone(), count
        return observer
