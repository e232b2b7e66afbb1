"""Intel's extension for PyTorch (IPEX) for runtime.py; see _serve.py.

SETTINGS: model, gptq, threads.

Needs intel-extension-for-pytorch 2.8, torch 2.8 and transformers 4.51. `gptq` is a folder in GPTQ's
layout, which the extension loads as its low-precision checkpoint: its linears run as they are
stored. Everything else is the extension's default for it: integer products with inputs rounded to 8
bits, the head rounded to nearest in 4 bits.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import intel_extension_for_pytorch as ipex
import torch
from _serve import Program, Timed, serve
from intel_extension_for_pytorch.quantization import (
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PARTS = (".qweight", ".qzeros", ".scales")


def load(settings: dict[str, Any]) -> Program:
    """Load a model, and its linears from the folder; bfloat16 where the CPU multiplies it."""
    torch.set_num_threads(settings["threads"])
    folder = Path(settings["gptq"])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings["model"], torch_dtype=dtype).eval()
    mapping = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype.INT4,
        lowp_mode=WoqLowpMode.INT8,
        group_size=config["group_size"],
    )
    model = ipex.llm.optimize(
        model,
        dtype=dtype,
        quantization_config=mapping,
        low_precision_checkpoint=(stored, config),
        inplace=True,
    )
    model.config.token_latency = True  # generate then returns the seconds of each token too
    head = model.config.vocab_size * model.config.hidden_size // 2
    weights = head + sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(PARTS))

    def run(rows: list[list[int]], new: int) -> Timed:
        ids = torch.tensor(rows)
        chosen: dict[str, Any] = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "num_beams": 1,
        }
        with (
            torch.inference_mode(),
            torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16),
        ):
            _, seconds = model.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
        return seconds[0], seconds[1:]

    return Program(version=version("intel-extension-for-pytorch"), weight_bytes=weights, run=run)


if __name__ == "__main__":
    serve(load)
