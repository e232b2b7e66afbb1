"""Where a quantized folder runs, and what its headers show to be wrong with it.

No weight is read, so that a folder on the hub needs no download (quantflow/sources/headers.py).

Three faults of published folders stop an engine or make it read rubbish, and show in names alone:

- Layers for speculative decoding are in config.json and not among the tensors.
- A matrix that is not quantized is not named in the list of what is left alone, so that an engine
  that goes by the list allocates quantized parameters for it.
- A linear that is quantized is named there, so that an engine takes its tensors for floats.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantflow.core.scheme import LinearScheme
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import QUANTIZATION, Checkpoint, open_checkpoint
from quantflow.files.patterns import Pattern
from quantflow.formats import DEFAULT, awq, fp8, modelopt
from quantflow.models.graph import Graph
from quantflow.models.open import graph_for
from quantflow.planning.card_splits import SIZES, folded, obstacles_of
from quantflow.planning.sizes import heads_of
from quantflow.runtime.artifact import Artifact, is_artifact, open_folder
from quantflow.runtime.inspection import patterns_of

# last parts of tensors that a quantized linear has beside its weight
_OF_QUANTIZED = frozenset(
    {"weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "qweight", "scales"}
)
_FLOATS = ("F64", "F32", "F16", "BF16")
# keys of config.json with the number of layers for speculative decoding
_NEXT_TOKEN = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# released with such layers, which config.json does not count
_WITH_NEXT_TOKEN = ("qwen3_next",)
# quant_method -> keys of the list of what is left alone, of which the first that is there counts
_LISTS = {
    DEFAULT: ("ignore",),
    awq.METHOD: ("modules_to_not_convert",),
    fp8.METHOD: ("modules_to_not_convert", "ignored_layers"),
    modelopt.METHOD: ("ignore", "exclude_modules"),
}
# embeddings; routers, which engines never quantize
_NO_LINEAR = re.compile(r"embed|wte|wpe|norm|conv|(^|\.)(gate|router|shared_expert_gate)$")
# kinds of weights and inputs -> cards, of vLLM's page on supported hardware (vllm-project/vllm,
# docs/features/quantization/README.md at 0328802); float4 by its page on llm-compressor
_CARDS = {
    ("int", "int"): "NVIDIA from Turing (7.5) to Hopper (9.0), x86 CPUs, TPUs",
    ("int", None): "NVIDIA from Ampere (8.0) on, x86 CPUs",
    ("float8", "float8"): "NVIDIA from Ada (8.9) on, AMD; on Ampere (8.0) with inputs as they are",
    ("float8", None): "NVIDIA from Ampere (8.0) on",
    ("float4", "float4"): "NVIDIA from Blackwell (10.0) on; before it with inputs as they are",
    ("float4", None): "NVIDIA from Ampere (8.0) on",
}


def survey(folder: Path) -> dict[str, Any]:
    """What headers and config.json say of running a model: `runs_on`, `tensor_parallel`, `faults`.

    Args:
        folder: an artifact, a folder that another program quantized, or a model.

    Returns:
        `runs_on` (quantflow, and cards with vLLM, by its documentation), `tensor_parallel` (number
        of cards -> what does not divide, none where all does; None where it is not known) and
        `faults` (sentences).

    Raises:
        InputError: headers and config.json disagree.
    """
    checkpoint = open_checkpoint(folder)
    faults = _next_token(checkpoint) + list_faults(checkpoint)
    quantized = is_artifact(folder) or isinstance(checkpoint.config.get(QUANTIZATION), dict)
    try:
        artifact = open_folder(folder, backend="reference" if quantized else "auto", verify=False)
        graph = graph_for(artifact.config)
    except UnsupportedError as error:
        return {
            "runs_on": {"quantflow": f"no: {error.cause}"},
            "tensor_parallel": None,
            "faults": faults,
        }
    schemes = {name: linear.scheme for name, linear in artifact.linears.items()}
    return {
        "runs_on": {"quantflow": "yes", **_vllm(schemes.values())},
        "tensor_parallel": _splits(artifact, graph, schemes),
        "faults": faults,
    }


def _vllm(schemes: Iterable[LinearScheme]) -> dict[str, str]:
    """The cards that run the schemes with vLLM, by its documentation."""
    found = {}
    for scheme in schemes:
        weights, inputs = scheme.weights, scheme.input
        kinds = [_kind(weights.kind, weights.num_bits)]
        kinds.append("" if inputs is None else _kind(inputs.kind, inputs.num_bits))
        cards = _CARDS.get((kinds[0], kinds[1] or None))
        wide = weights.num_bits == 8 or (inputs is None and weights.num_bits == 4)
        if (weights.kind == "int" and not wide) or scheme.layout.startswith("mxfp8"):
            cards = None
        found[scheme.name] = cards or "none that its documentation names"
    return {f"vllm, {name}": cards for name, cards in found.items()}


def _kind(kind: str, num_bits: int) -> str:
    return kind if kind == "int" else f"float{num_bits}"


def _splits(
    artifact: Artifact, graph: Graph, schemes: Mapping[str, LinearScheme]
) -> dict[str, list[str]] | None:
    """Number of cards -> what does not divide; None where a shape is not known."""
    infos = artifact.checkpoint.infos
    shapes = {name: tuple(linear.shape) for name, linear in artifact.linears.items()}
    for name in graph.linears:
        if name not in shapes and (info := infos.get(f"{name}.weight")) is not None:
            shapes[name] = tuple(info.shape)
    if any(name not in shapes for name in graph.linears):
        return None
    heads, kv_heads = heads_of(artifact.config, graph)
    return {
        str(size): folded(
            obstacles_of(shapes, graph, schemes, heads=heads, kv_heads=kv_heads, size=size)
        )
        for size in SIZES
    }


def _next_token(checkpoint: Checkpoint) -> list[str]:
    """Layers for speculative decoding that config.json counts and no tensor belongs to."""
    config, names = checkpoint.config, checkpoint.tensors
    nested = config.get("text_config")
    for table in (config, nested if isinstance(nested, dict) else {}):
        counts = {key: table.get(key) for key in _NEXT_TOKEN}
        key = next((key for key, n in counts.items() if type(n) is int and n > 0), None)
        if key is None and table.get("model_type") not in _WITH_NEXT_TOKEN:
            continue
        layers = table.get("num_hidden_layers")
        there = re.compile(rf"(^|\.)(mtp\w*|nextn\w*)\.|(^|\.)layers\.{layers}\.")
        if not any(there.search(name) for name in names):
            what = f"config.json: {key} {counts[key]}" if key else f"{table['model_type']} has them"
            return [
                f"layers for speculative decoding (MTP) are missing: {what}, no tensor is of them; "
                "an engine runs without it alone"
            ]
    return []


def list_faults(checkpoint: Checkpoint) -> list[str]:
    """What the list of linears that are left alone gets wrong, by the names of tensors.

    Lists of layouts that name what is quantized, such as GPTQ's, are not looked at.
    """
    table = checkpoint.config.get(QUANTIZATION)
    if not isinstance(table, dict):
        return []
    method = str(table.get("quant_method"))
    keys = next((keys for name, keys in _LISTS.items() if method.startswith(name)), ())
    key = next((key for key in keys if isinstance(table.get(key), list)), None)
    if key is None or not _is_wide(table):
        return []
    try:
        named = _Named([str(entry) for entry in table[key]], inside=method == awq.METHOD)
    except InputError as error:
        return [f"{key}: {error.cause}"]
    owners = [(*name.rpartition(".")[::2], info) for name, info in checkpoint.infos.items()]
    quantized = dict.fromkeys(owner for owner, leaf, _ in owners if leaf in _OF_QUANTIZED)
    left = [
        owner
        for owner, leaf, info in owners
        if leaf == "weight"
        and len(info.shape) == 2
        and info.dtype in _FLOATS
        and owner not in quantized
        and not _NO_LINEAR.search(owner)
    ]
    unnamed = patterns_of(owner for owner in left if not named.has(owner))
    wrong = patterns_of(owner for owner in quantized if named.has(owner))
    return [
        *(
            f"{pattern} ({count}): not quantized and not in {key}; vLLM makes quantized parameters "
            "for it"
            for pattern, count in unnamed.items()
        ),
        *(
            f"{pattern} ({count}): quantized, and {key} names it; vLLM takes it for floats"
            for pattern, count in wrong.items()
        ),
    ]


def _is_wide(table: Mapping[str, Any]) -> bool:
    """Whether every linear is quantized that no list names, not certain ones alone."""
    groups = table.get("config_groups")
    if not isinstance(groups, dict):
        return True
    return any(
        "Linear" in (group.get("targets") or ())
        for group in groups.values()
        if isinstance(group, dict)
    )


class _Named:
    """A list of names and patterns, as engines match it with modules."""

    def __init__(self, entries: list[str], *, inside: bool) -> None:
        """Read the entries.

        Args:
            entries: names, `re:` patterns, names with `*`.
            inside: whether a name is meant wherever it stands within a module's.

        Raises:
            InputError: a pattern is no regular expression.
        """
        self._plain = [entry for entry in entries if not entry.startswith("re:")]
        self._patterns = [Pattern(entry[3:]) for entry in entries if entry.startswith("re:")]
        self._inside = inside

    def has(self, owner: str) -> bool:
        """Whether a linear is meant, with the beginning of its name or without."""
        return self._means(owner) or self._means(owner.removeprefix("model."))

    def _means(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._patterns) or any(
            name == entry
            or name.startswith(f"{entry}.")
            or name.endswith(f".{entry}")
            or ("*" in entry and fnmatchcase(name, entry))
            or (self._inside and entry in name)
            for entry in self._plain
        )
