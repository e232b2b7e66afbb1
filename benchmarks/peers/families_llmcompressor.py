"""Every language model of transformers through llm-compressor's GPTQ, in its environment.

Each is a tiny random model.

    python benchmarks/peers/families_llmcompressor.py [--only TYPE ...] [--results FILE] [--again]

The models are those of benchmarks/families.py. `oneshot` with GPTQModifier at W4A16, symmetric
groups of 32 (the models are narrow), heads and routers left alone, its own defaults otherwise; 8
sequences of 28 random token ids. A type passes when its linears are quantized, what is saved
compressed holds packed weights, and transformers loads that and computes finite logits.

Every type runs in a fork of a process that has imported torch, transformers and llm-compressor.
What FILE (benchmarks/families_llmcompressor.json) holds is not run again, `--again` drops what
failed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from _forks import ForkError, in_fork  # noqa: E402
from _tiny_models import KINDS, VOCABULARY, auto_class, tiny_config, write_model  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402

SAMPLES, LENGTH, GROUP = 8, 28, 32
# routers as in its examples
IGNORED = ["lm_head", "embed_out", "re:.*[.](gate|router|shared_expert_gate)$"]
SECONDS = 300  # that a type may take


def main() -> None:
    """Run the types that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--results", type=Path, default=HERE / "families_llmcompressor.json")
    parser.add_argument("--again", action="store_true", help="run again what failed")
    parser.add_argument("--debug", action="store_true", help="show what the forks print")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not come along into a fork
    rows = json.loads(given.results.read_text()) if given.results.is_file() else {}
    for kind in given.only or KINDS:
        if kind in rows and not (given.again and rows[kind]):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows[kind] = in_fork(
                    partial(_through, kind, Path(folder)), seconds=SECONDS, debug=given.debug
                )
            except ForkError as error:
                rows[kind] = str(error)
        print(
            f"{kind:26} {time.monotonic() - began:5.1f} s  {rows[kind] or 'passes'}",
            file=sys.stderr,
            flush=True,
        )
        beside = given.results.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        beside.replace(given.results)
    passed = sum(reason is None for reason in rows.values())
    print(f"{passed} of {len(rows)} types pass")


def _through(kind: str, folder: Path) -> str | None:
    """Return why a type does not pass, None where it does."""
    write_model(tiny_config(kind), folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    model = auto_class(config).from_pretrained(folder / "model", dtype=torch.bfloat16)
    rows = torch.randint(
        2, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)
    ).tolist()
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(folder / "model"),
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=IGNORED),
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(folder / "saved", save_compressed=True)
    packed = 0
    for path in (folder / "saved").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            packed += sum(name.endswith("weight_packed") for name in file.keys())  # noqa: SIM118
    if not packed:
        return "saved without a packed weight"
    # as it was saved
    loaded = auto_class(config).from_pretrained(folder / "saved", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor(rows[:1])).logits
    return None if bool(torch.isfinite(logits).all()) else "what is loaded computes NaN or Inf"


if __name__ == "__main__":
    main()
