"""A newer artifact beside an older one: allowances, verdicts, exit codes, and files alone."""

import json
from copy import deepcopy
from xml.etree import ElementTree

import pytest

from quantflow.errors import GateError, InputError, UsageError
from quantflow.validating.gate import METRICS, Gate, load_gate
from quantflow.validating.job import GateJob
from quantflow.validating.junit import write_junit
from quantflow.validating.recorded import run
from quantflow.validating.regression import allowances, compare_with, read_validation
from quantflow.validating.verdict import raise_for_verdict

WINDOWS = 32
THRESHOLDS = {"ppl_ratio": 1.02, "mean_kld": 0.05, "kld_p999": 0.5, "top1_agreement": 0.9}
GATE = Gate(name="mine", thresholds=THRESHOLDS)


def validation(kld, *, spread=0.0, agreements=95, name="a", **changes):
    """A validation of windows of 100 tokens whose divergences alternate by `spread` about `kld`."""
    klds = [100 * (kld + (spread if number % 2 else -spread)) for number in range(WINDOWS)]
    values = {
        "ppl_ratio": 1.0,
        "mean_kld": sum(klds) / 100 / WINDOWS,
        "kld_p999": 0.1,
        "top1_agreement": agreements / 100,
    }
    return {
        "artifact": name,
        "digest": name * 8,
        "baseline": "model",
        "scheme": "W4A16",
        "algorithm": "gptq",
        "model": "llama",
        "parameters": 1000,
        "metrics": {
            key: {"value": value, "lower": value, "upper": value} for key, value in values.items()
        },
        "noise_floor": {"top1_agreement": {"value": 0.99}},
        "gate": GATE.record(),
        "windows": {
            "tokens": [100] * WINDOWS,
            "kld": klds,
            "agreements": [agreements] * WINDOWS,
            "nll_difference": [0.0] * WINDOWS,
            "kld_tail": [[0.1]] * WINDOWS,
        },
        "outcome": "pass",
        "reasons": [],
        "expect": "pass",
        "allow_inconclusive": False,
        "transforms": [],
        "size": 1000,
        "bits_per_weight": 4.1,
        "protocol": {
            "text": "t",
            "windows": WINDOWS,
            "tokens": 3200,
            "sequence_length": 101,
            "dtype": "float32",
            "seed": 0,
        },
        **changes,
    }


def compared(kld, *, gate=GATE, **words):
    return compare_with(
        validation(0.02, name="old"), validation(kld, name="new", **words), gate=gate
    )


def test_a_tenth_of_the_way_to_the_gate_is_allowed_where_the_gate_names_nothing():
    assert allowances(GATE) == pytest.approx(
        {"ppl_ratio": 0.002, "mean_kld": 0.005, "top1_agreement": 0.01}
    )
    assert allowances(Gate(name="g", thresholds=THRESHOLDS, max_regression={"kld_p999": 0.3})) == {
        "kld_p999": 0.3
    }


@pytest.mark.parametrize(
    ("kld", "spread", "outcome"),
    [(0.0249, 0, "pass"), (0.0251, 0, "regression"), (0.001, 0, "pass")],
)
def test_what_is_surely_inside_passes_and_what_is_surely_outside_is_a_regression(
    kld, spread, outcome
):
    found = compared(kld, spread=spread)
    assert found["outcome"] == outcome == found["metrics"]["mean_kld"]["outcome"]
    assert found["metrics"]["mean_kld"]["worse"] == pytest.approx(kld - 0.02)
    assert found["previous"] == {"artifact": "old", "digest": "old" * 8}


def test_windows_that_differ_more_than_the_limit_is_away_decide_nothing():
    found = compared(0.025, spread=0.02)
    assert found["outcome"] == "inconclusive"
    (reason,) = found["reasons"]
    assert reason.startswith("mean_kld: worse by ") and reason.endswith("0.005 is allowed")


def test_one_regression_decides_and_is_named_alone():
    found = compared(0.025, spread=0.02, agreements=90)
    assert found["outcome"] == "regression"
    assert found["reasons"] == ["top1_agreement: worse by at least 0.05, 0.01 is allowed"]


def test_a_gate_names_the_metrics_that_are_compared():
    loose = Gate(name="g", thresholds=THRESHOLDS, max_regression={"mean_kld": 1.0})
    assert compared(0.9, agreements=10, gate=loose)["outcome"] == "pass"
    strict = Gate(name="g", thresholds=THRESHOLDS, max_regression={"mean_kld": 0})
    assert compared(0.02, gate=strict)["outcome"] == "pass"
    assert compared(0.0201, gate=strict)["outcome"] == "regression"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_regression: {mean_kl: 0.1}", "did you mean 'mean_kld'?"),
        ("max_regression: {mean_kld: -0.1}", "-0.1 is not 0 or more"),
        ("max_regression: {mean_kld: .nan}", "nan is not 0 or more"),
        ("max_regression: {mean_kld: 'x'}", "'x' is not 0 or more"),
        ("max_regression: {}", "is no mapping of metrics"),
        ("max_regression: 3", "is no mapping of metrics"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(tmp_path, text, said):
    (tmp_path / "g.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_gate(
            str(tmp_path / "g.yaml"), scheme="W4A16", algorithm="gptq", parameters=1, noise_top1=1.0
        )
    assert said in str(caught.value)


def test_a_gate_with_nothing_but_limits_has_the_thresholds_of_auto(tmp_path):
    (tmp_path / "g.yaml").write_text("max_regression: {mean_kld: 0.002}\n")
    words = {"scheme": "W4A16", "algorithm": "gptq", "parameters": 1, "noise_top1": 1.0}
    gate = load_gate(str(tmp_path / "g.yaml"), **words)
    assert gate.thresholds == load_gate("auto", **words).thresholds and gate.max_regression == {
        "mean_kld": 0.002
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baseline": "other"}, "validated beside different models"),
        ({"protocol": validation(0.02)["protocol"] | {"text": "u"}}, "text t and u"),
        (
            {"protocol": validation(0.02)["protocol"] | {"sequence_length": 51}},
            "sequence_length 101 and 51",
        ),
        ({"windows": {}}, "scores of its windows are missing"),
    ],
)
def test_validations_that_are_no_pairs_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        compare_with(validation(0.02, **changes), validation(0.02), gate=GATE)


@pytest.mark.parametrize("outcome", ["pass", "regression", "inconclusive"])
def test_only_a_regression_and_what_is_undecided_end_with_an_error(outcome):
    result = validation(0.02, name="new") | {
        "regression": {
            "outcome": outcome,
            "reasons": ["mean_kld: worse"],
            "previous": {"artifact": "old"},
        }
    }
    if outcome == "pass":
        raise_for_verdict(result, allow_inconclusive=False)
        return
    article = "a " if outcome == "regression" else ""
    with pytest.raises(GateError, match=f"new beside old: {article}{outcome}: mean_kld: worse"):
        raise_for_verdict(result, allow_inconclusive=False)
    if outcome == "inconclusive":
        raise_for_verdict(result, allow_inconclusive=True)


@pytest.fixture
def files(tmp_path):
    """Write validations: name -> path."""

    def write(name, values):
        path = tmp_path / name / "validation.json"
        path.parent.mkdir()
        path.write_text(json.dumps(values))
        return path

    return write


def test_files_alone_give_the_verdicts(files, tmp_path):
    new, old = (
        files("new", validation(0.03, name="new")),
        files("old", validation(0.02, name="old")),
    )
    assert run(GateJob(validation=new))["outcome"] == "pass"
    assert "regression" not in run(GateJob(validation=new.parent))
    assert run(GateJob(validation=new, previous=old))["regression"]["outcome"] == "regression"
    assert run(GateJob(validation=old, previous=new.parent))["regression"]["outcome"] == "pass"
    (tmp_path / "g.yaml").write_text(
        "thresholds: {ppl_ratio: 1.1, mean_kld: 0.025, kld_p999: 1.0, top1_agreement: 0.9}\n"
    )
    result = run(GateJob(validation=new, gate=str(tmp_path / "g.yaml")))
    assert result["outcome"] == "fail" and result["gate"]["thresholds"]["mean_kld"] == 0.025


@pytest.mark.parametrize("missing", ["windows", "metrics", "protocol", "baseline"])
def test_a_file_that_is_no_validation_is_refused(files, missing):
    values = validation(0.02)
    del values[missing]
    with pytest.raises(InputError, match=f"has no '{missing}'"):
        read_validation(files("a", values))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("metrics",), [], "metrics: [], a table"),
        (("metrics", "mean_kld"), 5, "metrics.mean_kld: 5, a table"),
        (("metrics", "mean_kld", "upper"), "0.1", "metrics.mean_kld.upper: '0.1', a number"),
        (("gate", "thresholds"), None, "gate.thresholds: None, a table"),
        (("gate", "thresholds", "bleu"), 1.0, "gate: 'bleu' is not known"),
        (("gate", "more"), 1.0, "gate: 'more' is not known"),
        (("gate", "thresholds"), {"mean_kld": 0.1}, "lacks a metric of"),
        (("windows",), [], "windows: [], a table"),
        (("reasons",), "none", "reasons: 'none', a list"),
        (("protocol",), 1, "protocol: 1, a table"),
        (("regression",), {"outcome": "pass"}, "regression.metrics: None, a value"),
        (("tasks",), {"protocol": {}, "scores": {"arc": {}}}, "tasks.scores.arc"),
        (
            ("tasks",),
            {
                "protocol": {},
                "scores": {
                    "arc": {
                        "metric": "acc",
                        "recovery": 1.0,
                        "answers": {"baseline": "01", "artifact": "0"},
                    }
                },
            },
            "task arc: answers are no pairs of 0 and 1",
        ),
    ],
)
def test_a_value_of_a_validation_that_is_none_is_refused_with_its_key(files, path, value, said):
    values = validation(0.02)
    holder = values
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(InputError) as caught:
        read_validation(files("a", values))
    assert said in caught.value.cause


@pytest.mark.parametrize("key", ["scheme", "algorithm", "parameters", "noise_floor"])
def test_what_another_gate_needs_of_a_validation_is_named_where_it_is_missing(files, key):
    values = validation(0.02)
    values[key] = []
    with pytest.raises(InputError, match=key):
        run(GateJob(validation=files("a", values), gate="int4"))


def test_a_validation_without_a_seed_is_not_compared(files):
    values = validation(0.02)
    del values["protocol"]["seed"]
    with pytest.raises(InputError, match="protocol: seed"):
        run(GateJob(validation=files("a", values), previous=files("b", values)))


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_a_file_that_is_cut_or_something_else_is_refused(tmp_path, content):
    (tmp_path / "validation.json").write_text(content)
    with pytest.raises(InputError):
        read_validation(tmp_path)


def test_junit_has_a_test_per_metric_and_counts_what_failed(tmp_path):
    result = validation(0.03, name="new")
    result["metrics"]["ppl_ratio"]["upper"] = 1.03  # undecided
    result["regression"] = compared(0.03)
    write_junit(tmp_path / "j.xml", result)
    (suite,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    cases = {
        (case.get("classname"), case.get("name")): [child.tag for child in case]
        for case in suite.iter("testcase")
    }
    assert {name for group, name in cases if group == "new.gate"} == set(METRICS)
    assert {name for group, name in cases if group == "new.regression"} == {
        "ppl_ratio",
        "mean_kld",
        "top1_agreement",
    }
    assert [key for key, tags in cases.items() if tags] == [
        ("new.gate", "ppl_ratio"),
        ("new.regression", "mean_kld"),
    ]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "2", "0")
    allowed = deepcopy(result) | {"allow_inconclusive": True}
    write_junit(tmp_path / "j.xml", allowed)
    (suite,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "1")


def test_junit_of_an_expected_failure_is_one_test_that_passes(tmp_path):
    write_junit(tmp_path / "j.xml", validation(0.03, outcome="fail", expect="fail"))
    (suite,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
