"""Bounds of a tokenizer's files, for libraries that read them without any.

    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}

Forty of these in a row make terabytes of a word, and end the process that asks for them, or the
machine. So every part of tokenizer.json that changes a text has a bound on the characters that it
makes of one, and the bounds of parts in a row are multiplied. Parts are known by their keys: the
library reads some without their `type`.
"""

import base64
import json
import math
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files.canonical import json_bytes, refuse_many_items

# most characters made of one; tokenizers of released models make up to some hundred
MAX_GROWTH = 1024.0
TOKENIZER = "tokenizer.json"
_FILES = (
    TOKENIZER,
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tekken.json",
)
_CHAINS = ("normalizers", "pretokenizers", "processors", "decoders")
_BY_TYPE = {  # characters of the longest result of one character
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 3 * 4 * 3,  # spaces around it, decomposed, in lower case
    "ByteLevel": 4,  # a character for each byte, and a space before a text
    "Metaspace": 2,
}
_REMEDY = "give the model its own tokenizer files"


def refuse_bombs(folder: Path) -> None:
    """Refuse files of a tokenizer that would take gigabytes to read or to apply.

    Raises:
        InputError: a file is beyond the bounds of every JSON here; parts of tokenizer.json
            together make more than MAX_GROWTH characters of one; or a decoder ends the library on
            short tokens.
    """
    for name in _FILES:
        if (folder / name).is_file():
            data = json_bytes(folder / name)
            refuse_many_items(data, str(folder / name))
            if name == TOKENIZER:
                _refuse_growth(data, folder / name)


def _refuse_growth(data: bytes, path: Path) -> None:
    try:
        table = json.loads(data)
        if not isinstance(table, dict):
            return
        chains = (("normalizer", "pre_tokenizer", "post_processor"), ("decoder",))
        growths = {chain: math.prod(growth(table.get(part)) for part in chain) for chain in chains}
        strip = _panicking(table.get("decoder"))
    except RecursionError as error:
        raise InputError(f"{path}: nested too deep", _REMEDY) from error
    except ValueError:  # no JSON: its reader says where
        return
    if strip is not None:
        raise InputError(
            f"{path}: decoder: Strip from {strip[0]} to {strip[1]} ends the library on short "
            "tokens",
            _REMEDY,
        )
    for chain, most in growths.items():
        if most > MAX_GROWTH:
            raise InputError(
                f"{path}: {', '.join(chain)} may make {most:.3g} characters of one, "
                f"{MAX_GROWTH:g} are allowed",
                _REMEDY,
            )


def growth(part: Any) -> float:
    """The most characters that a part of tokenizer.json makes of one, at least 1.

    Args:
        part: a normalizer, pre-tokenizer, post-processor or decoder, as JSON; anything else makes
            one.
    """
    if not isinstance(part, dict):
        return 1.0
    factor = float(_BY_TYPE.get(str(part.get("type")), 1))
    for key in _CHAINS:
        if isinstance(part.get(key), list):
            factor *= math.prod(growth(one) for one in part[key])
    if isinstance(part.get("content"), str) and "pattern" in part:
        factor *= _replaced(part["pattern"], len(part["content"]))
    if isinstance(part.get("prepend"), str):
        factor *= 1 + len(part["prepend"])
    if isinstance(part.get("precompiled_charsmap"), str):
        factor *= _longest(part["precompiled_charsmap"])
    if isinstance(part.get("single"), list):
        texts = sum(isinstance(one, dict) and "Sequence" in one for one in part["single"])
        factor *= max(1, texts)
    return factor


def _panicking(decoder: Any) -> tuple[int, int] | None:
    """The start and stop of a Strip that panics on tokens of fewer characters; None without one."""
    if not isinstance(decoder, dict):
        return None
    inner = decoder.get("decoders")
    start, stop = decoder.get("start"), decoder.get("stop")
    if type(start) is int and type(stop) is int and stop > 0 and start + stop > 1:
        return start, stop
    return next(
        (
            strip
            for one in (inner if isinstance(inner, list) else ())
            if (strip := _panicking(one)) is not None
        ),
        None,
    )


def _replaced(pattern: Any, content: int) -> float:
    """The characters that one character becomes, where `content` of them replace a match."""
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    return 1.0 + content  # an expression may match between two characters


def _longest(charsmap: str) -> float:
    """The bytes of the longest text that SentencePiece's map of characters has for one."""
    try:
        data = base64.b64decode(charsmap)
    except ValueError:  # the library that reads it names the problem
        return 1.0
    texts = data[4 + int.from_bytes(data[:4], "little") :]  # they follow a trie
    return float(max(1, *map(len, texts.split(b"\0"))))
