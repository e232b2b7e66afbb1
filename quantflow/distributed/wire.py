"""What processes that share a model tell each other, whatever carries it."""

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """One process among those that share a model, and its exchange with the others.

    Attributes:
        rank, world: number of this process, and of all.
    """

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def world(self) -> int:
        """How many there are."""

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's tensor, [ranks, ...]; all give contiguous ones of one shape and dtype."""

    def broadcast(self, numbers: Tensor) -> None:
        """Fill an int64 tensor with rank 0's."""
