"""The one byte form of JSON, the strict reader, and hashes."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantflow.errors import InputError
from quantflow.files.canonical import (
    canonical_json,
    digest_of,
    file_digest,
    parse_json,
    read_json,
    readable_json,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4)
    ),
    max_leaves=12,
)


def test_the_canonical_form_of_a_small_value_is_the_bytes_written_by_hand():
    value = {"b": [1, 2.5, True, None], "a": {"é": "ü\n"}}
    assert canonical_json(value) == '{"a":{"é":"ü\\n"},"b":[1,2.5,true,null]}'.encode()


def test_the_digest_is_the_sha256_of_the_canonical_form():
    assert digest_of({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


def test_the_readable_form_of_a_small_value_is_the_bytes_written_by_hand():
    assert readable_json({"b": [1], "a": 2}) == b'{\n "a": 2,\n "b": [\n  1\n ]\n}\n'


def test_the_order_of_keys_does_not_change_the_bytes():
    assert canonical_json({"x": 1, "y": {"q": 2, "p": 3}}) == canonical_json(
        {"y": {"p": 3, "q": 2}, "x": 1}
    )


@given(JSON_VALUES)
def test_what_is_written_in_either_form_is_read_back_and_written_again_alike(value):
    try:
        written = canonical_json(value), readable_json(value)
    except InputError as error:
        assert "surrogate" in str(error)
        return
    assert [parse_json(data, "x") for data in written] == [value, value]
    assert canonical_json(parse_json(written[1], "x")) == written[0]


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": -float("inf")}])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(InputError, match="finite"):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: "a"}, {"a": [{None: 1}]}, {1: "a", "1": "b"}, {True: 0}])
def test_a_key_that_is_not_a_string_is_refused(value):
    with pytest.raises(InputError):
        canonical_json(value)


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, b"bytes", "\ud800", {"\udfff": 1}])
def test_what_json_cannot_express_is_refused(value):
    with pytest.raises(InputError, match="a value for a JSON file"):
        canonical_json(value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(InputError):
        canonical_json(value)


REFUSED = {
    "empty": b"",
    "duplicate key": b'{"a": 1, "a": 1}',
    "nested duplicate key": b'{"x": [{"b": 0, "a": 1, "a": 2}]}',
    "duplicate key by escape": b'{"a": 1, "\\u0061": 2}',
    "NaN": b"[NaN]",
    "Infinity": b'{"a": Infinity}',
    "-Infinity": b"[-Infinity]",
    "a float beyond the range": b"[1e999]",
    "a negative float beyond the range": b"[-1e999]",
    "an integer of 5000 digits": b"1" * 5000,
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "Latin-1": '{"a": "é"}'.encode("latin-1"),
    "overlong UTF-8": b'{"a": "\xc0\xaf"}',
    "lone surrogate": b'["\\ud800"]',
    "lone low surrogate as key": b'{"\\uDFFF": 1}',
    "trailing comma": b"[1,]",
    "trailing text": b"{} x",
    "single quotes": b"{'a': 1}",
    "control character in a string": b'["\x00"]',
    "unterminated": b'{"a": "',
    "depth 101": b"[" * 101 + b"]" * 101,
    "depth 1000": b"[" * 1000 + b"]" * 1000,
    "depth 100000": b"[" * 100_000 + b"]" * 100_000,
    "depth 100000 of tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_what_other_parsers_read_differently_is_refused_by_name(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"config\.json"):
        read_json(path)


def test_a_duplicate_key_is_named():
    with pytest.raises(InputError, match="'twice' appears twice"):
        parse_json(b'{"once": 1, "twice": 2, "x": 3, "twice": 4}', "config.json")


def test_depth_100_a_surrogate_pair_and_a_long_string_are_read():
    assert parse_json(b"[" * 100 + b"]" * 100, "x") == json.loads("[" * 100 + "]" * 100)
    assert parse_json(b'["\\ud83d\\ude00"]', "x") == ["😀"]
    assert parse_json(b'["' + b"a" * 1_000_000 + b'"]', "x") == ["a" * 1_000_000]
    assert parse_json(b" \n{ } \t", "x") == {}


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_and_never_crash(data):
    try:
        value = parse_json(data, "x")
    except InputError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize("size", [0, 1, 8 * 1024 * 1024, 8 * 1024 * 1024 + 1])
def test_a_file_digest_does_not_depend_on_the_block_it_is_read_in(tmp_path, size):
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(data)
    assert file_digest(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_a_git_lfs_pointer_in_place_of_json_names_the_command_that_fetches_it(tmp_path):
    (tmp_path / "config.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(InputError, match=r"config\.json.*git lfs pull"):
        read_json(tmp_path / "config.json")
