"""`quantflow bench --url URL`: seconds of a running server's first and next tokens, per batch size.

Reads    what a server with TGI's routes answers; files of prompts
Writes   a file in --results-dir
Resumes  nothing
Fails    2 options that the server decides, 3 it refuses a request or answers otherwise, 5 it does
         not answer

A batch of N is N requests of /generate_stream that begin together. A token of the batch is there
when every request has it, as in a batch that one decoder runs. The server cuts each prompt to its
length (`truncate`), and what it spends on HTTP counts.
"""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import pairwise
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

from quantflow.benching.bench_job import BenchJob
from quantflow.benching.generation_speed import TimedRun
from quantflow.errors import InputError, ResourceError, UsageError
from quantflow.files.canonical import parse_json
from quantflow.progress import Progress
from quantflow.runtime.prompt_files import read_prompts

LONGEST = 1 << 20  # bytes of an answer in one piece, and of an event
_SECONDS = 600.0  # most seconds without a byte
# fields of a job that count; the others are settings of a model that bench loads itself
_READ = frozenset(
    {
        *("artifact", "url", "batch_sizes", "input_tokens", "new_tokens", "prompts", "source"),
        *("column", "runs", "warmups", "ordered", "ignore_eos", "temperature", "top_k", "top_p"),
        *("results_dir", "seed"),
    }
)
_WORDS = 4096  # numbers that random prompts are of


class Server:
    """A server with TGI's routes."""

    def __init__(self, url: str) -> None:
        """Keep the address.

        Raises:
            UsageError: it is none.
        """
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise UsageError(f"bench: url={url}", "write http://HOST:PORT")
        self.url, self._path, self._place = url, parts.path, parts.netloc
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def model(self) -> str:
        """The model that is served.

        Raises:
            QuantflowError: the server does not answer, or is none with TGI's routes.
        """
        try:
            with self._ask("GET", "/info", None) as response:
                said = parse_json(response.read(LONGEST), f"{self.url}/info")
        except (OSError, HTTPException) as error:
            raise self._gone(error) from error
        name = said.get("model_id") if isinstance(said, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{self.url}/info: no model_id", "give a server with TGI's routes")
        return name

    def arrivals(self, body: Any, start: Barrier) -> list[float]:
        """Seconds until each token of an answer came, from the moment when all requests begin.

        Raises:
            QuantflowError: the server refuses the request, or its answer breaks off.
        """
        start.wait()
        begin, found = time.perf_counter(), []
        try:
            with self._ask("POST", "/generate_stream", body) as response:
                while line := response.readline(LONGEST + 1):
                    if not line.startswith(b"data:"):
                        continue
                    event = parse_json(line.removeprefix(b"data:"), f"{self.url}: an event")
                    if not isinstance(event, dict) or "token" not in event:
                        said = event.get("error", event) if isinstance(event, dict) else event
                        raise InputError(f"{self.url}: {str(said)[:1000]}", "change what is asked")
                    found.append(time.perf_counter() - begin)
                    if event.get("generated_text") is not None:
                        return found
        except (OSError, HTTPException) as error:
            raise self._gone(error) from error
        raise ResourceError(f"{self.url}: an answer broke off", "look at the server's log")

    def _ask(self, method: str, path: str, body: Any) -> HTTPResponse:
        connection = self._kind(self._place, timeout=_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        data = None if body is None else json.dumps(body)
        connection.request(method, self._path + path, data, headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        with response:
            said = response.read(1000).decode(errors="replace")
        raise InputError(f"{self.url}{path}: status {response.status}: {said}", "ask for less")

    def _gone(self, error: Exception) -> ResourceError:
        return ResourceError(
            f"{self.url}: {str(error) or type(error).__name__}", "check that the server runs there"
        )


def check(job: BenchJob) -> None:
    """Refuse settings that a server decides.

    Raises:
        UsageError: naming them.
    """
    given = [
        item.name
        for item in fields(job)
        if item.name not in _READ and getattr(job, item.name) != item.default
    ]
    given = [name for name in given if name != "signature" or job.signature.trusted is not None]
    if given:
        raise UsageError(
            f"bench: {', '.join(given)} beside --url", "leave them out: the server decides them"
        )


def timed(
    job: BenchJob, server: Server, *, rows: int, length: int, progress: Progress
) -> list[TimedRun]:
    """The timed runs of a batch size and a length; each batch has prompts of its own.

    Raises:
        QuantflowError: the server refuses a request, or does not answer.
    """
    texts = [*job.prompts, *(read_prompts(job.source, column=job.column) if job.source else ())]
    runs = []
    stage = f"bench {rows} at once, {length} tokens"
    with ThreadPoolExecutor(rows) as pool:
        for index in progress.steps(range(job.warmups + job.runs), stage=stage, unit="run"):
            start = Barrier(rows)
            bodies = [
                _body(job, texts, row=row, length=length, seed=job.seed + index)
                for row in range(rows)
            ]
            answers = [pool.submit(server.arrivals, body, start) for body in bodies]
            run = _run([answer.result() for answer in answers], requested=rows * job.new_tokens)
            if index >= job.warmups:
                runs.append(run)
    return runs


def _run(arrivals: Sequence[Sequence[float]], *, requested: int) -> TimedRun:
    """A batch's tokens: each is there when every request that goes on so far has it."""
    longest = max(map(len, arrivals))
    there = [max(row[at] for row in arrivals if at < len(row)) for at in range(longest)]
    return TimedRun(
        first_seconds=there[0],
        step_seconds=tuple(max(0.0, after - before) for before, after in pairwise(there)),
        requested=requested,
        produced=sum(map(len, arrivals)),
    )


def _body(
    job: BenchJob, texts: Sequence[str], *, row: int, length: int, seed: int
) -> dict[str, Any]:
    """A request whose prompt has `length` tokens: one text is repeated, or numbers are drawn."""
    if texts:
        words = texts[row % len(texts)].split() or [texts[row % len(texts)]]
        text = " ".join(words[at % len(words)] for at in range(length))
    else:
        drawn = random.Random(f"{seed} {row}")  # no secret
        text = " ".join(str(drawn.randrange(_WORDS)) for _ in range(length))
    drawing = {
        name: value
        for name in ("temperature", "top_k", "top_p")
        if (value := getattr(job, name)) is not None
    }
    drawn_tokens = job.sampling is not None
    return {
        "inputs": text,
        "parameters": {
            "max_new_tokens": job.new_tokens,
            "truncate": length,
            "ignore_eos": job.ignore_eos,
            **({"do_sample": True, "seed": seed, **drawing} if drawn_tokens else {}),
        },
    }
