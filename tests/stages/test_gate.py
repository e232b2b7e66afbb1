"""The verdicts of validation.json alone, on the command line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci" / "github-actions.yaml"
THRESHOLDS = {"ppl_ratio": 1.02, "mean_kld": 0.05, "kld_p999": 0.5, "top1_agreement": 0.9}
PROTOCOL = {
    "text": "t",
    "windows": 8,
    "tokens": 808,
    "sequence_length": 101,
    "dtype": "float32",
    "seed": 0,
}


def write(folder, kld, name):
    """Write the validation of an artifact.

    Each of eight windows of 100 tokens has the same divergence.
    """
    values = {"ppl_ratio": 1.0, "mean_kld": kld, "kld_p999": 0.1, "top1_agreement": 0.95}
    content = {
        "artifact": name,
        "digest": name,
        "baseline": "m",
        "model": "m",
        "scheme": "W4A16",
        "algorithm": "gptq",
        "transforms": [],
        "size": 1000,
        "bits_per_weight": 4.1,
        "parameters": 1000,
        "protocol": PROTOCOL,
        "metrics": {
            key: {"value": value, "lower": value, "upper": value} for key, value in values.items()
        },
        "noise_floor": {"top1_agreement": {"value": 1.0}},
        "gate": {"name": "int4", "thresholds": THRESHOLDS, "note": "", "max_regression": {}},
        "windows": {
            "tokens": [100] * 8,
            "kld": [100 * kld] * 8,
            "agreements": [95] * 8,
            "nll_difference": [0.0] * 8,
            "kld_tail": [[0.1]] * 8,
        },
        "outcome": "pass",
        "reasons": [],
        "expect": "pass",
        "allow_inconclusive": False,
    }
    folder.mkdir()
    (folder / "validation.json").write_text(json.dumps(content))
    return str(folder / "validation.json")


@pytest.fixture
def old(tmp_path):
    return write(tmp_path / "old", 0.01, "old")


@pytest.fixture
def new(tmp_path):
    return write(tmp_path / "new", 0.02, "new")


def test_the_exit_code_says_whether_the_newer_one_is_worse(old, new, tmp_path, capsys):
    assert exit_code(cli, ["gate", new]) == 0
    assert exit_code(cli, ["gate", old, "--previous", new]) == 0
    assert exit_code(cli, ["gate", new, "--previous", old, "--junit", str(tmp_path / "j.xml")]) == 4
    said = capsys.readouterr()
    assert re.search(r"mean_kld +old +regression +0.01 +0.02 +0.01 +0.01 +0.01 +0.005", said.out)
    assert (
        "error: new beside old: a regression: mean_kld: worse by at least 0.01, 0.005 is "
        "allowed\n  fix: " in said.err
    )
    assert [
        case.get("name")
        for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")
        if len(case)
    ] == ["mean_kld"]


def test_a_gate_judges_again_and_json_has_its_verdict(new, tmp_path, capsys):
    (tmp_path / "g.yaml").write_text(
        f"thresholds: {json.dumps(THRESHOLDS | {'mean_kld': 0.015})}\n"
    )
    assert exit_code(cli, ["gate", new, "--gate", str(tmp_path / "g.yaml"), "--json"]) == 4
    result = json.loads(capsys.readouterr().out)
    assert result["outcome"] == "fail" and result["gate"]["thresholds"]["mean_kld"] == 0.015


@pytest.mark.parametrize("content", [None, "", "{}", '{"artifact": 1}'])
def test_what_is_no_validation_is_refused(old, tmp_path, content, capsys):
    path = tmp_path / "validation.json"
    if content is not None:
        path.write_text(content)
    for words in ([str(path)], [old, "--previous", str(path)]):
        assert exit_code(cli, ["gate", *words]) == 3
        assert str(path) in capsys.readouterr().err


def test_neither_torch_nor_transformers_is_imported(old, new):
    code = f"""
import sys
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
code = exit_code(cli, ["gate", {new!r}, "--previous", {old!r}])
heavy = ("torch", "transformers", "tokenizers", "safetensors")
print(code, [name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "4 []"


def test_the_workflow_of_the_example_uses_verbs_and_options_that_there_are():
    steps = [
        step
        for job in yaml.safe_load(EXAMPLE.read_text())["jobs"].values()
        for step in job["steps"]
    ]
    lines = [
        re.sub(r"\$\{\{.*?'(--previous [^']*)'.*?\}\}", r"\1", step.get("run", ""))
        for step in steps
    ]
    commands = [shlex.split(line) for line in lines if line.startswith("quantflow ")]
    assert [words[1] for words in commands] == ["quantize", "validate", "gate"]
    for _, verb, *words in commands:
        cli.get_command(None, verb).make_context(verb, words)
