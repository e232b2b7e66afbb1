"""Microscaled schemes in compressed-tensors' layout: there and back, by rows, and damaged files."""

from dataclasses import replace

import pytest
import torch

from quantflow.algorithms import ALGORITHMS
from quantflow.core.dtypes import NAMES
from quantflow.core.microscaling import unpack_e2m1
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import PRESETS, scheme_words, with_float8, with_group_size
from quantflow.errors import InputError, SchemeError, UnsupportedError
from quantflow.formats import compressed_tensors

SCHEMES = {
    name: scheme for name, scheme in PRESETS.items() if scheme.weights.scale_format != "float"
}
X = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
STATISTICS = {"hessian_sum": X.T @ X, "count": torch.tensor(300)}


def made(name, *, algorithm="rtn", weights=None):
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    weights = weights or {
        "q": torch.randn(40, 96, generator=generator),
        "k": 9 * torch.randn(24, 96, generator=generator),
    }
    dtype = compressed_tensors.scale_dtype(scheme, torch.bfloat16)
    results = ALGORITHMS[algorithm].quantize_group(
        weights, scheme, statistics=STATISTICS, scale_dtype=dtype
    )
    measured = torch.tensor([64.0]) if scheme.input is not None and scheme.input.measured else None
    linears = {
        key: QuantizedLinear(weight=of.weight, scheme=scheme, input_scale=measured)
        for key, of in results.items()
    }
    return weights, linears, dtype


@pytest.mark.parametrize("algorithm", ["rtn", "rtn_mse", "gptq"])
@pytest.mark.parametrize("name", SCHEMES)
def test_decode_undoes_encode_and_the_specs_are_known_before(name, algorithm):
    weights, linears, dtype = made(name, algorithm=algorithm)
    for key, linear in linears.items():
        tensors = compressed_tensors.encode(key, linear, scale_dtype=dtype)
        found = {
            name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        assert found == compressed_tensors.tensor_specs(
            key, linear.scheme, weights[key].shape, torch.bfloat16
        )
        back = compressed_tensors.decode(key, tensors, linear.scheme)
        assert torch.equal(back.weight.dequantize(), linear.weight.dequantize())
        again = compressed_tensors.encode(key, back, scale_dtype=dtype)
        assert all(
            torch.equal(again[name].view(torch.uint8), tensors[name].view(torch.uint8))
            for name in tensors
        )


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_and_searched_scales_lose_less_than_rounding_to_nearest(name):
    errors = []
    for algorithm in ("rtn", "rtn_mse", "gptq"):
        weights, linears, _ = made(name, algorithm=algorithm)
        errors.append(
            sum(
                float(((of.weight.dequantize() - weights[key]) @ X.T).square().sum())
                for key, of in linears.items()
            )
        )
    assert errors[2] < errors[1] <= errors[0] * 1.001


def test_linears_of_a_group_share_their_global_scale():
    _, linears, _ = made("NVFP4")
    assert torch.equal(linears["q"].weight.global_scale, linears["k"].weight.global_scale)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name):
    _, linears, dtype = made(name, weights={"q": torch.zeros(4, 96)})
    back = compressed_tensors.decode(
        "q", compressed_tensors.encode("q", linears["q"], scale_dtype=dtype), SCHEMES[name]
    )
    assert not back.weight.dequantize().any()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_nan_is_refused_with_the_name_of_its_weight(name):
    weight = torch.ones(4, 96)
    weight[2, 3] = torch.nan
    with pytest.raises(InputError, match="^q: weight holds NaN or Inf"):
        made(name, weights={"q": weight})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_config_means_the_preset(name):
    config = compressed_tensors.quantization_config(
        {"q": SCHEMES[name]}, ignore=[], model_type="llama"
    )
    assert compressed_tensors.schemes_from_config(config, ["q"])["q"] == SCHEMES[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_is_what_is_decoded_where_codes_have_four_bits_and_inputs_are_left(name):
    _, linears, dtype = made(name)
    tensors = compressed_tensors.encode("q", linears["q"], scale_dtype=dtype)
    packed = compressed_tensors.packed("q", tensors, SCHEMES[name])
    assert (packed is None) == (name not in ("MXFP4A16", "NVFP4A16"))
    if packed is not None:
        expected = compressed_tensors.decode("q", tensors, SCHEMES[name])
        assert packed.shape == (40, 96) and packed.scheme == expected.scheme
        assert torch.equal(packed.scale, expected.weight.scale)
        bits = unpack_e2m1(packed.codes).view(torch.uint8)
        assert torch.equal(bits, expected.weight.qvalue.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("MXFP4A16", lambda t: t["q.weight_scale"][1, 2].fill_(255)),
        ("NVFP4A16", lambda t: t["q.weight_scale"][1, 2].fill_(0)),
        ("NVFP4A16", lambda t: t["q.weight_scale"][1, 2].fill_(-1)),
        ("NVFP4A16", lambda t: t["q.weight_global_scale"].fill_(torch.inf)),
        ("NVFP4A16", lambda t: t["q.weight_global_scale"].fill_(1e-40)),  # a scale is infinite
        ("MXFP4A16", lambda t: t.pop("q.weight_packed")),
        ("MXFP4A16", lambda t: t.update({"q.weight_packed": t["q.weight_packed"][:, :40]})),
        ("MXFP4A16", lambda t: t.update({"q.weight_scale": t["q.weight_scale"].float()})),
    ],
)
def test_packed_refuses_what_decode_refuses_with_the_same_words(name, change):
    _, linears, dtype = made(name)
    tensors = compressed_tensors.encode("q", linears["q"], scale_dtype=dtype)
    change(tensors)
    words = []
    for read in (compressed_tensors.decode, compressed_tensors.packed):
        with pytest.raises(InputError) as refused:
            read("q", tensors, SCHEMES[name])
        words.append(str(refused.value))
    assert words[0] == words[1]


def test_damaged_scales_are_refused_by_name():
    _, linears, dtype = made("MXFP4A16")
    tensors = compressed_tensors.encode("q", linears["q"], scale_dtype=dtype)
    tensors["q.weight_scale"][1, 2] = 255
    with pytest.raises(InputError, match=r"^q\.weight_scale: scale nan"):
        compressed_tensors.decode("q", tensors, SCHEMES["MXFP4A16"])
    _, linears, dtype = made("NVFP4")
    whole = compressed_tensors.encode("q", linears["q"], scale_dtype=dtype)
    for key in whole:
        with pytest.raises(InputError, match=rf"^{key}: missing"):
            compressed_tensors.decode(
                "q",
                {name: tensor for name, tensor in whole.items() if name != key},
                SCHEMES["NVFP4"],
            )


def test_what_the_formats_fix_cannot_be_changed():
    with pytest.raises(SchemeError, match="NVFP4 has groups of 16, group_size=32 was given"):
        with_group_size(PRESETS["NVFP4"], 32)
    with pytest.raises(
        SchemeError, match="MXFP8 has microscaled weights, float8='gaudi2' was given"
    ):
        with_float8(PRESETS["MXFP8"], "gaudi2")
    odd = replace(PRESETS["NVFP4A16"], weights=replace(PRESETS["NVFP4A16"].weights, group_size=32))
    with pytest.raises(UnsupportedError, match="in groups of 32, loaders know 16"):
        compressed_tensors.tensor_specs("q", odd, (4, 32), torch.bfloat16)


def test_schemes_that_were_there_before_are_scheme_words_as_before():
    assert "scale_format" not in scheme_words(PRESETS["W4A16"])["weights"]
    assert scheme_words(PRESETS["NVFP4"])["weights"]["scale_format"] == "e4m3"
