"""Tensor parallelism: each process holds some rows of every matrix, and outputs are gathered.

    q, k, v       rows of some heads; attention over these heads, and their part of the KV cache
    o             takes all heads, gathered; gives some features of the hidden state, gathered
    gate, up      some rows, and silu(gate) * up of them
    down          takes all of these, gathered; gives some features, gathered
    head          some rows of the vocabulary: logits, gathered
    embedding     some rows: the rank that has a token's row gives it

Nothing is added up between processes. Each output is one process's sum over the whole input, in the
order in which a single process sums it, so as far as an output of a kernel does not depend on which
others are computed beside it (none of ours does), the logits have the bits of one process on any
number of ranks and with any scheme (torch promises less; it multiplies matrices that are not
quantized by many rows): scales of tokens and of static inputs, groups of columns, scales of whole
rows are what they are without a cut. The usual cut, o and down by columns, sums up twice a layer in
an order of its own and gives each rank another input to quantize; this one puts together four times
a layer. What lies between the matrices every rank computes for itself.

Rows are contiguous in a file, so a rank's artifact is the whole one with other headers: offsets and
shapes of its rows. Key and value heads that are fewer than the ranks are held by several. Source of
the usual cut: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends.backend import Case
from quantflow.distributed.communicator import Communicator
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats import compressed_tensors
from quantflow.models import architecture
from quantflow.models.architecture import Blueprint
from quantflow.models.graph import UNTRACED
from quantflow.runtime.artifact import Artifact

Spans = Sequence[tuple[int, int]]  # first row and number of rows of each rank
TensorFunction = Callable[[Tensor], Tensor]
# scales of a quantized cache: one number, or one for each kv head
_OF_HEADS = ("k_scale", "v_scale")
# A share of a matrix that is not quantized has a multiple of so many rows: MKL adds up a row in
# another order at the edge of a block of them.
_PLAIN = 4


class Ranks:
    """A rank's share of an artifact, and the functions that gather the outputs of all ranks.

    Attributes:
        artifact: the share; its configuration counts the rank's heads.
    """

    def __init__(self, artifact: Artifact, communicator: Communicator) -> None:
        """Cut; no weight is read.

        Args:
            artifact: the whole, of a family that the lean decoder runs.
            communicator: to the other ranks.

        Raises:
            UsageError: it cannot be cut over so many ranks; names the sizes that can be.
        """
        self._communicator, self._spans = communicator, spans_of(artifact, communicator.world)
        self.artifact = _share(artifact, self._spans, communicator.rank)

    def across(self, product: TensorFunction, feeder: str, name: str) -> TensorFunction:
        """The function from the rank's part of an input to all features of a linear.

        Args:
            product: function from the whole input to the rank's rows.
            feeder: name of the linear whose rows are cut as the input is.
            name: name of the linear.
        """
        inputs = self._widths(feeder)
        whole = self.joined(product, name)
        return lambda x: whole(self._gather(x, inputs))

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
    """The rows of each rank, for each linear and the embedding: source name -> spans.

    Source names come without `.weight`.

    Args:
        artifact: whole artifact, of a family that the lean decoder runs.
        world: number of ranks.

    Raises:
        UnsupportedError: the layers are not like Llama's: q, k, v, o, gate, up and down as linears
            of their own; or another program quantized it.
        UsageError: heads, or blocks of rows, do not go whole; names the numbers of ranks that do,
            up to one per head.
    """
    kind = artifact.checkpoint.config.get("model_type")
    blueprint = architecture.read(artifact.checkpoint.config)
    if kind not in UNTRACED or UNTRACED[kind].residual is None or isinstance(blueprint, str):
        raise UnsupportedError(
            f"{world} ranks share layers like Llama's, not those of {kind}", "leave --ranks out"
        )
    if artifact.linears and artifact.layout is not compressed_tensors:
        cause = (
            f"{artifact.checkpoint.folder}: {world} ranks share an artifact, not another program's "
            "folder"
        )
        raise UnsupportedError(
            cause, f"export it with --format {compressed_tensors.NAME} first, or leave --ranks out"
        )
    spans = _spans(artifact, blueprint, world)
    if isinstance(spans, str):
        counts = range(1, blueprint.heads.num_heads + 1)
        fitting = [
            str(count)
            for count in counts
            if not isinstance(_spans(artifact, blueprint, count), str)
        ]
        raise UsageError(f"{world} ranks: {spans}", f"use {' or '.join(fitting)} ranks")
    return spans


def _spans(artifact: Artifact, blueprint: Blueprint, world: int) -> dict[str, Spans] | str:
    """The spans, or a sentence about what does not divide."""
    num_heads = blueprint.heads.num_heads
    kv_heads = blueprint.heads.num_kv_heads
    head_dim = blueprint.heads.head_dim
    names = blueprint.names
    if num_heads % world or (kv_heads % world and world % kv_heads):
        return f"{num_heads} heads, {kv_heads} of keys and values, do not go whole"
    # rows of a rank's query heads, and of its kv heads, which several ranks hold where they are few
    own, copied = num_heads // world * head_dim, max(1, kv_heads // world) * head_dim
    spans: dict[str, Spans] = {}
    others = [[names.embedding], [artifact.head]]
    for prefix in (f"{names.layers}.{index}" for index in range(blueprint.layers)):
        query, *same = (f"{prefix}.{name}" for name in names.qkv)
        spans[query] = [(rank * own, own) for rank in range(world)]
        spans |= dict.fromkeys(
            same, [(rank * kv_heads // world * head_dim, copied) for rank in range(world)]
        )
        others += [
            [f"{prefix}.{name}" for name in group]
            for group in ((names.output,), names.up, (names.down,))
        ]
    for group in others:
        spans |= dict.fromkeys(group, _even(artifact, group, world))
    for name, rows in spans.items():
        reason = _why_not(artifact, name, rows)
        if reason is not None:
            return reason
    return spans


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


def _share(artifact: Artifact, spans: Mapping[str, Spans], rank: int) -> Artifact:
    """The artifact of one rank: headers of its rows, and its heads."""
    tensors, linears = dict(artifact.checkpoint.tensors), dict(artifact.linears)
    for name, rows in spans.items():
        first, count = rows[rank]
        pieces = {f"{name}.weight": (first, count)}
        if name in linears:
            whole = linears[name]
            pieces = compressed_tensors.row_spans(name, whole.scheme, first=first, count=count)
            linears[name] = replace(
                whole, shape=(count, whole.shape[1]), elsewhere=whole.shape[0] - count
            )
        if f"{name}.bias" in tensors:
            pieces[f"{name}.bias"] = (first, count)
        for key, (start, length) in pieces.items():
            file, info = tensors[key]
            tensors[key] = file, _some_rows(info, start, length)
    blueprint = architecture.read(artifact.checkpoint.config)
    assert isinstance(blueprint, Blueprint)  # `spans_of` refuses others
    # the spans of all layers are alike
    queries, keys = (
        spans[f"{blueprint.names.layers}.0.{name}"][rank] for name in blueprint.names.qkv[:2]
    )
    head_dim = blueprint.heads.head_dim
    for name in (f"{attention}.{end}" for attention in artifact.caches for end in _OF_HEADS):
        if name in tensors and tensors[name][1].shape[0] == blueprint.heads.num_kv_heads:
            file, info = tensors[name]
            tensors[name] = file, _some_rows(info, keys[0] // head_dim, keys[1] // head_dim)
    heads = {
        "head_dim": head_dim,
        "num_attention_heads": queries[1] // head_dim,
        "num_key_value_heads": keys[1] // head_dim,
    }
    checkpoint = replace(
        artifact.checkpoint, tensors=tensors, config={**artifact.checkpoint.config, **heads}
    )
    caches = dict.fromkeys(artifact.caches, heads["num_key_value_heads"])
    return replace(artifact, checkpoint=checkpoint, caches=caches, linears=linears)


def _some_rows(info: TensorInfo, first: int, count: int) -> TensorInfo:
    each = info.nbytes // info.shape[0]
    return replace(
        info, shape=(count, *info.shape[1:]), offset=info.offset + first * each, nbytes=count * each
    )
