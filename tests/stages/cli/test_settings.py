"""A setting is one field: option of a verb, key of a recipe and keyword of a job come from it."""

from dataclasses import dataclass, fields
from importlib import import_module
from types import SimpleNamespace

import click
import pytest

from quantflow.benching.bench_job import BenchJob, KernelJob
from quantflow.errors import UsageError
from quantflow.exporting.job import ExportJob
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Quantize, Recipe, Resources, recipe_from
from quantflow.progress import SILENT
from quantflow.quantizing.job import QuantizeJob
from quantflow.runtime.generate_job import GenerateJob
from quantflow.settings import every_setting, setting, settings_of
from quantflow.stages import run as run_stage
from quantflow.stages.cli.options import given, job_settings, recipe_flags, recipe_settings
from quantflow.unifying.job import UnifyJob
from quantflow.validating import recipe_check, tables
from quantflow.validating.job import ValidateJob

NEEDED = {
    "run": ["recipe"],
    "plan": ["model"],
    "measure": ["model"],
    "quantize": ["model", "-o", "out"],
    "unify": ["-m", "in", "-o", "out"],
    "export": ["in", "-o", "out"],
    "validate": ["in", "--baseline", "model"],
}
SPECIAL = {  # what a parsed option is given, and what a recipe then holds
    "measure.stats": ("amax,min_max", ["amax", "min_max"]),
    "validate.tasks": ("piqa,winogrande", ["piqa", "winogrande"]),
    "transforms": ("auto", [{"smoothquant": {"alpha": "auto"}}]),
    "kv_cache": ("FP8:per_head", {"scheme": "FP8", "granularity": "per_head"}),
    "head": ("W4A16:hqq:64", {"scheme": "W4A16", "algorithm": "hqq", "group_size": 64}),
    "mtp": ("W8A16:hqq", {"scheme": "W8A16", "algorithm": "hqq"}),
}
OPTIONS = [
    (verb, record, item)
    for verb in NEEDED
    for record in (Recipe, Quantize)
    for item in settings_of(record, verb)
]


def values_of(verb, *more):
    """The values that click hands to a verb's function."""
    command = import_module(f"quantflow.stages.{verb}").command
    return command.make_context(verb, [*NEEDED[verb], *more]).params


def sample(item):
    """Words of a command line for a setting, and the value that they mean."""
    flag = item.declared.flag.split()[-1].partition("/")[0]
    if item.key in SPECIAL:
        return [flag, SPECIAL[item.key][0]], SPECIAL[item.key][1]
    if item.kind is bool:
        return [flag], True
    value = {int: 3, float: 2.5, str: "word"}[item.kind]
    return [flag, str(value)], [value] if item.multiple else value


@pytest.mark.parametrize(
    ("verb", "record", "item"), OPTIONS, ids=lambda part: getattr(part, "key", None)
)
def test_every_option_of_a_verb_arrives_at_its_key_and_at_no_other(verb, record, item):
    words, value = sample(item)
    flags = recipe_flags(verb, values_of(verb, *words))
    expected = ({item.key: value}, {}) if record is Recipe else ({}, {item.key: value})
    assert flags == expected


@pytest.mark.parametrize("verb", NEEDED)
def test_what_no_option_says_is_left_to_what_lies_beneath(verb):
    assert recipe_flags(verb, values_of(verb)) == ({}, {})


def test_the_second_half_of_a_flag_says_no():
    assert recipe_flags("quantize", values_of("quantize", "--original-inputs"))[1] == {
        "quantized_inputs": False
    }


@pytest.mark.parametrize("verb", [*NEEDED, "generate", "bench"])
def test_no_two_options_of_a_verb_share_a_flag_or_a_name(verb):
    command = import_module(f"quantflow.stages.{verb}").command
    flags = [flag for option in command.params for flag in (*option.opts, *option.secondary_opts)]
    names = [option.name for option in command.params]
    assert len(set(flags)) == len(flags) and len(set(names)) == len(names)


@pytest.mark.parametrize("record", [Recipe, Quantize, GenerateJob, BenchJob, KernelJob])
def test_every_field_is_declared(record):
    declared = {item.path[0] for item in every_setting(record)}
    # an argument; entries of their own
    assert {item.name for item in fields(record)} - declared <= {"artifact", "quantize"}


def test_a_setting_is_added_by_one_field():
    @dataclass(frozen=True, kw_only=True)
    class Job:
        depth: int = setting(4, "-d --depth", verbs=("dig",), shown=True, help="Metres.")
        dry: bool = setting(True, flag="--wet", negated=True, verbs=("dig",), help="In water.")
        hidden: str = setting("x", help="Not an option.")

    @click.command()
    @job_settings("dig", Job)
    def dig(**values):
        found.append(Job(**{item.key: value for item, value in given("dig", Job, values)}))

    found = []
    dig.main([], standalone_mode=False)
    dig.main(["-d", "7", "--wet"], standalone_mode=False)
    assert found == [Job(), Job(depth=7, dry=False)]
    text = dig.get_help(click.Context(dig))
    assert "-d, --depth INTEGER  Metres.  [default: 4]" in text and "hidden" not in text


def test_options_of_the_named_sections_come_first():
    @click.command()
    @recipe_settings("measure", "resources")
    def verb(**_):
        pass

    first = ["max_memory", "max_disk", "max_device_memory", "disk_offload", "revision"]
    assert [option.name for option in verb.params][:5] == first


def test_a_help_per_verb_is_that_of_the_verb():
    (item,) = (item for item in settings_of(Recipe, "quantize") if item.key == "calibration.source")
    assert item.declared.help_of("quantize").startswith("Measure first") and item.declared.help_of(
        "measure"
    ).startswith("A .txt")
    assert item.declared.verbs == ("measure", "quantize")


def test_a_head_of_too_many_words_is_refused():
    with pytest.raises(UsageError, match="2 words after the scheme"):
        recipe_flags("quantize", values_of("quantize", "--head", "W4A16:hqq:gptq"))


def test_run_hands_every_setting_to_the_stages(monkeypatch, tmp_path):
    recipe = recipe_from(
        {
            "model": "model",
            "revision": "abc",
            "seed": 5,
            "calibration": {"source": "a.txt", "samples": 3, "sequence_length": 9, "pack": True},
            "measure": {"ranks": 4, "tp": 2, "dp": 2, "stats": ["amax"], "experts": "all"},
            "quantize": [
                {"name": "a", "scheme": "W4A16", "expect": "fail"},
                {"name": "b", "scheme": "FP8"},
            ],
            "unify": {"groups": ["0123"]},
            "export": {"shard_size": "1GiB"},
            "validate": {"text": "b.txt", "tokens": 7},
            "resources": {"max_memory": "4GiB", "max_disk": "5GiB", "disk_offload": True},
        }
    )
    called = []

    def recorded(name):
        def run(job, progress):
            called.append((name, job))
            folder = job.report if name == "validate" else job.output
            return SimpleNamespace(folder=folder, outcome="fail", values={}, summary={})

        return run

    kinds = {
        "measure": MeasureJob,
        "unify": UnifyJob,
        "quantize": QuantizeJob,
        "export": ExportJob,
        "validate": ValidateJob,
    }
    for name, kind in kinds.items():
        monkeypatch.setattr(kind, "run", recorded(name))
    monkeypatch.setattr(recipe_check, "resolved", lambda recipe, progress: recipe)
    monkeypatch.setattr(run_stage, "write_texts", lambda *_: None)  # there is no artifact to run
    monkeypatch.setattr(
        tables, "write_report", lambda path, results: called.append(("report", dict(results)))
    )
    results = run_stage.run(run_stage.RunJob(recipe=recipe, name="r", folder=tmp_path), SILENT)
    stages = ["quantize", "export", "validate"]
    assert [name for name, _ in called] == ["measure", "unify", *stages, *stages, "report"]
    assert len(results) == 2
    jobs = {name: job for name, job in reversed(called)}  # the first artifact's
    assert jobs["measure"].calibration == recipe.calibration
    assert jobs["measure"].options == recipe.measure
    assert jobs["measure"].entries == recipe.quantize and jobs["unify"].groups == ("0123",)
    assert (jobs["quantize"].revision, jobs["quantize"].entry) == ("abc", recipe.quantize[0])
    assert jobs["export"].options == recipe.export
    assert (jobs["validate"].options, jobs["validate"].expect) == (recipe.validate, "fail")
    for name in ("measure", "quantize", "export", "validate"):
        limits = Resources(max_memory="4GiB", max_disk="5GiB", disk_offload=True)
        assert jobs[name].resources == limits
        assert jobs[name].force is True
    for name in ("measure", "quantize", "validate"):
        assert jobs[name].seed == 5
