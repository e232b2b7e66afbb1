"""The model card that export writes into README.md: what the artifact is, where it loads, and where it does not."""

from collections.abc import Mapping
from typing import Any

NOTES = {
    "float-quantized": "Stock transformers with compressed-tensors loads it, and runs it with the formulas used here.",
    "int-quantized": "Stock transformers with compressed-tensors loads it, and runs it with the formulas used here.",
    "pack-quantized": "Stock transformers with compressed-tensors loads it and decompresses the weights.",
}
PROOFS = {
    "canary": "canary, {layers} layers recomputed from this folder",
    "tensors": "tensors, every weight of {layers} layers decoded from this folder and compared",
}
ASYMMETRIC = (
    "It has zero points: compressed-tensors 0.20 does not reload packed zero points plainly; "
    "pass `quantization_config=CompressedTensorsConfig(dequantize=True)`."
)


def model_card(manifest: Mapping[str, Any]) -> str:
    """Return the card of an artifact."""
    recipe, source = manifest["recipe"], manifest["source"]
    resolved, chosen = recipe["resolved"], recipe.get("chosen")
    what = recipe["scheme"] if chosen is None else f"mixed precision of {chosen['bits_per_weight']:.2f} bits per weight"
    schemes = [scheme for scheme in resolved["schemes"].values() if scheme is not None]
    layouts = sorted({scheme["layout"] for scheme in schemes})
    transforms = ", ".join(f"{name} {options}" for item in resolved["transforms"] for name, options in item.items())
    sizes = manifest["ledger"]["bytes"]
    lines = [
        "---",
        f"base_model: {source['name']}",
        "library_name: transformers",
        "tags: [quantflow, compressed-tensors]",
        "---",
        "",
        f"# {source['name']}, {what}",
        "",
        f"{len(schemes)} of {len(resolved['schemes'])} linears quantized: {what} by {resolved['algorithm']}"
        f"{f', after {transforms}' if transforms else ''}.",
        "",
        "| | |",
        "|---|---|",
        f"| source | {source['name']}, revision {source['revision'] or 'not recorded'} |",
        f"| source bytes quantized / changed / copied | {sizes['quantized']} / {sizes['changed']} / {sizes['copied']} |",
        f"| calibration | {_calibration(manifest['measurement'])} |",
        f"| proof | {PROOFS[manifest['proof']['kind']].format(layers=manifest['proof']['layers'])} |",
        f"| digest | `{manifest['digest']}` |",
        "",
        *[f"{layout}: {NOTES[layout]}" for layout in layouts],
    ]
    if any(not scheme["weights"]["symmetric"] for scheme in schemes):
        lines += ["", ASYMMETRIC]
    lines += [
        "",
        "vLLM: written to its published layout, not run. Gaudi: not run.",
        "",
        "Check it with `quantflow verify`; what was done to each tensor stands in `quantflow.json`.",
        "",
    ]
    return "\n".join(lines)


def _calibration(measurement: Mapping[str, Any] | None) -> str:
    if measurement is None:
        return "none needed"
    counts = measurement["counts"]
    if not counts["tokens"]:
        return "maxima from Gaudi's toolkit; what text they are of is not known"
    return f"{counts['samples']} sequences, {counts['tokens']} tokens, hash `{measurement['calibration']['hash'][:16]}`"
