"""Tune: gradients by scales, steps, and the divergence that they follow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import tune
from quantflow.core.affine import stored
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import TensorScheme, preset
from quantflow.errors import SchemeError, StatisticsError


def scheme(bits=4, group=2, symmetric=True):
    return TensorScheme(
        kind="int", num_bits=bits, granularity="per_group", group_size=group, symmetric=symmetric
    )


def weight(qvalue, scale, zero_point=None, **options):
    zero = None if zero_point is None else torch.tensor(zero_point, dtype=torch.int8)
    return QTensor(
        qvalue=torch.tensor(qvalue, dtype=torch.int8),
        scale=torch.tensor(scale),
        zero_point=zero,
        scheme=scheme(symmetric=zero is None, **options),
    )


def random_weight(rows, groups, size, *, seed, symmetric=True, bits=4):
    generator = torch.Generator().manual_seed(seed)
    about = scheme(bits=bits, group=size, symmetric=symmetric)
    low, high = about.qmin, about.qmax + 1
    zero = torch.randint(low, high, (rows, groups), generator=generator, dtype=torch.int8)
    return QTensor(
        qvalue=torch.randint(
            low, high, (rows, groups * size), generator=generator, dtype=torch.int8
        ),
        scale=torch.rand(rows, groups, generator=generator) + 0.1,
        zero_point=None if symmetric else zero,
        scheme=about,
    )


def test_the_gradient_by_a_scale_worked_by_hand():
    # Two groups of two. The first: 3 * 1 + 5 * (-1) = -2, times its scale of 1/2; the second: 1 * 4
    # + 2 * 0 = 4, times 2.
    start = weight([[1, -1, 4, 0]], [[0.5, 2.0]])
    found = tune.slope(start, tune.begin("w", start), torch.tensor([[3.0, 5.0, 1.0, 2.0]]))
    assert found.tolist() == [[-1.0, 8.0]]


def test_the_gradient_counts_from_the_zero_point():
    start = weight([[3, 1]], [[0.5]], [[2]])  # (3 - 2) * 10 + (1 - 2) * 4 = 6
    assert tune.slope(start, tune.begin("w", start), torch.tensor([[10.0, 4.0]])).tolist() == [
        [3.0]
    ]


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.sampled_from([1, 2, 8]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_gradient_is_autograds_of_the_dequantized_weight(rows, groups, size, symmetric, seed):
    start = random_weight(rows, groups, size, seed=seed, symmetric=symmetric)
    generator = torch.Generator().manual_seed(seed)
    u, given_gradient = (
        torch.randn(rows, groups, generator=generator),
        torch.randn(rows, groups * size, generator=generator),
    )
    tuned = tune.Tuned(u=u, mean=torch.zeros_like(u), square=torch.zeros_like(u))
    leaf = u.double().requires_grad_()
    points = start.qvalue.double() - (
        0 if start.zero_point is None else start.zero_point.double().repeat_interleave(size, 1)
    )
    real = points * (start.scale.double() * leaf.exp()).repeat_interleave(size, 1)
    (expected,) = torch.autograd.grad(real, leaf, given_gradient.double())
    found = tune.slope(start, tuned, given_gradient)
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def test_a_weight_of_several_units_of_rows_has_the_gradient_of_each_row_by_itself():
    start = random_weight(700, 4, 128, seed=1)  # two units of rows
    gradient = torch.randn(700, 512, generator=torch.Generator().manual_seed(2))
    found = tune.slope(start, tune.begin("w", start), gradient)
    points = gradient.view(700, 4, 128).double() * start.qvalue.view(700, 4, 128).double()
    torch.testing.assert_close(
        found.double(), points.sum(-1) * start.scale.double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_steps_are_those_of_torchs_adam_with_its_rate(bits):
    start, steps = random_weight(5, 3, 4, seed=3, bits=bits), 12
    generator = torch.Generator().manual_seed(4)
    theirs, tuned = torch.zeros(5, 3, requires_grad=True), tune.begin("w", start)
    adam = torch.optim.Adam([theirs], betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        gradient = torch.randn(5, 3, generator=generator)
        # 0.02 of a step of the integers, at the end of 2^(bits - 1) of them
        for group in adam.param_groups:
            group["lr"] = 0.02 / 2 ** (bits - 1) * (1 - step / steps) * min(1.0, (step + 1) / 5)
        theirs.grad = gradient.clone()
        adam.step()
        tuned = tune.stepped(start, tuned, gradient, step=step, steps=steps)
    torch.testing.assert_close(tuned.u, theirs.detach(), rtol=1e-5, atol=1e-7)
    assert tuned.u.abs().min() > 0


def test_the_first_step_is_as_long_whatever_the_gradient():
    start = weight([[1, 1, 1, 1]], [[1.0, 1.0]], bits=2)
    after = tune.stepped(
        start, tune.begin("w", start), torch.tensor([[1e-4, -7.0]]), step=0, steps=10
    )
    # a fifth of 0.02 / 2
    assert after.u.flatten().tolist() == pytest.approx([-0.002, 0.002], rel=1e-3)


def test_where_there_is_no_gradient_nothing_moves():
    start = weight([[0, 0, 1, 1]], [[1.0, 1.0]])
    after = tune.stepped(start, tune.begin("w", start), torch.zeros(1, 2), step=0, steps=1)
    assert after.u.tolist() == [[0.0, 0.0]]


def test_it_is_the_start_bit_by_bit_before_a_step_and_a_scale_the_layout_can_store_after():
    start = random_weight(6, 2, 4, seed=5)
    start = QTensor(
        qvalue=start.qvalue, scale=stored(start.scale, torch.bfloat16), scheme=start.scheme
    )
    tuned = tune.begin("w", start)
    same = tune.made(start, tuned, scale_dtype=torch.bfloat16)
    assert torch.equal(same.scale, start.scale) and torch.equal(same.qvalue, start.qvalue)
    moved = tune.Tuned(u=torch.full_like(tuned.u, 0.3), mean=tuned.mean, square=tuned.square)
    found = tune.made(start, moved, scale_dtype=torch.bfloat16)
    torch.testing.assert_close(found.scale, start.scale * math.exp(0.3), rtol=2**-8, atol=0)
    assert torch.equal(found.scale, found.scale.bfloat16().float()) and torch.equal(
        found.qvalue, start.qvalue
    )


def test_the_divergence_and_its_gradient_are_torchs():
    generator = torch.Generator().manual_seed(6)
    logits, original = (3 * torch.randn(7, 40, generator=generator) for _ in range(2))
    total, gradient = tune.divergence(logits, original)
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.kl_div(
        leaf.log_softmax(-1), original.double().log_softmax(-1), reduction="sum", log_target=True
    )
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(gradient, leaf.grad.float(), rtol=1e-4, atol=1e-6)


def test_the_divergence_of_a_model_from_itself_is_nothing_and_asks_for_nothing():
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    total, gradient = tune.divergence(logits, logits.clone())
    assert total == 0 and gradient.abs().max() == 0
    # one word: nothing to choose
    assert tune.divergence(torch.tensor([[4.0]]), torch.tensor([[9.0]]))[0] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    with pytest.raises(
        StatisticsError, match="the divergence of a sequence is nan; look at the quantized layers"
    ):
        tune.divergence(torch.tensor([[value, 1.0]]), torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8"])
def test_float8_is_refused_by_its_name(name):
    about = preset(name).weights
    shape = (1, 1) if about.granularity == "per_tensor" else (2, 1)
    start = QTensor(
        qvalue=torch.zeros(2, 4).to(torch.float8_e4m3fn), scale=torch.ones(shape), scheme=about
    )
    with pytest.raises(
        SchemeError,
        match="model.w: tune with float .*; choose integers with scales per channel or group",
    ):
        tune.begin("model.w", start)


def test_what_it_runs_and_takes_is_counted():
    # there and back twice, two checks
    assert tune.runs(64, steps=32, sequences=8) == 4 * 32 * 8 + 2 * 8
    assert tune.runs(3, steps=2, sequences=8) == 4 * 2 * 3 + 2 * 3
    none, one = (tune.working_bytes(1000, 10, workers=count) for count in (0, 1))
    assert none == 5 * 1000 + 20 * 10
    assert one - none > 4 * 1000 + 4 * 10
