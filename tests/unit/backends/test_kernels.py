"""The C kernels to the last bit: codes, rounding, order of sums; and the inputs they refuse."""

import copy
import gc
from dataclasses import replace

import pytest
import torch

from quantflow.backends import BACKENDS, kernels, native
from quantflow.core import affine, float8
from quantflow.core.microscaling import pack_e2m1, unpack_e2m1
from quantflow.core.qtensor import PackedLinear, QTensor, QuantizedLinear
from quantflow.core.scheme import (
    PRESETS,
    LinearScheme,
    TensorScheme,
    with_float8,
    with_group_size,
    with_rounded_inputs,
)
from quantflow.errors import UsageError
from quantflow.runtime.linear import QuantLinear
from tests.shared import slow

int4_pack, w4a8, w4a16, w8a8 = (BACKENDS[name] for name in ("int4_pack", "w4a8", "w4a16", "w8a8"))
REASON = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS)
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
FP8 = PRESETS["FP8_DYNAMIC"].weights
STATIC_FP8 = PRESETS["FP8"]


def scheme_of(name: str, group_size: int = 32) -> LinearScheme:
    scheme = PRESETS[name]
    return scheme if scheme.weights.group_size is None else with_group_size(scheme, group_size)


def linear_of(
    scheme: LinearScheme, qvalue: torch.Tensor, *, scale=None, zero_point=None, input_scale=None
) -> QuantizedLinear:
    weights = scheme.weights
    groups = qvalue.shape[1] // (weights.group_size or qvalue.shape[1])
    shape = (1, 1) if weights.granularity == "per_tensor" else (len(qvalue), groups)
    return QuantizedLinear(
        weight=QTensor(
            qvalue=qvalue,
            scale=torch.ones(shape) if scale is None else scale,
            zero_point=zero_point,
            scheme=weights,
            global_scale=torch.ones(1) if weights.scale_format == "e4m3" else None,
        ),
        scheme=scheme,
        input_scale=None if input_scale is None else torch.tensor([input_scale]),
        input_zero_point=torch.tensor([-11], dtype=torch.int8)
        if input_scale and not scheme.input.symmetric
        else None,
    )


def random_linear(
    name: str,
    shape: tuple[int, int],
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    scheme: LinearScheme | None = None,
) -> QuantizedLinear:
    scheme, generator = scheme or scheme_of(name), torch.Generator().manual_seed(0)
    weights = scheme.weights
    if weights.kind == "float" and weights.num_bits == 4:
        packed = torch.randint(256, (shape[0], shape[1] // 2), generator=generator)
        qvalue = unpack_e2m1(packed.to(torch.uint8))
    elif weights.kind == "float":
        qvalue = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    else:
        qvalue = torch.randint(
            weights.qmin, weights.qmax + 1, shape, generator=generator, dtype=torch.int8
        )
    groups = shape[1] // (weights.group_size or shape[1])
    sizes = (1, 1) if weights.granularity == "per_tensor" else (shape[0], groups)
    zero_point = None
    if not weights.symmetric:
        zero_point = torch.randint(
            weights.qmin, weights.qmax + 1, sizes, generator=generator, dtype=torch.int8
        )
    scale = (torch.rand(sizes, generator=generator) + 0.1).to(scale_dtype).float()
    static = scheme.input is not None and not scheme.input.dynamic
    return linear_of(
        scheme, qvalue, scale=scale, zero_point=zero_point, input_scale=0.03 if static else None
    )


def run(linear: QuantizedLinear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return kernels.linear(x, kernels.prepare(linear, x.dtype), bias)


def run_in_float32(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Run a weight prepared for bfloat16, with a float32 output, whose rounding hides nothing."""
    return kernels.linear(x.float(), kernels.prepare(linear, torch.bfloat16), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_e4m3_is_widened_to_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    # the two codes of NaN are refused when an artifact is read
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    qvalue = codes.repeat(3)[: 3 * 254].view(127, 6).contiguous()
    for scheme in (replace(PRESETS["FP8_DYNAMIC"], input=None), with_float8(STATIC_FP8, "gaudi2")):
        linear = (
            linear_of(scheme, qvalue)
            if scheme.input is None
            else linear_of(scheme, qvalue, input_scale=1.0)
        )
        columns = run(linear, torch.eye(6, dtype=dtype))  # [6, 127]
        assert torch.equal(columns.float().t(), qvalue.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["MXFP4A16", "MXFP4A16 rounded", "NVFP4A16"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [((1,), 32), ((64,), 96), ((90, 90), 128), ((70, 33, 1), 160), ((2048, 2048), 1024)],
)
def test_packed_codes_become_the_weight_that_unpacked_ones_become(
    rows, columns, name, scale_dtype, dtype
):
    name, _, rounded = name.partition(" ")
    scheme = with_rounded_inputs(PRESETS[name]) if rounded else PRESETS[name]
    linears = [
        random_linear(name, (n, columns), scale_dtype=scale_dtype, scheme=scheme) for n in rows
    ]
    whole = random_linear(name, (sum(rows), columns), scheme=scheme)
    whole = replace(
        whole,
        weight=replace(
            whole.weight,
            qvalue=torch.cat([each.weight.qvalue for each in linears]),
            scale=torch.cat([each.weight.scale for each in linears]),
        ),
    )
    packed = [
        PackedLinear(
            codes=pack_e2m1(each.weight.qvalue), scale=each.weight.scale, scheme=each.scheme
        )
        for each in linears
    ]
    expected, found = (
        kernels.dump(each)
        for each in (kernels.prepare(whole, dtype), kernels.prepare_packed(packed, dtype))
    )
    assert expected.keys() == found.keys()
    for part, tensor in expected.items():
        if part != "weight":
            assert tensor.dtype == found[part].dtype and torch.equal(tensor, found[part])
    fields = [name for name, _ in kernels._Weight._fields_ if name not in found]
    records = [
        kernels._Weight.from_buffer_copy(each["weight"].numpy().tobytes())
        for each in (expected, found)
    ]
    assert [getattr(records[0], field) for field in fields] == [
        getattr(records[1], field) for field in fields
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["MXFP4A16", "NVFP4A16"])
def test_every_code_of_e2m1_is_widened_to_its_value_and_takes_four_bits(name, dtype):
    scheme = PRESETS[name]
    columns = 2 * scheme.weights.group_size
    packed = torch.arange(256, dtype=torch.uint8).repeat(columns)[: 70 * columns // 2]
    qvalue = unpack_e2m1(packed.view(70, -1))  # every code at every column
    scale = 0.5 ** torch.arange(140).view(70, 2)
    prepared = kernels.prepare(
        QuantizedLinear(
            weight=QTensor(
                qvalue=qvalue,
                scale=scale,
                scheme=scheme.weights,
                global_scale=torch.ones(1) if name == "NVFP4A16" else None,
            ),
            scheme=scheme,
        ),
        dtype,
    )
    found = kernels.linear(torch.eye(columns), prepared, None)  # [columns, 70]
    assert torch.equal(found.t(), qvalue.float() * scale.repeat_interleave(columns // 2, dim=1))
    assert prepared.tensors["data"].nbytes == 128 * columns // 2  # rows are padded
    restored = kernels.restore(kernels.dump(prepared), dtype, shape=(70, columns))
    assert torch.equal(kernels.linear(torch.eye(columns), restored, None), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 2.0**-99, 2.0**100])
def test_products_of_e2m1_are_those_of_its_values_for_small_and_large_inputs(size, dtype):
    qvalue = unpack_e2m1(torch.arange(256, dtype=torch.uint8).repeat(4).view(64, 16))
    x = torch.tensor(size * (1 + torch.finfo(dtype).eps), dtype=dtype)  # its last bit is set
    found = run(linear_of(PRESETS["MXFP4A16"], qvalue), torch.eye(32, dtype=dtype) * x)
    assert torch.equal(found.t(), (qvalue.float() * x.float()).to(dtype))


@pytest.mark.parametrize("tokens", [1, 2, 5, 13])
def test_sums_of_e2m1_are_those_of_its_values_bit_for_bit(tokens):
    linear = random_linear("MXFP4A16", (70, 96))
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(1))
    # float64 holds a sum of a float32 and such a product, so that each is rounded once
    weight, inputs = linear.weight.qvalue.double(), x.double()
    total = torch.zeros(tokens, 70)
    for group in range(3):
        sums = torch.zeros(tokens, 70)
        for line in range(4):
            for column in (0, 4, 1, 5, 2, 6, 3, 7):  # the order of a line, see kernels.c
                at = 32 * group + 8 * line + column
                sums = (sums.double() + inputs[:, at, None] * weight[:, at]).float()
        scaled = sums.double() * linear.weight.scale[:, group].double()
        total = (total.double() + scaled).float()
    assert torch.equal(run(linear, x), total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["W2A16", "W3A16", "W4A16", "W5A16", "W8A16", "W4A8", "W8A8", "W8A8_STATIC"]
)
def test_negative_scales_turn_the_signs_of_the_outputs_and_no_other_bit(dtype, scale_dtype, name):
    linear = random_linear(name, (70, 96), scale_dtype=scale_dtype)
    turned = replace(linear, weight=replace(linear.weight, scale=-linear.weight.scale))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = run(linear, x)
    assert y.abs().min() > 0
    assert torch.equal(run(turned, x), -y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W8A16", "W8A8", "W8A8_STATIC"])
def test_every_int8_is_multiplied_as_it_is(dtype, name):
    qvalue = torch.arange(-128, 128).to(torch.int8).view(64, 4)
    scheme = scheme_of(name)
    x = torch.eye(4, dtype=dtype)
    if name == "W8A8":
        x *= 127.5  # a scale of 1: 127.5 is 128, which saturates at 127
        expected = 127.0 * qvalue.float()
        actual = run(linear_of(scheme, qvalue), x)
    elif name == "W8A8_STATIC":
        expected = qvalue.float()
        actual = run(linear_of(scheme, qvalue, input_scale=1.0), x)
    else:
        expected = qvalue.float()
        actual = run(linear_of(scheme, qvalue), x)
    assert torch.equal(actual.t().contiguous(), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16_ASYM", "W4A16", "W3A16_ASYM", "W2A16"])
def test_every_pair_of_a_qvalue_and_a_zero_point_is_their_difference_in_every_column(dtype, name):
    scheme = scheme_of(name, 16)
    weights = scheme.weights
    qvalues = torch.arange(weights.qmin, weights.qmax + 1, dtype=torch.int8)
    zeros = torch.zeros(1, dtype=torch.int8) if weights.symmetric else qvalues
    count = len(qvalues)
    # [Z * Q, 16]
    qvalue = torch.stack([qvalues.repeat(16)[row : row + 16] for row in range(count)]).repeat(
        len(zeros), 1
    )
    zero_point = zeros.repeat_interleave(count)[:, None]
    linear = linear_of(scheme, qvalue, zero_point=None if weights.symmetric else zero_point)
    assert torch.equal(
        run(linear, torch.eye(16, dtype=dtype)).float().t(), (qvalue - zero_point).float()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [True, False])
def test_inputs_are_rounded_to_e4m3_as_torch_casts_them(dtype, static):
    x = torch.cat(
        [
            torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 2.0**e
            for e in range(-14, 10)
        ]
    )
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat(
        [x, codes, ties, -ties, ties.nextafter(codes[1:]), torch.tensor([1e9, -1e9, -0.0])]
    )
    x = x[: len(x) // 64 * 64].view(-1, 64).to(dtype)
    unit = torch.eye(64).to(torch.float8_e4m3fn)
    if static:
        linear, scale = linear_of(STATIC_FP8, unit, input_scale=1.0), torch.ones(1)
    else:
        linear = linear_of(PRESETS["FP8_DYNAMIC"], unit)
        scale = affine.scale_from_amax(
            x.abs().amax(dim=-1, keepdim=True), PRESETS["FP8_DYNAMIC"].input
        )
    expected = float8.cast(x.float() / scale, "e4m3fn").float() * scale
    assert torch.equal(run(linear, x), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W8A8", "W8A8_STATIC", "W4A8"])
def test_inputs_are_rounded_to_int8_as_the_equation_says(dtype, name):
    scheme = scheme_of(name)
    x = (
        torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-30, 4, 200)[:, None]
    )
    x[0] = 0
    x[1] = torch.arange(-32, 32) + 0.5  # halves: ties
    x[1, 0] = 127.5
    x = x.to(dtype)
    static = not scheme.input.dynamic
    linear = linear_of(scheme, torch.eye(64).to(torch.int8), input_scale=0.25 if static else None)
    scale = (
        linear.input_scale
        if static
        else affine.scale_from_amax(x.abs().amax(dim=-1, keepdim=True), scheme.input)
    )
    qvalue = affine.quantize(x, scale, linear.input_zero_point, scheme.input)
    expected = affine.dequantize(qvalue, scale, linear.input_zero_point)
    assert torch.equal(run(linear, x), expected.to(dtype))


def test_a_group_with_a_zero_point_worked_by_hand():
    # 32 columns, qvalues 7 then zeros, zero_point -3, scale 0.5: weights 0.5 * (7 + 3) = 5 and 0.5
    # * 3 = 1.5. Inputs 127.5 and -51: scale 1, qvalues 127 and -51. 127 * 5 - 51 * 1.5 = 558.5, and
    # a bias of 1.
    scheme = replace(scheme_of("W4A8"), weights=scheme_of("W4A16_ASYM").weights)
    qvalue = torch.zeros(1, 32, dtype=torch.int8)
    qvalue[0, 0] = 7
    linear = linear_of(
        scheme,
        qvalue,
        scale=torch.tensor([[0.5]]),
        zero_point=torch.tensor([[-3]], dtype=torch.int8),
    )
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 31] = 127.5, -51
    assert w4a8.linear(x, w4a8.prepare(linear, torch.float32), torch.ones(1)).tolist() == [[559.5]]


@pytest.mark.parametrize(
    "name", [n for n, s in PRESETS.items() if s.weights.scale_format == "float" and n != "W4AFP8"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_threads_nor_on_the_other_tokens(name, dtype):
    scheme = PRESETS[name]
    shape = (300, 2 * (scheme.weights.group_size or 100))
    linear = random_linear(name, shape)
    # tiles of 12, 12, 4, 1, 1 and 1
    x = torch.randn(31, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    prepared = kernels.prepare(linear, dtype)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(kernels.linear(x, prepared, None))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)
    alone = torch.cat([kernels.linear(row[None], prepared, None) for row in x])
    assert torch.equal(alone, results[0])
    for few in (2, 3, 8):
        assert torch.equal(kernels.linear(x[:few], prepared, None), results[0][:few])


@pytest.mark.parametrize("name", ["W8A8", "W4A8"])
def test_bfloat16_outputs_are_the_float32_ones_rounded_to_even(name):
    linear = random_linear(name, (80, 64))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3] = 3e38  # outputs beyond the largest bfloat16 are Inf
    bias = torch.randn(80, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(run(linear, x, bias), run(linear, x.float(), bias.float()).bfloat16())


@pytest.mark.parametrize("name", ["W4A16", "W8A8", "FP8_DYNAMIC"])
def test_scales_that_bfloat16_does_not_hold_are_not_rounded(name):
    linear = random_linear(name, (48, 64), scale_dtype=torch.float32)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    expected = linear.fake_quantize_input(x).double() @ linear.weight.dequantize().double().t()
    assert torch.allclose(
        run(linear, x).double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W8A8", "W4A8", "FP8_DYNAMIC", "W4A16"])
def test_an_infinite_input_leaves_no_finite_output_of_its_token_and_a_zero_token_gives_the_bias(
    name, dtype
):
    linear = random_linear(name, (40, 64))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 5], x[1] = float("inf"), 0
    bias = torch.linspace(-1, 1, 40).to(dtype)
    y = run(linear, x, bias)
    if name == "W4A16":
        # Inf * 0 is NaN, else Inf
        assert torch.equal(~y[0].isfinite(), torch.ones(40, dtype=torch.bool))
    else:
        assert y[0].isnan().all()  # the oracle's, whose scale is Inf
    assert torch.equal(y[1], bias)
    assert y[2].isfinite().all()


def test_four_bit_weights_are_multiplied_without_rounding_them_to_the_dtype_of_the_inputs():
    # Why it exists: with bfloat16 inputs torch's kernel, which rounds, is ten times as far from the
    # product.
    linear = random_linear("W4A16_ASYM", (64, 512))
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ linear.weight.dequantize().double().t()
    errors = []
    for backend in (w4a16, int4_pack):
        y = backend.linear(x, backend.prepare(linear, torch.bfloat16), None).double()
        errors.append((y - exact).abs().mean().item())
    # that of rounding the result
    assert errors[0] <= 1.001 * (exact.bfloat16().double() - exact).abs().mean().item()
    assert errors[0] < errors[1]


def in_groups_by_hand(
    linear: QuantizedLinear, x: torch.Tensor, *, sums: torch.dtype
) -> torch.Tensor:
    """The product x @ W.T with int8 inputs in the groups of the weight.

    Sums are integers; each group's is multiplied once by both scales.

    Args:
        linear: weights of at most 4 bits [O, I], G groups.
        x: [T, I].
        sums: float32 rounds as the kernel does, after a product, and after a product and its sum;
            float64 is all but exact.
    """
    weight, columns = linear.weight, x.shape[1]
    groups = weight.scale.shape[1]
    split = x.float().view(len(x), groups, columns // groups)  # [T, G, g]
    largest = split.abs().amax(dim=-1, keepdim=True)
    # [T, G, 1]
    steps = torch.where(largest > 0, (largest / 127.5).clamp_min(2.0**-126), torch.ones(()))
    codes = (split / steps).round().clamp(-128, 127).long()
    # twice a value of e2m1 is a whole number, and half its scale a float
    factor = 2 if weight.scheme.kind == "float" else 1
    qvalue = (weight.qvalue.float() * factor).long()
    scale = weight.scale.double() / factor
    zero = 0 if weight.zero_point is None else weight.zero_point.long()[..., None]
    whole = torch.einsum("tgi,ogi->tog", codes, qvalue.view(len(qvalue), groups, -1) - zero)
    total = torch.zeros(len(x), len(qvalue), dtype=sums)
    for g in range(groups):
        # [T, O]
        part = (whole[..., g].to(sums) * steps[:, g].to(sums)).double() * scale[:, g]
        total = (part + total.double()).to(sums)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16", "W2A16"])
def test_inputs_rounded_in_groups_give_the_bits_of_the_same_arithmetic_in_torch(dtype, name):
    generator = torch.Generator().manual_seed(3)
    for group_size, shape in ((32, (70, 96)), (64, (33, 192)), (128, (130, 384))):
        linear = random_linear(name, shape)
        linear = (
            random_linear(name, shape)
            if group_size == 32
            else linear_of(
                scheme_of(name, group_size),
                linear.weight.qvalue,
                scale=linear.weight.scale[:, : shape[1] // group_size].contiguous(),
                zero_point=None
                if linear.weight.zero_point is None
                else linear.weight.zero_point[:, : shape[1] // group_size].contiguous(),
            )
        )
        rounded = with_rounded_inputs(linear.scheme)
        assert rounded.input.group_size == group_size
        linear = replace(linear, scheme=rounded)
        # an outlier in each group
        x = torch.randn(29, shape[1], generator=generator) * torch.logspace(-3, 3, shape[1])
        x[3], x[4, :group_size] = 0, 0
        x = x.to(dtype).float()
        expected = in_groups_by_hand(linear, x, sums=torch.float32)
        found = w4a8.linear(x, w4a8.prepare(linear, dtype), None)
        assert torch.equal(found, expected)
        exact = in_groups_by_hand(linear, x, sums=torch.float64)
        assert torch.allclose(found.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())
        oracle = (
            affine.fake_quantize_input(x, rounded.input, None, None).double()
            @ linear.weight.dequantize().double().t()
        )
        assert torch.allclose(oracle, exact, rtol=0, atol=1e-6 * exact.abs().max().item())
        assert torch.equal(
            torch.cat([w4a8.linear(row[None], w4a8.prepare(linear, dtype), None) for row in x]),
            found,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["MXFP4A16", "NVFP4A16"])
@pytest.mark.parametrize("shape", [(70, 96), (33, 192), (130, 416)])
def test_values_of_e2m1_by_rounded_inputs_give_the_bits_of_the_same_arithmetic_in_torch(
    shape, name, dtype
):
    generator = torch.Generator().manual_seed(3)
    linear = random_linear(name, shape, scheme=PRESETS[name])
    rounded = with_rounded_inputs(linear.scheme)
    assert rounded.input.group_size == linear.scheme.weights.group_size
    linear = replace(linear, scheme=rounded)
    x = torch.randn(29, shape[1], generator=generator) * torch.logspace(-3, 3, shape[1])
    x[3], x[4, :32] = 0, 0
    x = x.to(dtype).float()
    prepared = w4a8.prepare(linear, dtype)
    found = w4a8.linear(x, prepared, None)
    assert torch.equal(found, in_groups_by_hand(linear, x, sums=torch.float32))
    exact = in_groups_by_hand(linear, x, sums=torch.float64)
    oracle = linear.fake_quantize_input(x).double() @ linear.weight.dequantize().double().t()
    assert torch.allclose(oracle, exact, rtol=0, atol=1e-6 * exact.abs().max().item())
    assert torch.equal(torch.cat([w4a8.linear(row[None], prepared, None) for row in x]), found)


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 13, 40])
@pytest.mark.parametrize("name", ["MXFP4A16", "NVFP4A16", "W4A16", "W4A16_ASYM"])
def test_the_largest_codes_by_the_largest_inputs_sum_exactly(name, tokens):
    """Sums of few products are kept in 16 bits: 6 * 127 and 15 * -128 at every place."""
    scheme = with_rounded_inputs(
        PRESETS[name] if "FP4" in name else with_group_size(PRESETS[name], 128)
    )
    columns, weights = 256, scheme.weights
    largest = 6 if weights.kind == "float" else 7
    value = torch.full((34, columns), largest, dtype=torch.int8)
    value[::2] *= -1
    zero = None
    if not weights.symmetric:
        zero = torch.full((34, columns // 128), -8, dtype=torch.int8)
    qvalue = value.float().to(torch.float8_e4m3fn) if weights.kind == "float" else value
    linear = linear_of(scheme, qvalue, zero_point=zero)
    x = torch.full((tokens, columns), 127.5)  # the step is 1
    x[1::2] *= -1
    points = value.double() - (0 if zero is None else -8)
    expected = x.clamp(-128, 127).round().double() @ points.t()
    assert torch.equal(run(linear, x).double(), expected)


def test_a_scale_for_each_group_keeps_an_outlier_from_rounding_the_others_away():
    # Why it exists: with one scale per token the outlier makes the step of all.
    linear = random_linear("W4A16", (64, 256))
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 300
    exact = x.double() @ linear.weight.dequantize().double().t()
    errors = {}
    for kind, scheme in {
        "token": replace(linear.scheme, input=PRESETS["W4A8"].input),
        "group": with_rounded_inputs(linear.scheme),
    }.items():
        y = run(replace(linear, scheme=scheme), x).double()
        rest = y - exact - (y - exact).mean()
        errors[kind] = rest.norm().item()
    assert errors["group"] < errors["token"] / 2


# without bfloat16 products, without AVX-512
@pytest.mark.parametrize("flag", [slow("-mno-avx512bf16"), "-march=x86-64-v3"])
def test_an_older_cpu_computes_the_same_in_float32(flag, tmp_path, monkeypatch):
    compiler = tmp_path / "gcc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" {flag}\n')
    compiler.chmod(0o700)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    names = ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "W8A8", "W4A8", "MXFP4A16"]
    linears = {name: random_linear(name, (48, 96)) for name in names}
    rounded = replace(linears["MXFP4A16"], scheme=with_rounded_inputs(PRESETS["MXFP4A16"]))
    linears["MXFP4A16 rounded"] = rounded
    for given in (x, x.float() + 2**-12):  # float32 inputs are rounded here too
        wanted = {name: run_in_float32(linear, given) for name, linear in linears.items()}
        with monkeypatch.context() as patched:
            patched.setenv("CC", str(compiler))
            patched.setenv("QUANTFLOW_CACHE", str(tmp_path / "cache"))
            native._attempt.cache_clear()
            try:
                found = {name: run_in_float32(linear, given) for name, linear in linears.items()}
            finally:
                native._attempt.cache_clear()
        for name in linears:
            assert torch.allclose(
                found[name], wanted[name], rtol=0, atol=1e-6 * wanted[name].abs().max().item()
            )
    assert len(list((tmp_path / "cache").glob("kernels-*.so"))) == 1


def test_a_nan_whose_bits_are_all_set_is_not_rounded_to_a_number():
    x = torch.zeros(1, 64)
    x.view(torch.int32)[0, 3] = 0x7FFFFFFF  # adding half a bfloat16 to it would carry into the sign
    assert (
        kernels.linear(x, kernels.prepare(random_linear("W8A16", (8, 64)), torch.bfloat16), None)
        .isnan()
        .all()
    )


def test_a_copied_module_outlives_the_one_it_was_copied_from():
    linear, x = random_linear("W8A8", (8, 32)), torch.ones(1, 32)
    module = QuantLinear(linear, bias=None, backend=w8a8, dtype=torch.float32)
    expected, copied = module(x), copy.deepcopy(module)
    del module
    gc.collect()
    torch.full((64, 64), -1, dtype=torch.int32)  # what was freed is used again
    assert torch.equal(copied(x), expected)


def test_inputs_that_the_weight_was_not_prepared_for_are_refused():
    prepared = w8a8.prepare(random_linear("W8A8", (8, 32)), torch.float32)
    for x in (
        torch.zeros(2, 32, dtype=torch.bfloat16),
        torch.zeros(2, 31),
        torch.zeros(2, 32, device="meta"),
    ):
        with pytest.raises(
            UsageError,
            match=r"^inputs: .* the weight was prepared for torch.float32 \[..., 32\] on cpu; give",
        ):
            w8a8.linear(x, prepared, None)
    for bias in (torch.zeros(8, dtype=torch.bfloat16), torch.zeros(9), torch.zeros(8, 2)[:, 0]):
        with pytest.raises(
            UsageError, match=r"^bias: .*, inputs and outputs are torch.float32 \[8\]; give"
        ):
            w8a8.linear(torch.zeros(2, 32), prepared, bias)


@pytest.mark.parametrize("name", ["W4A16", "W8A16", "FP8_DYNAMIC", "W8A8"])
def test_float32_inputs_of_a_bfloat16_weight_are_rounded_unless_quantized_and_outputs_are_not(
    name,
):
    linear = random_linear(name, (48, 64))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(48, generator=torch.Generator().manual_seed(2))
    y = kernels.linear(x, kernels.prepare(linear, torch.bfloat16), bias)
    seen = x if linear.scheme.input is not None else x.bfloat16().float()
    expected = (
        linear.fake_quantize_input(seen).double() @ linear.weight.dequantize().double().t() + bias
    )
    assert y.dtype == torch.float32
    assert torch.allclose(y.double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert not torch.equal(y, y.bfloat16().float())


def test_a_row_of_equal_int4_sums_exactly_to_what_an_int32_holds():
    # 15 * 127 * 32768 = 62423040 per channel of 32768 columns, every term at its end.
    weights = TensorScheme(kind="int", num_bits=4, granularity="per_channel", symmetric=False)
    scheme = replace(PRESETS["W4A8"], weights=weights)
    qvalue = torch.full((16, 32768), 7, dtype=torch.int8)
    linear = linear_of(scheme, qvalue, zero_point=torch.full((16, 1), -8, dtype=torch.int8))
    assert run(linear, torch.full((1, 32768), 127.5)).unique().tolist() == [62423040.0]


@pytest.mark.parametrize("tokens", [6, 16, 17, 32, 45, 530])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "group", "columns"),
    [
        ("W8A8", None, 192),
        ("W8A8", None, 1056),  # no multiple of a tile's columns
        ("W8A8", None, 1088),  # a group that goes on in the next chunk of columns
        ("W4A16", 32, 96),
        ("W4A16", 128, 1152),
        ("W4A16_ASYM", 64, 128),
        ("W4A8", 128, 256),
        ("W8A16", None, 256),
        ("W8A16", None, 1056),
        ("W8A16", None, 1040),  # no multiple of a tile's columns of bfloat16
        ("FP8_DYNAMIC", None, 96),
        ("FP8_DYNAMIC", None, 1088),
        ("W4A16 exact", 128, 1152),
        ("W4A16_ASYM exact", 32, 96),
        ("MXFP4A16", None, 96),
        ("MXFP4A16", None, 1152),
        ("MXFP4A16 exact", None, 576),
        ("NVFP4A16", None, 64),
        ("NVFP4A16 exact", None, 64),
    ],
)
def test_many_tokens_get_the_bits_that_each_gets_alone(name, group, columns, dtype, tokens):
    name, _, exact = name.partition(" ")
    scheme = PRESETS[name] if group is None else with_group_size(PRESETS[name], group)
    scheme = scheme if exact else with_rounded_inputs(scheme) or scheme
    linear = random_linear(name, (150, columns), scheme=scheme)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3], x[5, 1] = 0, float("nan")
    prepared = kernels.prepare(linear, dtype)
    bias = torch.randn(150, generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = [kernels.linear(x[t : t + 1], prepared, bias) for t in range(tokens)]
    together = kernels.linear(x, prepared, bias)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0, equal_nan=True)
    assert not torch.isnan(together[:5]).any() and torch.isnan(together[5]).any()


@pytest.mark.parametrize("name", ["W8A16", "W4A16", "FP8_DYNAMIC", "MXFP4A16"])
def test_inputs_next_to_zero_give_many_tokens_the_bits_of_each_alone(name):
    # tiles take subnormals for zeros: of inputs, of products and of sums
    linear = random_linear(name, (32, 128))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-133, -60, (20, 128), generator=generator)
    x = (torch.randn(20, 128, generator=generator) * 2.0**sizes).to(torch.bfloat16)
    prepared = kernels.prepare(linear, torch.bfloat16)
    alone = torch.cat([kernels.linear(x[t : t + 1], prepared, None) for t in range(20)])
    together = kernels.linear(x, prepared, None)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    assert together.float().abs().max() > 0
