"""KV caches of each kind: perplexity of a model that has them, and time of attention over them.

    python benchmarks/kv_cache.py perplexity MODEL --text FILE
    python benchmarks/kv_cache.py attention

README.md says what is run.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from _report import table
from torch import Tensor
from transformers import AutoTokenizer

from quantflow.models.architecture import Heads
from quantflow.numerics.divergence import Comparison, join, score
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.load import load
from quantflow.runtime.operations import DecoderBlock, Operations

KINDS = ("bfloat16", "float8", "int8", "int5", "int4")
LAYERS = 8  # in turn, so that a layer's cache is not that of the pass before
SHAPES = ("9,3,64,8192", "8,8,128,8192", "32,8,128,4096")


def main(arguments: Sequence[str]) -> int:
    """Print the table that was asked for; see the file's first lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("perplexity", help="beside the first kind, in bfloat16")
    part.add_argument("model", type=Path, help="a folder that the lean decoder runs")
    part.add_argument("--text", type=Path, required=True, help="held-out text, UTF-8")
    part.add_argument("--windows", type=int, default=32, help="one forward each")
    part.add_argument("--length", type=int, default=1024, help="tokens of a window")
    part.set_defaults(run=perplexities)
    part = parts.add_parser("attention", help="microseconds of a layer, for one new position")
    part.add_argument("--shapes", nargs="+", default=SHAPES, help="Q,KV,DIM,POSITIONS: %(default)s")
    part.add_argument("--passes", type=int, default=15, help="over all layers, kinds in turn")
    part.set_defaults(run=attentions)
    for part in parts.choices.values():
        part.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND")
    given = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], str] = given.run
    print(run(given))
    return 0


def perplexities(given: argparse.Namespace) -> str:
    """The table of perplexities, each kind beside the first."""
    ids = AutoTokenizer.from_pretrained(given.model)(given.text.read_text(), verbose=False)
    tokens = torch.tensor(ids["input_ids"][: given.windows * given.length])
    if len(tokens) < given.windows * given.length:
        raise SystemExit(f"{given.text}: {len(tokens)} tokens; give a longer text, or less windows")
    windows = tokens.view(-1, given.length)
    rows, baseline = [], list(logits(given.model, given.kinds[0], windows))
    for kind in given.kinds:
        found = baseline if kind == given.kinds[0] else logits(given.model, kind, windows)
        both = zip(baseline, found, windows, strict=True)
        rows.append((kind, *figures(join(score(*one) for one in both))))
    return table(("cache", "perplexity", f"above {given.kinds[0]}", "mean KLD"), rows)


def logits(model: Path, kind: str, windows: Tensor) -> Iterator[Tensor]:
    """Logits of each window, [length, V], float16; one forward each."""
    decoder = load(model, decoder="lean", kv_cache=kind, dtype=torch.bfloat16).decoder
    for window in windows:
        decoder.begin(rows=1, capacity=len(window))
        yield decoder.forward(window[None], last_only=False)[0].half()


def figures(comparison: Comparison) -> tuple[str, str, str]:
    """Perplexity, how much it is above the baseline's, and the mean divergence."""
    nll, before = (x.mean().item() for x in (comparison.nll_candidate, comparison.nll_baseline))
    above = math.expm1(nll - before)
    return f"{math.exp(nll):.4f}", f"{above:.2%}", f"{comparison.kld.mean().item():.5f}"


def attentions(given: argparse.Namespace) -> str:
    """The table of microseconds: the median of the passes, by shape and kind."""
    rows = []
    for shape in given.shapes:
        made = {kind: filled(kind, *map(int, shape.split(","))) for kind in given.kinds}
        seconds: dict[str, list[float]] = {kind: [] for kind in made}
        for _ in range(given.passes):
            for kind, (operations, column) in made.items():
                begin = time.perf_counter()
                for layer in range(LAYERS):
                    operations.attend(column.clone(), layer)
                seconds[kind].append((time.perf_counter() - begin) / LAYERS)
        medians = (f"{statistics.median(each) * 1e6:,.0f}" for each in seconds.values())
        rows.append((shape.replace(",", ", "), *medians))
    columns = ("query heads, kv heads, head dim, positions", *given.kinds)
    return f"{torch.get_num_threads()} threads\n\n{table(columns, rows)}"


def filled(kind: str, query: int, shared: int, dim: int, length: int) -> tuple[Operations, Tensor]:
    """Layers whose caches hold `length` random columns, and one more column."""
    heads = Heads(num_heads=query, num_kv_heads=shared, head_dim=dim, scale=dim**-0.5, eps=1e-6)
    cache = KVCache(
        kind=kind, rows=1, capacity=length + 1, layers=LAYERS, kv_heads=shared, head_dim=dim
    )
    tables = [(torch.ones(cache.capacity, dim), torch.zeros(cache.capacity, dim))]
    columns = torch.randn(
        length, (query + 2 * shared) * dim, generator=torch.Generator().manual_seed(0)
    )
    # written with a window of one position: attention of all over all would take minutes
    for window, piece in ((1, columns), (0, columns[:1])):
        block = DecoderBlock(products=(), window=window)
        operations = Operations(heads, [block] * LAYERS, rounds=True)
        operations.begin(cache, tables)
        operations.step(len(piece))
        for layer in range(LAYERS):
            operations.attend(piece.clone(), layer)
        cache.length = length
    return operations, columns[:1].clone()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
