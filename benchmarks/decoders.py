"""The lean decoder beside transformers' modules, in W4A16 and float32.

The artifacts are of random models of several families.

Both run the same artifact with the same kernels for its quantized linears, in turns. A row is a
family: tokens per second after a prompt, and seconds of the prompt's first token, as medians; a
ratio above 1 says that the lean decoder is faster.

python benchmarks/decoders.py llama gemma2 mixtral --work artifacts/decoders

README.md says what is run.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _alone import alone
from _report import table
from _turns import timed_in_turns
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow import export, quantize
from quantflow.planning.recipe import Quantize
from quantflow.runtime.load import load

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SIZES |= {
    "intermediate_size": 2816,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
SIZES |= {"eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 704, "intermediate_size": 704}
DELTA = {"num_hidden_layers": 8, "head_dim": 64, "linear_num_key_heads": 4}
DELTA |= {"linear_num_value_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "phi3": {},
    "phi": {"num_key_value_heads": 16},
    "gpt_neox": {"num_key_value_heads": None},
    "granite": {"attention_multiplier": 0.125},
    "mixtral": EXPERTS | {"num_local_experts": 8},
    "qwen3_moe": EXPERTS | {"num_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "gpt_oss": EXPERTS | {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "glm4_moe": EXPERTS | {"n_routed_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "granitemoe": EXPERTS | {"num_local_experts": 16, "attention_multiplier": 0.125},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA
    | EXPERTS
    | {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 704,
    },
}
PROMPT, NEW = 128, 32


def main(arguments: list[str]) -> int:
    """Print the table; see the file's first lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families",
        nargs="*",
        default=list(FAMILIES),
        metavar="FAMILY",
        help=f"of {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("artifacts/decoders"),
        help="where models and artifacts go",
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each decoder, after one that is not counted"
    )
    parser.add_argument(
        "--make-only", action="store_true", help="make the artifacts and time nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.families) - set(FAMILIES)):
        parser.error(f"no such family: {unknown[0]}")
    return alone(run, given)


def run(given: argparse.Namespace) -> int:
    """Make what is missing, time it, and print."""
    folders = {family: artifact(family, given.work) for family in given.families}
    if given.make_only:
        return 0
    found = {family: timed(folder, given.runs) for family, folder in folders.items()}
    if given.json:
        print(json.dumps({"threads": torch.get_num_threads(), "families": found}))
        return 0
    columns = (
        "family",
        "lean",
        "transformers",
        "ratio",
        "lean, first token",
        "transformers, first token",
        "ratio",
    )
    rows = []
    for family, sides in found.items():
        (rate, first), (other, later) = sides["lean"], sides["transformers"]
        firsts = (f"{first * 1e3:.0f} ms", f"{later * 1e3:.0f} ms", f"{later / first:.2f}x")
        rows.append((family, f"{rate:.1f} /s", f"{other:.1f} /s", f"{rate / other:.2f}x", *firsts))
    print(
        f"{torch.get_num_threads()} threads, prompt of {PROMPT} tokens, {NEW} more, {given.runs} "
        "runs of each in turns\n"
    )
    print(table(columns, rows))
    return 0


def artifact(family: str, work: Path) -> Path:
    """Return the family's artifact in W4A16, made by quantize and export where it is not there."""
    work.mkdir(parents=True, exist_ok=True)
    folder = work.resolve() / family
    if folder.is_dir():
        return folder
    sizes = {key: value for key, value in (SIZES | FAMILIES[family]).items() if value is not None}
    with tempfile.TemporaryDirectory(dir=work) as place:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[family](**sizes), dtype=torch.bfloat16
        )
        model.save_pretrained(Path(place) / "model")
        entry = Quantize(name=family, scheme="W4A16", algorithm="rtn")
        quantized = quantize(Path(place) / "model", Path(place) / "quantized", entry=entry).folder
        export(quantized, folder)
    return folder


def timed(folder: Path, runs: int) -> dict[str, tuple[float, float]]:
    """Return tokens per second and seconds of the first token for each decoder."""
    names = ("lean", "transformers")
    decoders = {
        name: load(folder, decoder=name, dtype=torch.float32, exact=True).decoder for name in names
    }
    return timed_in_turns(
        decoders, vocab_size=SIZES["vocab_size"], prompt=PROMPT, new=NEW, runs=runs
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
