"""A value that layers of some families hand to the next beside the hidden state, in one tensor.

The tokens that an indexer chose are read by the layers behind it, and some routers read a result of
the router before them. Where layers run one at a time, hidden state and value wait in one tensor,
so that everything that keeps hidden states keeps both:

    [1, S, H]          hidden state of a family that carries nothing, as the layer returned it
    [1, S, H + C]      hidden state of H features, all axes behind the tokens in one, and C columns
                       of the carried value
    [1, S, H]          the same before the first layer that hands something on

Numbers are carried in the dtype of the hidden state, which is float32 in some models that run in
bfloat16; indices as the bits of int32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = torch.int32  # dtype of an index on its way


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A value that every layer of a family returns, and the next one is called with.

    Attributes:
        argument: its name in the call, or its place behind the hidden state.
        output: its place in the tuple that a layer returns.
        dtype: dtype of indices, such as `int64`; None for numbers.
        width: features per token; the most there may be where they are indices.
        hidden: axes of the hidden state behind the tokens, (H,) in most families.
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
        """Hidden state and value in one tensor.

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
        """Hidden state and value apart, as the layer returned them.

        Args:
            both: [1, S, *], as `joined` returns it.
            numbers: dtype that the model runs in, which a carried value of numbers has.
        """
        flat, value = both[..., : self.features], both[..., self.features :]
        hidden = flat.reshape(*flat.shape[:-1], *self.hidden)
        if not value.shape[-1]:
            return hidden, None
        if self.dtype is None:
            return hidden, value.to(numbers)
        return hidden, value.detach().contiguous().view(_BITS).to(getattr(torch, self.dtype))
