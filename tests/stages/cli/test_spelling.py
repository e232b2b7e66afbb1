"""Command lines as other programs spell them, read in the verbs' own spelling or refused."""

import click
import pytest

from quantflow.errors import UsageError
from quantflow.stages.bench import command as bench
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli.spelling import (
    BENCH,
    GENERATE,
    VALIDATE,
    Becomes,
    Instead,
    options_of,
    respelled,
)
from quantflow.stages.generate import command as generate
from quantflow.stages.generate import job_from
from quantflow.stages.validate import command as validate

TABLES = {
    "generate": (generate, GENERATE),
    "bench": (bench, BENCH),
    "validate": (validate, VALIDATE),
}


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
        # a value, whatever it looks like
        ("ART --prompt --reuse-cache --chat", "ART --prompt --reuse-cache --chat"),
        ("ART --prompt a -- --reuse-cache", "ART --prompt a -- --reuse-cache"),
        (
            "ART --max_new_tokens=8 --bad_words x y",
            "ART --max-new-tokens=8 --bad-words x --bad-words y",
        ),
        ("--model_name_or_path ART --max_input_tokens -1", "ART --max-input-tokens -1"),
        (
            "--bf16 ART --peft_model L --dataset_name D",
            "--dtype bfloat16 ART --adapter L --prompts D",
        ),
        ("ART -dt fp16 --prompt fp16", "ART --dtype float16 --prompt fp16"),
        ("ART --dtype=bf16 --fp16", "--dtype float16 ART --dtype=bfloat16"),
        # click takes the last
        ("ART --temperature 0.5 --do_sample", "--temperature 1 ART --temperature 0.5"),
        ("ART --reuse_cache --trim_logits --use_hpu_graphs --prompt a", "ART --prompt a"),
        ("ART --unknown-one 3", "ART --unknown-one 3"),  # click refuses it
    ],
)
def test_generate_understands(line, expected):
    assert own("generate", line) == expected.split()


def test_validate_and_bench_understand():
    assert own("validate", "ART --tasks a b c --limit_iters 4") == [
        "ART",
        "--tasks",
        "a,b,c",
        "--limit",
        "4",
    ]
    assert own("validate", "--tasks a,b c ART --buckets 16 32") == ["--tasks", "a,b,c", "ART"]
    assert own("validate", "--tasks a ART") == ["--tasks", "a", "ART"]
    assert own("bench", "ART -b 1 2 --decode-length 8") == [
        "ART",
        "-b",
        "1",
        "-b",
        "2",
        "--new-tokens",
        "8",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("max_length=64,num_beams=4", "ART --max-length 64 --num-beams 4"),
        ("do_sample=true, top_k:int=5", "--temperature 1 ART --top-k 5"),
        (
            "ignore_eos=t,use_cache=True,early_stopping=true",
            "ART --ignore-eos --early-stopping true",
        ),
        (
            "ignore_eos=f,do_sample=false,echo=false,max_iterations=7",
            "ART --no-echo --max-new-tokens 7",
        ),
        ("", "ART"),
    ],
)
def test_items_of_a_string_are_options(options, expected):
    command, table = TABLES["generate"]
    words = ["ART", "--options", options]
    assert (
        respelled(words, options_of(command, click.Context(command)), table, verb="generate")[0]
        == expected.split()
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("AUTO", "ART"),
        ("INT8", "ART"),
        ("BF16", "--dtype bfloat16 --exact ART"),
        ("fp16", "--dtype float16 --exact ART"),
        ("FP32", "--dtype float32 --exact ART"),
    ],
)
def test_what_linears_compute_in_has_a_word_for_each_mode_of_intels_runner(mode, expected):
    for verb in ("generate", "bench"):
        assert (
            own(verb, f"ART --lowp-mode {mode}")
            == own(verb, f"ART --lowp_mode={mode}")
            == expected.split()
        )
    with pytest.raises(
        UsageError,
        match="generate: --lowp-mode: 'INT4' is unknown; use one of AUTO, INT8, BF16, FP16, FP32",
    ):
        own("generate", "ART --lowp-mode INT4")
    with pytest.raises(
        UsageError,
        match="--act-quant-mode is another program's option; leave it out: a scheme says",
    ):
        own("generate", "ART --act-quant-mode PER_BATCH")


def test_items_that_are_no_options_are_refused():
    with pytest.raises(
        UsageError,
        match="^generate: --options: 'beams=4' is no option and its value; write max_length=64",
    ):
        own("generate", "ART --options num_beams=4,beams=4")
    with pytest.raises(UsageError, match="'num_beams' is no option and its value"):
        own("generate", "ART --options num_beams")
    with pytest.raises(UsageError, match="'do_sample=1' is neither true nor false"):
        own("generate", "ART --options do_sample=1")
    with pytest.raises(UsageError, match="--static-shapes is another program's option"):
        own("generate", "ART --options static_shapes=true")


def test_help_of_options_is_the_verbs_help(capsys):
    assert exit_code(cli, ["generate", "ART", "--help_options"]) == 0
    assert "--num-beams N" in capsys.readouterr().out


def test_what_is_always_so_is_said():
    assert both("generate", "ART --reuse_cache --prompt a")[1] == [
        "--reuse-cache is always so: a decoder allocates its cache when a prompt begins, and "
        "keeps it"
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
            assert (
                spelling.value
                or not spelling.words
                or options[spelling.words[0]].is_flag == (len(spelling.words) == 1)
            )


@pytest.mark.parametrize("verb", TABLES)
def test_a_refusal_names_the_option_and_what_to_use(verb, capsys):
    for name in (
        name for name, spelling in TABLES[verb][1].items() if isinstance(spelling, Instead)
    ):
        assert exit_code(cli, [verb, "nowhere", name.replace("-", "_").replace("__", "--", 1)]) == 2
        printed = capsys.readouterr().err
        assert name in printed and "fix: " in printed and "Traceback" not in printed


def test_an_option_without_its_value_is_refused():
    with pytest.raises(UsageError, match="--peft-model without a value; give one"):
        own("generate", "ART --peft_model")


def test_a_temperature_of_zero_is_greedy():
    def sampling(*words):
        context = generate.make_context("generate", ["ART", "--prompt", "a", *words])
        options = {
            name: value
            for name, value in context.params.items()
            if name not in ("artifact", "as_json", "quiet")
        }
        return job_from("ART", options).sampling

    assert sampling("--temperature", "0") is None
    assert sampling("--temperature", "0", "--top-p", "0.5") is None
    assert sampling("--greedy") is None
    assert sampling("--do_sample").temperature == 1
    assert sampling("--do_sample", "--temperature", "0.5").temperature == 0.5
