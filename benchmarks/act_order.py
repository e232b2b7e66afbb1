"""The cost of act-order on the lean decoder.

A GPTQ folder with `desc_act` runs beside the same folder without.

Both folders hold the same codes and scales. In the one with `desc_act` the groups are of inputs
drawn at random, the same for linears that share an input, so that every product reads its inputs in
another order. Weights are of a random Llama of a size of README.md, W4A16 by rtn. Each dtype takes
both folders in turns: seconds of the prompt's first token, and tokens per second after it, as
medians.

python benchmarks/act_order.py --size 500MB --work artifacts/act_order

README.md says what is run.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _alone import alone
from _report import table
from _synthetic import SHAPES, make_checkpoint
from _turns import timed_in_turns
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantflow import export, quantize
from quantflow.formats import LAYOUTS
from quantflow.planning.recipe import Export, Quantize
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.load import load

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLAIN, ORDERED = "plain", "desc_act"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PROMPT, NEW = 256, 64
BAR = 0.95  # of the plain layout's speed, or better


def main(arguments: list[str]) -> int:
    """Print the table; see the file's first lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=list(SHAPES), default="500MB", help="of the checkpoint (500MB)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("artifacts/act_order"),
        help="where checkpoint and folders go",
    )
    parser.add_argument(
        "--runs", type=int, default=7, help="of each folder, after one that is not counted"
    )
    parser.add_argument(
        "--make-only", action="store_true", help="make the folders and time nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    return alone(run, parser.parse_args(arguments))


def run(given: argparse.Namespace) -> int:
    """Make what is missing, time it, print, and return 1 where the bar is missed."""
    folders = made(given.work.resolve() / given.size, given.size)
    if given.make_only:
        return 0
    found = {
        name: timed(folders, dtype, SHAPES[given.size].vocab, given.runs)
        for name, dtype in DTYPES.items()
    }
    rows, missed = [], False
    for name, sides in found.items():
        (rate, first), (ordered_rate, ordered_first) = sides[PLAIN], sides[ORDERED]
        decode, prefill = ordered_rate / rate, first / ordered_first
        missed |= min(decode, prefill) < BAR
        prompts = (
            f"{PROMPT / first:.0f} /s",
            f"{PROMPT / ordered_first:.0f} /s",
            f"{prefill:.2f}x",
        )
        rows.append((name, *prompts, f"{rate:.1f} /s", f"{ordered_rate:.1f} /s", f"{decode:.2f}x"))
    if given.json:
        print(
            json.dumps(
                {"threads": torch.get_num_threads(), "size": given.size, "bar": BAR, "found": found}
            )
        )
        return int(missed)
    threads = torch.get_num_threads()
    print(
        f"{given.size}, {threads} threads, prompt of {PROMPT} tokens, {NEW} more, {given.runs} "
        "runs in turns\n"
    )
    columns = (
        "dtype",
        "prefill, plain",
        "prefill, desc_act",
        "ratio",
        "decode, plain",
        "decode, desc_act",
        "ratio",
    )
    print(table(columns, rows))
    print(f"\nbar: {BAR}x of the plain layout or better: {'MISSED' if missed else 'met'}")
    return int(missed)


def made(work: Path, size: str) -> dict[str, Path]:
    """Return the two folders, made where they are not there."""
    folders = {name: work / name for name in (PLAIN, ORDERED)}
    work.mkdir(parents=True, exist_ok=True)
    if not folders[PLAIN].is_dir():
        with tempfile.TemporaryDirectory(dir=work) as place:
            model, quantized, artifact = (
                Path(place) / name for name in ("model", "quantized", "artifact")
            )
            make_checkpoint(model, SHAPES[size], seed=0, tokenizer=TOKENIZER)
            export(
                quantize(
                    model, quantized, entry=Quantize(name=size, scheme="W4A16", algorithm="rtn")
                ).folder,
                artifact,
            )
            export(artifact, folders[PLAIN], options=Export(format="gptq"))
    if not folders[ORDERED].is_dir():
        with tempfile.TemporaryDirectory(dir=work) as place:
            write_ordered(folders[PLAIN], Path(place) / ORDERED)
            (Path(place) / ORDERED).rename(folders[ORDERED])
    return folders


def write_ordered(plain: Path, folder: Path) -> None:
    """Write a GPTQ folder of one weight file with its columns given to inputs drawn at random."""
    source, layout, orders = (
        open_folder(plain, backend="reference"),
        LAYOUTS["gptq"].with_order(),
        {},
    )
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    tensors: dict[str, Tensor] = load_file(plain / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for name, placement in source.linears.items():
        block, _, kind = name.rpartition(".")
        shared = name if kind in ("o_proj", "down_proj") else block
        order = orders.setdefault(shared, torch.randperm(placement.shape[1], generator=generator))
        linear = replace(source.decode(name), order=order)
        tensors |= layout.encode(name, linear, scale_dtype=tensors[f"{name}.scales"].dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((plain / CONFIG).read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def timed(
    folders: dict[str, Path], dtype: torch.dtype, vocab: int, runs: int
) -> dict[str, tuple[float, float]]:
    """Return tokens per second and seconds of the first token for each folder."""
    decoders = {
        name: load(folder, decoder="lean", dtype=dtype, exact=True).decoder
        for name, folder in folders.items()
    }
    return timed_in_turns(decoders, vocab_size=vocab, prompt=PROMPT, new=NEW, runs=runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
