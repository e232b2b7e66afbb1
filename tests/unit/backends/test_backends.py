"""Every kernel against the oracle, the oracle against float64, and the reasons not to run."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.backends import BACKENDS, choose, kernels, native
from quantflow.backends.backend import Case
from quantflow.core import float8
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, LinearScheme, TensorScheme, with_float8, with_group_size
from quantflow.errors import UsageError

# as preferred
_, _, _, _, _, w8a8, w4a8, w4a16, w8a16, fp8, mx, _, int8_mm, int4_pack, int8_pack, reference = (
    BACKENDS.values()
)
CPU = torch.device("cpu")
W4 = with_group_size(PRESETS["W4A16"], 32)
W4_ASYM = with_group_size(PRESETS["W4A16_ASYM"], 32)
W4A8 = with_group_size(PRESETS["W4A8"], 32)
W4A8_ASYM = replace(W4A8, weights=W4_ASYM.weights)
W3 = with_group_size(PRESETS["W3A16"], 32)
NVFP4, MXFP4, MXFP8 = (PRESETS[name] for name in ("NVFP4A16", "MXFP4A16", "MXFP8A16"))
W2 = with_group_size(PRESETS["W2A16_ASYM"], 32)
BLOCK = with_group_size(PRESETS["FP8_BLOCK"], 32)
CHANNEL = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
TENSOR = TensorScheme(kind="int", num_bits=4, granularity="per_tensor", symmetric=False)
W4_CHANNEL, W4A8_CHANNEL = replace(W4, weights=CHANNEL), replace(W4A8, weights=CHANNEL)
NO_KERNELS = native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS)


def quantized(
    scheme: LinearScheme, shape: tuple[int, int], *, seed: int = 0, qvalue=None
) -> QuantizedLinear:
    """A linear with random or given qvalues, scales of either sign if allowed, and zero points."""
    generator = torch.Generator().manual_seed(seed)
    weights = scheme.weights
    if qvalue is None and weights.kind == "int":
        qvalue = torch.randint(
            weights.qmin, weights.qmax + 1, shape, generator=generator, dtype=torch.int8
        )
    elif qvalue is None:
        qvalue = float8.cast(torch.randn(shape, generator=generator), weights.float8)
    groups = shape[1] // (weights.group_size or shape[1])
    scale_shape = (1, 1) if weights.granularity == "per_tensor" else (shape[0], groups)
    scale = torch.rand(scale_shape, generator=generator).add(0.1).bfloat16().float() * 2**-7
    zero_point = None
    if weights.kind == "int" and weights.symmetric:
        scale *= 2 * torch.randint(0, 2, scale_shape, generator=generator) - 1
    if not weights.symmetric:
        zero_point = torch.randint(
            weights.qmin, weights.qmax + 1, scale_shape, generator=generator, dtype=torch.int8
        )
    static = scheme.input is not None and scheme.input.measured
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights),
        scheme=scheme,
        input_scale=torch.tensor([0.03]) if static else None,
        input_zero_point=torch.tensor([-11], dtype=torch.int8)
        if static and not scheme.input.symmetric
        else None,
    )


def inputs(kind: str, shape: tuple[int, ...], *, seed: int = 1) -> torch.Tensor:
    """Return inputs that a kernel could trip over."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "outliers":
        x[..., 0] = 3e4
    elif kind == "zeros":
        x[..., 0, :] = 0
    elif kind == "saturated":
        x = x.sign() * 1e4
    elif kind == "tiny":
        x *= 1e-30
    return x


def agree(backend, linear: QuantizedLinear, x: torch.Tensor, *, bias=None) -> None:
    """Check a backend against the oracle in float32 and bfloat16.

    The bound is the rounding of sums of |x| @ |W|.
    """
    weight = linear.weight.dequantize()
    for dtype, tolerance in (
        (torch.float32, 2**-24 * (64 + weight.shape[1] / 4)),
        (torch.bfloat16, 2e-2),
    ):
        reason = backend.why_not(
            Case(scheme=linear.scheme, device=CPU, shape=tuple(weight.shape), dtype=dtype)
        )
        assert reason is None
        given_x = x.to(dtype)
        given_bias = None if bias is None else bias.to(dtype)
        expected = reference.linear(given_x, reference.prepare(linear, dtype), given_bias)
        actual = backend.linear(given_x, backend.prepare(linear, dtype), given_bias)
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        size = linear.fake_quantize_input(given_x).float().abs() @ weight.abs().t()
        size = size + (0 if bias is None else bias.abs())
        assert ((actual.float() - expected.float()).abs() <= tolerance * size).all()


TORCH = [
    (int8_mm, PRESETS["W8A8"]),
    (int8_mm, PRESETS["W8A8_STATIC"]),
    (int8_pack, PRESETS["W8A16"]),
    (int4_pack, W4),
    (int4_pack, W4_ASYM),
]
OURS = [
    (w8a8, PRESETS["W8A8"]),
    (w8a8, PRESETS["W8A8_STATIC"]),
    (w8a16, PRESETS["W8A16"]),
    (w4a8, W4A8),
    (w4a8, W4A8_ASYM),
    (w4a8, W4A8_CHANNEL),
    (w4a16, W4),
    (w4a16, W4_ASYM),
    (w4a16, W4_CHANNEL),
    (w4a16, replace(W4, weights=TENSOR)),
    (w8a16, with_group_size(PRESETS["W6A16_ASYM"], 32)),
    (w8a16, with_group_size(PRESETS["W5A16"], 32)),
    (w8a16, replace(W4, weights=replace(W4.weights, num_bits=8))),
    (w8a8, replace(W4A8, weights=replace(W4.weights, num_bits=8))),
    (fp8, replace(PRESETS["FP8_DYNAMIC"], input=None)),
    (w4a16, W3),
    (w4a16, W2),
    (mx, NVFP4),
    (mx, MXFP4),
    (mx, MXFP8),
    (fp8, PRESETS["FP8"]),
    (fp8, PRESETS["FP8_DYNAMIC"]),
    (fp8, BLOCK),
]


def cases(pairs):
    """Pairs of backend and scheme as parameters.

    Our own kernels are skipped, with the reason, where they cannot run.
    """
    skipped = pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
    names = [
        (f"{b.name}-{s.name}-{s.weights.granularity}-{'' if s.weights.symmetric else 'a'}symmetric")
        for b, s in pairs
    ]
    marks = [[skipped] if pair in OURS else [] for pair in pairs]
    return [
        pytest.param(*pair, marks=m, id=name)
        for pair, m, name in zip(pairs, marks, names, strict=True)
    ]


CASES = cases([*TORCH, *OURS])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_oracle_multiplies_the_fake_quantized_input_with_the_dequantized_weight(preset):
    linear = quantized(PRESETS[preset], (3, 128))
    x = inputs("random", (5, 128))
    expected = linear.fake_quantize_input(x).double() @ linear.weight.dequantize().double().t() + 1
    actual = reference.linear(x, reference.prepare(linear, torch.float32), torch.ones(3))
    assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_product_worked_by_hand_comes_out_of_the_oracle_and_of_int8_mm():
    # Input row [127.5, -127.5]: scale 1, qvalues 127.5 -> clamp(128) = 127 and -128. Weight [3, 5]
    # * 0.5. 1 * 0.5 * (127 * 3 - 128 * 5) = -129.5
    scheme = PRESETS["W8A8"]
    weight = QTensor(
        qvalue=torch.tensor([[3, 5]], dtype=torch.int8),
        scale=torch.tensor([[0.5]]),
        scheme=scheme.weights,
    )
    linear = QuantizedLinear(weight=weight, scheme=scheme)
    x = torch.tensor([[127.5, -127.5]])
    for backend in (reference, int8_mm):
        assert backend.linear(x, backend.prepare(linear, torch.float32), None).tolist() == [
            [-129.5]
        ]


def test_the_zero_point_of_an_input_is_taken_out_of_the_integer_product_by_hand():
    # scale 0.03, zero_point -11: x = 0.3 -> 10 - 11 = -1, x = 0 -> -11. Real values 0.3 and 0;
    # weight [2, 100] * 1.
    scheme = PRESETS["W8A8_STATIC"]
    weight = QTensor(
        qvalue=torch.tensor([[2, 100]], dtype=torch.int8),
        scale=torch.tensor([[1.0]]),
        scheme=scheme.weights,
    )
    linear = QuantizedLinear(
        weight=weight,
        scheme=scheme,
        input_scale=torch.tensor([0.03]),
        input_zero_point=torch.tensor([-11], dtype=torch.int8),
    )
    actual = int8_mm.linear(
        torch.tensor([[0.3, 0.0]]), int8_mm.prepare(linear, torch.float32), None
    )
    assert actual.item() == pytest.approx(0.6)


@pytest.mark.parametrize(("backend", "scheme"), CASES)
@pytest.mark.parametrize("kind", ["random", "outliers", "zeros", "saturated", "tiny"])
@pytest.mark.parametrize(
    "shape", [(1, 128), (2, 3, 128), (67, 128)], ids=["one token", "batch", "many tokens"]
)
def test_a_kernel_agrees_with_the_oracle_on_such_inputs(backend, scheme, kind, shape):
    agree(
        backend, quantized(scheme, (48, 128)), inputs(kind, shape), bias=torch.linspace(-1, 1, 48)
    )


@pytest.mark.parametrize(
    ("backend", "scheme"), cases([pair for pair in [*TORCH, *OURS] if pair[0] not in (fp8, mx)])
)
@pytest.mark.parametrize("end", ["qmin", "qmax"])
def test_a_kernel_does_not_saturate_its_sums_when_every_qvalue_is_at_the_end_of_its_range(
    backend, scheme, end
):
    qvalue = torch.full((16, 4096), getattr(scheme.weights, end), dtype=torch.int8)
    for sign in (1, -1):
        agree(
            backend,
            quantized(scheme, (16, 4096), qvalue=qvalue),
            sign * torch.full((2, 4096), 3.75),
        )


@settings(max_examples=12)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 40),
    columns=st.integers(2, 130),
    seed=st.integers(0, 2**20),
)
def test_int8_mm_agrees_with_the_oracle_at_any_shape(rows, outputs, columns, seed):
    for preset in ("W8A8", "W8A8_STATIC"):
        linear = quantized(PRESETS[preset], (outputs, columns), seed=seed)
        agree(int8_mm, linear, inputs("random", (rows, columns), seed=seed))


@settings(max_examples=12)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 40),
    tiles=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_int8_pack_agrees_with_the_oracle_at_any_shape_it_accepts(rows, outputs, tiles, seed):
    linear = quantized(PRESETS["W8A16"], (outputs, 16 * tiles), seed=seed)
    agree(int8_pack, linear, inputs("random", (rows, 16 * tiles), seed=seed))


@settings(max_examples=12)
@given(
    rows=st.integers(1, 40),
    tiles=st.integers(1, 4),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 128, 256]),
    seed=st.integers(0, 2**20),
)
def test_int4_pack_agrees_with_the_oracle_at_any_shape_it_accepts(
    rows, tiles, groups, group_size, seed
):
    for preset in ("W4A16", "W4A16_ASYM"):
        linear = quantized(
            with_group_size(PRESETS[preset], group_size),
            (16 * tiles, groups * group_size),
            seed=seed,
        )
        agree(int4_pack, linear, inputs("random", (rows, groups * group_size), seed=seed))


@pytest.mark.parametrize(("backend", "scheme"), CASES)
def test_no_tokens_and_strided_inputs_are_handled(backend, scheme):
    linear = quantized(scheme, (16, 64))
    assert backend.linear(
        torch.zeros(0, 64), backend.prepare(linear, torch.float32), None
    ).shape == (0, 16)
    agree(backend, linear, inputs("random", (64, 7)).t())


@pytest.mark.parametrize(("backend", "scheme"), cases([(int8_mm, PRESETS["W8A8"]), *OURS]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_an_input_reaches_the_output_of_its_token_only(backend, scheme, dtype):
    linear = quantized(scheme, (8, 32))
    x = inputs("random", (2, 32)).to(dtype)
    x[1, 3] = float("nan")
    y = backend.linear(x, backend.prepare(linear, dtype), None)
    assert y[1].isnan().all()
    assert not y[0].isnan().any()


@pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
@settings(max_examples=15)
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 140),
    columns=st.integers(1, 130),
    seed=st.integers(0, 2**20),
)
def test_our_own_kernels_agree_with_the_oracle_at_any_shape(rows, outputs, columns, seed):
    for backend, scheme in OURS:
        if scheme.weights.group_size is None:
            linear = quantized(scheme, (outputs, columns), seed=seed)
            agree(
                backend,
                linear,
                inputs("random", (rows, columns), seed=seed),
                bias=torch.linspace(-1, 1, outputs),
            )


@pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 140),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([16, 32, 48, 64, 128]),
    seed=st.integers(0, 2**20),
)
def test_our_own_kernels_agree_with_the_oracle_in_any_groups(
    rows, outputs, groups, group_size, seed
):
    for backend, scheme in OURS:
        if scheme.weights.group_size is not None and scheme.weights.scale_format == "float":
            linear = quantized(
                with_group_size(scheme, group_size), (outputs, groups * group_size), seed=seed
            )
            agree(backend, linear, inputs("random", (rows, groups * group_size), seed=seed))


REASONS = [
    (
        int8_mm,
        PRESETS["W8A16"],
        (16, 64),
        torch.float32,
        "int8_mm needs int8 inputs, scheme W8A16 has none",
    ),
    (
        int8_mm,
        PRESETS["FP8"],
        (16, 64),
        torch.float32,
        "int8_mm needs symmetric int8 weights, scheme FP8 has e4m3fn per tensor",
    ),
    (
        int8_mm,
        PRESETS["W8A8"],
        (16, 1),
        torch.float32,
        "int8_mm needs 2 or more input features, torch's kernel returns wrong sums for 1",
    ),
    (
        int8_mm,
        PRESETS["W8A8"],
        (16, 70000),
        torch.float32,
        "int8_mm sums in int32, which holds 65793 input features, not 70000",
    ),
    (
        int8_pack,
        PRESETS["W8A16"],
        (16, 100),
        torch.bfloat16,
        "int8_pack needs in_features that 16 divides, not 100",
    ),
    (
        int8_pack,
        PRESETS["W8A16"],
        (16, 64),
        torch.float16,
        "int8_pack needs float32 or bfloat16 inputs, not torch.float16",
    ),
    (
        int8_pack,
        PRESETS["W8A8"],
        (16, 64),
        torch.float32,
        "int8_pack needs inputs in the model's dtype, scheme W8A8 has int8 per token",
    ),
    (
        int8_pack,
        W4,
        (16, 64),
        torch.float32,
        "int8_pack needs symmetric int8 weights, scheme W4A16 has int4 per group",
    ),
    (
        w8a8,
        PRESETS["W8A16"],
        (16, 64),
        torch.float32,
        "w8a8 needs int8 inputs, scheme W8A16 has none",
    ),
    (
        w8a8,
        PRESETS["FP8"],
        (16, 64),
        torch.float32,
        "w8a8 needs symmetric int8 weights, scheme FP8 has e4m3fn per tensor",
    ),
    (
        w8a16,
        PRESETS["W8A8"],
        (16, 64),
        torch.float32,
        "w8a16 needs inputs in the model's dtype, scheme W8A8 has int8 per token",
    ),
    (
        w8a16,
        W4,
        (16, 64),
        torch.float32,
        "w8a16 needs symmetric int8 weights, or 5 or 6 bits, scheme W4A16 has int4 per group",
    ),
    (w4a8, W4, (16, 64), torch.float32, "w4a8 needs int8 inputs, scheme W4A16 has none"),
    (
        w4a8,
        PRESETS["W8A8"],
        (16, 64),
        torch.float32,
        "w4a8 needs weights of at most 4 bits, integers or e2m1, scheme W8A8 has int8 per channel",
    ),
    (
        w4a16,
        W4A8,
        (16, 64),
        torch.float32,
        "w4a16 needs inputs in the model's dtype, scheme W4A8 has int8 per token",
    ),
    (
        w4a16,
        PRESETS["FP8"],
        (16, 64),
        torch.float32,
        "w4a16 needs integer weights of at most 4 bits, scheme FP8 has e4m3fn per tensor",
    ),
    (
        w4a16,
        with_group_size(W4, 24),
        (16, 48),
        torch.float32,
        "w4a16 needs groups that 16 divides, not group_size 24",
    ),
    (fp8, W4, (16, 64), torch.float32, "fp8 needs e4m3fn weights, scheme W4A16 has int4 per group"),
    (
        fp8,
        with_float8(PRESETS["FP8"], "e5m2"),
        (16, 64),
        torch.float32,
        "fp8 needs e4m3fn weights, scheme FP8 has e5m2 per tensor",
    ),
    (
        w8a8,
        PRESETS["W8A8"],
        (16, 43805),
        torch.float32,
        "w8a8 sums in int32, which holds 43804 input features, not 43805",
    ),
    (
        int4_pack,
        W4,
        (24, 64),
        torch.float32,
        "int4_pack needs out_features that 16 divides, not 24",
    ),
    (
        int4_pack,
        with_group_size(W4, 16),
        (16, 64),
        torch.float32,
        "int4_pack needs group_size 32, 64, 128, 256, not 16",
    ),
    (
        int4_pack,
        W4,
        (16, 80),
        torch.float32,
        "int4_pack needs in_features that group_size 32 divides, not 80",
    ),
    (
        int4_pack,
        PRESETS["FP8_DYNAMIC"],
        (16, 64),
        torch.float32,
        "int4_pack needs int4 weights, scheme FP8_DYNAMIC has e4m3fn per channel",
    ),
    (
        int4_pack,
        PRESETS["W4A8"],
        (16, 128),
        torch.float32,
        "int4_pack needs inputs in the model's dtype, scheme W4A8 has int8 per token",
    ),
    (
        int4_pack,
        PRESETS["W3A16"],
        (16, 128),
        torch.float32,
        "int4_pack needs int4 weights, scheme W3A16 has int3 per group",
    ),
    (
        int4_pack,
        PRESETS["W2A16_ASYM"],
        (16, 128),
        torch.float32,
        "int4_pack needs int4 weights, scheme W2A16_ASYM has asymmetric int2 per group",
    ),
    (
        int8_mm,
        PRESETS["W4A8"],
        (16, 128),
        torch.float32,
        "int8_mm needs symmetric int8 weights, scheme W4A8 has int4 per group",
    ),
    (
        int8_pack,
        PRESETS["W3A16"],
        (16, 128),
        torch.float32,
        "int8_pack needs symmetric int8 weights, scheme W3A16 has int3 per group",
    ),
    (
        int4_pack,
        W4,
        (16, 64),
        torch.float16,
        "int4_pack needs float32 or bfloat16 inputs, not torch.float16",
    ),
]


@pytest.mark.parametrize(
    ("backend", "scheme", "shape", "dtype", "reason"), REASONS, ids=[case[4] for case in REASONS]
)
def test_a_kernel_says_why_it_cannot_run_a_linear(backend, scheme, shape, dtype, reason):
    assert backend.why_not(Case(scheme=scheme, device=CPU, shape=shape, dtype=dtype)) == reason


@pytest.mark.parametrize(("backend", "scheme"), cases(OURS))
def test_a_cpu_kernel_refuses_another_device(backend, scheme):
    reason = backend.why_not(
        Case(scheme=scheme, device=torch.device("cuda"), shape=(16, 64), dtype=torch.float32)
    )
    assert reason == f"{backend.name} runs on cpu, not on cuda"


@pytest.mark.parametrize("preset", PRESETS)
def test_without_our_own_kernels_auto_takes_the_first_that_can_and_says_why_the_others_cannot(
    preset, monkeypatch
):
    monkeypatch.setattr(native, "why_not", lambda *_args, **_options: "this CPU has no avx512_vnni")
    expected = {"W8A8": "int8_mm", "W8A8_STATIC": "int8_mm", "W8A16": "int8_pack"}
    expected |= {"W4A16": "int4_pack", "W4A16_ASYM": "int4_pack"}
    backend, reasons = choose(
        Case(scheme=PRESETS[preset], device=CPU, shape=(16, 128), dtype=torch.float32)
    )
    names = list(BACKENDS)
    # torch has none of 2 and 3 bits, of W4A8 and of float8 on a CPU
    assert expected.get(preset, "reference") == backend.name
    assert list(reasons) == names[: names.index(backend.name)]


@pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
@pytest.mark.parametrize("preset", PRESETS)
def test_auto_prefers_our_own_kernel_and_says_why_those_before_it_cannot(preset):
    expected = {"W8A8": "w8a8", "W8A8_STATIC": "w8a8", "W8A16": "w8a16", "W4A8": "w4a8"}
    expected |= {"FP8": "fp8", "FP8_DYNAMIC": "fp8", "FP8_BLOCK": "fp8"}
    expected |= {"NVFP4A16": "mx", "MXFP4A16": "mx", "MXFP8A16": "mx"}
    # whose inputs no kernel rounds
    expected |= dict.fromkeys(("NVFP4", "MXFP4", "MXFP8", "W4AFP8"), "reference")
    expected |= {name: "w8a16" for name in PRESETS if name[:2] in ("W6", "W5")}
    backend, reasons = choose(
        Case(scheme=PRESETS[preset], device=CPU, shape=(17, 128), dtype=torch.bfloat16)
    )
    assert expected.get(preset, "w4a16") == backend.name
    assert list(reasons) == list(BACKENDS)[: list(BACKENDS).index(backend.name)]


def test_the_oracle_comes_last_and_is_taken_where_a_dtype_fits_no_kernel():
    backend, reasons = choose(
        Case(scheme=PRESETS["W4A16"], device=CPU, shape=(16, 128), dtype=torch.float16)
    )
    assert backend.name == "reference"
    assert list(BACKENDS)[-1] == "reference"
    assert reasons["w4a16"] == "w4a16 needs float32 or bfloat16 inputs, not torch.float16"


def test_where_our_own_kernels_cannot_be_had_the_reason_is_among_the_reasons(monkeypatch):
    monkeypatch.setattr(
        native, "why_not", lambda *_args, **_options: "no C compiler (gcc, cc); install gcc"
    )
    backend, reasons = choose(
        Case(scheme=PRESETS["W8A16"], device=CPU, shape=(16, 96), dtype=torch.float32)
    )
    assert backend.name == "int8_pack"
    assert reasons["w8a16"] == "w8a16 cannot be had here: no C compiler (gcc, cc); install gcc"
    backend, reasons = choose(
        Case(scheme=PRESETS["W8A16"], device=CPU, shape=(16, 100), dtype=torch.float32)
    )
    assert backend.name == "reference"
    assert reasons["int8_pack"] == "int8_pack needs in_features that 16 divides, not 100"


def test_a_named_backend_that_cannot_run_is_an_error_and_not_a_fallback():
    with pytest.raises(
        UsageError,
        match=r"^backend int8_pack: int8_pack needs in_features that 16 divides, not 100; use",
    ):
        choose(
            Case(scheme=PRESETS["W8A16"], device=CPU, shape=(16, 100), dtype=torch.float32),
            backend="int8_pack",
        )
    with pytest.raises(
        UsageError,
        match=r"^backend 'fast' is unknown; use one of auto, hpu, fp8_mm, fp8_block_mm, "
        "triton_w4a16, triton_w8a16, w8a8, "
        r"w4a8, w4a16, w8a16, fp8, mx",
    ):
        choose(
            Case(scheme=PRESETS["W8A16"], device=CPU, shape=(16, 96), dtype=torch.float32),
            backend="fast",
        )


def test_several_named_backends_are_tried_in_turn_and_nothing_else():
    def chosen(name, features, backend):
        return choose(
            Case(scheme=PRESETS[name], device=CPU, shape=(16, features), dtype=torch.float32),
            backend=backend,
        )

    backend, reasons = chosen("W8A16", 100, "int8_pack,reference")
    assert backend.name == "reference" and list(reasons) == ["int8_pack"]
    assert chosen("W8A16", 96, "int8_pack,reference")[0].name == "int8_pack"
    assert chosen("W8A16", 96, "int4_pack,auto")[0].name == chosen("W8A16", 96, "auto")[0].name
    with pytest.raises(
        UsageError,
        match=r"^backend int8_pack,int4_pack: int8_pack needs in_features .* 100; int4_pack ",
    ):
        chosen("W8A16", 100, "int8_pack,int4_pack")
    with pytest.raises(UsageError, match=r"^backend 'fast' is unknown"):
        chosen("W8A16", 96, "int8_pack,fast")


def test_preparing_a_weight_does_not_modify_it():
    for backend, scheme in [*TORCH, *([] if NO_KERNELS else OURS), (reference, PRESETS["FP8"])]:
        linear = quantized(scheme, (16, 64))
        before = linear.weight.qvalue.clone(), linear.weight.scale.clone()
        prepared = backend.prepare(linear, torch.float32)
        backend.linear(inputs("random", (3, 64)), prepared, torch.ones(16))
        assert torch.equal(linear.weight.qvalue.float(), before[0].float())
        assert torch.equal(linear.weight.scale, before[1])
