"""A comparison in parts, worked by hand; kinds of tokens of three tokenizers."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.divergence import Comparison
from quantflow.validating.breakdown import by_frequency, by_kind, by_position, kinds, worst_windows

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


def comparison(lengths, kld, agreement=None):
    zeros = torch.zeros(len(kld), dtype=torch.float64)
    return Comparison(
        lengths=torch.tensor(lengths),
        kld=torch.tensor(kld, dtype=torch.float64),
        agreement=torch.ones(len(kld), dtype=torch.bool)
        if agreement is None
        else torch.tensor(agreement),
        nll_baseline=zeros,
        nll_candidate=zeros,
    )


def shown(parts):
    return [
        (part.name, part.tokens, round(part.mean_kld, 9), round(part.share, 9)) for part in parts
    ]


def test_positions_count_the_tokens_of_the_window_before_the_predicted_one():
    found = by_position(comparison([5, 2], [1.0, 2.0, 3.0, 4.0, 10.0, 5.0, 5.0]))
    assert shown(found) == [
        ("1 to 3", 5, 16 / 5, round(16 / 30, 9)),
        ("4 to 15", 2, 7.0, round(14 / 30, 9)),
    ]


def test_a_long_window_has_parts_that_are_four_times_as_long_each():
    found = by_position(comparison([70], [0.0] * 69 + [1.0]))
    assert [(part.name, part.tokens) for part in found] == [
        ("1 to 3", 3),
        ("4 to 15", 12),
        ("16 to 63", 48),
        ("64 to 255", 7),
    ]
    assert [part.share for part in found] == [0, 0, 0, 1]


def test_every_token_is_frequent_between_or_rare():
    # predicted: five of 7, three of 8, one of 9; 7 is half of the text and more
    windows = [torch.tensor([1, 7, 7, 7, 8, 8]), torch.tensor([2, 7, 7, 8, 9])]
    kld = [1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 6.0]
    found = by_frequency(comparison([5, 4], kld), windows)
    assert shown(found) == [
        ("frequent", 5, 1.0, round(5 / 17, 9)),
        ("between", 3, 2.0, round(6 / 17, 9)),
        ("rare", 1, 6.0, round(6 / 17, 9)),
    ]


def test_the_worst_windows_come_first_with_the_position_that_diverges_most():
    found = worst_windows(comparison([2, 3, 1], [1.0, 3.0, 0.0, 9.0, 0.0, 2.5]), 2)
    assert found == [(1, 3.0, 1), (2, 2.5, 0)]


def test_a_model_that_does_not_diverge_has_no_shares():
    assert [part.share for part in by_position(comparison([2], [0.0, 0.0]))] == [0.0]


@pytest.mark.skipif(
    not (EXAMPLE / "tokenizer.json").is_file(), reason="the example model is part of the repository"
)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("self", "word start"),
        ("def", "word start"),
        ("1", "digits"),
        ("(", "punctuation"),
        ("\n", "whitespace"),
    ],
)
def test_kinds_of_byte_level_tokens(text, kind):
    tokenizer = load_tokenizer(EXAMPLE)
    of = kinds(tokenizer)
    if kind == "word start":
        (number,) = tokenizer(f" {text}", add_special_tokens=False)["input_ids"][-1:]
        assert of(number) == kind
        inner = tokenizer.convert_tokens_to_ids(text)
        assert inner is None or inner == tokenizer.unk_token_id or of(inner) == "word continuation"
    else:
        number = tokenizer(f"x{text}", add_special_tokens=False)["input_ids"][-1]
        assert of(number) == kind
    assert all(of(special) == "special" for special in tokenizer.all_special_ids)


def tokenizer_of(*pieces):
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=pieces[0])


def test_kinds_of_pieces_that_go_on_with_a_word_and_of_whole_words():
    of = kinds(tokenizer_of("[UNK]", "play", "##ing", "##9", "42", "!"))
    assert [of(number) for number in range(6)] == [
        "special",
        "word start",
        "word continuation",
        "digits",
        "digits",
        "punctuation",
    ]
    # no piece says what a word is
    assert kinds(tokenizer_of("<unk>", "play", "ing"))(2) == "word start"


def test_kinds_of_sentencepiece_tokens_and_of_single_bytes():
    of = kinds(tokenizer_of("<unk>", "▁play", "ing", "▁", "<0xE2>", "▁7", "▁("))
    assert [of(number) for number in (1, 2, 4)] == [
        "word start",
        "word continuation",
        "bytes of a character",
    ]


def test_parts_by_kind_have_every_token_once(llama):
    tokenizer = load_tokenizer(llama)
    window = torch.tensor(tokenizer("value scale 12, point.")["input_ids"])
    found = by_kind(comparison([len(window) - 1], [1.0] * (len(window) - 1)), [window], tokenizer)
    assert sum(part.tokens for part in found) == len(window) - 1
    assert {"word start", "digits", "punctuation"} <= {part.name for part in found}
    assert sum(part.share for part in found) == pytest.approx(1)
