"""llama.cpp's mixtures: the type of each linear of a layer in a file of a kind such as Q4_K_M.

Values, down projections and attention's output count more than their share of the bytes, so some
layers have them in a larger type. "Some" in the table are the first and the last eighth of the
layers, and every third between.

| | most linears | attn_v | ffn_down | attn_output | attn_qkv |
|---|---|---|---|---|---|
| Q3_K_M | Q3_K | Q4_K, first Q5_K | Q4_K, first Q5_K | Q4_K | Q4_K |
| Q4_K_M | Q4_K | Q6_K in some | Q6_K in some | Q4_K | Q5_K |
| Q5_K_M | Q5_K | Q6_K in some | Q6_K in some | Q5_K | Q6_K |

"First" are two layers for attn_v, and a sixteenth of the layers for ffn_down.

Down projections of experts and of shared experts are ffn_down too. llama.cpp gives three of its
models further types (values of the Llama of 70 B, Falcon's down projections, attention beside 8
experts); those are not made here. Source: github.com/ggml-org/llama.cpp,
`src/llama-quant.cpp`, the types of a tensor by its category.
"""

from quantflow.core.scheme import MIXTURES
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS
from quantflow.formats.llama_cpp.tensors import ARCHITECTURES


def type_of(mixture: str, module: str, *, family: str, layer: int, layers: int) -> str:
    """The type of a linear.

    Args:
        mixture: a key of MIXTURES.
        module: name of the linear inside a layer, as the checkpoint has it.
        family: transformers' model_type; in a family without names of llama.cpp's, every linear has
            the type of most.
        layer: number of the layer.
        layers: number of layers.
    """
    usual = MIXTURES[mixture]
    part = _part(module, family)
    if usual == "Q3_K":
        if layer < {"attn_v": 2, "ffn_down": layers // 16}.get(part, 0):
            return "Q5_K"
        return "Q4_K" if part in ("attn_v", "ffn_down", "attn_output", "attn_qkv") else usual
    if part == "attn_qkv":
        return {"Q4_K": "Q5_K", "Q5_K": "Q6_K"}[usual]
    more = part in ("attn_v", "ffn_down") and _has_more_bits(layer, layers)
    return "Q6_K" if more else usual


def _part(module: str, family: str) -> str:
    """llama.cpp's name of a linear, "ffn_down" for that of an expert; empty where it has none."""
    design = MIXTURE_DESIGNS.get(family)
    if design is None:
        architecture = ARCHITECTURES.get(family)
        return architecture.inside.get(module, ("", ""))[0] if architecture is not None else ""
    experts = f"{design.block}.experts."
    names = (
        design.experts.get(module.rpartition(".")[2])
        if module.startswith(experts)
        else {**design.attention, **design.dense, **design.sparse}.get(module)
    )
    name = names[0] if names is not None else ""
    return "ffn_down" if name.startswith("ffn_down") else name


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or a third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
