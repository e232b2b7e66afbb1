"""A calibration text, looked at before it is used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantflow.measuring.text import inspect_calibration, read_text
from quantflow.measuring.text_sources import text_path
from quantflow.models.tokenizer import load_tokenizer
from quantflow.progress import SILENT
from quantflow.sources.models import model_folder


def inspect_text(file: str, *, tokenizer: Path, sequence_length: int) -> Mapping[str, Any]:
    """Tokens, padding, BOS, duplicates and truncation of a calibration text, as plain data.

    Args:
        file: a text as `Calibration.source` names it.
        tokenizer: the folder of the model.
        sequence_length: tokens of a calibration sequence; what is longer is truncated.

    Raises:
        InputError: text or tokenizer cannot be read.
    """
    words = load_tokenizer(model_folder(tokenizer, progress=SILENT))
    text = read_text(text_path(file, SILENT), words)
    left_out = {} if text.note is None else {"left_out": text.left_out, "note": text.note}
    return {
        **inspect_calibration(text.documents, words, sequence_length=sequence_length),
        **left_out,
    }
