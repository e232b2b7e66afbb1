"""Text of an answer while it grows: whole characters, and nothing of a stop string."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantflow.runtime.decoding.text import continuation, stop_string
from quantflow.server.text import AnswerText, StopSearch, Vocabulary

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")


def grow(text, *, stops=(), keeps_stop=False):
    """The shown pieces of a text whose tokens come one by one, until it holds a stop string."""
    answer, pieces = AnswerText(TOKENIZER, [0], stops=stops, keeps_stop=keeps_stop), []
    tokens, whole = TOKENIZER(text, add_special_tokens=False)["input_ids"], ""
    for token in tokens:
        completed, shown = answer.put(token)
        whole += completed
        pieces.append(shown)
        if any(stop in whole for stop in stops):
            break
    pieces.append(answer.end(stopped=any(stop in whole for stop in stops))[1])
    assert "".join(pieces) == answer.text
    return [piece for piece in pieces if piece]


@settings(max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30))
@example("é<s>日</s>")  # special tokens, which an answer does not show
def test_pieces_are_whole_characters_and_join_to_the_text(text):
    pieces = grow(text)
    assert "".join(pieces) == TOKENIZER.decode(
        TOKENIZER(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True
    )
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=60)
@given(
    st.text(alphabet="ab\n", max_size=12),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_piece_holds_anything_from_the_first_stop_string_on(text, stops):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    length = next(
        (
            n
            for n in range(len(tokens) + 1)
            if any(stop in TOKENIZER.decode(tokens[:n]) for stop in stops)
        ),
        len(tokens),
    )
    whole = TOKENIZER.decode(tokens[:length])  # generation ends there
    first = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    assert "".join(grow(text, stops=stops)) == whole[:first]


def test_a_stop_string_over_several_tokens_is_held_back_until_it_is_known():
    assert len(TOKENIZER("</end>", add_special_tokens=False)["input_ids"]) > 2
    assert "".join(grow("x = 1</end>", stops=["</end>"])) == "x = 1"
    assert "".join(grow("x = 1</end>", stops=["</end>"], keeps_stop=True)) == "x = 1</end>"
    assert "".join(grow("x = 1</en", stops=["</end>"])) == "x = 1</en"  # it did not come


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_token_of_half_a_character_has_its_own_bytes(character):
    words = Vocabulary(TOKENIZER)
    tokens = TOKENIZER(character, add_special_tokens=False)["input_ids"]
    assert len(tokens) > 1
    assert [byte for token in tokens for byte in words.bytes_of(token)] == list(character.encode())


@settings(max_examples=200)
@given(
    st.text(alphabet="ab", min_size=1, max_size=6),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
)
def test_a_string_is_found_where_it_stands_first_and_begins_where_it_may(stop, pieces):
    search, text = StopSearch(stop), ""
    for piece in pieces:
        search.put(piece)
        text += piece
        found = text.find(stop)
        begun = next(place for place in range(len(text) + 1) if stop.startswith(text[place:]))
        assert search.begin == (found if found >= 0 else begun)
        assert (search.position == found) == (found >= 0)


@pytest.fixture(scope="module")
def metaspace():
    """A tokenizer like SentencePiece's: words begin with a space, which a text's begin drops."""
    pieces = ["<unk>", "a", "▁a", "▁END", "END", "▁x"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_token_has_its_space_where_it_stands_in_a_text(metaspace):
    words, end = Vocabulary(metaspace), metaspace.convert_tokens_to_ids("▁END")
    assert (words.text(end), words.within(end), bytes(words.bytes_of(end))) == (
        "END",
        " END",
        b" END",
    )


def test_a_stop_string_with_a_space_is_found_in_the_first_token(metaspace):
    end, other = metaspace.convert_tokens_to_ids(["▁END", "▁x"])
    prompt = metaspace("a")["input_ids"]
    assert stop_string(metaspace, [" END"], prompt=prompt)([end]) == " END"
    assert stop_string(metaspace, [" END"], prompt=prompt)([other, end]) == " END"
    # a stop string that begins in the prompt does not count
    assert stop_string(metaspace, ["END a"], prompt=[end])([other]) is None


def test_a_text_has_nothing_of_its_end_token_nor_of_what_follows():
    tokens = TOKENIZER("x = 1", add_special_tokens=False)["input_ids"]
    assert continuation(TOKENIZER, [0], [*tokens, 299, 300], ends=(1, 299)) == "x = 1"
    assert continuation(TOKENIZER, [0], tokens, ends=(1, 299)) == "x = 1"
