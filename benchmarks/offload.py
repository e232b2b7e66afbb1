"""Tokens per second of a mixture whose weights stay on disk, by the share of experts in memory.

    python benchmarks/offload.py [--layers 8] [--experts 64] [--tokens 48]

A Qwen3-MoE of random weights (64 experts, 8 chosen, hidden state 1024, experts of 512) is quantized
to W4A16 by rounding to nearest. `quantflow generate --disk-offload` continues one prompt with it,
each time with another `--max-memory`, and the text has to be the same. It is sampled, since the
likeliest text of a random model repeats itself, and its experts with it. Reads come from the
system's file cache wherever the machine has kept the file there. Printed are also the peak of the
process and, for comparison, the same text with all weights in memory in transformers' modules.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _watch import run
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quantflow.units import size

ROOT = Path(__file__).resolve().parent.parent
QUANTFLOW = (sys.executable, "-m", "quantflow")
# shares of the experts that are to fit beside everything else
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write(work / "model", layers=sizes.layers, experts=sizes.experts)
        rounding = ("--scheme", "W4A16", "--algorithm", "rtn", "--export", work / "artifact", "-q")
        run([*QUANTFLOW, "quantize", work / "model", "-o", work / "q", *rounding], log=work / "log")
        shutil.rmtree(work / "q")
        shutil.rmtree(work / "model")
        line = ["generate", work / "artifact", "--prompt", "def main():", "--ignore-eos"]
        line += ["--temperature", 1, "--seed", 0]
        line += ["--max-new-tokens", sizes.tokens, "--json", "-q"]
        whole = generate(line, "--decoder", "transformers")
        # without a limit to speak of an expert is read once, and stays
        ample = generate(line, "--disk-offload", "--max-memory", "1000GB")
        experts = ample["experts"]["expert_bytes"]
        others = beside(line)
        print(
            "--max-memory   peak   experts in memory   hit rate   tokens per second   read a token"
        )
        for share in SHARES:
            limit = f"{round((others + share * experts) / 1e6)}MB"
            row(limit, generate(line, "--disk-offload", "--max-memory", limit), whole, sizes.tokens)
        speed = whole["timing"]["tokens_per_second"]
        print(f"in memory, transformers' modules: {speed:.2f} tokens per second, ", end="")
        print(f"peak {size(whole['peak'])}")
    return 0


def write(folder: Path, *, layers: int, experts: int) -> None:
    """Write the mixture, with the tokenizer of the example model."""
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for path in (ROOT / "examples" / "tiny-llama").glob("token*"):
        shutil.copy(path, folder)


def generate(line: list[object], *options: str) -> dict[str, Any]:
    """The result of `quantflow generate`, with the peak of its process."""
    watched = run([*QUANTFLOW, *map(str, line), *options], log=Path(os.devnull))
    if watched.code:
        raise SystemExit(f"{' '.join(options)}: exit {watched.code}")
    return {**json.loads(watched.output), "peak": watched.rss}


def beside(line: list[object]) -> int:
    """The bytes that everything but experts needs, which the refusal of too little names."""
    command = [*QUANTFLOW, *map(str, line), "--disk-offload", "--max-memory", "1MB"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    return int(re.search(r"beside (\d+) ", said)[1])


def row(limit: str, found: dict[str, Any], whole: dict[str, Any], tokens: int) -> None:
    """Print a line of the table; the tokens have to be those of the model in memory."""
    if found["outputs"] != whole["outputs"]:
        raise SystemExit("the text differs from that of the model in memory")
    experts = found["experts"]
    print(
        f"{limit:>12} {size(found['peak']):>6} {size(experts['expert_bytes']):>19} "
        f"{experts['hit_rate']:>10.0%} {found['timing']['tokens_per_second']:>19.2f} "
        f"{size(experts['bytes_read'] / tokens):>16}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
