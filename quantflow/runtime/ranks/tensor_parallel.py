"""Tensor parallelism: each process holds some rows of every matrix, and outputs are gathered.

    q, k, v       rows of some heads; attention over these heads, and their part of the KV cache
    o             takes all heads, gathered; gives some features of the hidden state, gathered
    gate, up      some rows, and silu(gate) * up of them
    down          takes all of these, gathered; gives some features, gathered
    experts       gate, up and down as above, of every expert; the weighted sum of a token's
                  experts is taken over a rank's features, and gathered
    head          some rows of the vocabulary: logits, gathered
    embedding     some rows: the rank that has a token's row gives it

Nothing is added up between processes. Each output is one process's sum over the whole input, in the
order in which a single process sums it, so as far as an output of a kernel does not depend on which
others are computed beside it (none of ours does), the logits have the bits of one process on any
number of ranks and with any scheme: scales of tokens and of static inputs, groups of columns,
scales of whole rows are what they are without a cut. The usual cut, o and down by columns, sums up
twice a layer in an order of its own and gives each rank another input to quantize; this one puts
together four times a layer. What lies between the matrices every rank computes for itself.

Routers are whole in every rank, so all ranks choose the same experts. So are the linears from the
hidden state to the latents of multi-head latent attention, whose cache has one kv head: each rank
holds all latents, and its own heads' way to and from them.

Rows are contiguous in a file, so a rank's artifact is the whole one with other headers: offsets and
shapes of its rows. A linear that holds several (q, k and v; gate and up) is several of these first;
where heads lie in blocks of queries, keys and values, a rank has whole blocks or a part of one. Key
and value heads that are fewer than the ranks are held by several. Where all queries share one of
each, as in Falcon 7B with its 71, ranks may have unequal numbers of heads. Source of the usual cut:
Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends.backend import Case
from quantflow.distributed.communicator import Communicator
from quantflow.distributed.head_cut import (
    Spans,
    blocks_of,
    go_whole,
    heads_of_block,
    kv_heads,
    query_heads,
)
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.safetensors_header import DTYPE_BITS, TensorInfo
from quantflow.formats import compressed_tensors
from quantflow.models import architecture
from quantflow.models.architecture import Blueprint
from quantflow.runtime.artifact import Artifact, RunnableLinear
from quantflow.runtime.operations import Norm, normalized

TensorFunction = Callable[[Tensor], Tensor]
# scales of a quantized cache: one number, or one for each kv head
_OF_HEADS = ("k_scale", "v_scale")
# A share of a matrix that is not quantized has a multiple of so many rows: MKL adds up a row in
# another order at the edge of a block of them.
_PLAIN = 4


class Ranks:
    """A rank's share of an artifact, and the functions that gather the outputs of all ranks.

    Attributes:
        artifact: the share.
        blueprint: the model with the rank's heads; a linear that held several is those.
        world: number of ranks.
    """

    def __init__(self, artifact: Artifact, communicator: Communicator) -> None:
        """Cut; no weight is read.

        Args:
            artifact: the whole, of a family that the lean decoder runs.
            communicator: to the other ranks.

        Raises:
            UnsupportedError: see `spans_of`.
            UsageError: it cannot be cut over so many ranks; names the sizes that can be.
        """
        rank, world = communicator.rank, communicator.world
        self.world = world
        whole, blueprint = _taken_apart(artifact, world, rank=rank)
        self._communicator = communicator
        self._spans = _fitting_spans(artifact, whole, blueprint, world)
        self.artifact = _share(whole, blueprint, self._spans, rank=rank, world=world)
        heads, latent = blueprint.heads, blueprint.latent
        of_ranks = query_heads(blueprint, world)
        first, count = of_ranks[rank]
        own = replace(
            heads,
            num_heads=count,
            num_kv_heads=kv_heads(blueprint, world)[rank][1],
            slopes=heads.slopes[first : first + count],
        )
        blocks = max(1, (blueprint.fused.blocks or 1) // world)
        fused = replace(blueprint.fused, blocks=blocks)
        self.blueprint = replace(blueprint, heads=own, fused=fused)
        # kv heads, in order, each from the first rank that holds it
        self._first_holders = [
            index
            for index, (first, _) in enumerate(kv_heads(blueprint, world))
            if index == 0 or first != kv_heads(blueprint, world)[index - 1][0]
        ]
        width = heads.head_dim if latent is None else latent.value
        self._attended = [count * width for _, count in of_ranks]

    def attention(self, product: TensorFunction, name: str) -> TensorFunction:
        """The function from what the rank's heads attended to, to all features of the hidden state.

        Args:
            product: attention's last linear, from all heads to the rank's rows.
            name: name of that linear.
        """
        return self._across(product, self._attended, name)

    def across(self, product: TensorFunction, feeder: str, name: str) -> TensorFunction:
        """The function from the rank's part of an input to all features of a linear.

        Args:
            product: function from the whole input to the rank's rows.
            feeder: name of the linear whose rows are cut as the input is.
            name: name of the linear.
        """
        return self._across(product, self._widths(feeder), name)

    def _across(self, product: TensorFunction, inputs: Sequence[int], name: str) -> TensorFunction:
        whole = self.joined(product, name)
        return lambda x: whole(self._gather(x, inputs))

    def all_of(self, name: str) -> TensorFunction:
        """The function from the rank's outputs of the linear `name` to those of all ranks."""
        widths = self._widths(name)
        return lambda x: self._gather(x, widths)

    def with_whole_norms(
        self, product: TensorFunction, q_norm: Norm, k_norm: Norm
    ) -> TensorFunction:
        """The function to the rank's queries, keys and values, with norms over those of all ranks.

        Args:
            product: function to the rank's queries, keys and values.
            q_norm: norm of all queries of a token.
            k_norm: norm of all its keys.
        """
        heads, rank = self.blueprint.heads, self._communicator.rank
        queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        first_key = self._first_holders.index(
            max(holder for holder in self._first_holders if holder <= rank)
        )

        def normed(x: Tensor) -> Tensor:
            own = product(x)
            parts = self._communicator.gather(own[:, : queries + keys].contiguous())
            side_by_side = parts.transpose(0, 1)  # [N, ranks, queries + keys]
            all_queries = side_by_side[:, :, :queries].reshape(len(x), -1)
            all_keys = side_by_side[:, self._first_holders, queries:].reshape(len(x), -1)
            own[:, :queries] = normalized(all_queries, q_norm, heads.eps)[
                :, rank * queries : (rank + 1) * queries
            ]
            own[:, queries : queries + keys] = normalized(all_keys, k_norm, heads.eps)[
                :, first_key * keys : (first_key + 1) * keys
            ]
            return own

        return normed

    def joined(self, product: TensorFunction, name: str) -> TensorFunction:
        """The function to all rows of the linear `name`, from one to the rank's rows."""
        outputs = self._widths(name)
        return lambda x: self._gather(product(x), outputs)

    def embedding(self, table: Tensor, name: str) -> TensorFunction:
        """The function from token ids [N] to rows of an embedding, [N, H] float32.

        Args:
            table: rows that the rank holds.
            name: name of the embedding.

        Raises:
            UsageError: raised by the function for an id that no rank has a row for.
        """
        spans = self._spans[name]
        rows, first = sum(count for _, count in spans), spans[self._communicator.rank][0]
        ends = torch.tensor([start + count for start, count in spans])

        def embed(ids: Tensor) -> Tensor:
            if int(ids.min()) < 0 or int(ids.max()) >= rows:
                raise UsageError(
                    f"{name}: token ids {int(ids.min())} to {int(ids.max())} of {rows}",
                    "give ids of this model",
                )
            # any row stands for a token of another rank: it is not taken
            own = (ids - first).clamp(0, len(table) - 1)
            parts = self._communicator.gather(
                functional.embedding(own, table).float()
            )  # [ranks, N, H]
            # [N, H]
            return parts[
                torch.bucketize(ids.contiguous(), ends, right=True), torch.arange(len(ids))
            ]

        return embed

    def _widths(self, name: str) -> list[int]:
        return [count for _, count in self._spans[name]]

    def _gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The parts [N, the rank's width] of all ranks, [N, sum of widths].

        Narrower parts travel padded.
        """
        if not len(part):  # a step of a prompt's middle has no logits
            return part.new_empty(0, sum(widths))
        widest = max(widths)
        # [ranks, N, widest]
        parts = self._communicator.gather(
            functional.pad(part, (0, widest - part.shape[1])).contiguous()
        )
        if min(widths) == widest:
            return parts.transpose(0, 1).reshape(len(part), -1)  # [N, ranks * widest]
        return torch.cat(
            [padded[:, :width] for padded, width in zip(parts, widths, strict=True)], dim=1
        )


def spans_of(artifact: Artifact, world: int) -> dict[str, Spans]:
    """The rows of each rank, for each linear that is cut and the embedding: source name -> spans.

    Source names come without `.weight`. The linears that one linear holds have its name and a
    number.

    Args:
        artifact: whole artifact, of a family that the lean decoder runs.
        world: number of ranks.

    Raises:
        UnsupportedError: a family that the lean decoder does not run; another program quantized it;
            linears within one lie in one block of scales.
        UsageError: heads, or blocks of rows, do not go whole; names the numbers of ranks that do,
            up to one per head.
    """
    return _fitting_spans(artifact, *_taken_apart(artifact, world, rank=0), world)


def _fitting_spans(
    artifact: Artifact, apart: Artifact, blueprint: Blueprint, world: int
) -> dict[str, Spans]:
    """The spans of an artifact whose linears are apart; see `spans_of`.

    Args:
        artifact: the whole.
        apart: the same, its linears apart.
        blueprint: the model of `apart`.
        world: number of ranks.
    """
    spans = _spans(apart, blueprint, world)
    if isinstance(spans, str):
        counts = range(1, blueprint.heads.num_heads + 1)
        fitting = [str(count) for count in counts if _fits(artifact, count)]
        raise UsageError(f"{world} ranks: {spans}", f"use {_alternatives(fitting)} ranks")
    return spans


def _alternatives(counts: Sequence[str]) -> str:
    """Numbers of ranks as a message has them: `1 or 2 or 4`, or `1 to 71`."""
    if len(counts) > 4 and counts[-1] == str(len(counts)):
        return f"1 to {counts[-1]}"
    return " or ".join(counts)


def _fits(artifact: Artifact, world: int) -> bool:
    """Whether so many ranks can share an artifact."""
    try:
        apart, blueprint = _taken_apart(artifact, world, rank=0)
    except UnsupportedError:  # a block of scales lies in two linears
        return False
    return not isinstance(_spans(apart, blueprint, world), str)


@dataclass
class _Headers:
    """Headers of tensors, and linears, in which a linear becomes some of its rows.

    Attributes:
        tensors, linears: as in `Checkpoint` and `Artifact`.
    """

    tensors: dict[str, tuple[str, TensorInfo]]
    linears: dict[str, RunnableLinear]

    def cut_(self, name: str, rows: Sequence[tuple[str, int, int]]) -> None:
        """Put linears of some rows in the place of a linear or the embedding.

        Args:
            name: source name.
            rows: name, first row and number of rows of each.
        """
        whole = self.linears.pop(name, None)
        keys = [f"{name}.weight"]
        if whole is not None:
            keys = [*compressed_tensors.tensor_names(name, whole.scheme)]
        keys += [key for key in (f"{name}.bias",) if key in self.tensors]
        old = {key: self.tensors.pop(key) for key in keys}
        for part, first, count in rows:
            pieces = {key: (first, count) for key in (f"{name}.weight", f"{name}.bias")}
            if whole is not None:
                pieces |= compressed_tensors.row_spans(name, whole.scheme, first=first, count=count)
                elsewhere = whole.elsewhere + whole.shape[0] - count
                self.linears[part] = replace(
                    whole, shape=(count, whole.shape[1]), elsewhere=elsewhere
                )
            for key, (file, info) in old.items():
                if key in pieces:
                    info = _some_rows(info, *pieces[key])
                self.tensors[f"{part}{key.removeprefix(name)}"] = file, info

    def cut_tensor_(self, key: str, first: int, count: int) -> None:
        """Let a tensor be some of its rows."""
        file, info = self.tensors[key]
        self.tensors[key] = file, _some_rows(info, first, count)

    def of(self, artifact: Artifact) -> Artifact:
        """The artifact with these headers."""
        checkpoint = replace(artifact.checkpoint, tensors=self.tensors)
        return replace(artifact, checkpoint=checkpoint, linears=self.linears)


def _taken_apart(artifact: Artifact, world: int, *, rank: int) -> tuple[Artifact, Blueprint]:
    """The artifact and its model with a linear for each of those that one linear holds.

    A linear of queries, keys and values stays one where a rank has whole blocks of its heads. Where
    it has a part of one, the linears are those of the rank's block.

    Raises:
        UnsupportedError: see `spans_of`.
    """
    kind = artifact.checkpoint.config.get("model_type")
    blueprint = architecture.read(artifact.checkpoint.config)
    if isinstance(blueprint, str):
        raise UnsupportedError(
            f"{world} ranks share what the lean decoder runs, not {kind}: {blueprint}",
            "leave --ranks out",
        )
    if any(blueprint.linear) or blueprint.heads.output_gate:
        lightning = blueprint.delta is not None and blueprint.delta.lightning
        linear = "lightning attention" if lightning else "gated delta nets"
        raise UnsupportedError(
            f"{world} ranks share attention, not the {linear} of {kind}",
            "leave --ranks out",
        )
    if blueprint.indexer is not None:
        raise UnsupportedError(
            f"{world} ranks share attention, not the indexer of {kind}", "leave --ranks out"
        )
    if artifact.linears and artifact.layout is not compressed_tensors:
        cause = (
            f"{artifact.checkpoint.folder}: {world} ranks share an artifact, not another program's "
            "folder"
        )
        raise UnsupportedError(
            cause, f"export it with --format {compressed_tensors.NAME} first, or leave --ranks out"
        )
    names, heads, mixture = blueprint.names, blueprint.heads, blueprint.mixture
    headers = _Headers(dict(artifact.checkpoint.tensors), dict(artifact.linears))

    def apart(prefix: str, name: str, sizes: Sequence[int], *, first: int = 0) -> None:
        whole = f"{prefix}.{name}"
        edges, unit = [*accumulate(sizes, initial=first)], _unit(artifact, whole)
        edges = [edge for edge in edges if edge < _rows(artifact, whole)]
        if whole in artifact.linears and any(edge % unit for edge in edges):
            raise UnsupportedError(
                f"{world} ranks: {whole}: linears of {', '.join(map(str, sizes))} rows, whose "
                f"scales are of {unit} rows",
                "leave --ranks out",
            )
        headers.cut_(whole, [*zip(_parts(whole, len(sizes)), edges, sizes, strict=False)])

    blocks, counts = blocks_of(blueprint), heads_of_block(blueprint)
    fused = len(names.qkv) == 1 and blocks % world != 0 and world % blocks == 0
    sizes = [counts[part] * heads.head_dim for part in blueprint.fused.order]
    gated = blueprint.form.gated
    for index in range(blueprint.layers):
        prefix = f"{names.layers}.{index}"
        if fused:
            apart(prefix, names.qkv[0], sizes, first=rank * blocks // world * sum(sizes))
        if gated and len(names.up) == 1 and not blueprint.sparse[index]:
            half = _rows(artifact, f"{prefix}.{names.up[0]}") // 2
            apart(prefix, names.up[0], [half, half])
        if gated and mixture is not None and len(mixture.shared) == 2 and blueprint.sparse[index]:
            place = f"{prefix}.{mixture.shared_block or mixture.block}"
            half = _rows(artifact, f"{place}.{mixture.shared[0]}") // 2
            apart(place, mixture.shared[0], [half, half])
    if fused:
        parts = dict(zip(blueprint.fused.order, _parts(names.qkv[0], 3), strict=True))
        names = replace(names, qkv=(parts["q"], parts["k"], parts["v"]))
    if gated and len(names.up) == 1:
        names = replace(names, up=_parts(names.up[0], 2))
    if gated and mixture is not None and len(mixture.shared) == 2:
        mixture = replace(mixture, shared=(*_parts(mixture.shared[0], 2), mixture.shared[1]))
    return headers.of(artifact), replace(blueprint, names=names, mixture=mixture)


def _parts(name: str, count: int) -> tuple[str, ...]:
    """The names of the linears that one linear holds."""
    return tuple(f"{name}.{number}" for number in range(count))


def _spans(artifact: Artifact, blueprint: Blueprint, world: int) -> dict[str, Spans] | str:
    """The spans, or a sentence about what does not divide."""
    heads, names = blueprint.heads, blueprint.names
    if not go_whole(blueprint, world):
        return f"{heads.num_heads} heads, {heads.num_kv_heads} of keys and values, do not go whole"
    blocks = blocks_of(blueprint)
    if len(names.qkv) == 1 and blocks % world:  # else the linear is taken apart
        return f"{heads.num_heads} heads that lie in {blocks} blocks do not go whole"
    spans: dict[str, Spans] = {}
    others = [[names.embedding], [artifact.head]]
    for index in range(blueprint.layers):
        prefix = f"{names.layers}.{index}"
        of_heads = _attention_spans(blueprint, world)
        spans |= {f"{prefix}.{name}": rows for name, rows in of_heads.items()}
        groups = [(names.output,), names.up, (names.down,)]
        if blueprint.sparse[index]:
            groups = [(names.output,), *_experts(blueprint)]
        others += [[f"{prefix}.{name}" for name in group] for group in groups if group]
    for group in others:
        spans |= dict.fromkeys(group, _even(artifact, group, world))
    refused: dict[object, str | None] = {}  # most linears are like another one
    for name, rows in spans.items():
        placement = artifact.linears.get(name)
        alike = (
            _rows(artifact, name),
            None if placement is None else (placement.scheme, placement.shape, placement.backend),
            tuple(rows),
        )
        if alike not in refused:
            refused[alike] = _why_not(artifact, name, rows)
        reason = refused[alike]
        if reason is not None:
            return reason
    return spans


def _attention_spans(blueprint: Blueprint, world: int) -> dict[str, Spans]:
    """The rows of each rank of the linears of a layer that make heads, by their names.

    Those of a linear that was taken apart are of the rank's block.
    """
    heads, names, latent = blueprint.heads, blueprint.names, blueprint.latent
    blocks, counts = blocks_of(blueprint), heads_of_block(blueprint)
    places = [rank * blocks // world for rank in range(world)]  # of each rank's first block

    def rows(of_ranks: Spans, of_block: int, features: int) -> Spans:
        return [
            ((first - place * of_block) * features, count * features)
            for (first, count), place in zip(of_ranks, places, strict=True)
        ]

    def queries(features: int) -> Spans:
        return rows(query_heads(blueprint, world), counts["q"], features)

    if latent is not None:
        query = names.qkv[0] if latent.compressed is None else latent.names.query_up
        return {
            query: queries(latent.plain + latent.rotated),
            latent.names.up: queries(latent.plain + latent.value),
        }
    if len(names.qkv) == 1:
        own = sum(counts.values()) * heads.head_dim * blocks // world  # of whole blocks
        return {names.qkv[0]: [(rank * own, own) for rank in range(world)]}
    copied = rows(kv_heads(blueprint, world), counts["k"], heads.head_dim)
    query, *same = names.qkv
    return {query: queries(heads.head_dim)} | dict.fromkeys(same, copied)


def _experts(blueprint: Blueprint) -> list[tuple[str, ...]]:
    """The linears of a layer's experts that are cut alike, by their names in the layer.

    They are all experts' gates and ups, since their rows lie below each other; all downs and the
    shared one, since these are added up; and gate and up of the shared expert.
    """
    mixture, routing = blueprint.mixture, blueprint.routing
    assert mixture is not None and routing is not None  # a layer is sparse
    places = [f"{mixture.block}.experts.{number}" for number in range(routing.experts)]
    *ups, down = mixture.linears
    shared = [f"{mixture.shared_block or mixture.block}.{name}" for name in mixture.shared]
    return [
        tuple(f"{place}.{name}" for place in places for name in ups),
        (*(f"{place}.{down}" for place in places), *shared[-1:]),
        tuple(shared[:-1]),
    ]


def _even(artifact: Artifact, names: Sequence[str], world: int) -> Spans:
    """The rows of linears in about equal parts, of whole blocks and words of packed zero points."""
    rows, unit = _rows(artifact, names[0]), math.lcm(*(_unit(artifact, name) for name in names))
    units = -(-rows // unit)
    edges = [min(rows, units * rank // world * unit) for rank in range(world + 1)]
    return [(begin, end - begin) for begin, end in zip(edges, edges[1:], strict=False)]


def _why_not(artifact: Artifact, name: str, spans: Spans) -> str | None:
    """Why a linear cannot be cut so; None when it can."""
    rows, unit, placement = _rows(artifact, name), _unit(artifact, name), artifact.linears.get(name)
    for first, count in spans:
        if not count or (count % unit and first + count < rows):
            return (
                f"{name}: {rows} rows are not cut within {unit}, a rank would have {count} from "
                f"{first} on"
            )
        if placement is not None:
            shape = (count, placement.shape[1])
            case = Case(
                scheme=placement.scheme, device=artifact.device, shape=shape, dtype=artifact.dtype
            )
            reason = placement.backend.why_not(case)
            if reason is not None:
                return f"{name}: {count} rows: {reason}"
    return None


def _rows(artifact: Artifact, name: str) -> int:
    placement = artifact.linears.get(name)
    return (
        artifact.checkpoint.infos[f"{name}.weight"].shape[0]
        if placement is None
        else placement.shape[0]
    )


def _unit(artifact: Artifact, name: str) -> int:
    placement = artifact.linears.get(name)
    return _PLAIN if placement is None else compressed_tensors.row_multiple(placement.scheme)


def _share(
    artifact: Artifact,
    blueprint: Blueprint,
    spans: Mapping[str, Spans],
    *,
    rank: int,
    world: int,
) -> Artifact:
    """The artifact of one rank: headers of its rows, and its heads."""
    headers = _Headers(dict(artifact.checkpoint.tensors), dict(artifact.linears))
    for name, rows in spans.items():
        headers.cut_(name, [(name, *rows[rank])])
    names, heads = blueprint.names, blueprint.heads
    repeated = blueprint.repeated_cache
    cached = heads.num_heads if repeated else heads.num_kv_heads
    first, count = (query_heads if repeated else kv_heads)(blueprint, world)[rank]
    for name in (f"{attention}.{end}" for attention in artifact.caches for end in _OF_HEADS):
        scale = headers.tensors.get(name)
        if scale is not None and scale[1].shape[0] == cached:
            headers.cut_tensor_(name, first, count)
    if names.sinks is not None:
        own = query_heads(blueprint, world)[rank]
        for index in range(blueprint.layers):
            headers.cut_tensor_(f"{names.layers}.{index}.{names.sinks}", *own)
    bias = f"{names.head}.bias"
    if artifact.head == names.embedding and bias in headers.tensors:  # of a tied head
        headers.cut_tensor_(bias, *spans[names.embedding][rank])
    return replace(headers.of(artifact), caches=dict.fromkeys(artifact.caches, count))


def _some_rows(info: TensorInfo, first: int, count: int) -> TensorInfo:
    """The place of some rows of a tensor."""
    shape = (count, *info.shape[1:])
    if info.strides is not None:
        start = first * info.strides[0] * DTYPE_BITS[info.dtype] // 8
    else:
        start = first * (info.nbytes // info.shape[0])
    nbytes = info.nbytes // info.shape[0] * count
    return replace(info, shape=shape, offset=info.offset + start, nbytes=nbytes)
