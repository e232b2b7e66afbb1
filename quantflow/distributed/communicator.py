"""The exchange between processes that share a model, whatever carries it."""

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """One process among those that share a model, and its exchange with the others.

    Attributes:
        rank, world: number of this process, and of all.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world(self) -> int:
        """The number of processes."""

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's tensor, [ranks, ...]; all give contiguous ones of one shape and dtype."""

    def broadcast(self, numbers: Tensor) -> None:
        """Fill an int64 tensor with rank 0's."""
