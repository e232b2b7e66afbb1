"""Gaudi's scales against the published table, by hand, and against plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.device_scales import (
    ARITHMETICS,
    DEVICES,
    candidate_errors,
    scale_from_amax,
    scale_from_errors,
    target,
    target_of,
    weight_scale,
)
from quantflow.core.scale_rules import ARITHMETIC_NAMES, SCALE_METHODS, Rule
from quantflow.errors import SchemeError, StatisticsError, UnsupportedError, UsageError
from quantflow.formats.gaudi.scale_methods import method_config, spelled

# m -> (raw scale as printed, exponent of POW2, exponent of HW) for Gaudi2 and Gaudi3, activations
# and weights
GOLDEN = {
    0.001: [
        ("1.6667e-5", -15, -8),
        ("8.3333e-6", -16, -8),
        ("8.9286e-6", -16, -16),
        ("4.4643e-6", -17, -17),
    ],
    1: [("0.016667", -5, -4), ("0.0083333", -6, -4), ("0.0089286", -6, -6), ("0.0044643", -7, -7)],
    60: [("1", 0, 0), ("0.5", -1, 0), ("0.53571", 0, 0), ("0.26786", -1, -1)],
    61: [("1.0167", 1, 4), ("0.50833", 0, 0), ("0.54464", 0, 0), ("0.27232", -1, -1)],
    120: [("2", 1, 4), ("1", 0, 0), ("1.0714", 1, 1), ("0.53571", 0, 0)],
    240: [("4", 2, 4), ("2", 1, 4), ("2.1429", 2, 2), ("1.0714", 1, 1)],
    5000: [("83.333", 7, 4), ("41.667", 6, 4), ("44.643", 6, 6), ("22.321", 5, 5)],
}
COLUMNS = [
    ("gaudi2", "activation"),
    ("gaudi2", "weight"),
    ("gaudi3", "activation"),
    ("gaudi3", "weight"),
]
ROWS = [
    pytest.param(m, device, side, *entry, id=f"{m}-{device}-{side}")
    for m, entries in GOLDEN.items()
    for (device, side), entry in zip(COLUMNS, entries, strict=True)
]
HW = {"gaudi2": [-8, -4, 0, 4], "gaudi3": list(range(-55, 8))}
LARGEST = {"gaudi2": 240, "gaudi3": 448, "cpu": 448}
STATIC = [name for name, method in SCALE_METHODS.items() if not method.dynamic]


def rule(method: str, side: str) -> Rule:
    return getattr(SCALE_METHODS[method], side)


def scale(amax: float, method: str, side: str, device: str, arithmetic: str = "exact") -> float:
    return scale_from_amax(
        torch.tensor(amax), rule(method, side), target=target(device), arithmetic=arithmetic
    ).item()


@pytest.mark.parametrize(("m", "device", "side", "raw", "pow2", "hw"), ROWS)
def test_the_published_table(m, device, side, raw, pow2, hw):
    assert float(f"{scale(m, 'maxabs_arbitrary', side, device):.4e}") == float(f"{float(raw):.4e}")
    assert scale(m, "maxabs_pow2", side, device) == 2.0**pow2
    assert scale(m, "maxabs_hw", side, device) == 2.0**hw


# method -> (activations, weights): a column of the table, a fixed exponent per device, or None
# where it is not of a maximum
ONE, SINGLE = {"gaudi2": 0, "gaudi3": 0}, {"gaudi2": 4, "gaudi3": 7}
METHOD_COLUMNS = {
    "unit_scale": (ONE, ONE),
    "hw_aligned_single_scale": (SINGLE, SINGLE),
    "maxabs_hw": ("hw", "hw"),
    "maxabs_pow2": ("pow2", "pow2"),
    "maxabs_arbitrary": ("raw", "raw"),
    "maxabs_hw_opt_weight": ("hw", None),
    "maxabs_pow2_opt_weight": ("pow2", None),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": ("hw", "pow2"),
    "act_maxabs_hw_weights_pcs_opt_pow2": ("hw", None),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": ("pow2", "pow2"),
    "act_maxabs_pow2_weights_pcs_opt_pow2": ("pow2", None),
    "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw": (None, "hw"),
    "maxabs_pcs_pow2": (None, "pow2"),
}


def test_every_scale_method_has_its_columns():
    assert METHOD_COLUMNS.keys() == SCALE_METHODS.keys()
    assert {
        (rule(name, "activation").backoff, rule(name, "weight").backoff) for name in STATIC[2:]
    } == {(0.25, 0.5)}


@pytest.mark.parametrize("method", METHOD_COLUMNS)
@pytest.mark.parametrize(("m", "device", "side", "raw", "pow2", "hw"), ROWS)
def test_every_method_takes_its_scales_from_the_columns_of_the_table(
    method, m, device, side, raw, pow2, hw
):
    column = METHOD_COLUMNS[method][side == "weight"]
    if column is None:
        assert rule(method, side).value == "OPT" or rule(method, side).dynamic
        return
    found = torch.atleast_1d(
        scale_from_amax(torch.tensor(m), rule(method, side), target=target(device))
    )
    if side == "weight":
        weight = torch.tensor([[0.5, -1.0], [-0.25, 1.0]]) * m
        found = torch.cat(
            [
                found,
                torch.atleast_1d(weight_scale(weight, rule(method, side), target=target(device))),
            ]
        )
        assert len(found) == (3 if "pcs_max" in method or method == "maxabs_pcs_pow2" else 2)
    exponent = (
        column[device]
        if isinstance(column, dict)
        else {"raw": None, "pow2": pow2, "hw": hw}[column]
    )
    for value in found.tolist():
        assert (
            float(f"{value:.4e}") == float(f"{float(raw):.4e}")
            if exponent is None
            else value == 2.0**exponent
        )


@pytest.mark.parametrize("device", HW)
@given(m=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_pow2_is_the_smallest_power_that_holds_the_maximum_and_hw_the_next_that_is_free(device, m):
    for side, backoff in (("activation", 0.25), ("weight", 0.5)):
        held = LARGEST[device] * backoff
        pow2 = scale(m, "maxabs_pow2", side, device)
        assert m <= pow2 * held and m > pow2 / 2 * held
        free = [e for e in HW[device] if 2.0**e >= pow2]
        assert scale(m, "maxabs_hw", side, device) == 2.0 ** (free[0] if free else HW[device][-1])


@pytest.mark.parametrize(
    ("method", "side", "device", "expected"),
    [
        ("unit_scale", "activation", "gaudi2", 1.0),
        ("unit_scale", "weight", "gaudi3", 1.0),
        ("hw_aligned_single_scale", "activation", "gaudi2", 16.0),
        ("hw_aligned_single_scale", "weight", "gaudi2", 16.0),
        ("hw_aligned_single_scale", "weight", "gaudi3", 128.0),
    ],
)
def test_fixed_scales_look_at_nothing(method, side, device, expected):
    assert scale(3.7, method, side, device) == expected
    assert not SCALE_METHODS[method].needs_measurement


def test_log2_in_bfloat16_rounds_down_where_the_exact_scale_is_just_above_a_power():
    # raw scale of Gaudi2's activations, which bfloat16 holds
    just_above = 2.0**-10 * (1 + 2.0**-7) * 60
    assert scale(just_above, "maxabs_pow2", "activation", "gaudi2") == 2.0**-9
    assert scale(just_above, "maxabs_pow2", "activation", "gaudi2", "BF16") == 2.0**-10
    assert scale(just_above, "maxabs_pow2", "activation", "gaudi2", "FP32") == 2.0**-9


def test_one_maximum_in_seventy_has_another_scale_in_bfloat16():
    amax = (
        torch.exp2(torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 24 - 12)
        .bfloat16()
        .float()
    )
    found = {
        arithmetic: scale_from_amax(
            amax, rule("maxabs_pow2", "activation"), target=target("gaudi2"), arithmetic=arithmetic
        )
        for arithmetic in ("exact", "BF16")
    }
    differing = found["exact"] != found["BF16"]
    assert 0.005 < differing.float().mean() < 0.03
    ratio = found["exact"][differing] / found["BF16"][differing]
    assert set(ratio.tolist()) <= {0.5, 2.0}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_shapes_are_kept_and_zero_has_a_scale(arithmetic):
    amax = torch.tensor([[0.0], [60.0]])
    found = scale_from_amax(
        amax, rule("maxabs_pow2", "activation"), target=target("gaudi2"), arithmetic=arithmetic
    )
    assert found.tolist() == [[1.0], [1.0]] and found.dtype == torch.float32
    hw = scale_from_amax(
        amax, rule("maxabs_hw", "activation"), target=target("gaudi2"), arithmetic=arithmetic
    )
    assert hw.tolist() == [[2.0**-8], [1.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_what_is_no_maximum_is_refused(bad):
    with pytest.raises(StatisticsError, match="a maximum of"):
        scale(bad, "maxabs_pow2", "activation", "gaudi2")


@pytest.mark.parametrize(
    ("device", "fp8"), [("cpu", "E4M3"), ("gaudi2", "E5M2"), ("gaudi3", "E5M2")]
)
def test_hardware_scales_are_refused_where_none_are_known(device, fp8):
    with pytest.raises(UnsupportedError, match="no hardware scales"):
        scale_from_amax(torch.tensor(1.0), rule("maxabs_hw", "weight"), target=target(device, fp8))
    found = scale_from_amax(
        torch.tensor(57344.0), rule("maxabs_pow2", "weight"), target=target("gaudi2", "E5M2")
    )
    assert found == 2.0


def test_the_arithmetics_have_the_names_that_a_recipe_takes():
    assert tuple(ARITHMETICS) == ARITHMETIC_NAMES


def test_unknown_devices_and_arithmetics_are_refused():
    assert DEVICES == ("gaudi2", "gaudi3", "cpu")
    with pytest.raises(UnsupportedError, match="gaudi4"):
        target("gaudi4")
    with pytest.raises(SchemeError, match="FP64"):
        scale(1.0, "maxabs_pow2", "weight", "gaudi2", "FP64")


@pytest.mark.parametrize(
    "method", ["act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw", "maxabs_pcs_pow2"]
)
def test_dynamic_methods_have_no_stored_scale_of_activations(method):
    assert SCALE_METHODS[method].dynamic
    with pytest.raises(SchemeError, match="dynamic"):
        scale(1.0, method, "activation", "gaudi2")


SIZES = torch.tensor([[0.01], [0.1], [1.0], [4.0], [30.0], [0.0]])
WEIGHT = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * SIZES


def quantized(weight: torch.Tensor, step: torch.Tensor | float, largest: int) -> torch.Tensor:
    return (weight / step).clamp(-largest, largest).to(torch.float8_e4m3fn).float() * step


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize("method", STATIC)
def test_scales_of_weights_are_positive_and_per_tensor_or_per_output_channel(method, device):
    found = weight_scale(WEIGHT, rule(method, "weight"), target=target(device))
    assert found.shape == ((6,) if "pcs" in method else ())
    assert found.dtype == torch.float32 and (found > 0).all()
    if "arbitrary" not in method:
        assert torch.equal(found.log2().frac(), torch.zeros_like(found))


def test_per_channel_is_per_tensor_of_each_row():
    found = weight_scale(
        WEIGHT, rule("act_maxabs_hw_weights_pcs_maxabs_pow2", "weight"), target=target("gaudi3")
    )
    for row, value in zip(WEIGHT[:-1], found, strict=False):
        assert value == weight_scale(
            row[None], rule("maxabs_pow2", "weight"), target=target("gaudi3")
        )
    # a channel of zeros: the smallest normal, never zero
    assert found[-1] == torch.finfo(torch.bfloat16).tiny


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize(
    ("method", "exponents"),
    [("maxabs_hw_opt_weight", None), ("maxabs_pow2_opt_weight", range(-10, 10))],
)
def test_the_search_per_tensor_takes_the_candidate_that_loses_least(method, exponents, device):
    candidates = list(exponents or HW[device])
    losses = {
        e: (quantized(WEIGHT, 2.0**e, LARGEST[device]) - WEIGHT).double().square().sum().item()
        for e in candidates
    }
    found = weight_scale(WEIGHT, rule(method, "weight"), target=target(device)).item()
    assert losses[round(math.log2(found))] == pytest.approx(min(losses.values()), rel=1e-12)


def test_the_search_per_channel_multiplies_each_channels_scale_by_2_to_minus_3_up_to_4():
    method = rule("act_maxabs_pow2_weights_pcs_opt_pow2", "weight")
    found = weight_scale(WEIGHT[:5], method, target=target("gaudi2"))
    for row, value in zip(WEIGHT[:5], found, strict=True):
        reference = 2.0 ** math.ceil(math.log2(row.abs().max().item() / 120))
        losses = {
            reference * 2.0**e: (quantized(row, reference * 2.0**e, 240) - row)
            .double()
            .square()
            .sum()
            .item()
            for e in range(-3, 5)
        }
        assert losses[value.item()] == pytest.approx(min(losses.values()), rel=1e-12)


def test_of_equally_good_candidates_the_later_wins_per_tensor_and_the_earlier_per_channel():
    exact = torch.full((2, 4), 1.0)  # every power of 2 from 2^-7 to 2^6 holds it exactly
    ascending = rule("maxabs_pow2_opt_weight", "weight")
    # 2^-9, the smallest code, is exact too
    assert weight_scale(exact, ascending, target=target("gaudi3")) == 2.0**9
    assert (
        weight_scale(exact, rule("maxabs_hw_opt_weight", "weight"), target=target("gaudi2"))
        == 2.0**-4
    )
    per_channel = weight_scale(
        exact, rule("act_maxabs_hw_weights_pcs_opt_pow2", "weight"), target=target("gaudi2")
    )
    # POW2 of 1 / 120 is 2^-6; its half holds 1, its quarter saturates
    assert per_channel.tolist() == [2.0**-7] * 2


@pytest.mark.parametrize("method", ["maxabs_hw_opt_weight", "maxabs_pow2_opt_weight"])
@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
def test_the_errors_of_rows_add_up_to_the_choice_of_the_whole_weight(method, device):
    weight = torch.randn(12, 32, generator=torch.Generator().manual_seed(3)) * 0.02
    by, goal = rule(method, "weight"), target(device)
    parts = [candidate_errors(rows, by, target=goal) for rows in weight.split(5)]
    assert len(parts) == 3 and len(set(map(len, parts))) == 1
    whole = weight_scale(weight, by, target=goal)
    assert torch.equal(scale_from_errors(sum(parts), by, target=goal), whole) and whole.ndim == 0


@pytest.mark.parametrize(
    ("flavour", "device"), [("gaudi2", "gaudi2"), ("e4m3fn", "gaudi3"), ("e5m2", "gaudi3")]
)
def test_a_flavour_has_the_hardware_scales_of_the_device_that_runs_it(flavour, device):
    found = target_of(flavour)
    assert (found.device, found.flavour) == (device, flavour)
    with pytest.raises(UnsupportedError, match="e4m3fnuz"):
        target_of("e4m3fnuz")


def test_a_weight_that_holds_nan_is_refused_by_every_method():
    bad = torch.tensor([[1.0, math.nan]])
    for method in STATIC:
        if SCALE_METHODS[method].weight.value != "FIXED_VALUE":
            with pytest.raises(StatisticsError):
                weight_scale(bad, rule(method, "weight"), target=target("gaudi2"))


PART = {
    "granularity": "PTS",
    "scale_value_type": "MAXABS",
    "rounding_method": "POW2",
    "backoff": 0.25,
}
POW2 = {"activation": PART, "weight": {**PART, "backoff": 0.5}}
RAW = {side: {**part, "rounding_method": "identity"} for side, part in POW2.items()}
UNIT = {
    side: {"granularity": "pts", "scale_value_type": "FIXED_VALUE", "rounding_method": "SCALE_UNIT"}
    for side in POW2
}


def test_the_dictionary_form_asks_nodes_then_layers_then_types_then_the_default():
    config = method_config(
        {
            "default": POW2,
            "nodes": {"model.layers.1.mlp.up": RAW},
            "layers": {"1": UNIT},
            "layer_types": {"Matmul": RAW},
        }
    )
    assert config.method("model.layers.1.mlp.up", "Linear").name == "maxabs_arbitrary"
    assert config.method("model.layers.1.self_attn.matmul_qk", "Matmul").name == "unit_scale"
    assert config.method("model/layers/1/x", "Linear").name == "unit_scale"
    assert config.method("model.layers.11.self_attn.matmul_qk", "Matmul").name == "maxabs_arbitrary"
    assert config.method("model.layers.11.mlp.up", "Linear").name == "maxabs_pow2"
    assert not config.plain and method_config("MAXABS_POW2").plain


def test_what_the_dictionary_form_leaves_out_is_the_defaults():
    config = method_config({"default": POW2, "nodes": {"a": {"weight": {"granularity": "PCS"}}}})
    method = config.method("a", "Linear")
    assert method.name == "act_maxabs_pow2_weights_pcs_maxabs_pow2"
    assert (method.weight.backoff, method.activation.backoff) == (0.5, 0.25)
    bare = method_config({"default": {}}).default
    assert (bare.name, bare.weight.backoff, bare.activation.backoff) == (
        "maxabs_arbitrary",
        1.0,
        1.0,
    )


def test_another_backoff_is_taken_and_spelled_again():
    config = method_config({"default": {**POW2, "weight": {**PART, "backoff": 1}}})
    assert config.default.weight.backoff == 1.0 and config.default.activation.backoff == 0.25
    assert method_config(spelled(config)) == config
    assert spelled(method_config("maxabs_hw")) == "maxabs_hw"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("maxabs", r"Invalid 'scale_method' value in custom config \('maxabs'\). Enter one of"),
        ({"nodes": {}}, "Scale method config should contain a default scale method"),
        ({"default": POW2, "node": {}}, "'node'"),
        ({"default": {"weights": PART}}, "give a table with `weight` and `activation`"),
        ({"default": "maxabs_pow2"}, "give a table with `weight` and `activation`"),
        (
            {"default": {**POW2, "weight": {**PART, "rounding_method": "HW_ALIGNED"}}},
            "Unsupported config: scale method config for default",
        ),
        (
            {"default": {**POW2, "weight": {**PART, "granularity": "PTC"}}},
            "Invalid input 'PTC' for ScaleGranularity",
        ),
        ({"default": {**POW2, "weight": {**PART, "backoff": 0}}}, "backoff 0"),
        ({"default": {**POW2, "weight": {**PART, "params": {"x": 1}}}}, "params"),
        ({"default": POW2, "layers": {"first": POW2}}, "'first'"),
        (7, "neither a name nor a table"),
    ],
)
def test_what_is_no_scale_method_is_refused(value, said):
    with pytest.raises(UsageError, match=said):
        method_config(value)


@pytest.mark.parametrize("amax", [70000.0, 1e-9])
def test_an_arithmetic_that_holds_no_scale_is_refused(amax):
    rule, goal = SCALE_METHODS["maxabs_arbitrary"].activation, target("gaudi2")
    exact = scale_from_amax(torch.tensor(amax), rule, target=goal, arithmetic="BF16")
    assert 0 < float(exact) < float("inf")
    with pytest.raises(StatisticsError, match=r"the scale of a maximum of .* in FP16; take"):
        scale_from_amax(torch.tensor(amax), rule, target=goal, arithmetic="FP16")
