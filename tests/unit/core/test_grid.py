"""The grid of a weight: scales and zero points by hand, shared scales, zeros, and what is refused."""

import pytest
import torch

from quantflow.core.grid import weight_grids
from quantflow.core.scheme import TensorScheme
from quantflow.errors import InputError, SchemeError

INT4_G2 = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=2)
INT4_G2_ASYM = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=2, symmetric=False)
FP8_TENSOR = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
INT8_TENSOR_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_tensor", symmetric=False)


def test_symmetric_groups_worked_by_hand():  # amax / 7.5
    grid = weight_grids({"a": torch.tensor([[7.5, -1.0, 0.5, -15.0]])}, INT4_G2, scale_dtype=torch.float32)["a"]
    assert grid.scale.tolist() == [[1.0, 2.0]]
    assert grid.zero_point is None


def test_asymmetric_groups_worked_by_hand():  # (max - min) / 15, zero_point = -8 - min / scale, the range holds zero
    weight = torch.tensor([[-3.0, 12.0, 15.0, 5.0]])
    grid = weight_grids({"a": weight}, INT4_G2_ASYM, scale_dtype=torch.float32)["a"]
    assert grid.scale.tolist() == [[1.0, 1.0]]
    assert grid.zero_point.tolist() == [[-5, -8]]


def test_the_zero_point_follows_the_scale_as_it_is_stored():
    # 15.0546875 / 15 is 1.0036..., which bfloat16 stores as 1.0. The minimum is -7.52: at the stored scale the
    # zero_point is round(-8 + 7.52) = 0, at the exact one round(-8 + 7.493) = -1.
    weight = torch.tensor([[-7.52, 15.0546875 - 7.52]])
    grid = weight_grids({"a": weight}, INT4_G2_ASYM, scale_dtype=torch.bfloat16)["a"]
    assert grid.scale.tolist() == [[1.0]]
    assert grid.zero_point.tolist() == [[0]]


def test_linears_of_a_group_share_their_per_tensor_scale():
    weights = {"q": torch.tensor([[1.0, -448.0]]), "k": torch.tensor([[896.0, 2.0], [3.0, 4.0]])}
    grids = weight_grids(weights, FP8_TENSOR, scale_dtype=torch.float32)
    assert {name: grid.scale.tolist() for name, grid in grids.items()} == {"q": [[2.0]], "k": [[2.0]]}


def test_linears_of_a_group_share_their_per_tensor_range():
    weights = {"q": torch.tensor([[-1.0]]), "k": torch.tensor([[254.0]])}
    grids = weight_grids(weights, INT8_TENSOR_ASYM, scale_dtype=torch.float32)
    assert grids["q"].scale.tolist() == grids["k"].scale.tolist() == [[1.0]]
    assert grids["q"].zero_point.tolist() == grids["k"].zero_point.tolist() == [[-127]]


@pytest.mark.parametrize("scheme", [INT4_G2, INT4_G2_ASYM], ids=["symmetric", "asymmetric"])
def test_a_group_of_zeros_has_scale_one_and_is_counted(scheme):
    grid = weight_grids({"a": torch.tensor([[0.0, 0.0, 1.0, 2.0]])}, scheme, scale_dtype=torch.bfloat16)["a"]
    assert grid.scale[0, 0] == 1
    assert grid.zero_groups == 1


def test_no_weights_make_no_grids():
    assert weight_grids({}, FP8_TENSOR, scale_dtype=torch.float32) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", [INT4_G2, INT4_G2_ASYM, FP8_TENSOR], ids=["group", "asymmetric", "tensor"])
def test_a_damaged_weight_is_refused_by_name(scheme, bad):
    with pytest.raises(InputError, match=r"layers\.0\.q_proj: weight holds NaN or Inf; .*download"):
        weight_grids({"layers.0.q_proj": torch.tensor([[1.0, bad]])}, scheme, scale_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_what_is_not_a_matrix_is_refused_by_name(shape):
    with pytest.raises(InputError, match=r"a: weight is \["):
        weight_grids({"a": torch.zeros(shape)}, FP8_TENSOR, scale_dtype=torch.float32)


def test_an_indivisible_weight_is_refused_by_name():
    with pytest.raises(SchemeError, match=r"a: in_features=3 is not a multiple of group_size=2; .*ignore"):
        weight_grids({"a": torch.zeros(2, 3)}, INT4_G2, scale_dtype=torch.float32)
