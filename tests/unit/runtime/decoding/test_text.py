import pytest
import torch

from quantflow.runtime.decoding import generate
from quantflow.runtime.decoding.text import TextStream, continuation, stop_at, word_ids
from tests.shared import slow

WORDS = ["def f(x):\n    return x", "caf\u00e9 \u2603 \U0001f600 end", "  two  spaces"]


@pytest.mark.parametrize("text", WORDS)
def test_the_pieces_are_whole_characters_and_together_the_text(tokenizer, text):
    pieces: list[str] = []
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, tokenizer("a b c d e f g")["input_ids"], tell=pieces.append)
    for token in tokens:
        stream.put(token)
    assert len(pieces) > 1 and all(pieces)
    stream.end()
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_half_a_character_is_told_at_the_end_and_not_before(tokenizer):
    pieces: list[str] = []
    tokens = tokenizer("a\U0001f600", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, [], tell=pieces.append)
    for token in tokens[:-1]:
        stream.put(token)
    assert "".join(pieces) == "a"
    stream.end()
    assert "".join(pieces).startswith("a\ufffd")


def test_special_tokens_are_not_text(tokenizer):
    prompt = tokenizer("import")["input_ids"]
    assert (
        continuation(
            tokenizer, prompt, [*tokenizer(" os", add_special_tokens=False)["input_ids"], 1]
        )
        == " os"
    )
    assert continuation(tokenizer, prompt, []) == ""


@pytest.mark.parametrize("strings", [slow(["return"]), ["urn se", "nothing"], slow(["(self"])])
def test_a_text_ends_with_the_token_that_completes_a_stop_string(
    tiny, tokenizer, rows, peer, strings
):
    ids = torch.tensor([rows[1]])
    free = tokenizer.decode(generate(tiny, ids, max_new_tokens=40)[0, len(rows[1]) :])
    string = strings[0] if strings[0] in free else free[10:16]
    expected = peer(
        ids, max_new_tokens=40, stop_strings=[string, *strings[1:]], tokenizer=tokenizer
    )
    found = generate(tiny, ids, max_new_tokens=40, stop=stop_at(tokenizer, [string, *strings[1:]]))
    assert torch.equal(found, expected)
    assert found.shape[1] < ids.shape[1] + 40


def test_a_stop_string_may_begin_long_before_its_last_token_and_end_within_one(tokenizer):
    long = "x = " + ", ".join(str(number) for number in range(40))
    tokens = tokenizer(long + "\n", add_special_tokens=False)["input_ids"]
    stops = stop_at(tokenizer, [long[3:]])
    first = next(i for i in range(1, len(tokens) + 1) if stops(tokens[:i]))
    assert long[3:] in tokenizer.decode(tokens[:first])
    assert long[3:] not in tokenizer.decode(tokens[: first - 1])


def test_words_are_spelled_as_asked(tokenizer):
    plain, spaced = word_ids(tokenizer, ["return"], before=("", " "))
    assert (tokenizer.decode(plain), tokenizer.decode(spaced)) == ("return", " return")
    assert word_ids(tokenizer, ["return", "return"], before=(" ",)) == (spaced,)
