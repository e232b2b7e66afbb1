"""`quantflow unify` of many ranks of a deep model: seconds and peak memory.

    python benchmarks/unify_many_ranks.py    # 64 ranks (8 replicas of 8 cards), 80 layers
    python benchmarks/unify_many_ranks.py --replicas 2 --layers 8 --hidden 256      a try, seconds

Ranks are synthetic: random statistics of every kind that measure takes by default, placed as a
Llama of these sizes is cut. Needs the environment that quantflow is installed in, GNU time and
Linux. Exits 1 when a bar is missed.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _alone import alone
from _watch import Failed, need_tools, run
from torch import Tensor
from transformers import LlamaConfig

from quantflow.distributed.placement import channels, sharing
from quantflow.distributed.sharding import placements
from quantflow.measuring.record import Measurement, write_measurement
from quantflow.models.open import graph_for
from quantflow.observers.histogram import BINS

SECONDS, PEAK = 10.0, 500e6  # the bars, for the default sizes
OBSERVERS = ["amax", "channel_amax", "min_max", "mean_abs", "histogram"]
TOKENS = 16  # of each sample


def main(arguments: Sequence[str]) -> int:
    """Make the ranks and unify them; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    folder = given.work.resolve()
    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=4 * given.cards,
        num_key_value_heads=given.cards,
    )
    try:
        need_tools()
        size = make_ranks(folder / "ranks", config, cards=given.cards, replicas=given.replicas)
        world = given.cards * given.replicas
        print(
            f"{world} ranks ({given.replicas} x {given.cards} cards), {given.layers} layers: "
            f"{size / 1e9:.2f} GB",
            flush=True,
        )
        missed = 0
        for groups in (1, given.replicas):
            shutil.rmtree(folder / "unified", ignore_errors=True)
            command = [sys.executable, "-m", "quantflow", "unify", "--ranks", str(groups), "-q"]
            command += ["-m", str(folder / "ranks"), "-o", str(folder / "unified")]
            taken = run(command, log=folder / "unify.log")
            missed += taken.seconds > SECONDS or taken.rss > PEAK
            print(
                f"into {groups}: {taken.seconds:.1f} s ({taken.cpu:.1f} s CPU), peak RSS "
                f"{taken.rss / 1e6:.0f} MB",
                flush=True,
            )
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    if not given.keep:
        shutil.rmtree(folder)
    print(f"bars ({SECONDS:.0f} s, {PEAK / 1e6:.0f} MB): {'missed' if missed else 'met'}")
    return 1 if missed else 0


def make_ranks(folder: Path, config: LlamaConfig, *, cards: int, replicas: int) -> int:
    """Write the rank folders that `measure` would write, and return their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    shapes = _shapes(config)
    graph = graph_for(config)
    measured = {*graph.linears, *(layer.attention for layer in graph.layers)}
    world = cards * replicas
    for rank in range(world):
        held = placements(config, shapes, tp=cards, rank=rank)
        tensors = {name: placement for name, placement in held.items() if name in measured}
        path = folder / f"rank-{rank:03d}-of-{world:03d}"
        path.mkdir(parents=True)
        write_measurement(path, _rank(rank, tensors, cards=cards, replicas=replicas))
    (folder / "DONE.json").write_text(json.dumps({"stage": "measure", "inputs": {}, "files": {}}))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _rank(rank: int, tensors: dict[str, Any], *, cards: int, replicas: int) -> Measurement:
    replica = rank // cards
    common = torch.Generator().manual_seed(replica)  # what all cards of a replica see
    own = torch.Generator().manual_seed(1000 + rank)
    statistics: dict[str, Tensor] = {}
    for name, placement in tensors.items():
        sites = (
            ("input", "output", "weight")
            if "." in name.removesuffix(".self_attn") and "proj" in name
            else ("k_cache", "v_cache")
        )
        for site in sites:
            generator = common if sharing(placement, site) == "same" else own
            statistics |= _statistics(
                f"{name}|{site}", channels(placement, site), generator, whole=site == "input"
            )
            if site == "weight":  # replicas hold the same
                statistics[f"{name}|{site}|amax"] = torch.tensor(1.0 + rank % cards)
    return Measurement(
        meta={
            "layout_version": 1,
            "kind": "measurement",
            "model": {"name": "synthetic", "fingerprint": "0" * 64, "family": "llama"},
            "mesh": {"rank": rank, "world": cards * replicas, "tp": cards, "dp": replicas, "ep": 1},
            "dtype": "float32",
            "seed": 0,
            "calibration": {
                "hash": "0" * 64,
                "samples": replicas,
                "tokens": replicas * TOKENS,
                "sequence_length": TOKENS,
            },
            "observers": OBSERVERS,
            "tensors": tensors,
            "counts": {"samples": 1, "tokens": TOKENS},
            "tools": {},
        },
        statistics=statistics,
        sequences=[torch.full((TOKENS,), replica)],
        indices=[replica],
    )


def _statistics(
    site: str, width: int, generator: torch.Generator, *, whole: bool
) -> dict[str, Tensor]:
    """Return amax, and for an input every default statistic, of made-up values."""
    channel_amax = torch.rand(width, generator=generator)
    found = {"amax": channel_amax.max()}
    if whole:
        found |= {
            "channel_amax": channel_amax,
            "min_val": -channel_amax,
            "max_val": channel_amax / 2,
            "abs_sum": channel_amax.double() * TOKENS,
            "count": torch.tensor(TOKENS),
            "counts": torch.randint(0, 1000, (BINS,), generator=generator),
        }
    return {f"{site}|{name}": value for name, value in found.items()}


def _shapes(config: LlamaConfig) -> dict[str, list[int]]:
    """Return the shapes of a Llama's linears."""
    hidden, wide = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    layer = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [wide, hidden],
        "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
    }
    layers = range(config.num_hidden_layers)
    return {
        f"model.layers.{index}.{name}.weight": shape
        for index in layers
        for name, shape in layer.items()
    }


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", type=int, default=8, help="of each replica")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--work", type=Path, default=Path("artifacts/unify_many_ranks"))
    parser.add_argument("--keep", action="store_true", help="keep the ranks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
