"""The model card that export writes into README.md: what the artifact is, where it loads, and where it does not."""

from collections.abc import Mapping, Sequence
from statistics import median
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
    resolved = recipe["resolved"]
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
        f"# {source['name']}, {recipe['scheme']}",
        "",
        f"{len(schemes)} of {len(resolved['schemes'])} linears quantized: {recipe['scheme']} by {resolved['algorithm']}"
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
    if experts := [layer["experts"] for layer in manifest["layers"] if "experts" in layer]:
        lines += ["", _experts(experts)]
    lines += [
        "",
        "vLLM: written to its published layout, not run. Gaudi: not run.",
        "",
        "Check it with `quantflow verify`; what was done to each tensor stands in `quantflow.json`.",
        "",
    ]
    return "\n".join(lines)


def _experts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what calibration reached of the experts of each layer, and who reads them."""
    tokens = [count for row in rows for count in row["tokens"] or ()]
    short = sum(len({name.rpartition(".")[0] for name in row["short"]}) for row in rows)
    reached = (
        f"calibration tokens per expert: at least {min(tokens)}, median {median(tokens):g}" if tokens else "not calibrated"
    )
    return (
        f"Experts in {len(rows)} layers, {reached}; {short} were short of tokens. Routers are not quantized. "
        "An expert is stored as its own linears, which is what vLLM's layout for compressed-tensors names."
    )


def _calibration(measurement: Mapping[str, Any] | None) -> str:
    if measurement is None:
        return "none needed"
    counts = measurement["counts"]
    if not counts["tokens"]:
        return "maxima from Gaudi's toolkit; what text they are of is not known"
    return f"{counts['samples']} sequences, {counts['tokens']} tokens, hash `{measurement['calibration']['hash'][:16]}`"
