"""ModelOpt's layout: tensors by its formulas, there and back, refusals, and damaged folders."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from quantflow.algorithms import ALGORITHMS
from quantflow.core.dtypes import NAMES
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, preset
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats import BESIDE, LAYOUTS, compressed_tensors, layout_of

LAYOUT = LAYOUTS["modelopt"]
ALGORITHM_OF = {  # by its own documentation
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
    "NVFP4A16": "W4A16_NVFP4",
}


def made(name: str) -> QuantizedLinear:
    scheme: LinearScheme = preset(name)
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    dtype = compressed_tensors.scale_dtype(scheme, torch.bfloat16)
    (found,) = (
        ALGORITHMS["rtn"]
        .quantize_group({"a": weight}, scheme, statistics={}, scale_dtype=dtype)
        .values()
    )
    measured = {"FP8": torch.tensor([0.0371]), "NVFP4": torch.tensor([64.0])}.get(name)
    return QuantizedLinear(weight=found.weight, scheme=scheme, input_scale=measured)


def values(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """The weight by ModelOpt's formulas, in numpy with ml_dtypes' codes, [24, 96]."""
    weight, scale = tensors["a.weight"], tensors["a.weight_scale"]
    if weight.dtype == torch.uint8:
        packed = weight.numpy()
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(24, 96)
        real = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        real = weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    kinds = {torch.uint8: ml_dtypes.float8_e8m0fnu, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    if scale.dtype in kinds:
        steps = scale.view(torch.uint8).numpy().view(kinds[scale.dtype]).astype(np.float32)
    else:
        steps = scale.numpy().reshape(-1, 1) if scale.ndim else scale.numpy().reshape(1, 1)
    if "a.weight_scale_2" in tensors:
        steps = steps * tensors["a.weight_scale_2"].item()
    return real * np.repeat(
        np.broadcast_to(steps, (24, steps.shape[1])), 96 // steps.shape[1], axis=1
    )


@pytest.mark.parametrize("name", ALGORITHM_OF)
def test_tensors_hold_the_values_by_its_formulas_and_come_back_with_every_byte(name):
    linear = made(name)
    tensors = LAYOUT.encode("a", linear, scale_dtype=torch.float32)
    assert tuple(tensors) == LAYOUT.tensor_names("a", linear.scheme)
    np.testing.assert_array_equal(values(tensors), linear.weight.dequantize().numpy())
    back = LAYOUT.decode("a", tensors, linear.scheme)
    for one in (LAYOUT.encode("a", back, scale_dtype=torch.float32), tensors):
        assert {key: (part.dtype, part.shape) for key, part in one.items()} == {
            key: (part.dtype, part.shape) for key, part in tensors.items()
        }
    ours, theirs = (compressed_tensors.encode("a", one) for one in (linear, back))
    for key in ours:  # the way to compressed-tensors and back is every byte's
        assert torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8)), key


def test_a_group_whose_scale_is_zero_is_one_of_zeros():
    linear = made("NVFP4A16")
    tensors = LAYOUT.encode("a", linear, scale_dtype=torch.float32)
    codes = tensors["a.weight_scale"].view(torch.uint8)
    codes[3, 1], codes[7, 0] = 0x00, 0x80  # both signs of zero
    assert tensors["a.weight"][3, 8:16].any() and tensors["a.weight"][7, :8].any()
    read = LAYOUT.decode("a", tensors, linear.scheme)
    expected = linear.weight.dequantize()
    expected[3, 16:32] = 0
    expected[7, :16] = 0
    assert torch.equal(read.dequantize(), expected) and torch.equal(
        read.dequantize(), torch.from_numpy(values(tensors))
    )
    again = LAYOUT.encode("a", read, scale_dtype=torch.float32)
    assert not again["a.weight"][3, 8:16].any() and float(again["a.weight_scale"][3, 1]) == 1.0
    assert torch.equal(LAYOUT.decode("a", again, linear.scheme).dequantize(), expected)


def test_scales_that_the_other_layout_of_nvfp4_would_change_are_refused_with_the_first_of_them():
    linear = made("NVFP4A16")
    theirs, ours = LAYOUTS["compressed-tensors"], LAYOUT
    multiplied = ours.encode("a", linear, scale_dtype=torch.float32)
    multiplied["a.weight_scale_2"] *= 0.7318
    divided = theirs.encode("a", linear, scale_dtype=torch.float32)
    divided["a.weight_global_scale"] = torch.tensor([1234.567])
    for source, tensors, layout in ((ours, multiplied, theirs), (theirs, divided, ours)):
        read = source.decode("a", tensors, linear.scheme)
        said = (
            r"^a\.weight_scale: (\d+) of 144 scales would change, the first \(row (\d+), group "
            r"(\d+)\) from (\S+) to (\S+)$"
        )
        with pytest.raises(UnsupportedError) as refused:
            layout.encode("a", read, scale_dtype=torch.float32)
        found = re.match(said, refused.value.cause)
        assert found is not None, refused.value.cause
        row, group = int(found[2]), int(found[3])
        before, after = float(found[4]), float(found[5])
        assert (
            before == read.weight.scale[row, group].item()
            and 0 < abs(before - after) < 1e-6 * before
        )
        source.encode("a", read, scale_dtype=torch.float32)  # its own layout holds them


def test_the_numbers_of_an_nvfp4_linear_are_the_inverses_of_global_scales():
    linear = made("NVFP4")
    tensors = LAYOUT.encode("a", linear, scale_dtype=torch.float32)
    assert tensors["a.input_scale"].item() == 1 / 64
    assert tensors["a.weight_scale_2"].item() * linear.weight.global_scale.item() == 1
    assert tensors["a.weight_scale_2"].shape == tensors["a.input_scale"].shape == ()


@pytest.mark.parametrize("name", ALGORITHM_OF)
def test_a_configuration_names_the_algorithm_and_reads_back_as_the_scheme(name):
    scheme, tensors = preset(name), LAYOUT.encode("a", made(name), scale_dtype=torch.float32)
    infos = {
        key: TensorInfo(
            name=key, dtype=NAMES[part.dtype], shape=tuple(part.shape), offset=0, nbytes=part.nbytes
        )
        for key, part in tensors.items()
    }
    config = LAYOUT.quantization_config({"a": scheme}, ignore=["lm_head"], model_type="llama")
    file, content = BESIDE["modelopt"]
    # as readers of the file beside config.json have it
    older = {"quant_method": "modelopt", **content(config)}
    assert file == "hf_quant_config.json"
    assert older["quantization"]["quant_algo"] == config["quant_algo"] == ALGORITHM_OF[name]
    assert older["quantization"]["exclude_modules"] == config["ignore"] == ["lm_head"]
    for table in (config, older):
        assert layout_of(table, infos).schemes(
            table, {"a": (24, 96), "lm_head": (8, 96)}, infos
        ) == {"a": scheme}


def test_nvfp4_whose_groups_quantize_no_inputs_is_of_weights_alone():
    config = LAYOUT.quantization_config({"a": preset("NVFP4A16")}, ignore=[], model_type="llama")
    config["quant_algo"] = "NVFP4"
    info = TensorInfo(name="a.weight_scale", dtype="F8_E4M3", shape=(24, 6), offset=0, nbytes=144)
    assert LAYOUT.schemes(config, {"a": (24, 96)}, {"a.weight_scale": info}) == {
        "a": preset("NVFP4A16")
    }


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("NVFP4", {"quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD'"),
        ("NVFP4", {"group_size": 32}, "group_size 32 with quant_algo NVFP4"),
        ("FP8", {"kv_cache_scheme": {"num_bits": 8}}, "keys and values are kept as"),
        (
            "FP8",
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
            "keys and values are kept as",
        ),
        ("FP8", {"kv_cache_quant_algo": "NVFP4"}, "keys and values are kept as 'NVFP4'"),
        ("FP8", {"quantization": "FP8"}, "quant_algo 'None'"),
    ],
)
def test_configurations_that_are_not_known_are_refused(name, change, said):
    config = LAYOUT.quantization_config({"a": preset(name)}, ignore=[], model_type="llama") | change
    with pytest.raises(UnsupportedError, match=f"config.json: {said}"):
        LAYOUT.schemes(config, {"a": (24, 96)}, {})


@pytest.mark.parametrize("name", ["W4A16", "FP8_BLOCK", "MXFP4", "MXFP4A16", "W8A8"])
def test_schemes_that_it_does_not_have_are_refused_with_those_that_it_has(name):
    reason = LAYOUT.why_not(preset(name), (24, 96))
    assert (
        reason
        == f"scheme {name} is none of those that it has: FP8, FP8_DYNAMIC, MXFP8, NVFP4, NVFP4A16"
    )


def test_a_global_scale_whose_inverse_is_another_number_is_refused_with_both():
    linear = made("NVFP4A16")
    assert np.float32(1) / (np.float32(1) / np.float32(13)) != 13  # float32 has no inverse of it
    scale = linear.weight.scale * linear.weight.global_scale / 13
    weight = replace(linear.weight, scale=scale, global_scale=torch.tensor([13.0]))
    with pytest.raises(
        UnsupportedError, match=r"a\.weight_scale_2: the scale would change from 13\.0 to 12\.99"
    ):
        LAYOUT.encode("a", replace(linear, weight=weight), scale_dtype=torch.float32)


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("a.weight", None, "missing"),
        ("a.weight", torch.zeros(24, 48, dtype=torch.int8), "is torch.int8"),
        ("a.weight", torch.zeros(24, dtype=torch.uint8), r"is \[24\]"),
        ("a.weight", torch.zeros(24, 49, dtype=torch.uint8), "98 input features, groups of 16"),
        ("a.weight_scale", None, "missing"),
        (
            "a.weight_scale",
            torch.ones(24, 5).to(torch.float8_e4m3fn),
            r"is torch.float8_e4m3fn \[24, 5\]",
        ),
        ("a.weight_scale_2", None, "missing"),
        ("a.weight_scale_2", torch.tensor(torch.nan), "scale nan"),
        ("a.weight_scale_2", torch.tensor(0.0), "scale 0.0"),
        ("a.weight_scale_2", torch.ones(2), r"is torch.float32 \[2\]"),
        ("a.input_scale", None, "missing"),
        ("a.input_scale", torch.tensor(-1.0), "scale -1.0"),
    ],
)
def test_damaged_tensors_are_refused_by_name(key, change, said):
    tensors = LAYOUT.encode("a", made("NVFP4"), scale_dtype=torch.float32)
    tensors |= {} if change is None else {key: change}
    if change is None:
        del tensors[key]
    with pytest.raises(InputError, match=f"^{key}: {said}"):
        LAYOUT.decode("a", tensors, preset("NVFP4"))


def test_scales_of_nan_are_refused():
    tensors = LAYOUT.encode("a", made("NVFP4"), scale_dtype=torch.float32)
    tensors["a.weight_scale"].view(torch.uint8)[3, 2] = 0x7F
    with pytest.raises(InputError, match=r"^a: scale nan"):
        LAYOUT.decode("a", tensors, preset("NVFP4"))
