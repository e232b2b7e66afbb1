"""The hidden state between layers: what reads it through a norm, and what adds to it.

    h                    the hidden state, which starts as a row of the embedding
    readers              linears of norm(h): queries, keys, values, gate and up, experts' gate and
                         up, routers
    writers              linears whose outputs are added to h: attention's and the MLP's last, each
                         expert's

Whoever changes the hidden state by an orthogonal matrix changes these and no others. A family's row
names them (`quantflow.models.family`); a linear of a layer that is none of them, nor known to lie
between two others, is refused by its name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantflow.errors import UnsupportedError
from quantflow.models.family import FAMILIES, FamilyRow
from quantflow.models.graph import Graph, Layer

OTHERS_GO = "leave it out; smoothquant and awq go with every family"


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The modules that read and write the hidden state; names are full, without `.weight`.

    Attributes:
        embedding, norm, head: the modules outside the layers.
        readers: linear or router of a layer -> the norm of the hidden state that it reads.
        writers: linears of layers whose outputs are added to the hidden state.
        unit_offset: norms multiply by 1 + their weight, else by it.
        gated_heads: a gate multiplies each channel of what attention puts out, so that values go
            through factors but no rotation.
    """

    embedding: str
    norm: str
    head: str
    readers: Mapping[str, str]
    writers: frozenset[str]
    unit_offset: bool
    gated_heads: bool


def residual_of(graph: Graph) -> Residual:
    """The modules of a model that read and write its hidden state.

    Raises:
        UnsupportedError: they are not known, or a rotation of the hidden state does not go through
            the family's norms.
    """
    family = graph.family.model_type
    row = FAMILIES.get(family)
    if row is None:
        raise UnsupportedError(
            f"the norms of family {family} are not known to commute with rotations", OTHERS_GO
        )
    if row.unrotated is not None:
        raise UnsupportedError(f"the norms of family {family} {row.unrotated}", OTHERS_GO)
    readers: dict[str, str] = {}
    writers: set[str] = set()
    for layer in graph.layers:
        inner = set(_full(layer, _inner(row)))
        own_readers = dict(_readers(row, layer))
        own_writers = set(_writers(row, layer))
        for name in (*layer.linears, *layer.routers):
            if name not in own_readers and name not in own_writers and name not in inner:
                raise UnsupportedError(
                    f"{name}: whether it reads the hidden state of family {family} is not known",
                    OTHERS_GO,
                )
        readers |= own_readers
        writers |= own_writers
    return Residual(
        embedding=row.names.embedding,
        norm=row.names.norm,
        head=row.names.head,
        readers=readers,
        writers=frozenset(writers),
        unit_offset=row.unit_offset,
        gated_heads=row.decoder is not None and row.decoder.output_gate,
    )


def _full(layer: Layer, names: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of those linears and routers that the layer has."""
    own = {*layer.linears, *layer.routers}
    return tuple(name for name in (f"{layer.prefix}.{each}" for each in names) if name in own)


def _inner(row: FamilyRow) -> tuple[str, ...]:
    """Linears between two others, which neither read nor write the hidden state."""
    latent = () if row.latent is None else (row.latent.query_up, row.latent.up)
    return latent if row.indexer is None else (*latent, row.indexer.queries)


def _readers(row: FamilyRow, layer: Layer) -> Iterator[tuple[str, str]]:
    """Each reader of a layer and its norm."""
    names = row.names
    attention = names.qkv
    if row.latent is not None:
        attention = (*attention, row.latent.compressed)
    if row.indexer is not None:
        attention = (*attention, row.indexer.key, row.indexer.weights)
    if row.delta is not None:
        attention = (*attention, *row.delta.inputs, *row.delta.scores)
    for name in _full(layer, attention):
        yield name, f"{layer.prefix}.{names.attention_norm}"
    norm = f"{layer.prefix}.{names.mlp_norm}"
    for name in (*_full(layer, names.up), *_of_mixture(row, layer, reading=True)):
        yield name, norm


def _writers(row: FamilyRow, layer: Layer) -> Iterator[str]:
    """Each writer of a layer."""
    attention = [row.names.output, *([] if row.delta is None else [row.delta.output])]
    yield from _full(layer, (*attention, row.names.down))
    yield from _of_mixture(row, layer, reading=False)


def _of_mixture(row: FamilyRow, layer: Layer, *, reading: bool) -> Iterator[str]:
    """The linears and routers of a sparse layer's mixture that read the hidden state, or write it.

    Routers may be modules of their own, which no graph of linears has.
    """
    mixture = row.mixture
    if mixture is None or not layer.experts:
        return
    *entering, leaving = mixture.linears
    leaves = entering if reading else [leaving]
    for group in layer.groups:
        if group.expert is not None:
            yield from (name for name in group.linears if name.rpartition(".")[2] in leaves)
    if mixture.shared:
        shared = mixture.shared_block or mixture.block
        *inputs, output = (f"{shared}.{name}" for name in mixture.shared)
        yield from _full(layer, tuple(inputs) if reading else (output,))
    if reading:
        yield from (f"{layer.prefix}.{mixture.block}.{name}" for name in mixture.routers)
