"""HQQ: by hand, properties, the paper's own form, edges, errors, and why it exists."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS, hqq, rtn
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
INT4, INT4_ASYM = SCHEMES[0], SCHEMES[1]


def label(scheme: LinearScheme) -> str:
    weights = scheme.weights
    return f"int{weights.num_bits}-{weights.granularity}-{'sym' if weights.symmetric else 'asym'}"


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Student's t with three degrees of freedom: normal values over the root of a chi-square."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator)
        / torch.randn(3, *shape, generator=generator).square().mean(0).sqrt()
    )


def run(
    weight: torch.Tensor, scheme: LinearScheme, *, by=hqq, scale_dtype=torch.float32
) -> GroupResult:
    return by.quantize_group({"w": weight}, scheme, statistics={}, scale_dtype=scale_dtype)["w"]


def errors(weight: torch.Tensor, result: GroupResult) -> torch.Tensor:
    """Magnitudes of a weight's errors, [O, G, g] float64."""
    error = weight.double() - result.weight.dequantize().double()
    return error.abs().reshape(*result.weight.scale.shape, -1)


def objective(weight: torch.Tensor, result: GroupResult, p: float = 0.75) -> torch.Tensor:
    """Sum of the errors' p-th powers of every scale, [O, G] float64."""
    return errors(weight, result).pow(p).sum(-1)


def test_one_scale_worked_by_hand():
    # rtn: scale 7.5 / 7.5 = 1, d = (7, 1, 1, 1), errors 0.5, 0.2, 0.2, 0.2. The best multiple of
    # the range is 33/32. Least squares: 56.1 / 52 = 1.0788, the same d, and every error below 0.22
    # steps: each further step is least squares again.
    weight = torch.tensor([[7.5, 1.2, 1.2, 1.2]])
    result = run(weight, INT4)
    assert result.weight.scale.item() == pytest.approx(56.1 / 52, rel=1e-6)
    assert result.weight.qvalue.tolist() == [[7, 1, 1, 1]]
    assert result.decisions["objective_rtn"] == pytest.approx(0.5**0.75 + 3 * 0.2**0.75, abs=1e-4)
    left = 7 * 56.1 / 52 - 7.5, 1.2 - 56.1 / 52
    assert result.decisions["objective"] == pytest.approx(
        left[0] ** 0.75 + 3 * left[1] ** 0.75, abs=1e-4
    )
    assert (result.decisions["zero_groups"], result.decisions["changed_groups"]) == (0, 1)
    assert 1 <= result.decisions["iterations"] <= 20


def test_a_scale_that_would_lose_is_not_taken_worked_by_hand():
    # scale 1, zero_point -4: three of four are exact and 2.6 is 0.4 from 3, 0.4^0.75 = 0.50; other
    # multiples lose more. Least squares would have 144.8 / 146 for a scale, and errors 0.03, 0.09
    # and 0.38: 0.72.
    weight = torch.tensor([[-4.0, 11.0, 0.0, 2.6]])
    result = run(weight, INT4_ASYM)
    assert (result.weight.scale.item(), result.weight.zero_point.item()) == (1.0, -4)
    assert result.weight.qvalue.tolist() == [[-8, 7, -4, -1]]
    assert result.decisions["changed_groups"] == result.decisions["iterations"] == 0
    assert (
        result.decisions["objective"]
        == result.decisions["objective_rtn"]
        == pytest.approx(0.4**0.75, abs=1e-4)
    )


def integers(values: list[float], scale: float, zero: int) -> list[int]:
    return [min(7, max(-8, round(value / scale + zero))) - zero for value in values]


def power_sum(values: list[float], scale: float, zero: int, p: float) -> float:
    return sum(
        abs(value - scale * x) ** p
        for value, x in zip(values, integers(values, scale, zero), strict=True)
    )


def splitting(values: list[float], scheme: TensorScheme) -> float:
    """The least sum of |error|^(3/4), by the two halves in plain numbers.

    They begin at the best multiple of the range.
    """
    low, high = min(0.0, *values), max(0.0, *values)
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    whole = (high - low) / 15
    zero = 0 if scheme.symmetric else min(7, max(-8, round(-8 - low / whole)))
    multiples = [1.0, *(step / 32 for step in range(33, 21, -1))]
    scale = min(
        (whole * multiple for multiple in multiples),
        key=lambda scale: power_sum(values, scale, zero, 2),
    )
    least, beta = power_sum(values, whole, zero, 0.75), 1.0
    for _ in range(20):
        least = min(least, power_sum(values, scale, zero, 0.75))
        d = integers(values, scale, zero)
        kept = []
        for value, x in zip(values, d, strict=True):
            error = value / scale - x
            shrunk = max(0.0, abs(error) - abs(error) ** -0.25 / beta) if error else 0.0
            kept.append(scale * shrunk * (1 if error > 0 else -1))
        fitted = sum((value - e) * x for value, e, x in zip(values, kept, d, strict=True))
        scale, beta = fitted / sum(x * x for x in d), beta * 1.1
    return least


@pytest.mark.parametrize("scheme", [INT4, INT4_ASYM], ids=label)
def test_the_splitting_in_plain_numbers_finds_the_same_sums(scheme):
    weight = heavy_tailed(24, 32, seed=3)
    found = objective(weight, run(weight, scheme)).flatten().tolist()
    assert found == pytest.approx(
        [splitting(row, scheme.weights) for row in weight.tolist()], rel=1e-3
    )


def float_zero(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The paper's algorithm: [R, g] -> dequantized, with a float zero point for each row."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    zero, beta, p, least, best = -low / scale, 10.0, 0.7, float("inf"), weight
    for _ in range(20):
        q = (weight / scale + zero).round().clamp(0, 2**bits - 1)
        real = scale * (q - zero)
        error = weight - real
        if error.abs().mean().item() < least:
            least, best = error.abs().mean().item(), real
        e = error.sign() * (error.abs() - error.abs().pow(p - 1) / beta).clamp_min(0)
        zero = (q - (weight - e) / scale).mean(1, keepdim=True)
        beta *= 1.01
    return best


@pytest.mark.parametrize("values", [random, heavy_tailed])
def test_integer_zero_points_with_fitted_scales_beat_the_papers_float_zero_points(values):
    weight = values(64, 128, seed=9) * 0.02
    paper = (weight - float_zero(weight, 4)).double().abs().pow(0.7).sum()
    assert objective(weight, run(weight, PRESETS["W4A16_ASYM"]), p=0.7).sum() < paper


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from(SCHEMES),
    st.floats(1e-6, 1e6),
    st.sampled_from([random, heavy_tailed]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_scale_has_a_larger_sum_than_rounding_to_nearest(seed, scheme, size, values, dtype):
    weight = values(4, 32, seed=seed) * size
    ours, plain = (run(weight, scheme, by=by, scale_dtype=dtype) for by in (hqq, rtn))
    ours.weight.validate("w")
    assert torch.equal(ours.weight.scale.to(dtype).float(), ours.weight.scale)
    assert (objective(weight, ours) <= objective(weight, plain) * (1 + 1e-4)).all()
    assert ours.decisions["objective"] <= ours.decisions["objective_rtn"]


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(SCHEMES), st.integers(-30, 30))
def test_the_size_of_the_weights_changes_nothing(seed, scheme, exponent):
    weight = heavy_tailed(3, 32, seed=seed)
    one, other = run(weight, scheme), run(weight * 2.0**exponent, scheme)
    assert torch.equal(one.weight.qvalue, other.weight.qvalue)
    assert one.decisions == other.decisions


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_most_errors_get_smaller_and_few_larger(name):  # why it exists
    weight = heavy_tailed(64, 512, seed=1)
    ours, plain = (run(weight, PRESETS[name], by=by) for by in (hqq, rtn))
    assert objective(weight, ours).sum() < 0.93 * objective(weight, plain).sum()
    assert errors(weight, ours).median() < 0.95 * errors(weight, plain).median()
    assert errors(weight, ours).max() > errors(weight, plain).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=label)
def test_zeros_stay_zeros_and_are_counted(scheme):
    result = run(torch.zeros(2, 32), scheme)
    scales = result.weight.scale.numel()
    assert (result.weight.scale == 1).all() and not result.weight.dequantize().any()
    assert result.decisions == {
        "zero_groups": scales,
        "changed_groups": 0,
        "iterations": 0,
        "objective_rtn": 0.0,
        "objective": 0.0,
    }


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.weights.group_size is None], ids=label)
@pytest.mark.parametrize(
    "weight", [[[-3.0]], [[0.7] * 5, [-0.2] * 5]], ids=["one-element", "constant-rows"]
)
def test_rows_of_one_value_are_exact_but_for_the_scales_last_bits(scheme, weight):
    weight = torch.tensor(weight)
    assert run(weight, scheme).weight.dequantize().flatten().tolist() == pytest.approx(
        weight.flatten().tolist(), rel=1e-5
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
            PRESETS["FP8_DYNAMIC"],
            SchemeError,
            r"FP8_DYNAMIC: hqq with kind='float'; use rtn",
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
            r"one: hqq with one scale per tensor; use rtn",
        ),
    ],
    ids=["indivisible", "nan", "empty", "float8", "per-tensor"],
)
def test_errors_name_what_is_wrong_and_the_remedy(weight, scheme, error, message):
    with pytest.raises(error, match=message):
        hqq.quantize_group({"q_proj": weight}, scheme, statistics={}, scale_dtype=torch.float32)


@pytest.mark.parametrize("name", ["W8A16", "W4A16_ASYM"])
def test_the_number_of_workers_does_not_change_a_bit(name):
    weight = heavy_tailed(300, 2048, seed=6).to(torch.bfloat16)  # three units
    before = weight.clone()
    weights = {"a": weight, "b": weight[:40]}
    alone = hqq.quantize_group(weights, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16)
    with Workers(3) as workers:
        told = {"statistics": {}, "scale_dtype": torch.bfloat16, "workers": workers}
        together = hqq.quantize_group(weights, PRESETS[name], **told)
    assert torch.equal(weight, before)
    for key in weights:
        one, other = alone[key].weight, together[key].weight
        assert torch.equal(one.qvalue, other.qvalue) and torch.equal(one.scale, other.scale)
        assert one.zero_point is None or torch.equal(one.zero_point, other.zero_point)
        assert alone[key].decisions == together[key].decisions


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=label)
def test_rows_have_the_bits_and_add_up_to_the_decisions_of_the_whole_however_they_are_cut(scheme):
    weight = heavy_tailed(23, 37, seed=8)  # no multiple of what a processor takes at once
    whole, total = run(weight, scheme), {}
    for first, last in ((0, 1), (1, 4), (4, 23)):
        part = run(weight[first:last], scheme)
        assert torch.equal(part.weight.scale, whole.weight.scale[first:last])
        assert torch.equal(part.weight.qvalue, whole.weight.qvalue[first:last])
        total = {key: total.get(key, 0) + value for key, value in part.decisions.items()}
    assert total == whole.decisions


def test_the_working_memory_is_that_of_a_unit_for_each_worker():
    # 2^18 elements, or a row where that has more: six float32 of each, 6 MiB, and a twentieth for
    # the scales.
    assert 6 << 20 < hqq.working_bytes(4096, 2048) < 1.06 * (6 << 20)
    assert hqq.working_bytes(1 << 20, 2048, workers=2) == 8 * hqq.working_bytes(4096, 2048)


def test_it_needs_no_statistics_and_goes_row_by_row():
    assert ALGORITHMS["hqq"] is hqq
    assert (hqq.NEEDS, hqq.BY_ROW) == ((), True)
    assert hqq.quantize_group({}, INT4, statistics={}, scale_dtype=torch.float32) == {}
