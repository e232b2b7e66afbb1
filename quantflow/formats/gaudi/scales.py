"""The scales of Gaudi's nodes: of their inputs, of a weight, and of the output.

The scales of inputs are made of `gaudi_nodes.maxima_of_inputs`. Those of the output are

| node                                    | scale of the output                                |
|-----------------------------------------|----------------------------------------------------|
| linear                                  | input scale * weight scale                         |
| row-parallel linear, outputs measured   | the first output's                                 |
| matmul, and with matrices of 0 and 1    | input 0's * input 1's                              |
| cache                                   | its input's                                        |
| softmax                                 | the output's; there are no inputs                  |
| fused attention, a mixture's operator   | output 0's                                         |

Source: neural_compressor.torch.algorithms.fp8_quant, release 3.10,
`_core/scale_methods/ops_quantizer.py`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantflow.core.device_scales import ARITHMETICS, Target, scale_from_amax, weight_scale
from quantflow.core.scale_rules import ScaleMethod
from quantflow.errors import InputError, QuantflowError, StatisticsError, UsageError
from quantflow.formats.gaudi.experts import is_operator
from quantflow.formats.gaudi.gaudi_nodes import (
    ATTENTION,
    CACHE,
    SOFTMAX,
    layer_type,
    maxima_of_inputs,
)
from quantflow.formats.gaudi.scale_methods import MethodConfig
from quantflow.formats.gaudi.triple import Node


def scales_from(
    nodes: Mapping[str, Node],
    methods: MethodConfig,
    *,
    target: Target,
    arithmetic: str,
    read_weight: Callable[[str], Tensor] | None = None,
) -> dict[str, Node]:
    """Scales of every node of a known kind; a runtime derives those of the others itself.

    Args:
        nodes: the measured nodes.
        methods: method of each node.
        target: the device.
        arithmetic: a key of quantflow.core.device_scales.ARITHMETICS.
        read_weight: function from a linear to its weight, [O, I]; called where a method needs more
            than a maximum.

    Raises:
        StatisticsError: a maximum that is no maximum; the node is named.
        UsageError: a dynamic method, whose scales no file holds.
        InputError: a method needs weights, and there is no `read_weight`.
        UnsupportedError: hardware scales for a device without them.
    """
    scaled = {}
    for name, node in nodes.items():
        method, maxima = methods.method(name, layer_type(name, node)), maxima_of_inputs(name, node)
        if method.dynamic:
            raise UsageError(
                f"{name}: scale method {method.name} computes scales at run time",
                "choose a static method",
            )
        if maxima is None:
            continue
        try:
            scaled[name] = _scales(
                name,
                node,
                maxima,
                method,
                target=target,
                arithmetic=arithmetic,
                read_weight=read_weight,
            )
        except StatisticsError as error:
            raise StatisticsError(f"{name}: {error.cause}", error.remedy) from error
    return scaled


def _scales(
    name: str,
    node: Node,
    maxima: tuple[Tensor, ...],
    method: ScaleMethod,
    *,
    target: Target,
    arithmetic: str,
    read_weight: Callable[[str], Tensor] | None,
) -> Node:
    dtype = ARITHMETICS[arithmetic]

    def activation(value: Tensor) -> Tensor:
        return scale_from_amax(value.max(), method.activation, target=target, arithmetic=arithmetic)

    def product(left: Tensor, right: Tensor) -> Tensor:
        found = (left.to(dtype) * right.to(dtype)).float()
        lost = ~torch.isfinite(found) | (found == 0)
        if lost.any():  # scales are positive
            exact = (left.double() * right.double())[lost][0].item()
            raise StatisticsError(
                f"the output's scale of {exact:.6g} is {found[lost][0].item():g} in {arithmetic}",
                "take the arithmetic BF16 (hp_dtype of the QUANT_CONFIG)",
            )
        return found

    inputs, kind = tuple(activation(value) for value in maxima), layer_type(name, node)
    if kind in (SOFTMAX, ATTENTION) or is_operator(node):
        return Node(inputs=inputs, outputs=(activation(node.outputs[0]),))
    if node.weight is None:
        return Node(inputs=inputs, outputs=(inputs[0] if kind == CACHE else product(*inputs),))
    columns = None
    if method.needs_weights:
        if read_weight is None:
            raise InputError(
                f"{name}: scale method {method.name} needs the weights, not their maxima alone",
                "give the model that was measured with --model",
            )
        weight = read_weight(name)
        scale = weight_scale(weight, method.weight, target=target, arithmetic=arithmetic)
        columns = torch.ones(weight.shape[1]) if scale.ndim else None
    else:
        scale = scale_from_amax(
            node.weight.max(), method.weight, target=target, arithmetic=arithmetic
        )
    output = activation(node.outputs[0]) if len(node.outputs) == 2 else product(scale, inputs[0])
    return Node(inputs=inputs, outputs=(output,), weight=scale, weight_inputs=columns)


def near_steps(
    nodes: Mapping[str, Node], methods: MethodConfig, *, target: Target, within: float = 0.05
) -> list[str]:
    """Nodes whose input maximum is at most `within` above a step of its scale.

    A maximum of 61 instead of 60 takes Gaudi2's scale from 1 to 16: a slightly tighter maximum,
    from other text or another clipping, would keep four binades of small values.
    """
    near = []
    for name, node in nodes.items():
        method, maxima = methods.method(name, layer_type(name, node)), maxima_of_inputs(name, node)
        if not method.needs_measurement or not maxima:
            continue
        try:
            here, below = (
                scale_from_amax(maxima[0].max() * factor, method.activation, target=target)
                for factor in (1.0, 1 - within)
            )
        except QuantflowError:
            continue
        if method.activation.rounding != "IDENTITY" and below < here:
            near.append(name)
    return near
