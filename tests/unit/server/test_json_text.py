"""JSON in short steps: the same values and the same text as Python's own."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.server import json_text
from quantflow.server.errors import Refused
from quantflow.server.json_text import parse, pieces

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text("ab\n", max_size=3), inner),
    max_leaves=20,
)


def written(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(VALUES)
@settings(max_examples=40, deadline=None)
def test_pieces_join_to_what_python_writes(value):
    assert "".join(pieces(value)) == written(value)


@pytest.mark.parametrize("many", [0, 50_000], ids=["in Python", "in C"])
@given(VALUES)
@settings(max_examples=30, deadline=None)
def test_both_readers_read_what_python_reads(many, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MANY", many)
        assert parse(json.dumps(value).encode()) == value


def test_long_lists_and_iterators_come_in_pieces():
    rows = [{"id": number} for number in range(20_000)]
    found = list(pieces({"a": iter(rows), "b": []}))
    assert json.loads("".join(found)) == {"a": rows, "b": []}
    assert len(found) > 3 and max(map(len, found)) < 2 * json_text.PIECE


@pytest.mark.parametrize("many", [0, 50_000], ids=["in Python", "in C"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1,]",
        "NaN",
        "[-Infinity]",
        '"\\ud800"',
        '{"\\uDFFF": 1}',
        "[" * 100_000,
        "9" * 6000,
        "",
    ],
)
def test_both_readers_refuse_what_is_no_json(many, text, monkeypatch):
    monkeypatch.setattr(json_text, "MANY", many)
    with pytest.raises(Refused) as caught:
        parse(text.encode())
    assert caught.value.kind == "bad_json" and len(caught.value.text) < 300
