"""Command lines as other programs spell them.

The programs are optimum-habana's and IPEX's text generation, lm-eval, and TGI's benchmark.

An option with underscores is that with hyphens (`cli` says so to click). Here are the others. A
verb has a table: a name -> what it becomes. An option of the verb's own is never looked up.

    Becomes(("--adapter",), value=True)       `--peft-model DIR` is read as `--adapter DIR`
    Always("the cache is allocated once")     `--reuse-cache` is always so: left out, with a note
    Instead("give --ranks N")                 `--use-deepspeed` is refused, with what to use
    Items()                                   `--options "max_length=64"` is `--max-length 64`
    ByValue({"BF16": ("--dtype", "bfloat16")})  `--lowp-mode BF16` is read as these words
    VALUES                                    `--dtype fp16` is read as `--dtype float16`

Words after an option that may be given several times belong to it: `--prompt A B` is `--prompt A
--prompt B`. Where nothing else can be the artifact, it is the last of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from quantflow.errors import UsageError
from quantflow.stages.cli.output import note


@dataclass(frozen=True)
class Becomes:
    """Words in place of an option's name.

    With `value` its value follows them. Without, they stand first: own options win.
    """

    words: tuple[str, ...]
    value: bool = False


@dataclass(frozen=True)
class Always:
    """An option for what is always so; with `values` its values are left out with it."""

    why: str
    values: bool = False


@dataclass(frozen=True)
class Instead:
    """An option that is refused, with the option to use."""

    remedy: str


@dataclass(frozen=True)
class Items:
    """An option whose value is other options, `name=value` with commas between them.

    A type may follow a name: `name:int=3`.
    """


@dataclass(frozen=True)
class ByValue:
    """An option whose values are options here: value in capitals -> words in its place."""

    words: Mapping[str, tuple[str, ...]]


Spelling = Becomes | Always | Instead | Items | ByValue
Spellings = Mapping[str, Spelling]


def _value_of(option: str) -> Becomes:
    return Becomes((option,), value=True)


_ARTIFACT = Becomes((), value=True)  # the value itself is the argument
_BENCH = Instead("use `quantflow bench ARTIFACT`, which has --runs, --warmups and --profile")
_QUANTIZE = Instead(
    "quantize first: `quantflow quantize MODEL -o DIR --scheme W4A16`, and generate with DIR"
)
_FOREIGN = Instead(
    "name the other program's folder as ARTIFACT; docs/sources.md has those that are read"
)
_SHAPES = Instead(
    "leave it out: prompts are padded on the left, and the cache has the length of the text"
)
_CACHE = Always("a decoder allocates its cache when a prompt begins, and keeps it")
_GRAPHS = Always(
    "on --device hpu every shape is captured, on --device cuda every decode step; on a CPU "
    "nothing is"
)
_LIMIT = Instead(
    "leave it out: on --device hpu prompts are captured too, on --device cuda decode steps alone"
)
_BOOK = Instead("give a text: --prompts book.txt")
_GREEDY = Becomes(("--temperature", "0"))
_CODE = Instead(
    "leave it out: the Python files of a model are not run; convert it with the program that "
    "knows it"
)
_TOKEN = Instead("set HF_TOKEN, so that the token stands in no command line")
_RANKS = Instead("give --ranks N, or start it with torchrun")
_LOWP = ByValue(  # what linears compute in where the scheme leaves inputs alone
    {
        # inputs are rounded to 8 bits where export measured that it costs next to nothing
        "AUTO": (),
        "INT8": (),
        "BF16": ("--dtype", "bfloat16", "--exact"),
        "FP16": ("--dtype", "float16", "--exact"),
        "FP32": ("--dtype", "float32", "--exact"),
    }
)
_INPUTS = Instead(
    "leave it out: a scheme says how inputs are rounded: W4A8 per token, and W4A16 in groups "
    "unless --exact"
)

GENERATE: Spellings = {
    "--model-name-or-path": _ARTIFACT,
    "--model": _ARTIFACT,
    "-m": _ARTIFACT,
    "--do-sample": Becomes(("--temperature", "1")),
    "--greedy": _GREEDY,
    "--dataset-name": _value_of("--prompts"),
    "--input-file": _value_of("--prompts"),
    "--column-name": _value_of("--column"),
    "--input-tokens": _value_of("--column"),
    "--dataset-max-samples": _value_of("--limit"),
    "--reference-file": _value_of("--reference"),
    "--peft-model": _value_of("--adapter"),
    "--model-revision": _value_of("--revision"),
    "--world-size": _value_of("--ranks"),
    "--use-chat-template": Becomes(("--chat",)),
    "--bf16": Becomes(("--dtype", "bfloat16")),
    "--fp16": Becomes(("--dtype", "float16")),
    "-dt": _value_of("--dtype"),
    "--no-ignore-eos": Always("texts end with end tokens unless --ignore-eos"),
    "--use-kv-cache": _CACHE,
    "--reuse-cache": _CACHE,
    "--use-hpu-graphs": _GRAPHS,
    "--limit-hpu-graphs": _LIMIT,
    "--clear-hpu-graphs-cache": _GRAPHS,
    "--trim-logits": Always("of a prompt the last token's logits alone are computed"),
    "--ipex": Always("the lean decoder is used where it can be"),
    "--deployment-mode": Always("the lean decoder is used where it can be"),
    "--jit": Always("the lean decoder is used where it can be"),
    "--optimized": Always("the lean decoder is used where it can be"),
    "--verbose-workers": Instead("leave it out: rank 0 speaks for all"),
    "--use-deepspeed": _RANKS,
    "--autotp": _RANKS,
    "--shard-model": _RANKS,
    "--local-rank": _RANKS,
    "--master-port": _RANKS,
    "--attn-softmax-bf16": Instead("leave it out: softmax is computed in float32"),
    "--use-flash-attention": Instead("leave it out: how attention is computed is no choice"),
    "--bucket-size": _SHAPES,
    "--bucket-internal": _SHAPES,
    "--simulate-dyn-prompt": Instead("use `quantflow bench ARTIFACT --input-tokens 25 35 45`"),
    "--book-source": _BOOK,
    "--reduce-recompile": _SHAPES,
    "--static-shapes": _SHAPES,
    "--n-iterations": _BENCH,
    "--warmup": _BENCH,
    "--num-iter": _BENCH,
    "--num-warmup": _BENCH,
    "--benchmark": _BENCH,
    "--token-latency": Instead(
        "give --json, whose `timing` has it, or use `quantflow bench ARTIFACT`"
    ),
    "--profile": _BENCH,
    "--profiling-steps": _BENCH,
    "--profiling-warmup-steps": _BENCH,
    "--profiling-record-shapes": _BENCH,
    "--profile-tokens": _BENCH,
    "--show-graphs-count": Instead("leave it out: graphs are not counted"),
    "--output-dir": Instead(
        "give --output FILE for the texts, or --json; `quantflow bench` has --results-dir"
    ),
    "--output-file": _value_of("--output"),
    "--options": Items(),
    "--help-options": Becomes(("--help",)),
    "--max-iterations": _value_of("--max-new-tokens"),
    "--use-cache": _CACHE,
    "--use-graphs": _GRAPHS,
    "-bs": _value_of("--batch-size"),
    "-ml": _value_of("--max-length"),
    "-l": _value_of("--limit"),
    "-r": _value_of("--repeat"),
    "--mode": Instead("give --decoder lean or --decoder transformers"),
    "--token": _TOKEN,
    "--trust-remote-code": _CODE,
    "--const-serialization-path": Instead(
        "give --pack, which keeps the prepared weights beside the artifact"
    ),
    "--csp": Instead("give --pack, which keeps the prepared weights beside the artifact"),
    "--lowp-mode": _LOWP,
    "--act-quant-mode": _INPUTS,
    "--ipex-weight-only-quantization": _QUANTIZE,
    "--ipex-smooth-quant": _QUANTIZE,
    "--gptq": _QUANTIZE,
    "--int8": _QUANTIZE,
    "--int8-bf16-mixed": _QUANTIZE,
    "--weight-dtype": _QUANTIZE,
    "--quantized-model-path": _FOREIGN,
    "--low-precision-checkpoint": _FOREIGN,
    "--load-quantized-model-with-inc": _FOREIGN,
    "--load-quantized-model-with-autogptq": _FOREIGN,
    "--load-quantized-model-with-autoawq": _FOREIGN,
    "--local-quantized-inc-model-path": _FOREIGN,
    "--save-quantized-model-with-inc": Instead(
        "use `quantflow export MEASUREMENT -o DIR --format inc`"
    ),
}
BENCH: Spellings = {
    "--model-name-or-path": _ARTIFACT,
    "--tokenizer-name": _ARTIFACT,
    "-m": _ARTIFACT,
    "--n-iterations": _value_of("--runs"),
    "--num-iter": _value_of("--runs"),
    "--warmup": _value_of("--warmups"),
    "--num-warmup": _value_of("--warmups"),
    "--sequence-length": _value_of("--input-tokens"),
    "--max-input-tokens": _value_of("--input-tokens"),
    "--simulate-dyn-prompt": _value_of("--input-tokens"),
    "--dataset-name": _value_of("--prompts"),
    "--input-file": _value_of("--prompts"),
    "--column-name": _value_of("--column"),
    "--book-source": _BOOK,
    "--output-dir": _value_of("--results-dir"),
    "--profiling-steps": _value_of("--profile-tokens"),
    "--profiling-warmup-steps": _value_of("--profile-skip"),
    "--profiling-record-shapes": Becomes(("--profile-shapes",)),
    "--decode-length": _value_of("--new-tokens"),
    "--max-new-tokens": _value_of("--new-tokens"),
    "--world-size": _value_of("--ranks"),
    "--bf16": Becomes(("--dtype", "bfloat16")),
    "--fp16": Becomes(("--dtype", "float16")),
    "-dt": _value_of("--dtype"),
    "--benchmark": Always("bench is the benchmark"),
    "--lowp-mode": _LOWP,
    "--act-quant-mode": _INPUTS,
    "--greedy": _GREEDY,
    "--do-sample": Becomes(("--temperature", "1")),
    "--token-latency": Always("first and next tokens are timed apart"),
    "--use-kv-cache": _CACHE,
    "--reuse-cache": _CACHE,
    "--use-hpu-graphs": _GRAPHS,
    "--limit-hpu-graphs": _LIMIT,
    "--trim-logits": GENERATE["--trim-logits"],
    "--bucket-size": _SHAPES,
    "--use-deepspeed": _RANKS,
}
VALIDATE: Spellings = {
    "--model-name-or-path": _ARTIFACT,
    "--limit-iters": _value_of("--limit"),
    "--num-fewshot": _value_of("--shots"),
    "--output-file": _value_of("--output"),
    "--output-path": _value_of("--output"),
    "--apply-chat-template": Becomes(("--chat-template",)),
    "--buckets": Always("questions are batched by length", values=True),
    "--gen-kwargs": Instead("leave it out: a task's own file says how it is answered"),
    "--use-deepspeed": Instead("give --ranks N"),
    "--trust-remote-code": _CODE,
    "--token": _TOKEN,
}
# one option whose value has commas; other programs have words after it
LISTS = frozenset({"--tasks"})
# option -> a value elsewhere -> the one here
VALUES = {"--dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}}


class Spelled(click.Command):
    """A command that knows how other programs spell its options."""

    spellings: Spellings = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line in the verb's own spelling."""
        words, left_out = respelled(
            args, options_of(self, ctx), self.spellings, verb=str(self.name)
        )
        for line in left_out:
            note(line, quiet=not {"-q", "--quiet", "--json"}.isdisjoint(words))
        return super().parse_args(ctx, words)


def spelled(spellings: Spellings) -> type[Spelled]:
    """A class of commands that know these spellings."""
    return type("Spelled", (Spelled,), {"spellings": spellings})


def options_of(command: click.Command, ctx: click.Context) -> dict[str, click.Option]:
    """The options of a command by every name that they have."""
    found: dict[str, click.Option] = {}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option):
            found |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), parameter)
    return found


def respelled(
    args: Sequence[str], own: Mapping[str, click.Option], spellings: Spellings, *, verb: str
) -> tuple[list[str], list[str]]:
    """A command line in a verb's own spelling, and a line for each option that is left out.

    Args:
        args: words after the verb.
        own: options of the verb by their names.
        spellings: options of other programs.
        verb: name of the verb, for messages.

    Raises:
        UsageError: an option that is refused, or one without its value.
    """
    rest, named = list(args), False
    first: list[str] = []
    words: list[str] = []
    left_out: list[str] = []
    last: int | None = None  # where the last text stands that may be the artifact
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*first, *_joined(words), word, *rest], left_out
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-") or word == "-":
            words.append(word)
            named = True
        elif name in own:
            words.append(name + equals + _value_here(name, value))
            option = own[name]
            if option.is_flag:
                continue
            if not equals and rest:
                words.append(_value_here(name, rest.pop(0)))
            while (option.multiple or name in LISTS) and rest and not rest[0].startswith("-"):
                words += [name, rest.pop(0)]
                last = len(words) - 1
        elif (spelling := spellings.get(name)) is not None:
            if isinstance(spelling, Instead):
                raise UsageError(f"{verb}: {name} is another program's option", spelling.remedy)
            if isinstance(spelling, Always):
                while spelling.values and not equals and rest and not rest[0].startswith("-"):
                    rest.pop(0)
                left_out.append(f"{name} is always so: {spelling.why}")
                continue
            if (not isinstance(spelling, Becomes) or spelling.value) and not equals:
                if not rest:
                    raise UsageError(f"{verb}: {name} without a value", "give one")
                value = rest.pop(0)
            if isinstance(spelling, ByValue):
                first += _by_value(value, spelling, option=f"{verb}: {name}")
            elif isinstance(spelling, Items):
                rest[:0] = _items(value, own, spellings, option=f"{verb}: {name}")
            elif not spelling.value:
                first += spelling.words
            elif spelling.words:
                words += [*spelling.words, _value_here(spelling.words[0], value)]
                while (
                    own[spelling.words[0]].multiple
                    and not equals
                    and rest
                    and not rest[0].startswith("-")
                ):
                    words += [*spelling.words, rest.pop(0)]
                    last = len(words) - 1
            else:
                words.append(value)
                named = True
        else:
            words.append(word)
    if not named and last is not None:  # `--prompt TEXT ARTIFACT`
        artifact = words.pop(last)
        del words[last - 1]
        words.append(artifact)
    return [*first, *_joined(words)], left_out


def _value_here(option: str, value: str) -> str:
    """The value of an option in the verb's own spelling."""
    return VALUES.get(option, {}).get(value, value)


def _by_value(value: str, spelling: ByValue, *, option: str) -> tuple[str, ...]:
    """The words that stand for a value.

    Raises:
        UsageError: a value that is none.
    """
    words = spelling.words.get(value.upper())
    if words is None:
        raise UsageError(
            f"{option}: {value!r} is unknown", f"use one of {', '.join(spelling.words)}"
        )
    return words


def _items(
    text: str, own: Mapping[str, click.Option], spellings: Spellings, *, option: str
) -> list[str]:
    """The options that the items of `Items` stand for, in the verb's own spelling or another's.

    Raises:
        UsageError: an item that is none, or a name that is no option of either.
    """
    words: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        name = f"--{key.partition(':')[0].strip().replace('_', '-')}"
        known, spelling = own.get(name), spellings.get(name)
        if not equals or (known is None and spelling is None):
            raise UsageError(
                f"{option}: {item!r} is no option and its value",
                "write max_length=64,num_beams=4; --help lists them",
            )
        if (
            not known.is_flag
            if known is not None
            else isinstance(spelling, ByValue) or getattr(spelling, "value", False)
        ):
            words += [name, value.strip()]
        elif value.strip().lower().startswith("t"):
            words.append(name)
        elif not value.strip().lower().startswith("f"):
            raise UsageError(f"{option}: {item!r} is neither true nor false", "write one of them")
        elif (without := name.replace("--", "--no-", 1)) in own:
            words.append(without)
    return words


def _joined(words: Sequence[str]) -> list[str]:
    """Words with commas between the values of an option of `LISTS`, which stand one by one."""
    found: list[str] = []
    for word in words:
        if len(found) >= 3 and found[-1] in LISTS and found[-3] == found[-1]:
            found.pop()
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found
