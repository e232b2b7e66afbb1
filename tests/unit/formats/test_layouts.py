"""Layouts of other programs: bytes worked by hand, round trips between them, and refusals."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS
from quantflow.backends import choose
from quantflow.backends.backend import Case
from quantflow.core.packing import elements_of_whole_words
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import (
    PRESETS,
    LinearScheme,
    TensorScheme,
    named,
    preset,
    with_float8,
    with_group_size,
)
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats import LAYOUTS, compressed_tensors, layout_of
from quantflow.formats.gptq.layout import GPTQLayout
from quantflow.formats.weight_layout import integers

INTEGERS = ("compressed-tensors", "gptq", "gptq_v2", "auto_round", "awq", "ipex")
# always: symmetric weights are read from them as weights with zero points in the middle
WITH_ZERO_POINTS = {"awq", "ipex"}


def scheme(bits: int, group_size: int, *, symmetric: bool) -> LinearScheme:
    return named(
        integers(bits, group_size, symmetric=symmetric, where="a test"), None, "pack-quantized"
    )


def linear_of(
    found: LinearScheme, rows: int, columns: int, *, seed: int = 0, zeros: int = 0
) -> QuantizedLinear:
    """Arbitrary codes of a linear.

    Scales are positive and exact in float16 and bfloat16. The first `zeros` groups hold zeros.
    """
    generator, weights = torch.Generator().manual_seed(seed), found.weights
    groups = columns // (weights.group_size or columns)
    qvalue = torch.randint(weights.qmin, weights.qmax + 1, (rows, columns), generator=generator).to(
        torch.int8
    )
    scale = 2.0 ** torch.randint(-9, 3, (rows, groups), generator=generator)
    zero_point = None
    if not weights.symmetric:  # version 1 of GPTQ's layout has no lowest code
        zero_point = torch.randint(
            weights.qmin + 1, weights.qmax + 1, (rows, groups), generator=generator
        ).to(torch.int8)
    split = qvalue.view(rows, groups, -1)
    split[:, :zeros] = 0 if zero_point is None else zero_point[:, :zeros, None]
    scale[:, :zeros] = 1.0
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights),
        scheme=found,
    )


def infos_of(*names: str) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name=name, dtype="I32", shape=(8, 32), offset=0, nbytes=0)
        for name in names
    }


def assert_same_bytes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)
        )


def test_gptq_packs_inputs_into_words_and_version_1_stores_zero_points_less_one():
    found = scheme(4, 4, symmetric=False)
    # codes 0..7, then 15
    qvalue = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]] + [[7] * 8] * 7, dtype=torch.int8)
    zero_point = torch.tensor([[1, 2]] + [[0, 0]] * 7, dtype=torch.int8)  # codes 9 and 10, then 8
    weight = QTensor(
        qvalue=qvalue, scale=torch.full((8, 2), 0.5), zero_point=zero_point, scheme=found.weights
    )
    linear = QuantizedLinear(weight=weight, scheme=found)
    first, second = (
        LAYOUTS[name].encode("a", linear, scale_dtype=torch.float16) for name in ("gptq", "gptq_v2")
    )
    words = first["a.qweight"]
    assert words.shape == (1, 8) and words[0, 0].item() == 0x76543210 and words[0, 1].item() == -1
    assert [zero & 0xFFFFFFFF for zero in first["a.qzeros"].flatten().tolist()] == [
        0x77777778,
        0x77777779,
    ]
    assert [zero & 0xFFFFFFFF for zero in second["a.qzeros"].flatten().tolist()] == [
        0x88888889,
        0x8888888A,
    ]
    assert first["a.g_idx"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert first["a.scales"].dtype == torch.float16 and first["a.scales"].shape == (2, 8)


def test_gptq_splits_elements_of_3_bits_between_words_as_autogptq_does():
    found = scheme(3, 32, symmetric=True)
    qvalue = torch.zeros(32, 32, dtype=torch.int8)
    qvalue -= 4  # code 0
    # code 7: two bits end the first word, one begins the second; one and two
    qvalue[0, 10], qvalue[0, 21] = 3, 3
    linear = QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=torch.ones(32, 1), scheme=found.weights), scheme=found
    )
    words = LAYOUTS["gptq"].encode("a", linear, scale_dtype=torch.float16)["a.qweight"][:, 0]
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0xC0000000, 0x80000001, 0x00000003]


def test_awq_puts_eight_outputs_into_a_word_in_its_order():
    found = scheme(4, 2, symmetric=True)
    qvalue = (torch.arange(8, dtype=torch.int8) - 8)[:, None].repeat(1, 2)  # output o has code o
    linear = QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=torch.ones(8, 1), scheme=found.weights), scheme=found
    )
    tensors = LAYOUTS["awq"].encode("a", linear, scale_dtype=torch.float16)
    assert tensors["a.qweight"].flatten().tolist() == [0x75316420] * 2
    assert [word & 0xFFFFFFFF for word in tensors["a.qzeros"].flatten().tolist()] == [0x88888888]


def test_negative_scales_become_positive_beside_zero_points_and_no_value_changes():
    linear = linear_of(scheme(4, 8, symmetric=True), 16, 32)
    weight = replace(
        linear.weight, scale=linear.weight.scale * torch.tensor([1.0, -1.0, 1.0, -1.0])
    )
    linear = replace(linear, weight=weight)
    tensors = LAYOUTS["awq"].encode("a", linear, scale_dtype=torch.float16)
    assert (tensors["a.scales"] > 0).all()
    found = LAYOUTS["awq"].decode("a", tensors, scheme(4, 8, symmetric=False))
    assert torch.equal(found.dequantize(), weight.qvalue * weight.scale.repeat_interleave(8, 1))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "version": "gemm", "zero_point": False},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    ],
)
def test_symmetric_awq_folders_of_autoround_have_scales_of_either_sign(config):
    config = {**config, "bits": 4, "group_size": 8, "sym": True, "data_type": "int"}
    linear = linear_of(scheme(4, 8, symmetric=True), 16, 32)
    tensors = LAYOUTS["awq"].encode("a", linear, scale_dtype=torch.float16)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    tensors["a.scales"] = (tensors["a.scales"].T * signs.half()).T.contiguous()
    infos = infos_of(*tensors)
    layout = layout_of(config, infos)
    found = layout.decode("a", tensors, layout.schemes(config, {"a": (16, 32)}, infos)["a"])
    signed = linear.weight.scale * signs
    assert torch.equal(found.dequantize(), linear.weight.qvalue * signed.repeat_interleave(8, 1))
    assert torch.equal(found.weight.scale, signed.abs())
    tensors["a.qzeros"][1, 0] = 0x11111111
    with pytest.raises(InputError, match=r"^a\.scales: scale -[0-9.]+ beside zero point 1, "):
        layout.decode("a", tensors, found.scheme)


@settings(max_examples=80)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([-1, 8, 32, 96, 128]),
    st.booleans(),
    st.integers(1, 11),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 2**31),
)
def test_every_pair_of_layouts_that_hold_a_linear_gives_back_its_bytes(
    bits, size, symmetric, rows, groups, zeros, scale_dtype, seed
):
    unit = elements_of_whole_words(bits)
    found = scheme(bits, size, symmetric=symmetric)
    columns = 40 * unit if size == -1 else groups * size
    linear = linear_of(
        found, unit * rows, columns - columns % unit or unit * size, seed=seed, zeros=zeros
    )
    shape = tuple(linear.weight.qvalue.shape)
    able = [name for name in INTEGERS if LAYOUTS[name].why_not(found, shape) is None]
    assert len(able) == (6 if bits == 4 else 4)
    there = scheme(bits, size, symmetric=False)
    stored = {name: LAYOUTS[name].encode("a", linear, scale_dtype=scale_dtype) for name in able}
    for left in able:
        for right in able:
            pointed = bool(WITH_ZERO_POINTS & {left, right})
            read = there if pointed else found
            if symmetric and pointed and {left, right} & {"compressed-tensors", "auto_round"}:
                # one has zero points and the other none: the bytes are of other tensors, or packed
                # in another way
                continue
            first = LAYOUTS[left].decode("a", stored[left], read)
            assert torch.equal(first.dequantize(), linear.weight.dequantize())
            between = LAYOUTS[right].encode("a", first, scale_dtype=scale_dtype)
            assert_same_bytes(between, stored[right])
            again = LAYOUTS[right].decode("a", between, read)
            assert_same_bytes(
                LAYOUTS[left].encode("a", again, scale_dtype=scale_dtype), stored[left]
            )


@settings(max_examples=40)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([32, 64, 96]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(2, 5),
    st.integers(0, 2**31),
)
def test_every_pair_of_layouts_with_an_order_of_inputs_gives_back_its_bytes(
    bits, size, symmetric, rows, groups, seed
):
    found, unit = scheme(bits, size, symmetric=symmetric), elements_of_whole_words(bits)
    natural = linear_of(found, unit * rows, groups * size, seed=seed)
    # An order is that of the groups' first inputs alone: within a group every layout but IPEX's has
    # the inputs ascending.
    group_of = torch.arange(groups).repeat_interleave(size)[
        torch.randperm(groups * size, generator=torch.Generator().manual_seed(seed))
    ]
    order = torch.argsort(group_of, stable=True)
    linear = replace(natural, order=None if torch.equal(order, torch.arange(len(order))) else order)
    able = [
        name
        for name in ("gptq", "gptq_v2", "ipex")
        if LAYOUTS[name].why_not(found, (unit * rows, groups * size)) is None
    ]
    assert len(able) == (3 if bits == 4 else 2)
    layouts = {name: LAYOUTS[name].with_order() for name in able}
    stored = {
        name: layout.encode("a", linear, scale_dtype=torch.float16)
        for name, layout in layouts.items()
    }
    for left in able:
        for right in able:
            read = scheme(bits, size, symmetric=False) if "ipex" in (left, right) else found
            first = layouts[left].decode("a", stored[left], read)
            assert torch.equal(first.dequantize(), linear.dequantize())
            between = layouts[right].encode("a", first, scale_dtype=torch.float16)
            assert_same_bytes(between, stored[right])
            again = layouts[right].decode("a", between, read)
            assert_same_bytes(
                layouts[left].encode("a", again, scale_dtype=torch.float16), stored[left]
            )


PER_TENSOR = named(
    TensorScheme(kind="float", num_bits=8, granularity="per_tensor"),
    TensorScheme(kind="float", num_bits=8, granularity="per_token", dynamic=True),
    "float-quantized",
)
FLOATS = {
    "FP8": {"compressed-tensors", "fp8", "modelopt"},
    "FP8 of a tensor, inputs by token": {"compressed-tensors", "fp8"},
    "FP8_DYNAMIC": {"compressed-tensors", "modelopt"},
    "FP8_BLOCK": {"compressed-tensors", "fp8"},
    "NVFP4": {"compressed-tensors", "modelopt"},
    "NVFP4A16": {"compressed-tensors", "modelopt"},
    "MXFP8": {"compressed-tensors", "modelopt"},
    "MXFP4A16": {"compressed-tensors", "mxfp4"},
}
EXPERT = "model.layers.0.mlp.experts.0.up_proj"  # mxfp4 holds these alone


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FLOATS)),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_every_pair_of_layouts_that_hold_floats_gives_back_its_bytes(
    name, rows, groups, zeros, seed
):
    found = PER_TENSOR if name.startswith("FP8 of") else preset(name)
    found = with_group_size(found, 16) if name == "FP8_BLOCK" else found
    size = found.weights.group_size or 24
    real = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed))
    real[:, : zeros * size] = 0
    dtype = compressed_tensors.scale_dtype(found, torch.bfloat16)
    (made,) = (
        ALGORITHMS["rtn"]
        .quantize_group({"a": real}, found, statistics={}, scale_dtype=dtype)
        .values()
    )
    inputs = {"FP8": torch.tensor([0.0371]), "NVFP4": torch.tensor([64.0])}.get(name)
    linear = QuantizedLinear(weight=made.weight, scheme=found, input_scale=inputs)
    able = {
        layout
        for layout in LAYOUTS
        if LAYOUTS[layout].why_not(found, (rows, groups * size)) is None
    }
    assert able == FLOATS[name]
    stored = {
        layout: LAYOUTS[layout].encode(EXPERT, linear, scale_dtype=torch.float32) for layout in able
    }
    for left in able:
        first = LAYOUTS[left].decode(EXPERT, stored[left], found)
        assert torch.equal(first.dequantize(), linear.dequantize())
        for right in able:
            between = LAYOUTS[right].encode(EXPERT, first, scale_dtype=torch.float32)
            again = LAYOUTS[right].decode(EXPERT, between, found)
            assert_same_bytes(between, stored[right])
            assert_same_bytes(
                LAYOUTS[left].encode(EXPERT, again, scale_dtype=torch.float32), stored[left]
            )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_that_two_layouts_hold_is_in_one_of_these_properties(name):
    """The layouts are those of the property: none is left out when one or a preset is added."""
    found = PRESETS[name]
    able = {layout for layout in LAYOUTS if LAYOUTS[layout].why_not(found, (256, 256)) is None}
    assert "compressed-tensors" in able
    if len(able) > 1 and found.weights.kind == "int":
        size = found.weights.group_size or -1
        assert found.weights == integers(
            found.weights.num_bits, size, symmetric=found.weights.symmetric, where="a test"
        )
        assert (
            able <= set(INTEGERS) and found.input is None and found.weights.num_bits in (2, 3, 4, 8)
        )
    elif len(able) > 1:
        assert able == FLOATS[name]


@pytest.mark.parametrize("name", ["FP8", "FP8_BLOCK"])
def test_float8_goes_to_the_fp8_layout_and_back(name):
    found = with_group_size(preset(name), 16) if name == "FP8_BLOCK" else preset(name)
    generator = torch.Generator().manual_seed(0)
    qvalue = torch.randn(40, 32, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scale = (
        torch.rand(3, 2, generator=generator).repeat_interleave(16, 0)[:40]
        if name == "FP8_BLOCK"
        else torch.rand(1, 1)
    )
    inputs = None if name == "FP8_BLOCK" else torch.tensor([0.3])
    linear = QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, scheme=found.weights),
        scheme=found,
        input_scale=inputs,
    )
    tensors = LAYOUTS["fp8"].encode("a", linear, scale_dtype=torch.float32)
    assert set(tensors) == (
        {"a.weight", "a.weight_scale_inv"}
        if inputs is None
        else {"a.weight", "a.weight_scale", "a.input_scale"}
    )
    there = LAYOUTS["fp8"].decode("a", tensors, found)
    assert torch.equal(there.dequantize(), linear.dequantize())
    assert_same_bytes(compressed_tensors.encode("a", there), compressed_tensors.encode("a", linear))
    config = LAYOUTS["fp8"].quantization_config(
        {"a": found}, ignore=["lm_head"], model_type="llama"
    )
    info = {
        "a.weight": TensorInfo(
            name="a.weight", dtype="F8_E4M3", shape=(40, 32), offset=0, nbytes=1280
        )
    }
    assert layout_of(config, info).schemes(config, {"a": (40, 32), "lm_head": (8, 32)}, info) == {
        "a": found
    }


def fp8_schemes(**words) -> dict[str, LinearScheme]:
    config = {"quant_method": "fp8", "weight_block_size": [32, 32], **words}
    infos = {
        "a.weight": TensorInfo(
            name="a.weight", dtype="F8_E4M3", shape=(32, 64), offset=0, nbytes=2048
        )
    }
    return layout_of(config, infos).schemes(config, {"a": (32, 64)}, infos)


def of_powers(stored: str, **words) -> tuple[QuantizedLinear, torch.Tensor]:
    """A linear of 40 rows in blocks of 32 whose scales are powers of two, and its real weight."""
    scheme = fp8_schemes(**words)["a"]
    codes = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).mul(50)
    codes = codes.to(torch.float8_e4m3fn)
    exponents = torch.tensor([[-9, -127], [0, 100]])
    scale = torch.ldexp(torch.ones(2, 2), exponents)
    kinds = {
        "F32": scale,
        "F8_E8M0": scale.to(torch.float8_e8m0fnu),
        "U8": (exponents + 127).to(torch.uint8),
    }
    tensors = {"a.weight": codes, "a.weight_scale_inv": kinds[stored]}
    spread = scale.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)
    return LAYOUTS["fp8"].decode("a", tensors, scheme), codes.float() * spread


@pytest.mark.parametrize("stored", ["F32", "F8_E8M0", "U8"])
def test_scales_of_powers_of_two_are_read_however_they_are_stored(stored):
    """DeepSeek-V3.2 has them as float32, V4 as exponents of a byte.

    deepseek-ai/DeepSeek-V3.2-Exp issue 59: a script that does not know them leaves layers out.
    JustVugg/colibri pull request 779: the same shape and product, another encoding of the number.
    """
    linear, expected = of_powers(stored, scale_fmt="ue8m0")
    assert torch.equal(linear.dequantize(), expected)


def test_exponents_without_the_word_for_them_are_no_scales():
    """uint8 says nothing by itself; transformers' dequantizer takes any as exponents."""
    linear, expected = of_powers("F8_E8M0")
    assert torch.equal(linear.dequantize(), expected)
    with pytest.raises(InputError, match=r"a\.weight_scale_inv: is torch\.uint8 \[2, 2\]"):
        of_powers("U8")


def test_an_exponent_that_stands_for_nan_is_refused():
    scheme = fp8_schemes(scale_fmt="ue8m0")["a"]
    scale = torch.tensor([[127, 255]], dtype=torch.uint8)
    tensors = {"a.weight": torch.ones(8, 64).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    with pytest.raises(InputError, match="scale nan, scales are finite"):
        LAYOUTS["fp8"].decode("a", tensors, scheme)


def test_inputs_beside_scales_of_powers_of_two_are_rounded_as_deepseek_rounds_them():
    """The scale is the power of two at or above amax / 448, and codes are made with it.

    sgl-project/sglang pull request 31210: rounding by log2 misses exact powers.
    huggingface/transformers pull request 46763: codes of another scale than the stored one.
    """
    scheme = fp8_schemes(scale_fmt="ue8m0")["a"]
    linear, _ = of_powers("F32", scale_fmt="ue8m0")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    x[0, :32] = x[0, :32] / x[0, :32].abs().max() * 448 * 2.0**-7  # the scale is 2**-7 itself
    split = x.reshape(3, 2, 32).double()
    scale = 2.0 ** (split.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    scale[0, 0] = 2.0**-7
    codes = (split / scale).float().to(torch.float8_e4m3fn)
    expected = (codes.double() * scale).flatten(1).float()
    assert torch.equal(linear.fake_quantize_input(x), expected)
    case = Case(scheme=scheme, shape=(64, 64), dtype=torch.float32, device=torch.device("cpu"))
    chosen, reasons = choose(case)
    assert chosen.name == "reference" and "rounded up to powers of two" in reasons["fp8"]
    told = LAYOUTS["compressed-tensors"].why_not(scheme, (64, 64))
    assert "inputs whose scales are rounded up to powers of two" in told
    config = LAYOUTS["fp8"].quantization_config({"a": scheme}, ignore=(), model_type="llama")
    assert config["scale_fmt"] == "ue8m0"
    assert fp8_schemes(**config)["a"].input.scale_rounding == "pow2"


def test_scales_of_an_unknown_kind_are_refused_by_their_name():
    assert fp8_schemes(scale_fmt="float") == fp8_schemes(scale_fmt=None) == fp8_schemes()
    assert fp8_schemes()["a"].input.scale_rounding == "none"
    with pytest.raises(UnsupportedError, match="scale_fmt 'e5m3' with weight_block_size"):
        fp8_schemes(scale_fmt="e5m3")
    with pytest.raises(UnsupportedError, match="scale_fmt 'ue8m0' with weight_block_size None"):
        fp8_schemes(scale_fmt="ue8m0", weight_block_size=None)


def test_the_weights_of_an_fp8_folder_are_e4m3fn_by_any_of_its_names():
    for fmt in ("e4m3", "float8_e4m3fn", "float8_e4m3"):
        assert fp8_schemes(fmt=fmt) == fp8_schemes()
    with pytest.raises(
        UnsupportedError, match="fmt 'float8_e5m2', e4m3, float8_e4m3fn, float8_e4m3 are known"
    ):
        fp8_schemes(fmt="float8_e5m2")


@pytest.mark.parametrize("shape", [(32, 64), (96, 192)])
def test_inputs_that_do_not_stand_beside_their_group_come_in_their_order(shape):
    rows, columns = shape
    found, layout = scheme(4, 32, symmetric=True), GPTQLayout(stored_less=1, reordered=True)
    natural = linear_of(found, rows, columns)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    linear = replace(natural, order=order)
    tensors = layout.encode("a", linear, scale_dtype=torch.float16)
    group_of = torch.empty(columns, dtype=torch.int32)
    for column, source in enumerate(order.tolist()):
        group_of[source] = column // 32
    assert torch.equal(tensors["a.g_idx"], group_of)
    there = layout.decode("a", tensors, found)
    assert torch.equal(there.dequantize(), linear.dequantize())
    x = torch.randn(5, columns)
    expected = x[:, order] @ natural.weight.dequantize().T
    assert torch.allclose(x @ there.dequantize().T, expected, atol=1e-3)
    assert torch.allclose(there.mixed_input(x) @ there.weight.dequantize().T, expected, atol=1e-3)
    assert_same_bytes(layout.encode("a", there, scale_dtype=torch.float16), tensors)
    for name in ("gptq", "awq", "compressed-tensors"):
        with pytest.raises(
            UnsupportedError, match="a: its groups are of inputs that do not stand together"
        ):
            LAYOUTS[name].encode("a", linear, scale_dtype=torch.float16)


def test_a_value_that_a_layout_would_change_is_refused_with_what_it_would_become():
    linear = linear_of(scheme(4, 32, symmetric=False), 32, 64)
    linear.weight.zero_point[3, 1] = -8
    with pytest.raises(
        UnsupportedError,
        match=r"a: 1 of 64 zero points would change, the first \(row 3, group 1\) from 0 to 16",
    ):
        LAYOUTS["gptq"].encode("a", linear, scale_dtype=torch.float16)
    linear.weight.scale[2, 0] = 1 + 2**-12
    cause = (
        r"a: 1 of 64 scales would change, the first \(row 2, group 0\) from 1.000244140625 to 1.0 "
        r"in float16"
    )
    with pytest.raises(UnsupportedError, match=cause):
        LAYOUTS["gptq_v2"].encode("a", linear, scale_dtype=torch.float16)


@pytest.mark.parametrize("name", ["gptq", "auto_round", "awq", "fp8"])
def test_a_scheme_that_a_layout_cannot_hold_has_a_reason(name):
    wrong = preset("W8A8") if name == "fp8" else preset("FP8_DYNAMIC")
    assert "scheme" in str(LAYOUTS[name].why_not(wrong, (128, 128)))
    assert "scheme" in str(LAYOUTS[name].why_not(preset("W8A8"), (128, 128)))


# whose manifest says it
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "compressed-tensors"])
@pytest.mark.parametrize("flavour", ["gaudi2", "e5m2", "e4m3fnuz"])
@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_a_flavour_of_float8_that_a_reader_would_not_know_has_a_reason(layout, flavour, name):
    assert LAYOUTS[layout].why_not(with_float8(preset(name), flavour), (128, 128)) is not None


def test_groups_that_do_not_stand_together_are_refused_where_a_layout_has_no_words_for_them():
    found = scheme(4, 32, symmetric=True)
    linear = replace(linear_of(found, 32, 64), order=torch.arange(64).flip(0))
    with pytest.raises(
        UnsupportedError, match="a: its groups are of inputs that do not stand together"
    ):
        LAYOUTS["auto_round"].with_order().encode("a", linear, scale_dtype=torch.float16)


def damaged(layout: str, key: str, change) -> tuple[dict[str, torch.Tensor], LinearScheme]:
    found = scheme(4, 32, symmetric=layout.startswith("gptq"))
    tensors = dict(LAYOUTS[layout].encode("a", linear_of(found, 32, 64), scale_dtype=torch.float16))
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors[key])
    return tensors, found


@pytest.mark.parametrize("layout", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("a.scales", None, "a.scales: missing"),
        ("a.qzeros", None, "a.qzeros: missing"),
        ("a.qweight", None, "a.qweight: missing"),
        ("a.scales", lambda t: t * float("nan"), "a.scales: scale nan"),
        ("a.scales", lambda t: t * 0, "a.scales: scale 0.0"),
        ("a.scales", lambda t: t[:1], r"a.scales: is torch.float16 \[1, 32\], config.json needs"),
        ("a.qzeros", lambda t: t.T.contiguous(), "a.qzeros: is torch.int32"),
        ("a.qweight", lambda t: t.to(torch.int16), "a.qweight: is torch.int16"),
    ],
)
def test_damaged_tensors_are_refused_by_name(layout, key, change, said):
    tensors, found = damaged(layout, key, change)
    with pytest.raises(InputError, match=said):
        LAYOUTS[layout].decode("a", tensors, found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.flip(0),
            "a.g_idx: groups of inputs that do not stand together, config.json says desc_act false",
        ),
        (lambda t: t * 0, "a.g_idx: group 0 has 64 inputs, each of 2 has 32"),
        (lambda t: t + 1, "a.g_idx: groups 1 to 2, 2 have scales"),
        (lambda t: t[:-1], r"a.g_idx: is torch.int32 \[63\]"),
    ],
)
def test_a_wrong_g_idx_is_refused(change, said):
    tensors, found = damaged("gptq", "a.g_idx", change)
    with pytest.raises(InputError, match=said):
        LAYOUTS["gptq"].decode("a", tensors, found)


@pytest.mark.parametrize("others", [(), ("b.g_idx",)])
def test_with_desc_act_a_linear_of_several_groups_has_a_g_idx(others):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    infos, shapes = infos_of("a.qweight", "b.qweight", *others), {"b": (32, 32), "a": (32, 64)}
    with pytest.raises(InputError, match=r"^a\.g_idx: missing, config\.json says desc_act true"):
        layout_of(config, infos).schemes(config, shapes, infos)
    there = infos | infos_of("a.g_idx")
    assert set(layout_of(config, there).schemes(config, shapes, there)) == {"a", "b"}
    config["desc_act"] = False
    assert set(layout_of(config, infos).schemes(config, shapes, infos)) == {"a", "b"}


@pytest.mark.parametrize("word", ["group", "dynamic", True])
@pytest.mark.parametrize("others", [(), ("b.weight_g_idx",)])
def test_with_actorder_group_a_linear_of_several_groups_has_a_weight_g_idx(word, others):
    plain = scheme(4, 32, symmetric=True)
    config = LAYOUTS["compressed-tensors"].quantization_config(
        {"a": plain, "c": scheme(8, 32, symmetric=True)}, ignore=[], model_type="llama"
    )
    first = config["config_groups"]["group_0"]
    first["targets"].append("b")
    first["weights"]["actorder"] = word
    infos, shapes = infos_of(*others), {"a": (32, 64), "b": (32, 32), "c": (32, 64)}
    with pytest.raises(
        InputError, match=rf"^a\.weight_g_idx: missing, config\.json says actorder {word}"
    ):
        layout_of(config, infos).schemes(config, shapes, infos)
    there = infos | infos_of("a.weight_g_idx")
    assert layout_of(config, there).schemes(config, shapes, there)["a"] == plain
    first["weights"]["actorder"] = "weight"
    assert layout_of(config, infos).schemes(config, shapes, infos)["a"] == plain


@pytest.mark.parametrize("status", [None, "frozen", "compressed"])
def test_compressed_tensors_folders_need_not_say_that_they_are_compressed(status):
    plain = scheme(4, 32, symmetric=True)
    config = LAYOUTS["compressed-tensors"].quantization_config(
        {"a": plain}, ignore=[], model_type="llama"
    )
    del config["quantization_status"]
    config |= {} if status is None else {"quantization_status": status}
    assert layout_of(config, {}).schemes(config, {"a": (32, 64)}, {}) == {"a": plain}


def test_zero_points_that_contradict_the_configuration_are_refused():
    tensors, found = damaged("gptq", "a.qzeros", lambda t: t)
    with pytest.raises(
        InputError, match="a.qzeros: zero point 7 is stored, config.json says sym true, which is 8"
    ):
        LAYOUTS["gptq_v2"].decode("a", tensors, found)
    wide = torch.full_like(tensors["a.qzeros"], -1)
    with pytest.raises(
        InputError,
        match="a.qzeros: zero point 15 is stored less one: some programs read 16 there, others 0",
    ):
        LAYOUTS["gptq"].decode("a", {**tensors, "a.qzeros": wide}, scheme(4, 32, symmetric=False))


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_a_wrong_number_of_bits_is_refused(bits):
    tensors, _ = damaged("gptq", "a.qweight", lambda t: t)
    with pytest.raises(InputError, match=r"a\."):
        LAYOUTS["gptq"].decode("a", tensors, scheme(bits, 32, symmetric=True))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not read here"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin', gptq and gptq_v2 are known",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ version 'gemv', gemm is known"),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype 'int16', int32 is known"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:x"},
            "with packing_format 'auto_round:x'",
        ),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(config, said):
    with pytest.raises(UnsupportedError, match=said):
        layout_of(config, {})


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "auto_round", "awq"])
def test_a_configuration_reads_back_as_the_schemes_that_it_was_written_for(layout):
    found = scheme(4, 32, symmetric=layout != "awq")
    config = LAYOUTS[layout].quantization_config(
        {"m.a": found, "m.b": found}, ignore=["lm_head", "m.c"], model_type="llama"
    )
    infos = {
        f"m.{name}.qweight": TensorInfo(name="", dtype="I32", shape=(8, 32), offset=0, nbytes=0)
        for name in "ab"
    }
    shapes = {"m.a": (32, 64), "m.b": (32, 64), "m.c": (32, 64), "lm_head": (32, 64)}
    assert layout_of(config, infos).schemes(config, shapes, infos) == {"m.a": found, "m.b": found}


def test_autorounds_configuration_has_a_scheme_for_each_linear():
    wide, plain = scheme(8, -1, symmetric=True), scheme(4, 32, symmetric=True)
    schemes = {
        "model.layers.0.a": plain,
        "model.layers.0.b": wide,
        "model.layers.1.a": plain,
        "lm_head": plain,
    }
    layout = LAYOUTS["auto_round"]
    config = layout.quantization_config(
        schemes, ignore=["model.layers.1.b", "score"], model_type="llama"
    )
    told = {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
    }
    assert (
        config["quant_method"] == "auto-round"
        and config["packing_format"] == "auto_round:auto_gptq"
    )
    assert layout.tensor_names("a", plain) == ("a.qweight", "a.qzeros", "a.scales")  # no g_idx
    assert {key: config[key] for key in told} == told
    assert config["extra_config"] == {
        "model.layers.0.b": {"bits": 8, "group_size": -1, "sym": True, "data_type": "int"},
        "lm_head": {"bits": 4, "group_size": 32, "sym": True, "data_type": "int"},
        "model.layers.1.b": {"bits": 16, "data_type": "float"},
    }
    infos = {
        f"{name}.qweight": TensorInfo(name="", dtype="I32", shape=(8, 32), offset=0, nbytes=0)
        for name in schemes
    }
    shapes = dict.fromkeys([*schemes, "model.layers.1.b"], (32, 64))
    assert layout_of(config, infos).schemes(config, shapes, infos) == schemes


def test_autoround_stores_the_zero_points_of_all_linears_in_one_way():
    layout, plain, pointed = (
        LAYOUTS["auto_round"],
        scheme(4, 32, symmetric=True),
        scheme(4, 32, symmetric=False),
    )
    config = layout.quantization_config(
        {"model.layers.0.a": pointed}, ignore=[], model_type="llama"
    )
    assert (
        config["packing_format"] == "auto_round:gptqmodel"
        and layout_of(config, {}).packing == "gptqmodel"
    )
    with pytest.raises(
        UnsupportedError,
        match="model.layers.0.a and model.layers.0.b: one has zero points, the other none",
    ):
        schemes = {"model.layers.0.a": pointed, "model.layers.0.b": plain}
        layout.quantization_config(schemes, ignore=[], model_type="llama")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("packing", "version"), [("auto_gptq", "gptq"), ("gptqmodel", "gptq_v2")])
def test_both_packings_of_autoround_are_read_as_the_version_of_gptqs_layout_that_they_are(
    packing, version, symmetric
):
    found = layout_of(
        {"quant_method": "intel/auto-round", "packing_format": f"auto_round:{packing}"}, {}
    )
    plain = scheme(4, 32, symmetric=symmetric)
    linear = linear_of(plain, 32, 64)
    stored = LAYOUTS[version].encode("a", linear, scale_dtype=torch.float16)
    del stored["a.g_idx"]
    assert_same_bytes(found.encode("a", linear, scale_dtype=torch.float16), stored)
    assert torch.equal(found.decode("a", stored, plain).dequantize(), linear.dequantize())
    assert found.name == "auto_round" and not found.has_order


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "auto_round", "awq", "ipex"])
def test_llama_cpps_types_are_refused_for_they_have_numbers_of_their_own(layout):
    assert "llama.cpp's" in str(LAYOUTS[layout].why_not(preset("Q4_K"), (256, 256)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dynamic": None}, None),
        ({"dynamic": []}, "dynamic is '[]', a table is needed"),
        ({"dynamic": [1]}, "dynamic is '[1]', a table is needed"),
        ({"dynamic": {"+:.*": 5}}, "dynamic: +:.* is '5', a table is needed"),
        ({"dynamic": {"(": {}}}, "dynamic: pattern '(' is no regular expression"),
        ({"extra_config": "x"}, "extra_config is 'x', a table is needed"),
        ({"extra_config": {"a": [8]}}, "extra_config: a is '[8]', a table is needed"),
        ({"dynamic": {".*": {"bits": "8"}}}, "a: bits is '8'"),
    ],
)
def test_rules_of_linears_that_are_none_are_refused_with_their_key(words, said):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, **words}
    infos = {
        "a.qweight": TensorInfo(name="a.qweight", dtype="I32", shape=(4, 32), offset=0, nbytes=512)
    }
    layout = layout_of(config, infos)
    if said is None:
        assert list(layout.schemes(config, {"a": (32, 32)}, infos)) == ["a"]
        return
    with pytest.raises(InputError) as caught:
        layout.schemes(config, {"a": (32, 32)}, infos)
    assert said in caught.value.cause


def test_a_pattern_of_linears_that_would_take_years_is_refused_after_its_time(monkeypatch):
    monkeypatch.setattr("quantflow.files.patterns.SECONDS", 0.05)
    names = [f"{'a' * 64}b{number}" for number in range(200_000)]
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {"(a+)+$": {"bits": 8}},
    }
    infos = {
        f"{name}.qweight": TensorInfo(
            name=f"{name}.qweight", dtype="I32", shape=(4, 32), offset=0, nbytes=512
        )
        for name in names
    }
    with pytest.raises(InputError, match=r"pattern '\(a\+\)\+\$' takes more than 0.05 s"):
        GPTQLayout(stored_less=1).schemes(config, dict.fromkeys(names, (32, 32)), infos)
