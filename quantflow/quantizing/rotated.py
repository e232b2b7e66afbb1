"""A checkpoint whose model is rotated while it is read: every tensor is the rotated model's.

So the rotated model runs layer by layer like any other, and is never in memory or on disk as a
whole. A head that is tied to the embedding is a tensor of its own in it, since a rotation changes
the two differently. Linears that will be quantized come in float32, everything else in the dtype in
which it is stored, as the artifact will hold it. Where a linear's input is rotated at run time, in
blocks, `fill_` gives the linear a hook that does so, and `empty_` takes it away.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from quantflow.core.cast import WIDER_MODEL, cast
from quantflow.core.device import HOST, Device
from quantflow.core.dtypes import DTYPES
from quantflow.core.orthogonal import HadamardRotation, mixed
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models.graph import Graph, LinearGroup, text_config
from quantflow.models.load import Source
from quantflow.models.parameters import materialize_
from quantflow.models.read_ahead import ReadAhead
from quantflow.models.residual import residual_of
from quantflow.numerics import output_blocks
from quantflow.transforms import hadamard
from quantflow.transforms.hadamard import Rotations


class Rotated:
    """A source, rotated; it satisfies the `Weights` protocol of quantflow.models.weights.

    Attributes:
        rotations: rotations of the model.
    """

    def __init__(
        self,
        source: Source,
        graph: Graph,
        rotations: Rotations,
        *,
        quantized: Collection[str],
        blocks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Look at the names; no weight is read.

        Args:
            source: the checkpoint.
            graph: its graph.
            rotations: rotations of the model.
            quantized: names of the linears that will be quantized.
            blocks: linear whose input is rotated while the model runs -> channels of one block.

        Raises:
            UnsupportedError: rotations do not go through the family's norms.
        """
        self.rotations = rotations
        self._source, self._graph = source, graph
        self._quantized, self._blocks = frozenset(quantized), dict(blocks)
        self._hooks: dict[str, Any] = {}  # source name -> what takes its hook away
        self._residual = residual_of(graph)
        self._head, self._embedding = (
            f"{name}.weight" for name in (self._residual.head, self._residual.embedding)
        )
        self._tied = self._head not in source.names
        self._config = _untied(source.config) if self._tied else source.config
        head = None if self._residual.gated_heads else rotations.head
        per_head: list[LinearGroup] = [
            group
            for layer in graph.layers
            for group in layer.groups
            if group.per_head and head is not None and layer.head_dim == head.size
        ]
        self._values = {group.feeder for group in per_head}
        self._value_readers = {name for group in per_head for name in group.linears}
        self._norms = frozenset({*self._residual.readers.values(), self._residual.norm})
        self._linears = frozenset(
            {*self._residual.readers, *self._residual.writers, *graph.linears}
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The source's files and tensor headers."""
        return self._source.checkpoint

    @property
    def config(self) -> PreTrainedConfig:
        """The source's configuration, which ties nothing where the source ties the head."""
        return self._config

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name, and that of a head that is tied in the source."""
        return (*self._source.names, *([self._head] if self._tied else []))

    @property
    def outside(self) -> tuple[str, ...]:
        """The tensors outside the layers that are rotated."""
        return (self._embedding, f"{self._residual.norm}.weight", self._head)

    def info(self, name: str) -> TensorInfo:
        """The header of a tensor in the source; a tied head's is the embedding's."""
        stored = self._embedding if self._tied and name == self._head else name
        return self.checkpoint.infos[stored]

    def changes(self, name: str) -> bool:
        """Whether the rotated model's tensor differs from the source's."""
        module, _, leaf = name.rpartition(".")
        if module in self._norms or name in self.outside:
            return True
        if module in self._residual.writers or module in self._values:
            return True
        return leaf == "weight" and (
            module in self._residual.readers
            or module in self._value_readers
            or module in self._blocks
        )

    def in_float32(self) -> "Rotated":
        """The same model with every linear and router in float32, none rounded to how it is stored.

        So a router chooses the experts that the source's chooses.
        """
        return Rotated(
            self._source,
            self._graph,
            self.rotations,
            quantized=self._linears,
            blocks=self._blocks,
        )

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors of the rotated model.

        Args:
            names: source names.
            dtype: dtype of floating tensors; None reads them as the artifact holds them.

        Raises:
            InputError: see `quantflow.models.reading.read_tensors`.
        """
        tensors = {}
        for name in names:
            tensor = self._read(name)
            tensors[name] = (
                tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            )
        return tensors

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows [n] of a matrix, [n, columns]; the embedding's are rotated."""
        found = self._source.read_rows(name, rows)
        if name != self._embedding:
            return found
        turned = hadamard.residual(found, self.rotations.residual)
        return cast(name, turned, found.dtype, remedy=WIDER_MODEL)

    def gradient_sum(self, name: str, sums: Tensor) -> Tensor:
        """The `gradient_sum` of a linear of the rotated model, from that of the source.

        Queries, keys, routers and what stands behind a gate are not rotated, so their sums stay.

        Args:
            name: name of the linear.
            sums: [O, W] float32 (quantflow/numerics/output_blocks.py).
        """
        if name in self._residual.writers:
            sums = output_blocks.rotated(sums, self.rotations.residual)
        if name in self._values and self.rotations.head is not None:
            sums = output_blocks.rotated(sums, self.rotations.head)
        return sums

    def quantized(self, name: str) -> None:
        """None: nothing is quantized yet."""

    @property
    def ahead(self) -> ReadAhead | None:
        """The reader that reads the source's tensors before they are asked for."""
        return self._source.ahead

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give parameters of a module their values on a device.

        Args:
            module: the module.
            names: name relative to `module` -> source name.
            dtype: dtype of the parameters.
            device: the module's device.
        """
        for name, source in names.items():
            materialize_(module, {name: device.put(self.read([source])[source])}, dtype=dtype)
            linear = source.removesuffix(".weight")
            if linear != source and linear in self._blocks:
                self._unhook(source)
                turn = partial(_mix_input, block=self._blocks[linear])
                self._hooks[source] = module.get_submodule(
                    name.rpartition(".")[0]
                ).register_forward_pre_hook(turn)

    def empty_(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Take the values of parameters away again; they are on meta afterwards."""
        for source in names.values():
            self._unhook(source)
        self._source.empty_(module, names)

    def _unhook(self, source: str) -> None:
        handle = self._hooks.pop(source, None)
        if handle is not None:
            handle.remove()

    def _read(self, name: str) -> Tensor:
        (stored,) = self._source.read([self.info(name).name]).values()
        module, _, leaf = name.rpartition(".")
        by = self.rotations.residual
        residual = self._residual
        if module in self._norms:
            return torch.zeros_like(stored) if residual.unit_offset else torch.ones_like(stored)
        if name == self._embedding:
            return _embedding(name, stored, by)
        if name == self._head:
            return hadamard.reader(
                stored, self._norm(residual.norm), by, dtype=stored.dtype, name=name
            )
        if not self.changes(name):
            return stored
        dtype = (
            torch.float32
            if module in self._quantized and leaf == "weight"
            else DTYPES[self.info(name).dtype]
        )
        return cast(name, self._linear(stored, module, leaf=leaf), dtype, remedy=WIDER_MODEL)

    def _linear(self, tensor: Tensor, module: str, *, leaf: str) -> Tensor:
        """The weight or the bias of a linear of a layer, float32."""
        by, head = self.rotations.residual, self.rotations.head
        norm = self._residual.readers.get(module)
        if leaf == "weight" and norm is not None:
            tensor = hadamard.reader(tensor, self._norm(norm), by, dtype=torch.float32)
        if leaf == "weight" and module in self._value_readers and head is not None:
            tensor = hadamard.value_reader(tensor, head)
        if leaf == "weight" and module in self._blocks:
            tensor = hadamard.mixed_reader(tensor, self._blocks[module])
        if module in self._residual.writers:
            tensor = hadamard.writer(tensor, by, dtype=torch.float32)
        if module in self._values and head is not None:
            tensor = hadamard.values(tensor, head)
        return tensor

    def _norm(self, name: str) -> Tensor:
        """What a norm multiplies by, [H]."""
        (weight,) = self._source.read([f"{name}.weight"]).values()
        return weight.float() + 1 if self._residual.unit_offset else weight


def _mix_input(module: nn.Module, inputs: tuple[Tensor, ...], *, block: int) -> tuple[Tensor, ...]:
    del module  # the signature is that of torch's hooks
    return (mixed(inputs[0], block), *inputs[1:])


def _untied(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration of a model whose head is a tensor of its own."""
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    text_config(untied).tie_word_embeddings = False
    return untied


def _embedding(name: str, stored: Tensor, by: HadamardRotation) -> Tensor:
    return hadamard.reader(stored, torch.ones(stored.shape[1]), by, dtype=stored.dtype, name=name)
