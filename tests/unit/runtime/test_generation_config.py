"""What a model's files say of ends and sampling, each file with words of its own."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantflow.errors import InputError
from quantflow.runtime.decoding.text import before_end
from quantflow.runtime.generation_config import (
    NO_DEFAULTS,
    end_tokens,
    sampling_defaults,
)

WORDS = {"a": 0, "<s>": 1, "#": 2, "</s>": 3, "<|im_end|>": 4, "Add": 5}


def tokenizer(eos, *, special=("<s>", "</s>", "<|im_end|>")):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    made.add_special_tokens([AddedToken(word, special=True) for word in special])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)


@pytest.fixture
def checkpoint(tmp_path):
    """A function from the values of the two files to a folder with them."""

    def make(config=None, generation=None):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        files = () if generation is None else ("generation_config.json",)
        return SimpleNamespace(config=config or {}, files=files, folder=tmp_path)

    return make


@pytest.mark.parametrize(
    ("config", "generation", "eos", "ends"),
    [
        ({}, {"eos_token_id": 3}, "<|im_end|>", (3, 4)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 3}, "</s>", (3, 4)),
        ({"eos_token_id": 3}, {"eos_token_id": [3, 5]}, "</s>", (3, 5)),
        ({"eos_token_id": [3, 5]}, None, "</s>", (3, 5)),
        ({"eos_token_id": 3}, {"pad_token_id": 3}, "</s>", (3,)),
        ({}, None, "</s>", (3,)),
        ({"eos_token_id": 2}, None, None, (2,)),
        ({"text_config": {"eos_token_id": [3, 4]}}, {}, "</s>", (3, 4)),
        ({"eos_token_id": None}, {"eos_token_id": None}, None, ()),
    ],
    ids=[
        "a fine-tune in ChatML: Blaizzy/mlx-vlm#2112, hiyouga/LlamaFactory#7454",
        "a list in config.json alone",
        "a second end that is an ordinary word: vllm-project/vllm#5954",
        "such a list in config.json: Blaizzy/mlx-vlm#309",
        "a padding that is the end token",
        "the tokenizer alone",
        "config.json alone",
        "the language model of a larger one",
        "none",
    ],
)
def test_all_three_files_name_ends(checkpoint, config, generation, eos, ends):
    found = end_tokens(checkpoint(config, generation), tokenizer(eos), vocab_size=6)
    assert found == ends


def test_an_ordinary_word_that_config_alone_calls_the_end_is_a_forgotten_default(checkpoint):
    """salesforce/CodeGen#32: config.json says 2, its word `#`; the tokenizer says 50256."""
    found = checkpoint({"eos_token_id": 2})
    assert end_tokens(found, tokenizer("</s>"), vocab_size=6) == (3,)
    assert end_tokens(found, None, vocab_size=6) == (2,)


def test_a_tokenizer_whose_end_is_an_ordinary_word_is_believed(checkpoint):
    found = end_tokens(checkpoint(), tokenizer("Add", special=()), vocab_size=6)
    assert found == (5,)


def test_an_end_that_the_model_cannot_choose_is_none(checkpoint):
    assert end_tokens(checkpoint({}, {"eos_token_id": 3}), tokenizer("Add"), vocab_size=5) == (3,)


def test_an_end_that_is_no_token_is_refused_with_its_file(checkpoint):
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id: '</s>'"):
        end_tokens(checkpoint({}, {"eos_token_id": "</s>"}), None, vocab_size=6)


LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
PHI_4 = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 50, "_from_model_config": 1}


@pytest.mark.parametrize(
    ("generation", "values"),
    [
        (LLAMA_3, {"temperature": 0.6, "top_p": 0.9}),
        (PHI_4, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
        ({"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0.6}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
            {"repetition_penalty": 1.05},
        ),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": None}, {}),
        (None, {}),
    ],
    ids=[
        "Llama 3",
        "Phi 4: ml-explore/mlx-lm#1031",
        "filters that filter nothing",
        "a maker who takes the likeliest token: remains of its sampling do not count",
        "temperature 0",
        "null",
        "no file",
    ],
)
def test_the_makers_settings_of_sampling(checkpoint, generation, values):
    defaults = sampling_defaults(checkpoint({}, generation))
    assert defaults.values() == values
    assert defaults.samples is bool(generation and generation.get("do_sample"))


def test_settings_out_of_their_ranges_are_refused_with_the_way_out(checkpoint):
    with pytest.raises(InputError, match=r"generation_config\.json: top_p=3.*--generation-config"):
        sampling_defaults(checkpoint({}, {"top_p": 3.0}))
    with pytest.raises(InputError, match=r"generation_config\.json: top_k: 'all'"):
        sampling_defaults(checkpoint({}, {"top_k": "all"}))
    assert not NO_DEFAULTS.values() and not NO_DEFAULTS.samples


def test_a_text_ends_before_its_first_end_token():
    assert before_end([7, 8, 3, 9], (3, 9)) == [7, 8]
    assert before_end([7, 8], (3,)) == [7, 8]
    assert before_end([3], (3,)) == []
