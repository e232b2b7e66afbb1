"""The decoder that every way to generate stands on: a model, a key-value cache, four methods.

Whoever generates keeps the tokens; a decoder keeps their keys and values. Positions are columns
of the batch: in a batch whose prompts are padded on the left, padding takes columns too, but it is
never attended to, and a sequence's own positions count from its first real token.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quantflow.errors import UsageError


@runtime_checkable
class Decoder(Protocol):
    """A causal language model with a key-value cache of its own.

    Attributes:
        vocab_size: V, the length of a row of logits.
        positions: most positions that a sequence may have, or None where nothing bounds them.
        device: device of the ids and of the logits.
    """

    vocab_size: int
    positions: int | None
    device: torch.device

    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache.

        Args:
            rows: B, sequences of the prompt; `keep` may make more of them.
            capacity: no sequence will have more positions than this, padding included.
        """

    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """Append T positions to every sequence of the cache.

        Args:
            input_ids: [B, T] int64, T at least 1.
            padding: [B] int64, how many tokens at the left of a prompt are padding; given with the
                first forward after `begin`, or never; the decoder remembers it.
            last_only: compute the logits of the last position only.

        Returns:
            float32, [B, V], or [B, T, V] without `last_only`.
        """

    def keep(self, rows: Tensor) -> None:
        """Let sequence i of the cache become the old sequence rows[i].

        Args:
            rows: [B'] int64; rows may repeat or be left out, and B' may differ from B.
        """

    def crop(self, length: int) -> None:
        """Forget every position from `length` on, in all sequences; at most the cache's length."""


@runtime_checkable
class HiddenDecoder(Decoder, Protocol):
    """A decoder that shows the input of its head; contrastive search and Medusa heads need one."""

    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append positions as `forward`, with the logits of all.

        Returns:
            logits [B, T, V] float32, and the final hidden states [B, T, H] float32 (after the last
            norm).
        """


@runtime_checkable
class StateDecoder(HiddenDecoder, Protocol):
    """A decoder that shows hidden states without logits, which MTP layers read of a prompt."""

    def forward_states(self, input_ids: Tensor) -> Tensor:
        """Append positions as `forward`; the final hidden states [B, T, H] float32 alone."""


def require_length(length: int, *, have: int) -> None:
    """Refuse to crop to more positions than there are.

    Raises:
        UsageError: naming both numbers.
    """
    if not 0 <= length <= have:
        raise UsageError(
            f"crop to {length} positions: the cache has {have}", "crop to at most what there is"
        )


def require_room(input_ids: Tensor, *, rows: int, length: int, capacity: int) -> None:
    """Refuse ids [B, T] that `begin` made no room for, and empty ones.

    Raises:
        UsageError: naming both shapes.
    """
    sequences, count = input_ids.shape
    if sequences != rows or count < 1 or length + count > capacity:
        cause = (
            f"input_ids {sequences} x {count}: the cache has {rows} rows, {length} of {capacity} "
            "positions"
        )
        raise UsageError(cause, "begin with as many as there will be")
