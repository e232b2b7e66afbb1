"""Gates on tasks: the recovery that is asked, three verdicts, and what is missing."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantflow.errors import GateError, InputError, UsageError
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.validating import recovery
from quantflow.validating.gate import Gate, load_gate
from quantflow.validating.job import GateJob
from quantflow.validating.junit import write_junit
from quantflow.validating.recorded import run
from quantflow.validating.verdict import raise_for_verdict

RIGHT, WRONG = "1" * 600 + "0" * 400, "0" * 1000
VALUES = {"ppl_ratio": 1.0, "mean_kld": 0.01, "kld_p999": 0.1, "top1_agreement": 0.95}
THRESHOLDS = {"ppl_ratio": 1.02, "mean_kld": 0.05, "kld_p999": 0.5, "top1_agreement": 0.9}


def score(lost, *, documents=1000):
    """A task of which the source answers 60 % right, and the artifact so many fewer."""
    right = 6 * documents // 10
    source, artifact = (
        "1" * right + "0" * (documents - right),
        "0" * lost + "1" * (right - lost) + "0" * (documents - right),
    )
    kept = (right - lost) / right
    return {
        "metric": "acc",
        "samples": documents,
        "baseline": 0.6,
        "artifact": 0.6 * kept,
        "recovery": 100 * kept,
    } | {"answers": {"baseline": source, "artifact": artifact}}


def validation(folder, *, gate=None, **tasks):
    """Write a validation.json with the scores of tasks, and return its path."""
    content = {
        "artifact": "new",
        "digest": "new",
        "baseline": "m",
        "model": "m",
        "scheme": "W4A16",
        "algorithm": "gptq",
        "transforms": [],
        "size": 1000,
        "bits_per_weight": 4.1,
        "parameters": 1000,
        "protocol": {},
        "metrics": {
            key: {"value": value, "lower": value, "upper": value} for key, value in VALUES.items()
        },
        "noise_floor": {"top1_agreement": {"value": 1.0}},
        "gate": gate
        or {"name": "int4", "thresholds": THRESHOLDS, "note": "", "max_regression": {}},
        "windows": {},
        "outcome": "pass",
        "reasons": [],
        "expect": "pass",
        "allow_inconclusive": False,
    }
    if tasks:
        content["tasks"] = {"protocol": {}, "scores": tasks}
    path = Path(folder) / "validation.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def judged(tmp_path):
    def judge(asked, **tasks):
        (tmp_path / "g.yaml").write_text(f"min_recovery: {asked}\n")
        return run(GateJob(validation=validation(tmp_path, **tasks), gate=str(tmp_path / "g.yaml")))

    return judge


@pytest.mark.parametrize(
    ("lost", "outcome"),
    [(0, "pass"), (3, "pass"), (12, "inconclusive"), (40, "fail")],  # of 600 right ones; 2 % are 12
)
def test_a_task_is_judged_by_the_bounds_of_its_recovery(judged, lost, outcome):
    result = judged("{piqa: 98}", piqa=score(lost))
    assert result["outcome"] == outcome
    assert [text.split(":")[0] for text in result["reasons"]] == (
        [] if outcome == "pass" else ["recovery of piqa"]
    )


def test_few_documents_decide_nothing_and_say_so(judged):
    result = judged("98", piqa=score(0, documents=20))
    assert result["outcome"] == "inconclusive"
    assert result["reasons"][0].startswith("recovery of piqa: 8") and result["reasons"][0].endswith(
        " %, 98 % is asked"
    )
    with pytest.raises(GateError, match="new: inconclusive: recovery of piqa: "):
        raise_for_verdict(result, allow_inconclusive=False)


def test_a_number_is_asked_of_every_task_and_a_name_goes_before_it(judged):
    tasks = {"piqa": score(3), "lambada": score(40)}
    assert judged("98", **tasks)["outcome"] == "fail"
    assert judged("{all: 98, lambada: 90}", **tasks)["outcome"] == "pass"
    assert judged("{all: 90, piqa: 103}", **tasks)["outcome"] == "fail"
    assert judged("{piqa: 98}", **tasks)["outcome"] == "pass"  # of lambada nothing is asked


@pytest.mark.parametrize(("asked", "named"), [("98", "any task"), ("{piqa: 98}", "task piqa")])
def test_a_validation_without_the_task_is_refused_with_what_to_run(judged, asked, named):
    with pytest.raises(
        InputError,
        match=f"validation of new: has no score of {named}, gate .* asks for it; .* --tasks",
    ):
        judged(asked)
    if asked != "98":
        with pytest.raises(InputError, match="--tasks piqa"):
            judged(asked, lambada=score(0))


def test_a_score_that_is_no_right_or_wrong_is_judged_as_it_is_and_none_decides_nothing(judged):
    rouge = {
        "answers": None,
        "baseline": 0.2,
        "artifact": 0.196,
        "recovery": 98.0,
        "metric": "rougeL",
        "samples": 9,
    }
    assert judged("98", summaries=rouge)["outcome"] == "pass"
    assert judged("98.1", summaries=rouge)["outcome"] == "fail"
    assert (
        judged("98", summaries=rouge | {"baseline": 0.0, "recovery": None})["outcome"]
        == "inconclusive"
    )


def test_a_gate_with_nothing_else_has_the_thresholds_of_auto(judged):
    words = {"scheme": "W4A16", "algorithm": "gptq", "parameters": 1, "noise_top1": 1.0}
    result = judged("{piqa: 98}", piqa=score(0))
    assert result["gate"]["thresholds"] == dict(load_gate("auto", **words).thresholds)
    assert result["gate"]["min_recovery"] == {"piqa": 98}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{piqa: 0.98}", "piqa: 0.98 is no percentage above 1"),
        ("0.98", "all: 0.98 is no percentage above 1"),
        ("{piqa: '98'}", "'98' is no percentage"),
        ("{piqa: .nan}", "nan is no percentage"),
        ("true", "True is no percentage"),
        ("{}", "is no mapping of tasks"),
        ("[piqa]", "is no mapping of tasks"),
        ("", "None is no mapping of tasks"),
        ("{5: 98}", "5 is no name of a task"),
    ],
)
def test_a_mistake_in_what_is_asked_is_refused(judged, text, said):
    with pytest.raises(UsageError) as caught:
        judged(text, piqa=score(0))
    assert said in str(caught.value)


def test_a_gate_that_names_a_task_which_will_not_be_asked_is_refused_before_anything_runs():
    gate = Gate(name="g", thresholds=THRESHOLDS, min_recovery={"piqa": 98})
    recovery.refuse_unasked(gate, ["piqa", "lambada"])
    with pytest.raises(
        UsageError, match="gate g: min_recovery of task piqa, which is not asked; give --tasks piqa"
    ):
        recovery.refuse_unasked(gate, ["lambada"])


def test_the_recorded_gate_is_judged_once_more_and_the_exit_code_says_so(tmp_path, capsys):
    gate = {
        "name": "g",
        "thresholds": THRESHOLDS,
        "note": "",
        "max_regression": {},
        "min_recovery": {"piqa": 98},
    }
    for lost, code in ((0, 0), (40, 4)):
        path = validation(tmp_path, gate=gate, piqa=score(lost))
        assert exit_code(cli, ["gate", str(path), "--junit", str(tmp_path / "j.xml")]) == code
        failed = [
            case.get("name")
            for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")
            if len(case)
        ]
        assert failed == (["recovery of piqa"] if code else [])
    assert "error: new: fails gate g: recovery of piqa: at most 9" in capsys.readouterr().err
    assert exit_code(cli, ["gate", str(validation(tmp_path, gate=gate))]) == 3
    assert "has no score of task piqa" in capsys.readouterr().err


def test_junit_counts_a_task_among_the_tests_of_the_gate(tmp_path):
    gate = {
        "name": "g",
        "thresholds": THRESHOLDS,
        "note": "",
        "max_regression": {},
        "min_recovery": {"all": 98},
    }
    write_junit(
        tmp_path / "j.xml", json.loads(validation(tmp_path, gate=gate, piqa=score(0)).read_text())
    )
    names = [case.get("name") for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")]
    assert names == [*THRESHOLDS, "recovery of piqa"]
