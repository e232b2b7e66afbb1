"""llm-compressor's sequential path: MODEL CALIBRATION OUTPUT.

It runs with its environment's Python.

GPTQ at W4A16, symmetric groups of 128, lm_head and what `--ignore` names left alone. `--offload`
keeps the weights on disk, the most frugal way that it offers. `--routed` shows an expert only the
tokens that the router sends to it. `--dtype` is that of the weights that it loads and runs.
"""

import argparse
import json
from pathlib import Path

import torch
from compressed_tensors.offload import load_offloaded_model
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def main() -> None:
    """Load, quantize with the given token ids, save compressed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("calibration", help=".jsonl with `input_ids`")
    parser.add_argument("output")
    parser.add_argument("--offload", metavar="DIR", help="Keep weights there instead of in memory.")
    parser.add_argument("--ignore", nargs="*", default=[], metavar="PATTERN")
    parser.add_argument("--routed", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    rows = [
        json.loads(line)["input_ids"] for line in Path(given.calibration).read_text().splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = _load(given.model, given.offload, getattr(torch, given.dtype))
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head", *given.ignore]),
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
        shuffle_calibration_samples=False,
        pipeline="sequential",
        moe_calibrate_all_experts=not given.routed,
    )
    model.save_pretrained(given.output, save_compressed=True)
    tokenizer.save_pretrained(given.output)


def _load(folder: str, offload: str | None, dtype: torch.dtype) -> PreTrainedModel:
    if offload is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with load_offloaded_model():
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map="auto_offload",
            max_memory={"cpu": 200_000_000},
            offload_folder=offload,
        )


if __name__ == "__main__":
    main()
