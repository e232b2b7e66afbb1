"""A checkpoint's configuration as transformers understands it.

Nothing here imports transformers' model code, which takes seconds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers import __version__ as VERSION
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quantflow.errors import InputError, UnsupportedError, first_line
from quantflow.files.checkpoint import QUANTIZATION, Checkpoint
from quantflow.models.family import FAMILIES
from quantflow.models.graph import UNTRACED, family_for, may_be_causal_lm, text_config
from quantflow.models.source import require_numbers

_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
# the second holds types with a language model beside more
_TABLES = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The checkpoint's configuration; code that comes with the checkpoint is not run.

    Raises:
        InputError: transformers refuses the configuration.
        UnsupportedError: transformers knows no causal language model of this type.
    """
    model_type = checkpoint.config.get("model_type")
    row = FAMILIES.get(str(model_type))
    read_as = None if row is None else row.read_as
    _require_causal_lm(read_as or model_type, checkpoint.config.get("architectures"))
    try:
        if checkpoint.rewritten:
            config = CONFIG_MAPPING[str(model_type)].from_dict(checkpoint.config)
        elif read_as is not None:
            own = {"model_type", "auto_map"}  # they name a class that is code beside the weights
            values = {key: checkpoint.config[key] for key in checkpoint.config.keys() - own}
            config = CONFIG_MAPPING[read_as].from_dict(values)
        else:
            config = AutoConfig.from_pretrained(
                checkpoint.folder, trust_remote_code=False, local_files_only=True
            )
    # transformers raises whatever its validators raise, which have no narrower common base
    except Exception as error:
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: {first_line(error)}",
            "repair config.json or download it again",
        ) from error
    _require_numbers(config, checkpoint.folder / "config.json")
    _rotate_as_told_(config, checkpoint.config)
    if QUANTIZATION not in checkpoint.config:  # left over beside weights that are not quantized
        for part in (config, text_config(config)):
            vars(part).pop(QUANTIZATION, None)
    return config


def _rotate_as_told_(config: PreTrainedConfig, told: Mapping[str, Any]) -> None:
    """Set the base of the angles where transformers does not look for it in config.json (DBRX)."""
    row = FAMILIES.get(str(told.get("model_type")))
    part, _, key = ("" if row is None or row.decoder is None else row.decoder.theta_key).rpartition(
        "."
    )
    inside = told.get(part)
    if isinstance(inside, Mapping) and key in inside and told.get("rope_parameters") is None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": inside[key]}


def _require_causal_lm(model_type: object, architectures: object) -> None:
    """Refuse a type without a causal language model in transformers, and any other architecture.

    Raises:
        UnsupportedError: naming both.
    """
    if isinstance(model_type, str) and model_type in UNTRACED:
        family_for(model_type, architectures)
        return
    entries = [table.get(model_type) for table in _TABLES] if isinstance(model_type, str) else []
    names = [
        name
        for entry in entries
        if entry
        for name in ((entry,) if isinstance(entry, str) else entry)
    ]
    subject = f"config.json: model_type {model_type!r} (architectures {architectures})"
    if not names:
        raise UnsupportedError(
            f"{subject} is no causal language model of transformers {VERSION}",
            "use a causal language model of this version, or round its weights alone: --algorithm "
            "rtn --linears PATTERN",
        )
    if not may_be_causal_lm(architectures, names, str(model_type)):
        raise UnsupportedError(
            f"{subject}; this type is supported as {names[0]}",
            "use the causal language model of this family",
        )


def _require_numbers(config: PreTrainedConfig, path: Path) -> None:
    """Refuse sizes and heads that make no model; see `quantflow.models.source.require_numbers`."""
    config = text_config(config)
    # each layer of a heterogeneous model has its own heads
    names = _SIZES if getattr(config, "is_heterogeneous", False) else (*_SIZES, *_HEADS)
    numbers = {name: getattr(config, name, None) for name in names}
    require_numbers({name: value for name, value in numbers.items() if value is not None}, path)
