"""Grammars as masks: what they allow, what is refused, and what a hostile one costs."""

import json
import re
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantflow.server.bodies import Grammar
from quantflow.server.errors import Refused
from quantflow.server.grammar import AfterReasoning, Grammars

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, vocab_size=4096, ends=(1,))


def drawn(grammars, tokenizer, grammar, *, seed, most=400):
    """A text of tokens drawn evenly from the allowed ones; None where it does not end."""
    generator, mask, tokens = torch.Generator().manual_seed(seed), grammars.mask(grammar), []
    for _ in range(most):
        bits = mask.allowed(tokens)
        assert bits.dtype == torch.int32 and bits.shape == (128,)
        may = (bits[:, None] >> torch.arange(32) & 1).flatten().nonzero()[:, 0]
        token = int(may[torch.randint(len(may), (), generator=generator)])
        if token == 1:
            return tokenizer.decode(tokens)
        tokens.append(token)
        mask.advance(token)
    return None


@pytest.mark.parametrize("value", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_texts_of_a_schema_are_valid_by_jsonschema(grammars, tokenizer, value):
    texts = [
        drawn(grammars, tokenizer, Grammar(type="json", value=value), seed=seed)
        for seed in range(8)
    ]
    texts = [text for text in texts if text is not None]
    assert len(texts) >= 4
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_texts_of_a_regular_expression_match_it(grammars, tokenizer):
    pattern = r"[a-c]{2,5}-[0-9]{3}(x|yz)?"
    for seed in range(5):
        text = drawn(grammars, tokenizer, Grammar(type="regex", value=pattern), seed=seed)
        assert text is not None and re.fullmatch(pattern, text)


def test_a_choice_is_one_of_its_texts(grammars, tokenizer):
    words = ["yes", "no", 'a "quoted" one']
    assert {
        drawn(grammars, tokenizer, Grammar(type="choice", value=words), seed=seed)
        for seed in range(12)
    } <= set(words)


def test_a_grammar_begins_behind_the_reasoning(grammars, tokenizer):
    """vllm-project/vllm#12619, ddalcu/mlx-serve#331: JSON was forced into the reasoning."""
    mask = AfterReasoning(
        grammars.mask(Grammar(type="choice", value=["cat"])), tokenizer, "</think>"
    )
    tokens = []
    for token in tokenizer.encode("I think: é</thin </think>", add_special_tokens=False):
        assert mask.allowed(tokens) is None
        tokens.append(token)
        mask.advance(token)
    bits = mask.allowed(tokens)
    may = (bits[:, None] >> torch.arange(32) & 1).flatten().nonzero()[:, 0].tolist()
    assert may and all("cat".startswith(tokenizer.decode([token])) for token in may)
    mask.advance(may[0])
    assert mask.allowed([*tokens, may[0]]) is not None


def test_any_object_is_an_object(grammars, tokenizer):
    texts = [
        drawn(grammars, tokenizer, Grammar(type="json_object"), seed=seed, most=800)
        for seed in range(12)
    ]
    texts = [text for text in texts if text is not None]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


WRONG = {
    "no schema": {"type": "json", "value": 3},
    "text that is no JSON": {"type": "json", "value": "{"},
    "an unknown type": {"type": "json", "value": {"type": "nothing"}},
    "a regular expression that is none": {"type": "regex", "value": "[a"},
    "an empty one": {"type": "regex", "value": ""},
    "no choice": {"type": "choice", "value": []},
    "a reference to the network": {
        "type": "json",
        "value": {"$ref": "http://example.com/schema.json"},
    },
    "a schema too deep": {
        "type": "json",
        "value": json.loads('{"items":' * 100 + "{}" + "}" * 100),
    },
    "a schema too long": {"type": "json", "value": {"enum": ["x" * 200_000]}},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_grammar_that_is_wrong_is_refused_as_the_request_is(grammars, name):
    with pytest.raises(Refused) as caught:
        grammars.mask(Grammar(**WRONG[name]))
    assert caught.value.status == 422
    assert caught.value.text.startswith("Input validation error: grammar is not valid: ")


def test_a_tokenizer_whose_tokens_are_no_bytes_has_no_grammars():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    grammars = Grammars(PreTrainedTokenizerFast(tokenizer_object=words), vocab_size=2, ends=(1,))
    with pytest.raises(
        Refused, match="grammar is not supported by this model's tokenizer"
    ) as caught:
        grammars.mask(Grammar(type="regex", value="a"))
    assert caught.value.status == 422


EXPLODING = {
    "counted repeats of repeats": {"type": "regex", "value": "((a{1,500}){1,500}){1,500}b"},
    "a class ending far back": {"type": "regex", "value": "(a|b)*a(a|b){40}"},
    "every order of many properties": {
        "type": "json",
        "value": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(12)]}
                for i in range(12)
            ]
        },
    },
    "itself, over and over": {
        "type": "json",
        "value": {
            "$defs": {
                "a": {
                    "anyOf": [
                        {"$ref": "#/$defs/a"},
                        {"type": "array", "items": {"$ref": "#/$defs/a"}},
                    ]
                }
            },
            "$ref": "#/$defs/a",
        },
    },
}


@pytest.mark.parametrize("name", EXPLODING)
def test_a_grammar_that_explodes_ends_in_time(grammars, tokenizer, name):
    begin = time.monotonic()
    try:
        drawn(grammars, tokenizer, Grammar(**EXPLODING[name]), seed=0, most=60)
    except Refused as refused:
        assert refused.status == 422
    assert time.monotonic() - begin < 20


def test_a_grammar_is_compiled_once(grammars, monkeypatch):
    grammar = Grammar(type="regex", value="[0-9]{4}-[0-9]{2}")
    grammars.mask(grammar)
    monkeypatch.setattr(
        grammars, "_compiled", lambda text: pytest.fail(f"{text} is compiled again")
    )
    first, second = grammars.mask(grammar), grammars.mask(grammar)
    first.advance(
        int((first.allowed([])[:, None] >> torch.arange(32) & 1).flatten().nonzero()[0, 0])
    )
    assert not torch.equal(first.allowed([0]), second.allowed([]))  # each request goes its own way


def test_tokens_that_are_allowed_are_the_only_ones(server):
    """vllm-project/vllm's `allowed_token_ids`: an end token must be among them to end a text."""
    tokens = [5, 77, 300, 1023]
    for fields in ({}, {"temperature": 1.5, "seed": 3}):
        body = {"prompt": "def", "max_tokens": 8, "allowed_token_ids": tokens, **fields}
        answer = server.post("/v1/completions", {**body, "logprobs": 0, "temperature": 0, **fields})
        assert answer.status == 200, answer.body
        found = server.post(
            "/generate",
            {
                "inputs": "def",
                "parameters": {
                    "max_new_tokens": 8,
                    "details": True,
                    "allowed_token_ids": tokens,
                    **fields,
                },
            },
        ).json()
        assert {one["id"] for one in found["details"]["tokens"]} <= set(tokens)
        assert found["details"]["finish_reason"] == "length"
    # with a grammar, what both allow
    ids = {one["text"]: one["id"] for one in server.post("/tokenize", {"inputs": "yes"}).json()}
    end = server.models.first.loaded.eos_token_ids[0]
    body = {"prompt": "def", "max_tokens": 8, "guided_regex": "yes|no"}
    answer = server.post("/v1/completions", {**body, "allowed_token_ids": [*ids.values(), end]})
    assert answer.json()["choices"][0]["text"] == "yes"


@pytest.mark.parametrize("tokens", [[], [2**31], [-1], ["5"]], ids=str)
def test_tokens_that_are_none_are_refused(server, tokens):
    body = {"prompt": "def", "max_tokens": 2, "allowed_token_ids": tokens}
    answer = server.post("/v1/completions", body)
    assert answer.status == 422 and "allowed_token_ids" in answer.json()["error"]["message"]
