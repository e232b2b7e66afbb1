"""The tokenizer of a folder."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from quantflow.errors import InputError, UnsupportedError, extra, first_line
from quantflow.files.checkpoint import CONFIG
from quantflow.files.folder import LIMITS, reading
from quantflow.models.panics import panics_refused
from quantflow.models.tokenizer_bounds import TOKENIZER, refuse_bombs

# keys of config.json that AutoTokenizer reads where a class is named
_READ = ("model_type", "model_name", "tokenizer_class", "_name_or_path")
# Packages that transformers reads a file with and does not depend on: module -> pip's name, and our
# extra.
_PACKAGES = {
    "sentencepiece": ("sentencepiece", "tokenizers"),
    "google.protobuf": ("protobuf", "tokenizers"),
    "tiktoken": ("tiktoken", "tokenizers"),
    "mistral_common": ("mistral-common", "mistral"),
}
_SENTENCEPIECE, _TIKTOKEN = ("sentencepiece", "google.protobuf"), ("tiktoken",)
_READ_BY = {
    "tokenizer.model": _SENTENCEPIECE,
    "spiece.model": _SENTENCEPIECE,
    "sentencepiece.bpe.model": _SENTENCEPIECE,
    "tiktoken.model": _TIKTOKEN,
    "tekken.json": ("mistral_common",),
}
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a token in base64, its rank


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; code that comes with it is not run.

    Raises:
        InputError: there is none, its files are damaged or beyond the bounds of `refuse_bombs`, or
            it is code of the model's own.
        UnsupportedError: a package that reads its file is not installed.
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
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{folder}: its tokenizer is code of its own, which is not run here",
                f"put a {TOKENIZER} into the folder, such as one that transformers saved",
            ) from error
        if (missing := _missing_package(folder)) is not None:
            file, (package, needed) = missing
            raise UnsupportedError(
                f"{folder / file}: read by {package}, which is not installed",
                f"{extra(needed)}, or {package} alone",
            ) from error
        raise InputError(
            f"{folder}: no usable tokenizer ({first_line(error)})",
            "copy the tokenizer files of the model into this folder",
        ) from error


def _missing_package(folder: Path) -> tuple[str, tuple[str, str]] | None:
    """The file of a tokenizer that no installed package reads, and the row of the first it needs.

    None where tokenizer.json says everything, or nothing is missing.
    """
    if (folder / TOKENIZER).is_file():
        return None
    for file, modules in _READ_BY.items():
        if not (folder / file).is_file():
            continue
        if modules is _SENTENCEPIECE:
            with reading(folder / file) as content:
                # Llama 3's own files have SentencePiece's name
                modules = _TIKTOKEN if _TIKTOKEN_LINE.match(content.read(4096)) else modules
        for module in modules:
            if not _is_installed(module):
                return file, _PACKAGES[module]
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


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
