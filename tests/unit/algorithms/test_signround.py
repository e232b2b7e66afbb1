"""SignRound: by hand, properties, plain code in float64, edges, errors, and why it exists."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import BLOCK_ALGORITHMS, gptq, rtn, signround
from quantflow.algorithms.signround.learned import Learned
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_group_size
from quantflow.errors import SchemeError, StatisticsError, UsageError
from quantflow.numerics.trained_block import TrainedBlock
from tests.shared import random


def scheme_of(bits: int, *, symmetric: bool = True, group_size: int | None = None) -> LinearScheme:
    granularity = "per_channel" if group_size is None else "per_group"
    weights = TensorScheme(
        kind="int",
        num_bits=bits,
        granularity=granularity,
        group_size=group_size,
        symmetric=symmetric,
    )
    return LinearScheme(name="test", weights=weights, input=None, layout="pack-quantized")


INT4, INT4_ASYM = scheme_of(4), scheme_of(4, symmetric=False)
INT2 = scheme_of(2, group_size=8)


def forward(weights, x):
    """A block of two linears, of which the second reads the first: [S, I] -> [1, S, O].

    It has one linear where there is no second.
    """
    y = x @ weights["a"].T
    return (torch.tanh(y) @ weights["b"].T if "b" in weights else y)[None]


def block_of(weights, inputs, quantized_inputs=None) -> TrainedBlock:
    @contextmanager
    def running(given):
        yield lambda number: forward(given, (quantized_inputs or inputs)[number])

    return TrainedBlock(
        samples=len(inputs), running=running, target=lambda number: forward(weights, inputs[number])
    )


def started(weights, scheme, *, by=rtn, statistics=None, scale_dtype=torch.float32):
    told = {"statistics": statistics or {}, "scale_dtype": scale_dtype}
    return {
        name: by.quantize_group({name: w}, scheme, **told)[name].weight
        for name, w in weights.items()
    }


def refined(
    weights,
    block,
    starts,
    *,
    iterations=20,
    sequences=4,
    scale_dtype=torch.float32,
    workers=SEQUENTIAL,
):
    told = {"iterations": iterations, "sequences": sequences, "workers": workers}
    return signround.refine(
        block, weights, starts, scale_dtypes=dict.fromkeys(weights, scale_dtype), **told
    )


def error(block: TrainedBlock, made) -> float:
    with block.running({name: result.dequantize() for name, result in made.items()}) as run:
        return sum(
            float((run(i) - block.target(i)).double().square().sum()) for i in range(block.samples)
        )


def small(scheme, *, seed=0, samples=6, width=16, scale_dtype=torch.float32):
    """Two linears, inputs of which some channels go together, and what rtn makes of them."""
    weights = (
        {"a": random(12, width, seed=seed), "b": random(8, 12, seed=seed + 1)}
        if scheme.weights.group_size is None
        else {}
    )
    weights = weights or {"a": random(16, width, seed=seed), "b": random(8, 16, seed=seed + 1)}
    mixed = random(width, width, seed=seed + 2)
    inputs = [random(10, width, seed=seed + 3 + i) @ mixed / 4 for i in range(samples)]
    return weights, block_of(weights, inputs), started(weights, scheme, scale_dtype=scale_dtype)


def test_two_iterations_worked_by_hand():
    # rtn: scale 7.5 / 7.5 = 1, qvalues 7 (of 7.5) and 0 (of 0.4). The input is (0, 1): the target
    # is 0.4, the output 0.
    # 1: the gradient by the second weight is -0.8, by the scale -0.8 * (0 - 0.4) > 0. Step 1/2:
    #    offset 0.5, multiplier 0.5, so round(0.4 / 0.5 + 0.5) = 1, and the output is 0.5: the error
    #    is 0.1 where it was 0.4.
    # 2: 0.2 and 0.2 * (1 - 0.8) > 0, step 1/4: offset 0.25, multiplier 0.25, so
    #    round(1.6 + 0.25) = 2, and the output is 0.5 as before.
    weights = {"a": torch.tensor([[7.5, 0.4]])}
    block = block_of(weights, [torch.tensor([[0.0, 1.0]])])
    found = refined(weights, block, started(weights, INT4), iterations=2)["a"]
    assert (found.weight.qvalue.tolist(), found.weight.scale.tolist()) == ([[7, 1]], [[0.5]])
    assert found.decisions["block_loss_start"] == 1.0
    assert found.decisions["block_loss"] == pytest.approx(0.01 / 0.16, rel=1e-5)
    del found.decisions["block_loss"], found.decisions["block_loss_start"]
    assert found.decisions == {"iterations": 2, "best_iteration": 1, "moved": 1, "rescaled": 1}


def test_both_ends_of_an_asymmetric_range_worked_by_hand():
    # rtn: range -8 to 7, scale 1, zero_point 0, all exact; only 0.4 is not, the target of the input
    # (0, 0, 1). The only step is 1. Both ends get the sign of the scale's gradient, -0.8 * (0 -
    # 0.4), and stop at 1/64: -1/8 to 7/64. The scale is 1/64, the zero_point 0, the offset 0.5:
    # round(25.6 + 0.5) = 26, clipped to 7: 7/64 = 0.109375, an error of 0.290625 where it was 0.4.
    weights = {"a": torch.tensor([[-8.0, 7.0, 0.4]])}
    block = block_of(weights, [torch.tensor([[0.0, 0.0, 1.0]])])
    start = started(weights, INT4_ASYM)
    assert (start["a"].scale.item(), start["a"].zero_point.item()) == (1.0, 0)
    found = refined(weights, block, start, iterations=1)["a"]
    assert (found.weight.scale.item(), found.weight.zero_point.item()) == (1 / 64, 0)
    assert found.weight.qvalue.tolist() == [[-8, 7, 7]]
    assert found.decisions["block_loss"] == pytest.approx(0.290625**2 / 0.16, rel=1e-5)


def plain(weights, starts, inputs, scheme, *, iterations, batches):
    """The paper's algorithm in float64, by autograd and torch.optim.

    Returns name -> (qvalue, scale), of the last iterate.
    """
    low, high = scheme.weights.qmin, scheme.weights.qmax

    def through(exact, value):
        return exact + (value - exact).detach()

    def rounded(name, v, top, bottom):
        w, start = weights[name].double(), starts[name]
        zero = torch.zeros_like(start.scale) if start.zero_point is None else start.zero_point
        most, least = start.scale.double() * (high - zero), start.scale.double() * (low - zero)
        bottom = top if start.zero_point is None else bottom
        scale = (most * top - least * bottom) / (high - low)
        place = low - least * bottom / scale
        place = (
            through(place, place.round().clamp(low, high))
            if start.zero_point is not None
            else torch.zeros_like(place)
        )
        groups = w.reshape(*scale.shape, -1) / scale[..., None] + v.reshape(*scale.shape, -1)
        q = (through(groups, groups.round()) + place[..., None]).clamp(low, high)
        return (
            ((q - place[..., None]) * scale[..., None]).reshape(w.shape),
            q.reshape(w.shape),
            scale,
        )

    learned = {
        name: [
            torch.zeros(w.shape),
            torch.ones(starts[name].scale.shape),
            torch.ones(starts[name].scale.shape),
        ]
        for name, w in weights.items()
    }
    learned = {name: [p.double().requires_grad_() for p in ps] for name, ps in learned.items()}
    everything = [p for ps in learned.values() for p in ps]
    optimizer = torch.optim.SGD(everything, lr=1 / iterations)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=iterations
    )
    exact = {name: w.double() for name, w in weights.items()}
    for iteration in range(iterations):
        optimizer.zero_grad()
        made = {name: rounded(name, *ps)[0] for name, ps in learned.items()}
        numbers = batches[iteration % len(batches)]
        sum(
            (forward(made, inputs[i].double()) - forward(exact, inputs[i].double())).square().sum()
            for i in numbers
        ).backward()
        for p in everything:
            if p.grad is not None:
                p.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for v, top, bottom in learned.values():
                v.clamp_(-0.5, 0.5)
                top.clamp_(0, 1)
                bottom.clamp_(0, 1)
    return {name: [part.detach() for part in rounded(name, *ps)] for name, ps in learned.items()}


def cut_short(weight: torch.Tensor, start: QTensor) -> QTensor:
    """The start with 0.95 of its scales.

    With rtn's the largest weight lies half way between two points.
    """
    scale, zero = start.scale * 0.95, 0 if start.zero_point is None else start.zero_point[..., None]
    steps = (weight.reshape(*scale.shape, -1) / scale[..., None]).round() + zero
    qvalue = steps.clamp(start.scheme.qmin, start.scheme.qmax).to(torch.int8).reshape(weight.shape)
    return replace(start, qvalue=qvalue, scale=scale)


@pytest.mark.parametrize(
    "scheme", [INT4, INT4_ASYM, INT2, scheme_of(4, symmetric=False, group_size=8)]
)
def test_the_papers_algorithm_in_plain_code_learns_the_same(scheme, monkeypatch):
    weights, block, starts = small(scheme, seed=5)
    inputs = [random(10, 16, seed=8 + i) @ random(16, 16, seed=7) / 4 for i in range(6)]
    if scheme.weights.symmetric:
        starts = {name: cut_short(weights[name], start) for name, start in starts.items()}
    expected = plain(weights, starts, inputs, scheme, iterations=16, batches=[[0, 2, 4], [1, 3, 5]])
    falling = itertools.count(-100)  # so that the last iterate is the best
    monkeypatch.setattr(signround, "_losses", lambda *_: (1.0, -next(falling) / 100))
    found = refined(weights, block, starts, iterations=16, sequences=3)
    assert found["a"].decisions["best_iteration"] == 16
    same = total = 0
    for name, (_, qvalue, scale) in expected.items():
        torch.testing.assert_close(found[name].weight.scale.double(), scale, rtol=1e-5, atol=0)
        same += int((found[name].weight.qvalue == qvalue).sum())
        total += qvalue.numel()
    # where a gradient is nearly zero its sign is that of rounding errors
    assert same >= 0.99 * total


@pytest.mark.parametrize("scheme", [INT4, INT4_ASYM, INT2, scheme_of(8)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", [rtn, gptq])
def test_before_the_first_step_it_stands_for_its_start(scheme, scale_dtype, by):
    weight = random(24, 64, seed=3)
    x = random(200, 64, seed=4) @ random(64, 64, seed=5)
    statistics = {"hessian_sum": x.T @ x, "count": torch.tensor(200)}
    start = started({"w": weight}, scheme, by=by, statistics=statistics, scale_dtype=scale_dtype)[
        "w"
    ]
    learned = Learned.of("w", weight, start, scale_dtype=scale_dtype)
    made = learned.made(SEQUENTIAL)
    assert torch.equal(made.qvalue, start.qvalue) and torch.equal(made.scale, start.scale)
    assert start.zero_point is None or torch.equal(made.zero_point, start.zero_point)
    assert torch.equal(
        learned.real(slice(0, 24), *learned.learned(slice(0, 24))), start.dequantize()
    )


@pytest.mark.parametrize("scheme", [INT4, INT2])
def test_from_negative_scales_it_learns_what_it_does_of_the_turned_weights_from_positive_ones(
    scheme,
):
    weights, block, starts = small(scheme, seed=5)
    starts = {name: cut_short(weights[name], start) for name, start in starts.items()}
    found = refined(weights, block, starts)
    turned = {name: replace(start, scale=-start.scale) for name, start in starts.items()}
    # Both linears turned leave the output as it is: tanh(-y) = -tanh(y).
    other = refined({name: -weight for name, weight in weights.items()}, block, turned)
    assert found["a"].decisions["best_iteration"] > 0
    for name, result in found.items():
        assert torch.equal(other[name].weight.qvalue, result.weight.qvalue)
        assert torch.equal(other[name].weight.scale, -result.weight.scale)
        assert other[name].decisions == result.decisions


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.sampled_from([INT4, INT4_ASYM, INT2, scheme_of(8)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 7),
    st.integers(1, 9),
)
def test_the_error_is_never_larger_than_the_starts_and_scales_never_grow(
    seed, scheme, scale_dtype, iterations, sequences
):
    weights, block, starts = small(scheme, seed=seed % 10**6, scale_dtype=scale_dtype)
    found = refined(
        weights, block, starts, iterations=iterations, sequences=sequences, scale_dtype=scale_dtype
    )
    for name, result in found.items():
        result.weight.validate(name)
        assert torch.equal(result.weight.scale.to(scale_dtype).float(), result.weight.scale)
        assert (result.weight.scale.abs() <= starts[name].scale.abs()).all()
        assert result.decisions["moved"] == int((result.weight.qvalue != starts[name].qvalue).sum())
    told = found["a"].decisions
    made = {name: result.weight for name, result in found.items()}
    assert error(block, made) <= error(block, starts) * (1 + 1e-6)
    power = sum(float(block.target(i).double().square().sum()) for i in range(block.samples))
    assert told["block_loss"] == pytest.approx(error(block, made) / power, rel=1e-4, abs=1e-9)
    assert told["block_loss_start"] == pytest.approx(error(block, starts) / power, rel=1e-4)
    assert (told["best_iteration"] == 0) == (told["block_loss"] == told["block_loss_start"])


@pytest.mark.parametrize(("bits", "of_rtn"), [(4, 0.5), (2, 0.35)])
# why it exists
def test_the_output_of_the_layer_is_closer_than_that_of_rtn_and_at_2_bits_of_gptq(bits, of_rtn):
    scheme = scheme_of(bits, group_size=16)
    weights = {"a": random(48, 32, seed=1) * 0.15, "b": random(32, 48, seed=2) * 0.15}
    inputs = [random(48, 32, seed=4 + i) @ random(32, 32, seed=3) / 6 for i in range(8)]
    block, starts = block_of(weights, inputs), started(weights, scheme)
    seen = {"a": torch.cat(inputs), "b": torch.tanh(torch.cat(inputs) @ weights["a"].T)}
    columns = {}
    for name, x in seen.items():
        statistics = {"hessian_sum": x.T @ x, "count": torch.tensor(len(x))}
        columns |= started({name: weights[name]}, scheme, by=gptq, statistics=statistics)
    nearest, by_column = error(block, starts), error(block, columns)
    learned, both = (
        error(
            block,
            {
                n: r.weight
                for n, r in refined(weights, block, begin, iterations=50, sequences=8).items()
            },
        )
        for begin in (starts, columns)
    )
    print(
        f"{bits} bits: rtn {nearest:.4g}, gptq {by_column:.4g}, signround {learned:.4g}, "
        f"signround from gptq {both:.4g}"
    )
    assert learned < of_rtn * nearest
    if bits == 2:
        assert learned < by_column  # though gptq's scales have either sign, and rtn's do not
        assert both < 0.8 * by_column
    assert both <= by_column


def test_what_the_layers_before_did_is_made_up_for():
    # The quantized layers before put out a quarter more of everything, which smaller scales make up
    # for.
    weights = {"a": random(8, 16, seed=1)}
    inputs = [random(12, 16, seed=2 + i) for i in range(4)]
    block = block_of(weights, inputs, [1.25 * x for x in inputs])
    starts = started(weights, INT4)
    found = refined(weights, block, starts, iterations=50)["a"].weight
    assert error(block, {"a": found}) < 0.5 * error(block, starts)
    assert (found.scale / starts["a"].scale).mean() < 0.9


def test_what_it_runs_is_counted():
    weights, block, starts = small(INT4, samples=5)
    ran = []

    @contextmanager
    def running(given):
        with block.running(given) as run:
            yield lambda number: (ran.append(torch.is_grad_enabled()), run(number))[1]

    counting = TrainedBlock(samples=5, running=running, target=block.target)
    # turns of 3 and 2 sequences: 20 in 8 iterations
    refined(weights, counting, starts, iterations=8, sequences=3)
    assert (ran.count(True), ran.count(False)) == (20, 9 * 5)
    assert signround.runs(6, iterations=8, sequences=3) == 3 * 8 * 3 + 9 * 6
    assert signround.runs(100, iterations=200, sequences=8) == 3 * 200 * 8 + 11 * 32


@pytest.mark.parametrize("scheme", [INT4, INT4_ASYM, INT2])
def test_zeros_stay_zeros_with_a_scale_of_one(scheme):
    weights = {"a": torch.zeros(4, 16)}
    inputs = [random(3, 16)]
    block = TrainedBlock(
        samples=1, running=block_of(weights, inputs).running, target=lambda _: torch.ones(1, 3, 4)
    )
    found = refined(weights, block, started(weights, scheme), iterations=5)["a"]
    assert (found.weight.scale == 1).all() and not found.weight.dequantize().any()
    assert (
        found.decisions["moved"],
        found.decisions["rescaled"],
        found.decisions["best_iteration"],
    ) == (0, 0, 0)


def test_a_target_of_zeros_has_a_loss_that_is_a_number():
    weights = {"a": torch.zeros(4, 16)}
    found = refined(
        weights, block_of(weights, [random(3, 16)]), started(weights, INT4), iterations=2
    )["a"]
    assert (found.decisions["block_loss"], found.decisions["block_loss_start"]) == (0.0, 0.0)


def test_one_element_is_learned_too():
    weights = {"a": torch.tensor([[-3.0]])}
    found = refined(
        weights, block_of(weights, [torch.ones(1, 1)]), started(weights, INT4), iterations=3
    )["a"]
    assert found.weight.dequantize().item() == pytest.approx(-3.0, rel=0.1)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"iterations": 0}, UsageError, "signround: 0 iterations of 4 sequences; give at least 1"),
        ({"sequences": 0}, UsageError, "signround: 20 iterations of 0 sequences; give at least 1"),
    ],
)
def test_numbers_that_are_none_are_refused(change, kind, message):
    weights, block, starts = small(INT4)
    with pytest.raises(kind, match=message):
        refined(weights, block, starts, **change)


def test_errors_name_what_is_wrong_and_the_remedy():
    weights, block, starts = small(INT4)
    with pytest.raises(
        StatisticsError, match="no calibration sequence; measure with calibration text"
    ):
        refined(
            weights, TrainedBlock(samples=0, running=block.running, target=block.target), starts
        )
    floats = started(weights, preset("FP8_DYNAMIC"))
    with pytest.raises(SchemeError, match="a: signround with float per_channel; choose integers"):
        refined(weights, block, floats)
    damaged = TrainedBlock(
        samples=1, running=block.running, target=lambda _: torch.full((1, 10, 8), float("nan"))
    )
    with pytest.raises(
        StatisticsError,
        match="a: signround: the squared error of its layer's output is nan; look at",
    ):
        refined(weights, damaged, starts)
    with pytest.raises(SchemeError, match="in_features=16 is not a multiple of group_size=128"):
        started(weights, preset("W4A16"))


@pytest.mark.parametrize("scheme", [INT4_ASYM, INT2])
def test_the_number_of_workers_does_not_change_a_bit(scheme):
    scheme = scheme if scheme.weights.group_size is None else with_group_size(preset("W2A16"), 32)
    weights = {
        "a": random(300, 1024, seed=1).to(torch.bfloat16),
        "b": random(64, 300 if scheme is INT4_ASYM else 320, seed=2),
    }
    # several units
    weights["a"] = (
        weights["a"] if scheme is INT4_ASYM else random(320, 1024, seed=1).to(torch.bfloat16)
    )
    before = {name: weight.clone() for name, weight in weights.items()}
    exact = {name: weight.float() for name, weight in weights.items()}
    block = block_of(exact, [random(4, 1024, seed=3 + i) for i in range(5)])
    starts = started(weights, scheme, scale_dtype=torch.bfloat16)
    alone = refined(weights, block, starts, iterations=3, scale_dtype=torch.bfloat16)
    with Workers(3) as workers:
        together = refined(
            weights, block, starts, iterations=3, scale_dtype=torch.bfloat16, workers=workers
        )
    for name in weights:
        one, other = alone[name].weight, together[name].weight
        assert torch.equal(weights[name], before[name])
        assert torch.equal(one.qvalue, other.qvalue) and torch.equal(one.scale, other.scale)
        assert one.zero_point is None or torch.equal(one.zero_point, other.zero_point)
        assert alone[name].decisions == together[name].decisions


def test_its_memory_is_four_floats_and_two_bytes_of_each_weight_and_a_gradient_for_each_worker():
    weights = 200_000_000
    assert signround.working_bytes(weights, 0, widest=4096, workers=0) == 18 * weights
    assert signround.working_bytes(weights, 0, widest=4096, workers=2) == (18 + 2 * 4) * weights
    assert signround.working_bytes(0, 1000, widest=4096, workers=0) == 32_000
    assert BLOCK_ALGORITHMS["signround"] is signround
