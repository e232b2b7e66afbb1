"""A weight that is cut and put together is the same; a part keeps the scales of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import TensorScheme
from quantflow.distributed.slicing import cut, side_by_side
from quantflow.errors import SchemeError

CHANNEL = TensorScheme(kind="int", num_bits=8, granularity="per_channel", symmetric=False)
GROUP = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=2, symmetric=False)
TENSOR = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")


def weight(scheme: TensorScheme, rows: int = 4, columns: int = 8) -> QTensor:
    """Values that all differ, as far as four bits go."""
    qvalue = (torch.arange(rows * columns) % 16 - 8).to(torch.int8).reshape(rows, columns)
    grid = {"per_channel": (rows, 1), "per_tensor": (1, 1)}.get(
        scheme.granularity, (rows, columns // 2)
    )
    count = grid[0] * grid[1]
    return QTensor(
        qvalue=qvalue.to(torch.float8_e4m3fn) if scheme.kind == "float" else qvalue,
        scale=torch.arange(1.0, count + 1).reshape(grid),
        zero_point=None
        if scheme.symmetric
        else (torch.arange(count) % 5).to(torch.int8).reshape(grid),
        scheme=scheme,
    )


def test_columns_of_groups_worked_by_hand():
    part = cut(weight(GROUP, rows=2), slice(2, 6), axis=1)
    assert part.qvalue.tolist() == [[-6, -5, -4, -3], [2, 3, 4, 5]]
    assert part.scale.tolist() == [[2.0, 3.0], [6.0, 7.0]]
    assert part.zero_point is not None and part.zero_point.tolist() == [[1, 2], [0, 1]]


def test_columns_keep_the_scales_of_their_rows_and_rows_take_theirs_along():
    whole = weight(CHANNEL)
    assert torch.equal(cut(whole, slice(4, 8), axis=1).scale, whole.scale)
    assert cut(whole, slice(1, 3), axis=0).scale.tolist() == [[2.0], [3.0]]
    assert cut(weight(TENSOR), slice(1, 3), axis=0).scale.tolist() == [[1.0]]


@given(
    scheme=st.sampled_from([CHANNEL, GROUP, TENSOR]),
    axis=st.sampled_from([0, 1]),
    at=st.integers(1, 3),
)
def test_what_is_cut_and_put_together_is_the_same(scheme, axis, at):
    whole = weight(scheme)
    at, end = (at, 4) if axis == 0 else (2 * at, 8)
    made = side_by_side(
        [cut(whole, slice(0, at), axis=axis), cut(whole, slice(at, end), axis=axis)], axis=axis
    )
    assert (
        torch.equal(made.qvalue.view(torch.uint8), whole.qvalue.view(torch.uint8))
        and made.qvalue.dtype == whole.qvalue.dtype
    )
    assert torch.equal(made.scale, whole.scale)
    assert (made.zero_point is None) == scheme.symmetric
    assert whole.zero_point is None or torch.equal(made.zero_point, whole.zero_point)


def test_a_group_is_not_split():
    with pytest.raises(SchemeError, match="columns 0 to 3 of groups of 2"):
        cut(weight(GROUP), slice(0, 3), axis=1)


def test_parts_of_different_weights_do_not_share_scales():
    whole = weight(CHANNEL)
    other = QTensor(
        qvalue=whole.qvalue, scale=2 * whole.scale, zero_point=whole.zero_point, scheme=CHANNEL
    )
    with pytest.raises(SchemeError, match="per_channel weight have different scales"):
        side_by_side([whole, other], axis=1)
