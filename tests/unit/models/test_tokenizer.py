"""The tokenizer of a folder is AutoTokenizer's, whatever class its files name."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quantflow.models.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"
TEXTS = ["def f(x):\n    return x", " two  spaces", "<s>marked</s>", "ünïcödé 日本 🙂", ""]
MODELS = ["llama", "qwen2", "mistral", "a_type_of_next_year", None]
CLASSES = [
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
]
CLASSES += ["GPT2TokenizerFast", "NoSuchTokenizer", None]


@pytest.mark.parametrize("named", CLASSES)
def test_it_is_the_one_of_transformers(named, tmp_path):
    for model_type in MODELS:
        folder = tmp_path / f"{model_type}"
        folder.mkdir()
        shutil.copy(EXAMPLE / "tokenizer.json", folder)
        settings = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 512}
        settings |= {} if named is None else {"tokenizer_class": named}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if model_type is not None:
            (folder / "config.json").write_text(
                json.dumps({"model_type": model_type, "hidden_size": 64})
            )
        theirs, ours = (
            outcome(load, folder) for load in (AutoTokenizer.from_pretrained, load_tokenizer)
        )
        assert ours == theirs, (model_type, named)
        assert ours is not None, (model_type, named)


def outcome(load, folder):
    """A way of loading's result, as far as anything here reads it.

    None where it refuses, or has no such tokens.
    """
    try:
        tokenizer = load(folder)
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    except Exception:  # the Rust tokenizers raise it
        return None
    more = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    texts = [
        tokenizer.decode(row, skip_special_tokens=skip) for row in ids for skip in (False, True)
    ]
    special = (
        tokenizer.all_special_ids,
        tokenizer.special_tokens_map,
        tokenizer.pad_token_id,
        tokenizer.chat_template,
    )
    return type(tokenizer), ids, more, texts, special, tokenizer.model_max_length
