"""One rank's share of a model that several run together, whose layers are transformers' modules.

A column-sharded linear computes some of the outputs, and a row-sharded one takes some of the inputs
and adds its products to those of the other ranks. Of a cut weight a rank reads its slice from the
files, and nothing else. Embeddings, norms and the head stay whole; of an embedding only the rows of
the tokens are read anyway.

Where transformers has a tensor-parallel plan its own hooks are installed on every linear that the
plan names, and the modules run on the rank's heads alone. The modules of other families count on
all heads, and so do those of a plan whose kv heads are fewer than the ranks. There a linear puts
the rank's outputs in their places among zeros, attention and activation run over all of it, and the
next linear takes the rank's inputs out again: heads and features go through both each by itself.

Of a mixture whose experts lie on several cards each runs its own and sends their outputs to the
others, which add them up in the order of one process.

Ranks add up in an order of their own, so what leaves a row-sharded linear differs from a whole
model's in the last bits. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import PreTrainedConfig

from quantflow.core.device import HOST, Device
from quantflow.distributed.placement import Placement, is_elsewhere, spans_of
from quantflow.errors import UnsupportedError
from quantflow.models.capture import LayerStream
from quantflow.models.experts import Experts, SpreadExperts
from quantflow.models.load import Source
from quantflow.models.parameters import materialize_, release_
from quantflow.models.reading import read_columns, read_rows

STYLES = {"column": "colwise", "row": "rowwise"}  # what a placement is called in a plan


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The weights of one rank, as `quantflow.models.weights.Weights` asks for them.

    Attributes:
        source: the whole checkpoint.
        placements: source name of a linear -> which part of it this rank holds.
    """

    source: Source
    placements: Mapping[str, Placement]

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return self.source.config

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name."""
        return self.source.names

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors that are not cut; see `Source.read`."""
        return self.source.read(names, dtype)

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows of a tensor that is not cut; see `Source.read_rows`."""
        return self.source.read_rows(name, rows)

    def quantized(self, name: str) -> None:
        """None: nothing is quantized yet."""

    @property
    def ahead(self) -> None:
        """None: nothing is read ahead."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give parameters of a module their values, those of a cut linear this rank's slice.

        Args:
            module: the module.
            names: name in `module` -> source name.
            dtype: dtype of the parameters.
            device: the module's device.
        """
        for name, source in names.items():
            materialize_(module, {name: device.put(self._slice(source, dtype))}, dtype=dtype)

    def empty_(self, module: nn.Module, names: Iterable[str]) -> None:
        """Take the values of parameters away again; they are on meta afterwards."""
        release_(module, names)

    def _slice(self, name: str, dtype: torch.dtype) -> Tensor:
        linear, _, leaf = name.rpartition(".")
        placement = self.placements.get(linear, {"kind": "replicated"})
        if is_elsewhere(placement):
            shape = self.source.checkpoint.tensors[name][1].shape
            return torch.empty((0, *shape[1:]), dtype=dtype)
        if placement["kind"] not in STYLES or (placement["kind"] == "row" and leaf != "weight"):
            # the bias of a row is added once, after the sum
            return self.source.read([name], dtype)[name]
        file, info = self.source.checkpoint.tensors[name]
        path = self.source.checkpoint.folder / file
        if placement["kind"] == "row":
            begin, length = placement["offset"], placement["length"]
            return read_columns(path, info, slice(begin, begin + length)).to(dtype)
        rows = channels_of(placement)
        if leaf == "bias":
            return self.source.read([name], dtype)[name][rows]
        return read_rows(path, info, rows).to(dtype)


def channels_of(placement: Placement) -> Tensor:
    """The numbers of the rows or columns that a card holds, int64, in order."""
    return torch.cat(
        [torch.arange(offset, offset + length) for offset, length in spans_of(placement)]
    )


def held_channels(x: Tensor, placement: Placement, *, axis: int = -1, width: int = 1) -> Tensor:
    """The part of a whole tensor that belongs to a card's share.

    Args:
        x: the tensor.
        placement: the share.
        axis: axis of the tensor along which it lies.
        width: channels of the placement that are one of the tensor's.
    """
    parts = [
        x.narrow(axis, offset // width, length // width) for offset, length in spans_of(placement)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def cut_(
    stream: LayerStream,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    *,
    among_zeros: bool,
) -> None:
    """Make every decoder layer of a stream run on its rank's slices, together with the mesh.

    Args:
        stream: stream over a `RankShare` of the same placements.
        placements: source name of a linear -> the part of it that this rank holds.
        mesh: one-dimensional, the ranks that share the model.
        among_zeros: modules are given all heads and features, with zeros for those of other ranks;
            else transformers' hooks give them the rank's alone.

    Raises:
        UnsupportedError: a placement that is none of replicated, column, row and expert.
    """
    _spread_(stream, placements, mesh)
    modules = {name: layer.module(name) for layer in stream.graph.layers for name in layer.linears}
    for name in stream.graph.linears:
        placement = placements[name]
        if placement["kind"] == "replicated":
            continue
        if placement["kind"] == "expert":
            if is_elsewhere(placement):
                module = stream.model.get_submodule(modules[name])
                _shorten_(module, axis=0, length=0, bias=True)
            continue
        if placement["kind"] not in STYLES:
            raise UnsupportedError(
                f"{name}: is {placement['kind']}, only columns and rows are cut", "use --tp 1"
            )
        module = stream.model.get_submodule(modules[name])
        column = placement["kind"] == "column"
        _shorten_(module, axis=placement["axis"], length=placement["length"], bias=column)
        if not among_zeros:
            _install(STYLES[placement["kind"]], module, mesh)
        elif column:
            module.forward = partial(_among_zeros, module, placement)
        else:
            module.forward = partial(_added_up, module, placement, mesh)


def _among_zeros(module: nn.Module, placement: Placement, x: Tensor) -> Tensor:
    """The rank's outputs in their places, [..., O], zeros elsewhere.

    Each run of rows is a product of its own: ranks that hold the same heads then compute the same
    bits, whatever else they hold.
    """
    weight: Any = module.weight
    bias: Any = module.bias
    lengths = [length for _, length in spans_of(placement)]
    rows = weight.split(lengths)
    biases = [None] * len(rows) if bias is None else bias.split(lengths)
    y = x.new_zeros(*x.shape[:-1], placement["full_shape"][0])
    for (offset, length), some, added in zip(spans_of(placement), rows, biases, strict=True):
        y[..., offset : offset + length] = functional.linear(x, some, added)
    return y


def _added_up(module: nn.Module, placement: Placement, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The outputs of all ranks' inputs, [..., O], of which this one has its own products."""
    weight: Any = module.weight
    bias: Any = module.bias
    y = functional.linear(held_channels(x, placement), weight)
    distributed.all_reduce(y, group=mesh.get_group())
    return y if bias is None else y + bias


def _install(style: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Install transformers' hooks of a style on a linear.

    transformers 5.16 moved the styles and renamed what installs them.
    """
    try:
        library = import_module("transformers.distributed.tensor_parallel")
    except ModuleNotFoundError:
        library = import_module("transformers.integrations.tensor_parallel")
    layer = library.ALL_PARALLEL_STYLES[style]
    if hasattr(layer, "install_forward"):
        layer.install_forward(module, mesh)
    else:
        layer.prepare_module_tp(module, mesh)


def _shorten_(module: nn.Module, *, axis: int, length: int, bias: bool) -> None:
    """Give the weight of a linear, and its bias, another length; values are read later."""
    for leaf in ("weight", *(["bias"] if bias else [])):
        parameter = getattr(module, leaf, None)
        if parameter is not None:
            shape = list(parameter.shape)
            shape[axis if leaf == "weight" else 0] = length
            empty = torch.empty(shape, device="meta")
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))


def _spread_(stream: LayerStream, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Let each mixture of a stream run this card's experts, and take the others' outputs."""
    for layer in stream.graph.layers:
        names = [group.linears[0] for group in layer.groups if group.expert is not None]
        spread = [placements[name] for name in names if placements[name]["kind"] == "expert"]
        if not spread:
            continue
        each, cards = spread[0]["experts"] // mesh.size(), range(mesh.size())
        held = [range(card * each, card * each + each) for card in cards]
        whole = stream.model.get_submodule(stream.graph.family.layers)[layer.index]
        for module in whole.modules():
            if isinstance(module, Experts):
                module.spread = SpreadExperts(
                    card=mesh.get_local_rank(), held=held, gather=partial(_gathered, mesh)
                )


def _gathered(mesh: DeviceMesh, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of every card, of which each has another number."""
    most = max(counts)
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])
    parts = [torch.empty_like(padded) for _ in counts]
    # as bytes, since not every backend moves every dtype
    distributed.all_gather(
        [part.view(torch.uint8) for part in parts],
        padded.view(torch.uint8),
        group=mesh.get_group(),
    )
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
