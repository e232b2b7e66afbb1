"""A value against a shape: accepted values, and the words about the first key that is wrong."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from quantflow.errors import InputError
from quantflow.files.schema import Between, check


class Row(TypedDict):
    name: str
    count: NotRequired[Annotated[int, Between(0, 9)] | None]


class Table(TypedDict):
    rows: list[Row]
    by_name: NotRequired[dict[str, float]]
    kind: NotRequired[Literal["a", "b"]]
    rest: NotRequired[Any]


GOOD = [
    {"rows": []},
    {
        "rows": [{"name": "x"}, {"name": "y", "count": 9, "more": {}}],
        "by_name": {"z": 1, "w": 0.5},
        "kind": "b",
        "rest": object(),
    },
    {"rows": [{"name": "x", "count": None}]},
]
BAD = [
    ([], r"f: \[\], a table is needed"),
    ({}, r"f: rows: None, a value is needed"),
    ({"rows": {}}, r"f: rows: \{\}, a list is needed"),
    ({"rows": [{"name": "x"}, {"name": 5}]}, r"f: rows\[1\]\.name: 5, a text is needed"),
    (
        {"rows": [{"name": "x", "count": 10}]},
        r"f: rows\[0\]\.count: 10, a whole number from 0 to 9 or null is needed",
    ),
    ({"rows": [{"name": "x", "count": True}]}, r"count: True, "),
    ({"rows": [{"name": "x", "count": 1.0}]}, r"count: 1\.0, "),
    ({"rows": [], "by_name": {"z": "1"}}, r"f: by_name\.z: '1', a number is needed"),
    ({"rows": [], "by_name": {"z": True}}, r"f: by_name\.z: True, a number is needed"),
    ({"rows": [], "by_name": {"z": 10**400}}, r"by_name\.z: 1000"),
    ({"rows": [], "by_name": []}, r"f: by_name: \[\], a table is needed"),
    ({"rows": [], "kind": "c"}, r"f: kind: 'c', 'a' or 'b' is needed"),
]


@pytest.mark.parametrize("value", GOOD)
def test_a_value_of_the_shape_passes(value):
    check(value, Table, where="f")


@pytest.mark.parametrize(("value", "said"), BAD)
def test_another_value_is_named_with_its_path_and_what_is_needed(value, said):
    with pytest.raises(InputError, match=said):
        check(value, Table, where="f")


def test_a_number_of_more_bits_than_c_has_is_no_whole_number():
    check(2**63 - 1, int, where="f")
    with pytest.raises(InputError, match="f: 9223372036854775808, a whole number"):
        check(2**63, int, where="f")
