"""Load a server with many requests at once.

This is the client of tgi-gaudi's examples, by its name and options, without its packages.

In:  the address of a server that speaks TGI's HTTP, and prompts: .jsonl with `text` in each line,
     or .txt with blank lines between them.
Out: the number of answered requests, tokens per second of all together, and seconds of the first
     token, of each further one and of a whole request; --json prints it as one line.

The server is asked for /info first. Prompts that have more tokens than --max_input_length, as the
server counts them, are left out; the others are taken in turn until there are --total_sample_count.
Every one is streamed.

Example: python examples/serving/run_generation.py --text prompts.jsonl --max_concurrent_requests 16
--total_sample_count 64
"""

import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A request's seconds until its first and its last token, and its tokens.

    `error` holds the refusal.
    """

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str | None = None


def asked(url: str, body: dict[str, Any] | None = None, *, timeout: float = 600.0) -> Any:
    """Return the response to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout)


def prompts_of(path: Path) -> list[str]:
    """Return the texts of a file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    return [part for part in text.split("\n\n") if part.strip()]


def short(address: str, prompts: list[str], most: int) -> Iterator[str]:
    """Yield the prompts that have at most so many tokens, as the server counts them."""
    for prompt in prompts:
        with asked(f"{address}/tokenize", {"inputs": prompt}) as response:
            if len(json.load(response)) <= most:
                yield prompt


def streamed(address: str, prompt: str, new: int) -> Answered:
    """Ask for a text and note when its tokens come."""
    begin, times = time.perf_counter(), []
    try:
        with asked(
            f"{address}/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": new}}
        ) as response:
            for line in response:
                if line.startswith(b"data:"):
                    event = json.loads(line.removeprefix(b"data:"))
                    if "error" in event:
                        return Answered(error=event["error"])
                    times.append(time.perf_counter() - begin)
    except urllib.error.HTTPError as error:
        return Answered(error=f"{error.code}: {error.read(200).decode(errors='replace')}")
    return (
        Answered(first=times[0], last=times[-1], tokens=len(times))
        if times
        else Answered(error="no token came")
    )


def summary(found: list[Answered], seconds: float) -> dict[str, Any]:
    """Return what all requests took."""
    good = [each for each in found if each.error is None]
    further = [(each.last - each.first) / (each.tokens - 1) for each in good if each.tokens > 1]
    mean = {
        "first_token_seconds": [each.first for each in good],
        "next_token_seconds": further,
        "request_seconds": [each.last for each in good],
    }
    tokens = sum(each.tokens for each in good)
    return {
        "requests": len(found),
        "failed": len(found) - len(good),
        "errors": sorted({each.error for each in found if each.error is not None}),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        **{name: statistics.fmean(values) if values else None for name, values in mean.items()},
    }


def main() -> int:
    """Load the server; return 1 where a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server_address", default="http://localhost:8080")
    parser.add_argument("--model_id", help="that the server must have; any without it")
    parser.add_argument(
        "--max_input_length", type=int, default=1024, help="tokens of a prompt at most"
    )
    parser.add_argument(
        "--max_output_length", type=int, default=1024, help="tokens that are asked for"
    )
    parser.add_argument("--total_sample_count", type=int, default=2048, help="requests in all")
    parser.add_argument("--max_concurrent_requests", type=int, default=256, help="requests at once")
    parser.add_argument("--text", type=Path, required=True, help="prompts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    address = options.server_address.rstrip("/")
    try:
        with asked(f"{address}/info", timeout=10) as response:
            model = json.load(response)["model_id"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{address}/info: {error}; start a server there first") from error
    if options.model_id not in (None, model):
        raise SystemExit(f"{address} serves {model}, not {options.model_id}")
    prompts = list(short(address, prompts_of(options.text), options.max_input_length))
    if not prompts:
        raise SystemExit(f"{options.text}: no prompt of {options.max_input_length} tokens or fewer")
    begin = time.perf_counter()
    with ThreadPoolExecutor(options.max_concurrent_requests) as pool:
        work = islice(cycle(prompts), options.total_sample_count)
        found = list(
            pool.map(lambda prompt: streamed(address, prompt, options.max_output_length), work)
        )
    said = summary(found, time.perf_counter() - begin)
    print(
        json.dumps(said)
        if options.json
        else "\n".join(f"{name}: {value}" for name, value in said.items())
    )
    return 1 if said["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
