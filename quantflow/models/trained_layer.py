"""A decoder layer of a model that runs with other weights than its own, and through which gradients flow to them.

The layer's own forward is run, with what the model called it with (quantflow/models/capture.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.numerics.trained_block import Run


@contextmanager
def replaced(module: nn.Module, layer: Layer, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let linears of a layer have other weights until the block ends; their own come back.

    Args:
        module: the layer, as `LayerStream.layer` yields it.
        layer: which one.
        weights: linear -> weight [O, I], in any float dtype, in which its products are then
            computed; inputs and outputs stay in the stream's. Linears that are not named keep their
            own.
    """
    own: dict[Any, tuple[nn.Parameter | None, Any]] = {}
    try:
        for name, weight in weights.items():
            linear: Any = module.get_submodule(layer.relative(name))
            # A parameter would be a leaf of its own, without a gradient to these.
            own[linear] = linear._parameters.pop("weight"), linear.__dict__.get("forward")
            linear.weight = weight
            if weight.dtype != torch.float32:
                linear.forward = partial(_rounded, linear)
        yield
    finally:
        for linear, (parameter, forward) in own.items():
            del linear.weight
            linear.register_parameter("weight", parameter)
            linear.__dict__.pop("forward", None)
            if forward is not None:
                linear.forward = forward


def _rounded(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return the output [..., O] of [..., I] in x's dtype, of a product in the weight's, whose bias is added to it."""
    output = functional.linear(x.to(linear.weight.dtype), linear.weight).to(x.dtype)
    return output if linear.bias is None else output + linear.bias


@contextmanager
def running(
    stream: LayerStream,
    module: nn.Module,
    layer: Layer,
    states: Sequence[State],
    weights: Mapping[str, Tensor],
) -> Iterator[Run]:
    """Yield a function that runs a sequence through the layer, from several threads if need be.

    Args:
        stream: the model.
        module: as `replaced` takes it.
        layer: likewise.
        states: the sequences as they enter the layer.
        weights: as `replaced` takes them.
    """

    def run(number: int) -> Tensor:
        return stream.alone(stream.forward(module, states[number], states[number].hidden))

    with replaced(module, layer, weights):
        yield run


def gradients(
    stream: LayerStream,
    module: nn.Module,
    state: State,
    gradient: Tensor,
    weights: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor]]:
    """Bring a gradient back through the layer, which runs again: the activations of one sequence are in memory.

    Args:
        stream: the model.
        module: the layer; `weights` are in it, see `replaced`.
        state: the sequence as it enters the layer.
        gradient: by what leaves the layer, [1, S, H].
        weights: [O, I] each, that require gradients.

    Returns:
        The gradient by the layer's input, [1, S, H], and those by the weights.
    """
    with torch.enable_grad():
        leaf = state.hidden.detach().requires_grad_()
        output = stream.forward(module, state, leaf)
        entering, *found = torch.autograd.grad(output, [leaf, *weights], gradient)
    return entering, found
