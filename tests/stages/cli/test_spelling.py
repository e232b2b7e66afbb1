"""Command lines as other programs spell them, in the verbs' own spelling, and what is refused with what to use."""

import click
import pytest

from quantflow.errors import UsageError
from quantflow.stages.bench import command as bench
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli.spelling import BENCH, GENERATE, VALIDATE, Becomes, Instead, options_of, respelled
from quantflow.stages.generate import command as generate
from quantflow.stages.generate import job_from
from quantflow.stages.validate import command as validate

TABLES = {"generate": (generate, GENERATE), "bench": (bench, BENCH), "validate": (validate, VALIDATE)}


def both(verb, line):
    command, table = TABLES[verb]
    options = options_of(command, click.Context(command))
    return respelled(line.split(), options, table, verb=verb)


def own(verb, line):
    return both(verb, line)[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ART --prompt a b c", "ART --prompt a --prompt b --prompt c"),
        ("ART --prompt a b --chat --prompt c", "ART --prompt a --prompt b --chat --prompt c"),
        ("--prompt a ART", "--prompt a ART"),
        ("--prompt a b ART", "--prompt a --prompt b ART"),
        ("--prompt a --max-new-tokens 3 ART", "--prompt a --max-new-tokens 3 ART"),
        ("ART --prompt --reuse-cache --chat", "ART --prompt --reuse-cache --chat"),  # a value, whatever it looks like
        ("ART --prompt a -- --reuse-cache", "ART --prompt a -- --reuse-cache"),
        ("ART --max_new_tokens=8 --bad_words x y", "ART --max-new-tokens=8 --bad-words x --bad-words y"),
        ("--model_name_or_path ART --max_input_tokens -1", "ART --max-input-tokens -1"),
        ("--bf16 ART --peft_model L --dataset_name D", "--dtype bfloat16 ART --adapter L --prompts D"),
        ("ART --temperature 0.5 --do_sample", "--temperature 1 ART --temperature 0.5"),  # click takes the last
        ("ART --reuse_cache --trim_logits --use_hpu_graphs --prompt a", "ART --prompt a"),
        ("ART --unknown-one 3", "ART --unknown-one 3"),  # click refuses it
    ],
)
def test_generate_understands(line, expected):
    assert own("generate", line) == expected.split()


def test_validate_and_bench_understand():
    assert own("validate", "ART --tasks a b c --limit_iters 4") == ["ART", "--tasks", "a,b,c", "--limit", "4"]
    assert own("validate", "--tasks a,b c ART --buckets 16 32") == ["--tasks", "a,b,c", "ART"]
    assert own("validate", "--tasks a ART") == ["--tasks", "a", "ART"]
    assert own("bench", "ART -b 1 2 --decode-length 8") == ["ART", "-b", "1", "-b", "2", "--new-tokens", "8"]


def test_what_is_always_so_is_said():
    assert both("generate", "ART --reuse_cache --prompt a")[1] == [
        "--reuse-cache is always so: a decoder allocates its cache when a prompt begins, and keeps it"
    ]


@pytest.mark.parametrize("verb", TABLES)
def test_every_spelling_leads_to_options_that_are_there(verb):
    command, table = TABLES[verb]
    options = options_of(command, click.Context(command))
    assert not table.keys() & options.keys()  # an own option would never be looked up
    for name, spelling in table.items():
        assert "_" not in name
        if isinstance(spelling, Becomes):
            assert not spelling.words or spelling.words[0] in options
            assert spelling.value or not spelling.words or options[spelling.words[0]].is_flag == (len(spelling.words) == 1)


@pytest.mark.parametrize("verb", TABLES)
def test_a_refusal_names_the_option_and_what_to_use(verb, capsys):
    for name in (name for name, spelling in TABLES[verb][1].items() if isinstance(spelling, Instead)):
        assert exit_code(cli, [verb, "nowhere", name.replace("-", "_").replace("__", "--", 1)]) == 2
        printed = capsys.readouterr().err
        assert name in printed and "fix: " in printed and "Traceback" not in printed


def test_an_option_without_its_value_is_refused():
    with pytest.raises(UsageError, match="--peft-model without a value; give one"):
        own("generate", "ART --peft_model")


def test_a_temperature_of_zero_is_greedy():
    def sampling(*words):
        context = generate.make_context("generate", ["ART", "--prompt", "a", *words])
        options = {name: value for name, value in context.params.items() if name not in ("artifact", "as_json", "quiet")}
        return job_from("ART", options).sampling

    assert sampling("--temperature", "0") is None
    assert sampling("--temperature", "0", "--top-p", "0.5") is None
    assert sampling("--greedy") is None
    assert sampling("--do_sample").temperature == 1
    assert sampling("--do_sample", "--temperature", "0.5").temperature == 0.5
