"""A model that is rotated before it is quantized: opened, proved to be the same function, written.

<o>/outside.safetensors holds the rotated tensors outside the layers: the embedding, the last norm
and the head. Export takes them instead of the source's.
"""

from pathlib import Path

from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.files import disk
from quantflow.files.safetensors_writer import Writer
from quantflow.models.capture import LayerStream
from quantflow.models.graph import Graph
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
        hidden=source.config.hidden_size, head_dim=graph.layers[0].head_dim, options=options
    )
    blocks = {
        linear: scheme.rotation
        for linear, scheme in plan.quantized.items()
        if scheme.rotation is not None
    }
    return Rotated(source, graph, rotations, quantized=list(plan.quantized), blocks=blocks)


def prove_rotation(source: Source, rotated: Rotated, graph: Graph, tokens: Tensor) -> None:
    """Compare both models' embedding, first layer and head on tokens [S]; one layer is in memory.

    Raises:
        StatisticsError: the rotated model is another function.
    """
    by = rotated.rotations.residual
    states, outputs, logits = [], [], []
    for weights in (source, rotated):
        stream = LayerStream(weights, graph)
        (state,) = stream.begin([tokens])
        with stream.layer(0) as module:
            output = stream.run(module, state)
        states.append(state.hidden)
        outputs.append(output)
        # Each head sees the same hidden state, so that the layer's rounding does not count twice.
        logits.append(
            stream.finish(outputs[0] if weights is source else hadamard.residual(outputs[0], by))
        )
    _compare(f"{graph.family.layers}: the embedding", hadamard.residual(states[0], by), states[1])
    _compare(graph.layers[0].prefix, hadamard.residual(outputs[0], by), outputs[1])
    _compare("the head", logits[0], logits[1])


def write_outside(folder: Path, rotated: Rotated) -> None:
    """Write the rotated tensors outside the layers, one in memory at a time."""
    infos = rotated.checkpoint.infos
    path = folder / OUTSIDE
    temporary = disk.temporary_for(path)
    with Writer(
        temporary, {name: (infos[name].dtype, infos[name].shape) for name in rotated.outside}
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
