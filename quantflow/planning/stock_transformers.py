"""Artifacts in stock transformers: what its code asks of one beyond compressed-tensors."""

from collections.abc import Mapping
from typing import Any

from quantflow.core.scheme import LinearScheme, with_group_size
from quantflow.models.graph import Graph

# Stock transformers knows the linears of these models under no names of their own: it would fill
# their weights with random numbers, and only warn. It checks that this key is a number, and prints
# what stands there instead. vLLM does not read it.
REFUSED = "global_compression_ratio"
CONV1D = "Conv1D weights: run with quantflow, see README"  # 50 characters are printed
EXPERTS = "split experts: run with quantflow, see README"
PACKED = "packed weights: run with quantflow, see README"
# Types whose code in transformers initializes weights by their names once a checkpoint is read. A
# packed linear has no tensor `weight`, and loading fails; dequantized as it loads, it has one.
# benchmarks/families.py finds them.
INITIALIZED = frozenset(
    {
        *("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "modernbert-decoder"),
        *("nanochat", "recurrent_gemma", "xlstm"),
    }
)
# Types whose code in transformers makes modules of its own for the experts of a quantized model:
# whatever they hold is left as it was in memory.
OTHER_EXPERTS = frozenset({"llama4", "llama4_text"})


def for_transformers(graph: Graph, schemes: Mapping[str, LinearScheme]) -> dict[str, Any]:
    """Keys of quantization_config for stock transformers, which else fails or reads other weights.

    Args:
        graph: linears of the model.
        schemes: quantized linear -> its scheme.
    """
    whole = {part.name: len(one.parts) for one in graph.split.values() for part in one.parts}
    parts = {whole[f"{name}.weight"] for name in schemes if f"{name}.weight" in whole}
    if graph.family.model_type in OTHER_EXPERTS:
        return {REFUSED: EXPERTS}
    if parts:
        return {REFUSED: CONV1D if parts == {1} else EXPERTS}
    kinds = set(schemes.values())
    packed = any(kind.layout.endswith("pack-quantized") for kind in kinds)
    if not packed or graph.family.model_type not in INITIALIZED:
        return {}
    # it dequantizes all linears by one scheme, and rounds no inputs then
    alone = len(kinds) == 1 and all(
        kind.layout == "pack-quantized" and kind.input is None for kind in kinds
    )
    return {"dequantize": True} if alone else {REFUSED: PACKED}


def in_one_size(schemes: Mapping[str, LinearScheme], graph: Graph) -> Mapping[str, LinearScheme]:
    """Schemes with groups of one size, where stock transformers could not load several.

    It dequantizes all linears of some types by one scheme. The smallest of their sizes divides the
    inputs of each, since the sizes that presets fall to divide each other.

    Args:
        schemes: quantized linear -> its scheme, of the largest size that fits its inputs.
        graph: linears of the model.
    """
    if graph.family.model_type not in INITIALIZED or not all(map(_in_groups, schemes.values())):
        return schemes
    least = min((scheme.weights.group_size or 0 for scheme in schemes.values()), default=0)
    narrower = {name: with_group_size(scheme, least) for name, scheme in schemes.items()}
    return narrower if len(set(narrower.values())) == 1 else schemes


def _in_groups(scheme: LinearScheme) -> bool:
    """Whether it is packed integers in groups of any size, whose inputs are left alone."""
    return (
        scheme.layout == "pack-quantized"
        and scheme.weights.granularity == "per_group"
        and scheme.weights.block is None
        and scheme.input is None
    )
