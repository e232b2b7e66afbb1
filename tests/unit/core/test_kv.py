"""Keys and values after a cache of 8 bits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.kv import SCHEMES, KVScales, kv_scales, kv_scheme, kv_words
from quantflow.errors import SchemeError

FP8, INT8 = kv_scheme("FP8", "per_tensor"), kv_scheme("INT8", "per_tensor")


def ones(x):
    return x.reshape(1, 1, 1, -1)


def test_scales_worked_by_hand():
    found = kv_scales(FP8, keys=torch.tensor([448.0]), values=torch.tensor([7.0]))
    assert (found.keys.tolist(), found.values.tolist()) == ([1.0], [0.015625])
    found = kv_scales(
        kv_scheme("INT8", "per_head"),
        keys=torch.tensor([255.0, 1.275]),
        values=torch.tensor([0.0, 127.5]),
    )
    assert found.keys.tolist() == pytest.approx([2.0, 0.01])
    assert found.values.tolist() == [1.0, 1.0]  # of nothing but zeros it is 1


def test_rounding_worked_by_hand():
    int8 = KVScales(scheme=INT8, keys=torch.tensor([0.5]), values=torch.tensor([2.0]))
    x = ones(torch.tensor([0.24, 0.25, 0.75, -64.0, 1000.0, -1000.0]))
    # halves to even, then -128..127
    assert int8.round_keys(x).flatten().tolist() == [0.0, 0.0, 1.0, -64.0, 63.5, -64.0]
    assert int8.round_values(x).flatten().tolist() == [0.0, 0.0, 0.0, -64.0, 254.0, -256.0]
    float8 = KVScales(scheme=FP8, keys=torch.tensor([0.5]), values=torch.tensor([1.0]))
    # 17 / 0.5 = 34 is a tie between 32 and 36 of e4m3: to the even mantissa, 32. 1000 saturates at
    # 448.
    assert float8.round_keys(ones(torch.tensor([17.0, 18.0, -1000.0]))).flatten().tolist() == [
        16.0,
        18.0,
        -224.0,
    ]
    assert float8.round_values(ones(torch.tensor([17.0, -500.0]))).flatten().tolist() == [
        16.0,
        -448.0,
    ]


def test_each_head_has_its_own_scale():
    scales = KVScales(
        scheme=kv_scheme("INT8", "per_head"),
        keys=torch.tensor([1.0, 10.0]),
        values=torch.tensor([4.0, 1.0]),
    )
    x = torch.tensor([[6.0], [7.0]]).expand(2, 3).reshape(1, 2, 1, 3)  # heads in the second place
    assert scales.round_keys(x)[0, :, 0, 0].tolist() == [6.0, 10.0]
    assert scales.round_values(x)[0, :, 0, 0].tolist() == [8.0, 7.0]  # 1.5 is a tie: to 2


def float8_oracle(x: float) -> float:
    """e4m3fn by definition: 4 significant bits from 2^-6, multiples of 2^-9 below, up to 448."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    return max(-448.0, min(448.0, round(x / step) * step))  # Python rounds halves to even


@pytest.mark.parametrize("scheme", SCHEMES, ids=kv_words)
@given(
    amax=st.floats(2.0**-20, 2.0**20, width=32),
    numbers=st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=8),
)
def test_what_is_left_is_what_exact_arithmetic_leaves(scheme, amax, numbers):
    x = torch.tensor(numbers, dtype=torch.float32) * amax * 2  # half of them may lie outside
    scales = kv_scales(scheme, keys=torch.tensor([amax]), values=torch.tensor([amax]))
    found = scales.round_keys(ones(x)).flatten().tolist()
    scale = scales.keys.item()
    assert scale == pytest.approx(amax / (448 if scheme.kind == "float" else 127.5), rel=1e-6)
    for value, left in zip(x.tolist(), found, strict=True):
        ratio = torch.tensor(value).div(scale).item()  # in float32, as the formula says
        code = float8_oracle(ratio) if scheme.kind == "float" else max(-128, min(127, round(ratio)))
        assert left == (torch.tensor(code, dtype=torch.float32) * scale).item()


def test_dtype_shape_and_nan_stay():
    scales = kv_scales(FP8, keys=torch.tensor([3.0]), values=torch.tensor([3.0]))
    x = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    x[0, 0, 0, 0] = torch.nan
    found = scales.round_values(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, x.shape)
    assert found.isnan().sum() == 1
    assert scales.round_values(x[:, :, :0]).shape == (2, 3, 0, 4)


@pytest.mark.parametrize("bad", [-1.0, torch.inf, torch.nan])
def test_magnitudes_that_are_none_are_refused(bad):
    with pytest.raises(
        SchemeError,
        match=r"values: amax \[.*\]; magnitudes are finite and not negative; measure again",
    ):
        kv_scales(FP8, keys=torch.tensor([1.0]), values=torch.tensor([bad]))


def test_words_that_mean_nothing_are_refused():
    for words in (("FP4", "per_tensor"), ("FP8", "per_token")):
        with pytest.raises(
            SchemeError, match=r"kv_cache scheme '\w+' '\w+' is unknown; use FP8 or INT8"
        ):
            kv_scheme(*words)
