"""Rounding in C beside torch's operators: every bit, for every scheme, odd sizes, NaN and Inf."""

from dataclasses import replace

import pytest
import torch

from quantflow.backends import native
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.scheme import PRESETS, TensorScheme
from quantflow.numerics import compiled_rounding, grid
from quantflow.numerics.feedback import Feedback, round_columns_

REASON = native.why_not(compiled_rounding.SOURCE, cpu_flags=())
needs_c = pytest.mark.skipif(REASON is not None, reason=str(REASON))
HOST = torch.device("cpu")
SCHEMES = {name: scheme.weights for name, scheme in PRESETS.items()}
# the types of blocks whose points are one step apart
SCHEMES |= {
    name: TensorScheme(
        kind="int",
        num_bits=kind.num_bits,
        granularity="per_group",
        group_size=kind.group_size,
        symmetric=not kind.minima,
        block_type=name,
    )
    for name, kind in BLOCK_TYPES.items()
    if not kind.points
}
SCHEMES |= {
    flavour: replace(SCHEMES["FP8_DYNAMIC"], float8=flavour)
    for flavour in ("e5m2", "e4m3fnuz", "gaudi2")
}
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38, 0.5])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def both_ways(monkeypatch, work):
    """What `work` returns with C, and with torch's operators."""
    in_c = work()
    monkeypatch.setattr(compiled_rounding, "takes", lambda *_: False)
    return in_c, work()


def random_operands(scheme, columns, rows, generator):
    """Weights [I, R], a feedback, scales and zero points [G, R] of a scheme."""

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    groups = 3
    feedback = Feedback(
        order=torch.randperm(columns, generator=generator),
        lower=0.2 * random(columns, columns),
        diagonal=torch.ones(columns).double(),
        pivots=torch.ones(columns),
        damping=0.0,
        share=0.0,
        decisions={},
    )
    scales = (0.01 + random(groups, rows).abs()) * (0.3 if scheme.kind == "int" else 0.01)
    zeros = None
    if not scheme.symmetric:
        zeros = 3 * random(groups, rows)
        zeros = zeros if scheme.minima else zeros.round()
    return random(columns, rows), feedback, scales, zeros


@needs_c
@pytest.mark.parametrize("name", SCHEMES)
def test_columns_get_the_bits_of_torchs_operators(name, monkeypatch):
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(1)
    # one block and two with a part of one; a row, no whole register, and several
    for columns, rows in ((3, 1), (129, 5), (300, 67)):
        weights, feedback, scales, zeros = random_operands(scheme, columns, rows, generator)
        with monkeypatch.context() as patch:

            def work(operands=(weights, scales, zeros), feedback=feedback):
                errors = operands[0].clone()
                qvalue = round_columns_(errors, *operands[1:], scheme=scheme, feedback=feedback)
                return qvalue, errors

            assert compiled_rounding.takes(scheme, HOST)
            (qvalue, errors), (expected, expected_errors) = both_ways(patch, work)
        assert qvalue.dtype == qvalue_dtype(scheme)
        assert torch.equal(bits(qvalue), bits(expected)), (columns, rows)
        assert torch.equal(bits(errors), bits(expected_errors)), (columns, rows)


@needs_c
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "MXFP4"])
def test_columns_that_are_not_finite_stay_so_in_the_same_places(name, monkeypatch):
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(2)
    weights, feedback, scales, zeros = random_operands(scheme, 60, 24, generator)
    weights[55, :8] = SPECIAL
    scales[1, 8:11] = torch.tensor([torch.nan, torch.inf, 1e-38])
    scales[2, 11] = -0.1

    def work():
        errors = weights.clone()
        qvalue = round_columns_(errors, scales, zeros, scheme=scheme, feedback=feedback)
        return qvalue, errors

    (qvalue, errors), (expected, expected_errors) = both_ways(monkeypatch, work)
    assert torch.equal(bits(qvalue), bits(expected))
    assert errors.isnan().any() and torch.equal(errors.isnan(), expected_errors.isnan())
    assert torch.equal(bits(errors.nan_to_num(7)), bits(expected_errors.nan_to_num(7)))


@needs_c
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_half_way_between_two_points_get_the_bits_of_torchs_operators(name, monkeypatch):
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(5)
    weights, feedback, scales, zeros = random_operands(scheme, 30, 500, generator)
    halves = torch.randint(-40, 40, weights.shape, generator=generator) / 4
    halves -= 0 if zeros is None else zeros.repeat_interleave(10, dim=0)
    weights = halves * scales.repeat_interleave(10, dim=0)
    feedback.lower.zero_()  # no error moves a column
    losses = []

    def work():
        errors = weights[feedback.order]
        qvalue = round_columns_(errors, scales, zeros, scheme=scheme, feedback=feedback)
        rows = [scales.T, None if zeros is None else zeros.T, torch.ones(3, 10)]
        split = weights.T.reshape(500, 3, 10).contiguous()
        which = compiled_rounding.losses if not losses else grid._losses
        losses.append(which(split, *rows, scheme=scheme, out=torch.empty_like(split)))
        return qvalue, errors

    (qvalue, errors), (expected, expected_errors) = both_ways(monkeypatch, work)
    assert torch.equal(bits(qvalue), bits(expected))
    assert torch.equal(bits(errors), bits(expected_errors))
    assert torch.equal(*map(bits, losses))


@needs_c
@pytest.mark.parametrize("name", SCHEMES)
def test_losses_get_the_bits_of_torchs_operators(name):
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(3)
    for rows, groups, columns in ((1, 1, 1), (5, 3, 37), (2, 4, 128)):
        weights, _, scales, zeros = random_operands(scheme, groups * columns, rows, generator)
        split = weights.T.reshape(rows, groups, columns).contiguous()
        split.view(-1)[: len(SPECIAL)] = SPECIAL[: split.numel()]
        scales = scales[:1].T.expand(rows, groups)
        zeros = None if zeros is None else zeros[:1].T.expand(rows, groups)
        importance = torch.rand(groups, columns, generator=generator)
        found, expected = (
            losses(split, scales, zeros, importance, scheme=scheme, out=torch.full_like(split, 9.0))
            for losses in (compiled_rounding.losses, grid._losses)
        )
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(bits(found.nan_to_num(7)), bits(expected.nan_to_num(7)))


@needs_c
def test_a_search_in_c_chooses_the_scales_that_torchs_operators_choose(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(9, 256, generator=generator)
    importance = torch.rand(256, generator=generator)
    called = []
    losses = compiled_rounding.losses
    monkeypatch.setattr(
        compiled_rounding, "losses", lambda *a, **k: called.append(1) or losses(*a, **k)
    )

    def work():
        told = {"scale_dtype": torch.float32, "importance": importance, "either_sign": True}
        return grid.weight_grids({"w": weight}, SCHEMES["W4A16"], **told)["w"].scale

    found, expected = both_ways(monkeypatch, work)
    assert called and torch.equal(found, expected)


def test_what_c_does_not_take_is_left_to_torchs_operators(monkeypatch):
    points = replace(SCHEMES["W8A16"], granularity="per_group", group_size=32, block_type="IQ4_NL")
    assert not compiled_rounding.takes(points, HOST)
    assert not compiled_rounding.takes(SCHEMES["W4A16"], torch.device("meta"))
    monkeypatch.setattr(native, "why_not", lambda *_, **__: "no compiler")
    compiled_rounding._library.cache_clear()
    try:
        assert not compiled_rounding.takes(SCHEMES["W4A16"], HOST)
    finally:
        compiled_rounding._library.cache_clear()
