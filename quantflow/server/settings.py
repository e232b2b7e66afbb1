"""The settings of `quantflow serve`, each declared once; its limits have TGI's names.

What is left open follows from the model. The records are plain, so that a command line knows them
without torch or a web framework. Environment variables are those that TGI's launcher reads:
MAX_INPUT_TOKENS is `--max-input-tokens`. HOSTNAME is not read: containers set it to something else.
"""

import dataclasses
import functools
import ipaddress
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.errors import ResourceError, UsageError
from quantflow.files.origin import origin_of
from quantflow.files.required_signature import RequiredSignature
from quantflow.process_memory import available_bytes
from quantflow.progress import SILENT, Progress
from quantflow.runtime.attention_choice import ATTENTION_HELP, attention_of
from quantflow.runtime.batch_shapes import GAUDI, Buckets, Gaudi
from quantflow.runtime.generate_job import (
    BACKEND_HELP,
    COMPILE_HELP,
    DECODER_HELP,
    DEVICE_HELP,
    DTYPES,
    EXACT_HELP,
    GENERATION_CONFIG_HELP,
    GENERATION_CONFIGS,
    KV_CACHE_HELP,
    REVISION_HELP,
    ROUNDED_HELP,
)
from quantflow.runtime.request_limits import check_limits
from quantflow.server import parsers
from quantflow.settings import check_numbers, device_flag, setting
from quantflow.units import parse_size

SERVE = ("serve",)
ENGINES = ("quantflow", "vllm")
_for_serve = functools.partial(setting, verbs=SERVE)


def _limit(default: Any, flag: str, help: str, *, metavar: str = "N", **bounds: Any) -> Any:
    """A limit with TGI's variable: that of `--max-input-tokens` is MAX_INPUT_TOKENS."""
    return _for_serve(
        default,
        flag,
        variable=flag.removeprefix("--").replace("-", "_").upper(),
        metavar=metavar,
        shown=default is not None,
        help=help,
        **bounds,
    )


def speculated(text: str) -> int | str:
    """The value of `--speculate`: a number of tokens, `mtp` or `mtp:N`.

    Raises:
        UsageError: the text is none of these.
    """
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if re.fullmatch(r"mtp(:[1-9][0-9]{0,3})?", text):
        return text
    raise UsageError(f"speculate={text!r}", "use a number of tokens, mtp, or mtp:N")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what a server accepts.

    `quantflow.server.models.batch_limits` fills what is None, with TGI's arithmetic.
    """

    max_concurrent_requests: int = _limit(
        128, "--max-concurrent-requests", "Rows in the server, waiting ones too; above it: 429."
    )
    max_best_of: int = _limit(2, "--max-best-of", "Largest best_of.")
    max_stop_sequences: int = _limit(
        4, "--max-stop-sequences", "Stop strings of a request on TGI's routes."
    )
    max_top_n_tokens: int = _limit(
        5, "--max-top-n-tokens", "Likeliest tokens in the answer per step.", least=0
    )
    max_input_tokens: int | None = _limit(
        None, "--max-input-tokens", "Tokens of a prompt (default: max-total-tokens - 1)."
    )
    max_total_tokens: int | None = _limit(
        None,
        "--max-total-tokens",
        "Tokens of prompt and text (default: the model's positions, at most 4096).",
    )
    max_batch_prefill_tokens: int | None = _limit(
        None,
        "--max-batch-prefill-tokens",
        "Prompt tokens of a step (default: max-batch-size x max-input-tokens, or "
        "max-input-tokens + 50).",
    )
    max_batch_total_tokens: int | None = _limit(
        None,
        "--max-batch-total-tokens",
        "Tokens of all running rows (default: what --kv-memory holds).",
    )
    max_batch_size: int | None = _limit(None, "--max-batch-size", "Running rows (default: 64).")
    waiting_served_ratio: float = _limit(
        0.0,
        "--waiting-served-ratio",
        "Waiting rows per running one at which they join; 0: at once.",
        metavar="X",
    )
    max_waiting_tokens: int = _limit(
        20, "--max-waiting-tokens", "Steps after which they join anyway."
    )
    queue_threshold_ms: int | None = _limit(
        None,
        "--queue-threshold-ms",
        "Short prompts first, but for those that waited N ms (default: the order of arrival).",
    )
    max_client_batch_size: int = _limit(
        4, "--max-client-batch-size", "Prompts, or choices, of a request."
    )
    validation_workers: int = _limit(2, "--validation-workers", "Threads that tokenize.", least=1)

    def __post_init__(self) -> None:
        """Refuse numbers that are no limits, or contradict each other.

        `BatchLimits` refuses what contradicts the model.

        Raises:
            UsageError: a number is out of bounds, or two do not go together; the message names
                them.
        """
        check_numbers(self)
        check_limits(vars(self))


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """What is served, where, and to whom.

    Attributes:
        artifact: first model: a folder, a name on the hub or a GGUF file.
        limits: limits of requests.
        buckets: sizes that batches on transformers' modules are padded to.
        gaudi: how a Gaudi runs them.
        signature: signer that every artifact needs.
        origins: setting -> source of its value, for the table at the start.
    """

    artifact: Path
    revision: str | None = _for_serve(None, "--revision", metavar="NAME", help=REVISION_HELP)
    name: str | None = _for_serve(
        None,
        "--served-model-name",
        metavar="NAME",
        help="Name of the first model in requests (default: the folder's name, or the hub's).",
    )
    models: tuple[str, ...] = _for_serve(
        (),
        "--model",
        metavar="NAME=MODEL",
        help="One more model, loaded when it is asked for; also several.",
    )
    adapters: tuple[str, ...] = _for_serve(
        (),
        "--adapter",
        metavar="NAME=DIR",
        help="A LoRA adapter (PEFT) of the first model; requests name it as a model; also several.",
    )
    model_memory: str | None = _for_serve(
        None,
        "--model-memory",
        metavar="SIZE",
        help="Weights of all loaded models; above it the one that was unused longest is dropped.",
    )
    chat_template: Path | None = _for_serve(
        None,
        "--chat-template",
        metavar="FILE",
        parse=Path,
        help="Jinja file in place of the tokenizer's template.",
    )
    tool_parser: str = _for_serve(
        parsers.AUTO,
        "--tool-parser",
        metavar="NAME",
        shown=True,
        help=f"How calls of tools are read: {', '.join(parsers.CALL_PARSERS)}, none, or as the "
        "chat template shows.",
    )
    reasoning_parser: str = _for_serve(
        parsers.AUTO,
        "--reasoning-parser",
        metavar="NAME",
        shown=True,
        help=f"How reasoning is told from text: {', '.join(parsers.REASONING_PARSERS)}, harmony, "
        "none, or as the chat template shows.",
    )
    generation_config: str = _for_serve(
        "auto",
        "--generation-config",
        choices=GENERATION_CONFIGS,
        shown=True,
        help=GENERATION_CONFIG_HELP,
    )
    host: str = _for_serve("127.0.0.1", "--host", shown=True, help="0.0.0.0 is every network.")
    port: int = _for_serve(8000, "--port", variable="PORT", shown=True, help="0: a free one.")
    api_key: str | None = _for_serve(
        None,
        "--api-key",
        variable="API_KEY",
        metavar="KEY",
        help="Key that every request must have (Authorization: Bearer); better in API_KEY or a "
        "file.",
    )
    api_key_file: Path | None = _for_serve(
        None, "--api-key-file", metavar="FILE", parse=Path, help="The key is its first line."
    )
    protect_health: bool = _for_serve(
        False, "--protect-health", help="Ask for the key at /health, /ping and /metrics too."
    )
    cors_allow_origin: tuple[str, ...] = _for_serve(
        (),
        "--cors-allow-origin",
        variable="CORS_ALLOW_ORIGIN",
        metavar="ORIGIN",
        help="Origin whose pages may call; also several.",
    )
    allowed_host: tuple[str, ...] = _for_serve(
        (),
        "--allowed-host",
        metavar="NAME",
        help="Host header that is allowed beside the loopback's, where a server on the loopback "
        "has no key; also several.",
    )
    payload_limit: int = _for_serve(
        2_000_000,
        "--payload-limit",
        variable="PAYLOAD_LIMIT",
        metavar="BYTES",
        shown=True,
        help="Largest body of a request.",
    )
    header_limit: int = _for_serve(
        65_536,
        "--header-limit",
        metavar="BYTES",
        shown=True,
        help="Largest first line and headers of a request, together.",
    )
    client_timeout: float = _for_serve(
        30.0,
        "--client-timeout",
        metavar="SECONDS",
        shown=True,
        help="Time of a client to send headers or a body, or to take a piece of the answer.",
    )
    keep_alive_seconds: float = _for_serve(
        90.0,
        "--keep-alive-seconds",
        metavar="SECONDS",
        shown=True,
        help="Time of a connection between two requests; longer than that of a proxy before the "
        "server, so that the proxy is the one that closes it.",
    )
    drain_seconds: float = _for_serve(
        30.0,
        "--drain-seconds",
        metavar="SECONDS",
        shown=True,
        help="Time of running requests to end after SIGTERM.",
    )
    log_requests: bool = _for_serve(
        False,
        "--log-requests",
        help="Print a line for each request: its id, path, status, seconds and tokens.",
    )
    disable_grammar_support: bool = _for_serve(
        False,
        "--disable-grammar-support",
        variable="DISABLE_GRAMMAR_SUPPORT",
        help="Refuse requests with a grammar.",
    )
    speculate: int | str = _for_serve(
        0,
        "--speculate",
        variable="SPECULATE",
        metavar="N|mtp|mtp:N",
        parse=speculated,
        least=0,
        help="Draft N tokens from earlier text, or by the model's own layer that predicts further "
        "tokens (mtp: 1 of them), and compute them at once; texts are the same (default: 0).",
    )
    medusa: Path | None = _for_serve(
        None,
        "--medusa",
        metavar="DIR",
        parse=Path,
        help="Draft with Medusa heads of the first model, all or the first N of --speculate N: a "
        "folder with medusa_lm_head.safetensors.",
    )
    token_ids: bool = _for_serve(
        False,
        "--token-ids",
        variable="SKIP_TOKENIZER_IN_TGI",
        help="TGI's routes take and give token ids, 1,2,3, in place of text.",
    )
    limits: Limits = Limits()
    buckets: Buckets = Buckets()
    gaudi: Gaudi = Gaudi()
    signature: RequiredSignature = RequiredSignature()
    kv_memory: str | None = _for_serve(
        None,
        "--kv-memory",
        metavar="SIZE",
        help="Memory for keys and values, or a share of what is free when a model is loaded: 50% "
        "(default 80%, at most what the largest batch takes).",
    )
    kv_cache: str = _for_serve("auto", "--kv-cache", metavar="KIND", help=KV_CACHE_HELP)
    backend: str = _for_serve("auto", "--backend", shown=True, help=BACKEND_HELP)
    dtype: str = _for_serve("float32", "--dtype", choices=DTYPES, shown=True, help="")
    device: str = _for_serve(
        "cpu", "--device", metavar="DEVICE", parse=device_flag, shown=True, help=DEVICE_HELP
    )
    decoder: str = _for_serve("auto", "--decoder", shown=True, help=DECODER_HELP)
    torch_compile: bool = _for_serve(False, "--torch-compile", help=COMPILE_HELP)
    attention: tuple[str, ...] = _for_serve((), "--attention", metavar="WORD", help=ATTENTION_HELP)
    pack: bool = _for_serve(
        False, "--pack", help="Keep the weights as kernels want them in ARTIFACT-packed."
    )
    exact: bool = _for_serve(False, "--exact", help=EXACT_HELP)
    rounded_inputs: bool = _for_serve(False, "--rounded-inputs", help=ROUNDED_HELP)
    profile: Path = _for_serve(
        Path("serve-profile"),
        "--profile",
        variable="PROF_PATH",
        metavar="DIR",
        parse=Path,
        help="Folder of the traces of --profile-steps, for chrome://tracing (default: "
        "serve-profile).",
    )
    profile_steps: int = _for_serve(
        0,
        "--profile-steps",
        variable="PROF_STEP",
        metavar="N",
        least=0,
        help="Trace N steps of each model (default: 0, no trace).",
    )
    profile_wait: int = _for_serve(
        0,
        "--profile-wait",
        variable="PROF_WAITSTEP",
        metavar="N",
        least=0,
        help="Skip N steps before the trace.",
    )
    profile_warmup: int = _for_serve(
        0,
        "--profile-warmup",
        variable="PROF_WARMUPSTEP",
        metavar="N",
        least=0,
        help="Then skip N more, to warm up.",
    )
    profile_shapes: bool = _for_serve(
        False,
        "--profile-shapes",
        variable="PROF_RECORD_SHAPES",
        help="Put shapes of inputs into the trace.",
    )
    profile_ranks: str = _for_serve(
        "0",
        "--profile-ranks",
        variable="PROF_RANKS",
        metavar="N,N",
        shown=True,
        help="Ranks that are traced, with --ranks.",
    )
    ranks: int = _for_serve(
        1,
        "--ranks",
        metavar="N",
        least=1,
        help="Processes that share the model, each with a part of every matrix (default 1).",
    )
    engine: str = _for_serve(
        "quantflow",
        "--engine",
        choices=ENGINES,
        shown=True,
        help="vllm starts vLLM where it is installed.",
    )
    tensor_parallel: int | None = _for_serve(
        None,
        "--tensor-parallel",
        metavar="N",
        least=1,
        help="Cards that share the model, with --engine vllm.",
    )
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            UsageError: settings contradict each other or name nothing; the message names them.
        """
        check_numbers(self)
        parsers.check_names(calls=self.tool_parser, reasoning=self.reasoning_parser)
        if self.engine == "vllm" and self.device != "cpu":
            raise UsageError(
                f"device {self.device} with engine vllm",
                "leave it out: vLLM takes the GPUs that it sees",
            )
        attention_of(self.attention)
        if self.pads and self.decoder == "lean":
            what = "torch_compile" if self.torch_compile else "padded batches"
            raise UsageError(
                f"{what} with the lean decoder, which pads nothing", "leave one of them out"
            )
        if self.tensor_parallel is not None and self.engine != "vllm":
            raise UsageError(
                "tensor_parallel without engine vllm",
                "give ranks: so many processes share the model",
            )
        if isinstance(self.speculate, str):
            speculated(self.speculate)
        if self.medusa is not None and isinstance(self.speculate, str):
            raise UsageError(f"medusa with speculate={self.speculate}", "leave one of them out")
        if self.profile_steps and not self.traced_ranks <= {*range(self.ranks)}:
            raise UsageError(
                f"profile_ranks={self.profile_ranks} of {self.ranks} ranks",
                f"use numbers from 0 to {self.ranks - 1}, with commas",
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
        for name in ("payload_limit", "header_limit", "client_timeout", "keep_alive_seconds"):
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
    def traced_ranks(self) -> frozenset[int]:
        """Ranks whose steps are traced.

        Raises:
            UsageError: `profile_ranks` is no list of numbers.
        """
        if not re.fullmatch(r"\s*[0-9]{1,4}\s*(,\s*[0-9]{1,4}\s*)*", self.profile_ranks):
            raise UsageError(f"profile_ranks={self.profile_ranks!r}", "use numbers, such as 0,1")
        return frozenset(map(int, self.profile_ranks.split(",")))

    @property
    def on_gaudi(self) -> bool:
        """Whether a Gaudi runs the model."""
        return self.device == GAUDI

    @property
    def pads(self) -> bool:
        """Whether batches on transformers' modules were asked for."""
        return self.buckets.asked or self.torch_compile

    @property
    def lookup_tokens(self) -> int:
        """Tokens that are drafted from earlier text; 0: none."""
        return self.speculate if isinstance(self.speculate, int) and self.medusa is None else 0

    @property
    def mtp_tokens(self) -> int:
        """Tokens that the model's own layer drafts; 0: none."""
        if isinstance(self.speculate, int):
            return 0
        return int(self.speculate.partition(":")[2] or 1)

    @property
    def model_bytes(self) -> int | None:
        """Bytes of `model_memory`."""
        return None if self.model_memory is None else parse_size(self.model_memory)

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of `kv_memory`; a share is of the memory that is free now."""
        if self.kv_memory is None or not self.kv_memory.endswith("%"):
            return None if self.kv_memory is None else parse_size(self.kv_memory)
        return int(available_bytes() * _share(self.kv_memory))

    @property
    def address(self) -> str:
        """The numeric address of `host`, such as 127.0.0.1 for 127.1.

        Raises:
            ResourceError: the name has no address.
        """
        return address_of(self.host)

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of `adapters` by name."""
        return {name: folder for name, _, folder in (pair.partition("=") for pair in self.adapters)}

    @property
    def first_name(self) -> str:
        """Name of the first model in requests."""
        return self.name or origin_of(self.artifact).name

    def run(self, progress: Progress = SILENT) -> None:
        """Serve until a signal comes; see `quantflow.server.serve`."""
        from quantflow.server import serve

        serve(self, progress=progress)


def address_of(host: str) -> str:
    """The numeric address of a host, an IPv4 address where it has both kinds; 0.0.0.0 of none.

    Raises:
        ResourceError: the name has no address.
    """
    try:
        found = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ResourceError(
            f"host {host!r}: {getattr(error, 'strerror', None) or error}",
            "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for every network",
        ) from error
    order = {socket.AF_INET: 0, socket.AF_INET6: 1}
    *_, place = min(found, key=lambda one: order.get(one[0], 2))
    return str(place[0])


def is_loopback(address: str) -> bool:
    """Whether a text is an address of this machine alone, however it is spelled; names are none."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or found).is_loopback


def _share(text: str) -> float:
    """The share of the whole that `50%` means.

    Raises:
        UsageError: the text is no number above 0 and at most 100.
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
