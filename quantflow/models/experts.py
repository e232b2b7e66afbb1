"""The experts of a mixture as three linears each, in the names of the checkpoint, instead of two tensors of three dimensions.

transformers 5 keeps the experts of a layer in `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]; a checkpoint holds a
linear per expert and projection, `experts.3.gate_proj.weight`. With this view in their place every linear of an expert is a
module of its own: watched, filled from the checkpoint, and replaced by a quantized one like any other.

    y[t] = sum_e weight[t, e] * down_e(act(gate_e(x[t])) * up_e(x[t]))    over the experts that the router chose for token t

The router stays the family's own. Experts are added up in ascending order, as in transformers' own loop over them.
Sources: Shazeer et al. 2017, arXiv:1701.06538 (the sum); Shazeer 2020, arXiv:2002.05202 (the gated linears).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quantflow.models.graph import FAMILIES, Mixture

RoutedCallback = Callable[[Tensor], None]


class Expert(nn.Module):
    """One expert; its linears have the checkpoint's names and no bias."""

    def __init__(self, names: tuple[str, str, str], *, hidden: int, width: int, act: nn.Module) -> None:
        """Make the linears.

        Args:
            names: of gate, up and down.
            hidden: features of the hidden state, H.
            width: features between the linears, I.
            act: the activation.
        """
        super().__init__()
        self._names = names
        self.act_fn = act
        for name, inputs, outputs in zip(names, (hidden, hidden, width), (width, width, hidden), strict=True):
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return down(act(gate(x)) * up(x)), [n, H] of [n, H]."""
        gate, up, down = (getattr(self, name) for name in self._names)
        output: Tensor = down(self.act_fn(gate(x)) * up(x))
        return output


class Experts(nn.ModuleList):
    """The experts of a layer, called as transformers' own modules call theirs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k], the experts of each token.
            top_k_weights: [T, k], how much each counts.

        Returns:
            [T, H] in the dtype of the hidden states.
        """
        total = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            place, token = torch.where((top_k_index == number).T)
            _add_(total, self[number](hidden_states[token]), token, top_k_weights[token, place])
        return total

    def of_every_token(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the same sum, after every expert has seen every token; what the router did not ask for is dropped."""
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            place, token = torch.where((top_k_index == number).T)
            _add_(total, expert(hidden_states)[token], token, top_k_weights[token, place])
        return total


def _add_(total: Tensor, outputs: Tensor, token: Tensor, weights: Tensor) -> None:
    """Add an expert's outputs [n, H], times their weights [n], to the rows `token` [n] of the total [T, H]."""
    total.index_add_(0, token, (outputs * weights[:, None]).to(total.dtype))


def view_(model: PreTrainedModel) -> None:
    """Put the view in the place of the stacked experts of a model on meta; a model without experts stays as it is."""
    family = FAMILIES.get(model.config.model_type)
    if family is None or family.mixture is None:
        return
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] == "experts":
            model.set_submodule(name, _view(module, family.mixture))


def _view(stacked: Any, mixture: Mixture) -> Experts:
    count, hidden, width = stacked.down_proj.shape
    with torch.device("meta"):
        return Experts(Expert(mixture.linears, hidden=hidden, width=width, act=stacked.act_fn) for _ in range(count))


@contextmanager
def every_token(module: nn.Module) -> Iterator[None]:
    """Let every expert inside a module see every token until the block ends; what the module returns is the same.

    An expert's rows come from a product with more rows then, so that their last digits may differ.
    """
    chosen: list[Any] = [part for part in module.modules() if isinstance(part, Experts)]
    try:
        for experts in chosen:
            experts.forward = experts.of_every_token
        yield
    finally:
        for experts in chosen:
            experts.__dict__.pop("forward", None)


@contextmanager
def watch_routing(module: nn.Module, callback: RoutedCallback) -> Iterator[None]:
    """Call `callback(tokens)` whenever experts inside a module are called, until the block ends.

    Args:
        module: a decoder layer.
        callback: takes how many tokens the router sent to each expert, int64 [E].
    """
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, Experts):
                handle = part.register_forward_pre_hook(partial(_report, callback))
                stack.callback(handle.remove)
        yield


def _report(callback: RoutedCallback, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert isinstance(experts, Experts)  # the hook is registered on nothing else
    callback(torch.bincount(args[1].flatten(), minlength=len(experts)))
