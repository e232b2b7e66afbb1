"""The tokenizer of a folder."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from quantflow.errors import InputError, first_line
from quantflow.files.checkpoint import CONFIG
from quantflow.files.folder import LIMITS
from quantflow.models.panics import panics_refused
from quantflow.models.tokenizer_bounds import refuse_bombs

# keys of config.json that AutoTokenizer reads where a class is named
_READ = ("model_type", "model_name", "tokenizer_class", "_name_or_path")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; code that comes with it is not run.

    Raises:
        InputError: there is none, or its files are damaged or beyond the bounds of `refuse_bombs`.
        OSError: this process has no descriptor or memory left.
    """
    folder = Path(folder)
    refuse_bombs(folder)
    try:
        with panics_refused(
            f"{folder}: no usable tokenizer",
            "copy the tokenizer files of the model into this folder",
        ):
            return AutoTokenizer.from_pretrained(
                folder, config=_config(folder), trust_remote_code=False, local_files_only=True
            )
    except InputError:
        raise
    except Exception as error:  # the Rust tokenizers raise bare Exception
        if isinstance(error, OSError) and error.errno in LIMITS:
            raise
        raise InputError(
            f"{folder}: no usable tokenizer ({first_line(error)})",
            "copy the tokenizer files of the model into this folder",
        ) from error


def _config(folder: Path) -> PreTrainedConfig | None:
    """The keys of config.json that choose a tokenizer beside the class in tokenizer_config.json.

    None where tokenizer_config.json names no class. Without this configuration transformers imports
    the family's own, and with that its attention kernels and torch's compiler: a second and 80 MB.
    """
    named, model = _table(folder / "tokenizer_config.json"), _table(folder / CONFIG)
    if (
        not isinstance(named.get("tokenizer_class"), str)
        or "auto_map" in named
        or not isinstance(model.get("model_type"), str)
    ):
        return None
    config = PreTrainedConfig()
    for key in _READ:
        if key in model:
            setattr(config, key, model[key])
    return config


def _table(path: Path) -> dict[str, Any]:
    """The table in a file, empty where there is none; a caller that needs it names the problem."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
