"""llama.cpp's mixtures: which type each linear of a layer has in a file of a kind such as Q4_K_M.

Values, the way back from the gate and the attention's output count more than their share of the
bytes, so some layers have them in a larger type: for `most` the first and the last eighth of the
layers, and every third between.

| | most linears | attn_v | ffn_down | attn_output | attn_qkv |
|---|---|---|---|---|---|
| Q3_K_M | Q3_K | Q5_K in the first two layers, then Q4_K | Q5_K in the first sixteenth, then Q4_K | Q4_K | Q4_K |
| Q4_K_M | Q4_K | Q6_K in some | Q6_K in some | Q4_K | Q5_K |
| Q5_K_M | Q5_K | Q6_K in some | Q6_K in some | Q5_K | Q6_K |

llama.cpp gives two of its models other types on top (70 B Llama's values, Falcon's way back); those
are not made here. Source: github.com/ggml-org/llama.cpp, `src/llama-quant.cpp`, the types of a
tensor by its category.
"""

from quantflow.core.scheme import MIXTURES
from quantflow.formats.llama_cpp.tensors import ARCHITECTURES


def type_of(mixture: str, module: str, *, family: str, layer: int, layers: int) -> str:
    """Return the type of a linear.

    Args:
        mixture: a key of MIXTURES.
        module: its name inside a layer, as the checkpoint has it.
        family: transformers' model_type; in one that llama.cpp's names are not known of, every
            linear is like most.
        layer: its number.
        layers: how many there are.
    """
    usual = MIXTURES[mixture]
    architecture = ARCHITECTURES.get(family)
    part = architecture.inside.get(module, ("", ""))[0] if architecture is not None else ""
    if usual == "Q3_K":
        first = layer < {"attn_v": 2, "ffn_down": layers // 16}.get(part, 0)
        return (
            "Q5_K"
            if first
            else "Q4_K"
            if part in ("attn_v", "ffn_down", "attn_output", "attn_qkv")
            else usual
        )
    if part == "attn_qkv":
        return {"Q4_K": "Q5_K", "Q5_K": "Q6_K"}[usual]
    return "Q6_K" if part in ("attn_v", "ffn_down") and _more(layer, layers) else usual


def _more(layer: int, layers: int) -> bool:
    """Return whether a layer is one of those that have more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
