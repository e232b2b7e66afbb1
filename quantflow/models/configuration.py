"""A checkpoint's configuration as transformers understands it, without its model code, which takes seconds to import."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers import __version__ as VERSION
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quantflow.errors import InputError, UnsupportedError, first_line
from quantflow.files.checkpoint import Checkpoint
from quantflow.models.graph import FAMILIES, family_for, text_config
from quantflow.models.source import require_numbers

_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
# the language model in the latter
_TABLES = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the checkpoint's configuration; code that comes with the checkpoint is not run.

    Raises:
        InputError: transformers refuses the configuration.
        UnsupportedError: transformers knows no causal language model of this type.
    """
    _require_causal_lm(checkpoint.config.get("model_type"), checkpoint.config.get("architectures"))
    try:
        config = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    except (
        Exception
    ) as error:  # the library raises what its validators raise: no narrower common base than this
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: {first_line(error)}",
            "repair config.json or download it again",
        ) from error
    _require_numbers(config, checkpoint.folder / "config.json")
    return config


def _require_causal_lm(model_type: object, architectures: object) -> None:
    """Refuse what transformers has no causal language model for, and another architecture of a type that it has one for.

    Raises:
        UnsupportedError: naming both.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        family_for(model_type, architectures)
        return
    found = [table.get(model_type) for table in _TABLES] if isinstance(model_type, str) else []
    names = [
        name for known in found if known for name in ((known,) if isinstance(known, str) else known)
    ]
    told = f"config.json: model_type {model_type!r} (architectures {architectures})"
    if not names:
        remedy = "use a causal language model of this version, or round its weights alone: --algorithm rtn --linears PATTERN"
        raise UnsupportedError(
            f"{told} is no causal language model of transformers {VERSION}", remedy
        )
    if architectures is not None and not (
        isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in names
    ):
        raise UnsupportedError(
            f"{told}; this type is supported as {names[0]}",
            "use the causal language model of this family",
        )


def _require_numbers(config: PreTrainedConfig, path: Path) -> None:
    """Refuse sizes and heads that make no model; see `quantflow.models.source.require_numbers`."""
    config = text_config(config)
    # there each layer has its own heads
    names = _SIZES if getattr(config, "is_heterogeneous", False) else (*_SIZES, *_HEADS)
    numbers = {name: getattr(config, name, None) for name in names}
    require_numbers({name: value for name, value in numbers.items() if value is not None}, path)
