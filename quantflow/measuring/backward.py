"""Gradients of the model's own loss, layer by layer in reverse, one decoder layer in memory.

The loss is -sum_t log p(y_t), each y_t drawn from the distribution p_t that the model itself
predicts at position t. The mean of the square of its gradient is then the diagonal of the true
Fisher information: near the original model

    sum_t KL(p_t || p'_t)  ~  1/2 dy^T F dy,    F = E[g g^T],    g = dLoss / dy

for a change dy of any tensor y of the model. Draws at different positions are independent, so sums
over positions need no labels of a text, and no second draw.

The hidden states of every layer's input are kept while the text runs forward. Then:

    # at the output of the last layer
    gradient = sampled_gradient(stream, hidden, generator=generator)
    for layer in reversed(graph.layers):
        with stream.layer(layer.index) as module, backward(stream, module, layer) as through:
            gradient = through(state, gradient, observe)  # at the layer's input

Each layer runs again, with gradients enabled, from its input: activation checkpointing with a
checkpoint per layer. Source: Martens 2014, arXiv:1412.1193, sections 5 and 9.2 (the Fisher as the
curvature of the KL divergence).
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.hooks import watch
from quantflow.models.stand_ins import FEWEST

_ROWS = FEWEST  # positions whose labels are drawn at once; another number draws other labels

Observe = Callable[[str, Tensor, Tensor], None]
"""Observer of a linear: its source name, its input x [1, S, I] and the gradient [1, S, O] by
its output, neither of which it changes."""
Through = Callable[[State, Tensor, Observe], Tensor]
"""Way back through a layer: a sequence as it enters the layer, the gradient [1, S, H] by the
layer's output, and the observer -> the gradient by the layer's input."""


def generator_for(seed: int, index: int) -> torch.Generator:
    """The generator of the labels of one sequence, whichever process draws them.

    Args:
        seed: seed of the measurement.
        index: the sequence's number in the whole calibration set.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def sampled_gradient(stream: LayerStream, hidden: Tensor, *, generator: torch.Generator) -> Tensor:
    """The gradient of the loss by the output of the last layer, [1, S, H] float32.

    Inside `stream.head()` several threads may call it; a part of the sequence has logits in memory
    at a time.

    Args:
        stream: the model.
        hidden: the output of the last layer, [1, S, H].
        generator: draws a label for every position, in host memory.
    """
    gradient = torch.empty_like(hidden)
    for part in stream.parts(hidden.shape[1]):
        with torch.enable_grad():
            leaf = hidden[:, part].detach().requires_grad_()
            logits = stream.logits(leaf)
        # [R, V]: p, and then p - onehot(y), the gradient by the logits
        difference = logits.detach()[0].float().softmax(dim=-1)
        # Drawing takes as much memory as the probabilities: some rows at a time.
        for rows in difference.split(_ROWS):  # type: ignore[no-untyped-call]
            # [rows, 1]
            labels = stream.device.put(
                torch.multinomial(stream.device.fetch(rows), 1, generator=generator)
            )
            rows.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=rows.dtype))
        (gradient[:, part],) = torch.autograd.grad(logits, leaf, difference[None].to(logits.dtype))
    return gradient


@contextmanager
def backward(stream: LayerStream, module: nn.Module, layer: Layer) -> Iterator[Through]:
    """Yield the function that brings gradients back through a decoder layer.

    It takes one sequence per call, from several threads, and shows every linear of the layer to its
    `observe`, in the order in which gradients reach them; in memory are then the activations of one
    sequence per thread.

    Args:
        stream: the model.
        module: the layer in float32, as `stream.layer` yields it.
        layer: its names.
    """
    # Hooks belong to the module, and several threads run sequences through it: each thread shows
    # its own sequence to the observer of its own call.
    mine = threading.local()

    def remember(name: str, x: Tensor, y: Tensor) -> None:
        y.register_hook(partial(_show, mine.observe, name, x.detach()))  # type: ignore[no-untyped-call]

    def through(state: State, gradient: Tensor, observe: Observe) -> Tensor:
        mine.observe = observe
        with torch.enable_grad():
            leaf = state.hidden.detach().requires_grad_()
            output = stream.forward(module, state, leaf)
        (entering,) = torch.autograd.grad(output, leaf, gradient)
        return entering

    with watch(module, {layer.relative(name): partial(remember, name) for name in layer.linears}):
        yield through


def _show(observe: Observe, name: str, x: Tensor, gradient: Tensor) -> None:
    observe(name, x, gradient)
