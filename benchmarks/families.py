"""Every causal language model of transformers as a tiny random model: measure, quantize, export with proof, verify, generate.

    python benchmarks/families.py --results families.json                all types, half a minute each; resumed
    python benchmarks/families.py --only phi gemma2 --schemes W4A16
    python benchmarks/families.py --results families.json --table        the table of what is done already

For each model type of transformers' mapping that a small configuration can be made of: a random model with a tokenizer is
measured; W4A16 (gptq), W8A8 and FP8 are quantized, exported (export proves the artifact in a fresh process), verified and
generated from. Then the artifact is exported dequantized, stock transformers loads that, and its logits are compared with our
runtime's. Inputs of stock linears are rounded as the artifact says; FP8's static scales are one per expert, which transformers'
stacked experts cannot take, so that a mixture's logits are compared in W4A16 and W8A8 alone.

A type with a result in `--results` is not run again; `--again` drops results that failed. Prints type x stage, the share that
passes, and of each failure its reason; `--json` prints the results instead.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _tiny_models import VARIANTS, VOCABULARY, auto_class, tiny_config, write_model
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import quantflow
from quantflow.errors import QuantflowError
from quantflow.models.experts import is_stacked
from quantflow.planning.recipe import Calibration, Export, Quantize

SCHEMES = ("W4A16", "W8A8", "FP8")
WEIGHTS_ALONE = 1e-4  # of the logits' norm: the same sums in another order
ROUNDED_INPUTS = 2e-2  # an input between two codes may fall to either, and takes others with it
WORDS = ("value", "scale", "round", "group", "layer", "token", "model", "range", "shift", "pack", "zero", "point")
PASSED = "passes"


def main(words: Sequence[str]) -> int:
    """Run the types that were named, or all; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types (default: all)")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--results", type=Path, metavar="FILE", help="kept after each type, read at the start")
    parser.add_argument("--again", action="store_true", help="run again what failed")
    parser.add_argument("--table", action="store_true", help="run nothing, print what FILE holds as Markdown")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of what is no refusal")
    given = parser.parse_args(words)
    logging.set_verbosity_error()
    rows = {} if given.results is None or not given.results.is_file() else json.loads(given.results.read_text())
    if given.again:
        rows = {kind: row for kind, row in rows.items() if row["passes"]}
    kinds = given.only or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS})
    for kind in () if given.table else kinds:
        if kind in rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[kind] = _row(kind, Path(folder), given.schemes, debug=given.debug)
        print(f"{kind:26} {rows[kind]['seconds']:5.0f} s  {_told(rows[kind])}", file=sys.stderr, flush=True)
        if given.results is not None:
            given.results.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(json.dumps(rows, indent=1) if given.json else _table(rows))
    return 0


def _told(row: Mapping[str, Any]) -> str:
    return PASSED if row["passes"] else row["reason"]


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as Markdown: type x stage, then the share, then what cannot be made."""
    made = {kind: row for kind, row in rows.items() if row["stages"]}
    stages = list(dict.fromkeys(stage for row in made.values() for stage in row["stages"]))
    lines = ["| type | " + " | ".join(stages) + " | |", "|---|" + "---|" * (len(stages) + 1)]
    for kind, row in sorted(made.items()):
        cells = [{True: "yes", False: "no"}.get(row["stages"].get(stage), "") for stage in stages]
        lines.append(f"| {kind} | " + " | ".join(cells) + f" | {'' if row['passes'] else row['reason']} |")
    passing = sum(row["passes"] for row in made.values())
    share = f"{passing} of {len(made)} types pass, {passing / max(1, len(made)):.0%}."
    unmade = [f"- {kind}: {row['reason']}" for kind, row in sorted(rows.items()) if not row["stages"]]
    return "\n".join([*lines, "", share, "", f"No tiny model of {len(unmade)} types:", "", *unmade])


def _row(kind: str, folder: Path, schemes: Sequence[str], *, debug: bool) -> dict[str, Any]:
    """Return what became of a type: its stages, all or up to the first that failed, none where no tiny model can be made."""
    began = time.monotonic()
    stages: dict[str, bool] = {}
    try:
        write_model(tiny_config(kind), folder / "model")
    except Exception as error:
        if debug:
            traceback.print_exc()
        return {"passes": False, "stages": {}, "reason": _first(error), "seconds": round(time.monotonic() - began, 1)}
    reason = None
    for stage, run in _stages(folder, schemes):
        try:
            run()
        except QuantflowError as error:
            reason = f"{stage}: {error.cause}"
        except Exception as error:
            reason = f"{stage}: {_first(error)}"
            if debug:
                traceback.print_exc()
        stages[stage] = reason is None
        if reason is not None:
            break
    seconds = round(time.monotonic() - began, 1)
    return {"passes": reason is None, "stages": stages, "reason": reason, "seconds": seconds}


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def _stages(folder: Path, schemes: Sequence[str]) -> list[tuple[str, Any]]:
    return [("measure", partial(_measure, folder)), *((scheme, partial(_through, folder, scheme)) for scheme in schemes)]


def _measure(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(len(WORDS), (32, 60), generator=generator).tolist()
    lines = (json.dumps({"text": " ".join(WORDS[i] for i in row)}) + "\n" for row in rows)
    (folder / "text.jsonl").write_text("".join(lines))
    calibration = Calibration(source=str(folder / "text.jsonl"), samples=32, sequence_length=64)
    quantflow.measure(folder / "model", folder / "1", calibration=calibration)


def _through(folder: Path, scheme: str) -> None:
    """Take a measured model through the other stages, and compare what runs it.

    Raises:
        ValueError: our runtime's logits are not those of stock transformers.
    """
    quantized, artifact, plain = folder / f"2-{scheme}", folder / f"4-{scheme}", folder / f"plain-{scheme}"
    entry = Quantize(name="x", scheme=scheme)
    quantflow.quantize(folder / "model", quantized, artifact=entry, measurement=folder / "1")
    quantflow.export(quantized, artifact, model=folder / "model", options=Export())
    quantflow.verify(artifact)
    ours = quantflow.load(artifact, decoder="auto")
    ids = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(3))
    ours.decoder.begin(rows=1, capacity=24)
    found = ours.decoder.forward(ids, last_only=False)
    for _ in range(4):  # one token after the other, as generate does
        ours.decoder.forward(found[:, -1:].argmax(-1) if found.ndim == 3 else found.argmax(-1)[:, None])
    quantflow.export(artifact, plain, options=Export(format="dequantized", dtype="f32"))
    stock = auto_class(AutoConfig.from_pretrained(plain)).from_pretrained(plain, dtype=torch.float32).eval()
    mixture = any(is_stacked(part) for part in stock.modules())
    if mixture and scheme == "FP8":
        return
    _round_inputs_(stock, ours)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
    error = float((found - expected).norm() / expected.norm())
    if not math.isfinite(error) or error > (WEIGHTS_ALONE if scheme.endswith("A16") else ROUNDED_INPUTS):
        raise ValueError(f"the logits differ from transformers' by {error:.2g} of their norm")


def _round_inputs_(model: Any, loaded: Any) -> None:
    """Let the linears of transformers' model round what they read as the artifact says."""
    modules = dict(model.named_modules())
    for parameter, source in loaded.artifact.to_source.items():
        name, owner = source.removesuffix(".weight"), parameter.removesuffix(".weight")
        if name not in loaded.artifact.linears or name == source or loaded.artifact.linears[name].scheme.input is None:
            continue
        linear = loaded.artifact.decode(name)
        if owner in modules:
            modules[owner].register_forward_pre_hook(
                lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]), *args[1:])
            )
        else:  # of experts, whose inputs are rounded token by token: all by one rule
            experts = modules[owner.partition(".experts.")[0] + ".experts"]
            if not hasattr(experts, "_own_gate"):
                experts._own_gate = experts._apply_gate
                experts._apply_gate = lambda x, experts=experts, linear=linear: linear.fake_quantize_input(experts._own_gate(x))
                experts.register_forward_pre_hook(
                    lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]), *args[1:])
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
