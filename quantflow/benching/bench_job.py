"""Jobs of bench: an artifact that is timed as generate runs it, or kernels on linears of their own.

The records are plain, so that a command line knows them without torch. A field says of itself which
option it is (quantflow/settings.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.errors import UsageError
from quantflow.files.required_signature import RequiredSignature
from quantflow.progress import SILENT, Progress
from quantflow.runtime.attention_choice import ATTENTION_HELP, attention_of
from quantflow.runtime.generate_job import (
    BACKEND_HELP,
    BIND_HELP,
    COMPILE_HELP,
    DECODER_HELP,
    DEVICE_HELP,
    DTYPES,
    EXACT_HELP,
    KV_CACHE_HELP,
    PACK_HELP,
    RANKS_HELP,
    REVISION_HELP,
    ROUNDED_HELP,
    TRUST_HELP,
    Sampling,
)
from quantflow.runtime.shapes import NO_SHAPES, Shapes
from quantflow.settings import check_numbers, device_flag, setting

BENCH = ("bench",)
PERCENTILES = (50, 90, 99)  # of the times of a batch size


def words_flag(text: str) -> tuple[str, ...]:
    """The words in `W4A16,W8A8`."""
    return tuple(word for word in text.split(",") if word)


def tokens_flag(text: str) -> tuple[int, ...]:
    """The numbers in `1,8,256`.

    Raises:
        UsageError: something else stands there.
    """
    counts = words_flag(text)
    if not all(count.isdecimal() for count in counts):
        raise UsageError(f"bench: tokens {text!r}", "write numbers, such as 1,8,256")
    return tuple(map(int, counts))


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """The settings of a timing.

    Attributes:
        artifact: an artifact, or a model that is not quantized: a folder, a name on the hub or a
            GGUF file; with `url` it is not read.
        url: address of a running server that is timed instead; the model is its.
        baseline: a model that is timed with the same settings, in a process of its own, as the
            artifact then is; None for none.
        batch_sizes: sequences at once, each a table's row.
        input_tokens: tokens of each prompt; several lengths have tables of their own.
        new_tokens: tokens added to each sequence.
        prompts, source, column: texts in place of random tokens, as `generate` takes them. Each is
            cut at the length, or repeated up to it; a batch takes them in turn, and every run has
            the same.
        runs, warmups: timed and untimed batches of each size.
        ordered: percentiles are taken from the sorted times.
        ignore_eos: go on after an end token.
        beams: beam search with so many; None takes one token after the other.
        temperature, top_k, top_p: tokens are drawn where any is given, as `generate` draws them; a
            temperature of 0 draws none.
        lookup: so many tokens are proposed by the text itself.
        draft, draft_tokens: a smaller artifact or model that proposes so many tokens at a time.
            What is proposed is for single sequences.
        profile: where a trace of one more run goes, for chrome://tracing; None for no such run. It
            has `profile_tokens` tokens after the first `profile_skip`; the prompt is the first.
            With `profile_shapes` it has the shapes of inputs.
        torch_compile: run transformers' modules, compiled; the first warm-up compiles them.
        attention: words that choose how transformers' modules attend
            (`quantflow.runtime.attention_choice`).
        shapes: shapes that transformers' modules run in, few of them.
        results_dir: where a file with the result goes, beside those of other runs.
        ranks: processes that share the model, each with a part of every matrix.
        bind: each process keeps to cores of its own, one thread for each core.
        trust_network: the ranks may meet at the address of somebody's torchrun.
        revision: revision of an artifact on the hub.
        signature: signature that the artifact has to have.
    """

    artifact: Path
    url: str | None = setting(
        None,
        flag="--url",
        metavar="URL",
        verbs=BENCH,
        help="Time the server there, which has TGI's routes, instead of ARTIFACT.",
    )
    baseline: Path | None = setting(
        None,
        flag="--baseline",
        metavar="MODEL",
        verbs=BENCH,
        parse=Path,
        help="Time this model too, and print both side by side.",
    )
    revision: str | None = setting(
        None, flag="--revision", metavar="NAME", verbs=BENCH, help=REVISION_HELP
    )
    signature: RequiredSignature = RequiredSignature()
    batch_sizes: tuple[int, ...] = setting(
        (1,), flag="-b --batch-size", verbs=BENCH, shown=True, help="Also several."
    )
    input_tokens: tuple[int, ...] = setting(
        (256,),
        flag="--input-tokens",
        verbs=BENCH,
        shown=True,
        help="Of each prompt, random without texts; also several.",
    )
    prompts: tuple[str, ...] = setting(
        (),
        flag="--prompt",
        metavar="TEXT",
        verbs=BENCH,
        help="A text, cut or repeated to --input-tokens; also several.",
    )
    source: str | None = setting(
        None,
        flag="--prompts",
        metavar="FILE|DIR|NAME",
        verbs=BENCH,
        help="More of them, as `generate` reads them.",
    )
    column: str | None = setting(
        None,
        flag="--column",
        metavar="KEY",
        verbs=BENCH,
        help="Column of --prompts (default: the first that holds text).",
    )
    new_tokens: int = setting(
        32, flag="--new-tokens", verbs=BENCH, shown=True, help="Tokens added to each."
    )
    runs: int = setting(
        10, flag="--runs", verbs=BENCH, shown=True, help="Timed batches of each size."
    )
    warmups: int = setting(
        1,
        flag="--warmups",
        verbs=BENCH,
        shown=True,
        help="Batches before them that are not counted.",
    )
    ignore_eos: bool = setting(
        True,
        flag="--ignore-eos/--no-ignore-eos",
        verbs=BENCH,
        shown=True,
        help="Go on after end tokens.",
    )
    beams: int | None = setting(
        None, flag="--num-beams", metavar="N", verbs=BENCH, least=1, help="Time beam search with N."
    )
    temperature: float | None = setting(
        None, flag="--temperature", verbs=BENCH, help="Time drawn tokens; 0 draws none."
    )
    top_k: int | None = setting(
        None, flag="--top-k", verbs=BENCH, help="Draw from the k most likely tokens."
    )
    top_p: float | None = setting(
        None, flag="--top-p", verbs=BENCH, help="Draw from the fewest with this probability."
    )
    lookup: int | None = setting(
        None,
        flag="--prompt-lookup",
        metavar="N",
        verbs=BENCH,
        least=1,
        help="Time speculation: N tokens from where the text had the same last tokens.",
    )
    draft: Path | None = setting(
        None,
        flag="--assistant-model",
        metavar="DIR",
        verbs=BENCH,
        parse=Path,
        help="Time speculation: a smaller artifact or model proposes tokens.",
    )
    draft_tokens: int = setting(
        5,
        flag="--assistant-tokens",
        verbs=BENCH,
        least=1,
        shown=True,
        help="Tokens that it proposes at a time.",
    )
    ordered: bool = setting(
        True,
        flag="--unsorted-percentiles",
        negated=True,
        verbs=BENCH,
        help="Take percentiles from times in the order of the runs, as text-generation-benchmark "
        "does.",
    )
    profile: Path | None = setting(
        None,
        flag="--profile",
        metavar="FILE",
        verbs=BENCH,
        parse=Path,
        help="Write a trace of one more run, for chrome://tracing.",
    )
    profile_tokens: int = setting(
        8,
        flag="--profile-tokens",
        metavar="N",
        verbs=BENCH,
        least=1,
        help="Tokens of the trace (default 8).",
    )
    profile_skip: int = setting(
        0,
        flag="--profile-skip",
        metavar="N",
        verbs=BENCH,
        least=0,
        help="Tokens before the trace, the prompt the first of them.",
    )
    profile_shapes: bool = setting(
        False, flag="--profile-shapes", verbs=BENCH, help="Put shapes of inputs into the trace."
    )
    results_dir: Path | None = setting(
        None,
        flag="--results-dir",
        metavar="DIR",
        verbs=BENCH,
        parse=Path,
        help="Keep the result as a file of its own in DIR, which --json prints.",
    )
    backend: str = setting("auto", flag="--backend", verbs=BENCH, shown=True, help=BACKEND_HELP)
    dtype: str = setting(
        "float32",
        flag="--dtype",
        choices=DTYPES,
        verbs=BENCH,
        help="Default: float32; with --kernels bfloat16.",
    )
    decoder: str = setting("auto", flag="--decoder", verbs=BENCH, shown=True, help=DECODER_HELP)
    torch_compile: bool = setting(False, flag="--torch-compile", verbs=BENCH, help=COMPILE_HELP)
    attention: tuple[str, ...] = setting(
        (), flag="--attention", metavar="WORD", verbs=BENCH, help=ATTENTION_HELP
    )
    shapes: Shapes = NO_SHAPES
    kv_cache: str = setting(
        "auto", flag="--kv-cache", metavar="KIND", verbs=BENCH, help=KV_CACHE_HELP
    )
    pack: bool = setting(False, flag="--pack", verbs=BENCH, help=PACK_HELP)
    exact: bool = setting(False, flag="--exact", verbs=BENCH, help=EXACT_HELP)
    rounded_inputs: bool = setting(False, flag="--rounded-inputs", verbs=BENCH, help=ROUNDED_HELP)
    device: str = setting(
        "cpu",
        flag="--device",
        metavar="DEVICE",
        verbs=BENCH,
        parse=device_flag,
        shown=True,
        help=DEVICE_HELP,
    )
    ranks: int = setting(1, flag="--ranks", metavar="N", verbs=BENCH, help=RANKS_HELP)
    bind: bool = setting(False, flag="--bind", verbs=BENCH, help=BIND_HELP)
    trust_network: bool = setting(False, flag="--trust-network", verbs=BENCH, help=TRUST_HELP)
    seed: int = setting(
        0, flag="--seed", verbs=BENCH, shown=True, help="Of random prompts; each run has the next."
    )

    def __post_init__(self) -> None:
        """Refuse numbers outside their ranges, and ways to generate that do not go together.

        Raises:
            UsageError: naming the values.
        """
        check_numbers(self)
        attention_of(self.attention)
        ways = {"beams": self.beams, "lookup": self.lookup, "draft": self.draft}
        chosen_ways = [f"{name}={value}" for name, value in ways.items() if value is not None]
        if len(chosen_ways) > 1:
            raise UsageError(
                f"bench: {' and '.join(chosen_ways)} together", "time one way to generate at a time"
            )
        if chosen_ways and self.beams is None and self.batch_sizes != (1,):
            raise UsageError(
                f"bench: {chosen_ways[0]} with batch sizes {list(self.batch_sizes)}",
                "give -b 1: it is for one sequence",
            )
        drawn = self.sampling
        if self.profile is not None and (chosen_ways or drawn is not None):
            raise UsageError(
                "bench: a profile of another way than the likeliest token",
                "leave --profile out, or the way",
            )

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn; None where none are."""
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_k", "top_p")
            if getattr(self, name) is not None
        }
        return Sampling(**given) if given and self.temperature != 0 else None

    def run(self, progress: Progress = SILENT) -> dict[str, Any] | None:
        """Time the artifact as `generate` runs it; see `quantflow.benching.latency`.

        Returns:
            Seconds of the first and the next tokens per batch size, as plain data. None on a rank
            that is not the first.
        """
        from quantflow.benching.latency import run

        return run(self, progress)


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """Every backend on linears of these schemes and shapes.

    Attributes:
        schemes: names of presets with dynamic inputs or none.
        shapes: as `OUTxIN`.
        tokens: rows of the input, each timed.
        dtype: dtype of the inputs.
        rounds: timed calls of each backend.
    """

    schemes: tuple[str, ...] = setting(
        ("W4A16", "W4A8", "W8A8", "W8A16", "FP8_DYNAMIC"),
        flag="--scheme",
        metavar="NAMES",
        verbs=BENCH,
        parse=words_flag,
        help="For --kernels: schemes, such as W4A16,W8A8.",
    )
    shapes: tuple[str, ...] = setting(
        ("2048x2048", "5632x2048", "2048x5632"),
        flag="--shape",
        metavar="OUTxIN,...",
        verbs=BENCH,
        parse=words_flag,
        help="For --kernels: shapes of weights.",
    )
    tokens: tuple[int, ...] = setting(
        (1, 8, 256),
        flag="--tokens",
        metavar="N,...",
        verbs=BENCH,
        parse=tokens_flag,
        help="For --kernels: rows of the input.",
    )
    rounds: int = setting(
        7,
        flag="--rounds",
        verbs=BENCH,
        help="For --kernels: timed calls of each; medians are printed.",
    )
    dtype: str = setting(
        "bfloat16",
        flag="--dtype",
        choices=DTYPES,
        verbs=BENCH,
        help="Default: float32; with --kernels bfloat16.",
    )

    def run(self) -> dict[str, Any]:
        """Time every backend, beside a plain read of as many bytes.

        Raises:
            UsageError: an unknown scheme, shape or count.
        """
        from quantflow.benching.kernel_speed import run

        return run(self)
