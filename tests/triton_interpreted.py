"""Triton's kernels in its interpreter: products beside the equation, columns beside the loop.

`tests/unit/backends/test_triton.py` runs it with TRITON_INTERPRET=1.
"""

import math
from dataclasses import replace

import pytest
import torch

from quantflow.algorithms import gptq
from quantflow.backends import BACKENDS
from quantflow.backends.triton import backends, gate, norm, rope
from quantflow.core import affine, rounding_kernel
from quantflow.core.scheme import TensorScheme, preset
from quantflow.numerics import columns_kernel, feedback
from quantflow.runtime.fused_gates import ACTIVATIONS
from quantflow.runtime.fused_norms import NormForm
from quantflow.runtime.fused_rope import turned_halves
from tests.triton_weights import IDS, WEIGHTS, by_definition, drawn, error


@pytest.fixture
def poisoned(monkeypatch):
    """New memory holds NaN, or 99, so that what a kernel does not write is seen."""

    def poisoning(empty):
        def filled(*given, **words):
            made = empty(*given, **words)
            return made.fill_(float("nan") if made.is_floating_point() else 99)

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


@pytest.mark.parametrize("tokens", [1, 17, 64])
@pytest.mark.parametrize(("name", "size", "shape"), WEIGHTS, ids=IDS)
def test_products_are_those_of_the_equation(name, size, shape, tokens, poisoned):
    linear = drawn(name, size, shape, rounded=False)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, shape[1], generator=generator).bfloat16()
    bias = torch.randn(shape[0], generator=generator).bfloat16() if tokens == 17 else None
    backend = BACKENDS[f"triton_{name.lower()[:5]}"]
    found = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert found.shape == (1, tokens, shape[0]) and found.dtype == torch.bfloat16
    assert error(found, by_definition(x, linear, bias)) < 3e-3  # the output's own rounding


def test_sums_before_they_are_rounded_are_exact_to_float32():
    from quantflow.backends.triton import w4a16, w8a16

    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name, size in (("W4A16_ASYM", 128), ("W8A16", None)):
        linear = drawn(name, size, (40, 1024), rounded=False)
        stored = backends._prepare(linear, torch.bfloat16)
        if size:
            found = w4a16.product(x, stored.codes, stored.scale, stored.zero, block=128)
        else:
            found = w8a16.product(x, stored.codes, stored.scale, block=128)
        assert error(found, by_definition(x, linear, None)) < 1e-6


# columns, rows, groups, bits, zero points
BLOCKS = [
    (1, 1, 1, 4, False),
    (5, 33, 1, 8, False),
    (128, 32, 4, 4, True),
    (129, 31, 3, 3, False),
    (300, 70, 6, 4, True),
    (256, 65, 2, 2, True),
]
OF_BLOCKS = [f"{c}x{r} in {g}, {b} bits{', zeros' if z else ''}" for c, r, g, b, z in BLOCKS]


@pytest.fixture
def by_the_kernel(monkeypatch):
    monkeypatch.setattr(
        feedback, "_rounding_of_blocks", lambda device, scheme: columns_kernel.round_block_
    )


def rows_of(columns, rows, groups, bits, zeros, *, exact):
    """Weights, scales, zero points, scheme and factor; all sums are exact where `exact`."""
    generator = torch.Generator().manual_seed(columns + rows)

    def drawn_in(low, high, *shape):
        if exact:  # multiples of 2^-4, so products are those of 2^-8 and sums stay below 2^16
            return torch.randint(16 * low, 16 * high + 1, shape, generator=generator) / 16
        return torch.rand(shape, generator=generator) * (high - low) + low

    scheme = TensorScheme(
        kind="int", num_bits=bits, granularity="per_group", group_size=1, symmetric=not zeros
    )
    scales = 2.0 ** torch.randint(-3, 1, (groups, rows), generator=generator)
    scales = scales if exact else scales * drawn_in(1, 2, groups, rows)
    zero_points = None
    if zeros:
        zero_points = torch.randint(
            scheme.qmin, scheme.qmax + 1, (groups, rows), generator=generator
        ).float()
    lower = drawn_in(-1, 1, columns, columns) / (1 if exact else columns**0.5)
    below = torch.ones(columns, columns).tril(-1) > 0
    factor = feedback.Feedback(
        order=torch.randperm(columns, generator=generator),
        lower=torch.where(below, lower, float("nan")),  # nothing else may be read
        diagonal=torch.ones(columns).double(),
        pivots=torch.ones(columns),
        damping=0.01,
        share=0.01,
        decisions={},
    )
    return drawn_in(-4, 4, columns, rows), scales, zero_points, scheme, factor


@pytest.mark.parametrize("case", BLOCKS, ids=OF_BLOCKS)
def test_columns_have_the_bits_of_the_loop_where_sums_are_exact(case, poisoned, monkeypatch):
    work, scales, zeros, scheme, factor = rows_of(*case, exact=True)
    expected_work, found_work = work.clone(), work.clone()
    expected = feedback.round_columns_(expected_work, scales, zeros, scheme=scheme, feedback=factor)
    monkeypatch.setattr(
        feedback, "_rounding_of_blocks", lambda device, scheme: columns_kernel.round_block_
    )
    found = feedback.round_columns_(found_work, scales, zeros, scheme=scheme, feedback=factor)
    assert torch.equal(found, expected)
    assert torch.equal(found_work, expected_work)


@pytest.mark.parametrize("case", BLOCKS, ids=OF_BLOCKS)
def test_every_column_is_rounded_to_the_nearest_of_its_aim(case, poisoned, by_the_kernel):
    """Aims in float64 from the errors that came out; a sum of n float32 is within n 2^-24 of it."""
    weight, scales, zeros, scheme, factor = rows_of(*case, exact=False)
    work = weight.clone()
    qvalue = feedback.round_columns_(work, scales, zeros, scheme=scheme, feedback=factor)
    columns = len(work)
    places = factor.order
    scale = scales.repeat_interleave(columns // len(scales), 0)[places].double()
    zero = 0.0 if zeros is None else zeros.repeat_interleave(columns // len(zeros), 0)[places]
    code = qvalue[places].double()
    real = scale * (code - zero)
    # two roundings, of the product and of the difference
    assert ((work - (weight - real)).abs() <= 2.0**-23 * (real.abs() + weight.abs())).all()
    factors = torch.where(torch.ones(columns, columns).tril(-1) > 0, factor.lower, 0.0).double().T
    aims = weight + factors @ work.double()
    bound = (columns + 2) * 2.0**-24 * (weight.abs() + factors.abs() @ work.abs().double()) / scale
    wanted = (aims / scale + zero).clamp(scheme.qmin, scheme.qmax)
    assert ((code - wanted).abs() <= 0.5 + bound + 2.0**-20).all()
    assert code.unique().numel() > 1 or qvalue.numel() == 1


def test_gptq_by_the_kernel_takes_the_decisions_of_the_loop(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(600, 192, generator=generator) @ torch.randn(192, 192, generator=generator)
    weights = {
        name: torch.randn(rows, 192, generator=generator) for name, rows in (("q", 40), ("k", 9))
    }
    for name in ("W4A16_ASYM", "W8A16"):
        scheme = preset(name)
        if scheme.weights.group_size:
            scheme = replace(scheme, weights=replace(scheme.weights, group_size=32))

        def quantized(scheme=scheme):
            statistics = {"hessian_sum": (x.T @ x).double(), "count": torch.tensor(len(x))}
            return gptq.quantize_group(
                weights, scheme, statistics=statistics, scale_dtype=torch.float32
            )

        expected = quantized()
        with monkeypatch.context() as patch:
            patch.setattr(
                feedback, "_rounding_of_blocks", lambda device, scheme: columns_kernel.round_block_
            )
            found = quantized()
        for linear, result in expected.items():
            equal = (result.weight.qvalue == found[linear].weight.qvalue).double().mean()
            assert equal >= 0.999
            ours, theirs = (each[linear].decisions["output_error"] for each in (found, expected))
            assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_kernel_takes_integers_and_no_codebooks():
    assert columns_kernel.takes(preset("W4A16").weights)
    assert columns_kernel.takes(preset("W2A16_ASYM").weights)
    assert not columns_kernel.takes(preset("FP8").weights)
    points = TensorScheme(
        kind="int", num_bits=8, granularity="per_group", group_size=32, block_type="IQ4_NL"
    )
    assert not columns_kernel.takes(points)


INPUTS = [("FP8", 0.03), ("FP8_DYNAMIC", None), ("FP8_BLOCK", None)]
INPUTS += [("W8A8", None), ("W8A8_STATIC", 0.03)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 129), (2, 5, 128), (2, 2500), (0, 16)], ids=str)
@pytest.mark.parametrize(("name", "stored"), INPUTS, ids=[name for name, _ in INPUTS])
def test_rounded_inputs_have_the_bits_of_the_equation(name, stored, shape, dtype, poisoned):
    scheme = preset(name).input
    assert rounding_kernel.takes(scheme)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x *= 10 ** torch.linspace(-9, 4, shape[-1])  # subnormal codes, and values beyond the largest
    if len(x) > 1:
        x[0], x[1, ..., -1] = 0.0, -3e4
    x = x.to(dtype)
    scale = None if stored is None else torch.tensor([stored])
    zero = None if scheme.symmetric else torch.tensor([-11], dtype=torch.int8)
    expected_scale = affine.scale_per_token(x, scheme) if scale is None else scale
    expected = affine.quantize(x, expected_scale, zero, scheme)
    codes, scales = rounding_kernel.rounded(x, scale, zero, scheme)
    assert torch.equal(scales, expected_scale)
    assert codes.dtype == expected.dtype
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))


def test_every_bfloat16_is_rounded_to_the_code_that_torchs_cast_takes():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    for name in ("FP8", "W8A8_STATIC"):
        scheme, scale = preset(name).input, torch.tensor([1.0])
        zero = None if scheme.symmetric else torch.tensor([5], dtype=torch.int8)
        codes, _ = rounding_kernel.rounded(x, scale, zero, scheme)
        expected = affine.quantize(x, scale, zero, scheme)
        assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))


def test_a_row_with_nan_becomes_nan_as_by_the_equation():
    x = torch.ones(2, 40)
    x[0, 3] = float("nan")
    codes, scales = rounding_kernel.rounded(x, None, None, preset("FP8_DYNAMIC").input)
    assert codes[0].float().isnan().all() and scales[0].isnan().all()
    assert codes[1].float().tolist() == [448.0] * 40
    assert scales[1] == torch.tensor(1 / 448)


def test_inputs_with_other_scales_are_left_to_torch():
    assert not rounding_kernel.takes(preset("NVFP4").input)
    assert not rounding_kernel.takes(preset("MXFP8").input)
    assert not rounding_kernel.takes(replace(preset("FP8_BLOCK").input, scale_rounding="pow2"))


FORMS = [(0.0, True), (0.0, False), (1.0, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 129), (2, 5, 128), (2, 4096), (1, 5000), (0, 16)], ids=str
)
@pytest.mark.parametrize(("offset", "early"), FORMS, ids=["Llama", "OLMo 2", "Gemma"])
def test_norms_are_those_of_the_equation(offset, early, shape, dtype, poisoned):
    """In float64: a float32 sum of n is within n 2^-24 of it, and outputs are rounded."""
    generator = torch.Generator().manual_seed(shape[-1])
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    if len(x) > 1:
        x[0] = 0.0
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    found = norm.rms_norm(x, weight, eps=1e-5, offset=offset, early=early)
    wide = x.double()
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * (offset + weight.double())
    assert found.shape == x.shape and found.dtype == dtype
    half_step = torch.finfo(dtype).eps / 2 * (2 if early else 1)
    bound = (half_step + (shape[-1] + 8) * 2.0**-24) * expected.abs()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= 1.01 * bound + smallest).all()


def test_where_a_norm_rounds_is_the_familys():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).bfloat16()
    weight = torch.randn(96, generator=generator).bfloat16()
    found = {}
    for form in FORMS:
        offset, early = form
        ours = norm.rms_norm(x, weight, eps=1e-5, offset=offset, early=early)
        by_torch = NormForm(offset=offset, early=early).compute(x, weight, eps=1e-5)
        # sums of another order fall to the other side of a half now and then
        assert (ours == by_torch).double().mean() > 0.999
        found[form] = ours
    assert not torch.equal(found[FORMS[0]], found[FORMS[1]])


def test_a_row_with_nan_is_nan_and_the_others_are_not():
    x = torch.ones(3, 40)
    x[1, 7] = float("nan")
    found = norm.rms_norm(x, torch.ones(40), eps=0.0, offset=0.0, early=True)
    assert found[1].isnan().all()
    assert (found[[0, 2]] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "one linear"])
@pytest.mark.parametrize(
    ("batch", "heads", "keys", "tokens", "width"),
    [(1, 1, 1, 1, 2), (2, 4, 2, 5, 64), (1, 3, 1, 7, 80), (1, 2, 2, 0, 64)],
    ids=str,
)
def test_queries_and_keys_turn_to_torchs_bits(
    batch, heads, keys, tokens, width, layout, dtype, poisoned
):
    generator = torch.Generator().manual_seed(width)

    def drawn(count):
        made = torch.randn(batch, tokens, count, width, generator=generator).to(dtype)
        return (
            made.transpose(1, 2).contiguous() if layout == "heads first" else made.transpose(1, 2)
        )

    if layout == "one linear":  # q, k and v lie side by side in each token
        together = drawn(heads + 2 * keys)
        q, k = together[:, :heads], together[:, heads : heads + keys]
    else:
        q, k = drawn(heads), drawn(keys)
    for rows in {1, batch}:
        angles = torch.rand(rows, tokens, width, generator=generator) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = rope.rotary(q, k, cos, sin)
        assert [part.dtype for part in found] == [dtype, dtype]
        assert all(map(torch.equal, found, turned_halves(q, k, cos, sin)))


def test_a_head_with_nan_is_nan_where_it_turns_and_the_others_are_not():
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 1, 8)
    q[0, 1, 0, 2] = float("nan")
    q, k = rope.rotary(q, k, torch.ones(1, 1, 8), torch.ones(1, 1, 8))
    assert q[0, 1, 0].isnan().tolist() == [channel % 4 == 2 for channel in range(8)]
    assert not q[0, 0].isnan().any() and not k.isnan().any()


@pytest.mark.parametrize("activation", [gate.SILU, gate.GELU_TANH])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 1000), (1, 4096), (0, 8)], ids=str)
def test_gates_are_those_of_the_equation(shape, dtype, activation, poisoned):
    """In float64, with a rounding of the factor and one of the product."""
    generator = torch.Generator().manual_seed(shape[-1])
    wide, up = (torch.randn(2, *shape, generator=generator) * 4).to(dtype)
    found = gate.gated(wide, up, activation=activation)
    assert found.shape == wide.shape and found.dtype == dtype
    exact = wide.double()
    power, share = exact, torch.finfo(dtype).eps + 2.0**-22
    if activation == gate.GELU_TANH:
        power = math.sqrt(8 / math.pi) * (exact + 0.044715 * exact**3)
        share = share + 2.0**-22 * power.abs()  # a sum, which float32 rounds
    expected = exact / (1 + (-power).exp()) * up.double()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    room = 2 * smallest * (1 + up.double().abs())  # a factor below the normal numbers
    room += 2.0**-127 * (exact * up.double()).abs()  # a divisor above all numbers
    assert ((found.double() - expected).abs() <= share * expected.abs() + room).all()
    # torch's 1 + tanh loses the digits of a gate that is almost shut
    plain = found[wide > -3], (ACTIVATIONS[activation](wide) * up)[wide > -3]
    if dtype != torch.float32 and found.numel() > 100:
        assert (plain[0] == plain[1]).double().mean() > 0.99


@pytest.mark.parametrize("activation", [gate.SILU, gate.GELU_TANH])
def test_gates_of_large_values_and_nan(activation):
    wide = torch.tensor([1e4, -1e4, float("inf"), float("-inf"), float("nan"), 0.0])
    found = gate.gated(wide, torch.ones(6), activation=activation)
    assert found[:3].tolist() == [1e4, 0.0, float("inf")]
    assert found[3].isnan() and found[4].isnan() and found[5] == 0.0  # as torch's
