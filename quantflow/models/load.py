"""A checkpoint opened for reading its tensors, and the whole model that they make."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quantflow.core.device import HOST, Device
from quantflow.files.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.models.configuration import load_config
from quantflow.models.names import NameMap
from quantflow.models.open import compared
from quantflow.models.parameters import materialize_, release_
from quantflow.models.read_ahead import ReadAhead
from quantflow.models.reading import read_rows, read_tensors
from quantflow.models.skeleton import skeleton


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a supported family, opened for reading.

    Attributes:
        checkpoint: its files and tensor headers.
        config: its configuration as transformers understands it.
        ahead: reader of tensors before they are asked for; None where there is none.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    ahead: ReadAhead | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name."""
        return tuple(self.checkpoint.tensors)

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors, or take those that were read ahead; see `read_tensors`."""
        if self.ahead is None:
            return read_tensors(self.checkpoint, names, dtype=dtype)
        tensors = {}
        for name in names:
            tensor = self.ahead.take(name)
            if tensor is None:
                (tensor,) = read_tensors(self.checkpoint, [name]).values()
            tensors[name] = (
                tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            )
        return tensors

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows of a matrix, [n, columns] as stored; see `reading.read_rows`."""
        file, info = self.checkpoint.tensors[name]
        return read_rows(self.checkpoint.folder / file, info, rows)

    def quantized(self, name: str) -> None:
        """None, since nothing is quantized yet."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give parameters of a module their values on a device.

        Values cross to the device as they are stored, and are converted there.

        Args:
            module: module whose parameters are filled.
            names: name of a parameter relative to `module` -> source name.
            dtype: dtype of the parameters.
            device: device of the parameters.
        """
        for name, source in names.items():
            materialize_(module, {name: device.put(self.read([source])[source])}, dtype=dtype)

    def empty_(self, module: nn.Module, names: Iterable[str]) -> None:
        """Take the values of parameters away again; they are on meta afterwards."""
        release_(module, names)


@contextmanager
def reading_ahead(source: Source, device: Device) -> Iterator[Source]:
    """A source that reads a layer while the device computes the one before.

    On the CPU it is the source itself: workers and memory have enough to do with one layer.
    """
    if device.is_host:
        yield source
        return
    ahead = ReadAhead(source.checkpoint, device)
    try:
        yield replace(source, ahead=ahead)
    finally:
        ahead.close()


def open_source(folder: str | Path) -> Source:
    """Open a Hugging Face folder that is to be quantized; reads headers and config.json, no weight.

    Raises:
        InputError: the folder, a header or config.json cannot be used, or the weights are already
            quantized.
        UnsupportedError: the family is not supported.
    """
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    config = load_config(checkpoint)
    return Source(checkpoint=compared(checkpoint, config), config=config)


def load_model(source: Source, *, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model of a source with its weights, in `dtype`, eval mode, without gradients.

    Raises:
        InputError: the checkpoint and its config.json do not belong together, or a tensor holds NaN
            or Inf.
        UnsupportedError: the checkpoint's names are not those of its family.
    """
    model = skeleton(source.config, dtype=dtype)
    names = NameMap(model).bind(source.names)
    for name, module_name in names.to_module.items():
        materialize_(model, {module_name: source.read([name])[name]}, dtype=dtype)
    return model
