"""A comparison in parts: by position, by kind and by frequency of a token, and by window.

Every predicted token of a window is in one part of each breakdown. Its kind and frequency are
those of the text's token, whatever a model predicts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantflow.numerics.divergence import Comparison

WORD, PART, DIGITS, PUNCTUATION = "word start", "word continuation", "digits", "punctuation"
WHITESPACE, BYTES, SPECIAL = "whitespace", "bytes of a character", "special"
# of tokens, as a breakdown has them in order
KINDS = (WORD, PART, DIGITS, PUNCTUATION, WHITESPACE, BYTES, SPECIAL)
FREQUENT, BETWEEN, RARE = "frequent", "between", "rare"
STEP = 4  # a part of `by_position` ends at so many times the tokens that the one before it does
SELDOM = 2  # tokens that stand so often in the text, or less, are rare
_STARTS = ("Ġ", "▁")  # what byte-level BPE and SentencePiece put for the space before a word
_INSIDE = "##"  # what WordPiece puts before what goes on with a word


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """Some of the predicted tokens.

    Attributes:
        name: property that they share.
        tokens: number of them.
        mean_kld: nats per token.
        share: part of the divergence of all tokens, 0 to 1.
        top1_agreement: share of them with the same most likely token in both models, 0 to 1.
    """

    name: str
    tokens: int
    mean_kld: float
    share: float
    top1_agreement: float


def by_position(comparison: Comparison) -> list[TokenPart]:
    """The parts by number of tokens before: 1 to 3, 4 to 15, 16 to 63 and so on."""
    # [T]
    before = torch.cat([torch.arange(1, length + 1) for length in comparison.lengths.tolist()])
    parts, low = [], 1
    while low <= int(before.max()):
        high = STEP ** (math.floor(math.log(low, STEP) + 1e-9) + 1)
        parts.append((f"{low} to {high - 1}", (before >= low) & (before < high)))
        low = high
    return _parts(comparison, parts)


def by_kind(
    comparison: Comparison, sequences: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase
) -> list[TokenPart]:
    """The parts by kind of token, in the order of KINDS."""
    kind_of = kinds(tokenizer)
    tokens = _predicted(sequences)  # [T]
    of_id = {number: kind_of(number) for number in torch.unique(tokens).tolist()}
    names = [of_id[number] for number in tokens.tolist()]
    return _parts(
        comparison, [(kind, torch.tensor([name == kind for name in names])) for kind in KINDS]
    )


def by_frequency(comparison: Comparison, sequences: Sequence[Tensor]) -> list[TokenPart]:
    """The parts by frequency of a token in the text.

    FREQUENT are the most frequent ids that make up half of the text; RARE are those that stand in
    it SELDOM times at most.
    """
    ids, place, counts = torch.unique(
        _predicted(sequences), return_inverse=True, return_counts=True
    )
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]  # tokens of ids that are more frequent
    frequent = torch.zeros(len(ids), dtype=torch.bool)
    frequent[order[2 * before < counts.sum()]] = True
    rare = (counts <= SELDOM) & ~frequent
    named = ((FREQUENT, frequent), (BETWEEN, ~frequent & ~rare), (RARE, rare))
    return _parts(comparison, [(name, chosen[place]) for name, chosen in named])


def worst_windows(comparison: Comparison, count: int) -> list[tuple[int, float, int]]:
    """The windows of the largest mean divergence: index, nats per token, and worst position."""
    windows = torch.split(comparison.kld, comparison.lengths.tolist())
    order = sorted(range(len(windows)), key=lambda index: -float(windows[index].mean()))
    return [
        (index, float(windows[index].mean()), int(windows[index].argmax()))
        for index in order[:count]
    ]


def kinds(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """A function from token ids to their kinds.

    A word starts where the vocabulary says that a space comes before it. Of a vocabulary that never
    says so every word starts.
    """
    special = set(tokenizer.all_special_ids)
    pieces: list[Any] = [piece for piece in tokenizer.get_vocab() if isinstance(piece, str)]
    spaced, joined = (
        any(piece.startswith(_STARTS) for piece in pieces),
        any(piece.startswith(_INSIDE) for piece in pieces),
    )

    def kind(number: int) -> str:
        if number in special:
            return SPECIAL
        piece, text = str(tokenizer.convert_ids_to_tokens(number)), str(tokenizer.decode([number]))
        inner = text.removeprefix(_INSIDE).strip()
        if "\ufffd" in text or (piece.startswith("<0x") and piece.endswith(">")):
            return BYTES
        if not inner:
            return WHITESPACE
        if inner.isdigit():
            return DIGITS
        if not any(letter.isalnum() for letter in inner):
            return PUNCTUATION
        starts = (
            piece.startswith(_STARTS) or text[:1].isspace()
            if spaced
            else not (joined and piece.startswith(_INSIDE))
        )
        return WORD if starts else PART

    return kind


def _predicted(sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([sequence[1:] for sequence in sequences])


def _parts(comparison: Comparison, named: Sequence[tuple[str, Tensor]]) -> list[TokenPart]:
    """The parts that have tokens; `named` has a name and bool [T] for each."""
    total = float(comparison.kld.sum())
    return [
        TokenPart(
            name=name,
            tokens=int(chosen.sum()),
            mean_kld=float(comparison.kld[chosen].mean()),
            share=float(comparison.kld[chosen].sum()) / total if total else 0.0,
            top1_agreement=float(comparison.agreement[chosen].double().mean()),
        )
        for name, chosen in named
        if bool(chosen.any())
    ]
