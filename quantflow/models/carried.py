"""What layers of some families hand to the next one beside the hidden state, on its way in one tensor with it.

Which tokens an indexer chose is read by the layers behind it, and some routers read what the router
before them computed. Where layers run one at a time, both values wait in one tensor, so that
everything that keeps hidden states keeps both:

    [1, S, H]          the hidden state of a family that carries nothing, as the layer returned it
    [1, S, H + C]      a hidden state of H features, all axes behind the tokens in one, and C columns of what is carried
    [1, S, H]          the same before the first layer that hands something on

Numbers are carried in the dtype of the hidden state, which is float32 in some models that run in
bfloat16; indices as the bits of int32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = torch.int32  # of an index


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A value that every layer of a family returns, and the next one is called with.

    Attributes:
        argument: its name in the call, or its place behind the hidden state.
        output: which of the values that a layer returns.
        dtype: of indices, such as `int64`; None where it is numbers.
        width: features per token, of indices the most.
        hidden: the axes of the hidden state behind the tokens, (H,) of most families.
    """

    argument: str | int
    output: int
    dtype: str | None
    width: int
    hidden: tuple[int, ...]

    @property
    def features(self) -> int:
        """Numbers of the hidden state per token."""
        return int(torch.Size(self.hidden).numel())

    def joined(self, hidden: Tensor, value: Tensor | None) -> Tensor:
        """Return both in one tensor.

        Args:
            hidden: [1, S, *self.hidden].
            value: [1, S, C], or None where nothing is handed on yet.
        """
        flat = hidden.flatten(2)
        if value is None:
            return flat
        if self.dtype is not None:
            value = value.to(_BITS).contiguous().view(flat.dtype)
        return torch.cat([flat, value.to(flat.dtype)], dim=-1)

    def parted(self, both: Tensor, *, numbers: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the hidden state, and what was joined to it, as the layer returned them.

        Args:
            both: [1, S, *], as `joined` returns it.
            numbers: the dtype that the model runs in, which numbers that are carried have.
        """
        flat, value = both[..., : self.features], both[..., self.features :]
        hidden = flat.reshape(*flat.shape[:-1], *self.hidden)
        if not value.shape[-1]:
            return hidden, None
        if self.dtype is None:
            return hidden, value.to(numbers)
        return hidden, value.detach().contiguous().view(_BITS).to(getattr(torch, self.dtype))
