"""Reshapes between a weight and its groups, worked by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core import groups
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

PER_CHANNEL = TensorScheme(kind="int", num_bits=8, granularity="per_channel")


def per_group(size: int) -> TensorScheme:
    return TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=size)


def test_a_weight_of_two_rows_in_groups_of_two():
    weight = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert groups.to_groups(weight, 2).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_groups_are_a_view_also_of_a_transposed_weight():
    weight = torch.zeros(4, 6)
    groups.to_groups(weight, 3)[2, 1, 0] = 5
    assert weight[2, 3] == 5
    groups.to_groups(weight.T, 2)[0, 1, 0] = 7
    assert weight[2, 0] == 7


def test_values_per_group_are_repeated_over_its_columns():
    assert groups.expand(torch.tensor([[1, 2], [3, 4]]), 6).tolist() == [
        [1, 1, 1, 2, 2, 2],
        [3, 3, 3, 4, 4, 4],
    ]
    assert groups.expand(torch.tensor([[9]]), 3).tolist() == [[9, 9, 9]]


@settings(max_examples=40)
@given(rows=st.integers(0, 4), count=st.integers(1, 5), size=st.integers(1, 5))
def test_flattening_the_groups_of_a_row_gives_the_row_back(rows, count, size):
    weight = torch.arange(rows * count * size).reshape(rows, count * size)
    split = groups.to_groups(weight, size)
    assert split.shape == (rows, count, size)
    assert torch.equal(split.flatten(1), weight)


@settings(max_examples=40)
@given(rows=st.integers(1, 4), count=st.integers(1, 5), size=st.integers(1, 5))
def test_expand_gives_each_column_the_value_of_its_group(rows, count, size):
    per = torch.arange(rows * count).reshape(rows, count)
    wide = groups.expand(per, count * size)
    assert all(
        wide[row, column] == per[row, column // size]
        for row in range(rows)
        for column in range(count * size)
    )


def test_rows_of_a_block_have_its_value_and_the_last_block_may_be_shorter():
    per_block = torch.tensor([[1, 2], [3, 4]])
    assert groups.expand_rows(per_block, 2, 3).tolist() == [[1, 2], [1, 2], [3, 4]]
    assert groups.expand_rows(per_block, 1, 2).tolist() == per_block.tolist()


def test_without_groups_a_row_is_one_group():
    assert groups.group_size_for(PER_CHANNEL, 12) == 12


@pytest.mark.parametrize("in_features", [4, 8, 400])
def test_a_group_size_that_divides_is_taken(in_features):
    assert groups.group_size_for(per_group(4), in_features) == 4


def test_a_group_size_that_does_not_divide_is_refused_with_the_name_of_the_weight():
    with pytest.raises(
        SchemeError,
        match=r"q_proj: in_features=10 is not a multiple of group_size=4; choose a divisor of "
        r"10, or list",
    ):
        groups.group_size_for(per_group(4), 10, name="q_proj")


def test_a_last_block_of_fewer_columns_is_refused_with_the_reason():
    """compressed-tensors and vLLM round inputs in groups, and take no part of one.

    vllm-project/llm-compressor issue 2286: shapes that 128 does not divide. vllm-project/vllm pull
    request 33327, which would have padded the inputs, was closed.
    """
    block = TensorScheme(kind="float", num_bits=8, granularity="per_block", group_size=128)
    with pytest.raises(
        SchemeError,
        match=r"o_proj: in_features=576 is not a multiple of group_size=128; a last block may have "
        r"fewer rows, but not fewer columns: compressed-tensors and vLLM .*such as FP8_DYNAMIC",
    ):
        groups.group_size_for(block, 576, name="o_proj")


def test_a_group_size_that_does_not_divide_never_mixes_rows():
    with pytest.raises(RuntimeError):
        groups.to_groups(torch.zeros(4, 6), 4)  # 24 elements: six groups of four exist, across rows


def test_spans_cover_everything_once_and_the_last_may_be_shorter():
    assert groups.spans(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert groups.spans(8, 4, start=4) == [slice(4, 8)]
    assert groups.spans(0, 4) == []


@pytest.mark.parametrize(
    ("shape", "rows"), [((300, 2048), [128, 128, 44]), ((3, 2**20), [1, 1, 1]), ((5, 1), [5])]
)
def test_units_of_rows_have_a_quarter_of_a_million_elements_or_one_row(shape, rows):
    units = groups.row_units(torch.empty(shape, dtype=torch.int8))
    assert [unit.stop - unit.start for unit in units] == rows
