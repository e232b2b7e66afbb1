"""What `quantflow serve` may be told, declared once; limits have TGI's names, and what is left open follows from the model.

Records are plain, so that a command line knows them without torch or a web framework. Environment
variables are those that TGI's launcher reads: MAX_INPUT_TOKENS is `--max-input-tokens`. HOSTNAME is
not read: containers set it to something else.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantflow.errors import UsageError
from quantflow.files.origin import origin_of
from quantflow.files.required_signature import RequiredSignature
from quantflow.planning.recipe import parse_size
from quantflow.process_memory import available_bytes
from quantflow.progress import SILENT, Progress
from quantflow.runtime.generate_job import (
    BACKEND_HELP,
    DECODER_HELP,
    DEVICE_HELP,
    DTYPES,
    EXACT_HELP,
    KV_CACHE_HELP,
    REVISION_HELP,
)
from quantflow.settings import check_numbers, device_flag, setting

SERVE = ("serve",)
ENGINES = ("quantflow", "vllm")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts. None is left to `quantflow.server.models.batch_limits`, which has TGI's arithmetic.

    Attributes:
        max_concurrent_requests: rows in the server at once, waiting ones included; what comes above
            gets 429.
        max_best_of: continuations of a prompt among which the best is returned.
        max_stop_sequences: stop strings of a request.
        max_top_n_tokens: likeliest tokens that are told per step.
        max_input_tokens: of a prompt; None: one less than `max_total_tokens`.
        max_total_tokens: of prompt and text; None: the model's positions, at most 4096.
        max_batch_prefill_tokens: of prompts that are read in one step; None: max_batch_size x
            max_input_tokens where a batch size is given, else max_input_tokens + 50.
        max_batch_total_tokens: of all rows that run; None: what fits into the cache's memory.
        max_batch_size: rows that run; None: 64.
        waiting_served_ratio: waiting rows join a running batch when there are so many per running
            one; 0: at once.
        max_waiting_tokens: steps after which they join anyway.
        queue_threshold_ms: the shortest prompt joins first, but for rows that have waited so long;
            None: the order of arrival.
        max_client_batch_size: prompts, or continuations of one, in a request.
        validation_workers: threads that tokenize.
    """

    max_concurrent_requests: int = setting(
        128,
        flag="--max-concurrent-requests",
        variable="MAX_CONCURRENT_REQUESTS",
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Above it: 429.",
    )
    max_best_of: int = setting(
        2,
        flag="--max-best-of",
        variable="MAX_BEST_OF",
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Largest best_of.",
    )
    max_stop_sequences: int = setting(
        4,
        flag="--max-stop-sequences",
        variable="MAX_STOP_SEQUENCES",
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Stop strings of a request.",
    )
    max_top_n_tokens: int = setting(
        5,
        flag="--max-top-n-tokens",
        variable="MAX_TOP_N_TOKENS",
        least=0,
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Likeliest tokens told per step.",
    )
    max_input_tokens: int | None = setting(
        None,
        flag="--max-input-tokens",
        variable="MAX_INPUT_TOKENS",
        metavar="N",
        verbs=SERVE,
        help="Of a prompt (default: max-total-tokens - 1).",
    )
    max_total_tokens: int | None = setting(
        None,
        flag="--max-total-tokens",
        variable="MAX_TOTAL_TOKENS",
        metavar="N",
        verbs=SERVE,
        help="Of prompt and text (default: the model's positions, at most 4096).",
    )
    max_batch_prefill_tokens: int | None = setting(
        None,
        flag="--max-batch-prefill-tokens",
        variable="MAX_BATCH_PREFILL_TOKENS",
        metavar="N",
        verbs=SERVE,
        help="Prompt tokens of a step (default: max-batch-size x max-input-tokens, or "
        "max-input-tokens + 50).",
    )
    max_batch_total_tokens: int | None = setting(
        None,
        flag="--max-batch-total-tokens",
        variable="MAX_BATCH_TOTAL_TOKENS",
        metavar="N",
        verbs=SERVE,
        help="Tokens of all running rows (default: what --kv-memory holds).",
    )
    max_batch_size: int | None = setting(
        None,
        flag="--max-batch-size",
        variable="MAX_BATCH_SIZE",
        metavar="N",
        verbs=SERVE,
        help="Running rows (default: 64).",
    )
    waiting_served_ratio: float = setting(
        0.0,
        flag="--waiting-served-ratio",
        variable="WAITING_SERVED_RATIO",
        metavar="X",
        verbs=SERVE,
        shown=True,
        help="Waiting rows per running one at which they join; 0: at once.",
    )
    max_waiting_tokens: int = setting(
        20,
        flag="--max-waiting-tokens",
        variable="MAX_WAITING_TOKENS",
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Steps after which they join anyway.",
    )
    queue_threshold_ms: int | None = setting(
        None,
        flag="--queue-threshold-ms",
        variable="QUEUE_THRESHOLD_MS",
        metavar="N",
        verbs=SERVE,
        help="Short prompts first, but for those that waited N ms (default: the order of arrival).",
    )
    max_client_batch_size: int = setting(
        4,
        flag="--max-client-batch-size",
        variable="MAX_CLIENT_BATCH_SIZE",
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Prompts, or choices, of a request.",
    )
    validation_workers: int = setting(
        2,
        flag="--validation-workers",
        variable="VALIDATION_WORKERS",
        least=1,
        metavar="N",
        verbs=SERVE,
        shown=True,
        help="Threads that tokenize.",
    )

    def __post_init__(self) -> None:
        """Refuse numbers that are no limits; which of them contradict each other is for `BatchLimits`.

        Raises:
            UsageError: naming it.
        """
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """What is served, where, and to whom.

    Attributes:
        artifact: the first model: a folder, a name on the hub or a GGUF file.
        revision: of the first model, on the hub.
        name: what requests call it; None: the folder's or the file's name, or that on the hub.
        models: more of them, `name=MODEL`; each is loaded when a request names it.
        adapters: LoRA adapters of the first model, `name=FOLDER`; requests choose one by its name,
            as if it were a model.
        model_memory: that weights of loaded models may have together; the one that was unused
            longest is dropped.
        chat_template: a file that stands in place of the tokenizer's own template.
        host, port: where it listens; port 0 takes a free one.
        api_key, api_key_file: what `Authorization: Bearer` must say; of a file the first line. None
            of both: nobody is asked.
        protect_health: /health, /ping and /metrics ask for the key too.
        cors_allow_origin: origins whose pages may call; none may unless it is listed.
        allowed_host: names that a Host header may have beside the loopback's; asked of a server on
            the loopback without a key.
        payload_limit: bytes of a request's body.
        header_limit: bytes of a request's line and headers.
        client_timeout: seconds that a client may take to send headers, to send a body, or to take
            what is sent to it.
        drain_seconds: SIGTERM lets running requests end for so long.
        disable_grammar_support: refuse requests with a grammar.
        device: where models run; off the CPU transformers' modules do, one request after the other.
        speculate: tokens that are guessed at a time from what followed the last ones earlier in the
            text, and computed beside the next; texts are the same. 0: none.
        token_ids: TGI's routes take and give token ids with commas between them, in place of text.
        limits: of requests.
        signature: whom every artifact has to be signed by.
        profile: a folder for a trace of `profile_steps` steps of each model, NAME.json, after the
            first `profile_wait` and `profile_warmup` that it does; with `profile_shapes` it has the
            shapes of inputs. 0 steps: none.
        kv_memory: for keys and values, such as 4GiB, or 50% of what is free when a model is loaded.
        engine: `quantflow`, or `vllm` to start vLLM with what the manifest says.
        tensor_parallel: cards that vLLM shares the model over; None: one.
        origins: setting -> where its value is from, for the table at the start.
    """

    artifact: Path
    revision: str | None = setting(
        None, flag="--revision", metavar="NAME", verbs=SERVE, help=REVISION_HELP
    )
    name: str | None = setting(
        None,
        flag="--served-model-name",
        metavar="NAME",
        verbs=SERVE,
        help="Default: the folder's name, or the hub's.",
    )
    models: tuple[str, ...] = setting(
        (),
        flag="--model",
        metavar="NAME=MODEL",
        verbs=SERVE,
        help="One more model, loaded when it is asked for; also several.",
    )
    adapters: tuple[str, ...] = setting(
        (),
        flag="--adapter",
        metavar="NAME=DIR",
        verbs=SERVE,
        help="A LoRA adapter (PEFT) of the first model; requests choose it by name; also several.",
    )
    model_memory: str | None = setting(
        None,
        flag="--model-memory",
        metavar="SIZE",
        verbs=SERVE,
        help="Drop the model that was unused longest when loaded ones are larger together.",
    )
    chat_template: Path | None = setting(
        None,
        flag="--chat-template",
        metavar="FILE",
        verbs=SERVE,
        parse=Path,
        help="Jinja, in place of the tokenizer's.",
    )
    host: str = setting(
        "127.0.0.1", flag="--host", verbs=SERVE, shown=True, help="0.0.0.0 is every network."
    )
    port: int = setting(
        8000, flag="--port", variable="PORT", verbs=SERVE, shown=True, help="0: a free one."
    )
    api_key: str | None = setting(
        None,
        flag="--api-key",
        variable="API_KEY",
        metavar="KEY",
        verbs=SERVE,
        help="Asked of every request; better in API_KEY or a file.",
    )
    api_key_file: Path | None = setting(
        None,
        flag="--api-key-file",
        metavar="FILE",
        verbs=SERVE,
        parse=Path,
        help="The key is its first line.",
    )
    protect_health: bool = setting(
        False,
        flag="--protect-health",
        verbs=SERVE,
        help="Ask for the key at /health, /ping and /metrics too.",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (),
        flag="--cors-allow-origin",
        variable="CORS_ALLOW_ORIGIN",
        metavar="ORIGIN",
        verbs=SERVE,
        help="Pages of it may call; also several.",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        flag="--allowed-host",
        metavar="NAME",
        verbs=SERVE,
        help="A Host header beside the loopback's; also several.",
    )
    payload_limit: int = setting(
        2_000_000,
        flag="--payload-limit",
        variable="PAYLOAD_LIMIT",
        metavar="BYTES",
        verbs=SERVE,
        shown=True,
        help="Of a request's body.",
    )
    header_limit: int = setting(
        65_536,
        flag="--header-limit",
        metavar="BYTES",
        verbs=SERVE,
        shown=True,
        help="Of a request's headers.",
    )
    client_timeout: float = setting(
        30.0,
        flag="--client-timeout",
        metavar="SECONDS",
        verbs=SERVE,
        shown=True,
        help="For a client to send its request, or to take a piece of the answer.",
    )
    drain_seconds: float = setting(
        30.0,
        flag="--drain-seconds",
        metavar="SECONDS",
        verbs=SERVE,
        shown=True,
        help="After SIGTERM, for running requests.",
    )
    disable_grammar_support: bool = setting(
        False,
        flag="--disable-grammar-support",
        variable="DISABLE_GRAMMAR_SUPPORT",
        verbs=SERVE,
        help="Refuse requests with a grammar.",
    )
    speculate: int = setting(
        0,
        flag="--speculate",
        variable="SPECULATE",
        metavar="N",
        verbs=SERVE,
        least=0,
        help="Guess N tokens from what stood before in the text; texts are the same (default: 0).",
    )
    token_ids: bool = setting(
        False,
        flag="--token-ids",
        variable="SKIP_TOKENIZER_IN_TGI",
        verbs=SERVE,
        help="TGI's routes take and give token ids, 1,2,3, in place of text.",
    )
    limits: Limits = Limits()
    signature: RequiredSignature = RequiredSignature()
    kv_memory: str | None = setting(
        None,
        flag="--kv-memory",
        metavar="SIZE",
        verbs=SERVE,
        help="For keys and values, or a share of what is free: 50% (default 80%, at most what "
        "the largest batch takes).",
    )
    kv_cache: str = setting(
        "auto", flag="--kv-cache", metavar="KIND", verbs=SERVE, help=KV_CACHE_HELP
    )
    backend: str = setting("auto", flag="--backend", verbs=SERVE, shown=True, help=BACKEND_HELP)
    dtype: str = setting(
        "float32", flag="--dtype", choices=DTYPES, verbs=SERVE, shown=True, help=""
    )
    device: str = setting(
        "cpu",
        flag="--device",
        metavar="DEVICE",
        verbs=SERVE,
        parse=device_flag,
        shown=True,
        help=DEVICE_HELP,
    )
    decoder: str = setting("auto", flag="--decoder", verbs=SERVE, shown=True, help=DECODER_HELP)
    pack: bool = setting(
        False,
        flag="--pack",
        verbs=SERVE,
        help="Keep the weights as kernels want them in ARTIFACT-packed.",
    )
    exact: bool = setting(False, flag="--exact", verbs=SERVE, help=EXACT_HELP)
    profile: Path = setting(
        Path("serve-profile"),
        flag="--profile",
        variable="PROF_PATH",
        metavar="DIR",
        verbs=SERVE,
        parse=Path,
        help="For traces of --profile-steps, for chrome://tracing (default: serve-profile).",
    )
    profile_steps: int = setting(
        0,
        flag="--profile-steps",
        variable="PROF_STEP",
        metavar="N",
        verbs=SERVE,
        least=0,
        help="Trace N steps of each model (default: 0, no trace).",
    )
    profile_wait: int = setting(
        0,
        flag="--profile-wait",
        variable="PROF_WAITSTEP",
        metavar="N",
        verbs=SERVE,
        least=0,
        help="After N steps.",
    )
    profile_warmup: int = setting(
        0,
        flag="--profile-warmup",
        variable="PROF_WARMUPSTEP",
        metavar="N",
        verbs=SERVE,
        least=0,
        help="And after N more.",
    )
    profile_shapes: bool = setting(
        False,
        flag="--profile-shapes",
        variable="PROF_RECORD_SHAPES",
        verbs=SERVE,
        help="Put shapes of inputs into the trace.",
    )
    engine: str = setting(
        "quantflow",
        flag="--engine",
        choices=ENGINES,
        verbs=SERVE,
        shown=True,
        help="vllm starts vLLM where it is installed.",
    )
    tensor_parallel: int | None = setting(
        None,
        flag="--tensor-parallel",
        metavar="N",
        verbs=SERVE,
        least=1,
        help="Of --engine vllm: cards that share the model.",
    )
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            UsageError: naming it.
        """
        check_numbers(self)
        if self.engine == "vllm" and self.device != "cpu":
            raise UsageError(
                f"device {self.device} with engine vllm",
                "leave it out: vLLM takes the GPUs that it sees",
            )
        if self.tensor_parallel is not None and self.engine != "vllm":
            raise UsageError(
                "tensor_parallel without engine vllm", "leave it out: one process runs the model"
            )
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port={self.port}", "use 0 to 65535")
        if self.api_key is not None and self.api_key_file is not None:
            raise UsageError("api_key and api_key_file together", "give one of them")
        if self.api_key == "":
            raise UsageError(
                "api_key is empty: it would be a key that everybody has",
                "give a key, or leave it out",
            )
        for name in ("payload_limit", "header_limit", "client_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)}", "use a positive number")
        if self.model_memory is not None:
            parse_size(self.model_memory)
        if self.kv_memory is not None:
            (_share if self.kv_memory.endswith("%") else parse_size)(self.kv_memory)
        if not 0 <= self.drain_seconds < math.inf:
            raise UsageError(f"drain_seconds={self.drain_seconds}", "use 0 or more")
        for pair in self.models:
            if not all(pair.partition("=")[::2]):
                raise UsageError(f"{pair!r} names no model", "write NAME=MODEL")
        for pair in self.adapters:
            if not all(pair.partition("=")[::2]):
                raise UsageError(f"{pair!r} names no adapter", "write NAME=DIR")
        names = [pair.partition("=")[0] for pair in (*self.models, *self.adapters)] + [
            self.first_name
        ]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"model {name!r} stands for two folders",
                    "give every model and adapter a name of its own",
                )

    @property
    def model_bytes(self) -> int | None:
        """Bytes of `model_memory`."""
        return None if self.model_memory is None else parse_size(self.model_memory)

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of `kv_memory`; a share is of what is free now."""
        if self.kv_memory is None or not self.kv_memory.endswith("%"):
            return None if self.kv_memory is None else parse_size(self.kv_memory)
        return int(available_bytes() * _share(self.kv_memory))

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of `adapters` by name."""
        return {name: folder for name, _, folder in (pair.partition("=") for pair in self.adapters)}

    @property
    def first_name(self) -> str:
        """What requests call the first model."""
        return self.name or origin_of(self.artifact).name

    def run(self, progress: Progress = SILENT) -> None:
        """Serve until a signal comes; see `quantflow.server.serve`."""
        from quantflow.server import serve

        serve(self, progress=progress)


def _share(text: str) -> float:
    """Return what `50%` is of the whole.

    Raises:
        UsageError: no number above 0 and at most 100.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(
            f"kv_memory={text}", "give a size, such as 4GiB, or a share above 0% and up to 100%"
        )
    return share
