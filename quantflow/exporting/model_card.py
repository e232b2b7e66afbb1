"""The model card in an artifact's README.md: its content, the programs that load it, and limits."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from quantflow.algorithms import REFIT, TUNE
from quantflow.files.inspect import output_errors
from quantflow.files.ledger import UNUSED
from quantflow.planning.finished_plan import kv_words_of
from quantflow.planning.stock_transformers import CONV1D, EXPERTS, PACKED, REFUSED

_EXPERT = re.compile(r"\.experts\.\d+\.")
_BFLOAT16 = (
    "Stock transformers with compressed-tensors loads it and makes bfloat16 weights of it, "
    "without a change of values."
)
NOTES = {
    "float-quantized": "Stock transformers with compressed-tensors loads it, and runs it with "
    "the formulas used here.",
    "int-quantized": "Stock transformers with compressed-tensors loads it, and runs it with the "
    "formulas used here.",
    "pack-quantized": "Stock transformers with compressed-tensors loads it and decompresses the "
    "weights.",
    "mxfp8-quantized": _BFLOAT16,
    "mxfp4-pack-quantized": _BFLOAT16,
    "nvfp4-pack-quantized": _BFLOAT16,
}
PROOFS = {
    "canary": "canary, {layers} layers recomputed from this folder",
    "tensors": "tensors, every weight of {layers} layers decoded from this folder and compared",
}
MIXTURES = {
    "float-quantized": "Stock transformers loads it with the experts' weights dequantized and "
    "their inputs as they are.",
    "int-quantized": "Stock transformers 5.23 does not load experts of this layout.",
    "pack-quantized": "Stock transformers loads it with the experts' weights dequantized to the "
    "model's dtype.",
    **dict.fromkeys(
        ("mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"),
        "Stock transformers was not tried with experts of this layout.",
    ),
}
MEASURED = ", scales measured (`k_scale`, `v_scale` of each attention)"
ROUNDED = "; stock transformers with compressed-tensors rounds them by the formulas used here"
ASYMMETRIC_EXPERTS = (
    "It has zero points, with which stock transformers 5.23 does not load experts, "
    "`dequantize=True` or not."
)
MIXED_INPUTS = (
    "The inputs of down_proj are mixed by Hadamard matrices while the model runs "
    "(`transform_config`). **Stock transformers "
    "5.23 ignores that and computes something else.** Load it with `quantflow`, or give the "
    "loaded model to "
    "compressed-tensors' `apply_transform_config`, with a `TransformConfig` of what config.json "
    "says under `transform_config`."
)
ASYMMETRIC = (
    "It has zero points: compressed-tensors 0.20 does not reload packed zero points plainly; "
    "pass `quantization_config=CompressedTensorsConfig(dequantize=True)`."
)
MINIMA = (
    "Linears of llama.cpp's types have minima that are real numbers (`zp_dtype`): transformers "
    "does not load them. Run it with "
    "`quantflow`, or with llama.cpp after `quantflow export ARTIFACT -o DIR --format gguf`."
)


# by what config.json says under `global_compression_ratio`
REFUSALS = {
    CONV1D: "Its source keeps these weights transposed, in modules of class Conv1D, of which "
    "transformers' reader of compressed-tensors takes no notice.",
    PACKED: "transformers' code of this type reads packed weights only where all linears have one "
    "scheme without rounded inputs: quantize with a --group-size that divides all inputs.",
    EXPERTS: "Its source keeps the experts of a layer in one tensor; transformers does not join "
    "these into it.",
}
ELSEWHERE = (
    "**Stock transformers refuses this folder**, where it would fill the weights with random "
    "numbers otherwise (`global_compression_ratio` of config.json is a sentence, not a number). "
    "Run it with `quantflow`, or load what "
    "`quantflow export ARTIFACT -o DIR --format dequantized` writes."
)


def model_card(manifest: Mapping[str, Any], quantization: Mapping[str, Any]) -> str:
    """The card of an artifact.

    Args:
        manifest: its manifest.
        quantization: `quantization_config` of its config.json.
    """
    refusal = REFUSALS.get(str(quantization.get(REFUSED)))
    recipe = manifest["recipe"]
    source = {
        key: None if text is None else harmless(text)
        for key, text in manifest["source"].items()
        if key in ("name", "revision")
    }
    resolved, chosen = recipe["resolved"], recipe.get("chosen")
    what = (
        recipe["scheme"]
        if chosen is None
        else f"mixed precision of {chosen['bits_per_weight']:.2f} bits per weight"
    )
    schemes = [scheme for scheme in resolved["schemes"].values() if scheme is not None]
    stored = [*schemes, *([resolved["head"]["scheme"]] if "head" in resolved else [])]
    mtp = resolved.get("mtp")
    stored += [] if mtp is None else mtp["schemes"].values()
    layouts = sorted({scheme["layout"] for scheme in stored})
    transforms = ", ".join(
        f"{name} {options}" for item in resolved["transforms"] for name, options in item.items()
    )
    sizes = manifest["ledger"]["bytes"]
    sparse = any(_EXPERT.search(name) for name in resolved["schemes"])
    cache = kv_words_of(resolved)
    lines = [
        "---",
        f"base_model: {json.dumps(source['name'])}",  # a JSON text is a YAML one, whatever it holds
        "library_name: transformers",
        "tags: [quantflow, compressed-tensors]",
        "---",
        "",
        f"# {source['name']}, {what}",
        "",
        f"{len(schemes)} of {len(resolved['schemes'])} linears quantized: {what} by "
        f"{resolved['algorithm']}"
        f"{', weights refitted to the inputs before' if REFIT in resolved else ''}"
        f"{', scales tuned end to end' if TUNE in resolved else ''}"
        f"{f', after {transforms}' if transforms else ''}.{_head(resolved.get('head'))}{_mtp(mtp)}",
        "",
        "| | |",
        "|---|---|",
        f"| source | {source['name']}, revision {source['revision'] or 'not recorded'} |",
        f"| source bytes quantized / changed / copied | {sizes['quantized']} / "
        f"{sizes['changed']} / {sizes['copied']} |",
        *(
            []
            if cache is None
            else [f"| keys and values | {cache}{MEASURED}{'' if sparse else ROUNDED} |"]
        ),
        *_unused(manifest["ledger"]["tensors"]),
        f"| calibration | {_calibration(manifest['measurement'])} |",
        "| proof | "
        f"{PROOFS[manifest['proof']['kind']].format(layers=manifest['proof']['layers'])} |",
        *_output_errors(resolved["algorithm"], output_errors(manifest["layers"] or ())),
        f"| digest | `{manifest['digest']}` |",
        "",
        *(
            [f"{refusal} {ELSEWHERE}"]
            if refusal
            else [f"{layout}: {(MIXTURES if sparse else NOTES)[layout]}" for layout in layouts]
        ),
    ]
    asymmetric = [scheme["weights"] for scheme in stored if not scheme["weights"]["symmetric"]]
    if any(weights.get("block_type") for weights in asymmetric):
        lines += ["", MINIMA]
    elif asymmetric:
        lines += ["", ASYMMETRIC_EXPERTS if sparse else ASYMMETRIC]
    if any(scheme.get("rotation") for scheme in schemes):
        lines += ["", MIXED_INPUTS]
    if sparse:
        lines += [
            "",
            *_experts([layer["experts"] for layer in manifest["layers"] if "experts" in layer]),
        ]
    lines += [
        "",
        "vLLM: written to its published layout, not run. Gaudi: not run.",
        "",
        "Check it with `quantflow verify`; what was done to each tensor stands in "
        "`quantflow.json`.",
        "",
    ]
    return "\n".join(lines)


def harmless(text: str) -> str:
    """A text without the characters that Markdown, HTML and tables would read."""
    return re.sub(r"[^\w./:@+ -]", "_", text)


def _unused(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """The row about tensors that no module has, where there are any."""
    reasons = [
        entry["reason"].removeprefix(UNUSED)
        for entry in tensors
        if entry["reason"].startswith(UNUSED) and entry["action"] == "copied"
    ]
    counts = Counter(reasons)
    listed = "; ".join(f"{count} ({reason})" for reason, count in counts.items())
    return [f"| copied, not used by the model | {listed} |"] if counts else []


def _head(head: Mapping[str, Any] | None) -> str:
    """A sentence about a head that is quantized, after a space; empty where it is not."""
    if head is None:
        return ""
    apart = (
        f", no longer tied to {head['tensor']}"
        if head["tensor"] != f"{head['linear']}.weight"
        else ""
    )
    return (
        f" The head ({head['linear']}) is {head['scheme']['name']} by {head['algorithm']}{apart}."
    )


def _mtp(mtp: Mapping[str, Any] | None) -> str:
    """A sentence about MTP layers that are quantized, after a space; empty where they are not."""
    if mtp is None:
        return ""
    scheme = next(iter(mtp["schemes"].values()))["name"]
    return (
        f" {len(mtp['schemes'])} linears of layers that predict further tokens (MTP) are {scheme} "
        f"by {mtp['algorithm']}."
    )


def _experts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The storage of experts, and the tokens that reached them in calibration, where known."""
    stored = (
        "Each expert is stored as linears of its own, in the source's names; routers are not "
        "quantized."
    )
    tokens = [count for row in rows for count in row["tokens"] or ()]
    if not tokens:
        return [stored]
    short = sum(len({name.rpartition(".")[0] for name in row["short"]}) for row in rows)
    return [
        f"{stored} Calibration tokens per expert in {len(rows)} layers: at least {min(tokens)}, "
        f"median {median(tokens):g}; "
        f"{short} experts were short of tokens."
    ]


def _output_errors(algorithm: str, errors: Mapping[str, Any]) -> list[str]:
    """The row about outputs on the calibration text, where there were any."""
    if not errors:
        return []
    return [
        f"| output error on the calibration text, median of {errors['linears']} linears | "
        f"{algorithm} {errors['median']:.2%}, "
        f"rtn {errors['median_rtn']:.2%}; worst {errors['worst']:.2%} ({errors['worst_linear']}) |"
    ]


def _calibration(measurement: Mapping[str, Any] | None) -> str:
    if measurement is None:
        return "none needed"
    counts = measurement["counts"]
    if not counts["tokens"]:
        return "maxima from Gaudi's toolkit; what text they are of is not known"
    return (
        f"{counts['samples']} sequences, {counts['tokens']} tokens, hash "
        f"`{measurement['calibration']['hash'][:16]}`"
    )
