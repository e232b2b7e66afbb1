"""A decoder layer that runs with other weights than its own, to which gradients flow.

The layer's own forward is run with the model's recorded call (quantflow/models/capture.py).
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
        module: layer that `LayerStream.layer` yielded.
        layer: its record in the graph.
        weights: linear -> weight [O, I], in any float dtype, in which its products are then
            computed; inputs and outputs stay in the stream's. Linears without an entry keep their
            own.
    """
    own: dict[Any, tuple[nn.Parameter | None, Any]] = {}
    try:
        for name, weight in weights.items():
            linear: Any = module.get_submodule(layer.relative(name))
            # A parameter would be a leaf of its own, and no gradient would reach the weights.
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
    """The output [..., O] of [..., I] in x's dtype, of a product in the weight's dtype.

    The bias is added in x's dtype.
    """
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
    """Yield a function that runs a sequence through the layer; it is thread-safe.

    Args:
        stream: stream of the model.
        module: layer that `LayerStream.layer` yielded.
        layer: its record in the graph.
        states: sequences as they enter the layer.
        weights: linear -> weight, for `replaced`.
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
    """Gradients by the layer's input and weights, by running the layer once more.

    Only the activations of one sequence are in memory.

    Args:
        stream: stream of the model.
        module: layer with `weights` in it, see `replaced`.
        state: sequence as it enters the layer.
        gradient: gradient by the layer's output, [1, S, H].
        weights: [O, I] each, that require gradients.

    Returns:
        The gradient by the layer's input, [1, S, H], and those by the weights.
    """
    with torch.enable_grad():
        leaf = state.hidden.detach().requires_grad_()
        output = stream.forward(module, state, leaf)
        # weights of experts that no token of the sequence was sent to get a gradient of zeros
        entering, *of_weights = torch.autograd.grad(
            output, [leaf, *weights], gradient, materialize_grads=True
        )
    return entering, of_weights
