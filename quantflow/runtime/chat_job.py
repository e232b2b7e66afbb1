"""The settings of `quantflow chat`; plain, so that a command line knows them without torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quantflow.errors import UsageError
from quantflow.files.required_signature import RequiredSignature
from quantflow.progress import SILENT, Progress
from quantflow.runtime.generate_job import (
    BACKEND_HELP,
    DECODER_HELP,
    DTYPES,
    EXACT_HELP,
    GENERATION_CONFIG_HELP,
    GENERATION_CONFIGS,
    KV_CACHE_HELP,
    REVISION_HELP,
    ROUNDED_HELP,
    Sampling,
)
from quantflow.settings import check_numbers, setting

if TYPE_CHECKING:
    from quantflow.runtime.partner import Partner

CHAT = ("chat",)
TEMPERATURE = 0.7  # where neither this record nor the model says one
_PRINTED = re.compile(r"[!-~]+")  # of an address: what stands in a request line
_KEY = re.compile(r"[ -~]+")


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """The partner of a conversation, and how answers are drawn.

    Attributes:
        artifact: a folder, a name on the hub or a GGUF file; None where `url` is given.
        url: address of a server with OpenAI's routes, such as http://127.0.0.1:8000.
        model: name of the model on that server.
        api_key: key that the server asks for.
        revision: revision of an artifact on the hub.
        system: system message, or None.
        chat_template: file that stands in place of the tokenizer's own template.
        max_new_tokens: tokens of an answer, at most.
        temperature: temperature of the tokens; 0 takes the likeliest token each time. None: the
            model's own, or the server's.
        top_k, top_p: filters of `Sampling`.
        generation_config: whether the model's own settings of sampling count; see `serve`.
        seed: seed of the first answer; each further one counts on. None: any.
        reasoning: show what a model thinks before its answers.
        signature: signature that the artifact has to have.
    """

    artifact: Path | None = None
    url: str | None = setting(
        None, flag="--url", verbs=CHAT, help="Talk with a server in place of an artifact."
    )
    model: str | None = setting(
        None, flag="--model", metavar="NAME", verbs=CHAT, help="What the server calls it."
    )
    api_key: str | None = setting(
        None, flag="--api-key", metavar="KEY", verbs=CHAT, variable="API_KEY", help="Of the server."
    )
    revision: str | None = setting(
        None, flag="--revision", metavar="NAME", verbs=CHAT, help=REVISION_HELP
    )
    system: str | None = setting(
        None, flag="--system", metavar="TEXT", verbs=CHAT, help="The system message."
    )
    chat_template: Path | None = setting(
        None,
        flag="--chat-template",
        metavar="FILE",
        verbs=CHAT,
        parse=Path,
        help="Jinja, in place of the tokenizer's.",
    )
    max_new_tokens: int = setting(
        512, flag="--max-new-tokens", verbs=CHAT, shown=True, least=1, help="Of an answer."
    )
    temperature: float | None = setting(
        None,
        flag="--temperature",
        verbs=CHAT,
        help="0: the likeliest token (default: the model's own or the server's, else 0.7).",
    )
    top_k: int | None = setting(
        None, flag="--top-k", verbs=CHAT, help="Sample from the k most likely tokens."
    )
    top_p: float | None = setting(
        None, flag="--top-p", verbs=CHAT, help="Sample from the fewest that hold this probability."
    )
    generation_config: str = setting(
        "auto",
        flag="--generation-config",
        verbs=CHAT,
        choices=GENERATION_CONFIGS,
        shown=True,
        help=GENERATION_CONFIG_HELP,
    )
    seed: int | None = setting(
        None, flag="--seed", verbs=CHAT, help="The same seed gives the same answers."
    )
    reasoning: bool = setting(
        True,
        flag="--reasoning/--no-reasoning",
        verbs=CHAT,
        help="Show, dim on a terminal, what a model thinks before it answers.",
    )
    backend: str = setting("auto", flag="--backend", verbs=CHAT, shown=True, help=BACKEND_HELP)
    dtype: str = setting("float32", flag="--dtype", choices=DTYPES, verbs=CHAT, shown=True, help="")
    decoder: str = setting("auto", flag="--decoder", verbs=CHAT, shown=True, help=DECODER_HELP)
    kv_cache: str = setting(
        "auto", flag="--kv-cache", metavar="KIND", verbs=CHAT, help=KV_CACHE_HELP
    )
    exact: bool = setting(False, flag="--exact", verbs=CHAT, help=EXACT_HELP)
    rounded_inputs: bool = setting(False, flag="--rounded-inputs", verbs=CHAT, help=ROUNDED_HELP)

    signature: RequiredSignature = RequiredSignature()

    def __post_init__(self) -> None:
        """Refuse settings that name no partner, or two.

        Raises:
            UsageError: naming it.
        """
        check_numbers(self)
        if (self.artifact is None) == (self.url is None):
            raise UsageError(f"chat: artifact {self.artifact}, url {self.url}", "give one of them")
        if self.url is not None and self.signature:
            raise UsageError(
                "chat: a signature of a model on a server",
                "give the artifact, or leave the signature out",
            )
        if self.url is not None:
            self.place  # noqa: B018 refuses an address that is none
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise UsageError(
                "chat: an API key with a character that no header may hold", "give the key alone"
            )
        if self.url is not None and self.generation_config != "auto":
            raise UsageError(
                f"chat: generation_config {self.generation_config} with a server",
                "give it to the server, or give --temperature",
            )
        self.sampling(0)

    @property
    def place(self) -> tuple[bool, str, str]:
        """The server of `url`: whether TLS is spoken, host with port, and the path before /v1.

        Raises:
            UsageError: the address is none.
        """
        address = str(self.url)
        try:
            parts = urlsplit(address.rstrip("/").removesuffix("/v1"))
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port or an IPv6 address that is none
            good = False
        if not good or "@" in parts.netloc or not _PRINTED.fullmatch(address):
            raise UsageError(f"url={address}", "write http://HOST:PORT")
        return parts.scheme == "https", parts.netloc, parts.path

    def sampling(self, seed: int, **defaults: float) -> Sampling | None:
        """How an answer is drawn; None takes the likeliest token.

        Args:
            seed: seed of the answer.
            defaults: the model's own settings, which count where this record says nothing.

        Raises:
            UsageError: values outside their ranges.
        """
        own = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        settings = {"temperature": TEMPERATURE, **defaults, **given}
        return None if settings["temperature"] == 0 else Sampling(**settings, seed=seed)

    def partner(self, progress: Progress = SILENT) -> "Partner":
        """Who answers: an artifact that is loaded here, or a server.

        Raises:
            QuantflowError: the artifact cannot be loaded or has no chat template; the server does
                not answer.
        """
        if self.url is not None:
            from quantflow.runtime.remote_partner import RemotePartner  # without torch

            return RemotePartner(self)
        from quantflow.runtime.conversation import local_partner

        return local_partner(self, progress)
