"""Parameters that transformers joins from several tensors of a checkpoint, split again in memory.

Linear attentions have one convolution over queries, keys and values, and checkpoints of some
families one for each. With torch's own parametrization in its place every tensor of the checkpoint
is a parameter, and the module reads them joined:

    linear_attn.q_conv1d.weight, .k_conv1d.weight, .v_conv1d.weight     in the checkpoint
    linear_attn.conv1d.parametrizations.weight.original0, 1, 2          in memory

A linear that is joined (MiniMax M3's) becomes several linears, which are quantized as those of the
checkpoint:

    mlp.gate_proj.weight, mlp.up_proj.weight                            in the checkpoint
    mlp.gate_up_proj.parts.0.weight, .1.weight                          in memory
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
        """Take as many parts, of one size, as a checkpoint has."""
        super().__init__()
        self._count = count

    def forward(self, *parts: Tensor) -> Tensor:
        """The parts joined."""
        return torch.cat(parts)

    def right_inverse(self, whole: Tensor) -> Sequence[Tensor]:
        """The parts of the whole."""
        return whole.chunk(self._count)


class JoinedLinear(nn.Module):
    """A linear as the linears of a checkpoint, whose outputs lie one after the other."""

    def __init__(self, linear: nn.Linear, count: int) -> None:
        """Make as many linears, of one size, on meta."""
        super().__init__()
        shape = (linear.in_features, linear.out_features // count)
        bias = linear.bias is not None
        self.parts = nn.ModuleList(
            nn.Linear(*shape, bias=bias, device="meta") for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [..., O] of [..., I]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


_NAMED_JOINED = "gate_up_proj"  # transformers' name of the linears that it joins


def joined_(model: PreTrainedModel) -> None:
    """Split the convolutions' weights and linears that a checkpoint holds in several tensors."""
    modules: list[tuple[str, nn.Module]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d)
        or (isinstance(module, nn.Linear) and name.endswith(f".{_NAMED_JOINED}"))
    ]
    hub = HubNames(model) if modules else None  # its table takes a second
    for name, module in modules:
        count = 1 if hub is None else hub.joined_from(f"{name}.weight")
        if count > 1 and isinstance(module, nn.Linear):
            model.set_submodule(name, JoinedLinear(module, count))
        elif count > 1:
            parametrize.register_parametrization(module, "weight", JoinedParts(count))
