"""A tokenizer of sentence pieces as llama.cpp's metadata.

It is BPE over characters, with bytes for what the vocabulary lacks. tokenizer.json ranks merges of
two tokens; llama.cpp scores tokens and merges any two whose text is one, the best score first. Both
do the same when two things hold, and these are checked: the merges are every way to make a token of
two, and the ways of one token stand beside each other in rank. The conversion from SentencePiece
writes them so. The score is the rank, negated.

One thing differs: llama.cpp puts its space before a text that begins with one too, some versions of
transformers do not.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, llm_tokenizer_spm.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.tokens import (
    BYTE,
    ELSEWHERE,
    NORMAL,
    UNKNOWN,
    special_tokens,
    tokens,
)

SPACE = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}


def pieces(
    table: Mapping[str, Any],
    *,
    size: int,
    special: Mapping[str, int | None],
    around: tuple[Sequence[int], Sequence[int]],
    folder: Path,
) -> dict[str, tuple[str, Any]]:
    """A tokenizer with byte fallback as metadata.

    Args:
        table: content of tokenizer.json.
        size: rows of the embedding; ids beyond the tokenizer's get tokens that no text gives.
        special: bos, eos, unknown, padding -> id.
        around: ids that the tokenizer puts before and after a text.
        folder: folder of the model, for messages.

    Raises:
        InputError: ids that are taken twice or beyond the embedding, or no end of a text.
        UnsupportedError: llama.cpp would not run the tokenizer as transformers does.
    """
    prefix = _space_prefix(table, folder=folder)
    texts, types = tokens(table, size=size, folder=folder)
    lacking = next(
        (name for name in map(_byte, range(256)) if name not in table["model"]["vocab"]), None
    )
    if lacking is not None:
        raise UnsupportedError(
            f"{folder}: its tokenizer falls back to bytes and has no {lacking}", ELSEWHERE
        )
    for value in range(256):
        types[table["model"]["vocab"][_byte(value)]] = BYTE
    if special["unknown"] is not None:
        types[special["unknown"]] = UNKNOWN
    normal = {text for text, kind in zip(texts, types, strict=True) if kind == NORMAL}
    scores = _scores(table["model"]["merges"], normal, folder=folder)
    return {
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.pre": ("string", "default"),
        "tokenizer.ggml.tokens": ("[string]", texts),
        "tokenizer.ggml.scores": ("[f32]", [scores.get(text, 0.0) for text in texts]),
        "tokenizer.ggml.token_type": ("[i32]", types),
        "tokenizer.ggml.add_space_prefix": ("bool", prefix),
        **special_tokens(special, around, folder=folder),
    }


def _byte(value: int) -> str:
    return f"<0x{value:02X}>"


def _space_prefix(table: Mapping[str, Any], *, folder: Path) -> bool:
    """Whether a space is put before a text.

    Raises:
        UnsupportedError: spaces are handled in another way than llama.cpp's, or merges are.
    """
    model, pre, normalizer = table["model"], table["pre_tokenizer"], table["normalizer"]
    odd = [
        f"{key}={model[key]!r}"
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(key)
    ]
    odd += ["ignore_merges=True"] if model.get("ignore_merges") else []
    if odd or model["type"] != "BPE":
        raise UnsupportedError(
            f"{folder}: its tokenizer is {model['type']} with byte fallback and "
            f"{', '.join(odd) or 'no merges'}",
            ELSEWHERE,
        )
    if pre is None and normalizer is not None:
        steps = normalizer.get("normalizers", [normalizer])
        if steps in ([_REPLACE], [_PREPEND, _REPLACE]):
            return len(steps) == 2
    marked = {"type": "Metaspace", "replacement": SPACE, "split": False}
    if (
        normalizer is None
        and pre is not None
        and all(pre.get(key) == value for key, value in marked.items())
    ):
        return bool(pre.get("prepend_scheme", "always") != "never")
    raise UnsupportedError(
        f"{folder}: its tokenizer marks spaces by normalizer {normalizer} and pre_tokenizer "
        f"{pre}, llama.cpp does not",
        ELSEWHERE,
    )


def _scores(merges: Sequence[Any], normal: set[str], *, folder: Path) -> dict[str, float]:
    """Score of each token, from merges by rank.

    Raises:
        UnsupportedError: the merges are not every way to make their tokens, or not in the order of
            tokens.
    """
    pairs = [tuple(item.split(" ")) if isinstance(item, str) else tuple(item) for item in merges]
    scores: dict[str, float] = {}
    last = None
    for rank, (left, right) in enumerate(pairs):
        merged = left + right
        if merged != last and merged in scores:
            cause = (
                f"{folder}: its tokenizer merges {merged!r} at rank {-int(scores[merged])} and "
                f"again at {rank}"
            )
            raise UnsupportedError(f"{cause}, llama.cpp ranks tokens, not merges", ELSEWHERE)
        scores.setdefault(merged, -float(rank))
        last = merged
    merges_by_pair = set(pairs)
    for text in sorted(normal):
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in normal and pair[1] in normal and pair not in merges_by_pair:
                cause = f"{folder}: its tokenizer never merges {pair[0]!r} with {pair[1]!r}"
                raise UnsupportedError(
                    f"{cause}, llama.cpp would, for {text!r} is a token", ELSEWHERE
                )
    return scores
