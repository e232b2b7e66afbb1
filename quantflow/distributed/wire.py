"""What processes that share a model tell each other, whatever carries it."""

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """One process among those that share a model, and what they tell each other.

    Attributes:
        rank, world: which of how many.
    """

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def world(self) -> int:
        """How many there are."""

    def gather(self, part: Tensor) -> Tensor:
        """Return what every rank gives, [ranks, ...]; all give tensors of one shape and dtype, contiguous."""

    def broadcast(self, numbers: Tensor) -> None:
        """Fill an int64 tensor with rank 0's."""
