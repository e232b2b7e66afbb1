"""A decoder layer of a model that runs with other weights than its own, and through which gradients flow to them.

The layer's own forward is run, with what the model called it with (quantflow/models/capture.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from quantflow.core.block import Run
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer


@contextmanager
def running(
    stream: LayerStream, module: nn.Module, layer: Layer, states: Sequence[State], weights: Mapping[str, Tensor]
) -> Iterator[Run]:
    """Yield a function that runs a sequence through the layer, from several threads if need be; its own weights come back.

    Args:
        stream: the model.
        module: the layer, as `stream.layer` yields it.
        layer: which one.
        states: the sequences as they enter the layer.
        weights: linear -> weight [O, I], in the stream's dtype; linears that are not named keep their own.
    """
    own: dict[nn.Module, nn.Parameter | None] = {}
    try:
        for name, weight in weights.items():
            linear = module.get_submodule(layer.relative(name))
            own[linear] = linear._parameters.pop(
                "weight"
            )  # a parameter would be a leaf of its own, without a gradient to these
            linear.weight = weight

        def run(number: int) -> Tensor:
            return stream.forward(module, states[number], states[number].hidden)

        yield run
    finally:
        for linear, parameter in own.items():
            del linear.weight
            linear.register_parameter("weight", parameter)
