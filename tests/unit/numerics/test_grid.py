"""The grid of a weight: scales and zero points by hand, shared scales, zeros, refusals."""

import pytest
import torch

from quantflow.core.scheme import PRESETS, TensorScheme
from quantflow.errors import InputError, SchemeError
from quantflow.numerics.grid import either_sign, weight_grids

INT4_G2 = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=2)
INT4_G2_ASYM = TensorScheme(
    kind="int", num_bits=4, granularity="per_group", group_size=2, symmetric=False
)
INT4_G32 = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=32)
INT4_G32_ASYM = TensorScheme(
    kind="int", num_bits=4, granularity="per_group", group_size=32, symmetric=False
)
FP8_TENSOR = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
FP8_BLOCK_2 = TensorScheme(kind="float", num_bits=8, granularity="per_block", group_size=2)
FP8_BLOCK_128 = TensorScheme(kind="float", num_bits=8, granularity="per_block", group_size=128)
INT8_TENSOR_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_tensor", symmetric=False)


def test_symmetric_groups_worked_by_hand():  # amax / 7.5
    grid = weight_grids(
        {"a": torch.tensor([[7.5, -1.0, 0.5, -15.0]])}, INT4_G2, scale_dtype=torch.float32
    )["a"]
    assert grid.scale.tolist() == [[1.0, 2.0]]
    assert grid.zero_point is None


# (max - min) / 15, zero_point = -8 - min / scale, the range holds zero
def test_asymmetric_groups_worked_by_hand():
    weight = torch.tensor([[-3.0, 12.0, 15.0, 5.0]])
    grid = weight_grids({"a": weight}, INT4_G2_ASYM, scale_dtype=torch.float32)["a"]
    assert grid.scale.tolist() == [[1.0, 1.0]]
    assert grid.zero_point.tolist() == [[-5, -8]]


def test_the_zero_point_follows_the_scale_as_it_is_stored():
    # 15.0546875 / 15 is 1.0036..., which bfloat16 stores as 1.0. The minimum is -7.52: at the
    # stored scale the zero_point is round(-8 + 7.52) = 0, at the exact one round(-8 + 7.493) = -1.
    weight = torch.tensor([[-7.52, 15.0546875 - 7.52]])
    grid = weight_grids({"a": weight}, INT4_G2_ASYM, scale_dtype=torch.bfloat16)["a"]
    assert grid.scale.tolist() == [[1.0]]
    assert grid.zero_point.tolist() == [[0]]


def test_linears_of_a_group_share_their_per_tensor_scale():
    weights = {"q": torch.tensor([[1.0, -448.0]]), "k": torch.tensor([[896.0, 2.0], [3.0, 4.0]])}
    grids = weight_grids(weights, FP8_TENSOR, scale_dtype=torch.float32)
    assert {name: grid.scale.tolist() for name, grid in grids.items()} == {
        "q": [[2.0]],
        "k": [[2.0]],
    }


def test_linears_of_a_group_share_their_per_tensor_range():
    weights = {"q": torch.tensor([[-1.0]]), "k": torch.tensor([[254.0]])}
    grids = weight_grids(weights, INT8_TENSOR_ASYM, scale_dtype=torch.float32)
    assert grids["q"].scale.tolist() == grids["k"].scale.tolist() == [[1.0]]
    assert grids["q"].zero_point.tolist() == grids["k"].zero_point.tolist() == [[-127]]


@pytest.mark.parametrize("scheme", [INT4_G2, INT4_G2_ASYM], ids=["symmetric", "asymmetric"])
def test_a_group_of_zeros_has_scale_one_and_is_counted(scheme):
    grid = weight_grids(
        {"a": torch.tensor([[0.0, 0.0, 1.0, 2.0]])}, scheme, scale_dtype=torch.bfloat16
    )["a"]
    assert grid.scale[0, 0] == 1
    assert grid.zero_groups == 1


# amax / 448 of 2 x 2
def test_blocks_worked_by_hand_are_repeated_over_their_rows_and_zeros_are_counted_once():
    weight = torch.tensor(
        [[448.0, 1.0, 0.0, 0.0], [-896.0, 2.0, 0.0, -0.0], [3.0, -1792.0, 112.0, 1.0]]
    )
    grid = weight_grids({"a": weight}, FP8_BLOCK_2, scale_dtype=torch.float32)["a"]
    assert grid.scale.tolist() == [[2.0, 1.0], [2.0, 1.0], [4.0, 0.25]]
    assert (grid.zero_point, grid.zero_groups) == (None, 1)


def test_no_unit_of_rows_ends_within_a_block():
    weight = torch.zeros(300, 4096)  # a unit of a quarter of a million elements has 64 of its rows
    weight[100, 5], weight[299, 130] = 896.0, 1792.0
    grid = weight_grids({"a": weight}, FP8_BLOCK_128, scale_dtype=torch.float32)["a"]
    expected = torch.ones(300, 32)
    expected[:128, 0], expected[256:, 1] = 2.0, 4.0
    assert torch.equal(grid.scale, expected)
    assert grid.zero_groups == 3 * 32 - 2


def test_no_weights_make_no_grids():
    assert weight_grids({}, FP8_TENSOR, scale_dtype=torch.float32) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "scheme", [INT4_G2, INT4_G2_ASYM, FP8_TENSOR], ids=["group", "asymmetric", "tensor"]
)
def test_a_damaged_weight_is_refused_by_name(scheme, bad):
    with pytest.raises(InputError, match=r"layers\.0\.q_proj: weight holds NaN or Inf; .*download"):
        weight_grids(
            {"layers.0.q_proj": torch.tensor([[1.0, bad]])}, scheme, scale_dtype=torch.float32
        )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_what_is_not_a_matrix_is_refused_by_name(shape):
    with pytest.raises(InputError, match=r"a: weight is \["):
        weight_grids({"a": torch.zeros(shape)}, FP8_TENSOR, scale_dtype=torch.float32)


def test_an_indivisible_weight_is_refused_by_name():
    with pytest.raises(
        SchemeError, match=r"a: in_features=3 is not a multiple of group_size=2; .*ignore"
    ):
        weight_grids({"a": torch.zeros(2, 3)}, INT4_G2, scale_dtype=torch.float32)


def test_a_range_that_loses_less_when_it_is_cut_is_cut():
    # amax 8.5 gives scale 8.5 / 7.5 = 1.133; cut to 30/32 of it, 1.0625, the seven 1.0625s are
    # exact and 8.5 is too.
    weight = torch.tensor([[1.0625] * 7 + [-8.5]])
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=8)
    plain = weight_grids({"a": weight}, scheme, scale_dtype=torch.float32)["a"]
    searched = weight_grids(
        {"a": weight}, scheme, scale_dtype=torch.float32, importance=torch.ones(8)
    )["a"]
    assert plain.scale.item() == pytest.approx(8.5 / 7.5)
    assert searched.scale.item() == pytest.approx(1.0625)


@pytest.mark.parametrize("scheme", [INT4_G32, INT4_G32_ASYM], ids=["symmetric", "asymmetric"])
def test_the_search_finds_the_best_of_the_multiples_for_every_group(scheme):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=generator)
    importance = torch.rand(64, generator=generator) ** 4
    grid = weight_grids({"a": weight}, scheme, scale_dtype=torch.float32, importance=importance)[
        "a"
    ]
    for row in range(6):
        for group in range(2):
            part, matters = (
                weight[row, group * 32 :][:32].double(),
                importance[group * 32 :][:32].double(),
            )
            losses = {}
            for multiple in [1.0, *(step / 32 for step in range(22, 34))]:
                if scheme.symmetric:
                    scale, zero_point = part.abs().max() * multiple / 7.5, 0
                else:
                    low, high = (
                        part.min().clamp_max(0) * multiple,
                        part.max().clamp_min(0) * multiple,
                    )
                    scale = (high - low) / 15
                    zero_point = (-8 - low / scale).round().clamp(-8, 7)
                q = (part / scale + zero_point).round().clamp(-8, 7)
                losses[scale.item()] = (
                    ((scale * (q - zero_point) - part).square() * matters).sum().item()
                )
            found = grid.scale[row, group].item()
            nearest = min(losses, key=lambda scale: abs(scale - found))
            assert nearest == pytest.approx(found, rel=1e-6)
            assert losses[nearest] == pytest.approx(min(losses.values()), rel=1e-4)


@pytest.mark.parametrize(
    "scheme",
    [TensorScheme(kind="float", num_bits=8, granularity="per_channel"), FP8_BLOCK_2],
    ids=["channel", "block"],
)
def test_of_float8_ranges_up_to_twice_as_wide_are_tried(scheme):
    generator = torch.Generator().manual_seed(0)
    weight, importance = (
        torch.randn(5, 8, generator=generator),
        torch.rand(8, generator=generator) ** 4,
    )
    grid = weight_grids({"a": weight}, scheme, scale_dtype=torch.float32, importance=importance)[
        "a"
    ]
    rows, columns = (1, 8) if scheme.group_size is None else (2, 2)  # the last block has one row
    for row in range(0, 5, rows):
        for column in range(0, 8, columns):
            part = weight[row : row + rows, column : column + columns]
            losses = {}
            for multiple in range(32, 65):
                scale = part.abs().max() / 448 * (multiple / 32)
                # nothing is above 448 here
                rounded = (part / scale).to(torch.float8_e4m3fn).double() * scale.double()
                losses[multiple] = (
                    ((rounded - part).square() * importance[column : column + columns]).sum().item()
                )
            found = grid.scale[row : row + rows, column // columns].unique()
            assert len(found) == 1
            multiple = round(32 * found.item() * 448 / part.abs().max().item())
            assert losses[multiple] == pytest.approx(min(losses.values()), rel=1e-4)


def test_a_group_that_does_not_matter_keeps_its_whole_range():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    importance = torch.cat([torch.zeros(32), torch.ones(32)])
    plain = weight_grids({"a": weight}, INT4_G32, scale_dtype=torch.bfloat16)["a"]
    searched = weight_grids(
        {"a": weight}, INT4_G32, scale_dtype=torch.bfloat16, importance=importance
    )["a"]
    assert torch.equal(searched.scale[:, 0], plain.scale[:, 0])
    assert not torch.equal(searched.scale[:, 1], plain.scale[:, 1])


def test_per_tensor_grids_are_never_searched():
    weight = {"a": torch.randn(4, 8, generator=torch.Generator().manual_seed(2))}
    for scheme in (FP8_TENSOR, INT8_TENSOR_ASYM):
        plain = weight_grids(weight, scheme, scale_dtype=torch.float32)["a"]
        searched = weight_grids(
            weight, scheme, scale_dtype=torch.float32, importance=torch.ones(8)
        )["a"]
        assert torch.equal(searched.scale, plain.scale)


def searched(weight, scheme, importance=None, *, signs=True, dtype=torch.float32):
    matters = torch.ones(weight.shape[1]) if importance is None else importance
    return weight_grids(
        {"a": weight}, scheme, scale_dtype=dtype, importance=matters, either_sign=signs
    )["a"]


def test_the_longer_side_is_put_where_the_largest_magnitude_is_worked_by_hand():
    # 2 bits are -2, -1, 0, 1 steps. 24/32 of the range makes the step 1, with which both groups are
    # points, the first turned.
    weight = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -1.0, 0.0, 1.0]])
    scheme = TensorScheme(kind="int", num_bits=2, granularity="per_group", group_size=4)
    assert searched(weight, scheme).scale.tolist() == [[-1.0, 1.0]]
    assert searched(weight, scheme, signs=False).scale[0, 0] > 0
    plain = weight_grids({"a": weight}, scheme, scale_dtype=torch.float32, either_sign=True)["a"]
    assert (plain.scale > 0).all()  # where nothing is searched, scales are compressed-tensors'


def test_a_group_whose_ends_are_alike_and_one_of_zeros_keep_positive_scales():
    grid = searched(torch.tensor([[3.0, -3.0, 0.0, 0.0, 0.5, -1.0]]), INT4_G2)
    assert (grid.scale > 0).all() and grid.scale[0, 1] == 1 and grid.zero_groups == 1


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_either_sign_the_best_is_found_for_every_group(bits, dtype):
    generator = torch.Generator().manual_seed(bits)
    weight, importance = (
        torch.randn(12, 64, generator=generator),
        torch.rand(64, generator=generator) ** 4,
    )
    scheme = TensorScheme(kind="int", num_bits=bits, granularity="per_group", group_size=32)
    grid, half = searched(weight, scheme, importance, dtype=dtype), 2 ** (bits - 1)
    assert torch.equal(grid.scale.to(dtype).float(), grid.scale)
    for row in range(12):
        for group in range(2):
            part, matters = weight[row, group * 32 :][:32], importance[group * 32 :][:32].double()
            above = part.max() > part.abs()[part < 0].max()
            whole = part.abs().max() / (half - 0.5)
            tried = [whole, *((-1 if above else 1) * whole * (step / 32) for step in range(22, 34))]
            losses = []
            for scale in [grid.scale[row, group], *(scale.to(dtype).float() for scale in tried)]:
                rounded = (part / scale).round().clamp(-half, half - 1) * scale
                losses.append(((rounded - part).double().square() * matters).sum().item())
            assert losses[0] == pytest.approx(min(losses[1:]), rel=1e-4)
    assert (grid.scale < 0).float().mean() > 0.3


def test_scales_may_be_negative_below_8_bits_without_zero_points_where_inputs_stay_as_they_are():
    assert {name for name, scheme in PRESETS.items() if either_sign(scheme)} == {
        "W6A16",
        "W5A16",
        "W4A16",
        "W3A16",
        "W2A16",
    }
