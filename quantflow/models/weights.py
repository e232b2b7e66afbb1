"""Where a model that runs layer by layer takes its weights from."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from quantflow.core.device import HOST, Device
from quantflow.core.qtensor import QuantizedLinear
from quantflow.models.read_ahead import ReadAhead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Weights(Protocol):
    """Where a stream takes its weights from: a checkpoint (`models.load.Source`), or an artifact."""

    @property
    def config(self) -> "PreTrainedConfig":
        """The model's configuration."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name; a quantized linear counts as its one `NAME.weight`."""

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors that are not quantized; floating ones as `dtype`, None as stored."""

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows [n] of a tensor that is not quantized and two-dimensional, [n, columns] as stored."""

    def quantized(self, name: str) -> QuantizedLinear | None:
        """Read the linear whose weight `name` is, None where it is not quantized."""

    @property
    def ahead(self) -> ReadAhead | None:
        """What reads tensors before they are asked for; None where nothing does."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give a module its weights on a device: parameter name relative to `module` -> source name."""

    def empty_(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Undo `fill_`: no memory is held, and the module tree is as it was."""
