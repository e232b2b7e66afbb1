"""Sources of weights for a model that runs layer by layer."""

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
    """A stream's source of weights: a checkpoint (`models.load.Source`), or an artifact."""

    @property
    def config(self) -> "PreTrainedConfig":
        """The model's configuration."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name; a quantized linear counts as its one `NAME.weight`."""

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors that are not quantized; floating ones as `dtype`, None as stored."""

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows [n] of a tensor, [n, columns] as stored.

        The tensor is two-dimensional and not quantized.
        """

    def quantized(self, name: str) -> QuantizedLinear | None:
        """The linear whose weight `name` is; None where it is not quantized."""

    @property
    def ahead(self) -> ReadAhead | None:
        """The reader of tensors before they are asked for; None where there is none."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give a module its weights on a device.

        names are parameter names relative to `module` -> source names.
        """

    def empty_(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Undo `fill_`: no memory is held, and the module tree is as it was."""
