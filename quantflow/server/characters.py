"""How long a text of N tokens can be, known before the text is tokenized.

A prompt of megabytes is refused by its length, without seconds of work on its tokens. The bound
must let through every text that has N tokens or fewer. So it follows from the longest token, and
from the parts of the tokenizer that make a text shorter:

    normalizers    e and U+0301 become one character; a text may be replaced by a shorter one
    white space    may be dropped at the ends, between words, or beside a special token

Some tokenizers have one token for a stretch of any length (an unknown word), so they have no bound.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantflow.server.text import byte_level_alphabet

COMPOSED = 4  # most characters that NFC makes one of, such as U+1F82
_KEEPS = frozenset(
    {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "NFD", "NFKD", "Prepend", "Lowercase"}
)
_DROPS_SPACE = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Strip"})


@dataclass(frozen=True)
class CharacterBound:
    """The most characters of a token.

    Attributes:
        per_token: the most characters of a text for each of its tokens.
        keeps_space: whether white space is among them; where it is not, a text may have any amount.
    """

    per_token: int
    keeps_space: bool

    def beyond(self, text: str, tokens: int) -> int | None:
        """The characters that a text of so many tokens can have, if it has more; else None."""
        most = self.per_token * tokens
        if len(text) <= most:
            return None
        # str.split knows all that Unicode calls white space
        counted = len(text) if self.keeps_space else sum(map(len, text.split()))
        return most if counted > most else None


def bound_of(tokenizer: Any) -> CharacterBound | None:
    """The bound of a tokenizer; None where it has none, or none is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = [*_flat(backend.normalizer), *_flat(backend.pre_tokenizer)]
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    in_bytes = any(part["type"] == "ByteLevel" for part in parts)
    if not _every_character_counts(backend.model, vocabulary, in_bytes=in_bytes):
        return None
    factor, keeps_space = 1, True
    for part in parts:
        shrinks = _shrinks(part)
        if shrinks is None:
            return None
        factor *= shrinks
        keeps_space &= part["type"] not in _DROPS_SPACE
    added = backend.get_added_tokens_decoder().values()
    keeps_space &= not any(token.lstrip or token.rstrip for token in added)
    return CharacterBound(max(map(len, vocabulary)) * factor, keeps_space)


def _every_character_counts(model: Any, vocabulary: Mapping[str, int], *, in_bytes: bool) -> bool:
    """Whether each character is a part of a token, and no stretch of unknown ones is one token.

    Args:
        model: model of the tokenizer.
        vocabulary: its tokens.
        in_bytes: whether it reads bytes, each written as a letter of the byte-level alphabet.
    """
    if type(model).__name__ != "BPE":
        return False
    if in_bytes:
        return all(letter in vocabulary for letter in byte_level_alphabet())
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk


def _shrinks(part: Mapping[str, Any]) -> int | None:
    """How many characters a part makes one of, white space left out; None where it may be any."""
    match part["type"]:
        case "NFC" | "NFKC":
            return COMPOSED
        case name if name in _KEEPS | _DROPS_SPACE:
            return 1
        case "Split" | "Punctuation" if part.get("behavior") != "Removed":
            return 1
        case "Replace" if (found := part["pattern"].get("String")) and part["content"]:
            return math.ceil(len(found) / len(part["content"]))
    return None


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json describes them."""
    if part is None:
        return
    waiting: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while waiting:
        one = waiting.pop()
        inner = one.get("normalizers") or one.get("pretokenizers")
        if inner:
            waiting += inner
        else:
            yield one
