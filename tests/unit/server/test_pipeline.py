"""The pipeline beside transformers' own with the dequantized weights, and LangChain's wrapper."""

import pytest

import quantflow
from quantflow.errors import UsageError

PROMPTS = ["class Stack:\n    def", "import os"]


@pytest.fixture(scope="module")
def generator(artifact):
    with quantflow.pipeline(artifact) as generator:
        yield generator


@pytest.fixture(scope="module")
def foreign(artifact):
    """transformers' pipeline over its modules with our linears."""
    from transformers import pipeline as text_generation

    loaded = quantflow.load(artifact)
    loaded.model.generation_config.max_length = None
    return text_generation("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)


def test_shapes_and_texts_are_those_of_transformers(generator, foreign):
    options = {"max_new_tokens": 8, "do_sample": False}
    assert generator(PROMPTS[0], **options) == foreign(PROMPTS[0], **options)
    assert generator(PROMPTS, **options) == foreign(PROMPTS, **options)
    assert generator(PROMPTS[0], return_full_text=False, **options) == foreign(
        PROMPTS[0], return_full_text=False, **options
    )


def test_several_texts_of_a_prompt_are_drawn_with_seeds_of_their_own(generator):
    drawn = generator(PROMPTS, max_new_tokens=6, temperature=1.0, num_return_sequences=2, seed=3)
    texts = [one["generated_text"] for several in drawn for one in several]
    assert len(drawn) == 2 and len(set(texts)) == 4
    assert (
        generator(PROMPTS, max_new_tokens=6, temperature=1.0, num_return_sequences=2, seed=3)
        == drawn
    )


def test_a_conversation_is_answered_with_a_message(generator, template, monkeypatch):
    monkeypatch.setattr(generator.tokenizer, "chat_template", template.read_text())
    messages = [{"role": "user", "content": "def"}]
    (answer,) = generator(messages, max_new_tokens=6)
    assert (
        answer["generated_text"][:-1] == messages
        and answer["generated_text"][-1]["role"] == "assistant"
    )
    plain = generator("user: def\nassistant:", max_new_tokens=6, return_full_text=False)[0][
        "generated_text"
    ]
    assert answer["generated_text"][-1]["content"] == plain


def test_a_stop_string_ends_a_text(generator):
    whole = generator(PROMPTS[0], max_new_tokens=30, return_full_text=False)[0]["generated_text"]
    text = generator(
        PROMPTS[0], max_new_tokens=30, return_full_text=False, stop_strings=whole[8:11]
    )[0]["generated_text"]
    assert whole.startswith(text) and whole[8:11] in text and len(text) < len(whole)


def test_an_option_that_is_unknown_is_refused(generator):
    with pytest.raises(UsageError, match="tempreature"):
        generator("def", tempreature=0.5)
    with pytest.raises(UsageError, match="sample, or ask for one"):
        generator("def", num_return_sequences=2)
    with pytest.raises(UsageError, match="no chat template"):
        generator([{"role": "user", "content": "def"}])


def test_langchain_runs_it_in_a_chain(artifact, generator):
    pytest.importorskip("langchain_core")
    from langchain_core.prompts import PromptTemplate

    from quantflow.langchain import QuantflowLLM

    model = QuantflowLLM(artifact=str(artifact), max_new_tokens=8)
    chain = PromptTemplate.from_template("class {name}:\n    def") | model
    expected = generator(PROMPTS[0], max_new_tokens=8, return_full_text=False)[0]["generated_text"]
    assert chain.invoke({"name": "Stack"}) == expected
    assert [text.startswith("") for text in model.batch(PROMPTS)] == [True, True]
    assert (
        model.invoke(PROMPTS[0], stop=[expected[5:8]]) == expected[: expected.index(expected[5:8])]
    )
