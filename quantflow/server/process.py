"""The server as a process: it opens the model, prints the table, binds the port, and ends in order.

At SIGTERM or Ctrl-C it accepts no new connections, running requests end within `drain_seconds`, and
the rest is cancelled. A second signal ends it at once. An engine that dies turns /health to 503 and
ends the process with an error.
"""

import asyncio
import dataclasses
import gc
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quantflow import accelerators, cpu_threads
from quantflow.distributed.launch import launched_folder, launched_rank
from quantflow.errors import EngineError, QuantflowError, ResourceError, UsageError
from quantflow.progress import Progress
from quantflow.runtime.batch_shapes import GAUDI
from quantflow.runtime.batching import BatchRequest
from quantflow.runtime.generate_job import Lookup
from quantflow.runtime.load import Loaded
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.runtime.step_trace import StepTrace
from quantflow.server.app import application, read_key
from quantflow.server.errors import Refused
from quantflow.server.generation import Admission, Service
from quantflow.server.http import refusal
from quantflow.server.metrics import Metrics
from quantflow.server.models import Models, open_model, traced_steps
from quantflow.server.settings import ServeJob, is_loopback
from quantflow.server.site import Site

BACKLOG = 2048  # connections that wait to be accepted
REFUSED = {431: "headers_too_large", 501: "not_implemented"}
NEVER = 1_000_000_000  # small collections before a large one
TICKS = 600  # of uvicorn, a tenth of a second each, between two collections where nothing runs
BUSY_TICKS = 10 * TICKS  # the same, of a server that always has work
DEAD_SECONDS = 2.0  # time of 503 at /health before the process ends


def run(job: ServeJob, progress: Progress) -> None:
    """Serve until a signal comes.

    Of ranks that share the model the first one serves.

    Raises:
        QuantflowError: the artifact cannot be served, the port is taken, or the engine died.
    """
    world = _world(job)
    if rank_processes.starts(world):
        bound(job).close()  # a taken port fails before ranks start
        job.signature.check(job.artifact)  # once more in each rank, which loads what it checked
        rank_processes.start("serve", job, world=world, progress=progress, serving=True)
        return
    with rank_processes.joined("serve", world) as communicator:
        if communicator is not None and communicator.rank:
            traced = traced_steps(job.first_name, job, rank=communicator.rank)
            rank_processes.drive(
                open_model(job.artifact, job, communicator),
                communicator,
                lambda _: None,
                trace=None if traced is None else StepTrace(traced),
            )
            return
        listening = bound(job)  # before the model is opened, so that a taken port fails at once
        try:
            loaded = open_model(job.artifact, job, communicator)
            rank_processes.drive(
                loaded, communicator, lambda led: _with_models(job, led, listening, progress)
            )
        finally:
            listening.close()


def _world(job: ServeJob) -> int:
    """The number of processes that share the model.

    Raises:
        UsageError: several, with what they do not have, or under a torchrun.
    """
    if job.ranks == 1:  # whatever variables an environment has
        return 1
    if launched_rank() is not None and launched_folder() is None:
        raise UsageError(
            f"serve: ranks={job.ranks} in a process that torchrun started",
            "start one process: it starts the ranks",
        )
    without = {
        "the transformers decoder": job.decoder == "transformers",
        f"device {job.device}": job.device != "cpu",
        "padded batches": job.pads,
        "attention": bool(job.attention),
        "an adapter": bool(job.adapters),
        "further models": bool(job.models),
        f"speculate={job.speculate}": job.mtp_tokens > 0,
        "medusa": job.medusa is not None,
    }
    return rank_processes.world_of("serve", job.ranks, trusted=True, without=without)


def _with_models(
    job: ServeJob, loaded: Loaded, listening: socket.socket, progress: Progress
) -> None:
    """Serve a loaded model, and those that requests load."""
    models = Models(job, loaded)
    try:
        _warm(models)
        _serve(job, models, listening, progress)
    finally:
        models.close()


def site_of(job: ServeJob, models: Models) -> Site:
    """The state that the routes share."""
    service = Service(
        limits=job.limits,
        admission=Admission(job.limits.max_concurrent_requests),
        grammars=not job.disable_grammar_support,
        lookup=Lookup(tokens=job.lookup_tokens) if job.lookup_tokens else None,
    )
    metrics = Metrics(lambda: [(model.name, model.engine.counters()) for model in models.running])
    return Site(job=job, models=models, service=service, metrics=metrics)


def server_of(job: ServeJob, site: Site, progress: Progress) -> "OrderlyServer":
    """The uvicorn server with the application, not started."""

    class Protocol(PatientProtocol):
        seconds = job.client_timeout
        header_bytes = job.header_limit

    config = uvicorn.Config(
        application(site, tell=progress.say if job.log_requests else None),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level=logging.CRITICAL,  # http.py prints each error, once
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=job.header_limit,
        timeout_keep_alive=max(1, round(job.keep_alive_seconds)),
        timeout_graceful_shutdown=max(1, round(job.drain_seconds)) if job.drain_seconds else 0,
        backlog=BACKLOG,
    )
    return OrderlyServer(config, site, progress)


def _serve(job: ServeJob, models: Models, listening: socket.socket, progress: Progress) -> None:
    for line in opening_lines(job, models):
        progress.say(line)
    host, port = listening.getsockname()[:2]
    server = server_of(job, site_of(job, models), progress)
    keep_heap()
    listening.listen(BACKLOG)  # connections from now on are answered
    if warning := public_warning(job, host):
        progress.say(warning)
    progress.say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}")
    server.run(sockets=[listening])
    for line in closing_lines(models):
        progress.say(line)
    if models.failed is not None:
        failed = models.failed
        cause = failed.cause if isinstance(failed, QuantflowError) else repr(failed)
        raise EngineError(
            f"the engine has failed: {cause}", "report it with --debug, and start the server again"
        )


def keep_heap() -> None:
    """Take all objects of the start out of garbage collection, and the rest out of large ones.

    A collection stops every thread while it walks the objects that are old enough. The start leaves
    some 200,000, of torch and transformers, and a large body or answer makes as many again: 0.1 s,
    several times a request, since many new objects start a collection. So a large one comes at a
    time of its own (`OrderlyServer.on_tick`); the small ones, of new objects, stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)


class OrderlyServer(uvicorn.Server):
    """A uvicorn server that signals end with exit code 0, and that a dead engine ends."""

    def __init__(self, config: uvicorn.Config, site: Site, progress: Progress) -> None:
        """Keep the site, whose engines are watched."""
        super().__init__(config)
        self._models, self._admission = site.models, site.service.admission
        self._progress = progress

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block, and restore the earlier handlers after it."""
        # Python handles signals in the main thread alone; elsewhere `should_exit` ends the server
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {
            number: signal.signal(number, self._ended) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        """End when an engine has died, a little later than /health says so; collect garbage."""
        every = BUSY_TICKS if self._admission.rows else TICKS
        if counter and counter % every == 0:
            gc.collect()
        if self._models.failed is not None:
            await asyncio.sleep(DEAD_SECONDS)
            self.should_exit = True
        return await super().on_tick(counter)

    def _ended(self, number: int, frame: Any) -> None:
        del frame
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        name = signal.Signals(number).name
        self._progress.say(f"{name}: running requests may end; send it again to stop at once")


class StrictConnection(h11.Connection):
    """A connection whose requests have a limit of their first line and headers together.

    h11 limits what is incomplete, and so lets pass what comes at once. It also reads a body that
    has a length and is chunked, as chunks. A proxy that goes by the length would see another
    request in what follows (RFC 9112, section 6.1), so such a request is refused.

    Attributes:
        refused: the error of the request that was refused; None where none was.
    """

    def __init__(self, header_bytes: int) -> None:
        """Begin a connection of a server."""
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes
        self.refused: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """The next event.

        Raises:
            RemoteProtocolError: what came is no request, or is beyond the limit.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
        except h11.RemoteProtocolError as error:
            self.refused = error
            raise
        return event

    def _check(self, request: h11.Request) -> None:
        # a line has two more bytes at its end, and a header has two between name and value
        size = len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n")
        size += sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > self._header_bytes:
            cause = f"Headers are {size} bytes, {self._header_bytes} are allowed."
            raise h11.RemoteProtocolError(cause, error_status_hint=431)
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding.")


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with limits for slow clients.

    It closes a connection whose headers do not come in time, and drops one that takes nothing of
    its answer. Closing would not be enough there: a closed transport keeps its bytes until the
    client has taken them, which may be never.
    """

    seconds = 30.0
    header_bytes = 65_536

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.conn: StrictConnection = StrictConnection(self.header_bytes)
        self._untaken = 0  # bytes that the client had not taken at the last check
        self._begun = False  # whether a further request had begun to come in at the last check
        self._next_look = self.loop.call_later(self.seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the form of other refusals, and close the connection."""
        error = self.conn.refused
        kind = (
            "bad_request" if error is None else REFUSED.get(error.error_status_hint, "bad_request")
        )
        text = f"{msg} {error}" if error is not None else msg
        response = refusal(Refused(kind, text), openai=False)
        headers = [*response.raw_headers, (b"connection", b"close")]
        event = h11.Response(status_code=response.status_code, headers=headers)
        for part in (event, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part))
        self.transport.close()

    def _look(self) -> None:
        before, self._untaken = self._untaken, self.transport.get_write_buffer_size()
        if before and self._untaken == before:
            self.transport.abort()
            return
        begun_before, self._begun = self._begun, self._further()
        if (
            self.cycle is None or (begun_before and self._begun)
        ) and not self.transport.is_closing():
            self.transport.close()
        self._next_look = self.loop.call_later(self.seconds, self._look)

    def _further(self) -> bool:
        """Whether a request after the first has begun to come in.

        uvicorn would wait for the rest of its headers for ever.
        """
        return self.cycle is not None and bool(
            self.cycle.response_complete and self.conn.trailing_data[0]
        )


def opening_lines(job: ServeJob, models: Models) -> list[str]:
    """The lines that are printed at the start: model, cache, and each limit with its origin."""
    model, limits = models.first, models.first.engine.limits
    where = "" if job.device == "cpu" else f" on {job.device}"
    if job.ranks > 1:
        where = f", {job.ranks} ranks"
    lines = [f"model {model.name}: {job.artifact}, {model.loaded.name} decoder, {job.dtype}{where}"]
    lines += [f"  {reason}" for reason in model.loaded.reasons]
    if rounded := model.loaded.rounded_inputs:
        lines.append(f"  inputs of {rounded} linears are rounded to int8")
    if accelerators.is_gpu(accelerators.kind_of(job.device)):
        lines.append("  the fast way on a GPU is --engine vllm, where vLLM is installed")
    if model.alone is not None:
        lines.append(f"  {model.alone}")
    lines += _shape_lines(job, models)
    lines.append(cpu_threads.line())
    lines += [f"  adapter {name}: {folder}" for name, folder in job.adapter_folders.items()]
    if model.speculation is not None:
        lines.append(f"speculation: {model.speculation}")
    own = ", ".join(f"{name} {value}" for name, value in model.defaults.values().items())
    if own:
        lines.append(f"sampling: {own} where a request says nothing (generation_config.json)")
    pool = model.engine.counters().pool
    lines.append(f"keys and values: {pool.blocks} blocks of {pool.block_tokens} tokens")
    held = {name: (getattr(limits, name, asked), asked) for name, asked in vars(job.limits).items()}
    rows = [
        (
            name,
            "none" if value is None else value,
            _origin(job, name, follows=asked is None and value is not None),
        )
        for name, (value, asked) in held.items()
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in (0, 1)]
    lines += [
        f"  {name.replace('_', '-').ljust(widths[0])}  {str(value).rjust(widths[1])}  {where}"
        for name, value, where in rows
    ]
    return lines


def _shape_lines(job: ServeJob, models: Models) -> list[str]:
    """How batches are padded and captured, and what of it another device would do."""
    lines = []
    if (shapes := models.first.engine.shapes()) is not None:
        warmed = f"{len(shapes.warmed)} shapes are warmed up" if shapes.warmed else "no warm-up"
        lines.append(f"batches are padded: {warmed}")
    if job.device == GAUDI:
        lines.append(f"{GAUDI}: {job.gaudi.line}")
        return lines
    given = [job.origins.get(field.name, "") for field in dataclasses.fields(job.gaudi)]
    return [*lines, *(f"{name}: of {GAUDI}, not of {job.device}" for name in filter(None, given))]


def closing_lines(models: Models) -> list[str]:
    """The lines that are printed at the end.

    They say which shapes were run, and which of the guesses of each model were right.
    """
    shapes = [(model.name, model.engine.shapes()) for model in models.running]
    return [
        *(f"shapes of {name}: {found.line}" for name, found in shapes if found is not None),
        *_guesses(models),
    ]


def _guesses(models: Models) -> list[str]:
    counted = [(model.name, model.engine.counters()) for model in models.running]
    return [
        f"speculation of {name}: {one.taken_tokens} of {one.proposed_tokens} proposed tokens taken "
        f"({one.taken_tokens / one.proposed_tokens:.0%})"
        for name, one in counted
        if one.proposed_tokens
    ]


def public_warning(job: ServeJob, host: str) -> str | None:
    """The line that warns of a server that anybody may use; None where nobody else can.

    Args:
        job: settings of the server.
        host: address that is bound.
    """
    if is_loopback(host) or read_key(job) is not None:
        return None
    where = (
        "every network of this machine" if host in ("0.0.0.0", "::") else f"whoever reaches {host}"
    )
    return f"warning: no key is asked for, and {where} may use this server; set API_KEY"


def _origin(job: ServeJob, name: str, *, follows: bool) -> str:
    """The origin of a limit's value: an option, a variable, the default, or model and memory.

    Args:
        job: settings of the server.
        name: name of the limit.
        follows: whether the value follows from the model and its memory.
    """
    return job.origins.get(name, "model and memory" if follows else "default")


def bound(job: ServeJob) -> socket.socket:
    """A bound socket that does not listen yet.

    The socket names its protocol, since asyncio turns off Nagle's algorithm only for connections of
    such a socket. With Nagle's algorithm a body waits until the client has acknowledged its
    headers, and a token until it has acknowledged the one before: 40 ms.

    Raises:
        ResourceError: the port is taken, or the host has no address.
    """
    address = job.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, job.port))
    except OSError as error:
        listening.close()
        cause = f"{job.host}:{job.port}: {error.strerror or error}"
        raise ResourceError(cause, "choose another --port, or --port 0 for a free one") from error
    return listening


def _warm(models: Models) -> None:
    """Generate a token: a model that cannot run fails here, and the first request is fast."""
    model = models.first
    stream = model.engine.submit(BatchRequest(input_ids=(0,), max_new_tokens=1))
    for event in stream:
        if event.error is not None:
            raise event.error
