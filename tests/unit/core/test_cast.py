"""A cast loses digits alone, or says what else it loses."""

import pytest
import torch

from quantflow.core.cast import Cast, cast
from quantflow.errors import UsageError

SMALLEST = 2.0**-24  # of float16


def test_digits_may_go_and_single_values_may_underflow():
    values = torch.tensor([[1.0, 1e-30], [0.0, 0.0], [65504.0, -65519.0]])  # rounds to 65504
    found = cast("w", values, torch.float16)
    assert found.dtype == torch.float16 and torch.equal(found, values.half())
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("values", "dtype", "told"),
    [
        (
            torch.tensor([[1.0, 70000.0], [-99840.0, 2.0]]),
            torch.float16,
            "w: 99840 does not fit F16, whose largest is 65504 (2 of 4 values); give --dtype bf16",
        ),
        (
            torch.tensor([[1.0, 2.0], [1e-9, -2e-10], [0.0, 0.0]]),
            torch.float16,
            "w: 1 of 3 rows become 0 in F16, whose smallest is 5.96e-08 (their largest value is "
            "1e-09); give --dtype bf16",
        ),
        (
            torch.tensor([2e-10, 1e-10]),
            torch.float16,
            "w: 1 of 1 rows become 0 in F16, whose smallest is 5.96e-08 (their largest value is "
            "2e-10); give --dtype bf16",
        ),
        (
            torch.tensor(1e-10),
            torch.float16,
            "w: 1 of 1 rows become 0 in F16, whose smallest is 5.96e-08 (their largest value is "
            "1e-10); give --dtype bf16",
        ),
        (
            torch.tensor([[3.4e38]]),
            torch.bfloat16,
            "w: 3.4e+38 does not fit BF16, whose largest is 3.38953e+38 (1 of 1 values); give "
            "--dtype f32",
        ),
    ],
)
def test_what_is_no_rounding_is_refused(values, dtype, told):
    with pytest.raises(UsageError) as error:
        cast("w", values, dtype)
    assert str(error.value) == told
    with pytest.raises(UsageError, match="; store it elsewhere$"):
        cast("w", values, dtype, remedy="store it elsewhere")


def test_pieces_of_a_tensor_are_counted_together():
    whole = torch.ones(6, 4)
    whole[1, 2], whole[4] = 1e6, 1e-12
    one = Cast("w", torch.float16)
    pieces = [one(whole[:3]), one(whole[3:])]
    assert torch.equal(torch.cat(pieces), whole.half())
    assert (one.values, one.beyond, one.largest) == (24, 1, 1e6)
    assert (one.rows, one.vanished, one.left) == (6, 1, pytest.approx(1e-12))
    with pytest.raises(UsageError, match=r"w: 1e\+06 does not fit F16.*1 of 24 values"):
        one.require_held()


def test_a_dtype_of_the_same_range_or_more_loses_nothing():
    least = torch.tensor([[SMALLEST]], dtype=torch.float16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert cast("w", least, dtype).item() == SMALLEST
    half = torch.tensor([[3e38], [1e-40]], dtype=torch.bfloat16)
    assert torch.equal(cast("w", half, torch.float32).bfloat16(), half)


def test_an_empty_tensor_is_held():
    assert cast("w", torch.empty(0, 4), torch.float16).shape == (0, 4)
