"""A tokenizer as llama.cpp's metadata: tokens, types, merges, pre-tokenizers, and refusals."""

import copy
import json
from pathlib import Path

import pytest

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.formats.llama_cpp import tokenizer
from quantflow.formats.llama_cpp.tokenizer import byte_level, pre_tokenizer, vocabulary
from quantflow.models.configuration import load_config

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
TABLE = {
    "added_tokens": [
        {"id": 4, "content": "</s>", "special": True},
        {"id": 5, "content": "<tool>", "special": False},
    ],
    "normalizer": None,
    "pre_tokenizer": BYTE_LEVEL,
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3},
        "merges": [["a", "b"]],
        "byte_fallback": False,
    },
}
SPECIAL = {"bos": None, "eos": 4, "unknown": None, "padding": None}
FOLDER = Path("model")


def convert(table=TABLE, *, size=8, special=SPECIAL, around=((), ())):
    return byte_level(table, size=size, special=special, around=around, folder=FOLDER)


def with_model(**changes):
    return {**TABLE, "model": {**TABLE["model"], **changes}}


def split(pattern, **changes):
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
        **changes,
    }


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def test_every_id_has_its_token_and_type_and_those_of_no_token_are_unused():
    assert convert() == {
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "gpt-2"),
        "tokenizer.ggml.tokens": (
            "[string]",
            ["a", "b", "Ġ", "ab", "</s>", "<tool>", "[PAD6]", "[PAD7]"],
        ),
        "tokenizer.ggml.token_type": ("[i32]", [1, 1, 1, 1, 3, 4, 5, 5]),
        "tokenizer.ggml.merges": ("[string]", ["a b"]),
        "tokenizer.ggml.eos_token_id": ("u32", 4),
        "tokenizer.ggml.add_bos_token": ("bool", False),
        "tokenizer.ggml.add_eos_token": ("bool", False),
    }


def test_merges_may_be_pairs_or_texts():
    assert convert(with_model(merges=["a b"])) == convert()


def test_what_the_tokenizer_puts_around_a_text_is_told():
    found = convert(special={"bos": 3, "eos": 4, "unknown": 1, "padding": 0}, around=([3], [4]))
    assert (
        found["tokenizer.ggml.add_bos_token"]
        == found["tokenizer.ggml.add_eos_token"]
        == ("bool", True)
    )
    assert found["tokenizer.ggml.bos_token_id"] == ("u32", 3) and found[
        "tokenizer.ggml.unknown_token_id"
    ] == ("u32", 1)
    assert found["tokenizer.ggml.padding_token_id"] == ("u32", 0)
    with pytest.raises(UnsupportedError, match=r"puts \[5\] before and \[\] after a text"):
        convert(around=([5], []))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek V3's tokenizer.json, and gpt-oss's
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {**BYTE_LEVEL, "use_regex": False}


@pytest.mark.parametrize(
    ("pre", "changes", "name"),
    [
        (BYTE_LEVEL, {}, "gpt-2"),
        (sequence(BYTE_LEVEL), {}, "gpt-2"),
        (sequence({"type": "Digits", "individual_digits": True}, BYTE_LEVEL), {}, "smollm"),
        (sequence(split(LLAMA3), BYTES), {"ignore_merges": True}, "llama-bpe"),
        (sequence(split(LLAMA3.replace("{1,3}", "")), BYTES), {}, "qwen2"),
        (sequence(split(LLAMA3), BYTES), {}, "smaug-bpe"),
        (sequence(split(r"\p{N}{1,3}"), split(CJK), split(DEEPSEEK), BYTES), {}, "deepseek-v3"),
        (sequence(split(GPT_4O), BYTES), {}, "gpt-4o"),
    ],
)
def test_what_splits_a_text_is_recognised(pre, changes, name):
    assert pre_tokenizer({**with_model(**changes), "pre_tokenizer": pre}, folder=FOLDER) == name
    assert (
        pre_tokenizer(
            {**with_model(**changes), "pre_tokenizer": pre, "normalizer": {"type": "NFC"}},
            folder=FOLDER,
        )
        == name
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre_tokenizer": None}, "BPE behind None"),
        (
            {"pre_tokenizer": {"type": "Metaspace"}},
            "BPE behind Metaspace, written to GGUF is BPE at byte level",
        ),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram behind ByteLevel"),
        ({"pre_tokenizer": BYTES}, "splits text by"),
        (
            {"pre_tokenizer": sequence(split(LLAMA3.replace("{1,3}", "{1,2}")), BYTES)},
            r"\(ignore_merges False\), known are gpt-2",
        ),
        ({"pre_tokenizer": sequence(split(LLAMA3 + "|x"), BYTES)}, "splits text by"),
        ({"pre_tokenizer": sequence(split(LLAMA3, invert=True), BYTES)}, "splits text by"),
        ({"pre_tokenizer": sequence(split(LLAMA3, behavior="Removed"), BYTES)}, "splits text by"),
        (
            {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL)},
            "splits text by",
        ),
        ({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}}, "add_prefix_space=True"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"model": {**TABLE["model"], "dropout": 0.1}}, "dropout=0.1"),
        ({"model": {**TABLE["model"], "end_of_word_suffix": "</w>"}}, "end_of_word_suffix='</w>'"),
        ({"model": {**TABLE["model"], "merges": [["a ", "b"]]}}, "merges of tokens with spaces"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_run_otherwise_is_refused(changes, said):
    with pytest.raises(UnsupportedError, match=said):
        convert({**TABLE, **changes})


@pytest.mark.parametrize(
    ("table", "changes", "said"),
    [
        (TABLE, {"size": 5}, "has token 5, config.json says vocab_size 5"),
        (TABLE, {"special": {**SPECIAL, "eos": None}}, "name no end of a text"),
        (with_model(vocab={"a": 0, "b": 0}), {}, "two tokens of its tokenizer have one id"),
        (with_model(vocab={"a": 0, "[PAD7]": 1}), {}, r"two ids of its tokenizer are '\[PAD7\]'"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_or_the_model_is_refused(table, changes, said):
    with pytest.raises(InputError, match=said):
        convert(table, **changes)


def test_a_folders_tokenizer_is_the_one_that_transformers_loads(llama, tmp_path):
    config = load_config(open_checkpoint(llama))
    found = vocabulary(llama, config)
    table = json.loads((llama / "tokenizer.json").read_text())
    by_id = {index: text for text, index in table["model"]["vocab"].items()}
    kind, texts = found["tokenizer.ggml.tokens"]
    assert (
        kind == "[string]"
        and texts[: len(by_id)] == [by_id[i] for i in range(len(by_id))]
        and len(texts) == 320
    )
    assert found["tokenizer.ggml.bos_token_id"] == ("u32", 0) and found[
        "tokenizer.ggml.eos_token_id"
    ] == ("u32", 1)
    assert found["tokenizer.ggml.add_bos_token"] == ("bool", True) and found[
        "tokenizer.ggml.add_eos_token"
    ] == ("bool", False)
    assert found["tokenizer.ggml.token_type"][1][:3] == [3, 3, 1]
    assert "tokenizer.chat_template" not in found
    with pytest.raises(InputError, match="no usable tokenizer"):
        vocabulary(tmp_path, config)


def test_a_chat_template_is_kept(llama, monkeypatch):
    words = copy.copy(tokenizer.load_tokenizer(llama))
    words.chat_template = "{{ messages }}"
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda _: words)
    assert vocabulary(llama, load_config(open_checkpoint(llama)))["tokenizer.chat_template"] == (
        "string",
        "{{ messages }}",
    )
