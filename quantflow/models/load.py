"""From files to modules: a checkpoint opened, and a model without storage."""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from quantflow import process_memory
from quantflow.core.device import HOST, Device
from quantflow.errors import InputError, first_line
from quantflow.files.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.models.configuration import load_config
from quantflow.models.experts import view_
from quantflow.models.joined import joined_
from quantflow.models.names import NameMap
from quantflow.models.parameters import materialize_, release_
from quantflow.models.read_ahead import ReadAhead
from quantflow.models.reading import read_rows, read_tensors
from quantflow.models.source import as_linears

_CAUSAL, _WRAPPED = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a supported family, opened for reading.

    Attributes:
        checkpoint: its files and tensor headers.
        config: its configuration as transformers understands it.
        ahead: what reads its tensors before they are asked for; None where nothing does.
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
        found = {}
        for name in names:
            tensor = self.ahead.take(name)
            if tensor is None:
                (tensor,) = read_tensors(self.checkpoint, [name]).values()
            found[name] = (
                tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            )
        return found

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows of a two-dimensional tensor, [n, columns] as stored; see `quantflow.models.reading.read_rows`."""
        file, info = self.checkpoint.tensors[name]
        return read_rows(self.checkpoint.folder / file, info, rows)

    def quantized(self, name: str) -> None:
        """Return None: nothing is quantized yet."""

    def fill_(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: Device = HOST,
    ) -> None:
        """Give parameters of a module their values on a device: name relative to `module` -> source name.

        They cross as they are stored, and are converted there.
        """
        for name, source in names.items():
            materialize_(module, {name: device.put(self.read([source])[source])}, dtype=dtype)

    def empty_(self, module: nn.Module, names: Iterable[str]) -> None:
        """Take the values of parameters away again; they are on meta afterwards."""
        release_(module, names)


@contextmanager
def reading_ahead(source: Source, device: Device) -> Iterator[Source]:
    """Yield a source whose layers are read while the device computes the ones before; itself where the device is the CPU.

    The CPU's workers and its memory have enough to do with one layer.
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
    return Source(checkpoint=as_linears(checkpoint, config), config=config)


# transformers makes a model without values by replacing functions of torch in the whole process
# meanwhile. What a second thread found replaced it would put back replaced.
_ONE_AT_A_TIME = threading.Lock()


class _EmptyOnMeta(TorchFunctionMode):
    """Tensors that are to be filled are made without storage; what is computed, such as buffers, is computed.

    `torch.device("meta")` would do without storage for the latter too, by formulas in Python for
    which torch imports its compiler: a second, and 60 MB of the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; `torch.empty` on meta where no device is named."""
        given = kwargs or {}
        return func(
            *args,
            **(
                given | {"device": "meta"}
                if func is torch.empty and given.get("device") is None
                else given
            ),
        )


def skeleton(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the causal LM of a configuration without storage: parameters on meta, buffers real, eval mode.

    `dtype` is what the model will run in: some families compute buffers in it, such as the mask of
    OpenAI's GPT.

    Attention is torch's `scaled_dot_product_attention`, or the family's own where it knows no
    other. The experts of a mixture are linears of their own (`quantflow.models.experts`), and so is
    every Conv1D, which is a linear that keeps its weight transposed. A convolution that a
    checkpoint has in parts is in parts (`quantflow.models.joined`). Buffers that a checkpoint holds
    are read from it like parameters.
    """
    model = as_written(config, dtype=dtype)
    linears_(model)
    view_(model)
    joined_(model)
    model.requires_grad_(False)
    return model.eval()


def as_written(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the same with the modules that transformers has.

    Raises:
        InputError: transformers makes no model of it.
    """
    kind = model_class(config)
    process_memory.search_as_usual()  # all that it takes is imported; layers are made from here on
    if kind.config_class is not type(config) and kind.config_class is config.sub_configs.get(
        "text_config"
    ):
        # of a type with more than text, whose causal language model is the text's alone
        config = config.get_text_config()
    attention = "sdpa" if kind._supports_sdpa else "eager"
    try:
        with _ONE_AT_A_TIME, _EmptyOnMeta(), no_init_weights():
            model = kind._from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=attention
            )
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # the model's code raises whatever a value of config.json makes it stumble over
        cause = f"config.json: no {config.model_type} can be made of it ({type(error).__name__}: {first_line(error)})"
        raise InputError(cause, "repair config.json or download it again") from error
    release_(model, [name for name, parameter in model.named_parameters() if not parameter.is_meta])
    model.tie_weights()
    return model


def model_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class of a configuration: the one that config.json names, else its causal language model."""
    kinds = [mapping[type(config)] for mapping in (_CAUSAL, _WRAPPED) if type(config) in mapping]
    named = [kind for kind in kinds if kind.__name__ in (config.architectures or ())]
    return (named or kinds)[0]


def linears_(model: PreTrainedModel) -> None:
    """Put a linear on meta in the place of every Conv1D of a model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(name, nn.Linear(module.nx, module.nf, device="meta"))


def load_model(source: Source, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the whole model of a source with its weights, in `dtype`, eval mode, without gradients.

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
