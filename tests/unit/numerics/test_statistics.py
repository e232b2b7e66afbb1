"""The checks that observers share."""

import math

import pytest
import torch

from quantflow.errors import StatisticsError
from quantflow.numerics import statistics

EXPECTED = {"a": (torch.float32, (None,)), "b": (torch.float32, (None, 2))}


@pytest.mark.parametrize(
    ("shape", "rows"), [((3,), 1), ((5, 3), 5), ((2, 4, 3), 8), ((0, 3), 0), ((2, 0, 3), 0)]
)
def test_samples_of_any_leading_shape_become_rows(shape, rows):
    assert statistics.finite_rows(torch.ones(shape), 3, observer="o").shape == (rows, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_are_float32_and_detached(dtype):
    rows = statistics.finite_rows(
        torch.ones(2, 3, dtype=dtype, requires_grad=True), 3, observer="o"
    )
    assert rows.dtype == torch.float32
    assert not rows.requires_grad


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.ones(2, 4),
            r"o: input \[2, 4\] has 4 features, the observer 3; use an observer per tensor",
        ),
        (torch.ones(2, 3, dtype=torch.int64), r"o: torch.int64 \[2, 3\], expected float"),
        (torch.ones(()), r"o: torch.float32 \[\], expected float"),
        (
            torch.tensor([[math.nan, 1.0, -math.inf]]),
            r"o: input \[1, 3\] holds 1 NaN and 1 Inf; measure in a wider",
        ),
        (torch.tensor([[1.0, math.inf, 1.0]]), r"0 NaN and 1 Inf"),
        (torch.full((1, 3), 1e300, dtype=torch.float64), r"0 NaN and 3 Inf"),
    ],
)
def test_samples_that_cannot_be_counted_are_refused_with_their_shape(x, message):
    with pytest.raises(StatisticsError, match=message):
        statistics.finite_rows(x, 3, observer="o")


def test_a_state_comes_back_in_the_order_asked_for():
    a, b = torch.ones(4), torch.ones(4, 2)
    assert statistics.checked_state({"b": b, "a": a}, EXPECTED, observer="o") == (a, b)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.ones(4)}, r"o: state has \['a'\], expected \['a', 'b'\]"),
        (
            {"a": torch.ones(4), "b": torch.ones(4, 2), "c": torch.ones(1)},
            r"o: state has \['a', 'b', 'c'\]",
        ),
        (
            {"a": torch.ones(4).double(), "b": torch.ones(4, 2)},
            r"o: a is torch.float64 \[4\], expected torch.float32 \[n\]",
        ),
        (
            {"a": torch.ones(4), "b": torch.ones(4, 3)},
            r"o: b is torch.float32 \[4, 3\], expected torch.float32 \[n, 2\]",
        ),
        ({"a": torch.ones(()), "b": torch.ones(4, 2)}, r"o: a is torch.float32 \[\]"),
        ({"a": torch.ones(4), "b": torch.ones(5, 2)}, r"o: the state has \[4, 5\] features"),
        ({"a": torch.full((4,), math.nan), "b": torch.ones(4, 2)}, r"o: a holds 4 NaN and 0 Inf"),
    ],
)
def test_a_state_of_another_observer_is_refused(state, message):
    with pytest.raises(StatisticsError, match=message):
        statistics.checked_state(state, EXPECTED, observer="o")


def test_negative_values_and_other_shapes_are_refused():
    with pytest.raises(StatisticsError, match=r"o: amax holds -2.0, it is at least 0"):
        statistics.refuse_negative(torch.tensor([1.0, -2.0]), "amax", observer="o")
    with pytest.raises(StatisticsError, match=r"o: shapes \[2\] and \[3\]; concatenate the shards"):
        statistics.refuse_other_shape((2,), (3,), observer="o")
