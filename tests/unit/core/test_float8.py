"""float8.cast against tables from the formats' definitions, and against ml_dtypes."""

import bisect
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core import float8
from quantflow.core.scheme import FLOAT4, FLOAT8_FLAVOURS

# flavour -> (exponent bits, mantissa bits, bias, largest value used)
LAYOUT = {
    "e4m3fn": (4, 3, 7, 448),
    "e5m2": (5, 2, 15, 57344),
    "e4m3fnuz": (4, 3, 8, 240),
    "gaudi2": (4, 3, 7, 240),
}
ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "gaudi2": ml_dtypes.float8_e4m3fn,
}


def decode(code: int, flavour: str) -> float:
    exponent_bits, mantissa_bits, bias, _ = LAYOUT[flavour]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if flavour == "e4m3fnuz" and code == 0x80:
        return math.nan
    if flavour in ("e4m3fn", "gaudi2") and code & 0x7F == 0x7F:
        return math.nan
    if flavour == "e5m2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def usable(flavour: str) -> list[float]:
    """Values of codes 0, 1, 2, ... up to the largest; ascending, so the position is the code."""
    largest = LAYOUT[flavour][3]
    return [value for value in (decode(code, flavour) for code in range(128)) if value <= largest]


def nearest_code(x: float, flavour: str) -> int:
    """Code of the nearest usable value, ties to the even code, by search; doubles are exact."""
    values = usable(flavour)
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    magnitude = min(abs(x), values[-1])
    above = bisect.bisect_left(values, magnitude)
    if values[above] != magnitude:
        low, high = magnitude - values[above - 1], values[above] - magnitude
        if low < high or (low == high and (above - 1) % 2 == 0):
            above -= 1
    return 0 if above == 0 and flavour == "e4m3fnuz" else sign | above


def codes(x: torch.Tensor, flavour: str) -> list[int]:
    return float8.cast(x, flavour).view(torch.uint8).tolist()


def test_the_names_in_schemes_are_the_flavours():
    assert tuple(float8.FLAVOURS) == (*FLOAT8_FLAVOURS, FLOAT4)


@pytest.mark.parametrize("flavour", LAYOUT)
def test_every_code_reads_as_its_definition_says(flavour):
    stored = torch.arange(256, dtype=torch.uint8).view(float8.FLAVOURS[flavour].dtype)
    expected = [decode(code, flavour) for code in range(256)]
    actual = stored.float().tolist()
    assert [math.isnan(value) for value in actual] == [math.isnan(value) for value in expected]
    assert all(a == e for a, e in zip(actual, expected, strict=True) if not math.isnan(e))
    assert math.copysign(1, actual[0]) == 1
    if flavour != "e4m3fnuz":
        assert math.copysign(1, actual[0x80]) == -1


@pytest.mark.parametrize("flavour", LAYOUT)
def test_every_code_reads_as_ml_dtypes_reads_it(flavour):
    raw = np.arange(256, dtype=np.uint8)
    expected = raw.view(ML_DTYPES[flavour]).astype(np.float32)
    actual = torch.from_numpy(raw).view(float8.FLAVOURS[flavour].dtype).float().numpy()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("flavour", LAYOUT)
def test_the_largest_value_is_the_largest_usable_code(flavour):
    assert float8.FLAVOURS[flavour].largest == LAYOUT[flavour][3] == usable(flavour)[-1]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("flavour", LAYOUT)
def test_every_value_of_the_format_casts_to_its_own_code(flavour, sign):
    values = usable(flavour)[1:]
    offset = 0x80 if sign < 0 else 0
    assert codes(sign * torch.tensor(values), flavour) == [
        offset + code for code in range(1, len(values) + 1)
    ]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("flavour", LAYOUT)
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer_one(flavour, sign):
    values = usable(flavour)
    middles = torch.tensor(
        [(low + high) / 2 for low, high in zip(values, values[1:], strict=False)]
    )
    assert middles.double().tolist() == [
        (low + high) / 2 for low, high in zip(values, values[1:], strict=False)
    ]
    below = torch.nextafter(middles, torch.zeros(()))
    above = torch.nextafter(middles, torch.tensor(math.inf))
    offset = 0x80 if sign < 0 else 0
    zero = 0 if flavour == "e4m3fnuz" else offset  # this flavour has one zero
    count = len(middles)
    assert codes(sign * below, flavour) == [zero] + [offset + code for code in range(1, count)]
    assert codes(sign * above, flavour) == [offset + code + 1 for code in range(count)]
    even = [code if code % 2 == 0 else code + 1 for code in range(count)]
    assert codes(sign * middles, flavour) == [offset + code if code else zero for code in even]


@pytest.mark.parametrize("flavour", LAYOUT)
def test_values_beyond_the_largest_saturate_and_infinities_do_too(flavour):
    largest = LAYOUT[flavour][3]
    beyond = [
        math.nextafter(largest, math.inf),
        largest * 1.01,
        largest * 1.07,
        largest * 2,
        1e30,
        3.4e38,
        math.inf,
    ]
    assert float8.cast(torch.tensor(beyond), flavour).float().tolist() == [largest] * len(beyond)
    assert float8.cast(-torch.tensor(beyond), flavour).float().tolist() == [-largest] * len(beyond)


@pytest.mark.parametrize("flavour", LAYOUT)
def test_nan_stays_nan_whatever_its_sign_and_payload(flavour):
    payloads = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(
        torch.float32
    )
    assert payloads.isnan().all()
    assert float8.cast(payloads, flavour).float().isnan().all()


@pytest.mark.parametrize("flavour", LAYOUT)
def test_zeros_and_values_too_small_keep_their_sign_where_the_format_has_two_zeros(flavour):
    tiny = torch.tensor([0.0, 1e-45, 1e-38, -0.0, -1e-45, -1e-38])
    negative = 0 if flavour == "e4m3fnuz" else 0x80
    assert codes(tiny, flavour) == [0, 0, 0, negative, negative, negative]


@pytest.mark.parametrize("flavour", LAYOUT)
def test_subnormals_are_multiples_of_the_smallest_one(flavour):
    _, mantissa_bits, bias, _ = LAYOUT[flavour]
    step = 2.0 ** (1 - bias - mantissa_bits)
    x = torch.tensor([0.5, 0.51, 1.0, 1.49, 1.5, 2.5, 2.51]) * step
    assert (float8.cast(x, flavour).float() / step).tolist() == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("flavour", LAYOUT)
def test_any_float32_goes_where_a_search_in_the_table_puts_it(flavour):
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    random_bits = bits.view(torch.float32)
    random_bits = random_bits[torch.isfinite(random_bits)]
    near = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * LAYOUT[flavour][3] / 3
    x = torch.cat([random_bits, near])
    assert codes(x, flavour) == [nearest_code(value, flavour) for value in x.tolist()]


@pytest.mark.parametrize("flavour", LAYOUT)
def test_the_cast_agrees_with_ml_dtypes_inside_the_range(flavour):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50_000, generator=generator) * torch.exp2(
        torch.randint(-18, 8, (50_000,), generator=generator)
    )
    x = x.clamp(-LAYOUT[flavour][3], LAYOUT[flavour][3])
    expected = x.numpy().astype(ML_DTYPES[flavour]).view(np.uint8)
    np.testing.assert_array_equal(np.array(codes(x, flavour), dtype=np.uint8), expected)


@pytest.mark.parametrize("flavour", LAYOUT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_goes_where_ml_dtypes_puts_it(dtype, flavour):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    largest = LAYOUT[flavour][3]
    with np.errstate(invalid="ignore"):
        # it saturates nowhere
        expected = x.clamp(-largest, largest).numpy().astype(ML_DTYPES[flavour])
    known = ~x.isnan()  # of NaN a format may have several codes
    assert np.array_equal(
        float8.cast(x, flavour).view(torch.uint8)[known], expected.view(np.uint8)[known]
    )
    assert float8.cast(x, flavour)[~known].float().isnan().all() and (~known).sum() > 200
    rounded = torch.from_numpy(expected.astype(np.float32))
    assert torch.equal(float8.round_(x.clone(), flavour)[known], rounded[known])


def test_codes_of_e4m3fn_mean_half_as_much_in_e4m3fnuz_but_for_nan_and_minus_zero():
    halves = [decode(code, "e4m3fn") / 2 for code in range(256)]
    for code, half in enumerate(halves):
        there = decode(code, "e4m3fnuz")
        if code == 0x80:
            assert half == 0 and math.isnan(there)  # whoever reads these codes so has to make it 0
        elif code & 0x7F == 0x7F:
            # the only values that e4m3fn has no code for
            assert math.isnan(half) and abs(there) == 240
        else:
            assert there == half


@pytest.mark.parametrize("flavour", LAYOUT)
@settings(max_examples=50)
@given(value=st.floats(width=32, allow_nan=False))
def test_casting_twice_changes_nothing(flavour, value):
    once = float8.cast(torch.tensor([value]), flavour)
    assert (
        float8.cast(once.float(), flavour).view(torch.uint8).tolist()
        == once.view(torch.uint8).tolist()
    )


def test_the_cast_is_the_same_for_vectors_of_any_length_and_stride():
    x = torch.linspace(-500, 500, 1001)
    whole = codes(x, "e4m3fn")
    assert [codes(value, "e4m3fn") for value in x.split(1)] == [[code] for code in whole]
    assert codes(x[::7], "e4m3fn") == whole[::7]


def test_an_empty_tensor_stays_empty():
    assert float8.cast(torch.empty(0, 3), "e5m2").shape == (0, 3)


@pytest.mark.parametrize("flavour", FLOAT8_FLAVOURS)
def test_every_code_widens_to_its_value(flavour):
    codes = torch.arange(256, dtype=torch.uint8).view(float8.FLAVOURS[flavour].dtype)
    expected = codes.float()  # torch's own conversion
    for chosen in (codes, codes[~expected.isnan()], codes[::2], codes[:0], codes[3]):
        assert torch.equal(
            torch.nan_to_num(float8.widen(chosen), 1e9), torch.nan_to_num(chosen.float(), 1e9)
        )
    negative_zero = float8.widen(torch.tensor([-0.0]).to(float8.FLAVOURS[flavour].dtype))
    assert negative_zero.dtype == torch.float32 and negative_zero.item() == 0


@pytest.mark.parametrize("flavour", FLOAT8_FLAVOURS)
def test_the_largest_magnitude_of_codes_is_that_of_their_values_and_nan_wins(flavour):
    codes = torch.arange(256, dtype=torch.uint8).view(float8.FLAVOURS[flavour].dtype)
    values = codes.float()
    finite = codes[values.isfinite()]
    assert float8.largest_magnitude(finite) == values[values.isfinite()].abs().max().item()
    assert float8.largest_magnitude(finite[5:9]) == finite[5:9].float().abs().max().item()
    assert math.isnan(float8.largest_magnitude(codes))


@pytest.mark.parametrize("flavour", FLOAT8_FLAVOURS)
def test_the_cast_that_may_use_its_input_gives_the_codes_of_the_one_that_may_not(flavour):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 300
    before = x.clone()
    codes = float8.cast(x, flavour).view(torch.uint8)
    assert torch.equal(x, before)
    assert torch.equal(float8.cast_(x, flavour).view(torch.uint8), codes)


@pytest.mark.parametrize("flavour", LAYOUT)
def test_values_rounded_in_float32_are_those_that_a_search_in_the_table_finds(flavour):
    generator = torch.Generator().manual_seed(3)
    bits = (
        torch.randint(-(2**31), 2**31, (4000,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )
    values = torch.tensor(usable(flavour))
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (0.0, math.inf)]
    x = torch.cat(
        [
            bits[bits.isfinite()],
            torch.randn(4000, generator=generator) * values[-1] / 3,
            values,
            middles,
            *beside,
        ]
    )
    expected = [
        math.copysign(decode(nearest_code(value, flavour) & 0x7F, flavour), value)
        for value in x.tolist()
    ]
    found = x.clone()
    assert float8.round_(found, flavour) is found
    assert found.tolist() == expected


@pytest.mark.parametrize("flavour", LAYOUT)
def test_rounding_in_float32_saturates_keeps_nan_and_takes_any_shape(flavour):
    largest = float8.FLAVOURS[flavour].largest
    found = float8.round_(torch.tensor([[math.inf, -1e30], [math.nan, -0.0]]), flavour)
    assert found[0].tolist() == [largest, -largest] and found[1, 0].isnan() and found[1, 1] == 0
    assert float8.round_(torch.empty(0, 3), flavour).shape == (0, 3)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(float8.round_(x.clone().T, flavour), float8.round_(x, flavour).T)
