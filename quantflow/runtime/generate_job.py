"""The settings of `generate`, checked once: prompts, sampling, rules, and the method.

The records are plain, so that a command line and a process that starts others know them without
torch. A field says of itself which option it is (quantflow/settings.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from quantflow.errors import UsageError
from quantflow.files.required_signature import RequiredSignature
from quantflow.progress import SILENT, Progress
from quantflow.runtime.attention_choice import ATTENTION_HELP, attention_of
from quantflow.runtime.shapes import NO_SHAPES
from quantflow.runtime.shapes import Shapes as Shapes
from quantflow.settings import device_flag, setting

Words = tuple[tuple[int, ...], ...]
GENERATE = ("generate",)
DTYPES = ("float32", "bfloat16", "float16")  # the last in transformers' modules alone
DEVICE_HELP = "Where the model runs: cpu, cuda, cuda:N, xpu, xpu:N or hpu."
BACKEND_HELP = "auto, reference, a kernel by name, or several: a,b,auto."
DECODER_HELP = "lean, transformers, or auto: lean where it can."
KV_CACHE_HELP = (
    "float32, bfloat16, float8, int8, int5 or int4 (default: the artifact's, else --dtype)."
)
EXACT_HELP = (
    "Never round inputs that the scheme leaves alone (default: where export measured that it costs "
    "next to nothing)."
)
ROUNDED_HELP = (
    "Round inputs of 4-bit weights to int8 in groups, whatever it costs and whoever wrote the "
    "folder; `compare --rounded-inputs` says what."
)
PACK_HELP = "Keep the weights as kernels want them in ARTIFACT-packed, and load from there."
GENERATION_CONFIGS = ("auto", "vllm", "none")
GENERATION_CONFIG_HELP = (
    "Sampling where a request says nothing: auto as the model's generation_config.json says; none, "
    "or vllm (its word for it), as the interface says."
)
REVISION_HELP = "Branch, tag or commit of a model on the hub (default: main)."
RANKS_HELP = "Processes that share the model (default 1), or torchrun's."
COMPILE_HELP = "Run transformers' modules, compiled by torch.compile at the first token (minutes)."
BIND_HELP = "Keep each process to cores of its own, of one NUMA node where they fit."
TRUST_HELP = (
    "Ranks of your torchrun may meet at its address, which anybody on the network can write to."
)


def require(fits: bool, cause: str, remedy: str) -> None:
    """Refuse a value.

    Raises:
        UsageError: unless it fits.
    """
    if not fits:
        raise UsageError(cause, remedy)


def all_flag(text: str) -> int | None:
    """A number of tokens, or None for -1.

    Raises:
        UsageError: no whole number.
    """
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"max_input_tokens={text}", "give a whole number, or -1 for all") from None
    return None if count == -1 else count


def early_stopping_flag(text: str) -> bool | str:
    """The meaning of `true`, `false` or `never`."""
    return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    The filters apply in this order: temperature, top_n_sigma, top_k, top_p, min_p, typical_p.

    Attributes:
        temperature: divisor of the logits; above 0.
        top_n_sigma: keep the tokens whose logits lie at most so many standard deviations below the
            highest, above 0; None keeps all.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens whose probabilities together reach p, 0 < p <= 1; None
            keeps all.
        min_p: keep tokens at least p times as likely as the most likely, 0 <= p <= 1; None keeps
            all.
        typical_p: keep the most typical tokens whose probabilities together reach p, 0 < p < 1;
            None keeps all.
        seed: seed of the generator; the same seed gives the same tokens.
    """

    temperature: float = setting(
        1.0,
        flag="--temperature",
        verbs=GENERATE,
        help="Sample instead of taking the most likely token; 0 takes it.",
    )
    top_k: int | None = setting(
        None, flag="--top-k", verbs=GENERATE, help="Sample from the k most likely tokens."
    )
    top_p: float | None = setting(
        None,
        flag="--top-p",
        verbs=GENERATE,
        help="Sample from the fewest tokens that hold this probability.",
    )
    min_p: float | None = setting(
        None,
        flag="--min-p",
        verbs=GENERATE,
        help="Sample from tokens at least this share as likely as the likeliest.",
    )
    typical_p: float | None = setting(
        None,
        flag="--typical-p",
        verbs=GENERATE,
        help="Sample from the most typical tokens that hold this probability.",
    )
    top_n_sigma: float | None = setting(
        None,
        flag="--top-n-sigma",
        verbs=GENERATE,
        help="Sample from tokens so many standard deviations below the highest logit.",
    )
    seed: int = setting(0, flag="--seed", verbs=GENERATE, shown=True, help="")

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        usable = 0 < self.temperature < math.inf
        require(
            usable, f"temperature={self.temperature}", "use a positive number, or greedy decoding"
        )
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k}", "use 1 or more")
        require(
            self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p}", "use 0 < top_p <= 1"
        )
        require(
            self.min_p is None or 0 <= self.min_p <= 1, f"min_p={self.min_p}", "use 0 <= min_p <= 1"
        )
        sigma = self.top_n_sigma is None or 0 < self.top_n_sigma < math.inf
        require(sigma, f"top_n_sigma={self.top_n_sigma}", "use a positive number")
        typical = self.typical_p is None or 0 < self.typical_p < 1
        require(typical, f"typical_p={self.typical_p}", "use 0 < typical_p < 1")
        require(-(2**63) <= self.seed < 2**64, f"seed={self.seed}", "use a number of 64 bits")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Penalties and forbidden tokens, applied before a choice in the order of the attributes.

    Attributes:
        repetition_penalty: above 1 makes tokens of prompt and text less likely, below 1 more;
            positive.
        frequency_penalty: subtracted from a token's logit for every time it was generated.
        presence_penalty: subtracted once from a token's logit if it was generated.
        no_repeat_ngram_size: no n-gram of so many tokens stands twice in prompt and text; 0: any
            may.
        bad_words: token ids of words that are never generated.
        min_length: the text does not end before prompt and new tokens are so many.
        min_new_tokens: the text does not end before so many new tokens.
    """

    repetition_penalty: float = setting(
        1.0,
        flag="--repetition-penalty",
        metavar="X",
        verbs=GENERATE,
        help="Above 1: tokens of prompt and text get less likely.",
    )
    frequency_penalty: float = setting(
        0.0,
        flag="--frequency-penalty",
        metavar="X",
        verbs=GENERATE,
        help="Lower a token's logit by X each time it was generated.",
    )
    presence_penalty: float = setting(
        0.0,
        flag="--presence-penalty",
        metavar="X",
        verbs=GENERATE,
        help="Lower a token's logit by X if it was generated.",
    )
    no_repeat_ngram_size: int = setting(
        0,
        flag="--no-repeat-ngram-size",
        metavar="N",
        verbs=GENERATE,
        help="Never generate the same N tokens in a row twice.",
    )
    bad_words: Words = ()
    min_length: int = setting(
        0,
        flag="--min-length",
        metavar="N",
        verbs=GENERATE,
        help="No end before N tokens of prompt and text.",
    )
    min_new_tokens: int = setting(
        0, flag="--min-new-tokens", metavar="N", verbs=GENERATE, help="No end before N new tokens."
    )

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        usable = 0 < self.repetition_penalty < math.inf
        require(
            usable,
            f"repetition_penalty={self.repetition_penalty}",
            "use a positive number; 1 changes nothing",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            require(
                -2 <= getattr(self, name) <= 2,
                f"{name}={getattr(self, name)}",
                "use -2 to 2; 0 changes nothing",
            )
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            require(
                getattr(self, name) >= 0,
                f"{name}={getattr(self, name)}",
                "use 0 or more; 0 changes nothing",
            )
        require(all(self.bad_words), "bad_words: a word of no token", "leave it out")


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Beam search: the continuations that are likeliest as a whole.

    Attributes:
        count: sequences that are followed at once; with `sampling` their continuations are drawn.
        length_penalty: a sequence's score is its log-probability / (new tokens ** length_penalty).
        early_stopping: True ends at `count` finished sequences, False where the running ones look
            unable to win at their present length, "never" where they cannot win at any length.
        force_words: token ids of words that every returned sequence contains.
    """

    count: int = setting(
        flag="--num-beams", metavar="N", verbs=GENERATE, help="Beam search: follow N sequences."
    )
    length_penalty: float = setting(
        1.0,
        flag="--length-penalty",
        metavar="X",
        verbs=GENERATE,
        help="Beams: score = log-probability / tokens^X (default 1).",
    )
    early_stopping: bool | str = setting(
        False,
        flag="--early-stopping",
        choices=("true", "false", "never"),
        verbs=GENERATE,
        parse=early_stopping_flag,
        help="Beams: when to end (default false).",
    )
    force_words: Words = ()

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        require(self.count >= 1, f"beams={self.count}", "use 1 or more")
        known = self.early_stopping in (True, False, "never")
        require(known, f"early_stopping={self.early_stopping}", "use true, false or never")
        require(all(self.force_words), "force_words: a word of no token", "leave it out")


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """Contrastive search (Su et al. 2022, equation 5): likely tokens that are unlike the text.

    Attributes:
        alpha: weight of the degeneration penalty, 0 <= alpha <= 1.
        top_k: candidates of each step, above 1.
    """

    alpha: float = setting(
        flag="--penalty-alpha",
        metavar="X",
        verbs=GENERATE,
        help="Contrastive search among --top-k candidates.",
    )
    top_k: int = setting(4, help="Candidates of each step.")

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            UsageError: naming the value.
        """
        require(0 <= self.alpha <= 1, f"penalty_alpha={self.alpha}", "use 0 <= penalty_alpha <= 1")
        require(
            self.top_k > 1, f"top_k={self.top_k} with penalty_alpha", "use 2 or more candidates"
        )


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Speculation by the text itself: the tokens that followed its end where that stood before.

    Attributes:
        tokens: number of tokens that are proposed at a time.
        ngram: longest end of the text that is looked for; shorter ones are tried after it.
    """

    tokens: int = setting(
        10,
        flag="--prompt-lookup",
        metavar="N",
        verbs=GENERATE,
        help="Propose the N tokens that followed the same last tokens earlier in the text.",
    )
    ngram: int = setting(2, help="Tokens of the text's end that are looked for.")

    def __post_init__(self) -> None:
        """Refuse counts below 1.

        Raises:
            UsageError: naming them.
        """
        require(
            self.tokens >= 1 and self.ngram >= 1,
            f"lookup tokens={self.tokens}, ngram={self.ngram}",
            "use 1 or more",
        )


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """The prompts, and how they are continued; the defaults take the most likely token each time.

    Attributes:
        artifact: an artifact, or a model that is not quantized.
        prompts: texts given one by one.
        repeat: number of rounds over all prompts, one after the other.
        output: file for the texts, prompt -> text, as `reference` reads it.
        source, column, limit: file, folder or hub name with more prompts, the key of its rows, and
            the number of prompts taken (`quantflow.runtime.prompt_files.read_prompts`).
        chat: texts are the user's messages of a chat.
        echo: print the prompt before the text; None does so but for chats.
        max_input_tokens: number of each prompt's first tokens that are kept; None keeps all.
        max_new_tokens, max_length: most tokens of a text; with the second those of its prompt
            count, and the first is not read.
        batch_size: prompts that are continued together.
        method: beams, contrastive search, lookup; None: one token after the other, or speculation
            by `draft`, `medusa` or `mtp`.
        draft, draft_tokens: folder of an artifact or a model that proposes so many tokens at a
            time.
        medusa: folder of Medusa heads.
        mtp: tokens that the model's own layer ahead (MTP) proposes at a time.
        rules: penalties and lengths; `bad_words` and `force_words` are put in as tokens.
        stop: texts end with any of these.
        ignore_eos: texts do not end with an end token.
        returned: texts per prompt.
        adapter: folder of a LoRA adapter; with `merge` in the weights that are not quantized.
        reference: a JSON file, prompt -> text, that the texts must equal.
        decoder: `lean` or `transformers`, or `auto` for the first where it can.
        kv_cache: KV cache of the lean decoder: float32, bfloat16, float8, int8, int5, int4, or
            `auto` for the dtype.
        torch_compile: run transformers' modules, compiled.
        attention: words that choose how transformers' modules attend
            (`quantflow.runtime.attention_choice`).
        shapes: shapes that transformers' modules run in, few of them.
        pack: keep the weights beside the artifact as the lean decoder holds them, and load them
            from there.
        exact: inputs that the schemes leave alone are never rounded.
        rounded_inputs: they are, whatever it costs, where a kernel multiplies integers then.
        disk_offload: leave the weights on disk and read them for every token, of a mixture those
            of the chosen experts; the same tokens with little memory.
        max_memory: memory of the process with `disk_offload`, such as 4GiB; what is left of it
            keeps experts.
        device: device where the model runs.
        ranks: processes that share the model, each with a part of every matrix.
        bind: each process keeps to cores of its own, one thread for each core.
        trust_network: the ranks may meet at the address of somebody's torchrun.
        revision: revision of an artifact on the hub.
        signature: signature that the artifact has to have.
    """

    artifact: Path
    prompts: tuple[str, ...] = setting(
        (),
        flag="--prompt",
        metavar="TEXT",
        verbs=GENERATE,
        help="A text to continue; also several.",
    )
    source: str | None = setting(
        None,
        flag="--prompts",
        metavar="FILE|DIR|NAME",
        verbs=GENERATE,
        help="More prompts: .txt (blank lines between), .json (a list or table), .jsonl, .csv, "
        ".parquet; a folder; a hub name.",
    )
    column: str | None = setting(
        None,
        flag="--column",
        metavar="KEY",
        verbs=GENERATE,
        help="Column of --prompts (default: the first that holds text).",
    )
    limit: int | None = setting(
        None, flag="--limit", metavar="N", verbs=GENERATE, help="The first N of --prompts."
    )
    repeat: int = setting(
        1,
        flag="--repeat",
        metavar="N",
        verbs=GENERATE,
        least=1,
        help="All prompts N times, --limit applied before.",
    )
    output: Path | None = setting(
        None,
        flag="--output",
        metavar="FILE",
        verbs=GENERATE,
        parse=Path,
        help="Write JSON of prompt: text, which --reference reads.",
    )
    echo: bool | None = setting(
        None,
        flag="--echo/--no-echo",
        verbs=GENERATE,
        help="Print the prompt before the text (default: unless --chat).",
    )
    chat: bool = setting(
        False,
        flag="--chat",
        verbs=GENERATE,
        help="Prompts are a user's messages: put them into the chat template.",
    )
    max_input_tokens: int | None = setting(
        None,
        flag="--max-input-tokens",
        metavar="N",
        verbs=GENERATE,
        parse=all_flag,
        help="The first N tokens of each prompt (default, or -1: all).",
    )
    batch_size: int = setting(
        1,
        flag="--batch-size",
        verbs=GENERATE,
        shown=True,
        help="Prompts that run together, padded on the left.",
    )
    reference: Path | None = setting(
        None,
        flag="--reference",
        metavar="FILE",
        verbs=GENERATE,
        parse=Path,
        help="JSON of prompt: text; exit 4 where a text differs.",
    )
    max_new_tokens: int = setting(64, flag="--max-new-tokens", verbs=GENERATE, shown=True, help="")
    max_length: int | None = setting(
        None,
        flag="--max-length",
        metavar="N",
        verbs=GENERATE,
        help="N tokens of prompt and text, in place of it.",
    )
    stop: tuple[str, ...] = setting(
        (), flag="--stop", metavar="TEXT", verbs=GENERATE, help="End with this text; also several."
    )
    ignore_eos: bool = setting(
        False, flag="--ignore-eos", verbs=GENERATE, help="Go on after end tokens."
    )
    sampling: Sampling | None = None
    rules: Rules = Rules()
    bad_words: tuple[str, ...] = setting(
        (),
        flag="--bad-words",
        metavar="WORD",
        verbs=GENERATE,
        help="Never generate this word; also several.",
    )
    method: Beams | Contrastive | Lookup | None = None
    returned: int = setting(
        1, flag="--num-return-sequences", metavar="N", verbs=GENERATE, help="Texts per prompt."
    )
    force_words: tuple[str, ...] = setting(
        (),
        flag="--force-words",
        metavar="WORD",
        verbs=GENERATE,
        help="Beams: every text contains it; also several.",
    )
    draft: Path | None = setting(
        None,
        flag="--assistant-model",
        metavar="DIR",
        verbs=GENERATE,
        parse=Path,
        help="A smaller artifact or model with the same tokenizer, which proposes tokens.",
    )
    draft_tokens: int = setting(
        5,
        flag="--assistant-tokens",
        verbs=GENERATE,
        shown=True,
        help="Tokens that it proposes at a time.",
    )
    medusa: Path | None = setting(
        None,
        flag="--medusa",
        metavar="DIR",
        verbs=GENERATE,
        parse=Path,
        help="Medusa heads that propose: a folder with medusa_lm_head.safetensors.",
    )
    mtp: int | None = setting(
        None,
        flag="--mtp",
        metavar="N",
        verbs=GENERATE,
        help="Propose N tokens with the model's own layer that predicts further tokens.",
    )
    adapter: Path | None = setting(
        None,
        flag="--adapter",
        metavar="DIR",
        verbs=GENERATE,
        parse=Path,
        help="A LoRA adapter (PEFT) beside the quantized linears.",
    )
    merge: bool = setting(
        False,
        flag="--merge-adapter",
        verbs=GENERATE,
        help="Merge it into weights that are not quantized.",
    )
    ranks: int = setting(1, flag="--ranks", metavar="N", verbs=GENERATE, help=RANKS_HELP)
    bind: bool = setting(False, flag="--bind", verbs=GENERATE, help=BIND_HELP)
    trust_network: bool = setting(False, flag="--trust-network", verbs=GENERATE, help=TRUST_HELP)
    backend: str = setting("auto", flag="--backend", verbs=GENERATE, shown=True, help=BACKEND_HELP)
    dtype: str = setting(
        "float32", flag="--dtype", choices=DTYPES, verbs=GENERATE, shown=True, help=""
    )
    device: str = setting(
        "cpu",
        flag="--device",
        metavar="DEVICE",
        verbs=GENERATE,
        parse=device_flag,
        shown=True,
        help=DEVICE_HELP,
    )
    decoder: str = setting("auto", flag="--decoder", verbs=GENERATE, shown=True, help=DECODER_HELP)
    torch_compile: bool = setting(False, flag="--torch-compile", verbs=GENERATE, help=COMPILE_HELP)
    attention: tuple[str, ...] = setting(
        (), flag="--attention", metavar="WORD", verbs=GENERATE, help=ATTENTION_HELP
    )
    shapes: Shapes = NO_SHAPES
    kv_cache: str = setting(
        "auto", flag="--kv-cache", metavar="KIND", verbs=GENERATE, help=KV_CACHE_HELP
    )
    pack: bool = setting(False, flag="--pack", verbs=GENERATE, help=PACK_HELP)
    exact: bool = setting(False, flag="--exact", verbs=GENERATE, help=EXACT_HELP)
    rounded_inputs: bool = setting(
        False, flag="--rounded-inputs", verbs=GENERATE, help=ROUNDED_HELP
    )
    revision: str | None = setting(
        None, flag="--revision", metavar="NAME", verbs=GENERATE, help=REVISION_HELP
    )
    signature: RequiredSignature = RequiredSignature()
    disk_offload: bool = setting(
        False,
        flag="--disk-offload",
        verbs=GENERATE,
        help="Read weights from disk as they are needed; of a mixture the experts that are chosen.",
    )
    max_memory: str | None = setting(
        None,
        flag="--max-memory",
        metavar="SIZE",
        verbs=GENERATE,
        help="With --disk-offload: memory of the process at most, such as 4GiB; what is left of "
        "it keeps experts (default: a tenth of the machine's).",
    )

    STREAMS: ClassVar[bool] = True  # ranks pass its text on as it comes

    def __post_init__(self) -> None:
        """Refuse words of attention that do not go together.

        Raises:
            UsageError: naming them.
        """
        attention_of(self.attention)

    def run(
        self, progress: Progress = SILENT, *, stream: Callable[[str], None] = lambda _: None
    ) -> dict[str, Any] | None:
        """Continue the prompts; see `quantflow.runtime.generation`.

        Args:
            progress: hears how far it is.
            stream: takes the text of a single sequence piece by piece, its prompt first.

        Returns:
            Texts, tokens and times, as plain data. None on a rank that is not the first.
        """
        from quantflow.runtime.generation import run

        return run(self, stream, progress)


def echoed(text: str, *, chat: bool) -> str:
    """The prompt as it is printed before its text.

    Before the answer of a chat it is a line of its own.
    """
    return f"{text}\n" if chat else text
