"""Schemas as people write them: closed where they say nothing, and no stricter."""

import contextlib
import json
import time
from itertools import combinations

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.server.bodies import Grammar
from quantflow.server.errors import Refused
from quantflow.server.grammar import Grammars
from quantflow.server.schemas import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
TIMEZONE = {"type": "object", "properties": {"tz": {"enum": ["UTC", "CET"]}}, "required": ["tz"]}
# text-generation-inference's documentation of guidance
TGI = {
    "properties": {
        "location": {"type": "string"},
        "animals_seen": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["location", "animals_seen"],
}
PYDANTIC = {
    "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
    "type": "object",
    "properties": {
        "to": {"allOf": [{"$ref": "#/$defs/Place"}], "description": "where"},
        "by": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
    },
}
INHERITED = {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}
MENU = {"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "anyOf": [A, B]}


def fits(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (TIMEZONE, {"tz": "UTC"}, {"tz": "UTC", "UTC": 1}),
        (TGI, {"location": "x", "animals_seen": 2}, "text"),
        (TGI, {"location": "x", "animals_seen": 2}, {"location": "x", "animals_seen": 2, "z": 1}),
        (PYDANTIC, {"to": {"city": "x"}, "by": None}, {"to": {"city": "x", "town": "y"}}),
        (PYDANTIC, {"by": {"city": "x"}}, {"by": {"town": "x"}}),
        (INHERITED, {"a": 1, "b": 2}, {"a": 1, "c": 2}),
        (MENU, {"kind": "x", "a": 1}, {"kind": "x", "a": 1, "z": 1}),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({"items": TIMEZONE, "type": "array"}, [{"tz": "CET"}], [{"tz": "CET", "x": 0}]),
    ],
    ids=[
        "a tool of one choice: ggml-org/llama.cpp#8180, guidance-ai/guidance#1050",
        "text-generation-inference's own example says no type",
        "and lists its properties",
        "pydantic's field with a description",
        "pydantic's field that may be null",
        "OpenAPI's inheritance",
        "properties beside alternatives",
        "a tool without arguments",
        "in a list",
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists(schema, good, bad):
    made = closed(schema)
    assert fits(made, good) and fits(schema, good)
    assert not fits(made, bad)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"any": 1}),
        ({**TIMEZONE, "additionalProperties": True}, {"tz": "UTC", "x": 1}),
        ({**TIMEZONE, "additionalProperties": {"type": "string"}}, {"tz": "UTC", "x": "y"}),
        ({**TIMEZONE, "patternProperties": {"^x-": {}}}, {"tz": "UTC", "x-y": 1}),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, {"a": 1, "c": 1}),
        ({"enum": [{"properties": {"a": 1}}]}, {"properties": {"a": 1}}),
        ({"properties": {"properties": {"type": "string"}}}, {"properties": "x"}),
        ({"anyOf": [A, {"type": "string"}]}, "x"),
    ],
    ids=str,
)
def test_what_a_schema_says_stays(schema, value):
    assert fits(schema, value) and fits(closed(schema), value)


def test_names_that_are_an_enumeration_are_properties():
    """pydantic writes `dict[Literal["x", "y"], int]` so."""
    for names in ({"enum": ["x", "y"]}, {"$ref": "#/$defs/Name"}):
        made = closed(
            {
                "type": "object",
                "propertyNames": names,
                "additionalProperties": {"type": "integer"},
                "$defs": {"Name": {"enum": ["x", "y"]}},
            }
        )
        assert fits(made, {"x": 1, "y": 2}) and not fits(made, {"z": 1})
        assert not fits(made, {"x": "one"})


PARTS = st.sampled_from([A, B, TIMEZONE, {"type": "string"}, {"$ref": "#/$defs/A"}])
LISTED = {"a": 1, "b": 2, "t": "UTC"}
VALUES = [
    "x",
    *(
        {"tz" if name == "t" else name: LISTED[name] for name in names}
        for n in range(4)
        for names in combinations("abt", n)
    ),
]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["allOf", "anyOf"]), st.lists(PARTS, min_size=1, max_size=3), max_size=2
    ),
    st.booleans(),
)
def test_a_closed_schema_takes_what_its_schema_takes_and_can_still_be_fulfilled(combined, own):
    schema = {**combined, "$defs": {"A": A}, **({"properties": B["properties"]} if own else {})}
    made = closed(schema)
    taken = [fits(schema, value) for value in VALUES]
    still = [fits(made, value) for value in VALUES]
    assert all(before for before, after in zip(taken, still, strict=True) if after)
    assert any(taken) == any(still)


HOSTILE = {
    "definitions that lead to each other": {
        "$defs": {
            str(n): {"$ref": f"#/$defs/{n + 1}", "properties": {"a": {}}} for n in range(2000)
        },
        "$ref": "#/$defs/0",
        "properties": {"a": {}},
    },
    "a definition that is itself": {
        "$defs": {"a": {"$ref": "#/$defs/a", "properties": {"a": {}}}},
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}],
    },
    "parts of parts": {
        "allOf": [{"anyOf": [{"$ref": f"#/allOf/{n}/anyOf"}] * 20} for n in range(100)],
        "properties": {"a": {}},
    },
    "properties that are none": {"properties": 3, "allOf": [{"properties": [1]}, 5]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_closed_or_refused_in_time(name):
    begin = time.monotonic()
    with contextlib.suppress(Refused):
        closed(HOSTILE[name])
    assert time.monotonic() - begin < 2


@pytest.fixture(scope="module")
def compiles():
    """A function from a schema to what its mask does not hold to."""
    from llguidance import LLMatcher

    from quantflow.server.grammar import _text_of

    def left_out(schema):
        text = _text_of(Grammar(type="json", value=schema))
        wrong, told = LLMatcher.validate_grammar_with_warnings(text)
        assert not wrong, told
        return "; ".join(told)

    return left_out


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        *(({"type": "string", "format": f}, f) for f in ("password", "path", "binary", "url")),
        ({"type": "string", "format": "date-time"}, ""),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '"if", "then"'),
        ({**A, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, "propertyNames"),
        ({**A, "not": {"required": ["b"]}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (INHERITED, ""),
        (MENU, ""),
    ],
    ids=str,
)
def test_what_no_mask_can_hold_to_is_left_out_and_said(compiles, schema, left_out):
    """z-lab/paroquant#31, vllm-project/vllm#16880: whole classes of schemas were refused."""
    told = compiles(schema)
    assert left_out in told and bool(told) == bool(left_out)


def test_a_refusal_has_its_whole_reason():
    """vllm-project/vllm#26421: a message that ends where the reason begins."""
    tokenizer, schema = object(), {"type": "string", "pattern": "[a"}
    grammars = Grammars(tokenizer, vocab_size=4, ends=(1,))
    grammars._trie = _trie()
    with pytest.raises(Refused, match=r"regex parse error: \[a \^ error: unclosed character"):
        grammars.mask(Grammar(type="json", value=schema))
    with pytest.raises(Refused, match=r"look-ahead and look-behind, is not supported"):
        grammars.mask(Grammar(type="regex", value="(?=a)b"))


def _trie():
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def test_a_grammar_in_gbnf_is_translated_and_a_long_one_refused(compiles):
    from llguidance import LLMatcher

    from quantflow.server.grammar import LONGEST_GBNF, _text_of

    text = _text_of(Grammar(type="grammar", value='root ::= "x" [0-9]+ ("a" | "b")?'))
    matcher = LLMatcher(_trie(), text)
    assert matcher.consume_tokens(list(b"x12")) and matcher.is_accepting()
    assert matcher.consume_tokens(list(b"b")) and not matcher.consume_token(ord("b"))
    with pytest.raises(Refused, match="Expected"):
        _text_of(Grammar(type="grammar", value="root ::= ("))
    with pytest.raises(Refused, match=f"{LONGEST_GBNF} are allowed"):
        _text_of(Grammar(type="grammar", value="root ::= " + '"a"' * LONGEST_GBNF))


def test_a_wrapped_schema_is_the_schema():
    """huggingface_hub sends text-generation-inference 3's type json_schema so."""
    from quantflow.server.grammar import _text_of

    wrapped = Grammar(type="json_schema", value={"name": "answer", "schema": A})
    assert _text_of(wrapped) == _text_of(Grammar(type="json", value=json.dumps(A)))
