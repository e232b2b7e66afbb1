"""NVIDIA's backends without a GPU: reasons, layouts, and arithmetic around replaced products.

Shapes, dtypes and strides go through torch's own checks of these operators on tensors that only
claim to be on a GPU. What they check on the device alone (int4mm.cu, Blas.cpp) is in the stand-ins
below. The last tests need a GPU and are skipped.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from quantflow.algorithms import gptq
from quantflow.backends import BACKENDS, choose, cuda, torch_kernels
from quantflow.backends.backend import Case
from quantflow.core.qtensor import QTensor, QuantizedLinear, quantize_input
from quantflow.core.scheme import PRESETS, LinearScheme, with_float8, with_group_size
from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime.load import load

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
FP8, DYNAMIC = PRESETS["FP8"], PRESETS["FP8_DYNAMIC"]
CHANNEL = replace(FP8, weights=DYNAMIC.weights)  # weights per channel, one scale for all inputs
TENSOR = replace(FP8, input=DYNAMIC.input)  # one scale for all weights, inputs per token
W4 = with_group_size(PRESETS["W4A16"], 32)
W4_ASYM = with_group_size(PRESETS["W4A16_ASYM"], 64)
BLOCK = PRESETS["FP8_BLOCK"]
FLOAT8 = {"static": FP8, "dynamic": DYNAMIC, "channels, static": CHANNEL, "tensor, dynamic": TENSOR}
RUNS = {
    "fp8_mm": (FP8, DYNAMIC, CHANNEL, TENSOR, with_float8(FP8, "gaudi2")),
    "fp8_block_mm": (BLOCK,),
    "int8_mm": (PRESETS["W8A8"], PRESETS["W8A8_STATIC"]),
    "int8_pack": (PRESETS["W8A16"],),
    "int4_pack": (W4, W4_ASYM),
}
OPERATORS = [
    (torch, "_scaled_mm"),
    (torch, "_scaled_mm_v2"),
    (torch, "_int_mm"),
    (torch.ops.aten, "_weight_int8pack_mm"),
]
OPERATORS += [
    (torch.ops.aten, "_convert_weight_to_int4pack"),
    (torch.ops.aten, "_weight_int4pack_mm"),
]
ALL = [
    pytest.param(name, scheme, id=f"{name}-{i}")
    for name, schemes in RUNS.items()
    for i, scheme in enumerate(schemes)
]


@pytest.fixture
def gpu(monkeypatch):
    """Let torch find a GPU of a capability that can be changed."""
    found = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    return found


def shape_for(scheme: LinearScheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Return a shape that has whole blocks where the scheme has blocks."""
    return (
        shape
        if scheme.weights.granularity != "per_block"
        else (-(-shape[0] // 128) * 128, -(-shape[1] // 128) * 128)
    )


def reason(
    name: str, scheme: LinearScheme, *, device=GPU, shape=(48, 128), dtype=torch.bfloat16
) -> str | None:
    return BACKENDS[name].why_not(Case(scheme=scheme, device=device, shape=shape, dtype=dtype))


def quantized(scheme: LinearScheme, shape=(48, 128), *, seed=0) -> QuantizedLinear:
    """Random codes, scales and zero points; bfloat16 holds the scales, which are powers of two."""
    generator, weights = torch.Generator().manual_seed(seed), scheme.weights
    qvalue = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    if weights.kind == "int":
        qvalue = torch.randint(
            weights.qmin, weights.qmax + 1, shape, generator=generator, dtype=torch.int8
        )
    size = (
        (1, 1)
        if weights.granularity == "per_tensor"
        else (shape[0], shape[1] // (weights.group_size or shape[1]))
    )
    scale = torch.exp2(torch.randint(-9, -5, size, generator=generator).float())
    if weights.block_rows > 1:
        scale = scale[:: weights.block_rows].repeat_interleave(weights.block_rows, dim=0)[
            : shape[0]
        ]
    zero_point = (
        None
        if weights.symmetric
        else torch.randint(-8, 8, size, generator=generator, dtype=torch.int8)
    )
    static = scheme.input is not None and not scheme.input.dynamic
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights),
        scheme=scheme,
        input_scale=torch.tensor([2.0**-5]) if static else None,
        input_zero_point=torch.tensor([-11], dtype=torch.int8)
        if static and not scheme.input.symmetric
        else None,
    )


def exact(linear: QuantizedLinear, x, bias=None):
    """Return what the linear is by the equation, in float64."""
    result = (
        linear.fake_quantize_input(x.float()).double() @ linear.weight.dequantize().double().t()
    )
    return result if bias is None else result + bias.double()


# Which linears go, and why the others do not.


@pytest.mark.parametrize(("name", "scheme"), ALL)
def test_on_a_gpu_it_runs_and_auto_takes_it(gpu, name, scheme):
    shape = shape_for(scheme, (48, 128))
    assert reason(name, scheme, shape=shape) is None
    assert (
        choose(Case(scheme=scheme, device=GPU, shape=shape, dtype=torch.bfloat16))[0].name == name
    )


@pytest.mark.parametrize(("name", "scheme"), ALL)
def test_without_a_gpu_the_reason_is_that_torch_finds_none(name, scheme, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        reason(name, scheme)
        == f"{name} needs a GPU by NVIDIA, torch {torch.__version__} finds none"
    )


def test_a_gpu_by_another_maker_has_no_such_kernels(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # torch for AMD calls its devices cuda too
    assert "needs a GPU by NVIDIA" in reason("int4_pack", W4)


@pytest.mark.parametrize(("name", "scheme"), ALL)
def test_an_older_gpu_is_refused_with_its_capability(gpu, name, scheme):
    gpu.capability = (7, 5)
    needed = {"fp8_mm": "8.9", "fp8_block_mm": "9.0"}.get(name, "8.0")
    shape = shape_for(scheme, (48, 128))
    assert (
        reason(name, scheme, shape=shape)
        == f"{name} needs compute capability {needed}, cuda:0 has 7.5"
    )
    gpu.capability = (8, 0)
    assert (reason(name, scheme, shape=shape) is None) == (needed == "8.0")


def test_blocks_are_multiplied_by_capability_9_and_cuda_12_9_alone(gpu, monkeypatch):
    gpu.capability = (10, 0)
    assert (
        reason("fp8_block_mm", BLOCK, shape=(128, 128))
        == "fp8_block_mm needs compute capability 9, cuda:0 has 10.0"
    )
    gpu.capability = (9, 0)
    for version, said in (
        ("12.8", "fp8_block_mm needs CUDA 12.9, torch is built for 12.8"),
        ("12.9", None),
        ("13.0", None),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert reason("fp8_block_mm", BLOCK, shape=(128, 128)) == said


REASONS = [
    ("fp8_mm", FP8, {"device": CPU}, "fp8_mm runs on cuda, not on cpu"),
    (
        "fp8_mm",
        PRESETS["W8A8"],
        {},
        "fp8_mm needs e4m3fn weights, scheme W8A8 has int8 per channel",
    ),
    (
        "fp8_mm",
        with_float8(FP8, "e5m2"),
        {},
        "fp8_mm needs e4m3fn weights, scheme FP8 has e5m2 per tensor",
    ),
    (
        "fp8_mm",
        PRESETS["FP8_BLOCK"],
        {},
        "fp8_mm needs weights per tensor or per channel, scheme FP8_BLOCK has e4m3fn per block",
    ),
    (
        "fp8_mm",
        replace(FP8, input=None),
        {},
        "fp8_mm needs e4m3fn inputs, scheme FP8 has none",
    ),
    (
        "fp8_mm",
        FP8,
        {"dtype": torch.float32},
        "fp8_mm needs bfloat16 inputs on cuda, not torch.float32",
    ),
    ("fp8_mm", FP8, {"shape": (48, 40)}, "fp8_mm needs in_features that 16 divides, not 40"),
    ("fp8_mm", FP8, {"shape": (40, 48)}, "fp8_mm needs out_features that 16 divides, not 40"),
    (
        "fp8_block_mm",
        FP8,
        {},
        "fp8_block_mm needs weights per block, scheme FP8 has e4m3fn per tensor",
    ),
    (
        "fp8_block_mm",
        replace(BLOCK, input=DYNAMIC.input),
        {},
        "fp8_block_mm needs e4m3fn inputs in groups of 128, scheme FP8_BLOCK has e4m3fn per token",
    ),
    (
        "fp8_block_mm",
        BLOCK,
        {"shape": (48, 128)},
        "fp8_block_mm needs out_features that 128 divides, not 48",
    ),
    (
        "fp8_block_mm",
        BLOCK,
        {"shape": (128, 192)},
        "fp8_block_mm needs in_features that 128 divides, not 192",
    ),
    (
        "int8_mm",
        PRESETS["W8A8"],
        {"shape": (48, 100)},
        "int8_mm needs in_features that 8 divides on cuda, not 100",
    ),
    (
        "int8_mm",
        PRESETS["W8A8"],
        {"shape": (49, 128)},
        "int8_mm needs out_features that 8 divides on cuda, not 49",
    ),
    (
        "int4_pack",
        W4,
        {"dtype": torch.float32},
        "int4_pack needs bfloat16 inputs on cuda, not torch.float32",
    ),
    ("int4_pack", W4, {"shape": (24, 128)}, "int4_pack needs out_features that 16 divides, not 24"),
    (
        "int4_pack",
        W4,
        {"shape": (48, 48)},
        "int4_pack needs in_features that group_size 32 divides, not 48",
    ),
    (
        "int8_pack",
        PRESETS["W8A16"],
        {"shape": (48, 100)},
        "int8_pack needs in_features that 16 divides, not 100",
    ),
    ("w8a8", PRESETS["W8A8"], {}, "w8a8 runs on cpu, not on cuda"),
]


@pytest.mark.parametrize(
    ("name", "scheme", "changed", "said"), REASONS, ids=[case[3] for case in REASONS]
)
def test_the_reason_says_what_is_needed_and_what_is_there(gpu, name, scheme, changed, said):
    assert reason(name, scheme, **changed) == said


def test_features_in_eights_are_needed_on_a_gpu_alone():
    assert reason("int8_mm", PRESETS["W8A8"], device=CPU, shape=(3, 5)) is None


def test_loading_for_a_gpu_without_one_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"device cuda: needs a GPU, torch .* finds none; use device cpu"
    ):
        load(tmp_path / "missing", device="cuda")


def test_a_device_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(UsageError, match="device mps is unknown; use one of cpu, cuda, xpu, hpu"):
        load(tmp_path / "missing", device="mps")


# What torch checks of shapes, dtypes and strides.


def checked(operator):
    """An operator that asks torch's own checks about GPU tensors of these shapes and strides."""

    def claimed(value):
        if isinstance(value, list):
            return [claimed(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    def run(*args, **options):
        with FakeTensorMode():
            result = operator(
                *map(claimed, args), **{name: claimed(value) for name, value in options.items()}
            )
        return torch.zeros(result.shape, dtype=result.dtype)

    run.default = getattr(operator, "default", None)  # torch looks its own operators up by it
    return run


@pytest.mark.parametrize(("name", "scheme"), ALL)
@pytest.mark.parametrize("lead", [(1,), (2, 5), (40,)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(48, 128), (16, 64), (128, 192)], ids=str)
def test_torch_accepts_what_goes_into_its_operators(name, scheme, lead, biased, shape, monkeypatch):
    monkeypatch.setattr(torch_kernels, "on_gpu", lambda tensor: True)
    for owner, operator in OPERATORS:
        monkeypatch.setattr(owner, operator, checked(getattr(owner, operator)))
    shape = shape_for(scheme, shape)
    linear, backend = quantized(scheme, shape), BACKENDS[name]
    bias = torch.zeros(shape[0], dtype=torch.bfloat16) if biased else None
    x = torch.zeros(*lead, shape[1], dtype=torch.bfloat16)
    y = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert (y.shape, y.dtype) == ((*lead, shape[0]), torch.bfloat16)


# The arithmetic, with the product replaced by an exact one that checks what the device's checks.


def scaled_mm(codes, weight, scale, weight_scale, *, bias, out_dtype):
    """torch._scaled_mm by its documentation, in float64."""
    assert codes.dtype == weight.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    assert codes.stride()[1] == 1 and weight.stride()[0] == 1  # row-major by column-major
    assert scale.dtype == weight_scale.dtype == torch.float32
    rowwise = scale.shape == (len(codes), 1) and weight_scale.shape == (1, weight.shape[1])
    assert (scale.numel() == weight_scale.numel() == 1) or (
        rowwise and scale.is_contiguous() and weight_scale.is_contiguous()
    )
    result = (codes.double() @ weight.double()) * scale.double() * weight_scale.double()
    return (result if bias is None else result + bias.double()).to(out_dtype)


@pytest.mark.parametrize("scheme", FLOAT8.values(), ids=FLOAT8)
@pytest.mark.parametrize("lead", [(1,), (3,), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_float8_products_are_those_of_the_equation(scheme, lead, biased, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    linear, backend = quantized(scheme), BACKENDS["fp8_mm"]
    x = torch.randn(*lead, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.linspace(-1, 1, 48).bfloat16() if biased else None
    y = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert y.shape == (*lead, 48)
    # The rounding to bfloat16 alone; the oracle's fake-quantized input is compared in float32, so
    # nothing else rounds.
    assert torch.allclose(y.double(), exact(linear, x, bias), rtol=2**-8, atol=2**-16)


def scaled_mm_of_blocks(codes, weight, scale, recipe, weight_scale, weight_recipe, *, output_dtype):
    """torch.nn.functional.scaled_mm by its documentation and ScaledBlas.cpp, in float64."""
    (tokens, columns), rows = codes.shape, weight.shape[1]
    assert codes.dtype == weight.dtype == torch.float8_e4m3fn and output_dtype == torch.bfloat16
    assert codes.stride()[1] == 1 and weight.stride()[0] == 1 and tokens % 16 == 0
    assert (recipe, weight_recipe) == (
        functional.ScalingType.BlockWise1x128,
        functional.ScalingType.BlockWise128x128,
    )
    blocks = columns // 128
    fours = -(-blocks // 4) * 4
    assert (scale.shape, scale.stride(0), scale.dtype) == ((tokens, blocks), 1, torch.float32)
    assert scale.stride(1) == (tokens if blocks > 1 else 1)
    assert (weight_scale.shape, weight_scale.stride(0), weight_scale.dtype) == (
        (fours, rows // 128),
        1,
        torch.float32,
    )
    assert weight_scale.stride(1) == fours or weight_scale.shape[1] == 1
    x = codes.double().reshape(tokens, blocks, 128) * scale.double()[..., None]
    w = (
        weight.t().double().reshape(rows // 128, 128, blocks, 128)
        * weight_scale[:blocks].t().double()[:, None, :, None]
    )
    return (x.reshape(tokens, columns) @ w.reshape(rows, columns).t()).to(output_dtype)


# one block and five, which are padded to eight
@pytest.mark.parametrize("shape", [(128, 128), (256, 640)], ids=str)
@pytest.mark.parametrize("lead", [(1,), (2, 5), (16,), (0,)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_blocks_are_those_of_the_equation(shape, lead, biased, monkeypatch):
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm_of_blocks)
    linear, backend = quantized(BLOCK, shape), BACKENDS["fp8_block_mm"]
    x = torch.randn(*lead, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.linspace(-1, 1, shape[0]).bfloat16() if biased else None
    y = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert y.shape == (*lead, shape[0])
    expected = exact(linear, x, bias)
    # The product is rounded to bfloat16, and with a bias the sum once more.
    assert torch.allclose(
        y.double(), expected, rtol=2**-7 if biased else 2**-8, atol=2**-7 if biased else 2**-16
    )


def test_a_float8_product_worked_by_hand(monkeypatch):
    # scale_x 2^-5: 0.25 -> 8, -1 -> -32; weights 1.5 and 0.25, scale 2^-2: (8 * 1.5 - 32 * 0.25) *
    # 2^-7 + 1 = 1.03125
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    qvalue = torch.tensor([[1.5, 0.25]]).to(torch.float8_e4m3fn)
    weight = QTensor(qvalue=qvalue, scale=torch.tensor([[0.25]]), scheme=FP8.weights)
    linear = QuantizedLinear(weight=weight, scheme=FP8, input_scale=torch.tensor([2.0**-5]))
    backend = BACKENDS["fp8_mm"]
    x = torch.tensor([[0.25, -1.0]], dtype=torch.bfloat16)
    assert backend.linear(
        x, backend.prepare(linear, torch.bfloat16), torch.ones(1).bfloat16()
    ).tolist() == [[1.03125]]


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The GPU's branches on CPU tensors; operators are replaced after int4mm.cu and Blas.cpp."""
    multiply = torch._int_mm

    def int_mm(a, b):
        assert len(a) > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        return multiply(a, b)

    monkeypatch.setattr(torch_kernels, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", to_tiles)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", tile_product)


def to_tiles(codes, side_by_side):
    """Pack as matrix_to_m16n8k16_Bint4_layout of int4mm.cu.

    codes: [n, k / 2], the even column in the upper half of a byte.

    Lane t of 32 holds row t / 4 of 8, and of each pair of tiles of 16 columns the bytes t % 4 and t
    % 4 + 4 of both. The four upper halves are the low 16 bits, the lower ones the high.
    """
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and side_by_side in (2, 4, 8)
    n, k = codes.shape[0], 2 * codes.shape[1]
    assert n % 8 == 0 and k % (16 * side_by_side) == 0
    out = torch.empty(n // 8, k // (16 * side_by_side), 32, side_by_side // 2, dtype=torch.int32)
    for tile, outer, lane, inner in torch.cartesian_prod(
        *(torch.arange(size) for size in out.shape)
    ).tolist():
        first = (outer * side_by_side + 2 * inner) * 8 + lane % 4
        four = [int(codes[tile * 8 + lane // 4, first + step]) for step in (0, 4, 8, 12)]
        word = sum((byte >> 4) << 4 * i | (byte & 15) << 4 * i + 16 for i, byte in enumerate(four))
        out[tile, outer, lane, inner] = word - (1 << 32 if word >> 31 else 0)
    return out


def tile_product(x, packed, group_size, scale_and_zero):
    """Multiply by the weight that tensor cores read: (code - 8) * scale + zero, in float64."""
    assert (
        x.dtype == scale_and_zero.dtype == torch.bfloat16
        and x.is_contiguous()
        and scale_and_zero.is_contiguous()
    )
    tiles, outers, _, halves = packed.shape
    n, k = tiles * 8, x.shape[1]
    assert outers == k // (32 * halves) and scale_and_zero.shape == (k // group_size, n, 2)
    # mma.m16n8k16 wants of each lane, for its row of 8, columns 2 (t % 4) + {0, 1} and 8 + 2 (t %
    # 4) + {0, 1} of a tile. A word holds them for two tiles; widening takes nibbles 0 and 4, 1 and
    # 5, 2 and 6, 3 and 7 as pairs of neighbours.
    weight = torch.empty(n, k, dtype=torch.float64)
    for tile, outer, lane, half in torch.cartesian_prod(
        *(torch.arange(size) for size in packed.shape)
    ).tolist():
        word = int(packed[tile, outer, lane, half])
        for pair in range(4):
            column = (
                (outer * 2 * halves + 2 * half + pair // 2) * 16 + 8 * (pair % 2) + 2 * (lane % 4)
            )
            for odd in (0, 1):
                code = word >> 4 * (pair + 4 * odd) & 15
                scale, zero = scale_and_zero[
                    (column + odd) // group_size, tile * 8 + lane // 4
                ].double()
                weight[tile * 8 + lane // 4, column + odd] = (code - 8) * scale + zero
    return (x.double() @ weight.t()).to(torch.bfloat16)


@pytest.mark.parametrize("scheme", [W4, W4_ASYM], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("columns", [64, 128, 192, 320], ids=str)  # tiles by 4, 8, 4 and 4
def test_int4_tiles_hold_the_weight_where_tensor_cores_look_for_it(as_on_gpu, scheme, columns):
    linear, backend = quantized(scheme, (16, columns)), BACKENDS["int4_pack"]
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = backend.linear(x, backend.prepare(linear, torch.bfloat16), None)
    assert torch.allclose(y.double(), exact(linear, x), rtol=2**-8, atol=0)


@pytest.mark.parametrize(("columns", "inner"), [(32, 2), (96, 2), (64, 4), (128, 8), (384, 8)])
def test_as_many_tiles_lie_side_by_side_as_the_columns_allow(as_on_gpu, columns, inner):
    packed, *_ = BACKENDS["int4_pack"].prepare(quantized(W4, (16, columns)), torch.bfloat16)
    assert packed.shape == (2, columns // (16 * inner), 32, inner // 2)


@pytest.mark.parametrize("preset", ["W8A8", "W8A8_STATIC"])
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 40])
def test_few_tokens_are_padded_for_a_gpu_and_the_padding_is_taken_off(as_on_gpu, preset, tokens):
    linear, backend = quantized(PRESETS[preset]), BACKENDS["int8_mm"]
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1))
    y = backend.linear(x, backend.prepare(linear, torch.float32), None)
    assert y.shape == (tokens, 48)
    assert torch.allclose(y.double(), exact(linear, x), rtol=1e-5, atol=1e-6)


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch finds none")
@pytest.mark.parametrize(("name", "scheme"), ALL)
@pytest.mark.parametrize("lead", [(1,), (2, 5), (40,)], ids=str)
@pytest.mark.parametrize("shape", [(48, 128), (256, 512)], ids=str)
def test_on_a_gpu_it_agrees_with_the_equation(name, scheme, lead, shape):
    shape = shape_for(scheme, shape)
    said = reason(name, scheme, shape=shape)
    if said is not None:
        pytest.skip(said)
    linear, backend = quantized(scheme, shape), BACKENDS[name]
    x = torch.randn(*lead, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.linspace(-1, 1, shape[0]).bfloat16()
    y = backend.linear(x.to(GPU), backend.prepare(linear.to(GPU), torch.bfloat16), bias.to(GPU))
    size = (
        linear.fake_quantize_input(x.float()).abs().double()
        @ linear.weight.dequantize().abs().double().t()
        + bias.abs()
    )
    assert ((y.cpu().double() - exact(linear, x, bias)).abs() <= 2**-7 * size).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch finds none")
def test_on_a_gpu_a_captured_step_is_repeated_on_the_same_tensors():
    x, y = torch.zeros(4, device=GPU), torch.zeros(4, device=GPU)
    replay = cuda.capture(lambda: y.copy_(2 * x), device=GPU)
    for value in (1.0, 3.0):
        x.fill_(value)
        assert replay().tolist() == [2 * value] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch finds none")
@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "W8A8", "W8A8_STATIC"])
def test_on_a_gpu_an_input_is_rounded_to_the_bits_of_the_cpu(name):
    scheme = PRESETS[name].input
    x = torch.randn(37, 2500, generator=torch.Generator().manual_seed(1))
    x = (x * 10 ** torch.linspace(-9, 4, 2500)).bfloat16()
    scale = None if scheme.dynamic else torch.tensor([0.03])
    zero = None if scheme.symmetric else torch.tensor([-11], dtype=torch.int8)
    expected = quantize_input(x, scheme, scale, zero)
    there = (None if each is None else each.to(GPU) for each in (scale, zero))
    for found, wanted in zip(quantize_input(x.to(GPU), scheme, *there), expected, strict=True):
        assert torch.equal(found.cpu().view(torch.int8), wanted.view(torch.int8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch finds none")
@pytest.mark.parametrize("scheme", [W4, W4_ASYM, PRESETS["W8A16"]], ids=lambda each: each.name)
def test_on_a_gpu_gptq_takes_the_cpus_decisions_and_the_same_ones_again(scheme):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2000, 320, generator=generator) @ torch.randn(320, 320, generator=generator)
    weights = {name: torch.randn(rows, 320, generator=generator) for name, rows in [("q", 300)]}
    hessian, count = x.T @ x, torch.tensor(len(x))

    def rounded(device):
        results = gptq.quantize_group(
            {name: weight.to(device) for name, weight in weights.items()},
            scheme,
            statistics={"hessian_sum": hessian.to(device), "count": count},
            scale_dtype=torch.bfloat16,
        )
        return results["q"].weight.qvalue.cpu()

    there = rounded(GPU)
    assert torch.equal(there, rounded(GPU))
    assert (there == rounded(CPU)).double().mean() >= 0.999
