"""Parts of a weight put together are the weight quantized whole, bit for bit, or are refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.algorithms import rtn
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import PRESETS, LinearScheme, TensorScheme, with_group_size
from quantflow.distributed.joining import (
    join_columns,
    join_rows,
    requantize_,
    shared_scale,
    zero_groups,
)
from quantflow.errors import SchemeError
from tests.shared import slow_but

INT8 = TensorScheme(kind="int", num_bits=8, granularity="per_channel")
INT8_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_channel", symmetric=False)
INT8_TENSOR = TensorScheme(kind="int", num_bits=8, granularity="per_tensor")
SCHEMES = [
    PRESETS["FP8_DYNAMIC"],
    PRESETS["W8A8"],
    PRESETS["W8A16"],
    with_group_size(PRESETS["W4A16"], 4),
    with_group_size(PRESETS["W4A16_ASYM"], 4),
    with_group_size(PRESETS["W3A16"], 4),
    with_group_size(PRESETS["W2A16_ASYM"], 4),
]


def quantized(
    weight: torch.Tensor, scheme: LinearScheme, dtype: torch.dtype = torch.bfloat16
) -> QTensor:
    return rtn.quantize_group({"w": weight}, scheme, statistics={}, scale_dtype=dtype)["w"].weight


def part(
    qvalue: list[list[int]],
    scale: list[list[float]],
    scheme: TensorScheme = INT8,
    zero: int | None = None,
) -> QTensor:
    zero_point = (
        None if zero is None else torch.full((len(scale), len(scale[0])), zero, dtype=torch.int8)
    )
    return QTensor(
        qvalue=torch.tensor(qvalue, dtype=torch.int8),
        scale=torch.tensor(scale),
        zero_point=zero_point,
        scheme=scheme,
    )


def same(left: QTensor, right: QTensor) -> bool:
    pairs = [(left.qvalue, right.qvalue), (left.scale, right.scale)]
    if right.zero_point is not None:
        pairs.append((left.zero_point, right.zero_point))
    return (left.zero_point is None) == (right.zero_point is None) and all(
        a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


# scale = amax / 127.5: 1 of (127.5, 51), 2 of (-255, 85)
def test_columns_with_two_scales_worked_by_hand():
    made = join_columns([part([[127, 51]], [[1.0]]), part([[-128, 42]], [[2.0]])])
    assert made.weight.scale.tolist() == [[2.0]] and [rows.tolist() for rows, _ in made.stale] == [
        [True],
        [False],
    ]
    original = torch.tensor([[127.5, 51.0, -255.0, 85.0]])
    for rows, columns in made.stale:
        requantize_(made.weight, original, rows=rows, columns=columns)
    assert made.weight.qvalue.tolist() == [[64, 26, -128, 42]]  # 63.75, 25.5 to even


def test_a_part_of_zeros_has_no_say_in_the_scale():
    made = join_columns(
        [part([[0, 0], [0, 0]], [[1.0], [1.0]]), part([[127, 3], [0, 0]], [[0.25], [1.0]])]
    )
    assert made.weight.scale.tolist() == [[0.25], [1.0]]
    assert not any(rows.any() for rows, _ in made.stale)


def test_rows_follow_each_other():
    made = join_rows([part([[1, 2]], [[0.5]]), part([[3, 4], [5, 6]], [[0.25], [2.0]])]).weight
    assert made.qvalue.tolist() == [[1, 2], [3, 4], [5, 6]] and made.scale.tolist() == [
        [0.5],
        [0.25],
        [2.0],
    ]


def test_groups_of_zeros_are_counted():
    assert (
        zero_groups(torch.tensor([[0.0, -0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), torch.ones(2, 2))
        == 3
    )


@pytest.mark.parametrize(
    ("cards", "scheme"),
    slow_but(
        [(cards, scheme) for cards in (2, 4) for scheme in SCHEMES],
        *((4 if scheme.weights.group_size is None else 2, scheme) for scheme in SCHEMES),
    ),
    ids=lambda value: getattr(value, "name", None),
)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-30, 12))
def test_what_cards_round_and_join_is_what_one_process_rounds(scheme, cards, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 32, generator=generator) * 2.0**exponent
    # some parts and rows are zeros
    weight *= torch.rand(8, 8, generator=generator).round().repeat_interleave(4, dim=1)
    weight = weight.bfloat16()
    whole = quantized(weight, scheme)
    assert same(
        join_rows([quantized(piece, scheme) for piece in weight.chunk(cards)]).weight, whole
    )
    made = join_columns([quantized(piece, scheme) for piece in weight.chunk(cards, dim=1)])
    for rows, columns in made.stale:
        requantize_(made.weight, weight, rows=rows, columns=columns)
    assert same(made.weight, whole)


@pytest.mark.parametrize("join", [join_rows, join_columns])
@pytest.mark.parametrize("cards", [2, 4])
@given(seed=st.integers(0, 10_000), exponent=st.integers(-30, 12))
def test_what_cards_round_with_a_scale_each_and_join_is_what_one_process_rounds(
    join, cards, seed, exponent
):
    generator = torch.Generator().manual_seed(seed)
    axis = 0 if join is join_rows else 1
    weight = torch.randn(8, 32, generator=generator) * 2.0**exponent
    pieces = weight.chunk(cards, dim=axis)  # views: some cards, or all of them, hold zeros alone
    for piece in pieces:
        piece *= float(torch.rand((), generator=generator).round())
    parts = [quantized(piece.contiguous(), PRESETS["FP8"], torch.float32) for piece in pieces]
    scale = shared_scale(
        [part.scale for part in parts], zeros=[not piece.any() for piece in pieces]
    )
    made = join(parts, scale=scale)
    for rows, columns in made.stale:
        requantize_(made.weight, weight, rows=rows, columns=columns)
    assert same(made.weight, quantized(weight, PRESETS["FP8"], torch.float32))


@pytest.mark.parametrize("join", [join_rows, join_columns])
def test_parts_of_one_scale_are_refused_without_it_or_with_zero_points(join):
    with pytest.raises(SchemeError, match="symmetric=True, their scale is not given"):
        join([part([[1]], [[1.0]], INT8_TENSOR)] * 2)
    with pytest.raises(SchemeError, match="symmetric=False, their scale is given"):
        join(
            [part([[1]], [[1.0]], replace(INT8_TENSOR, symmetric=False), zero=3)] * 2,
            scale=torch.ones(1, 1),
        )


def test_rows_rounded_with_another_scale_worked_by_hand():  # 1 of (127.5, 51), 2 of (-255, 85)
    parts = [part([[127, 51]], [[1.0]], INT8_TENSOR), part([[-128, 42]], [[2.0]], INT8_TENSOR)]
    made = join_rows(parts, scale=torch.tensor([[2.0]]))
    assert [(rows.tolist(), columns) for rows, columns in made.stale] == [
        ([True, False], slice(None))
    ]
    for rows, columns in made.stale:
        requantize_(
            made.weight, torch.tensor([[127.5, 51.0], [-255.0, 85.0]]), rows=rows, columns=columns
        )
    assert made.weight.qvalue.tolist() == [[64, 26], [-128, 42]] and made.weight.scale.tolist() == [
        [2.0]
    ]


def test_a_scale_of_zeros_counts_only_where_there_is_no_other():
    scales = [torch.tensor([[1.0]]), torch.tensor([[0.25]])]
    assert shared_scale(scales, zeros=[True, False]).tolist() == [[0.25]]
    assert shared_scale(scales, zeros=[False, False]).tolist() == [[1.0]]
    assert shared_scale([scales[0]] * 2, zeros=[True, True]).tolist() == [[1.0]]


def test_zero_points_over_several_parts_are_refused():
    with pytest.raises(SchemeError, match="symmetric=False, one scale over 2 parts"):
        join_columns([part([[1]], [[1.0]], INT8_ASYM, zero=3)] * 2)
