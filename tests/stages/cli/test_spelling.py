"""Command lines as other programs spell them, read in the verbs' own spelling or refused."""

import click
import pytest

from quantflow.errors import UsageError
from quantflow.stages.cli import cli
from quantflow.stages.cli.other_programs import (
    BENCH,
    EXPORT,
    GENERATE,
    MEASURE,
    QUANTIZE,
    SERVE,
    UNIFY,
    VALIDATE,
)
from quantflow.stages.cli.output import exit_code
from quantflow.stages.cli.spelling import Becomes, Beside, ByValue, Instead, options_of
from quantflow.stages.generate import command as generate
from quantflow.stages.generate import job_from

TABLES = {
    "generate": GENERATE,
    "bench": BENCH,
    "validate": VALIDATE,
    "measure": MEASURE,
    "quantize": QUANTIZE,
    "export": EXPORT,
    "unify": UNIFY,
    "serve": SERVE,
}


def context(verb):
    group = click.Context(cli, info_name="quantflow", **cli.context_settings)
    return click.Context(cli.get_command(group, verb), info_name=verb, parent=group)


def both(verb, line, variables=None):
    inner = context(verb)
    return inner.command.read(
        inner, line.split() if isinstance(line, str) else line, variables=variables
    )


def own(verb, line):
    read = both(verb, line)
    assert not read.problems
    return read.words


def problems(verb, line):
    return [(problem.cause, problem.remedy) for problem in both(verb, line).problems]


def refusal(verb, *words):
    """The error of a line that is refused; nothing is run."""
    inner = context(verb)
    with pytest.raises(UsageError) as error:
        inner.command.parse_args(inner, list(words))
    return error.value


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
        ("ART --ignore_eos f --max_new_tokens 2", "ART --max-new-tokens 2"),
        ("ART --ignore_eos t", "ART --ignore-eos"),
        ("ART --ignore-eos=false --prompt t f", "ART --prompt t --prompt f"),
        ("ART --use_kv_cache f --prompt a", "ART --prompt a"),
        ("--max_input_tokens 0 ART", "--max-input-tokens -1 ART"),
        ("ART --max-input-tokens=0", "ART --max-input-tokens=-1"),
        # where an option names the model, other words are prompts
        (
            "--weights ckpt --model bloom-3b --max_length 9 Hi",
            "./ckpt/bloom-3b --max-length 9 --prompt Hi",
        ),
        ("--weights ckpt Hi", "./ckpt --prompt Hi"),
        ("-m M Hi -- -x", "M --prompt Hi -- --prompt -x"),
        ("-m M --quantized-model-path out/best_model.pt --prompt a", "out --prompt a"),
        ("--num_gpus 2 --use_deepspeed -m M", "M --ranks 2"),
        ("--mode vanilla ART", "--decoder transformers ART"),
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
            "ignore_eos=t,use_cache=False,early_stopping=true,static_shapes=t",
            "ART --ignore-eos --early-stopping true --static-shapes",
        ),
        (
            "ignore_eos=f,do_sample=false,echo=false,max_iterations=7",
            "ART --no-echo --max-new-tokens 7",
        ),
        ("", "ART"),
    ],
)
def test_items_of_a_string_are_options(options, expected):
    assert own("generate", ["ART", "--options", options]) == expected.split()


def test_items_that_change_nothing_are_said():
    assert list(both("generate", "ART --options use_cache=false").notes("generate")) == [
        "generate: left out: --use-cache false: a decoder allocates its cache once and keeps it, "
        "which changes no token"
    ]


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
    assert problems("generate", "ART --lowp-mode INT4") == [
        ("--lowp-mode: 'INT4' is unknown", "use one of AUTO, INT8, BF16, FP16, FP32")
    ]


def test_how_inputs_are_rounded_has_a_word_for_each_mode_of_intels_runner():
    for verb in ("generate", "bench", "quantize"):
        assert own(verb, "ART --act-quant-mode PER_BATCH_IC_BLOCK") == ["ART"]
        (problem,) = problems(verb, "ART --act-quant-mode PER_BATCH")
        assert "scheme W4A8" in problem[1]
        for mode in ("PER_TENSOR", "PER_IC_BLOCK"):
            (problem,) = problems(verb, f"ART --act-quant-mode {mode}")
            assert "one scale for several tokens" in problem[1]


def test_a_file_of_quantization_is_a_quant_config_where_it_quantizes():
    for option in ("-qf", "--quantization_file", "--quantization-file"):
        for verb in ("measure", "quantize"):
            words = own(verb, f"MODEL {option} quant_config.json")
            assert words == ["MODEL", "--quant-config", "quant_config.json"]
        for verb in ("generate", "bench"):
            assert [remedy for _, remedy in problems(verb, f"ART {option} quant_config.json")] == [
                "quantize first, and name that folder here"
            ]


def test_items_that_are_no_options_are_refused():
    causes = {
        "num_beams=4,beams=4": "--options: 'beams=4' is no option and its value",
        "num_beams": "--options: 'num_beams' is no option and its value",
        "do_sample=1": "--options: 'do_sample=1' is neither true nor false",
    }
    for items, cause in causes.items():
        assert problems("generate", ["ART", "--options", items])[0][0] == cause


def test_help_of_options_is_the_verbs_help(capsys):
    assert exit_code(cli, ["generate", "ART", "--help_options"]) == 0
    assert "--num-beams N" in capsys.readouterr().out


def test_what_is_always_so_is_said(capsys):
    said = (
        "left out: --reuse-cache, --use-kv-cache: a decoder allocates its cache once and keeps it, "
        "which changes no token"
    )
    line = "--reuse_cache --use_kv_cache --prompt a"
    assert list(both("generate", line).notes("generate")) == [f"generate: {said}"]
    inner = context("measure")
    inner.command.parse_args(inner, ["ART", "-o", "x", "--reuse_cache", "--use_kv_cache"])
    assert capsys.readouterr().err == f"measure: {said}\n"


def words_of(spelling):
    """The words of a row, with whether a value follows them."""
    match spelling:
        case Becomes():
            yield spelling.words, spelling.value
        case Instead():
            yield spelling.words, False
        case Beside():
            yield from words_of(spelling.then)
            yield from words_of(spelling.otherwise)
        case ByValue():
            for found in (*spelling.words.values(), spelling.otherwise):
                yield from [(found, False)] if isinstance(found, tuple) else words_of(found)


@pytest.mark.parametrize("verb", TABLES)
def test_every_spelling_leads_to_options_that_are_there(verb):
    inner = context(verb)
    options = options_of(inner.command, inner)
    for name, spelling in TABLES[verb].items():
        assert "_" not in name
        if name in options:  # an own option is never looked up
            continue
        for words, value in words_of(spelling):
            rest = [*words, *(["value"] if value and "{}" not in words else [])]
            while rest:
                option = options[rest.pop(0)]
                if not option.is_flag:
                    rest.pop(0)


@pytest.mark.parametrize("verb", TABLES)
def test_a_refusal_names_the_option_and_what_to_use(verb, capsys):
    inner = context(verb)
    options = options_of(inner.command, inner)
    refused = [
        (name, spelling)
        for name, spelling in TABLES[verb].items()
        if isinstance(spelling, Instead) and name not in options
    ]
    for name, spelling in refused:
        underscored = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        words = [verb, "nowhere", underscored]
        assert exit_code(cli, words + ["value"] * (spelling.values > 0)) == 2
        printed = capsys.readouterr().err
        assert name in printed and "fix: " in printed and "Traceback" not in printed
        assert spelling.remedy in printed and "here it is `quantflow " in printed


def test_all_problems_of_a_line_are_one_error():
    error = refusal("generate", "--token", "x", "--book_source", "--peft_model")
    assert error.cause == (
        "generate: --token, --book-source are other programs' options; --peft-model without a "
        "value; Missing argument 'ARTIFACT'"
    )
    assert error.remedy == (
        "--token: set HF_TOKEN, so that the token stands in no command line; --book-source: give a "
        "text: --prompts book.txt; --peft-model: give one; here it is `quantflow generate "
        "--prompts book.txt ARTIFACT`"
    )
    error = refusal("quantize", "M", "--xyzzyx", "3", "--samples", "few", "--token", "x")
    assert error.cause == (
        "quantize: --token is another program's option; No such option '--xyzzyx'; Invalid value "
        "for '--samples': 'few' is not a valid integer; Missing option '-o' / '--output'"
    )
    assert error.remedy.endswith("command line; see `quantflow quantize --help`")


def test_one_problem_that_is_ours_is_in_clicks_own_words():
    inner = context("export")
    with pytest.raises(click.NoSuchOption, match="--formt"):
        inner.command.parse_args(inner, ["A", "-o", "B", "--formt", "inc"])
    with pytest.raises(click.MissingParameter):
        inner.command.parse_args(inner, ["A"])


def test_work_of_another_verb_is_shown_in_its_spelling():
    words = ("-m", "M", "--ipex-weight-only-quantization", "--gptq", "--output-dir", "out")
    remedy = refusal("bench", *words).remedy
    assert remedy == (
        "quantize first, and name that folder here; here it is "
        "`quantflow quantize --scheme W4A16 --algorithm gptq M --output out`"
    )
    # whatever their order
    assert own("quantize", ["--gptq", "--ipex-weight-only-quantization", "-m", "M"])[:4] == [
        "--scheme",
        "W4A16",
        "--algorithm",
        "gptq",
    ]


def test_stages_understand():
    line = "-m M --world_size 8 --bf16 --max_input_tokens 512 --limit_iters 9"
    expected = "--dtype bfloat16 M --ranks 8 --tp 8 --sequence-length 512 --samples 9"
    assert own("measure", line) == expected.split()
    assert own("quantize", "-m M --ipex-smooth-quant --alpha 0.8 --int8 --output-dir out") == (
        ["--scheme", "W8A8_STATIC", "M", "--smoothquant", "0.8", "--output", "out"]
    )
    assert own("export", "-m M --save-path out --max-shard-size 500MB") == (
        ["M", "--output", "out", "--shard-size", "500MB"]
    )
    assert own("export", "A -o B --dtype bf16") == ["A", "-o", "B", "--dtype", "bf16"]
    assert own("export", "A -o B --dtype float16") == ["A", "-o", "B", "--dtype", "f16"]
    assert own("validate", "-m M --dtype int8 --tasks a") == ["M", "--tasks", "a"]
    assert own("unify", "-r 2 -m in -o out") == ["--ranks", "2", "-m", "in", "-o", "out"]
    assert own("validate", "-m M --quantized-model-path out/best_model.pt --tasks a") == (
        ["out", "--baseline", "M", "--tasks", "a"]
    )
    assert own("serve", "--model-id M --quantize gptq --num-shard 1 --hostname 0.0.0.0") == (
        ["M", "--host", "0.0.0.0"]
    )


def test_the_variables_of_tgis_launcher_are_its_options(monkeypatch):
    def parsed(*words, **variables):
        for name in ("MODEL_ID", "REVISION", "QUANTIZE", "NUM_SHARD", "MAX_TOTAL_TOKENS", "PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        inner = context("serve")
        inner.command.parse_args(inner, list(words))
        return inner.params

    found = parsed(MODEL_ID="M", REVISION="v1", QUANTIZE="gptq", MAX_TOTAL_TOKENS="64", PORT="81")
    assert found["artifact"] == "M" and found["revision"] == "v1"
    assert found["max_total_tokens"] == 64 and found["port"] == 81
    found = parsed("other", "--port", "82", MODEL_ID="M", REVISION="v1", PORT="81")
    assert found["artifact"] == "other" and found["port"] == 82
    # much else has a revision
    assert parsed("M", REVISION="v1")["revision"] is None
    with pytest.raises(UsageError) as error:
        parsed(MODEL_ID="M", NUM_SHARD="8", QUANTIZE="eetq")
    assert "QUANTIZE is another program's option" in error.value.cause
    assert "here it is `quantflow serve --ranks 8 M`" in error.value.remedy
    assert parsed(MODEL_ID="M", NUM_SHARD="8", SHARDED="true")["ranks"] == 8


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
