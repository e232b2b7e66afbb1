"""Every causal language model of transformers as a tiny random model: through measure, quantize, export with proof, generate.

    python benchmarks/families.py                            all types, minutes each
    python benchmarks/families.py phi gemma2 --schemes W4A16

For each model type that a small configuration can be made of: a random model with a tokenizer is measured; W4A16 (gptq), W8A8
and FP8 are quantized, exported (export proves the artifact in a fresh process), verified and run; and the logits of our
runtime are compared with those of stock transformers on the dequantized weights. Prints a table and the share of types that
pass everything; `--output` writes it as JSON.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _synthetic import TOKENIZER_FILES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import quantflow
from quantflow.errors import QuantflowError
from quantflow.planning.recipe import Calibration, Export, Quantize

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
SCHEMES = ("W4A16", "W8A8", "FP8")
WEIGHTS_ALONE = 1e-4  # of the logits' norm: the same sums in another order
ROUNDED_INPUTS = 2e-2  # an input between two codes may fall to either, and takes others with it
VOCABULARY = 4096  # of the example's tokenizer
SIZES: dict[str, Any] = {  # each family takes those that it knows, by the names that it knows
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
}
OWN: dict[str, dict[str, Any]] = {  # what one type needs beside that
    "codegen": {"rotary_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 8},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
}
WORDS = ("value", "scale", "round", "group", "layer", "token", "model", "range", "shift", "pack", "zero", "point")


def main(words: Sequence[str]) -> int:
    """Run the types that were named, or all; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all of transformers' causal language models)")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of what is no refusal")
    given = parser.parse_args(words)
    logging.set_verbosity_error()
    rows = []
    for kind in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            row = _row(kind, Path(folder), given.schemes, debug=given.debug)
        if row is not None:
            rows.append(row)
            print(f"{kind:24} {row['seconds']:5.0f} s  {'passes' if row['passes'] else row['reason']}", flush=True)
    passing = sum(row["passes"] for row in rows)
    if rows:
        print(f"{passing} of {len(rows)} types pass, {passing / len(rows):.0%}")
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _row(kind: str, folder: Path, schemes: Sequence[str], *, debug: bool) -> dict[str, Any] | None:
    """Return what became of a type; None where no tiny model of it can be made."""
    began = time.monotonic()
    try:
        _make(kind, folder / "model")
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{kind:24}    no tiny model: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return None
    reason = None
    try:
        for scheme in schemes:
            _through(folder, scheme)
    except QuantflowError as error:
        reason = f"{scheme}: {error.cause}"
    except Exception as error:
        reason = f"{scheme}: a bug: {type(error).__name__}: {error}"
        if debug:
            traceback.print_exc()
    return {"type": kind, "passes": reason is None, "reason": reason, "seconds": round(time.monotonic() - began, 1)}


def _make(kind: str, folder: Path) -> None:
    """Write a tiny random model of a type, with a tokenizer."""
    config_class = CONFIG_MAPPING[kind]
    known = {**SIZES, **OWN.get(kind, {})}
    blank = config_class()
    names = {*vars(blank), *getattr(blank, "attribute_map", {})}
    config = config_class(**{name: value for name, value in known.items() if name in names or name in OWN.get(kind, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in model.parameters()) > 30e6:
        raise ValueError("not tiny: its configuration goes by other names")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(EXAMPLE / name, folder / name)


def _documents(count: int, *, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[i] for i in row) for row in torch.randint(len(WORDS), (count, 60), generator=generator).tolist()]


def _through(folder: Path, scheme: str) -> None:
    """Take a model through the stages, and compare what runs it.

    Raises:
        ValueError: our runtime's logits are not those of transformers on the dequantized weights.
    """
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in _documents(8, seed=1)))
    measured, quantized, artifact = folder / "1", folder / f"2-{scheme}", folder / f"4-{scheme}"
    calibration = Calibration(source=str(text), samples=4, sequence_length=32)
    entry = Quantize(name="x", scheme=scheme, group_size=32 if scheme.startswith("W4") else None)
    if not measured.is_dir():
        quantflow.measure(folder / "model", measured, calibration=calibration)
    quantflow.quantize(folder / "model", quantized, artifact=entry, measurement=measured)
    quantflow.export(quantized, artifact, model=folder / "model", options=Export())
    quantflow.verify(artifact)
    ids = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(3))
    ours = quantflow.load(artifact)
    ours.decoder.begin(rows=1, capacity=16)
    found = ours.decoder.forward(ids, last_only=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    _dequantize_(model, ours)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    error = float((found - expected).norm() / expected.norm())
    if not math.isfinite(error) or error > (WEIGHTS_ALONE if scheme.endswith("A16") else ROUNDED_INPUTS):
        raise ValueError(f"its logits differ from transformers' by {error:.2g} of their norm")


def _dequantize_(model: Any, loaded: Any) -> None:
    """Give transformers' model the weights that the artifact holds, and round the inputs of its linears as it says."""
    for parameter, source in loaded.artifact.to_source.items():
        name = source.removesuffix(".weight")
        if not source.endswith(".weight") or name not in loaded.artifact.linears:
            value = loaded.artifact.read([source], torch.float32)[source]
        else:
            linear = loaded.artifact.decode(name)
            value = linear.weight.dequantize()
            module = model.get_submodule(parameter.removesuffix(".weight"))
            module.register_forward_pre_hook(lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]), *args[1:]))
        with torch.no_grad():
            model.get_parameter(parameter).copy_(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
