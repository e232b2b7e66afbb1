"""The second moment of the gradient by a linear's output: the cost of errors in its rows."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantflow.numerics import output_blocks, statistics
from quantflow.numerics.statistics import ADDED, COUNT, Statistic

GRADIENT_SUM = Statistic(
    name="gradient_sum",
    fold=ADDED,
    cards=None,
    shape=lambda channels: (channels, output_blocks.width(channels)),
    cut=output_blocks.cut,
    diagonal=output_blocks.diagonal_of,
    remedy="measure gradients with --tp 1, on any number of ranks",
)


class GradientObserver:
    """Sum of g^T g over all samples, and the number of samples.

    It takes the gradient of the loss by a linear's output, [..., O]. With the second moment of the
    linear's input it makes up the Kronecker-factored Fisher information of its weight: the cost of
    rounding errors to the whole model.

    The sum is float32 and whole up to 2048 outputs; with more outputs it is cut into blocks, [O, W]
    (quantflow/numerics/output_blocks.py). A product is rounded once and added, as in the Hessian of
    an input. The product of gradients in bfloat16 is rounded to bfloat16: an entry of the sum is
    then off by 2^-9 at most, independently of the others.

    Algebra: merge is commutative, and associative up to rounding in float32: fold in a fixed tree.
    The count is exact. An unseen observer is neutral. Not idempotent: samples merged twice count
    twice. Source: Martens and Grosse 2015, arXiv:1503.05671 (K-FAC), section 3.

    Args:
        features: size C of the last dimension of every x.
    """

    NAME: ClassVar[str] = "gradient"
    STATISTICS: ClassVar[Mapping[str, Statistic]] = statistics.table(GRADIENT_SUM, COUNT)
    SITES: ClassVar[tuple[str, ...]] = ("gradient",)

    def __init__(self, features: int) -> None:
        """Begin without samples; the first ones take the memory, 4 * C * W bytes."""
        self._features = features
        self._sum: Tensor | None = None
        self._count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., C], any float dtype; each of its rows counts one.

        Raises:
            StatisticsError: x has other features, holds NaN or Inf, or the sum overflows; nothing
                is taken in.
        """
        rows = statistics.finite_rows(x, self._features, observer=self.NAME)
        parts = output_blocks.blocks(self._features)
        diagonal = [torch.zeros(part.stop - part.start, device=rows.device) for part in parts]
        if self._sum is not None:
            diagonal = [output_blocks.block_of(self._sum, part).diagonal() for part in parts]
        statistics.refuse_overflow(
            rows, diagonal, what=f"gradient {list(x.shape)}", observer=self.NAME
        )
        factors = x.detach().reshape(rows.shape) if x.dtype == torch.bfloat16 else rows
        products = [(factors[:, part].T @ factors[:, part]).float() for part in parts]
        if self._sum is None and len(products) == 1:
            (self._sum,) = products
        else:
            self._sum = self._whole()
            for part, product in zip(parts, products, strict=True):
                output_blocks.block_of(self._sum, part).add_(product)
        self._count = self._count + rows.shape[0]

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`.

        Raises:
            StatisticsError: the number of features differs.
        """
        statistics.refuse_other_shape(self._shape, other._shape, observer=self.NAME)
        if other._sum is not None:
            self._sum = other._sum.clone() if self._sum is None else self._sum.add_(other._sum)
        self._count = self._count + other._count

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        return statistics.stored_bytes(cls.STATISTICS, features)

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        return 4 * (samples * features + output_blocks.width(features) ** 2)

    def state(self) -> dict[str, Tensor]:
        """{"gradient_sum": [C, W] float32, "count": [] int64}."""
        return {"gradient_sum": self._whole(), "count": self._count}

    def _whole(self) -> Tensor:
        return (
            torch.zeros(self._shape, device=self._count.device) if self._sum is None else self._sum
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self._features, output_blocks.width(self._features)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state; the sum is copied.

        Raises:
            StatisticsError: the state is not one of this observer's.
        """
        count = (
            state["gradient_sum"].shape[0]
            if "gradient_sum" in state and state["gradient_sum"].ndim
            else 0
        )
        expected = {
            "gradient_sum": (torch.float32, (count, output_blocks.width(count))),
            "count": (torch.int64, ()),
        }
        gradient_sum, seen = statistics.checked_state(state, expected, observer=cls.NAME)
        diagonal = output_blocks.diagonal_of(gradient_sum)
        statistics.refuse_negative(diagonal, "the diagonal of gradient_sum", observer=cls.NAME)
        statistics.refuse_negative(seen, "count", observer=cls.NAME)
        observer = cls(count)
        observer._sum, observer._count = gradient_sum.clone(), seen
        return observer
