"""A model that is rotated before it is quantized: opened, proved to be the same function, written.

<o>/outside.safetensors holds the rotated tensors outside the layers: the embedding, the last norm
and the head. Export takes them instead of the source's.
"""

from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.orthogonal import HadamardRotation
from quantflow.errors import StatisticsError
from quantflow.files import disk
from quantflow.files.safetensors_writer import Writer
from quantflow.models.capture import LayerStream
from quantflow.models.graph import Graph, Layer
from quantflow.models.load import Source
from quantflow.models.reading import bytes_of
from quantflow.planning.plan import OUTSIDE, Plan
from quantflow.quantizing.layer_error import relative_error
from quantflow.quantizing.rotated import Rotated
from quantflow.transforms import ROTATIONS, hadamard

# ||change||^2 / ||output||^2: what the source's dtype rounds away of embedding and head (2^-9 of
# each number in bfloat16, squared and averaged 1e-6), and not another function.
TOLERANCE = 1e-4


def rotated_source(source: Source, graph: Graph, plan: Plan) -> Source | Rotated:
    """The source as the plan has it read.

    Raises:
        UnsupportedError: the family cannot be rotated.
    """
    if plan.rotation is None:
        return source
    name, options = plan.rotation
    rotations = ROTATIONS[name].solve(
        hidden=source.config.hidden_size, head_dim=head_dim_of(graph), options=options
    )
    blocks = {
        linear: scheme.rotation
        for linear, scheme in plan.quantized.items()
        if scheme.rotation is not None
    }
    return Rotated(source, graph, rotations, quantized=list(plan.quantized), blocks=blocks)


def head_dim_of(graph: Graph) -> int:
    """Features of the value heads that a rotation goes through; 1 where there are none."""
    found = (layer.head_dim for layer in graph.layers for group in layer.groups if group.per_head)
    return next(found, 1)


def prove_rotation(source: Source, rotated: Rotated, graph: Graph, tokens: Tensor) -> None:
    """Compare both models' embedding, first layer of each kind and head on tokens [S].

    One layer is in memory. Layers are compared with every linear in float32 and from the same
    hidden state, so that routers choose the same experts.

    Raises:
        StatisticsError: the rotated model is another function.
    """
    by = rotated.rotations.residual
    first, second = (LayerStream(weights, graph) for weights in (source, rotated.in_float32()))
    (state,), (turned,) = first.begin([tokens]), second.begin([tokens])
    embedded = _turned(first, state.hidden, by)
    _compare(f"{graph.family.layers}: the embedding", embedded, turned.hidden)
    kinds = [_kind(layer) for layer in graph.layers]
    hidden = state.hidden
    for layer in graph.layers[: max(map(kinds.index, kinds)) + 1]:
        with first.layer(layer.index) as module:
            output = first.forward(module, state, hidden)
        if kinds.index(kinds[layer.index]) == layer.index:
            with second.layer(layer.index) as module:
                found = second.forward(module, turned, _turned(first, hidden, by))
            _compare(layer.prefix, _turned(first, output, by), found)
        hidden = output
    # Each head sees the same hidden state.
    _compare("the head", first.finish(hidden), second.finish(_turned(first, hidden, by)))


def _kind(layer: Layer) -> tuple[str, ...]:
    """What tells kinds of layers apart: the names of their linears, but those of experts."""
    alone = [group for group in layer.groups if group.expert is None]
    names = [layer.inside(name) for group in alone for name in group.linears]
    return (*names, str(bool(layer.experts)))


def _turned(stream: LayerStream, hidden: Tensor, by: HadamardRotation) -> Tensor:
    """A hidden state of the rotated model, with the values that are carried beside it as they are.

    Args:
        stream: runner of the model.
        hidden: hidden state of the original, as `LayerStream.forward` returns it.
        by: rotation of the residual.
    """
    alone = stream.alone(hidden)
    return torch.cat([hadamard.residual(alone, by), hidden[..., alone.shape[-1] :]], dim=-1)


def write_outside(folder: Path, rotated: Rotated) -> None:
    """Write the rotated tensors outside the layers, one in memory at a time."""
    path = folder / OUTSIDE
    temporary = disk.temporary_for(path)
    with Writer(
        temporary,
        {
            name: (info.dtype, info.shape)
            for name in rotated.outside
            for info in [rotated.info(name)]
        },
    ) as writer:
        for name in rotated.outside:
            writer.write(name, bytes_of(rotated.read([name])[name]))
    disk.replace(temporary, path)


def _compare(what: str, expected: Tensor, actual: Tensor) -> None:
    change = relative_error(expected, actual, name=what)
    if change > TOLERANCE:
        raise StatisticsError(
            f"{what}: hadamard changed the output by {change:.3g} (relative, squared)",
            "this family's norms and linears do not fit together as its graph says; leave "
            "hadamard out",
        )
