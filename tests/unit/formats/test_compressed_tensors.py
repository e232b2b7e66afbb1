"""The compressed-tensors layout: round trips, names, the config both ways, edges, and refusals.

Bytes worked by hand are in tests/golden, the comparison with the library of that name in
tests/parity.
"""

import json
import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from compressed_tensors.transform import TransformConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import (
    PRESETS,
    LinearScheme,
    TensorScheme,
    preset,
    with_float8,
    with_group_size,
)
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.formats import FORMATS, compressed_tensors

INT8_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_channel", symmetric=False)
SCHEMES = {
    **{
        name: with_group_size(s, 8) if s.weights.group_size else s
        for name, s in PRESETS.items()
        if s.weights.scale_format == "float"  # the others: test_microscaled.py
    },
    "int8-asym": LinearScheme(name="custom", weights=INT8_ASYM, input=None, layout="int-quantized"),
    "int8-asym-packed": LinearScheme(
        name="custom", weights=INT8_ASYM, input=None, layout="pack-quantized"
    ),
    "int3-asym-packed": LinearScheme(
        name="custom", weights=replace(INT8_ASYM, num_bits=3), input=None, layout="pack-quantized"
    ),
}


def random_linear(
    scheme: LinearScheme, rows: int, columns: int, *, seed: int = 0
) -> QuantizedLinear:
    """A linear with arbitrary qvalues, and scales that are exact in bfloat16.

    Scales have either sign where they may be negative.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = scheme.weights
    shape = (
        (1, 1)
        if weights.granularity == "per_tensor"
        else (rows, columns // (weights.group_size or columns))
    )
    scale = 2.0 ** torch.randint(-9, 3, shape, generator=generator)
    if weights.granularity == "per_block":
        scale = scale[:: weights.block_rows].repeat_interleave(weights.block_rows, 0)[:rows]
    zero_point = None
    if weights.kind == "int" and weights.symmetric:
        scale *= 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
    if weights.kind == "float":
        qvalue = (torch.randn(rows, columns, generator=generator) * 50).to(torch.float8_e4m3fn)
    else:
        qvalue = torch.randint(
            weights.qmin, weights.qmax + 1, (rows, columns), generator=generator
        ).to(torch.int8)
    if not weights.symmetric:
        zero_point = torch.randint(weights.qmin, weights.qmax + 1, shape, generator=generator).to(
            torch.int8
        )
    static = scheme.input is not None and not scheme.input.dynamic
    return QuantizedLinear(
        weight=QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights),
        scheme=scheme,
        input_scale=torch.tensor([0.3]) if static else None,
        input_zero_point=torch.tensor([-5], dtype=torch.int8)
        if static and not scheme.input.symmetric
        else None,
    )


def parts(linear: QuantizedLinear) -> list[torch.Tensor | None]:
    weight = linear.weight
    return [
        weight.qvalue.float(),
        weight.scale,
        weight.zero_point,
        linear.input_scale,
        linear.input_zero_point,
    ]


def assert_same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.integers(1, 19),
    st.integers(1, 4),
    st.integers(0, 7),
    st.integers(0, 2**31),
)
def test_decode_undoes_encode_for_every_shape(name, rows, groups, extra, seed):
    scheme = SCHEMES[name]
    columns = groups * 8 + (0 if scheme.weights.group_size else extra)
    linear = random_linear(scheme, rows, columns, seed=seed)
    before = [None if part is None else part.clone() for part in parts(linear)]
    tensors = compressed_tensors.encode("a.b", linear, scale_dtype=torch.bfloat16)
    assert tuple(tensors) == compressed_tensors.tensor_names("a.b", scheme)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    decoded = compressed_tensors.decode("a.b", tensors | {"a.c.weight": torch.ones(1)}, scheme)
    assert_same(parts(decoded), before)
    assert_same(parts(linear), before)  # neither modifies what it was given
    assert all(torch.equal(tensors[key].float(), copies[key].float()) for key in copies)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_what_encode_makes_is_known_before_there_is_a_weight(name, rows, groups, extra, dtype):
    scheme = SCHEMES[name]
    columns = groups * 8 + (0 if scheme.weights.group_size else extra)
    specs = compressed_tensors.tensor_specs("a.b", scheme, (rows, columns), dtype)
    linear = random_linear(scheme, rows, columns)
    tensors = compressed_tensors.encode(
        "a.b", linear, scale_dtype=compressed_tensors.scale_dtype(scheme, dtype)
    )
    header = safetensors.torch.save(tensors)
    written = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert specs == {key: (written[key]["dtype"], tuple(written[key]["shape"])) for key in tensors}
    assert list(specs) == list(tensors)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.integers(1, 100),
    st.integers(1, 3),
)
def test_a_linear_encoded_by_rows_is_the_linear_encoded_whole(name, rows, multiple):
    scheme = SCHEMES[name]
    step = multiple * compressed_tensors.row_multiple(scheme)
    linear = random_linear(scheme, rows, 16)
    whole = compressed_tensors.encode("a.b", linear, scale_dtype=torch.bfloat16)
    shared = scheme.weights.granularity == "per_tensor"
    once = {
        key for key in whole if key.endswith(("weight_shape", "input_scale", "input_zero_point"))
    }
    once |= {key for key in whole if shared and key.endswith(("weight_scale", "weight_zero_point"))}
    filled = {
        key: torch.zeros_like(tensor, dtype=tensor.dtype)
        for key, tensor in whole.items()
        if key not in once
    }
    for first in range(0, rows, step):
        grid = slice(None) if shared else slice(first, first + step)
        zero_point = None if linear.weight.zero_point is None else linear.weight.zero_point[grid]
        qvalue, scale = linear.weight.qvalue[first : first + step], linear.weight.scale[grid]
        part = replace(linear.weight, qvalue=qvalue, scale=scale, zero_point=zero_point)
        encoded = compressed_tensors.encode(
            "a.b", replace(linear, weight=part), scale_dtype=torch.bfloat16
        )
        spans = compressed_tensors.row_spans("a.b", scheme, first=first, count=len(part.qvalue))
        assert set(spans) == set(filled)
        for key, (begin, count) in spans.items():
            assert len(encoded[key]) == count
            filled[key][begin : begin + count] = encoded[key]
    assert all(torch.equal(filled[key].float(), whole[key].float()) for key in filled)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("FP8", 1),
        ("FP8_BLOCK", 4),
        ("W4A16", 4),
        ("W4A16_ASYM", 12),
        ("W3A16_ASYM", 16),
        ("W2A16_ASYM", 8),
    ],
)
def test_rows_that_cannot_stand_alone_are_refused(name, first):
    with pytest.raises(
        SchemeError, match=rf"m\.q: rows from {first} do not begin at a whole word or block"
    ):
        compressed_tensors.row_spans("m.q", SCHEMES[name], first=first, count=8)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("FP8_DYNAMIC", 8),
        ("FP8_BLOCK", 128),
        ("W8A16", 8),
        ("W4A16_ASYM", 8),
        ("W3A16", 32),
        ("W3A16_ASYM", 32),
        ("W2A16", 16),
    ],
)
def test_so_many_rows_are_encoded_by_themselves(name, rows):
    assert compressed_tensors.row_multiple(PRESETS[name]) == rows
    assert name == "FP8_BLOCK" or compressed_tensors.ROW_MULTIPLE % rows == 0


def test_32_rows_of_zero_points_of_3_bits_are_three_words():
    spans = compressed_tensors.row_spans("q", PRESETS["W3A16_ASYM"], first=64, count=40)
    assert spans == {
        "q.weight_packed": (64, 40),
        "q.weight_scale": (64, 40),
        "q.weight_zero_point": (6, 4),
    }


def test_rows_of_blocks_have_a_row_of_scales_for_each_block():
    spans = compressed_tensors.row_spans("q", PRESETS["FP8_BLOCK"], first=256, count=130)
    assert spans == {"q.weight": (256, 130), "q.weight_scale": (2, 2)}
    specs = compressed_tensors.tensor_specs("q", PRESETS["FP8_BLOCK"], (300, 256), torch.bfloat16)
    assert specs == {"q.weight": ("F8_E4M3", (300, 256)), "q.weight_scale": ("F32", (3, 2))}


def test_rows_of_a_block_with_several_scales_are_refused():
    linear = random_linear(SCHEMES["FP8_BLOCK"], 9, 8)
    scale = linear.weight.scale.clone()
    scale[7] *= 2
    with pytest.raises(SchemeError, match=r"m\.q: 8 rows of a block have several scales"):
        compressed_tensors.encode(
            "m.q", replace(linear, weight=replace(linear.weight, scale=scale))
        )


@pytest.mark.parametrize(
    ("name", "packed", "zero_points"),
    [
        ("W2A16_ASYM", (5, 16), (1, 2)),
        ("W3A16_ASYM", (5, 24), (1, 2)),
        ("W4A16_ASYM", (5, 32), (1, 2)),
    ],
)
# 256 of 3 bits are 24 words, 5 of them one
def test_packed_shapes_of_5_by_256_worked_by_hand(name, packed, zero_points):
    specs = compressed_tensors.tensor_specs("q", PRESETS[name], (5, 256), torch.bfloat16)
    assert specs["q.weight_packed"] == ("I32", packed) and specs["q.weight_zero_point"] == (
        "I32",
        zero_points,
    )
    assert specs["q.weight_scale"] == ("BF16", (5, 2)) and specs["q.weight_shape"] == ("I64", (2,))


def test_specs_of_a_linear_that_the_scheme_does_not_fit_are_refused_by_name():
    with pytest.raises(InputError, match=r"m\.q: weight is \[4, 12\], group_size=8"):
        compressed_tensors.tensor_specs("m.q", SCHEMES["W4A16"], (4, 12), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "suffixes"),
    [
        ("FP8", ["weight", "weight_scale", "input_scale"]),
        ("FP8_DYNAMIC", ["weight", "weight_scale"]),
        ("FP8_BLOCK", ["weight", "weight_scale"]),
        ("W8A8", ["weight", "weight_scale"]),
        ("W8A8_STATIC", ["weight", "weight_scale", "input_scale", "input_zero_point"]),
        ("W8A16", ["weight_packed", "weight_scale", "weight_shape"]),
        ("W4A16", ["weight_packed", "weight_scale", "weight_shape"]),
        ("W4A16_ASYM", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]),
        ("W4A8", ["weight_packed", "weight_scale", "weight_shape"]),
        ("W3A16_ASYM", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]),
    ],
)
def test_a_linear_becomes_these_tensors(name, suffixes):
    assert compressed_tensors.tensor_names("m.q", PRESETS[name]) == tuple(
        f"m.q.{suffix}" for suffix in suffixes
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if name in SCHEMES])
def test_only_packed_scales_have_the_models_dtype(name):
    expected = (
        torch.float32
        if name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A8_STATIC")
        else torch.float16
    )
    assert compressed_tensors.scale_dtype(PRESETS[name], torch.float16) == expected


def test_a_scale_that_the_dtype_does_not_hold_is_refused():
    linear = random_linear(SCHEMES["W4A16"], 2, 8)
    weight = replace(linear.weight, scale=torch.tensor([[0.1], [0.5]]))
    with pytest.raises(
        SchemeError, match=r"m\.q: scales are not exact in torch\.bfloat16; quantize with"
    ):
        compressed_tensors.encode("m.q", replace(linear, weight=weight), scale_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("scheme", "scale"),
    [("FP8_DYNAMIC", -1.0), *(("W8A8", value) for value in (0.0, math.nan, math.inf, -math.inf))],
)
def test_encode_refuses_a_scale_that_no_loader_should_see(scheme, scale):
    linear = random_linear(SCHEMES[scheme], 2, 8)
    weight = replace(linear.weight, scale=torch.tensor([[1.0], [scale]]))
    with pytest.raises(SchemeError, match=r"m\.q: scale"):
        compressed_tensors.encode("m.q", replace(linear, weight=weight))


@pytest.mark.parametrize(
    ("flavour", "instead"),
    [("e5m2", "a mantissa bit more"), ("e4m3fnuz", "vLLM doubles the scales on AMD's MI300")],
)
def test_float8_codes_that_mean_other_numbers_are_refused_with_what_to_take_instead(
    flavour, instead
):
    scheme = with_float8(preset("FP8_DYNAMIC"), flavour)
    with pytest.raises(
        UnsupportedError,
        match=rf"FP8_DYNAMIC: float8 flavour '{flavour}', the layout holds e4m3fn.*{instead}",
    ):
        compressed_tensors.quantization_config({"q": scheme}, ignore=[], model_type="llama")
    with pytest.raises(UnsupportedError, match="flavour"):
        compressed_tensors.decode("q", {}, scheme)


def as_mi300_reads(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """vLLM's e4m3fn weights where the hardware has e4m3fnuz: no -0 (NaN there), doubled scales."""
    bits = codes.view(torch.uint8)
    read = torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz)
    return read.double() * (scale.double() * 2)


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_an_artifact_means_the_same_numbers_where_float8_is_e4m3fnuz(name):
    codes = torch.tensor(
        [code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8
    ).reshape(16, 16)
    linear = random_linear(SCHEMES[name], 16, 16)
    linear = replace(linear, weight=replace(linear.weight, qvalue=codes.view(torch.float8_e4m3fn)))
    tensors = compressed_tensors.encode("q", linear)
    scale = tensors["q.weight_scale"]
    if name == "FP8_BLOCK":  # [2, 2] of 8 x 8
        scale = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)
    read = as_mi300_reads(tensors["q.weight"], scale)
    assert torch.equal(read, linear.weight.dequantize().double())


def test_gaudi2_codes_are_e4m3fn_codes():
    scheme = replace(
        preset("FP8_DYNAMIC"), weights=replace(preset("FP8_DYNAMIC").weights, float8="gaudi2")
    )
    linear = random_linear(scheme, 2, 8)
    tensors = compressed_tensors.encode("q", linear)
    read = compressed_tensors.decode("q", tensors, preset("FP8_DYNAMIC"))
    assert torch.equal(read.weight.dequantize(), linear.weight.dequantize())


FLOAT8_NAN = torch.full((2, 8), math.nan).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scheme", "key", "value", "message"),
    [
        ("W8A8", "weight", None, r"m\.q\.weight: missing; the artifact is incomplete"),
        ("FP8", "input_scale", None, r"m\.q\.input_scale: missing"),
        ("W4A16_ASYM", "weight_zero_point", None, r"m\.q\.weight_zero_point: missing"),
        (
            "W8A8",
            "weight",
            torch.ones(2, 8),
            r"m\.q\.weight: is torch\.float32 \[2, 8\], the scheme needs torch\.int8",
        ),
        ("W8A8", "weight", torch.ones(8, dtype=torch.int8), r"m\.q: weight is \[8\]"),
        (
            "W8A8",
            "weight_scale",
            torch.ones(1),
            r"m\.q\.weight_scale: is torch\.float32 \[1\], .*\(2, 1\)",
        ),
        (
            "W8A8",
            "weight_scale",
            torch.tensor([[1.0], [math.nan]]),
            r"m\.q\.weight_scale: scale nan",
        ),
        (
            "W4A16",
            "weight_scale",
            torch.tensor([[1.0], [0.0]]),
            r"m\.q\.weight_scale: scale 0\.0; .*not zero",
        ),
        (
            "W4A16_ASYM",
            "weight_scale",
            torch.tensor([[1.0], [-1.0]]),
            r"m\.q\.weight_scale: scale -1\.0; .*positive",
        ),
        (
            "FP8_DYNAMIC",
            "weight_scale",
            torch.tensor([[1.0], [-1.0]]),
            r"m\.q\.weight_scale: scale -1\.0; .*positive",
        ),
        ("FP8", "input_scale", torch.tensor([math.inf]), r"m\.q\.input_scale: scale inf"),
        ("FP8", "input_scale", torch.tensor([-0.5]), r"m\.q\.input_scale: scale -0\.5"),
        ("FP8", "weight", FLOAT8_NAN, r"m\.q: qvalue nan"),
        (
            "FP8_BLOCK",
            "weight_scale",
            torch.ones(2, 1),
            r"m\.q\.weight_scale: is torch\.float32 \[2, 1\], .*\(1, 1\)",
        ),
        (
            "W8A8_STATIC",
            "input_zero_point",
            torch.ones(1),
            r"m\.q\.input_zero_point: is torch\.float32",
        ),
        (
            "W4A16",
            "weight_shape",
            torch.tensor([2, 9]),
            r"m\.q\.weight_packed: \[2, 1\], weight_shape \(2, 9\)",
        ),
        (
            "W4A16",
            "weight_shape",
            torch.tensor([3, 8]),
            r"m\.q\.weight_packed: \[2, 1\], weight_shape \(3, 8\)",
        ),
        ("W4A16", "weight_shape", torch.tensor([2, 7]), r"m\.q: weight is \[2, 7\], group_size=8"),
        (
            "W4A16_ASYM",
            "weight_zero_point",
            torch.zeros(2, 1, dtype=torch.int32),
            r"weight_zero_point: .*\(1, 1\)",
        ),
        (
            "W3A16",
            "weight_shape",
            torch.tensor([2, 11]),
            r"m\.q\.weight_packed: \[2, 1\], .* \(2, 11\) needs \[2, 2\]",
        ),
        (
            "W3A16_ASYM",
            "weight_zero_point",
            torch.zeros(2, 1, dtype=torch.int32),
            r"weight_zero_point: .*\(1, 1\)",
        ),
        (
            "W2A16",
            "weight_packed",
            torch.zeros(2, 2, dtype=torch.int32),
            r"m\.q\.weight_packed: \[2, 2\], .* needs \[2, 1\]",
        ),
        (
            "int8-asym",
            "weight_zero_point",
            torch.zeros(2, dtype=torch.int8),
            r"weight_zero_point: .*\(2, 1\)",
        ),
    ],
)
def test_a_damaged_artifact_is_refused_by_the_name_of_its_tensor(scheme, key, value, message):
    tensors = compressed_tensors.encode("m.q", random_linear(SCHEMES[scheme], 2, 8))
    if value is None:
        del tensors[f"m.q.{key}"]
    else:
        tensors[f"m.q.{key}"] = value
    with pytest.raises(InputError, match=message):
        compressed_tensors.decode("m.q", tensors, SCHEMES[scheme])


@pytest.mark.parametrize("name", SCHEMES)
def test_one_scheme_for_all_is_read_back_from_json_as_it_was(name):
    config = compressed_tensors.quantization_config(
        {"layers.0.q": SCHEMES[name], "layers.0.k": SCHEMES[name]},
        ignore=["lm_head"],
        model_type="llama",
    )
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["format"] == SCHEMES[name].layout
    read = compressed_tensors.schemes_from_config(
        json.loads(json.dumps(config)), ["layers.0.q", "layers.0.k", "lm_head"]
    )
    assert read == {"layers.0.q": SCHEMES[name], "layers.0.k": SCHEMES[name], "lm_head": None}


def test_several_schemes_are_read_back_linear_by_linear():
    schemes = {
        "layers.0.q": preset("FP8_DYNAMIC"),
        "layers.0.down": preset("W4A16"),
        "layers.1.q": preset("FP8_DYNAMIC"),
        "layers.1.down": with_group_size(preset("W4A16"), 32),
    }
    config = compressed_tensors.quantization_config(schemes, ignore=["lm_head"], model_type="llama")
    assert [group["targets"] for group in config["config_groups"].values()] == [
        ["layers.0.q", "layers.1.q"],
        ["layers.0.down"],
        ["layers.1.down"],
    ]
    assert config["format"] == "mixed-precision"
    read = compressed_tensors.schemes_from_config(
        json.loads(json.dumps(config)), [*schemes, "lm_head"]
    )
    assert read == schemes | {"lm_head": None}


def test_schemes_that_differ_only_in_name_are_one_group():
    schemes = {"a": preset("W8A8"), "b": replace(preset("W8A8"), name="other", algorithm="gptq")}
    config = compressed_tensors.quantization_config(schemes, ignore=[], model_type="llama")
    assert list(config["config_groups"]) == ["group_0"]


def test_gpt_neox_ignores_its_head_under_both_names():
    config = compressed_tensors.quantization_config(
        {"q": preset("FP8")}, ignore=["embed_out"], model_type="gpt_neox"
    )
    assert config["ignore"] == ["embed_out", "lm_head"]


@pytest.mark.parametrize(
    ("schemes", "ignore", "message"),
    [
        ({}, [], r"no linear is quantized"),
        ({"q": preset("FP8")}, ["q"], r"q: both quantized and ignored"),
    ],
)
def test_a_config_needs_every_linear_once(schemes, ignore, message):
    with pytest.raises(SchemeError, match=message):
        compressed_tensors.quantization_config(schemes, ignore=ignore, model_type="llama")


def config_of(**groups: dict) -> dict:
    base = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "config_groups": {
            name: {"targets": ["Linear"], "weights": base | changes.pop("weights", {})} | changes
            for name, changes in groups.items()
        },
    }


def test_a_name_beats_a_pattern_and_a_pattern_beats_the_class():
    config = config_of(
        everything={},
        attention={"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 4}},
        one={"targets": ["layers.0.self_attn.q"], "format": "int-quantized"},
    )
    config["ignore"] = ["re:.*gate$", "lm_head"]
    linears = [
        "layers.0.self_attn.q",
        "layers.0.self_attn.k",
        "layers.0.mlp.up",
        "layers.0.mlp.gate",
        "lm_head",
    ]
    read = compressed_tensors.schemes_from_config(config, linears)
    assert [None if s is None else (s.weights.num_bits, s.layout) for s in read.values()] == [
        (8, "int-quantized"),
        (4, "pack-quantized"),
        (8, "pack-quantized"),
        None,
        None,
    ]
    assert read["layers.0.mlp.up"] == preset("W8A16")
    assert read["layers.0.self_attn.k"].name == "custom"


def test_a_linear_that_no_target_means_is_not_quantized():
    config = config_of(one={"targets": ["a"]})
    assert compressed_tensors.schemes_from_config(config, ["a", "b"]) == {
        "a": preset("W8A16"),
        "b": None,
    }


def test_order_of_columns_is_history_and_not_layout():
    config = config_of(
        g={"weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "actorder": "weight"}}
    )
    assert compressed_tensors.schemes_from_config(config, ["a"]) == {"a": preset("W4A16")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, r"quant_method is 'gptq'"),
        ({"quantization_status": "frozen"}, r"quantization_status is 'frozen'"),
        ({"kv_cache_scheme": {"num_bits": 4}}, r"kv_cache_scheme is"),
        ({"format": "marlin-24"}, r"group_0: layout='marlin-24'"),
        ({"format": None}, r"group_0: layout=None"),
        ({"weights": {"strategy": "block"}}, r"group_0: strategy 'block'"),
        (
            {"weights": {"strategy": "block", "block_structure": [128, 64]}},
            r"group_0: .*block_structure=\[128, 64\]",
        ),
        (
            {"weights": {"strategy": "block", "block_structure": [8, 8]}},
            r"group_0: granularity='per_block' with kind='int'",
        ),
        ({"weights": {"strategy": "tensor_group"}}, r"group_0: strategy 'tensor_group'"),
        ({"weights": {"num_bits": 7}}, r"group_0: num_bits=7"),
        ({"weights": {"type": "float"}}, r"group_0: .*layout='pack-quantized'.*float"),
        ({"weights": {"type": "posit"}}, r"group_0: kind='posit'"),
        ({"weights": {"actorder": "group"}}, r"group_0: .*actorder='group'"),
        ({"weights": {"dynamic": "local"}}, r"group_0: dynamic='local'"),
        ({"weights": {"strategy": "tensor"}}, r"one scale per tensor"),
        (
            {
                "input_activations": {
                    "num_bits": 8,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": True,
                }
            },
            r"group_0: ",
        ),
        ({"output_activations": {"num_bits": 8}}, r"group_0 has no weights, or quantizes outputs"),
    ],
)
def test_what_this_version_would_compute_wrongly_is_unsupported(changes, message):
    top = {
        k: v
        for k, v in changes.items()
        if k in ("quant_method", "quantization_status", "kv_cache_scheme", "format")
    }
    group = {k: v for k, v in changes.items() if k not in top}
    config = config_of(group_0=group) | top
    with pytest.raises(UnsupportedError, match=message):
        compressed_tensors.schemes_from_config(config, ["a"])


@pytest.mark.parametrize(
    ("words", "strategy"),
    [({}, "tensor"), ({"group_size": -1}, "channel"), ({"group_size": 32}, "group")],
)
def test_a_strategy_that_is_not_given_is_inferred_from_the_group_size(words, strategy):
    config = config_of(g={"format": "int-quantized", "weights": {"strategy": strategy, **words}})
    told = compressed_tensors.schemes_from_config(config, ["a"])
    weights = config["config_groups"]["g"]["weights"]
    weights["strategy"] = None
    assert compressed_tensors.schemes_from_config(config, ["a"]) == told
    del weights["strategy"]
    assert compressed_tensors.schemes_from_config(config, ["a"]) == told


@pytest.mark.parametrize("words", [{"group_size": 0}, {"block_structure": [8, 8]}])
def test_a_strategy_that_cannot_be_inferred_is_unsupported(words):
    with pytest.raises(UnsupportedError, match="group_0: strategy None"):
        compressed_tensors.schemes_from_config(
            config_of(group_0={"weights": {"strategy": None, **words}}), ["a"]
        )


def test_a_single_scale_may_have_the_shape_of_a_number():
    found = preset("FP8")
    weight = QTensor(
        qvalue=torch.ones(4, 8).to(torch.float8_e4m3fn),
        scale=torch.full((1, 1), 0.5),
        scheme=found.weights,
    )
    linear = QuantizedLinear(weight=weight, scheme=found, input_scale=torch.tensor([0.25]))
    tensors = {
        key: tensor.squeeze() for key, tensor in compressed_tensors.encode("a", linear).items()
    }
    assert tensors["a.weight_scale"].shape == tensors["a.input_scale"].shape == ()
    read = compressed_tensors.decode("a", tensors, found)
    assert torch.equal(read.dequantize(), linear.dequantize()) and torch.equal(
        read.input_scale, linear.input_scale
    )


def test_blocks_that_do_not_divide_the_inputs_are_unsupported():
    found = with_group_size(preset("FP8_BLOCK"), 96)
    tensors = {
        "a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(2, 2),
    }
    with pytest.raises(
        UnsupportedError, match=r"^a\.weight: 128 input features, blocks of 96 do not divide them"
    ):
        compressed_tensors.decode("a", tensors, found)


def test_a_config_without_groups_or_with_a_broken_pattern_is_damaged():
    with pytest.raises(InputError, match=r"config\.json: quantization_config has no config_groups"):
        compressed_tensors.schemes_from_config(config_of(), ["a"])
    with pytest.raises(
        InputError, match=r"config\.json: .*config_groups\.g: \['Linear'\], a table is needed"
    ):
        compressed_tensors.schemes_from_config(
            config_of() | {"config_groups": {"g": ["Linear"]}}, ["a"]
        )
    with pytest.raises(
        InputError, match=r"pattern '\(' is no regular expression.*; correct the pattern"
    ):
        compressed_tensors.schemes_from_config(config_of(g={"targets": ["re:("]}), ["a"])


def test_the_table_knows_it_by_name():
    assert FORMATS[compressed_tensors.NAME] is compressed_tensors
    assert compressed_tensors.LAYOUT_VERSION == 1


def test_linears_that_share_an_input_share_no_memory_in_the_file():
    scale, zero_point = torch.tensor([0.5]), torch.tensor([3], dtype=torch.int8)
    linear = random_linear(SCHEMES["W8A8_STATIC"], 2, 8)
    linear = replace(linear, input_scale=scale, input_zero_point=zero_point)
    files = [compressed_tensors.encode(name, linear) for name in ("q", "k")]
    for suffix in ("input_scale", "input_zero_point"):
        assert files[0][f"q.{suffix}"].data_ptr() != files[1][f"k.{suffix}"].data_ptr()


MIXED = {
    "a.down": replace(PRESETS["W8A16"], rotation=64),
    "b.down": replace(PRESETS["W8A16"], rotation=16),
}


def test_inputs_that_are_mixed_are_named_in_the_words_of_compressed_tensors():
    schemes = {"a.up": PRESETS["W8A16"], **MIXED}
    config = json.loads(
        json.dumps(
            compressed_tensors.quantization_config(schemes, ignore=["lm_head"], model_type="llama")
        )
    )
    # theirs; refuses keys that it does not know
    groups = TransformConfig(**config["transform_config"]).config_groups
    found = {
        target: group.head_dim
        for group in groups.values()
        for part in group.apply
        for target in part.targets
    }
    assert found == {"a.down": 64, "b.down": 16}
    assert {(group.type, part.location) for group in groups.values() for part in group.apply} == {
        ("hadamard", "input")
    }
    assert not any(
        group.randomize or part.inverse for group in groups.values() for part in group.apply
    )
    assert compressed_tensors.schemes_from_config(config, [*schemes, "lm_head"]) == {
        **schemes,
        "lm_head": None,
    }
    plain = compressed_tensors.quantization_config(
        {"a.up": PRESETS["W8A16"]}, ignore=[], model_type="llama"
    )
    assert "transform_config" not in plain
    assert compressed_tensors.schemes_from_config(plain | {"transform_config": {}}, ["a.up"]) == {
        "a.up": PRESETS["W8A16"]
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"type": "random-hadamard"},
        {"randomize": True},
        {"head_dim": None},
        {"head_dim": 24},
        {"apply": [{"targets": ["a.down"], "location": "output"}]},
        {"apply": [{"targets": ["a.down"], "location": "weight_input"}]},
        {"apply": [{"targets": ["a.down"], "location": "input", "ignore": ["b.down"]}]},
        {"apply": [{"targets": ["re:.*down"], "location": "input"}]},
        {"apply": [{"targets": ["lm_head"], "location": "input"}]},
    ],
    ids=str,
)
def test_a_transform_that_is_not_known_is_refused_not_ignored(changed):
    config = compressed_tensors.quantization_config(MIXED, ignore=["lm_head"], model_type="llama")
    config["transform_config"]["config_groups"]["hadamard_64"] |= changed
    with pytest.raises(UnsupportedError, match="compressed-tensors: transform_config"):
        compressed_tensors.schemes_from_config(config, [*MIXED, "lm_head"])


def test_what_a_model_calls_its_linears_stands_beside_what_its_checkpoint_does():
    """transformers matches targets and ignored names with modules.

    Modules have other names in models that read images too.
    """
    modules = {
        "language_model.model.q": "model.language_model.q",
        "language_model.model.gate": "model.language_model.gate",
    }
    config = compressed_tensors.quantization_config(
        {"language_model.model.q": preset("W8A16"), "k": preset("W4A16")},
        ignore=["language_model.model.gate", "lm_head"],
        model_type="gemma3",
        modules=modules,
    )
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    assert targets == ["language_model.model.q", "model.language_model.q", "k"]
    assert config["ignore"] == ["language_model.model.gate", "lm_head", "model.language_model.gate"]
    read = compressed_tensors.schemes_from_config(config, ["language_model.model.q", "k"])
    assert read == {"language_model.model.q": preset("W8A16"), "k": preset("W4A16")}
