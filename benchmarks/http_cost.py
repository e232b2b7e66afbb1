"""The cost of a token over HTTP beside its cost in this process, in turns.

`quantflow bench` times the latter.

    python benchmarks/http_cost.py work/4-export
    python benchmarks/http_cost.py work/4-export --pairs 3          a try, half a minute

One request at a time. Each pair is a streamed completion of `quantflow serve` and a greedy
continuation by a decoder that this process has loaded, of as many tokens. The order of the two
changes with every pair. Both have --threads threads; the server's event loop and this client run on
the same cores, so where --threads leaves none free they take time from the model.

    HTTP     milliseconds per token after the first, as a client sees them
    bench    milliseconds per token after the first, without a server
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from _report import machine, table
from serving import closed_loop, draw, end_token_of, quantflow_server, tokens_per_word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pairs and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    numbers = {
        "--pairs": 15,
        "--prompt-tokens": 256,
        "--new-tokens": 64,
        "--seed": 0,
        "--threads": os.cpu_count() or 1,
    }
    for flag, default in numbers.items():
        parser.add_argument(flag, type=int, default=default, metavar="N")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--results", type=Path, default=Path("artifacts/serving"), help="for what the server prints"
    )
    given = parser.parse_args(arguments)
    given.spread, given.requests = 0.0, given.pairs + 1
    from quantflow import process_memory

    process_memory.take_huge_pages()  # as the command line does
    import torch

    from quantflow.benching.generation_speed import random_prompts, time_run
    from quantflow.runtime.load import load

    torch.set_num_threads(given.threads)
    loaded = load(given.artifact, dtype=getattr(torch, given.dtype), decoder="auto")
    works = draw(given, prefix=0, load="pairs", tokens_per_word=tokens_per_word(given.artifact))
    end_token = end_token_of(given.artifact)
    longest = 2 * (given.prompt_tokens + given.new_tokens)
    server = quantflow_server(given.artifact, ["--dtype", given.dtype], longest=longest)
    given.results.mkdir(parents=True, exist_ok=True)
    pairs: list[tuple[float, float]] = []

    def over_http(number: int) -> float:
        (seen,) = asyncio.run(closed_loop(server, works[number : number + 1], 1, end_token))
        if seen.error is not None:
            raise SystemExit(f"the server: {seen.error}")
        return 1e3 * seen.tpot

    def alone(number: int) -> float:
        prompt = random_prompts(
            1, given.prompt_tokens, vocab_size=loaded.decoder.vocab_size, seed=number
        )
        return 1e3 * statistics.fmean(
            time_run(loaded.decoder, prompt, new_tokens=given.new_tokens).step_seconds
        )

    server.start(given.results / "http_cost.log", given.threads)
    try:
        for number in range(given.pairs + 1):  # the first warms both up
            turns = [over_http, alone] if number % 2 else [alone, over_http]
            found = {turn: turn(number) for turn in turns}
            pairs += [(found[over_http], found[alone])] if number else []
    finally:
        server.stop()
    rows = [(f"{http:.2f}", f"{bench:.2f}", f"{http / bench:.3f}") for http, bench in pairs]
    middle = [
        statistics.median(column)
        for column in zip(*((*pair, pair[0] / pair[1]) for pair in pairs), strict=True)
    ]
    print(machine(given.results))
    print(
        table(
            ("pair", "HTTP", "bench", "ratio"),
            [(number, *row) for number, row in enumerate(rows, start=1)],
        )
    )
    print("median: HTTP {:.2f} ms, bench {:.2f} ms, ratio of a pair {:.3f}".format(*middle))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
