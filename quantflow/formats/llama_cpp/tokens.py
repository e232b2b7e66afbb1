"""What llama.cpp's kinds of tokenizer share: text and type of every id, and the special tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow.errors import InputError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's types of a token
ELSEWHERE = "convert this model with llama.cpp's own converter"


def tokens(table: Mapping[str, Any], *, size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Text and type of every id from 0 to size - 1.

    Args:
        table: content of tokenizer.json.
        size: rows of the embedding; ids beyond the tokenizer's get tokens that no text gives.
        folder: folder of the model, for messages.

    Raises:
        InputError: ids that are taken twice or beyond the embedding, two ids of one text.
    """
    by_id = {index: (text, NORMAL) for text, index in table["model"]["vocab"].items()}
    if len(by_id) != len(table["model"]["vocab"]):
        raise InputError(
            f"{folder}: two tokens of its tokenizer have one id", "restore tokenizer.json"
        )
    for entry in table["added_tokens"]:
        by_id[entry["id"]] = (entry["content"], CONTROL if entry["special"] else USER_DEFINED)
    if max(by_id, default=0) >= size:
        raise InputError(
            f"{folder}: its tokenizer has token {max(by_id)}, config.json says vocab_size {size}",
            "check that the tokenizer belongs to this model",
        )
    listed = [by_id.get(index, (f"[PAD{index}]", UNUSED)) for index in range(size)]
    seen: set[str] = set()
    for text, _ in listed:
        if text in seen:
            raise InputError(
                f"{folder}: two ids of its tokenizer are {text!r}", "restore tokenizer.json"
            )
        seen.add(text)
    return [text for text, _ in listed], [kind for _, kind in listed]


def special_tokens(
    special: Mapping[str, int | None], around: tuple[Sequence[int], Sequence[int]], *, folder: Path
) -> dict[str, tuple[str, Any]]:
    """Metadata fields of the special tokens.

    Args:
        special: bos, eos, unknown, padding -> id.
        around: ids that the tokenizer puts before and after a text.
        folder: folder of the model, for messages.

    Raises:
        InputError: no end of a text is named; llama.cpp would take its own idea of one.
        UnsupportedError: other tokens around a text than bos and eos.
    """
    if special["eos"] is None:
        cause = f"{folder}: its tokenizer and config.json name no end of a text"
        raise InputError(cause, "add eos_token to tokenizer_config.json")
    before, after = list(around[0]), list(around[1])
    if before not in ([], [special["bos"]]) or after not in ([], [special["eos"]]):
        raise UnsupportedError(
            f"{folder}: its tokenizer puts {before} before and {after} after a text, llama.cpp "
            "bos and eos alone",
            ELSEWHERE,
        )
    return {
        **{
            f"tokenizer.ggml.{name}_token_id": ("u32", value)
            for name, value in special.items()
            if value is not None
        },
        "tokenizer.ggml.add_bos_token": ("bool", bool(before)),
        "tokenizer.ggml.add_eos_token": ("bool", bool(after)),
    }
