"""A model without storage: transformers' modules, made of a configuration alone."""

import copy
import threading
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from quantflow import process_memory
from quantflow.errors import InputError, first_line
from quantflow.models.experts import view_
from quantflow.models.joined import joined_
from quantflow.models.parameters import release_

_CAUSAL, _WRAPPED = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
# transformers makes a model without values by replacing functions of torch in the whole process
# meanwhile. A second thread would take the replacements for torch's functions and put those back.
_ONE_AT_A_TIME = threading.Lock()


class _EmptyOnMeta(TorchFunctionMode):
    """Tensors that will be filled get no storage; those that are computed, such as buffers, do.

    `torch.device("meta")` would give none of them storage, by formulas in Python for which torch
    imports its compiler: a second, and 60 MB of the process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; `torch.empty` on meta where no device is named."""
        keywords = kwargs or {}
        if func is torch.empty and keywords.get("device") is None:
            keywords = {**keywords, "device": "meta"}
        return func(*args, **keywords)


def skeleton(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal LM of a configuration: parameters on meta, buffers with values, eval mode.

    Attention is torch's `scaled_dot_product_attention`, or the family's own where it knows no
    other. The experts of a mixture are linears of their own (`quantflow.models.experts`), and so is
    every Conv1D, a linear that keeps its weight transposed. A convolution that a checkpoint has in
    parts is in parts (`quantflow.models.joined`). Buffers that a checkpoint holds are read from it
    like parameters.

    Args:
        config: transformers' configuration.
        dtype: dtype that the model will run in; some families compute buffers in it, such as the
            mask of OpenAI's GPT.
    """
    model = as_written(config, dtype=dtype)
    linears_(model)
    view_(model)
    joined_(model)
    model.requires_grad_(False)
    return model.eval()


def as_written(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model with transformers' own modules.

    Raises:
        InputError: transformers makes no model of it.
    """
    kind = model_class(config)
    # everything is imported by now; from here on layers are made
    process_memory.search_as_usual()
    if kind.config_class is not type(config) and kind.config_class is config.sub_configs.get(
        "text_config"
    ):
        # a type with more than text, whose causal language model is of the text alone
        config = config.get_text_config()
    attention = "sdpa" if kind._supports_sdpa else "eager"
    try:
        with _ONE_AT_A_TIME, _EmptyOnMeta(), no_init_weights():
            model = kind._from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=attention
            )
    except MemoryError:
        raise
    # the model's code raises anything where a value of config.json is wrong for it
    except Exception as error:
        raise InputError(
            f"config.json: no {config.model_type} can be made of it ({type(error).__name__}: "
            f"{first_line(error)})",
            "repair config.json or download it again",
        ) from error
    release_(model, [name for name, parameter in model.named_parameters() if not parameter.is_meta])
    model.tie_weights()
    return model


def model_class(config: PreTrainedConfig) -> Any:
    """The class of a configuration: the one that it names, else its causal language model."""
    kinds = [mapping[type(config)] for mapping in (_CAUSAL, _WRAPPED) if type(config) in mapping]
    named = [kind for kind in kinds if kind.__name__ in (config.architectures or ())]
    return (named or kinds)[0]


def linears_(model: PreTrainedModel) -> None:
    """Put a linear on meta in the place of every Conv1D of a model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(name, nn.Linear(module.nx, module.nf, device="meta"))
