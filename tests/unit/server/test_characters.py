"""The longest text that N tokens can be: no text that has N tokens is beyond it."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from quantflow.server.characters import bound_of
from quantflow.server.text import byte_level_alphabet

LETTERS = {letter: place for place, letter in enumerate(byte_level_alphabet())}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
PIECES = {**BYTES, "<unk>": 256, "▁": 257, "a": 258, "▁a": 259, "▁▁": 260}
MERGES = [("▁", "a"), ("▁", "▁")]


def level(normalizer=None, added=(), pre=None, letters=LETTERS):
    """A byte-level BPE, as GPT-2, Qwen and Llama 3 have it."""
    words = {**letters, "ĠĠ": len(letters), "aa": len(letters) + 1}
    made = Tokenizer(models.BPE(words, [("Ġ", "Ġ"), ("a", "a")]))
    made.normalizer = normalizer
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = own if pre is None else pre_tokenizers.Sequence([pre, own])
    made.add_tokens(list(added))
    return made


def pieces(*normalizer):
    """A BPE whose unknown characters fall back to bytes, as Llama 2 and Mistral have it."""
    made = Tokenizer(
        models.BPE(PIECES, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(list(normalizer))
    return made


BOUNDED = {
    "byte level": level(),
    "composed": level(normalizers.NFC()),
    "composed and spelled": level(normalizers.NFKC()),
    "a mark that takes the space beside it": level(added=[AddedToken("<|end|>", rstrip=True)]),
    "cut at digits": level(pre=pre_tokenizers.Split(Regex(r"\d"), "isolated")),
    "stripped": level(normalizers.Strip()),
    "pieces": pieces(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "pieces of pairs": pieces(normalizers.Replace("  ", "▁")),
}
UNBOUNDED = {
    "words": Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "word pieces": Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "letters that are left out": level(pre=pre_tokenizers.Split("a", "removed")),
    "accents that are left out": level(normalizers.StripAccents()),
    "runs that become one": level(normalizers.Replace(Regex("a+"), "a")),
    "bytes without tokens": level(
        letters={letter: place for letter, place in LETTERS.items() if letter != "b"}
    ),
    "unknown ones become one": Tokenizer(
        models.BPE({"<u>": 0}, [], unk_token="<u>", fuse_unk=True)
    ),
}
# what makes texts shorter: space, combining marks, ligatures, marks, bytes that are no letters
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [" " * 40, "a" * 30, "\n\t" * 9, "e\u0301", "ﷺ", "ᾂ", "각", "<|end|>    ", "\x00"]
        ),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
).map("".join)


def of(backend):
    return SimpleNamespace(backend_tokenizer=backend)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
@settings(max_examples=30, deadline=None)
def test_no_text_of_so_many_tokens_is_beyond(name, text):
    bound, tokens = bound_of(of(BOUNDED[name])), len(BOUNDED[name].encode(text).ids)
    assert bound.beyond(text, tokens) is None, (bound, tokens)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_that_certainly_has_more_is_beyond(name):
    bound = bound_of(of(BOUNDED[name]))
    assert bound.beyond("x" * (bound.per_token * 10 + 1), 10) == bound.per_token * 10


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_makes_one_token_of_any_stretch_has_no_bound(name):
    assert bound_of(of(UNBOUNDED[name])) is None


def test_a_tokenizer_in_python_has_no_bound():
    assert bound_of(SimpleNamespace()) is None


def test_the_bound_of_the_example_is_its_longest_token(artifact):
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    longest = max(map(len, tokenizer.get_vocab()))
    bound = bound_of(tokenizer)
    assert (bound.per_token, bound.keeps_space) == (longest, True)
    text = next(word for word in tokenizer.get_vocab() if len(word) == longest)
    text = tokenizer.convert_tokens_to_string([text]) * 50
    assert bound.beyond(text, len(tokenizer(text, add_special_tokens=False)["input_ids"])) is None
