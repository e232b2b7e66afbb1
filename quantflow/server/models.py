"""The models of a server, each with engine, tokenizer and limits, loaded at the first request."""

import asyncio
import contextlib
import re
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from transformers import BatchEncoding

from quantflow.backends import cuda, hpu
from quantflow.distributed.communicator import Communicator
from quantflow.errors import InputError, QuantflowError, UnsupportedError
from quantflow.models import chat_template
from quantflow.models.token_ids import encoding_of, tokens_of
from quantflow.runtime import graphs, row_modules
from quantflow.runtime.attention_choice import attention_of
from quantflow.runtime.batching import BatchLimits, Engine
from quantflow.runtime.batching.drafts import AheadDraft, MedusaDraft, RowDraft
from quantflow.runtime.decoding.medusa import Medusa
from quantflow.runtime.decoding.text import word_ids
from quantflow.runtime.generate_job import Words
from quantflow.runtime.generation_config import NO_DEFAULTS, sampling_defaults
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import Loaded, load
from quantflow.runtime.loaded_medusa import medusa_heads
from quantflow.runtime.mtp import AheadLayer
from quantflow.runtime.row_modules import RowModules
from quantflow.runtime.shapes import NO_SHAPES, Shapes
from quantflow.runtime.step_trace import TracedSteps
from quantflow.server import parsers
from quantflow.server.characters import bound_of
from quantflow.server.errors import Refused, bad_template, invalid, too_many_characters
from quantflow.server.grammar import Grammars
from quantflow.server.settings import Limits, ServeJob
from quantflow.server.text import Vocabulary
from quantflow.server.threads import ServerThreads
from quantflow.server.validation import MOST_STOPS

Result = TypeVar("Result")

LONGEST = 4096  # TGI's default limit of a request's tokens
TEMPLATE_SECONDS = 30.0  # for a conversation to wait for others of its model and to be rendered
TEMPLATE_CHARACTERS = 8_000_000
UNBOUND_CHARACTERS = 100_000  # of a text whose tokens are listed, where no bound follows
ANY_NAME = ("tgi", "dummy", "default")  # names that clients of a single model use


def batch_limits(limits: Limits, *, positions: int | None) -> BatchLimits:
    """An engine's limits: the given ones, and TGI's arithmetic for the others.

    Args:
        limits: limits of the server.
        positions: largest number of tokens that the model takes; None is any number.

    Raises:
        UsageError: the limits contradict each other or the model.
    """
    total = (
        min(positions or LONGEST, LONGEST)
        if limits.max_total_tokens is None
        else limits.max_total_tokens
    )
    longest = max(1, total - 1) if limits.max_input_tokens is None else limits.max_input_tokens
    return BatchLimits(
        max_input_tokens=longest,
        max_total_tokens=total,
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        max_concurrent_requests=limits.max_concurrent_requests,
        waiting_served_ratio=limits.waiting_served_ratio,
        max_waiting_tokens=limits.max_waiting_tokens,
        queue_threshold_ms=limits.queue_threshold_ms,
        max_best_of=limits.max_best_of,
        max_stop_sequences=max(limits.max_stop_sequences, MOST_STOPS),
        max_client_batch_size=limits.max_client_batch_size,
        max_batch_size=limits.max_batch_size,
    )


def traced_steps(name: str, job: ServeJob, *, rank: int = 0) -> TracedSteps | None:
    """The steps of a model that a rank traces, and the file of the trace; None: it traces none.

    The file has the model's name without characters that file names cannot have, and the rank's
    number behind the first one.
    """
    if not job.profile_steps or rank not in job.traced_ranks:
        return None
    behind = f"-rank{rank}" if rank else ""
    path = job.profile / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}{behind}.json"
    skip = job.profile_wait + job.profile_warmup
    return TracedSteps(path=path, skip=skip, count=job.profile_steps, shapes=job.profile_shapes)


class ServedModel:
    """A model that answers.

    Attributes:
        name: name of the model in requests.
        loaded: loaded artifact.
        engine: engine that runs its requests.
        tokenizer: tokenizer of its text.
        vocabulary: its tokens one by one.
        grammars: grammars that were compiled for it.
        defaults: settings of sampling where a request says nothing.
        speculation: what proposes tokens, in words; None: nothing does.
        alone: why its rows run one after the other, in a sentence; None: they run together.
        max_input_tokens, max_total_tokens: limits of a request.
        used: a count that grows with each use of any model.
        rows: number of requests that it answers now, or that prepare to use it.
        weight_bytes: bytes of its weight files.
        workers: threads beside the event loop.
    """

    def __init__(
        self,
        name: str,
        loaded: Loaded,
        *,
        job: ServeJob,
        workers: ServerThreads,
        medusa: Path | None = None,
    ) -> None:
        """Start the engine.

        Args:
            name: name of the model in requests.
            loaded: loaded artifact.
            job: settings of the server.
            workers: threads beside the event loop.
            medusa: folder of its Medusa heads.

        Raises:
            InputError: the artifact has no tokenizer, its generation_config.json is damaged, or the
                chat template cannot be read.
            UsageError: the limits do not fit the model.
            UnsupportedError: speculation by a layer that it does not have, or that another decoder
                than the lean one runs.
        """
        if loaded.tokenizer is None:
            raise InputError(
                f"{name}: the artifact has no tokenizer", "export it with its tokenizer's files"
            )
        self.name, self.loaded, self.tokenizer = name, loaded, loaded.tokenizer
        limits = batch_limits(job.limits, positions=loaded.decoder.positions)
        modules, self.alone = _together(loaded, job)
        self.engine = Engine(
            modules or loaded.decoder,
            limits=limits,
            tokenizer=loaded.tokenizer,
            kv_memory=job.kv_bytes,
            traced=traced_steps(name, job),
            draft=_draft(loaded, job, medusa),
            buckets=job.buckets,
        )
        self.speculation = _speculation(job, medusa)
        self.max_input_tokens = int(self.engine.limits.max_input_tokens or 0)
        self.max_total_tokens = int(self.engine.limits.max_total_tokens or 0)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.grammars = Grammars(
            self.tokenizer, vocab_size=loaded.decoder.vocab_size, ends=loaded.eos_token_ids
        )
        self.defaults = (
            sampling_defaults(loaded.artifact.checkpoint)
            if job.generation_config == "auto"
            else NO_DEFAULTS
        )
        self.used, self.rows = 0, 0
        self.workers = workers
        self._bound = bound_of(self.tokenizer)
        self.weight_bytes = weight_bytes(loaded.artifact.checkpoint.folder)
        self._template = None if job.chat_template is None else _read_template(job.chat_template)
        self._parsers = {"calls": job.tool_parser, "reasoning": job.reasoning_parser}
        self._renderer = chat_template.Renderer()
        # threads of their own, so that threads that tokenize never wait for them
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="quantflow-template")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="quantflow-grammar")
        # a first call settles padding and truncation, so that threads only read
        with contextlib.suppress(InputError):  # a tokenizer may not know the word
            tokens_of(self.tokenizer, "warm", where=name)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The artifact's manifest."""
        return self.loaded.artifact.manifest

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None or self.tokenizer.chat_template is not None

    def parsers_of(self, template: str) -> parsers.AnswerParsers:
        """How calls and reasoning are read from answers to a prompt of a template."""
        return parsers.parsers_of(template, **self._parsers)

    @property
    def float8(self) -> bool:
        """Whether its weights are float8."""
        return any(
            linear.scheme.weights.kind == "float"
            for linear in self.loaded.artifact.linears.values()
        )

    async def encode(self, text: str, *, rendered: bool, bounded: bool = True) -> tuple[int, ...]:
        """The tokens of a prompt, computed in a thread.

        Args:
            text: prompt.
            rendered: whether it comes from a chat template, which writes special tokens itself.
            bounded: whether it must have no more tokens than a prompt may have. A text that is
                longer than so many tokens can be is then refused before it is tokenized.

        Raises:
            Refused: the text is too long, or the tokenizer cannot read it.
        """
        if bounded:
            self.require_length(text)
        found = await self._encoding(
            text, lambda encoding: encoding["input_ids"], special=not rendered
        )
        return tuple(found)

    def require_length(self, text: str) -> None:
        """Refuse a text that certainly has more tokens than a prompt may have.

        Raises:
            Refused: of kind validation.
        """
        tokens = self.max_input_tokens
        most = None if self._bound is None else self._bound.beyond(text, tokens)
        if most is not None:
            raise too_many_characters(
                most=most, given=len(text), tokens=tokens, total=self.max_total_tokens
            )

    async def token_table(self, text: str, *, rendered: bool = False) -> "TokenTable":
        """The tokens of a text with their places in it; see `encode` for `rendered`.

        Raises:
            Refused: the text is longer than a prompt may be, or the tokenizer cannot read it.
        """
        self.require_length(text)
        if self._bound is None and len(text) > UNBOUND_CHARACTERS:
            cause = f"`inputs` must have at most {UNBOUND_CHARACTERS} characters here"
            raise invalid(f"{cause}. Given: {len(text)}")
        return await self._encoding(
            text,
            lambda encoding: TokenTable(text, encoding.encodings[0], self.vocabulary),
            special=not rendered,
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        continues: bool = False,
        tools: Any = None,
        tool_prompt: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> chat_template.Rendered:
        """The prompt that the chat template makes of a conversation.

        It is rendered in the model's own process (`quantflow.models.chat_template`, which has the
        arguments); time, memory and length are bounded.

        Raises:
            Refused: of kind template_error.
        """
        if not self.has_template:
            raise bad_template(
                "template not found: the model has none; start the server with --chat-template FILE"
            )
        work = partial(
            chat_template.render,
            self.tokenizer,
            messages,
            answer=answer,
            continues=continues,
            template=self._template,
            tools=tools,
            tool_prompt=tool_prompt,
            options=options,
            renderer=self._renderer,
        )
        try:
            rendered: chat_template.Rendered = await asyncio.wait_for(
                self._in_thread(work, self._rendering), TEMPLATE_SECONDS
            )
        except TimeoutError:
            raise bad_template(
                f"others of the model take more than {TEMPLATE_SECONDS:.0f} s"
            ) from None
        except chat_template.NotRendered as error:
            raise bad_template(str(error)) from error
        length = len(rendered.text)
        if length > TEMPLATE_CHARACTERS:
            raise bad_template(f"{length} characters, {TEMPLATE_CHARACTERS} are allowed")
        return rendered

    async def words(self, words: Sequence[str]) -> Words:
        """The tokens of each word, at the begin of a text and within it.

        Raises:
            Refused: the tokenizer cannot read one.
        """
        if not words:
            return ()
        try:
            found: Words = await self.workers.read(
                lambda: word_ids(self.tokenizer, words, before=("", " ")),
                characters=sum(map(len, words)),
            )
        except InputError as error:
            raise invalid(error.cause) from error
        return found

    async def compiled(self, grammar: Any) -> Any:
        """A request's way through a grammar, compiled in a thread.

        Raises:
            Refused: of kind validation.
        """
        return await self._in_thread(lambda: self.grammars.mask(grammar), self._compiling)

    def close(self) -> None:
        """End the engine, and the process that renders conversations."""
        self.engine.close()
        for threads in (self._rendering, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)
        self._renderer.close()

    async def _encoding(
        self, text: str, then: Callable[[BatchEncoding], Result], *, special: bool
    ) -> Result:
        """What `then` makes of the encoding of a text, in the same thread."""

        def work() -> Result:
            return then(encoding_of(self.tokenizer, text, where="inputs", special=special))

        try:
            return await self.workers.read(work, characters=len(text))
        except InputError as error:
            raise invalid(error.cause) from error

    async def _in_thread(self, work: Callable[[], Any], threads: ThreadPoolExecutor) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work)


class TokenTable:
    """TGI's table of a text's tokens: id, text, begin and end.

    Numbers are kept in arrays, and the rows are made when they are sent: as objects of Python they
    would take a hundred times the memory of the text.
    """

    def __init__(self, text: str, encoding: Any, vocabulary: Vocabulary) -> None:
        """Keep the tokens of an encoding of the `tokenizers` package."""
        self._text, self._vocabulary = text, vocabulary
        self._ids = array("I", encoding.ids)
        self._places = array("I")
        for index in range(len(self._ids)):  # asked one by one: all at once keeps threads waiting
            self._places.extend(encoding.token_to_chars(index) or (0, 0))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of the table."""
        text, places = self._text, self._places
        for index, token in enumerate(self._ids):
            a, b = places[2 * index], places[2 * index + 1]
            shown = text[a:b] or self._vocabulary.text(token)
            yield {"id": token, "text": shown, "start": a, "stop": b}

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._ids)


@dataclass(kw_only=True)
class ModelPlace:
    """A model that may be loaded; `served` is None while it is not."""

    folder: Path
    served: ServedModel | None = None


class Models:
    """All models of a server by name; the first is loaded from the start and stays."""

    def __init__(self, job: ServeJob, first: Loaded) -> None:
        """Start the first model.

        Raises:
            QuantflowError: it cannot be served.
        """
        self.job = job
        self.workers = ServerThreads(job.limits.validation_workers)
        self._loaders = ThreadPoolExecutor(1, thread_name_prefix="quantflow-loading")
        _adapt(first, job.adapter_folders)
        self.first = ServedModel(
            job.first_name, first, job=job, workers=self.workers, medusa=job.medusa
        )
        self.places = {job.first_name: ModelPlace(folder=job.artifact, served=self.first)}
        for pair in job.models:
            name, _, folder = pair.partition("=")
            self.places[name] = ModelPlace(folder=Path(folder))
        self._uses = 0
        self._loading = asyncio.Lock()

    @property
    def running(self) -> list[ServedModel]:
        """The models that are loaded."""
        return [place.served for place in self.places.values() if place.served is not None]

    @property
    def failed(self) -> BaseException | None:
        """The error that ended an engine; None while all are well."""
        return next(
            (model.engine.failed for model in self.running if model.engine.failed is not None), None
        )

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request names in the place of a model; None where it names none."""
        return name if name in self.job.adapter_folders else None

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Yield the model that a request names, loaded if necessary and kept for the block.

        Args:
            name: name in the request. None, names that clients of a single model use, and an
                adapter's name mean the first model.

        Raises:
            Refused: there is no model of the name, or it cannot be loaded.
        """
        key = self._key(name)
        model = self.places[key].served or await self._loaded(key)
        self._uses += 1
        model.used = self._uses
        model.rows += 1
        try:
            yield model
        finally:
            model.rows -= 1

    def close(self) -> None:
        """End all engines."""
        for model in self.running:
            model.close()
        self.workers.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def _key(self, name: str | None) -> str:
        if name in self.places:
            return str(name)
        source = self.first.manifest.get("source", {}).get("name")
        if (
            not name
            or name in ANY_NAME
            or name in (source, str(self.job.artifact))
            or self.adapter(name)
        ):
            return self.first.name
        there = ", ".join([*self.places, *self.job.adapter_folders])
        raise Refused("model_not_found", f"The model `{name}` does not exist. There are: {there}")

    async def _loaded(self, key: str) -> ServedModel:
        """Load a model, one at a time, so that one that is being loaded counts as loaded.

        Raises:
            Refused: there is no room, or it cannot be loaded.
        """
        place = self.places[key]
        async with self._loading:
            if place.served is None:
                await self._make_room(place)
                loop = asyncio.get_running_loop()
                try:
                    place.served = await loop.run_in_executor(
                        self._loaders, lambda: self._load(key, place.folder)
                    )
                except QuantflowError as error:
                    raise Refused(
                        "generation",
                        f"Request failed during generation: model {key}: {error.cause}",
                    ) from error
            return place.served

    def _load(self, name: str, folder: Path) -> ServedModel:
        return ServedModel(name, open_model(folder, self.job), job=self.job, workers=self.workers)

    async def _make_room(self, wanted: ModelPlace) -> None:
        """Drop unused models, the one that was unused longest first, until the wanted one fits."""
        most = self.job.model_bytes
        if most is None:
            return
        while (
            sum(
                weight_bytes(place.folder)
                for place in self.places.values()
                if place.served or place is wanted
            )
            > most
        ):
            idle = [
                p
                for p in self.places.values()
                if p.served and not p.served.rows and p.served is not self.first
            ]
            if not idle:
                raise Refused("overloaded", "Model is overloaded")
            oldest = min(idle, key=lambda place: place.served.used if place.served else 0)
            served, oldest.served = oldest.served, None
            if served is not None:
                await asyncio.get_running_loop().run_in_executor(self._loaders, served.close)


def open_model(folder: Path, job: ServeJob, communicator: Communicator | None = None) -> Loaded:
    """Open an artifact with the server's settings.

    With a communicator this process holds its part alone, and the decoder follows rank 0.

    Raises:
        QuantflowError: see `quantflow.runtime.load.load`; or a required signature is missing or
            another's.
    """
    dtype: torch.dtype = getattr(torch, job.dtype)
    return load(
        folder,
        decoder="transformers" if job.pads else job.decoder,
        compiled=job.torch_compile,
        attention=attention_of(job.attention),
        # torch.compile then has a graph for each shape, and a model that has no shapes is refused
        shapes=Shapes(static=True) if job.pads else NO_SHAPES,
        gaudi=job.gaudi,
        kv_cache=job.kv_cache,
        backend=job.backend,
        dtype=dtype,
        device=job.device,
        pack=job.pack,
        exact=job.exact,
        rounded_inputs=job.rounded_inputs,
        require_signature=job.signature.trusted,
        communicator=communicator,
    )


def _together(loaded: Loaded, job: ServeJob) -> tuple[RowModules | None, str | None]:
    """Transformers' modules that run rows together, and why there are none.

    They are where batches were asked for, and on a device that needs few shapes.

    Raises:
        UnsupportedError: batches were asked for, and the model cannot run in them.
    """
    if loaded.model is None:
        return None, None
    artifact, device = loaded.artifact, loaded.artifact.device
    if not job.pads and device.type == "cpu":
        return None, "transformers' modules run one row at a time without --batch-bucket-size"
    if reason := row_modules.why_not(artifact):
        if job.pads:
            raise UnsupportedError(
                f"{artifact.checkpoint.folder}: padded batches: {reason}", "leave them out"
            )
        return None, f"rows run one after the other: {reason}"
    compiled = getattr(loaded.decoder, "compilations", None)
    limited = device.type == hpu.NAME and job.gaudi.captures and job.gaudi.limit_graphs
    on_gpu = device.type == cuda.NAME and not job.torch_compile
    captured = on_gpu and graphs.why_not(artifact) is None
    modules = RowModules(
        loaded.model,
        device=device,
        kv_scales=artifact.kv_scales(),
        prompt_options={"bypass_hpu_graphs": True} if limited else None,
        compilations=compiled,
        capture=partial(cuda.capture, device=device) if captured else None,
    )
    return modules, None


def _draft(loaded: Loaded, job: ServeJob, medusa: Path | None) -> RowDraft | None:
    """What proposes tokens for a model's requests, beside the texts themselves.

    Raises:
        UnsupportedError: the model has no layer ahead, or another decoder runs it.
        InputError: heads of another model.
    """
    if not job.mtp_tokens and medusa is None:
        return None
    decoder, folder = loaded.decoder, loaded.artifact.checkpoint.folder
    if not isinstance(decoder, LeanDecoder):
        what = "medusa" if job.mtp_tokens == 0 else f"speculate={job.speculate}"
        why = "; ".join(loaded.reasons) or "transformers' modules run it"
        raise UnsupportedError(
            f"{folder}: {what}: {why}", "leave it out; it goes with the lean decoder"
        )
    if medusa is None:
        return AheadDraft(AheadLayer(loaded.artifact, decoder.shared), tokens=job.mtp_tokens)
    heads = medusa_heads(loaded, medusa).heads
    most = job.speculate if isinstance(job.speculate, int) and job.speculate else len(heads)
    return MedusaDraft(Medusa(heads=heads[:most]))


def _speculation(job: ServeJob, medusa: Path | None) -> str | None:
    """What proposes tokens, in words."""
    if job.mtp_tokens:
        tokens = "1 token" if job.mtp_tokens == 1 else f"{job.mtp_tokens} tokens"
        return f"{tokens} by the model's layer that predicts further tokens (MTP)"
    if medusa is not None:
        return f"Medusa heads of {medusa}"
    return f"{job.lookup_tokens} tokens from earlier text" if job.lookup_tokens else None


def _adapt(loaded: Loaded, folders: Mapping[str, str]) -> None:
    """Load a model's adapters.

    Raises:
        UnsupportedError: the lean decoder does not run the model.
        QuantflowError: see `LeanDecoder.adapt`.
    """
    if not folders:
        return
    if not isinstance(loaded.decoder, LeanDecoder):
        raise UnsupportedError(
            f"adapters {', '.join(folders)}: requests choose adapters of the lean decoder alone; "
            f"{'; '.join(loaded.reasons)}",
            "leave --adapter out, or merge the adapter into the model before it is quantized",
        )
    loaded.decoder.adapt(loaded.artifact, folders)


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _read_template(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "give a Jinja file in UTF-8") from error
