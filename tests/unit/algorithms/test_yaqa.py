"""YAQA: by hand, the paper's update, conditional minima, properties, edges, errors, its reason."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS, gptq, yaqa
from quantflow.algorithms.yaqa.descent import apart
from quantflow.core.parallel import Workers
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_group_size
from quantflow.errors import InputError, SchemeError, StatisticsError
from quantflow.numerics import output_blocks
from tests.shared import random, slow_but

W4_CHANNEL = LinearScheme(
    name="test",
    weights=TensorScheme(kind="int", num_bits=4, granularity="per_channel"),
    input=None,
    layout="pack-quantized",
)
W4_G32 = with_group_size(preset("W4A16"), 32)
W3_G32_ASYM = with_group_size(preset("W3A16_ASYM"), 32)
SCHEMES = [W4_CHANNEL, W4_G32, W3_G32_ASYM]
IDS = ["int4-channel", "int4-g32", "int3-g32-asym"]
FLOAT4 = [preset("NVFP4A16"), preset("MXFP4A16")]
FLOAT4_IDS = ["nvfp4", "mxfp4"]


def correlated(samples, features, *, seed):
    """Few directions carry most of the energy, and channels differ in size."""
    directions = random(samples, max(1, features // 4), seed=seed) @ random(
        max(1, features // 4), features, seed=seed + 1
    )
    return (2 * directions + random(samples, features, seed=seed + 2)) * torch.logspace(
        -0.5, 0.5, features
    )


def statistics_of(rows, columns, *, seed=0, name="w"):
    x, g = correlated(4 * columns, columns, seed=seed), correlated(4 * rows, rows, seed=seed + 10)
    return {"hessian_sum": x.T @ x, "count": torch.tensor(len(x)), f"{name}|gradient_sum": g.T @ g}


def run(weight, scheme, statistics, *, scale_dtype=torch.float32, **more):
    return yaqa.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=scale_dtype, **more
    )["w"]


def grid_of(result):
    """Scale and zero point of every element, [O, I] float64 each (test_grid.py tests them)."""
    scale, zero_point = result.weight.scale, result.weight.zero_point
    size = result.weight.qvalue.shape[1] // scale.shape[1]
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    return scale.double().repeat_interleave(size, 1), zero_point.double().repeat_interleave(size, 1)


def damped(matrix, by):
    matrix = matrix.double()
    return matrix + by * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)


def sides(statistics):
    return damped(statistics["w|gradient_sum"], 0.3), damped(statistics["hessian_sum"], 0.01)


def loss_of(errors, statistics):
    outputs, inputs = sides(statistics)
    return float((outputs @ errors.double() @ inputs @ errors.double().T).trace())


def conditional_minima(weight, result, statistics, blocks):
    """Fix one weight after the other at the conditional minimum of the loss.

    The minimum is over all real values of the weights that are still free. The loss is
    e^T (G x H) e with e the errors in one vector. Rows of a block do not read each other's errors.
    """
    scheme, (scale, zero_point) = result.weight.scheme, grid_of(result)
    outputs, inputs = sides(statistics)
    loss, columns = torch.kron(outputs, inputs), weight.shape[1]
    order = sorted(range(columns), key=lambda j: -inputs[j, j].item())
    errors, qvalue, done = (
        torch.zeros(weight.numel(), dtype=torch.float64),
        torch.zeros(weight.shape),
        [],
    )
    for block in blocks:
        fixed = list(done)
        for row in block:
            mine = list(fixed)
            for column in order:
                at = row * columns + column
                free = [i for i in range(weight.numel()) if i not in mine]
                wanted = -torch.linalg.solve(
                    loss[free][:, free], loss[free][:, mine] @ errors[mine]
                )[free.index(at)]
                q = (
                    (weight[row, column].double() - wanted) / scale[row, column]
                    + zero_point[row, column]
                ).round()
                qvalue[row, column] = q = q.clamp(scheme.qmin, scheme.qmax)
                errors[at] = weight[row, column].double() - scale[row, column] * (
                    q - zero_point[row, column]
                )
                mine.append(at)
                done.append(at)
    return qvalue.to(torch.int8)


def by_hand():
    """Two rows whose first weight sets the scale, 7.5 * (30 / 32) / 7.5 = 15 / 16.

    That weight is -8 steps of it, without an error.
    """
    statistics = {
        "hessian_sum": torch.tensor([[100.0, 0.0], [0.0, 1.0]]),
        "count": torch.tensor(1),
        "w|gradient_sum": torch.tensor([[2.0, 2.0], [2.0, 4.0]]),
    }
    return 0.9375 * torch.tensor([[-8.0, 2.3], [-8.0, 3.4]]), statistics


def test_a_row_makes_up_for_another_worked_by_hand(monkeypatch):
    # The last row comes first: 3.4 rounds to 3, error 0.4. G is damped by 0.3 * 3, so the first
    # row is owed 0.4 * 2 / 2.9 = 0.276: 2.3 becomes 2.576 and rounds to 3, not 2.
    monkeypatch.setattr(yaqa, "_ROWS", 1)
    monkeypatch.setattr(yaqa, "_SWEEPS", 0)
    weight, statistics = by_hand()
    result = run(weight, W4_CHANNEL, statistics)
    assert result.weight.scale.tolist() == [[0.9375], [0.9375]]
    assert result.weight.qvalue.tolist() == [[-8, 3], [-8, 3]]


def test_descent_worked_by_hand():
    # Side by side the rows round to 2 and 3, errors 0.3 and 0.4: 2.9 * 0.09 + 4 * 0.12 + 4.9 * 0.16
    # = 1.525. The first one's step to 3 leaves -0.7 and 0.4: 1.421 - 1.12 + 0.784 = 1.085. The
    # second one's to 4, alone, would leave 1.305. Scales that fit better are within 0.001 of 15 /
    # 16, nearer to it than to the next of bfloat16.
    weight, statistics = by_hand()
    result = run(weight, W4_CHANNEL, statistics, scale_dtype=torch.bfloat16)
    assert result.weight.scale.tolist() == [[0.9375], [0.9375]]
    assert result.weight.qvalue.tolist() == [[-8, 3], [-8, 3]]
    loss, start = result.decisions.pop("loss"), result.decisions.pop("loss_start")
    assert loss / start == pytest.approx(1.085 / 1.525, rel=1e-5)
    assert result.decisions == {
        "damping": 0.01,
        "attempts": 1,
        "dead_channels": 0,
        "gradient_damping": 0.3,
        "order": "hessian_diagonal",
        "tokens": 1,
        "zero_groups": 0,
        "sweeps": 1,
        "moved": 1,
        # Of 0.9375^2 * (200 * 8^2 + 2.3^2 + 3.4^2): 0.7 and 0.4 of a step; rtn's scale is 1, and
        # -7.5 off by 0.5.
        "output_error": pytest.approx(math.sqrt((0.7**2 + 0.4**2) / (12800 + 2.3**2 + 3.4**2))),
        "output_error_rtn": pytest.approx(
            math.sqrt((200 * 0.5**2 + 0.15625**2 + 0.1875**2) / (0.9375**2 * 12816.85))
        ),
        "same_as_rtn": False,
    }


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, [[4], [3], [2], [1], [0]]), (2, [[2], [1, 4], [0, 3]])]
)
@pytest.mark.parametrize("seed", range(3))
def test_feedback_on_both_sides_takes_conditional_minima(monkeypatch, length, blocks, seed):
    monkeypatch.setattr(yaqa, "_ROWS", length)
    monkeypatch.setattr(yaqa, "_SWEEPS", 0)
    weight, statistics = random(5, 6, seed=seed), statistics_of(5, 6, seed=seed)
    result = run(weight, W4_CHANNEL, statistics)
    assert torch.equal(result.weight.qvalue, conditional_minima(weight, result, statistics, blocks))


def strictly_lower(matrix, sizes):
    """L of matrix = (L + 1) D (L + 1)^T, D block diagonal of these block sizes.

    L is zero in these blocks and above them.
    """
    rest, lower, first = matrix.copy(), np.zeros_like(matrix), 0
    for size in sizes:
        here, below = slice(first, first + size), slice(first + size, None)
        lower[below, here] = rest[below, here] @ np.linalg.inv(rest[here, here])
        rest[below, below] -= lower[below, here] @ rest[here, below]
        first += size
    return lower


def papers_update(weight, result, statistics, parts):
    """Round w + (L_O^T E L_I + L_O^T E + E L_I), weight after weight from the last, in float64.

    E holds the errors of the weights that are rounded. L_O and L_I are of G and H, rows in the
    order of the parts and columns with the largest diagonal last.
    """
    scheme, outputs, inputs = (
        result.weight.scheme,
        *(matrix.numpy() for matrix in sides(statistics)),
    )
    rows, columns = np.array([row for part in parts for row in part]), np.argsort(inputs.diagonal())
    sizes = [len(part) for part in parts]
    of_rows = strictly_lower(outputs[rows][:, rows], sizes)
    of_columns = strictly_lower(inputs[columns][:, columns], [1] * len(columns))
    weight, scale, zero_point = (
        tensor.double().numpy()[rows][:, columns] for tensor in (weight, *grid_of(result))
    )
    error, qvalue = np.zeros_like(weight), np.zeros_like(weight)
    for last in np.cumsum(sizes)[::-1]:
        for row in range(last - sizes.pop(), last):
            for column in reversed(range(len(columns))):
                pull = of_rows[:, row] @ error @ of_columns[:, column]
                pull += of_rows[:, row] @ error[:, column] + error[row] @ of_columns[:, column]
                q = np.round(
                    (weight[row, column] + pull) / scale[row, column] + zero_point[row, column]
                )
                qvalue[row, column] = q = np.clip(q, scheme.qmin, scheme.qmax)
                error[row, column] = weight[row, column] - scale[row, column] * (
                    q - zero_point[row, column]
                )
    back = np.empty_like(qvalue)
    back[np.ix_(rows, columns)] = qvalue
    return torch.from_numpy(back).to(torch.int8)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize(("rows", "length"), [(5, 1), (21, 8)])
# arXiv:2505.22988
def test_feedback_on_both_sides_is_the_papers_update(monkeypatch, rows, length, scheme):
    monkeypatch.setattr(yaqa, "_ROWS", length)
    monkeypatch.setattr(yaqa, "_SWEEPS", 0)
    weight, statistics = random(rows, 64, seed=6), statistics_of(rows, 64, seed=6)
    result = run(weight, scheme, statistics)
    expected = papers_update(
        weight, result, statistics, [part.tolist() for part in apart(rows, length)]
    )
    assert torch.equal(result.weight.qvalue, expected)
    plain = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert not torch.equal(plain.weight.qvalue, expected)  # or the other side says nothing


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_no_single_step_makes_the_descended_weight_better(monkeypatch, scheme):
    monkeypatch.setattr(yaqa, "_SWEEPS", 50)
    weight, statistics = random(10, 32, seed=3), statistics_of(10, 32, seed=3)
    result = run(weight, scheme, statistics)
    outputs, inputs = sides(statistics)
    scale, _ = grid_of(result)
    errors, qvalue = (weight - result.weight.dequantize()).double(), result.weight.qvalue
    gradient, curvature = (
        2 * outputs @ errors @ inputs,
        torch.outer(outputs.diagonal(), inputs.diagonal()),
    )
    for step in (-1, 1):
        inside = (qvalue + step >= scheme.weights.qmin) & (qvalue + step <= scheme.weights.qmax)
        gain = step * scale * gradient - (step * scale) ** 2 * curvature
        assert gain[inside].max() < 1e-5 * loss_of(errors, statistics)


@pytest.mark.parametrize("scheme", FLOAT4, ids=FLOAT4_IDS)
def test_no_neighbour_among_the_values_of_e2m1_makes_the_descended_weight_better(
    monkeypatch, scheme
):
    monkeypatch.setattr(yaqa, "_SWEEPS", 50)
    weight, statistics = random(10, 32, seed=3), statistics_of(10, 32, seed=3)
    result = run(weight, scheme, statistics)
    result.weight.validate("w")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat([-values[1:].flip(0), values])  # ascending
    outputs, inputs = sides(statistics)
    scale, _ = grid_of(result)
    errors = (weight - result.weight.dequantize()).double()
    gradient, curvature = (
        2 * outputs @ errors @ inputs,
        torch.outer(outputs.diagonal(), inputs.diagonal()),
    )
    place = torch.searchsorted(values, result.weight.qvalue.double())
    assert torch.equal(values[place], result.weight.qvalue.double())
    for neighbour in (-1, 1):
        # 0 at the ends, which gains nothing
        step = values[(place + neighbour).clamp(0, len(values) - 1)] - values[place]
        gain = step * scale * gradient - (step * scale) ** 2 * curvature
        assert gain.max() < 1e-5 * loss_of(errors, statistics)


@pytest.mark.parametrize("scheme", [*SCHEMES, *FLOAT4], ids=[*IDS, *FLOAT4_IDS])
def test_what_is_recorded_is_the_loss_and_descent_never_makes_it_larger(scheme):
    weight, statistics = random(40, 64, seed=1), statistics_of(40, 64, seed=1)
    result = run(weight, scheme, statistics)
    expected = loss_of(weight - result.weight.dequantize(), statistics) / loss_of(
        weight, statistics
    )
    assert result.decisions["loss"] == pytest.approx(expected, rel=1e-4)
    assert result.decisions["loss"] < result.decisions["loss_start"]
    assert result.decisions["moved"] > 0 and result.decisions["sweeps"] in (1, 2)


@pytest.mark.parametrize("scheme", [*SCHEMES, *FLOAT4], ids=[*IDS, *FLOAT4_IDS])
def test_the_models_error_gets_smaller_and_that_of_the_outputs_larger(scheme):  # why it exists
    weight, statistics = random(64, 64, seed=2), statistics_of(64, 64, seed=2)
    ours = weight - run(weight, scheme, statistics).weight.dequantize()
    plain = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    theirs = weight - plain.weight.dequantize()
    assert loss_of(ours, statistics) < 0.8 * loss_of(theirs, statistics)
    hessian = statistics["hessian_sum"]
    assert (ours @ hessian @ ours.T).trace() > (theirs @ hessian @ theirs.T).trace()


def test_gradients_count_less_where_inputs_are_rounded_most():
    weight, statistics = random(64, 64, seed=2), statistics_of(64, 64, seed=2)
    rough, exact = (run(weight, preset(name), statistics) for name in ("MXFP4", "MXFP4A16"))
    assert rough.decisions["gradient_damping"] == 3.0
    assert exact.decisions["gradient_damping"] == 0.3
    errors = [weight - each.weight.dequantize() for each in (rough, exact)]
    losses = [loss_of(error, statistics) for error in errors]
    outputs = [(error @ statistics["hessian_sum"] @ error.T).trace() for error in errors]
    assert losses[0] > losses[1] and outputs[0] < outputs[1]


@pytest.mark.parametrize("scheme", [*SCHEMES, *FLOAT4], ids=[*IDS, *FLOAT4_IDS])
def test_outputs_that_are_alike_are_rounded_as_gptq_rounds_them(monkeypatch, scheme):
    monkeypatch.setattr(yaqa, "_SWEEPS", 0)
    weight, statistics = random(20, 64, seed=4), statistics_of(20, 64, seed=4)
    statistics["w|gradient_sum"] = 3 * torch.eye(20)
    plain = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert torch.equal(run(weight, scheme, statistics).weight.qvalue, plain.weight.qvalue)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), inputs=st.integers(-8, 8), outputs=st.integers(-8, 8))
def test_the_sizes_of_inputs_and_gradients_change_nothing(seed, inputs, outputs):
    weight, statistics = random(6, 32, seed=seed), statistics_of(6, 32, seed=seed)
    other = {
        "hessian_sum": statistics["hessian_sum"] * 4.0**inputs,
        "count": statistics["count"],
        "w|gradient_sum": statistics["w|gradient_sum"] * 4.0**outputs,
    }
    one, two = run(weight, W4_G32, statistics), run(weight, W4_G32, other)
    assert torch.equal(one.weight.qvalue, two.weight.qvalue)
    assert one.decisions == two.decisions


def test_the_number_of_workers_does_not_change_a_bit():
    weights = {name: random(150, 64, seed=index) for index, name in enumerate("abc")}
    statistics = {}
    for index, name in enumerate(weights):
        statistics |= statistics_of(150, 64, seed=index, name=name)
    torch.set_num_threads(1)
    told = {"statistics": statistics, "scale_dtype": torch.bfloat16}
    alone = yaqa.quantize_group(weights, W4_G32, **told)
    with Workers(2) as workers:
        together = yaqa.quantize_group(weights, W4_G32, workers=workers, **told)
    assert list(alone) == list(together) == list(weights)
    for name, result in alone.items():
        assert torch.equal(result.weight.qvalue, together[name].weight.qvalue)
        assert result.decisions == together[name].decisions


def test_the_company_of_a_linear_changes_nothing():
    statistics = statistics_of(10, 32, seed=0, name="a") | {"b|gradient_sum": torch.eye(4)}
    weights = {"a": random(10, 32, seed=1), "b": random(4, 32, seed=2)}
    both = yaqa.quantize_group(weights, W4_G32, statistics=statistics, scale_dtype=torch.float32)
    alone = yaqa.quantize_group(
        {"a": weights["a"]}, W4_G32, statistics=statistics, scale_dtype=torch.float32
    )
    assert torch.equal(both["a"].weight.qvalue, alone["a"].weight.qvalue)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_statistics_are_not_modified_and_twice_gives_the_same(dtype):
    weight, statistics = random(9, 32).to(dtype), statistics_of(9, 32)
    before = weight.clone(), {name: value.clone() for name, value in statistics.items()}
    one, two = run(weight, W4_G32, statistics, in_place=True), run(weight, W4_G32, statistics)
    assert torch.equal(weight, before[0])
    assert all(torch.equal(statistics[name], value) for name, value in before[1].items())
    assert torch.equal(one.weight.qvalue, two.weight.qvalue) and one.decisions == two.decisions


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(4, 4), torch.ones(4, 4), torch.eye(4).mul(1e-30)],
    ids=["0", "1", "tiny"],
)
@pytest.mark.parametrize("hessian", [torch.zeros(32, 32), torch.ones(32, 32)], ids=["0", "1"])
def test_degenerate_statistics_give_a_valid_weight(gradient, hessian):
    statistics = {"hessian_sum": hessian, "count": torch.tensor(1), "w|gradient_sum": gradient}
    result = run(random(4, 32), W4_G32, statistics)
    assert torch.isfinite(result.weight.dequantize()).all()
    assert result.decisions["loss"] <= result.decisions["loss_start"]


def test_one_weight_and_zeros_are_weights():
    single = {
        "hessian_sum": torch.ones(1, 1),
        "count": torch.tensor(1),
        "w|gradient_sum": torch.ones(1, 1),
    }
    assert run(
        torch.tensor([[2.0]]), W4_CHANNEL, single
    ).weight.dequantize().item() == pytest.approx(2.0, rel=0.05)
    zeros = run(torch.zeros(4, 32), W4_G32, statistics_of(4, 32))
    assert not zeros.weight.qvalue.any()
    assert (zeros.decisions["loss"], zeros.decisions["zero_groups"]) == (0.0, 4)
    assert yaqa.quantize_group({}, W4_G32, statistics={}, scale_dtype=torch.float32) == {}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scheme": preset("FP8_DYNAMIC")}, SchemeError, "yaqa with kind='float'; use rtn"),
        (
            {
                "scheme": replace(
                    W4_CHANNEL,
                    weights=replace(W4_CHANNEL.weights, granularity="per_tensor"),
                    layout="int-quantized",
                )
            },
            SchemeError,
            "yaqa with one scale per tensor; use gptq",
        ),
        (
            {"gradient": None},
            StatisticsError,
            "w: statistic gradient_sum is missing; measure for yaqa",
        ),
        (
            {"gradient": torch.eye(3)},
            StatisticsError,
            r"w: gradient_sum is \[3, 3\], the weight has 4 rows",
        ),
        (
            {"gradient": -torch.eye(4)},
            StatisticsError,
            "w: gradient_sum holds NaN, Inf or a negative diagonal",
        ),
        (
            {"gradient": torch.eye(4) + torch.tensor([[0, torch.nan, 0, 0]] + 3 * [[0.0] * 4])},
            StatisticsError,
            "w: gradient_sum",
        ),
        (
            {"gradient": torch.ones(4, 4) * 100 - 99 * torch.eye(4)},
            StatisticsError,
            "w: gradient_sum is not positive definite",
        ),
        (
            {"hessian": None},
            StatisticsError,
            "w: statistic hessian_sum is missing; measure for yaqa",
        ),
        ({"weight": torch.full((4, 32), torch.nan)}, InputError, "w: weight holds NaN or Inf"),
        (
            {"weight": random(4, 48)},
            SchemeError,
            "in_features=48 is not a multiple of group_size=32",
        ),
    ],
)
def test_errors_name_the_linear_and_the_remedy(changes, error, message):
    weight = changes.get("weight", random(4, 32))
    statistics = statistics_of(4, weight.shape[1])
    for key, name in (("gradient", "w|gradient_sum"), ("hessian", "hessian_sum")):
        if key in changes:
            statistics[name] = changes[key]
    with pytest.raises(error, match=message):
        run(
            weight,
            changes.get("scheme", W4_G32),
            {name: value for name, value in statistics.items() if value is not None},
        )


def fitted(weight, qvalue, scale, outputs, inputs):
    """Scales of a row by least squares, float64, all other rows left as they are.

    None doubles, halves or changes its sign.
    """
    groups = scale.shape[1]
    size = weight.shape[1] // groups
    # column j of group k: q there, 0 elsewhere
    split = torch.zeros(*qvalue.shape, groups, dtype=torch.float64)
    for group in range(groups):
        split[:, group * size : (group + 1) * size, group] = qvalue[
            :, group * size : (group + 1) * size
        ].double()
    errors = weight.double() - (split @ scale.double()[:, :, None])[:, :, 0]
    new = scale.double().clone()
    for row in range(len(weight)):
        pull = (outputs[row] @ errors @ inputs) @ split[row] / outputs[row, row]
        moved = scale[row].double() + torch.linalg.solve(split[row].T @ inputs @ split[row], pull)
        fits = (moved / scale[row] > 0.5) & (moved / scale[row] < 2)
        new[row] = torch.where(fits, moved, scale[row].double())
    return new.float()


def moved_by_steps(weight, qvalue, scale, outputs, inputs):
    """Column after column, the step that lowers the loss most, until none does.

    In float64, by whole losses.
    """
    qvalue = qvalue.double().clone()
    steps = scale.double().repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    for column in range(weight.shape[1]):
        while True:
            errors = weight.double() - qvalue * steps
            gradient = outputs @ errors @ inputs[:, column]
            best, chosen = 0.0, None
            for row in range(len(weight)):
                step, curve = steps[row, column], outputs[row, row] * inputs[column, column]
                target = (qvalue[row, column] + gradient[row] / (curve * step)).round().clamp(-8, 7)
                change = (target - qvalue[row, column]) * step
                gain = float(change * (2 * gradient[row] - change * curve))
                if gain > best:
                    best, chosen = gain, (row, target)
            if chosen is None:
                break
            qvalue[chosen[0], column] = chosen[1]
    return qvalue.to(torch.int8)


@pytest.mark.parametrize("seed", slow_but(range(4), 0))
def test_the_whole_of_it_is_what_the_formulas_say_in_float64(monkeypatch, seed):
    weight, statistics = random(6, 64, seed=seed), statistics_of(6, 64, seed=seed)
    result = run(weight, W4_G32, statistics)
    monkeypatch.setattr(yaqa, "_SWEEPS", 0)
    before = run(weight, W4_G32, statistics)
    outputs, inputs = sides(statistics)
    # one block of rows
    expected = conditional_minima(weight, before, statistics, [[0, 1, 2, 3, 4, 5]])
    scale, kept = before.weight.scale, (expected, before.weight.scale)

    def loss(qvalue, scale):
        return loss_of(
            weight.double() - qvalue.double() * scale.double().repeat_interleave(32, 1), statistics
        )

    least = loss(*kept)
    for _ in range(2):
        better = fitted(weight, expected, scale, outputs, inputs)
        scale = better if loss(expected, better) < loss(expected, scale) else scale
        expected = moved_by_steps(weight, expected, scale, outputs, inputs)
        if not loss(expected, scale) < least:
            break
        kept, least = (expected, scale), loss(expected, scale)
    assert torch.equal(result.weight.qvalue, kept[0])
    torch.testing.assert_close(result.weight.scale, kept[1], rtol=1e-4, atol=0)
    assert result.decisions["loss"] == pytest.approx(least / loss_of(weight, statistics), rel=1e-4)


def test_one_block_over_all_outputs_is_the_whole_and_more_are_linears_of_their_rows(monkeypatch):
    weight, statistics = random(40, 64, seed=5), statistics_of(40, 64, seed=5)
    whole = run(weight, W4_G32, statistics)
    monkeypatch.setattr(output_blocks, "MOST", 40)
    assert torch.equal(run(weight, W4_G32, statistics).weight.qvalue, whole.weight.qvalue)
    monkeypatch.setattr(output_blocks, "MOST", 16)
    monkeypatch.setattr(output_blocks, "ALIGNED", 8)  # three blocks of 16, 16 and 8 rows
    sums = statistics["w|gradient_sum"]
    held = torch.zeros(40, 16)
    for first in (0, 16, 32):
        held[first : first + 16, : min(16, 40 - first)] = sums[
            first : first + 16, first : first + 16
        ]
    cut = run(weight, W4_G32, {**statistics, "w|gradient_sum": held})
    for first in (0, 16, 32):
        rows = slice(first, min(first + 16, 40))
        alone = run(weight[rows], W4_G32, {**statistics, "w|gradient_sum": sums[rows, rows]})
        assert torch.equal(cut.weight.qvalue[rows], alone.weight.qvalue)
        assert torch.equal(cut.weight.scale[rows], alone.weight.scale)
    assert not torch.equal(cut.weight.qvalue, whole.weight.qvalue)


def test_the_working_memory_holds_both_factors_and_a_linear_for_each_worker():
    one, two = (yaqa.working_bytes(1024, 512, workers=count) for count in (1, 2))
    assert one - (two - one) == 4 * 1024 * 1024
    assert two - one > 4 * 512 * 512 + 14 * 512 * 1024


def test_the_table_knows_it_by_name_and_what_it_needs():
    assert ALGORITHMS["yaqa"] is yaqa
    assert yaqa.NEEDS == ("hessian_sum", "count", "gradient_sum")
    assert not yaqa.BY_ROW
