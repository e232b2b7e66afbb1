"""RTN on a searched range: by hand, properties, plain numbers, edges, errors, why it exists."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS, rtn, rtn_mse
from quantflow.core.parallel import Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import PRESETS, LinearScheme, TensorScheme
from quantflow.errors import InputError, SchemeError
from tests.shared import random

GRANULARITIES = {"per_channel": None, "per_group": 16}
SCHEMES = [
    LinearScheme(
        name="test",
        weights=TensorScheme(
            kind="int", num_bits=bits, granularity=granularity, group_size=size, symmetric=symmetric
        ),
        input=None,
        layout="pack-quantized",
    )
    for (granularity, size), bits, symmetric in itertools.product(
        GRANULARITIES.items(), (4, 8), (True, False)
    )
]
INT4 = SCHEMES[0]


def label(scheme: LinearScheme) -> str:
    weights = scheme.weights
    return f"int{weights.num_bits}-{weights.granularity}-{'sym' if weights.symmetric else 'asym'}"


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values over the root of a chi-square: Student's t with three degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator)
        / torch.randn(3, *shape, generator=generator).square().mean(0).sqrt()
    )


def run(
    weight: torch.Tensor, scheme: LinearScheme, *, by=rtn_mse, scale_dtype=torch.float32
) -> GroupResult:
    return by.quantize_group({"w": weight}, scheme, statistics={}, scale_dtype=scale_dtype)["w"]


def squared_error(weight: torch.Tensor, result: GroupResult) -> torch.Tensor:
    """Of every scale, [O, G] float64."""
    error = weight.double() - result.weight.dequantize().double()
    return error.reshape(*result.weight.scale.shape, -1).square().sum(-1)


def test_a_range_cut_to_fifteen_sixteenths_worked_by_hand():
    # amax 8.5 gives scale 8.5 / 7.5 = 1.133, which makes 1.133 of 1.0625. At 30/32 of it the scale
    # is 1.0625: all is exact.
    weight = torch.tensor([[1.0625] * 7 + [-8.5]])
    result = run(weight, INT4)
    assert result.weight.scale.item() == pytest.approx(1.0625, rel=1e-6)
    assert result.weight.qvalue.tolist() == [[1, 1, 1, 1, 1, 1, 1, -8]]
    assert run(weight, INT4, by=rtn).weight.scale.item() == pytest.approx(8.5 / 7.5, rel=1e-6)


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from(SCHEMES),
    st.floats(1e-6, 1e6),
    st.sampled_from([random, heavy_tailed]),
)
def test_no_scale_loses_more_than_that_of_the_whole_range(seed, scheme, size, values):
    weight = values(4, 32, seed=seed) * size
    ours = run(weight, scheme)
    ours.weight.validate("w")
    assert (
        squared_error(weight, ours)
        <= squared_error(weight, run(weight, scheme, by=rtn)) * (1 + 1e-5)
    ).all()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_an_exhaustive_search_in_plain_numbers_finds_the_same_errors(symmetric):
    weight = heavy_tailed(3, 16)
    scheme = next(
        s for s in SCHEMES if s.weights.symmetric is symmetric and s.weights.num_bits == 4
    )
    found = squared_error(weight, run(weight, scheme))
    for row, error in zip(weight.tolist(), found.flatten().tolist(), strict=True):
        least = math.inf
        # the whole range is tried with a positive scale too
        turned = symmetric and max(row) > -min(row)
        for multiple in [-1.0 if turned else 1.0, *(step / 32 for step in range(22, 34))]:
            low, high = (
                (-max(map(abs, row)), max(map(abs, row)))
                if symmetric
                else (min(0.0, *row), max(0.0, *row))
            )
            scale = multiple * (high - low) / 15 * (-1 if turned else 1)
            zero = 0 if symmetric else min(7, max(-8, round(-8 - multiple * low / scale)))
            loss = 0.0
            for value in row:
                q = min(7, max(-8, round(value / scale + zero)))
                loss += (value - scale * (q - zero)) ** 2
            least = min(least, loss)
        assert error == pytest.approx(least, rel=1e-3)


# the same, turned
def test_a_group_whose_largest_weight_is_positive_has_a_negative_scale_worked_by_hand():
    result = run(torch.tensor([[-1.0625] * 7 + [8.5]]), INT4)
    assert result.weight.scale.item() == pytest.approx(-1.0625, rel=1e-6)
    assert result.weight.qvalue.tolist() == [[1, 1, 1, 1, 1, 1, 1, -8]]


@pytest.mark.parametrize(("name", "share"), [("W2A16", 0.95), ("W3A16", 0.92), ("W4A16", 0.98)])
def test_scales_of_either_sign_lose_less(name, share):  # why it chooses the sign
    weight = random(64, 512, seed=3)
    # the same integers, for engines that take no other sign
    positive = replace(PRESETS[name], input=PRESETS["W4A8"].input)
    either, only = run(weight, PRESETS[name]), run(weight, positive)
    assert (either.weight.scale < 0).float().mean() > 0.3 and (only.weight.scale > 0).all()
    lost = squared_error(weight, either).sum() / squared_error(weight, only).sum()
    print(f"{name}: {lost:.3f} of the squared error")
    assert lost < share


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_one_large_weight_in_a_group_costs_the_others_less(name):  # why it exists
    weight = random(64, 512, seed=2)
    weight[:, ::128] *= 5
    ours, plain = (
        squared_error(weight, run(weight, PRESETS[name], by=by)) for by in (rtn_mse, rtn)
    )
    assert ours.sum() < 0.93 * plain.sum()


def test_zeros_stay_zeros_and_are_counted():
    weight = random(2, 32)
    weight[1, 16:] = 0
    scheme = next(s for s in SCHEMES if s.weights.granularity == "per_group")
    result = run(weight, scheme)
    assert result.decisions == {"zero_groups": 1}
    assert result.weight.scale[1, 1] == 1 and not result.weight.dequantize()[1, 16:].any()


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.weights.group_size is None], ids=label)
def test_one_element_is_a_weight(scheme):
    assert run(torch.tensor([[-3.0]]), scheme).weight.dequantize().item() == pytest.approx(
        -3.0, rel=0.01
    )


@pytest.mark.parametrize(
    ("weight", "scheme", "error", "message"),
    [
        (
            torch.ones(4, 100),
            PRESETS["W4A16"],
            SchemeError,
            r"q_proj: in_features=100.*group_size=128.*ignore",
        ),
        (
            torch.full((4, 128), float("nan")),
            PRESETS["W4A16"],
            InputError,
            r"q_proj: weight holds NaN or Inf; .*damaged",
        ),
        (torch.ones(0, 128), PRESETS["W4A16"], InputError, r"q_proj: weight is \[0, 128\]"),
        (
            torch.ones(4, 128),
            PRESETS["FP8"],
            SchemeError,
            r"FP8: rtn_mse with one scale per tensor; use rtn",
        ),
        (
            torch.ones(4, 128),
            LinearScheme(
                name="one",
                weights=TensorScheme(kind="int", num_bits=8, granularity="per_tensor"),
                input=None,
                layout="int-quantized",
            ),
            SchemeError,
            r"one: rtn_mse with one scale per tensor; use rtn",
        ),
    ],
    ids=["indivisible", "nan", "empty", "float8-per-tensor", "per-tensor"],
)
def test_errors_name_what_is_wrong_and_the_remedy(weight, scheme, error, message):
    with pytest.raises(error, match=message):
        rtn_mse.quantize_group({"q_proj": weight}, scheme, statistics={}, scale_dtype=torch.float32)


def test_a_wider_range_of_float8_worked_by_hand():
    # amax 448 has the scale 1, at which 17 lies between 16 and 18, and 272 between 256 and 288. Up
    # to a scale of 17 / 16 (34/32 of the range) nothing is cut; there both are points, 16 and 256,
    # and 448 becomes 416 * 17 / 16 = 442.
    weight = torch.tensor([[448.0] + [17.0, 272.0] * 20])
    result = run(weight, PRESETS["FP8_DYNAMIC"])
    assert result.weight.scale.item() == 17 / 16
    assert result.weight.dequantize().tolist() == [[442.0] + [17.0, 272.0] * 20]


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("values", [random, heavy_tailed])
def test_float8_loses_a_tenth_less_per_channel_and_never_more(name, values):  # why it takes float8
    weight = values(192, 256, seed=4)
    ours, plain = (
        squared_error(weight, run(weight, PRESETS[name], by=by)) for by in (rtn_mse, rtn)
    )
    if name == "FP8_BLOCK":  # 128 rows of a block, then the 64 that are left
        ours, plain = (
            torch.stack([error[:128].sum(0), error[128:].sum(0)]) for error in (ours, plain)
        )
    assert (ours <= plain * (1 + 1e-5)).all()
    assert ours.sum() < (0.9 if name == "FP8_DYNAMIC" else 0.99) * plain.sum()


@pytest.mark.parametrize("name", ["W8A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_the_number_of_workers_and_rows_given_at_once_do_not_change_a_bit(name):
    weight = heavy_tailed(300, 2048, seed=6).to(torch.bfloat16)  # three units
    before = weight.clone()
    weights = {"a": weight, "b": weight[:40]}
    alone = rtn_mse.quantize_group(
        weights, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16
    )
    with Workers(3) as workers:
        told = {"statistics": {}, "scale_dtype": torch.bfloat16, "workers": workers}
        together = rtn_mse.quantize_group(weights, PRESETS[name], **told)
    rows = run(weight[96:104], PRESETS[name], scale_dtype=torch.bfloat16).weight
    assert torch.equal(weight, before)
    for key in weights:
        one, other = alone[key].weight, together[key].weight
        assert torch.equal(one.qvalue, other.qvalue) and torch.equal(one.scale, other.scale)
        assert torch.equal(one.scale.to(torch.bfloat16).float(), one.scale)
    assert torch.equal(rows.qvalue, alone["a"].weight.qvalue[96:104])


def test_it_needs_no_statistics_and_goes_row_by_row():
    assert ALGORITHMS["rtn_mse"] is rtn_mse
    assert (rtn_mse.NEEDS, rtn_mse.BY_ROW) == ((), True)
    assert rtn_mse.quantize_group({}, INT4, statistics={}, scale_dtype=torch.float32) == {}
