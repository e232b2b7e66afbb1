"""Sentence pieces as llama.cpp's metadata: scores from ranks, where spaces go, and refusals."""

from pathlib import Path

import pytest

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.pieces import pieces

BYTES = [f"<0x{value:02X}>" for value in range(256)]
CHARACTERS = ["▁", "a", "b"]
MADE = ["ab", "▁a", "▁ab"]  # in the order in which they were learnt
VOCAB = {
    text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *BYTES, *CHARACTERS, *MADE])
}
# Every way to make a token of two, those of one token together: ▁ab is ▁ and ab, or ▁a and b.
MERGES = [["a", "b"], ["▁", "a"], ["▁", "ab"], ["▁a", "b"]]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
SPECIAL = {"bos": 1, "eos": 2, "unknown": 0, "padding": None}


def table(*, merges=MERGES, vocab=VOCAB, normalizer=None, pre=METASPACE, **model):
    return {
        "added_tokens": [
            {"id": i, "content": text, "special": True}
            for i, text in enumerate(["<unk>", "<s>", "</s>"])
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "byte_fallback": True,
            "unk_token": "<unk>",
            **model,
        },
    }


def convert(found, *, unused=0):
    size = len(VOCAB) + unused
    return pieces(found, size=size, special=SPECIAL, around=([1], []), folder=Path("model"))


def test_tokens_have_their_types_and_the_rank_of_their_first_merge_as_score():
    found = convert(table(), unused=1)
    assert found["tokenizer.ggml.model"] == ("string", "llama")
    assert found["tokenizer.ggml.tokens"] == ("[string]", [*VOCAB, f"[PAD{len(VOCAB)}]"])
    assert found["tokenizer.ggml.token_type"] == ("[i32]", [2, 3, 3, *[6] * 256, *[1] * 6, 5])
    assert found["tokenizer.ggml.scores"] == ("[f32]", [*[0.0] * 262, 0.0, -1.0, -2.0, 0.0])
    assert found["tokenizer.ggml.bos_token_id"] == ("u32", 1) and found[
        "tokenizer.ggml.add_bos_token"
    ] == ("bool", True)
    assert found["tokenizer.ggml.add_eos_token"] == ("bool", False)


def test_merges_may_be_pairs_or_texts():
    assert convert(table(merges=[" ".join(pair) for pair in MERGES])) == convert(table())


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, True),
        ({"pre": {**METASPACE, "prepend_scheme": "always"}}, True),
        ({"pre": {**METASPACE, "prepend_scheme": "never"}}, False),
        (
            {"pre": None, "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}},
            True,
        ),
        ({"pre": None, "normalizer": REPLACE}, False),
    ],
)
def test_where_a_space_is_put_before_a_text_is_told(changes, prefix):
    assert convert(table(**changes))["tokenizer.ggml.add_space_prefix"] == ("bool", prefix)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"merges": MERGES[:3]},
            "never merges '▁a' with 'b', llama.cpp would, for '▁ab' is a token",
        ),
        (
            {"merges": [MERGES[0], MERGES[2], MERGES[1], MERGES[3]]},
            "merges '▁ab' at rank 1 and again at 3",
        ),
        ({"pre": None}, "marks spaces by normalizer None and pre_tokenizer None"),
        ({"pre": {**METASPACE, "split": True}}, "marks spaces by"),
        ({"pre": {**METASPACE, "replacement": "_"}}, "marks spaces by"),
        ({"normalizer": {"type": "NFKC"}}, "marks spaces by"),
        (
            {"pre": None, "normalizer": {"type": "Sequence", "normalizers": [REPLACE, PREPEND]}},
            "marks spaces by",
        ),
        ({"ignore_merges": True}, "byte fallback and ignore_merges=True"),
        ({"dropout": 0.5}, "byte fallback and dropout=0.5"),
        ({"type": "Unigram"}, "is Unigram with byte fallback"),
        (
            {"vocab": {**{t: i for t, i in VOCAB.items() if t != "<0x0A>"}, "x": 13}},
            "falls back to bytes and has no <0x0A>",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_run_otherwise_is_refused(changes, said):
    with pytest.raises(UnsupportedError, match=said):
        convert(table(**changes))
