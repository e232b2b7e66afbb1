"""Command lines as other programs spell them.

The programs are optimum-habana's, Model-References' and IPEX's text generation, lm-eval, and TGI's
launcher and benchmark. Their options are in `other_programs`, a table for each verb: a name -> what
it becomes. An option of the verb's own is never looked up, and one with underscores is that with
hyphens.

    Becomes(("--adapter",), value=True)     `--peft-model DIR` is read as `--adapter DIR`
    LeftOut("the cache is always kept")     `--use-kv-cache` is left out, with a note
    Instead("set HF_TOKEN")                 `--token` is refused, with what to use
    Names(MODEL)                            `-m DIR` names the verb's argument
    Items()                                 `--options "max_length=64"` is `--max-length 64`
    ByValue({"BF16": ("--dtype", "bfloat16")})   `--lowp-mode BF16` is read as these words
    Beside(("--ranks",), A, B)              A where the line has `--ranks`, otherwise B
    VALUES                                  `--dtype fp16` is read as `--dtype float16`

Words after an option that may be given several times belong to it: `--prompt A B` is `--prompt A
--prompt B`. Where nothing else can be the artifact, it is the last of them. Where an option names
the artifact, other words are prompts (`Spelled.texts`).

All problems of a line are one error, with the line as it is spelled here.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import click
from click.core import iter_params_for_processing

from quantflow.errors import UsageError
from quantflow.stages.cli.environment import set_variables
from quantflow.stages.cli.output import note

MODEL, WEIGHTS, MADE = "model", "weights", "made"  # what a value of `Names` is
FLAG, ONE, MANY = 0, 1, 2  # values of an option that is left out or refused


@dataclass(frozen=True)
class Becomes:
    """Words in place of an option's name.

    With `value` its value follows them, or stands where a word is {}. Without, the words stand
    first: own options win.
    """

    words: tuple[str, ...]
    value: bool = False


@dataclass(frozen=True)
class LeftOut:
    """An option that changes no result here: it asks for what is always so, or hints at speed."""

    why: str
    values: int = FLAG


@dataclass(frozen=True)
class Instead:
    """An option that is refused, with what to use.

    With `words` they stand for it in the line that the error shows; with `verb` that line is of
    another verb.
    """

    remedy: str
    values: int = FLAG
    words: tuple[str, ...] = ()
    verb: str = ""


@dataclass(frozen=True)
class Names:
    """An option whose value names the verb's argument.

    MODEL is a model, WEIGHTS a folder that has the folder of the model, MADE a quantized file or
    folder of the model.
    """

    role: str


@dataclass(frozen=True)
class Items:
    """An option whose value is other options, `name=value` with commas between them.

    A type may follow a name: `name:int=3`.
    """


@dataclass(frozen=True)
class ByValue:
    """An option whose values are words here: value in capitals -> words in its place, or why not.

    Other values are as `otherwise` says; without it they are unknown.
    """

    words: Mapping[str, "tuple[str, ...] | LeftOut | Instead"]
    otherwise: "Becomes | LeftOut | Instead | None" = None


@dataclass(frozen=True)
class Beside:
    """An option that is read as `then` where the line has one of the options `names`."""

    names: tuple[str, ...]
    then: "Spelling"
    otherwise: "Spelling"


Spelling = Becomes | LeftOut | Instead | Names | Items | ByValue | Beside
Spellings = Mapping[str, Spelling]

# one option whose value has commas; other programs have words after it
LISTS = frozenset({"--tasks"})
# option -> a value elsewhere -> the one here; None leaves the option out
Values = Mapping[str, Mapping[str, str | None]]
VALUES: Values = {
    "--dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "--max-input-tokens": {"0": "-1"},  # whole prompts
    "--bucket-size": {"-1": None},  # no buckets
}
TRUTH = {"t": True, "true": True, "f": False, "false": False}
# own flags that have a truth after them elsewhere
TRUTHS = frozenset({"--ignore-eos"})
# options beside which there is no artifact
ALONE = frozenset({"--url", "--kernels"})


@dataclass(frozen=True)
class Mistake:
    """A reason why a line is refused.

    Args:
        option: the option that is wrong.
        cause: what is wrong; "" where it is another program's.
        remedy: what to do.
    """

    option: str
    cause: str
    remedy: str


@dataclass
class Line:
    """A command line in a verb's own spelling.

    Attributes:
        words: words after the verb.
        left_out: reason -> options that are left out for it.
        problems: reasons why it is refused.
        unknown: options that nobody knows.
        instead: words that stand for refused options.
        other_verb: the verb whose work an option asks for, where it is not this one's.
    """

    words: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Mistake] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)
    other_verb: str = ""

    def notes(self, verb: str) -> Iterator[str]:
        """Lines that say what is left out."""
        for why, options in self.left_out.items():
            yield f"{verb}: left out: {', '.join(options)}: {why}"


class Spelled(click.Command):
    """A command that knows how other programs spell its options.

    Attributes:
        spellings: options of other programs.
        texts: option of the words beside an artifact that an option names.
        variables: variables of the environment that stand for an option.
        values: values of options as other programs write them.
    """

    spellings: Spellings = {}
    values: Values = VALUES
    texts: str | None = None
    variables: Mapping[str, str] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line in the verb's own spelling.

        Raises:
            UsageError: the line has problems; the error has all of them.
        """
        given = list(args)
        line = self.read(ctx, given, set_variables(self.variables))
        if {"-h", "--help"} & {*line.words}:
            return super().parse_args(ctx, ["--help"])
        if not line.problems and not line.unknown:
            try:
                parsed = super().parse_args(ctx, list(line.words))
            except click.UsageError as error:
                found = self._errors(ctx, line)
                if len(found) < 2 and line.words == given:
                    raise
                raise self._refusal(ctx, given, line, found) from error
            for text in line.notes(str(self.name)):
                note(text, quiet=not {"-q", "--quiet", "--json"}.isdisjoint(line.words))
            return parsed
        found = self._errors(ctx, line)
        if not line.problems and len(found) == 1:
            raise found[0]  # in click's own words
        raise self._refusal(ctx, given, line, found)

    def read(
        self,
        ctx: click.Context,
        args: Sequence[str],
        variables: Mapping[str, tuple[str, str]] | None = None,
    ) -> Line:
        """A command line in the verb's own spelling; see `respelled`."""
        own = options_of(self, ctx)
        return respelled(
            args,
            own,
            self.spellings,
            values=self.values,
            texts=self.texts,
            variables=variables,
        )

    def shown(self, ctx: click.Context, line: Line) -> str:
        """A line in the verb's own spelling, with what it lacks in capitals."""
        missing = [
            _placeholder(error)
            for error in self._errors(ctx, line)
            if isinstance(error, click.MissingParameter)
        ]
        words = ["quantflow", str(self.name), *line.words, *line.instead]
        return " ".join((shlex.join(words), *missing))

    def _refusal(
        self, ctx: click.Context, args: Sequence[str], line: Line, errors: list[click.UsageError]
    ) -> UsageError:
        """All problems of a line, what to do for each, and the line as it is spelled here."""
        wrong = [error for error in errors if not isinstance(error, click.MissingParameter)]
        other = _verb(ctx, line.other_verb)
        foreign = [problem.option for problem in line.problems if not problem.cause]
        causes = [problem.cause for problem in line.problems if problem.cause]
        if len(foreign) == 1:
            causes.insert(0, f"{foreign[0]} is another program's option")
        elif foreign:
            causes.insert(0, f"{', '.join(foreign)} are other programs' options")
        causes += [
            error.format_message().replace("\n", " ").rstrip(".")
            for error in (wrong if other else errors)
        ]
        options: dict[str, list[str]] = {}
        for problem in line.problems:
            options.setdefault(problem.remedy, []).append(problem.option)
        remedies = [
            remedy if len(options) == 1 else f"{', '.join(of)}: {remedy}"
            for remedy, of in options.items()
        ]
        if wrong:  # the words after an option that is unknown may be its values
            remedies.append(f"see `quantflow {self.name} --help`")
        elif other:
            remedies.append(f"here it is `{other.shown(ctx, other.read(ctx, args))}`")
        else:
            remedies.append(f"here it is `{self.shown(ctx, line)}`")
        return UsageError(f"{self.name}: {'; '.join(causes)}", "; ".join(remedies))

    def _errors(self, ctx: click.Context, line: Line) -> list[click.UsageError]:
        """All that click finds wrong; beside unknown options words too many may be values."""
        found: list[click.UsageError] = [
            click.NoSuchOption(
                name, possibilities=get_close_matches(name, options_of(self, ctx)), ctx=ctx
            )
            for name in line.unknown
        ]
        own = click.Context(self, info_name=ctx.info_name, parent=ctx.parent)
        own.allow_extra_args = True
        try:
            options, rest, order = self.make_parser(own).parse_args(args=list(line.words))
        except click.UsageError as error:
            return [*found, error]
        for parameter in iter_params_for_processing(order, self.get_params(own)):
            try:
                _, rest = parameter.handle_parse_result(own, options, rest)
            except click.UsageError as error:
                found.append(error)
        if rest and not line.unknown:
            found.append(click.UsageError(f"unexpected: {shlex.join(map(str, rest))}", own))
        return found


def spelled(
    spellings: Spellings,
    *,
    values: Values = VALUES,
    texts: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> type[Spelled]:
    """A class of commands that know these spellings; see `Spelled`."""
    return type(
        "Spelled",
        (Spelled,),
        {
            "spellings": spellings,
            "values": values,
            "texts": texts,
            "variables": variables or {},
        },
    )


def options_of(command: click.Command, ctx: click.Context) -> dict[str, click.Option]:
    """The options of a command by every name that they have."""
    found: dict[str, click.Option] = {}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option):
            found |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), parameter)
    return found


def respelled(
    args: Sequence[str],
    own: Mapping[str, click.Option],
    spellings: Spellings,
    *,
    values: Values = VALUES,
    texts: str | None = None,
    variables: Mapping[str, tuple[str, str]] | None = None,
) -> Line:
    """A command line in a verb's own spelling, what is left out of it, and what is wrong with it.

    Args:
        args: words after the verb.
        own: options of the verb by their names.
        spellings: options of other programs.
        values: values of options as other programs write them.
        texts: option of the words beside an artifact that an option names; None for none.
        variables: option -> a variable and its value, which count where the line lacks the option.
    """
    reader = _Reader(own=own, spellings=spellings, values=values, names=frozenset(map(_name, args)))
    reader.read(list(args))
    for option, (name, value) in (variables or {}).items():
        reader.read_variable(option, name, value)
    return reader.finished(texts)


def _name(word: str) -> str:
    """The option that a word is, with hyphens; the word itself where it is none."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


@dataclass
class _Reader:
    """What is read of a line so far.

    Attributes:
        own: options of the verb by their names.
        spellings: options of other programs.
        values: values of options as other programs write them.
        names: options of the line.
        variables: options whose variables were read.
        first: words that stand before all others.
        words: words in their order.
        texts: places in `words` of words that are no option and no value of one.
        last: place of the last value that may be the artifact.
        roles: what `Names` names.
        line: what is left out, and what is wrong.
    """

    own: Mapping[str, click.Option]
    spellings: Spellings
    values: Values
    names: frozenset[str]
    variables: set[str] = field(default_factory=set)
    first: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    last: int | None = None
    roles: dict[str, str] = field(default_factory=dict)
    line: Line = field(default_factory=Line)

    def read(self, rest: list[str]) -> None:
        """Read all words."""
        while rest:
            word = rest.pop(0)
            name = _name(word)
            if word == "--":
                self.words.append(word)
                self.texts += range(len(self.words), len(self.words) + len(rest))
                self.words += rest
                return
            if not word.startswith("-") or word == "-":
                self.texts.append(len(self.words))
                self.words.append(word)
            elif name in self.own:
                self._own(name, word, rest)
            elif (spelling := self.spellings.get(name)) is not None:
                self._other(name, word, spelling, rest)
            elif word.startswith("--") or word[:2] not in self.own:
                self.line.unknown.append(name)
            else:  # -qv, -b8
                self.words.append(word)

    def read_variable(self, option: str, name: str, value: str) -> None:
        """Read the variable of an option; the line's options win."""
        spelling = self.spellings.get(option)
        if option in self.names or (spelling == Names(MODEL) and self.texts):
            return
        self.variables.add(option)
        if spelling is None:
            self.first[:0] = self._with_value(option, value)
            return
        before = len(self.words)
        self._other(name, f"{name}={value}", spelling, [])
        self.first[:0] = self.words[before:]
        del self.words[before:]

    def finished(self, texts: str | None) -> Line:
        """The line: what names its artifact stands before the other words."""
        artifact = self._artifact()
        if artifact and texts:
            for place in reversed(self.texts):
                self.words[place : place + 1] = [texts, self.words[place]]
        elif not (artifact or self.texts or self.last is None or ALONE & self.names):
            last = self.words.pop(self.last)  # `--prompt TEXT ARTIFACT`
            del self.words[self.last - 1]
            self.words.append(last)
        self.line.words = [*self.first, *artifact, *_joined(self.words)]
        return self.line

    def _artifact(self) -> list[str]:
        """The artifact that options name, and its baseline where a quantized file is named too."""
        made, model = self.roles.get(MADE), self.roles.get(MODEL)
        if made is not None:
            has_source = "--baseline" in self.own and "--baseline" not in self.names
            return [made, *(("--baseline", model) if model and has_source else ())]
        if WEIGHTS in self.roles:
            # a folder, also where there is none: `a/b` alone would be a name on the hub
            folder = os.path.join(self.roles[WEIGHTS], *(() if model is None else (model,)))
            return [folder if os.path.isabs(folder) else os.path.join(os.curdir, folder)]
        return [] if model is None else [model]

    def _own(self, name: str, word: str, rest: list[str]) -> None:
        """Read an option of the verb's own."""
        option = self.own[name]
        _, equals, value = word.partition("=")
        if option.is_flag:
            if not equals and name in TRUTHS and rest and rest[0].lower() in TRUTH:
                equals, value = "=", rest.pop(0)
            if not equals or value.lower() not in TRUTH:
                self.words.append(name + equals + value)  # click refuses another value
            elif TRUTH[value.lower()]:
                self.words.append(name)
            elif (without := name.replace("--", "--no-", 1)) in self.own:
                self.words.append(without)
            return
        if equals:
            found = self._with_value(name, value)
            self.words += ["=".join(found)] if found else []
        elif rest:
            self.words += self._with_value(name, rest.pop(0))
        else:
            self.words.append(name)  # click refuses it
        while (option.multiple or name in LISTS) and rest and not rest[0].startswith("-"):
            self.words += [name, rest.pop(0)]
            self.last = len(self.words) - 1

    def _other(self, name: str, word: str, spelling: Spelling, rest: list[str]) -> None:
        """Read an option of another program."""
        while isinstance(spelling, Beside):
            beside = not {*self.names, *self.variables}.isdisjoint(spelling.names)
            spelling = spelling.then if beside else spelling.otherwise
        _, equals, value = word.partition("=")
        if isinstance(spelling, LeftOut | Instead):
            self._without(name, spelling, [value] if equals else _values(spelling, rest))
            return
        if not isinstance(spelling, Becomes) or spelling.value:
            if not equals and not rest:
                self._wrong(name, f"{name} without a value", "give one")
                return
            value = value if equals else rest.pop(0)
        if isinstance(spelling, Names):
            self.roles[spelling.role] = _folder(value) if spelling.role == MADE else value
        elif isinstance(spelling, Items):
            rest[:0] = self._items(name, value)
        elif isinstance(spelling, ByValue):
            self._by_value(name, value, spelling)
        elif not spelling.value:
            self.first += spelling.words
        else:
            self._becomes(spelling, value, rest if not equals else [])

    def _becomes(self, spelling: Becomes, value: str, rest: list[str]) -> None:
        """Read a value, and those after it where the option here may be given several times."""
        if "{}" in spelling.words:
            self.words += [value if word == "{}" else word for word in spelling.words]
            return
        option = spelling.words[0]
        self.words += self._with_value(option, value)
        while self.own[option].multiple and rest and not rest[0].startswith("-"):
            self.words += [option, rest.pop(0)]
            self.last = len(self.words) - 1

    def _with_value(self, option: str, value: str) -> list[str]:
        """An option with its value in the verb's own spelling; nothing where that says nothing."""
        here = self.values.get(option, {}).get(value, value)
        return [] if here is None else [option, here]

    def _by_value(self, name: str, value: str, spelling: ByValue) -> None:
        """Read a value that stands for words."""
        found = spelling.words.get(value.upper(), spelling.otherwise)
        if found is None:
            known = f"use one of {', '.join(spelling.words)}"
            self._wrong(name, f"{name}: {value!r} is unknown", known)
        elif isinstance(found, LeftOut | Instead):
            self._without(name, found, [value])
        elif isinstance(found, Becomes):
            self._becomes(found, value, [])
        else:
            self.first += found

    def _without(self, name: str, spelling: LeftOut | Instead, values: Sequence[str]) -> None:
        """Leave an option out, or refuse it."""
        if isinstance(spelling, LeftOut):
            self.line.left_out.setdefault(spelling.why, []).append(" ".join((name, *values)))
            return
        self._wrong(name, "", spelling.remedy)
        words = [" ".join(values) if word == "{}" else word for word in spelling.words]
        if words[:1] != self.line.instead[-2:-1]:
            self.line.instead += words
        self.line.other_verb = self.line.other_verb or spelling.verb

    def _wrong(self, option: str, cause: str, remedy: str) -> None:
        self.line.problems.append(Mistake(option, cause, remedy))

    def _items(self, name: str, text: str) -> list[str]:
        """The options that the items of `Items` stand for, in any spelling."""
        words: list[str] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            option = f"--{key.partition(':')[0].strip().replace('_', '-')}"
            known, spelling = self.own.get(option), self.spellings.get(option)
            if not equals or (known is None and spelling is None):
                self._wrong(
                    name,
                    f"{name}: {item!r} is no option and its value",
                    "write max_length=64,num_beams=4; --help lists them",
                )
            elif (
                not known.is_flag
                if known is not None
                else isinstance(spelling, ByValue) or getattr(spelling, "value", False)
            ):
                words += [option, value]
            elif not value.lower().startswith(("t", "f")):
                self._wrong(name, f"{name}: {item!r} is neither true nor false", "write one")
            elif isinstance(spelling, LeftOut | Instead):
                words.append(f"{option}={value}")
            elif value.lower().startswith("t"):
                words.append(option)
            elif (without := option.replace("--", "--no-", 1)) in self.own:
                words.append(without)
        return words


def _verb(ctx: click.Context, name: str) -> Spelled | None:
    """Another verb of the command line that a context is of; None for no name."""
    root = ctx.find_root()
    found = root.command.get_command(root, name) if isinstance(root.command, click.Group) else None
    return found if name and isinstance(found, Spelled) else None


def _placeholder(error: click.UsageError) -> str:
    """The missing words of an error."""
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return f"{parameter.opts[0]} {parameter.metavar or 'VALUE'}"
    return str(parameter.metavar or parameter.name).upper() if parameter else ""


def _values(spelling: LeftOut | Instead, rest: list[str]) -> list[str]:
    """The values of an option, taken from the words after it."""
    if spelling.values == FLAG:
        return [rest.pop(0)] if rest and rest[0].lower() in TRUTH else []
    found = [rest.pop(0)] if rest and (spelling.values == ONE or rest[0][:1] != "-") else []
    while spelling.values == MANY and rest and not rest[0].startswith("-"):
        found.append(rest.pop(0))
    return found


def _folder(made: str) -> str:
    """The folder of a quantized file: `saved_results/best_model.pt` is in that of an artifact."""
    return os.path.dirname(made) or "." if made.endswith(".pt") else made


def _joined(words: Sequence[str]) -> list[str]:
    """Words with commas between the values of an option of `LISTS`, which stand one by one."""
    found: list[str] = []
    for place, word in enumerate(words):
        if word == "--":
            return [*found, *words[place:]]
        if len(found) >= 3 and found[-1] in LISTS and found[-3] == found[-1]:
            found.pop()
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found
