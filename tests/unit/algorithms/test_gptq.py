"""GPTQ: by hand, properties, two textbook forms, edges, errors, and why it exists."""

import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS, gptq, rtn
from quantflow.core import affine, float8
from quantflow.core.parallel import Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_float8, with_group_size
from quantflow.errors import InputError, SchemeError, StatisticsError
from quantflow.numerics import compiled_rounding, feedback
from tests.shared import random

W4_G32 = with_group_size(preset("W4A16"), 32)
W4_G32_ASYM = with_group_size(preset("W4A16_ASYM"), 32)
W4_CHANNEL = LinearScheme(
    name="test",
    weights=TensorScheme(kind="int", num_bits=4, granularity="per_channel"),
    input=None,
    layout="pack-quantized",
)
W4_TENSOR = replace(  # its scale comes from the whole range
    W4_CHANNEL,
    layout="int-quantized",
    weights=replace(W4_CHANNEL.weights, granularity="per_tensor"),
)
W8_CHANNEL = preset("W8A16")
W3_G32 = with_group_size(preset("W3A16"), 32)
W2_G32_ASYM = with_group_size(preset("W2A16_ASYM"), 32)
SCHEMES = [W4_G32, W4_G32_ASYM, W4_CHANNEL, W8_CHANNEL, W3_G32, W2_G32_ASYM]
IDS = ["int4-g32", "int4-g32-asym", "int4-channel", "int8-channel", "int3-g32", "int2-g32-asym"]


def correlated_inputs(samples: int, features: int, *, seed: int = 0) -> torch.Tensor:
    """Inputs like a transformer's: few directions carry most of the energy, channels differ."""
    directions = random(samples, features // 4, seed=seed) @ random(
        features // 4, features, seed=seed + 1
    )
    noise = random(samples, features, seed=seed + 2)
    sizes = torch.logspace(-1, 1, features)[
        torch.randperm(features, generator=torch.Generator().manual_seed(seed))
    ]
    return (directions + noise) * sizes


def statistics_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hessian_sum": x.T.double() @ x.double(), "count": torch.tensor(x.shape[0])}


def run(weight: torch.Tensor, x: torch.Tensor, scheme: LinearScheme) -> GroupResult:
    results = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics_of(x), scale_dtype=torch.float32
    )
    return results["w"]


def nearest(weight: torch.Tensor, scheme: LinearScheme) -> GroupResult:
    return rtn.quantize_group({"w": weight}, scheme, statistics={}, scale_dtype=torch.float32)["w"]


def grid_of(result: GroupResult) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of every element, [O, I] float64 each (test_grid.py tests them)."""
    scale, zero_point = result.weight.scale, result.weight.zero_point
    size = result.weight.qvalue.shape[1] // scale.shape[1]
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    return scale.double().repeat_interleave(size, 1), zero_point.double().repeat_interleave(size, 1)


def nearest_on(weight: torch.Tensor, result: GroupResult) -> torch.Tensor:
    """The qvalues of plain rounding to the grid of a result."""
    scale, zero_point = grid_of(result)
    scheme = result.weight.scheme
    return (
        (weight.double() / scale + zero_point)
        .round()
        .clamp(scheme.qmin, scheme.qmax)
        .to(torch.int8)
    )


def damped(x: torch.Tensor) -> torch.Tensor:
    hessian = x.T.double() @ x.double()
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(x.shape[1], dtype=torch.float64)


def optimal_brain_quantizer(
    weight: torch.Tensor, x: torch.Tensor, result: GroupResult
) -> torch.Tensor:
    """Equations 2 and 3 of the paper: invert the rest of H before every single column."""
    scheme, (scale, zero_point) = result.weight.scheme, grid_of(result)
    hessian, weight = damped(x), weight.double().clone()
    left = sorted(range(weight.shape[1]), key=lambda j: -hessian[j, j].item())
    qvalue = torch.zeros_like(weight)
    while left:
        column = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        q = (
            (weight[:, column] / scale[:, column] + zero_point[:, column])
            .round()
            .clamp(scheme.qmin, scheme.qmax)
        )
        error = weight[:, column] - scale[:, column] * (q - zero_point[:, column])
        weight[:, left] -= torch.outer(error / inverse[0, 0], inverse[0])
        qvalue[:, column] = q
        left = left[1:]
    return qvalue.to(torch.int8)


def algorithm_one(weight: torch.Tensor, x: torch.Tensor, result: GroupResult) -> torch.Tensor:
    """Algorithm 1 of the paper: the Cholesky factor of the inverse, without the blocks."""
    order = torch.argsort(damped(x).diagonal(), descending=True)
    scheme, (scale, zero_point) = (
        result.weight.scheme,
        (tensor[:, order] for tensor in grid_of(result)),
    )
    hessian, weight = damped(x)[order][:, order], weight.double()[:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    qvalue = torch.zeros_like(weight)
    for j in range(weight.shape[1]):
        q = (weight[:, j] / scale[:, j] + zero_point[:, j]).round().clamp(scheme.qmin, scheme.qmax)
        error = (weight[:, j] - scale[:, j] * (q - zero_point[:, j])) / upper[j, j]
        weight[:, j:] -= torch.outer(error, upper[j, j:])
        qvalue[:, order[j]] = q
    return qvalue.to(torch.int8)


def output_error(weight: torch.Tensor, result: GroupResult, x: torch.Tensor) -> float:
    return ((x @ (weight - result.weight.dequantize()).T).norm() / (x @ weight.T).norm()).item()


def test_two_columns_worked_by_hand():
    # The scale is 7.5 / 7.5 = 1. H = [[2, 2], [2, 4]], so the second column comes first: -7.5
    # rounds to -8, error 0.5. Damped by 0.01 * 3, the first column is owed 0.5 * 2 / 2.03 = 0.493:
    # 2.2 becomes 2.693 and rounds to 3, not 2.
    statistics = {
        "hessian_sum": torch.tensor([[2.0, 2.0], [2.0, 4.0]]).double(),
        "count": torch.tensor(1),
    }
    weights = {"w": torch.tensor([[2.2, -7.5]])}
    result = gptq.quantize_group(
        weights, W4_TENSOR, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert result.weight.scale.tolist() == [[1.0]]
    assert result.weight.qvalue.tolist() == [[3, -8]]
    assert result.decisions == {
        "damping": 0.01,
        "attempts": 1,
        "dead_channels": 0,
        "order": "hessian_diagonal",
        "tokens": 1,
        "zero_groups": 0,
        # Errors (-0.8, 0.5) instead of round to nearest's (0.2, 0.5), of 2 * 2.2^2 - 2 * 2 * 2.2 *
        # 7.5 + 4 * 7.5^2.
        "output_error": pytest.approx(math.sqrt((2 * 0.64 - 4 * 0.4 + 4 * 0.25) / 168.68)),
        "output_error_rtn": pytest.approx(math.sqrt((2 * 0.04 + 4 * 0.1 + 4 * 0.25) / 168.68)),
        "same_as_rtn": False,
    }


def float8_algorithm_one(
    weight: torch.Tensor, x: torch.Tensor, result: GroupResult
) -> torch.Tensor:
    """Algorithm 1 of the paper with float8's points instead of integers; the values, float64."""
    hessian, scale = damped(x), grid_of(result)[0]
    order = torch.argsort(hessian.diagonal(), descending=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    left, value = weight.double()[:, order], torch.zeros_like(weight, dtype=torch.float64)
    for j, column in enumerate(order.tolist()):
        step = scale[:, column].expand(len(weight))
        largest = float8.FLAVOURS[result.weight.scheme.float8].largest
        code = (left[:, j] / step).float().clamp(-largest, largest).to(result.weight.qvalue.dtype)
        value[:, column] = code.double() * step
        left[:, j:] -= torch.outer((left[:, j] - value[:, column]) / upper[j, j], upper[j, j:])
    return value


FLOAT8 = [
    *map(preset, ("FP8", "FP8_DYNAMIC")),
    with_group_size(preset("FP8_BLOCK"), 32),
    with_float8(preset("FP8"), "e5m2"),
]


def test_two_columns_of_float8_worked_by_hand():
    # amax 448 has the scale 1, where the points near 20 are 2 apart. Of these two the second column
    # comes first: 19.2 becomes 20, an error of -0.8. Damped by 0.01 * 5, the first is owed -0.8 * 2
    # / 2.05 = -0.78: 17.2 becomes 16.42 and 16, not 18.
    statistics = {
        "hessian_sum": torch.tensor([[2.0, 2.0, 0], [2, 4, 0], [0, 0, 9]]),
        "count": torch.tensor(1),
    }
    weights = {"w": torch.tensor([[17.2, 19.2, 448.0]])}
    result = gptq.quantize_group(
        weights, preset("FP8"), statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert result.weight.scale.tolist() == [[1.0]]
    assert result.weight.qvalue.dtype == torch.float8_e4m3fn
    assert result.weight.dequantize().tolist() == [[16.0, 20.0, 448.0]]


@pytest.mark.parametrize("scheme", FLOAT8, ids=["tensor", "channel", "block", "e5m2"])
@pytest.mark.parametrize("features", [32, 160], ids=["one-block", "two-blocks"])
def test_on_the_points_of_float8_it_takes_the_decisions_of_the_textbook(features, scheme):
    weight, x = random(70, features, seed=3), correlated_inputs(2 * features, features)
    result = run(weight, x, scheme)
    result.weight.validate("w")
    expected = float8_algorithm_one(weight, x, result)
    # the rest are ties but for 2^-24
    assert (result.weight.dequantize() == expected.float()).double().mean() > 0.999
    assert result.decisions["same_as_rtn"] is False


@pytest.mark.parametrize("scheme", FLOAT8, ids=["tensor", "channel", "block", "e5m2"])
def test_the_output_of_float8_gets_better_too(scheme):
    weight, x = random(64, 192, seed=7), correlated_inputs(2048, 192)
    ours, plain = run(weight, x[:1024], scheme), nearest(weight, scheme)
    assert output_error(weight, ours, x[1024:]) < 0.6 * output_error(weight, plain, x[1024:])


@pytest.mark.parametrize("reference", [optimal_brain_quantizer, algorithm_one])
@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("features", [32, 160], ids=["one-block", "two-blocks"])
def test_it_takes_the_decisions_of_the_textbook(features, scheme, reference):
    weight, x = random(6, features, seed=3), correlated_inputs(2 * features, features)
    result = run(weight, x, scheme)
    expected = reference(weight, x, result)
    assert torch.equal(result.weight.qvalue, expected)
    assert not torch.equal(nearest_on(weight, result), expected)  # or the comparison says nothing


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_the_weight_gets_worse_and_the_output_better(scheme):  # why it exists
    weight, x = random(48, 192, seed=7), correlated_inputs(512, 192)
    ours, plain = run(weight, x, scheme), nearest(weight, scheme)
    assert (weight - ours.weight.dequantize()).norm() > (weight - plain.weight.dequantize()).norm()
    assert output_error(weight, ours, x) < 0.5 * output_error(weight, plain, x)


def test_the_output_gets_better_on_inputs_that_were_not_measured():
    weight, x = random(48, 192, seed=7), correlated_inputs(2048, 192)
    ours, plain = run(weight, x[:1024], W4_G32), nearest(weight, W4_G32)
    assert output_error(weight, ours, x[1024:]) < 0.6 * output_error(weight, plain, x[1024:])


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_independent_inputs_are_rounded_to_nearest(scheme):
    weight = random(8, 160)
    statistics = {"hessian_sum": 5 * torch.eye(160, dtype=torch.float64), "count": torch.tensor(5)}
    ours = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert torch.equal(ours.weight.qvalue, nearest_on(weight, ours))


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.integers(-40, 40), st.sampled_from(SCHEMES))
def test_the_size_of_the_inputs_and_the_company_of_a_row_change_nothing(seed, exponent, scheme):
    weight, x = random(5, 64, seed=seed), correlated_inputs(96, 64, seed=seed)
    whole = run(weight, x, scheme).weight.qvalue
    assert torch.equal(run(weight, x * 2.0**exponent, scheme).weight.qvalue, whole)
    alone = gptq.quantize_group(
        {"a": weight[:2], "b": weight[2:]},
        scheme,
        statistics=statistics_of(x),
        scale_dtype=torch.float32,
    )
    assert torch.equal(torch.cat([alone["a"].weight.qvalue, alone["b"].weight.qvalue]), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_weight_and_the_statistics_are_not_modified_and_twice_gives_the_same(dtype):
    weight, x = random(4, 64).to(dtype), correlated_inputs(64, 64)
    statistics = statistics_of(x)
    before = weight.clone(), {name: value.clone() for name, value in statistics.items()}
    first, second = (
        gptq.quantize_group(
            {"w": weight}, W4_G32, statistics=statistics, scale_dtype=torch.bfloat16
        )["w"]
        for _ in range(2)
    )
    assert torch.equal(weight, before[0])
    assert all(torch.equal(statistics[name], value) for name, value in before[1].items())
    assert torch.equal(first.weight.qvalue, second.weight.qvalue)
    assert torch.equal(first.weight.scale.to(torch.bfloat16).float(), first.weight.scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize(
    ("x", "dead"),
    [
        (torch.zeros(4, 64), 64),
        (torch.ones(1, 64), 0),
        (torch.cat([torch.full((1, 1), 1e-18), torch.zeros(1, 63)], dim=1), 63),
        (random(3, 64) * torch.logspace(-12, 12, 64), 0),
    ],
    ids=["unseen", "rank-one", "one-tiny-channel", "24-decades"],
)
def test_a_degenerate_hessian_gives_a_valid_weight(scheme, x, dead):
    weight = random(4, 64)
    result = run(weight, x, scheme)
    result.weight.validate("w")
    assert result.weight.dequantize().isfinite().all()
    assert result.decisions["dead_channels"] == dead
    ours, plain = (
        (x.double() @ (weight - other.weight.dequantize()).T.double()).norm()
        for other in (result, nearest(weight, scheme))
    )
    assert ours <= plain


def test_dead_channels_are_rounded_to_nearest_among_living_ones():
    weight, x = random(4, 64), correlated_inputs(128, 64)
    x[:, 10:20] = 0
    ours = run(weight, x, W4_G32)
    assert torch.equal(ours.weight.qvalue[:, 10:20], nearest_on(weight, ours)[:, 10:20])
    assert ours.decisions["dead_channels"] == 10


def test_dead_channels_change_nothing_for_the_living():
    weight, x = random(16, 128), correlated_inputs(64, 128)
    weight[:, ::2], x[:, ::2] = 0, 0
    whole = run(weight, x, W4_CHANNEL).weight.qvalue
    assert torch.equal(whole[:, 1::2], run(weight[:, 1::2], x[:, 1::2], W4_CHANNEL).weight.qvalue)


def test_a_hessian_that_is_slightly_indefinite_is_damped_more_and_it_is_recorded():
    # smallest eigenvalue -0.05, the diagonal is 1
    hessian = torch.ones(32, 32, dtype=torch.float64) * 1.05
    hessian.fill_diagonal_(1.0)
    statistics = {"hessian_sum": hessian, "count": torch.tensor(1)}
    result = gptq.quantize_group(
        {"w": random(2, 32)}, W4_G32, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert (result.decisions["damping"], result.decisions["attempts"]) == (0.1, 2)


def test_one_column_and_a_group_of_zeros_are_weights():
    assert run(
        torch.tensor([[-7.5], [0.0]]), torch.ones(3, 1), W4_CHANNEL
    ).weight.qvalue.tolist() == [[-8], [0]]
    weight = random(2, 64)
    weight[1, 32:] = 0
    result = run(weight, correlated_inputs(64, 64), W4_G32)
    assert result.decisions["zero_groups"] == 1
    assert (result.weight.scale[1, 1], result.weight.scale.abs().min() > 0) == (1.0, True)


EYE = torch.eye(32, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"hessian_sum": None},
            StatisticsError,
            r"q_proj: statistic hessian_sum is missing; measure for gptq",
        ),
        ({"count": None}, StatisticsError, r"q_proj: statistic count is missing"),
        (
            {"hessian_sum": EYE[:16, :16]},
            StatisticsError,
            r"q_proj: hessian_sum is \[16, 16\], weight is \[2, 32\]",
        ),
        (
            {"hessian_sum": EYE * math.nan},
            StatisticsError,
            r"q_proj: hessian_sum holds NaN, Inf or a negative diagonal",
        ),
        ({"hessian_sum": -EYE}, StatisticsError, r"negative diagonal.*measure again"),
        ({"count": torch.tensor(-1)}, StatisticsError, r"count=-1 is negative"),
        (
            {"hessian_sum": 9 - 8 * EYE},
            StatisticsError,
            r"not positive definite with a damping of 1\.0.*measure again",
        ),
        (
            {"scheme": with_group_size(W4_G32, 48)},
            SchemeError,
            r"q_proj: in_features=32.*group_size=48",
        ),
        ({"weight": torch.full((2, 32), math.inf)}, InputError, r"q_proj: weight holds NaN or Inf"),
    ],
)
def test_errors_name_the_layer_and_the_remedy(changes, error, message):
    values = {
        "hessian_sum": EYE,
        "count": torch.tensor(32),
        "weight": torch.ones(2, 32),
        "scheme": W4_G32,
    } | changes
    statistics = {
        name: values[name] for name in ("hessian_sum", "count") if values[name] is not None
    }
    with pytest.raises(error, match=message):
        gptq.quantize_group(
            {"q_proj": values["weight"]},
            values["scheme"],
            statistics=statistics,
            scale_dtype=torch.float32,
        )


def test_the_linears_of_a_group_share_a_per_tensor_scale():
    weights = {"q": torch.tensor([[7.5]]), "k": torch.tensor([[15.0]])}
    statistics = {"hessian_sum": torch.ones(1, 1, dtype=torch.float64), "count": torch.tensor(1)}
    results = gptq.quantize_group(
        weights, W4_TENSOR, statistics=statistics, scale_dtype=torch.float32
    )
    assert [result.weight.scale.item() for result in results.values()] == [2.0, 2.0]
    assert [result.weight.qvalue.item() for result in results.values()] == [4, 7]


def test_the_table_knows_it_by_name():
    assert ALGORITHMS["gptq"] is gptq
    assert gptq.NEEDS == ("hessian_sum", "count")


# Its two ways to lose digits: directions that nobody uses (64 samples of 320 features) and channels
# 300 times as large.
@pytest.mark.parametrize(
    "scheme", [W4_G32, W4_G32_ASYM, W8_CHANNEL], ids=["int4", "int4-asym", "int8"]
)
@pytest.mark.parametrize("samples", [64, 1280], ids=["rank-deficient", "full-rank"])
def test_float32_is_as_good_as_float64_on_an_ill_conditioned_hessian(samples, scheme):
    weight, x = random(64, 320, seed=11), correlated_inputs(samples, 320, seed=12)
    x[:, [17, 200]] *= 300
    assert torch.linalg.cond(damped(x)) > 1e4
    # float32 from the beginning
    statistics = {"hessian_sum": x.T @ x, "count": torch.tensor(samples)}
    result = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    scale, zero_point = grid_of(result)
    reference = scale * (algorithm_one(weight, x, result) - zero_point)  # all of it in float64

    def cost(real: torch.Tensor) -> float:
        error = weight.double() - real.double()
        return torch.einsum("oi,ij,oj->", error, damped(x), error).item()

    assert cost(result.weight.dequantize()) == pytest.approx(cost(reference), rel=0.01)
    assert (
        result.weight.dequantize().double() == reference.float().double()
    ).double().mean() > 0.98


# of a unit at most; fewer where the features are many
@pytest.mark.parametrize("rows", [1024, 200])
def test_several_units_of_several_linears_take_the_decisions_of_the_textbook(monkeypatch, rows):
    monkeypatch.setattr(gptq, "_UNIT_WEIGHTS", rows * 96)
    x = correlated_inputs(256, 96, seed=4)
    weights = {
        "q": random(700, 96, seed=5),
        "k": random(30, 96, seed=6),
        "v": random(900, 96, seed=7),
    }
    results = gptq.quantize_group(
        weights, W4_G32_ASYM, statistics=statistics_of(x), scale_dtype=torch.float32
    )
    for name, weight in weights.items():
        expected = algorithm_one(weight, x, results[name])
        # the rest are ties but for 2^-24
        assert (results[name].weight.qvalue == expected).double().mean() > 0.999


@pytest.mark.parametrize(
    ("features", "longest"),
    [(1024, 1000), (4096, 1000), (8192, 500), (1 << 20, 125)],
    ids=["narrow", "edge", "wide", "huge"],
)
def test_units_of_wide_layers_have_fewer_rows_an_even_number_of_them(features, longest):
    units = gptq._units({"a": 700, "b": 1300}, limit=gptq._unit_rows(features))
    assert len(units) % 2 == 0
    assert max(sum(rows.stop - rows.start for _, rows in unit) for unit in units) == longest
    assert sum(rows.stop - rows.start for unit in units for _, rows in unit) == 2000


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_the_number_of_workers_does_not_change_a_bit(scheme):
    x = correlated_inputs(128, 288, seed=8)
    weights = {
        "q": random(1500, 288, seed=9).to(torch.bfloat16),
        "k": random(40, 288, seed=10).to(torch.bfloat16),
    }
    alone = gptq.quantize_group(
        weights, scheme, statistics=statistics_of(x), scale_dtype=torch.bfloat16
    )
    with Workers(3) as workers:
        together = gptq.quantize_group(
            weights,
            scheme,
            statistics=statistics_of(x),
            scale_dtype=torch.bfloat16,
            workers=workers,
        )
    for name in weights:
        one, other = alone[name].weight, together[name].weight
        assert torch.equal(one.qvalue, other.qvalue)
        assert torch.equal(one.scale, other.scale)
        assert one.zero_point is None or torch.equal(one.zero_point, other.zero_point)


# two would hand the interpreter's lock to each other; C does not hold it
def test_one_thread_at_a_time_goes_through_columns_with_torchs_operators(monkeypatch):
    monkeypatch.setattr(compiled_rounding, "takes", lambda *_: False)
    here, most, lock = [], [], threading.Lock()
    plain = affine.round_

    def watched(scaled, *about, **more):
        if scaled.dim() > 1:  # what the result is compared with
            return plain(scaled, *about, **more)
        with lock:
            here.append(threading.get_ident())
            most.append(len(here))
        time.sleep(0.001)  # for another thread to come
        with lock:
            here.remove(threading.get_ident())
        return plain(scaled, *about, **more)

    monkeypatch.setattr(feedback.affine, "round_", watched)
    columns = feedback.BLOCK + 32
    statistics = statistics_of(correlated_inputs(64, columns, seed=8))
    with Workers(3) as workers:
        gptq.quantize_group(
            {"q": random(2000, columns)},
            W4_CHANNEL,
            statistics=statistics,
            scale_dtype=torch.float32,
            workers=workers,
        )
    assert len(most) == 2 * columns  # of two units
    assert set(most) == {1}


def test_damage_beside_the_diagonal_is_found():
    hessian = torch.eye(200)
    hessian[3, 150] = hessian[150, 3] = math.nan
    statistics = {"hessian_sum": hessian, "count": torch.tensor(9)}
    with pytest.raises(
        StatisticsError, match=r"q_proj: hessian_sum holds NaN or Inf; measure again"
    ):
        gptq.quantize_group(
            {"q_proj": random(2, 200)}, W4_CHANNEL, statistics=statistics, scale_dtype=torch.float32
        )


def test_the_working_memory_is_that_of_the_factor_and_a_unit_for_each_worker():
    # K = 4096, 2048 rows: 4 K^2 = 64 MiB, a unit 1024 * 4096 * (4 + 1) = 20 MiB, a tenth for the
    # rest.
    one, two = (gptq.working_bytes(4096, 2048, workers=count) for count in (1, 2))
    assert (64 + 20) << 20 < one < (64 + 23) << 20
    assert 20 << 20 < two - one < 23 << 20
    assert one - gptq.working_bytes(4096, 2048, in_place=True) == 64 << 20


def indefinite(features: int) -> torch.Tensor:
    """A Hessian that takes a damping of a tenth.

    Its smallest eigenvalue is -0.05, its diagonal 1.
    """
    return torch.full((features, features), 1.05).fill_diagonal_(1.0)


@pytest.mark.parametrize("hessian", [None, indefinite(320)], ids=["positive", "damped-twice"])
def test_a_hessian_that_may_be_overwritten_gives_the_same_bits(hessian):
    weight, x = random(8, 320), correlated_inputs(400, 320)
    hessian = x.T @ x if hessian is None else hessian
    found = []
    for in_place in (False, True):
        statistics = {"hessian_sum": hessian.clone(), "count": torch.tensor(400)}
        result = gptq.quantize_group(
            {"w": weight},
            W4_G32,
            statistics=statistics,
            scale_dtype=torch.float32,
            in_place=in_place,
        )
        found.append(result["w"])
        assert torch.equal(statistics["hessian_sum"], hessian) != in_place
    assert torch.equal(found[0].weight.qvalue, found[1].weight.qvalue)
    assert torch.equal(found[0].weight.scale, found[1].weight.scale)
    assert found[0].decisions == found[1].decisions


def test_a_second_damping_begins_with_the_whole_hessian_again():
    # With a Hessian a + b (a on the diagonal), damping d is a Hessian whose diagonal is d larger.
    hessian, weight = indefinite(320), random(4, 320)
    # and the first damping, 0.01 of 1.09, makes a tenth of it
    damped = hessian + 0.09 * torch.eye(320)
    twice, once = (
        gptq.quantize_group(
            {"w": weight},
            W4_CHANNEL,
            statistics={"hessian_sum": h, "count": torch.tensor(1)},
            scale_dtype=torch.float32,
        )["w"]
        for h in (hessian, damped)
    )
    assert (twice.decisions["attempts"], once.decisions["attempts"]) == (2, 1)
    # a damping of 0.1 and 0.1009
    assert (twice.weight.qvalue != once.weight.qvalue).float().mean() < 0.01
