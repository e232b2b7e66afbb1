"""A tokenizer as llama.cpp's metadata, from the tokenizer.json that transformers loads.

Here is byte-level BPE; `pieces` has sentence pieces. llama.cpp knows pre-tokenizers by name alone,
each with its own regular expression. A tokenizer that splits text like none of those below is
refused: under another's name it would give other tokens, and nothing would say so. There are two
exceptions. llama.cpp does not apply NFC: text that is not in it already can differ there. And its
expression of GPT-4o's, which gpt-oss has, takes a letter beyond ASCII for a small and for a capital
one alike; `APPROXIMATE` has the sentence that an export says then.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.pieces import pieces
from quantflow.formats.llama_cpp.tokens import ELSEWHERE, special_tokens, tokens
from quantflow.models.token_ids import tokens_of
from quantflow.models.tokenizer import load_tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# DeepSeek V3's, which has the two characters of a line's end as they are
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    for upper, lower in (("*", "+"), ("+", "*"))
)
_SLASHES = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")
DIGITS = "each digit alone"
# (expressions that split before the byte level, whether the byte level splits by its own, whether
# whole words go first) -> llama.cpp's name
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool, bool], str] = {
    ((), True, False): "gpt-2",
    ((DIGITS,), True, False): "smollm",
    ((_WORDS + r"\p{N}{1,3}" + _REST,), False, True): "llama-bpe",
    ((_WORDS + r"\p{N}{1,3}" + _REST,), False, False): "smaug-bpe",  # GLM's too
    ((_WORDS + r"\p{N}" + _REST,), False, False): "qwen2",
    ((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK), False, False): "deepseek-v3",
    ((_CASES + r"\p{N}{1,3}" + _SLASHES,), False, False): "gpt-4o",
}
# llama.cpp's name -> how its tokens may differ from the tokenizer's
APPROXIMATE = {
    "gpt-4o": "llama.cpp does not tell capital from small letters beyond ASCII where it splits "
    "text, so words with such capitals inside may get other tokens"
}


def vocabulary(folder: Path, config: Any) -> dict[str, tuple[str, Any]]:
    """A folder's tokenizer as metadata of a GGUF file: name -> (kind, value).

    Args:
        folder: folder with the tokenizer's files.
        config: transformers' configuration; llama.cpp expects as many tokens as its vocab_size.

    Raises:
        InputError: there is no tokenizer, or it contradicts itself or the model.
        UnsupportedError: llama.cpp would not run the tokenizer as transformers does.
    """
    tokenizer: Any = load_tokenizer(folder)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedError(
            f"{folder}: its tokenizer is {type(tokenizer).__name__}, without a table", ELSEWHERE
        )
    special = {
        "bos": _first(tokenizer.bos_token_id, config.bos_token_id),
        "eos": _first(tokenizer.eos_token_id, config.eos_token_id),
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    plain, whole = (
        tokens_of(tokenizer, "a", where=str(folder), special=added) for added in (False, True)
    )
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    convert = pieces if table["model"].get("byte_fallback") else byte_level
    metadata = convert(
        table, size=config.vocab_size, special=special, around=_around(plain, whole), folder=folder
    )
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return (
        metadata
        if template is None
        else {**metadata, "tokenizer.chat_template": ("string", template)}
    )


def byte_level(
    table: Mapping[str, Any],
    *,
    size: int,
    special: Mapping[str, int | None],
    around: tuple[Sequence[int], Sequence[int]],
    folder: Path,
) -> dict[str, tuple[str, Any]]:
    """A byte-level BPE as metadata.

    Args:
        table: content of tokenizer.json.
        size: rows of the embedding; ids beyond the tokenizer's get tokens that no text gives.
        special: bos, eos, unknown, padding -> id.
        around: ids that the tokenizer puts before and after a text.
        folder: folder of the model, for messages.

    Raises:
        InputError: ids that are taken twice or beyond the embedding, or no end of a text.
        UnsupportedError: another kind of tokenizer, or one that llama.cpp has no name for.
    """
    pre = pre_tokenizer(table, folder=folder)
    texts, types = tokens(table, size=size, folder=folder)
    merges = [
        item if isinstance(item, str) else " ".join(item) for item in table["model"]["merges"]
    ]
    if any(item.count(" ") != 1 for item in merges):
        raise UnsupportedError(
            f"{folder}: merges of tokens with spaces inside, llama.cpp splits them there", ELSEWHERE
        )
    return {
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", pre),
        "tokenizer.ggml.tokens": ("[string]", texts),
        "tokenizer.ggml.token_type": ("[i32]", types),
        "tokenizer.ggml.merges": ("[string]", merges),
        **special_tokens(special, around, folder=folder),
    }


def pre_tokenizer(table: Mapping[str, Any], *, folder: Path) -> str:
    """llama.cpp's name of the rule that splits a text before the merges.

    Raises:
        UnsupportedError: llama.cpp has no name for it, or the tokenizer is no byte-level BPE.
    """
    model, pre = table["model"], table["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    if model.get("type") != "BPE" or not steps or steps[-1].get("type") != "ByteLevel":
        description = f"{model.get('type')} behind {pre.get('type')}"
        cause = (
            f"{folder}: its tokenizer is {description}, written to GGUF is BPE at byte level or "
            "with byte fallback"
        )
        raise UnsupportedError(cause, ELSEWHERE)
    normalizer = table["normalizer"] or {"type": "NFC"}
    odd = [
        f"{key}={model[key]!r}"
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]
    odd += [f"normalizer {normalizer['type']}"] if normalizer != {"type": "NFC"} else []
    odd += ["add_prefix_space=True"] if steps[-1].get("add_prefix_space") else []
    if odd:
        raise UnsupportedError(
            f"{folder}: its tokenizer has {', '.join(odd)}, llama.cpp has no such thing", ELSEWHERE
        )
    key = (
        tuple(map(_split, steps[:-1])),
        bool(steps[-1].get("use_regex", True)),
        bool(model.get("ignore_merges")),
    )
    if key not in PRE_TOKENIZERS:
        cause = (
            f"{folder}: its tokenizer splits text by {json.dumps(pre)[:200]} (ignore_merges "
            f"{key[2]})"
        )
        raise UnsupportedError(
            f"{cause}, known are {', '.join(PRE_TOKENIZERS.values())}", ELSEWHERE
        )
    return PRE_TOKENIZERS[key]


def _split(step: Mapping[str, Any]) -> str:
    """The expression that a step splits by and keeps the matches of, digits, or an unknown one."""
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return DIGITS
    if (
        step.get("type") == "Split"
        and step.get("behavior") == "Isolated"
        and not step.get("invert")
    ):
        return str(step["pattern"].get("Regex"))
    return f"unknown: {json.dumps(step)}"


def _around(plain: Sequence[int], whole: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ids before and after `plain` in `whole`."""
    for start in range(len(whole) - len(plain) + 1):
        if list(whole[start : start + len(plain)]) == list(plain):
            return list(whole[:start]), list(whole[start + len(plain) :])
    return list(whole), []


def _first(*ids: int | Sequence[int] | None) -> int | None:
    """The first id that is there; the first of several that one name has."""
    for candidate in ids:
        if isinstance(candidate, int):
            return candidate
        if candidate:
            return candidate[0]
    return None
