"""Verdicts from bounds, and the thresholds that are shipped."""

import itertools
from dataclasses import replace

import pytest

from quantflow.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, supports_of
from quantflow.core.scheme import PRESETS, SCHEME_NAMES, preset
from quantflow.errors import UsageError
from quantflow.planning.recipe import read_yaml
from quantflow.shipped import SHIPPED
from quantflow.validating.gate import METRICS, Gate, gate_files, judge, load_gate

GATE = Gate(
    name="g",
    thresholds={"ppl_ratio": 1.02, "mean_kld": 0.02, "kld_p999": 0.5, "top1_agreement": 0.95},
)
GOOD = {
    "ppl_ratio": (1.0, 1.01),
    "mean_kld": (0.0, 0.01),
    "kld_p999": (0.1, 0.2),
    "top1_agreement": (0.97, 0.98),
}
THRESHOLDS = "thresholds: {ppl_ratio: 1.1, mean_kld: 0.1, kld_p999: 1.0, top1_agreement: 0.9}\n"


def outcome(**bounds):
    return judge(GATE, {**GOOD, **bounds}).outcome


def load(name, *, scheme="W8A8", algorithm="rtn", parameters=10**10, noise_top1=1.0):
    return load_gate(
        name, scheme=scheme, algorithm=algorithm, parameters=parameters, noise_top1=noise_top1
    )


def test_a_gate_passes_when_every_bad_bound_is_inside():
    verdict = judge(GATE, GOOD)
    assert (verdict.outcome, verdict.reasons) == ("pass", ())


@pytest.mark.parametrize("metric", ["ppl_ratio", "mean_kld", "kld_p999"])
def test_a_ratio_or_divergence_is_judged_by_its_bounds_and_equality_is_inside(metric):
    limit = GATE.thresholds[metric]
    assert outcome(**{metric: (limit / 2, limit)}) == "pass"
    assert outcome(**{metric: (limit / 2, limit * 1.001)}) == "inconclusive"
    assert outcome(**{metric: (limit, limit * 2)}) == "inconclusive"
    assert outcome(**{metric: (limit * 1.001, limit * 2)}) == "fail"
    assert outcome(**{metric: (limit, limit)}) == "pass"


def test_top1_agreement_is_judged_in_the_other_direction():
    assert outcome(top1_agreement=(0.95, 0.99)) == "pass"
    assert outcome(top1_agreement=(0.9499, 0.99)) == "inconclusive"
    assert outcome(top1_agreement=(0.9, 0.95)) == "inconclusive"
    assert outcome(top1_agreement=(0.9, 0.9499)) == "fail"
    assert outcome(top1_agreement=(1.0, 1.0)) == "pass"


def test_one_failure_decides_although_others_are_undecided_and_only_it_is_told():
    verdict = judge(GATE, {**GOOD, "mean_kld": (0.03, 0.04), "ppl_ratio": (1.0, 1.03)})
    assert verdict.outcome == "fail"
    assert len(verdict.reasons) == 1 and verdict.reasons[0].startswith("mean_kld: ")
    assert "0.03" in verdict.reasons[0] and "0.02" in verdict.reasons[0]


def test_an_undecided_metric_is_told_with_both_bounds():
    (reason,) = judge(GATE, {**GOOD, "ppl_ratio": (1.01, 1.03)}).reasons
    assert "ppl_ratio" in reason and "1.01 to 1.03" in reason and "1.02" in reason


@pytest.mark.parametrize("metric", list(METRICS))
def test_a_bound_that_is_not_a_number_never_passes(metric):
    nan = float("nan")
    assert outcome(**{metric: (nan, nan)}) == "fail"


@pytest.mark.parametrize("scheme", list(PRESETS))
def test_auto_finds_a_gate_for_every_preset_and_its_default_algorithm(scheme):
    gate = load("auto", scheme=scheme, algorithm=PRESETS[scheme].algorithm)
    assert set(gate.thresholds) == set(METRICS) and gate.note == ""


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_auto_finds_one_gate_for_every_scheme_with_every_algorithm_that_goes_with_it(scheme):
    """llama.cpp's types and mixtures too."""
    algorithms = [
        name
        for name in (*ALGORITHMS, *BLOCK_ALGORITHMS)
        if supports_of(name).scheme(preset(scheme)) is None
    ]
    assert "rtn" in algorithms
    name = preset(scheme).name  # as recipes have it resolved
    for algorithm in algorithms:
        fitting = [
            path.stem
            for path in (SHIPPED / "gates").glob("*.yaml")
            if name in (data := read_yaml(path)).get("schemes", ())
            and algorithm in data.get("algorithms", (algorithm,))
        ]
        assert [load("auto", scheme=name, algorithm=algorithm).name] == fitting, algorithm


@pytest.mark.parametrize(
    ("scheme", "algorithm", "gate"),
    [
        ("Q4_K_M", "gptq", "int4"),
        ("Q4_0", "rtn_mse", "int4_rtn"),
        ("IQ4_NL", "yaqa", "int4"),
        ("IQ4_XS", "gptq", "int4"),
        ("Q4_K_S", "gptq", "int4"),
        ("Q3_K_L", "rtn", "int3_rtn"),
        ("Q5_K_S", "gptq", "int5"),
        ("Q2_K_S", "rtn", "int2"),
        ("TQ2_0", "yaqa", "int2"),
        ("IQ3_XXS", "gptq", "int3"),
        ("IQ3_S", "rtn_mse", "int3_rtn"),
        ("IQ2_S", "gptq", "int2"),
        ("Q3_K_M", "rtn", "int3_rtn"),
        ("Q2_K", "gptq", "int2"),
        ("Q5_K_M", "gptq", "int5"),
        ("Q6_K", "rtn", "int8_weight_only"),
        ("W4A16", "signround", "int4"),
    ],
)
def test_llama_cpps_types_have_the_gate_of_integers_of_their_bits(scheme, algorithm, gate):
    assert load("auto", scheme=scheme, algorithm=algorithm).name == gate


def test_auto_tells_chosen_integers_from_rounded_ones():
    chosen, rounded = (load("auto", scheme="W4A16", algorithm=name) for name in ("gptq", "rtn"))
    assert (chosen.name, rounded.name) == ("int4", "int4_rtn")
    assert chosen.thresholds["mean_kld"] < rounded.thresholds["mean_kld"]


def test_fewer_bits_are_allowed_more_and_never_less():
    order = [load("auto", scheme=f"W{bits}A16", algorithm="gptq") for bits in (4, 3, 2)]
    order.insert(2, load("auto", scheme="W3A16_ASYM", algorithm="rtn"))
    assert [gate.name for gate in order] == ["int4", "int3", "int3_rtn", "int2"]
    assert load("auto", scheme="W2A16_ASYM", algorithm="rtn").name == "int2"
    for strict, loose in itertools.pairwise(order):
        for metric, sign in METRICS.items():
            assert (strict.thresholds[metric] < loose.thresholds[metric]) == (sign == "<=")


def test_w4a8_is_judged_as_its_weights():
    assert load("auto", scheme="W4A8", algorithm="gptq").name == "int4"
    assert load("auto", scheme="W4A8", algorithm="rtn").name == "int4_rtn"


def test_auto_without_a_fitting_gate_is_refused():
    with pytest.raises(UsageError, match="no shipped gate for scheme W4A16 with magic"):
        load("auto", scheme="W4A16", algorithm="magic")


@pytest.mark.parametrize("name", sorted(path.stem for path in (SHIPPED / "gates").glob("*.yaml")))
def test_every_shipped_gate_loads(name):
    assert set(load(name).thresholds) == set(METRICS)


def test_small_models_are_allowed_a_larger_perplexity_ratio_and_nothing_else():
    small, large = (load("int4", parameters=count) for count in (2_999_999_999, 3_000_000_000))
    assert (small.thresholds["ppl_ratio"], large.thresholds["ppl_ratio"]) == (1.06, 1.035)
    assert {**small.thresholds, "ppl_ratio": 0} == {**large.thresholds, "ppl_ratio": 0}


def test_the_demo_gate_lowers_only_top1_by_the_noise_and_says_so():
    base, demo = load("auto"), load("demo", noise_top1=0.97)
    assert demo.thresholds["top1_agreement"] == pytest.approx(
        base.thresholds["top1_agreement"] - 0.03
    )
    assert {**demo.thresholds, "top1_agreement": 0} == {**base.thresholds, "top1_agreement": 0}
    assert demo.name == "demo (int8)"
    for said in ("top-1 lowered", "0.9500", "0.9200", "0.0300"):
        assert said in demo.note


def test_the_demo_gate_of_a_model_without_noise_is_the_auto_gate():
    assert load("demo").thresholds == load("auto").thresholds


def test_a_gate_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(THRESHOLDS + "note: agreed with the users\n")
    gate = load(str(path), noise_top1=0.5)
    assert gate.thresholds["top1_agreement"] == 0.9 and gate.note == "agreed with the users"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (THRESHOLDS + "nots: x\n", "did you mean 'note'?"),
        (THRESHOLDS.replace("thresholds", "treshholds"), "did you mean 'thresholds'?"),
        (THRESHOLDS.replace("mean_kld", "mean_kl"), "did you mean 'mean_kld'?"),
        (
            "thresholds: {ppl_ratio: 1.1, mean_kld: 0.1, kld_p999: 1.0}\n",
            "'top1_agreement' has no threshold",
        ),
        (THRESHOLDS.replace("1.1", "'1.1'"), "ppl_ratio: '1.1' is not a number"),
        (
            THRESHOLDS + "ppl_ratio_below_3e9_parameters: high\n",
            "ppl_ratio: 'high' is not a number",
        ),
        ("thresholds: [1, 2]\n", "is not a mapping"),
        ("thresholds:\n", "is not a mapping"),
        ("note: empty\n", "no thresholds"),
        ("5: x\n", "unknown key 5"),
    ],
)
def test_a_gate_file_with_a_mistake_is_refused(tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(str(path), parameters=1)
    assert said in str(caught.value)


def test_an_unknown_gate_names_the_nearest_shipped_one():
    for look in (load, gate_files):
        with pytest.raises(UsageError, match="did you mean 'int4_rtn'"):
            look("int4_rt")


def test_the_hash_of_a_gate_changes_with_its_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(THRESHOLDS)
    before = gate_files(str(path))
    path.write_text(THRESHOLDS.replace("0.9}", "0.8}"))
    assert gate_files(str(path)) != before
    assert set(gate_files("auto")) == {path.stem for path in (SHIPPED / "gates").glob("*.yaml")}


def test_a_gate_does_not_change_when_the_demo_is_made_of_it():
    before = replace(load("auto"))
    load("demo", noise_top1=0.1)
    assert load("auto") == before
