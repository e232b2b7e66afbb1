"""From files to modules: a checkpoint opened, a model without storage, and its parameters put in and taken out."""

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from quantflow.artifact.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.errors import InputError
from quantflow.models.configuration import first_line, load_config
from quantflow.models.experts import view_
from quantflow.models.names import NameMap, twins
from quantflow.models.panics import panics_refused
from quantflow.models.reading import read_rows, read_tensor
from quantflow.models.source import as_linears

_CAUSAL, _WRAPPED = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a supported family, opened for reading.

    Attributes:
        checkpoint: its files and tensor headers.
        config: its configuration as transformers understands it.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig

    @property
    def names(self) -> tuple[str, ...]:
        """Every source name."""
        return tuple(self.checkpoint.tensors)

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors; see `read_tensors`."""
        return read_tensors(self.checkpoint, names, dtype=dtype)

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read rows of a two-dimensional tensor, [n, columns] as stored; see `quantflow.models.reading.read_rows`."""
        file, info = self.checkpoint.tensors[name]
        return read_rows(self.checkpoint.folder / file, info, rows)

    def quantized(self, name: str) -> None:
        """Return None: nothing is quantized yet."""

    def fill_(self, module: nn.Module, names: Mapping[str, str], *, dtype: torch.dtype) -> None:
        """Give parameters of a module their values: name relative to `module` -> source name."""
        for name, source in names.items():
            materialize_(module, {name: self.read([source], dtype)[source]}, dtype=dtype)

    def empty_(self, module: nn.Module, names: Iterable[str]) -> None:
        """Take the values of parameters away again; they are on meta afterwards."""
        release_(module, names)


def open_source(folder: str | Path) -> Source:
    """Open a Hugging Face folder that is to be quantized; reads headers and config.json, no weight.

    Raises:
        InputError: the folder, a header or config.json cannot be used, or the weights are already quantized.
        UnsupportedError: the family is not supported.
    """
    checkpoint = open_checkpoint(Path(folder))
    refuse_quantized(checkpoint)
    config = load_config(checkpoint)
    return Source(checkpoint=as_linears(checkpoint, config), config=config)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder; code that comes with it is not run.

    Raises:
        InputError: there is none, or its files are damaged.
    """
    try:
        with panics_refused(f"{folder}: no usable tokenizer", "copy the tokenizer files of the model into this folder"):
            return AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False, local_files_only=True)
    except InputError:
        raise
    except Exception as error:  # the Rust tokenizers raise bare Exception
        raise InputError(
            f"{folder}: no usable tokenizer ({first_line(error)})",
            "copy the tokenizer files of the model into this folder",
        ) from error


def read_tensors(checkpoint: Checkpoint, names: Iterable[str], *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Read tensors into memory of their own, in the order of `names`.

    Args:
        checkpoint: the opened folder.
        names: source names.
        dtype: what floating tensors are converted to; None keeps every tensor as stored.

    Raises:
        InputError: a name that is not there, a file that ends early, or a tensor that holds NaN or Inf.
        UnsupportedError: a dtype that torch has no name for.
    """
    tensors = {}
    for name in names:
        if name not in checkpoint.tensors:
            raise InputError(f"{name}: not in {checkpoint.folder}", "name a tensor of the checkpoint")
        file, info = checkpoint.tensors[name]
        tensor = read_tensor(checkpoint.folder / file, info)
        tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return tensors


# transformers makes a model without values by replacing functions of torch in the whole process meanwhile. What a second thread
# found replaced it would put back replaced.
_ONE_AT_A_TIME = threading.Lock()


class _EmptyOnMeta(TorchFunctionMode):
    """Tensors that are to be filled are made without storage; what is computed, such as buffers, is computed.

    `torch.device("meta")` would do without storage for the latter too, by formulas in Python for which torch imports its
    compiler: a second, and 60 MB of the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; `torch.empty` on meta where no device is named."""
        given = kwargs or {}
        return func(*args, **(given | {"device": "meta"} if func is torch.empty and given.get("device") is None else given))


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the causal LM of a configuration without storage: parameters on meta, buffers real, eval mode.

    Attention is torch's `scaled_dot_product_attention`, or the family's own where it knows no other. The experts of a mixture
    are linears of their own (`quantflow.models.experts`), and so is every Conv1D, which is a linear that keeps its weight
    transposed. Buffers that a checkpoint holds are read from it like parameters.
    """
    model = as_written(config)
    linears_(model)
    view_(model)
    model.requires_grad_(False)
    return model.eval()


def as_written(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the same with the modules that transformers has.

    Raises:
        InputError: transformers makes no model of it.
    """
    kind = model_class(config)
    if kind.config_class is not type(config) and kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # of a type with more than text, whose causal language model is the text's alone
    attention = "sdpa" if kind._supports_sdpa else "eager"
    try:
        with _ONE_AT_A_TIME, _EmptyOnMeta(), no_init_weights():
            model = kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)
    except MemoryError:
        raise
    except Exception as error:  # the model's code raises whatever a value of config.json makes it stumble over
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
        InputError: the checkpoint and its config.json do not belong together, or a tensor holds NaN or Inf.
        UnsupportedError: the checkpoint's names are not those of its family.
    """
    model = skeleton(source.config)
    names = NameMap(model).bind(source.names)
    for name, module_name in names.to_module.items():
        materialize_(model, {module_name: source.read([name])[name]}, dtype=dtype)
    return model


def materialize_(model: nn.Module, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Give parameters of `model` their values, and buffers that a checkpoint holds.

    Of two tied parameters either name is enough: when one is given, both become the same parameter.

    Args:
        model: a model or a part of it.
        tensors: parameter name relative to `model` -> values; converted to `dtype`, not copied when they have it.
        dtype: the dtype of every parameter that is set.

    Raises:
        InputError: a name that is no parameter and no buffer of `model`, or another shape.
    """
    other = twins(model) if isinstance(model, PreTrainedModel) else {}
    for name, tensor in tensors.items():
        owner, leaf = _owner(model, name)
        buffer = None if leaf in owner._non_persistent_buffers_set else owner._buffers.get(leaf)
        current = buffer if owner._parameters.get(leaf) is None else owner._parameters[leaf]
        if current is None:
            raise _no_parameter(model, name)
        if current.shape != tensor.shape:
            raise InputError(
                f"{name}: checkpoint holds {list(tensor.shape)}, the model needs {list(current.shape)}",
                "check that config.json belongs to these weights",
            )
        if current is buffer:
            owner._buffers[leaf] = tensor.to(dtype if current.is_floating_point() else current.dtype)
            continue
        parameter = nn.Parameter(tensor.to(dtype), requires_grad=False)
        setattr(owner, leaf, parameter)
        if name in other and other[name] not in tensors:
            twin_owner, twin_leaf = _owner(model, other[name])
            setattr(twin_owner, twin_leaf, parameter)


def release_(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Put parameters back on meta, which frees their memory; `names` relative to `module`, None for all of them.

    Buffers stay: their size is that of a vector, and of those that are not in a checkpoint there is no other copy.
    """
    chosen = [name for name, _ in module.named_parameters(remove_duplicate=False)] if names is None else list(names)
    for name in chosen:
        owner, leaf = _owner(module, name)
        parameter = owner._parameters.get(leaf)
        if parameter is not None:
            setattr(owner, leaf, nn.Parameter(parameter.to("meta"), requires_grad=False))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(prefix), leaf
    except AttributeError as error:
        raise _no_parameter(model, name) from error


def _no_parameter(model: nn.Module, name: str) -> InputError:
    return InputError(f"{name}: no parameter of {type(model).__name__}", "check that config.json belongs to these weights")
