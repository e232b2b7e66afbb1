"""Codes of e2m1 and e8m0, every one of them, against ml_dtypes and compressed-tensors."""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from quantflow.core import affine, float8, microscaling
from quantflow.core.scheme import PRESETS
from quantflow.errors import SchemeError

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)[None]


def test_every_byte_of_e2m1_has_the_two_values_that_others_read():
    values = microscaling.unpack_e2m1(EVERY_BYTE).float()
    nibbles = (
        np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.uint8).reshape(-1)
    )
    expected = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values[0].numpy(), expected)
    np.testing.assert_array_equal(np.signbit(values[0].numpy()), np.signbit(expected))
    assert torch.equal(values, unpack_fp4_from_uint8(EVERY_BYTE, 1, 512, dtype=torch.float32))


def test_packing_undoes_unpacking_and_is_theirs():
    values = microscaling.unpack_e2m1(EVERY_BYTE)
    assert torch.equal(microscaling.pack_e2m1(values), EVERY_BYTE)
    assert torch.equal(microscaling.pack_e2m1(values), pack_fp4_to_uint8(values.float()))


def test_of_all_codes_of_e4m3_those_of_the_sixteen_values_are_held_and_no_others():
    every = EVERY_BYTE[0].view(torch.float8_e4m3fn)
    held = [microscaling.holds_e2m1(code[None]) for code in every]
    sixteen = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = torch.from_numpy(sixteen).to(torch.float8_e4m3fn).view(torch.uint8)
    assert set(EVERY_BYTE[0][torch.tensor(held)].tolist()) == set(expected.tolist())
    codes = microscaling.codes_of_e2m1(expected.view(torch.float8_e4m3fn))
    assert codes.tolist() == list(range(16))


def test_what_e2m1_does_not_hold_is_refused():
    with pytest.raises(SchemeError, match="none of e2m1's"):
        microscaling.pack_e2m1(torch.tensor([[0.75, 1.0]]).to(torch.float8_e4m3fn))
    with pytest.raises(SchemeError, match="3 columns of e2m1"):
        microscaling.pack_e2m1(torch.zeros(1, 3).to(torch.float8_e4m3fn))


def test_rounding_to_e2m1_is_to_nearest_ties_to_even_and_saturates():
    x = torch.cat(
        [
            torch.arange(-4096, 4097) / 512,
            torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e9, -torch.inf]),
        ]
    )
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(float8.cast(x, "e2m1").float().numpy(), expected)
    np.testing.assert_array_equal(float8.round_(x.clone(), "e2m1").numpy(), expected)
    assert microscaling.holds_e2m1(float8.cast(x, "e2m1"))
    assert float8.cast(torch.tensor([torch.nan]), "e2m1").float().isnan()


def test_every_code_of_e8m0_is_the_power_of_two_that_others_read():
    codes = EVERY_BYTE[0]
    found = microscaling.unpack_e8m0(codes)
    np.testing.assert_array_equal(
        found.numpy(), codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    assert torch.equal(found[:255], codes.view(torch.float8_e8m0fnu).float()[:255])
    assert torch.equal(microscaling.pack_e8m0(found[:255]), codes[:255])


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, 2.0**-130, torch.inf, torch.nan])
def test_a_scale_that_is_no_code_of_e8m0_is_refused(scale):
    with pytest.raises(SchemeError, match=r"in e8m0; e8m0 holds the powers of two"):
        microscaling.pack_e8m0(torch.tensor([scale]))


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8"])
def test_the_scale_of_a_microscaled_group_is_compressed_tensors(name):
    scheme = PRESETS[name].weights
    amax = torch.logspace(-20, 20, 4001)
    theirs = 2.0 ** (generate_mx_scales(amax, scheme.num_bits) - 127)
    assert torch.equal(affine.scale_from_amax(amax, scheme), theirs)
    assert affine.scale_from_amax(torch.tensor([0.0]), scheme).item() == 1.0


def test_a_global_scale_is_the_largest_power_of_two_by_which_scales_fit_e4m3():
    scheme = PRESETS["NVFP4"].weights
    for amax, expected in ((2688.0, 1.0), (2689.0, 0.5), (1344.0, 2.0), (1.0, 2048.0), (0.0, 1.0)):
        assert affine.global_scale_from_amax(torch.tensor(amax), scheme).item() == expected


def test_scales_that_were_fitted_are_stored_as_the_nearest_that_a_format_has():
    scale = torch.logspace(-6, 3, 2001)
    powers = affine.stored_scale(scale, PRESETS["MXFP4"].weights, torch.float8_e8m0fnu)
    np.testing.assert_array_equal(
        powers.numpy(), 2.0 ** np.round(np.log2(scale.numpy().astype(np.float64)))
    )
    assert torch.equal(
        affine.stored_scale(powers, PRESETS["MXFP4"].weights, torch.float8_e8m0fnu), powers
    )
    given = torch.tensor([0.25])
    stored = affine.stored_scale(
        scale, PRESETS["NVFP4"].weights, torch.float8_e4m3fn, global_scale=given
    )
    expected = (
        np.clip(scale.numpy() / 4, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        * 4
    )
    np.testing.assert_array_equal(stored.numpy(), expected)
