"""Parameters that transformers joins from several tensors of a checkpoint, in parts in memory too.

Linear attentions have one convolution over queries, keys and values, and checkpoints of some families one for each. With
torch's own parametrization in its place every tensor of the checkpoint is a parameter, and the module reads them joined:

    linear_attn.q_conv1d.weight, .k_conv1d.weight, .v_conv1d.weight     in the checkpoint
    linear_attn.conv1d.parametrizations.weight.original0, 1, 2          in memory
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from quantflow.models.names import HubNames


class JoinedParts(nn.Module):
    """A parameter as its parts, which lie one after the other along the first dimension."""

    def __init__(self, count: int) -> None:
        """Take as many parts, of one size, as transformers' saving makes."""
        super().__init__()
        self._count = count

    def forward(self, *parts: Tensor) -> Tensor:
        """Return the parts joined."""
        return torch.cat(parts)

    def right_inverse(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the parts of the whole."""
        return whole.chunk(self._count)


def joined_(model: PreTrainedModel) -> None:
    """Put the parts in the place of every convolution's weight that a checkpoint holds in several tensors."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    hub = HubNames(model) if found else None  # its table takes a second
    for name, module in found:
        count = 1 if hub is None else hub.joined_from(f"{name}.weight")
        if count > 1:
            parametrize.register_parametrization(module, "weight", JoinedParts(count))
