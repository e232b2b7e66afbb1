"""llama.cpp's mixtures: the type of each linear of a layer in a file of a kind such as Q4_K_M.

Values, down projections and attention's output count more than their share of the bytes, so some
layers have them in a larger type. "Some" in the table are the first and the last eighth of the
layers, and every third between. A fused attn_qkv has the type of values.

| | most linears | attn_v | ffn_down | attn_output |
|---|---|---|---|---|
| Q2_K_S | Q2_K | Q4_K where queries share | Q4_K in the first eighth | |
| Q3_K_S | Q3_K | | | |
| Q3_K_M | Q3_K | Q4_K, in the first two layers Q5_K | Q4_K, in the first sixteenth Q5_K | Q4_K |
| Q3_K_L | Q3_K | Q5_K | Q5_K | Q5_K |
| Q4_K_S | Q4_K | Q5_K in the first four layers | Q5_K in the first eighth | |
| Q4_K_M | Q4_K | Q6_K in some | Q6_K in some | |
| Q5_K_S | Q5_K | | | |
| Q5_K_M | Q5_K | Q6_K in some | Q6_K in some | |
| IQ4_NL, IQ4_XS | of that name | Q5_K where queries share | Q5_K in the first eighth, unweighed | |
| IQ3_M | IQ3_S | Q4_K | Q4_K in the first eighth | Q4_K |
| IQ3_S, IQ3_XS | IQ3_S | Q4_K where queries share | | |
| IQ3_XXS | IQ3_XXS | Q4_K where queries share | | IQ3_S |
| IQ2_M | IQ2_S | IQ3_S, Q4_K where queries share | IQ3_S in the first eighth | IQ3_S |
| IQ2_XS, IQ2_XXS | of that name | Q2_K, Q4_K where queries share | Q2_K in the first eighth | |

Queries and keys are smaller in two: IQ3_XXS in IQ3_XS, IQ2_S in IQ3_XXS. IQ3_XS has gate and up
projections in IQ3_XXS too, but for the first and the last eighth of the layers.

Queries share where four or more have a kv head together. "Unweighed" is rounding that does not know
how much each input matters, which llama.cpp calls to be without an importance matrix.

Down projections of experts and of shared experts are ffn_down too, and their gate and up
projections likewise. Two kinds of models have more: a Llama or Qwen2 of 80 layers with shared kv
heads has values of Q3_K or Q4_K in Q5_K, and beside 8 experts values and keys are Q8_0, attention's
output is Q5_K in most mixtures, and some down projections of IQ3_M are Q4_K. The mixtures of IQ2
have their values in Q4_K beside 4 experts or more, their keys beside 8, and nothing for 80 layers.
Source:
github.com/ggml-org/llama.cpp, `src/llama-quant.cpp`, the types of a tensor by its category.
"""

from dataclasses import dataclass

from quantflow.core.scheme import MIXTURES
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS
from quantflow.formats.llama_cpp.tensors import ARCHITECTURES

_VALUES = ("attn_v", "attn_qkv")
_FEED_FORWARD = ("ffn_down", "ffn_gate", "ffn_up")
_SHARING = 4  # queries of a kv head from which on its values count more
_MANY = 4  # experts from which on the values of IQ2's mixtures count more
_OF_IQ2 = ("IQ2_XXS", "IQ2_XS", "IQ2_M")
# mixtures with another type of attention's output, or of queries and keys
_OUTPUT = {
    "Q3_K_M": "Q4_K",
    "Q3_K_L": "Q5_K",
    "IQ3_XXS": "IQ3_S",
    "IQ3_M": "Q4_K",
    "IQ2_M": "IQ3_S",
}
_QUERIES_AND_KEYS = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
_LARGE = 80  # layers of the models of 70 B
# mixtures that leave attention's output as it is beside 8 experts
_PLAIN_OUTPUT = ("Q2_K_S", "Q3_K_L", "Q5_K_S", "Q5_K_M")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A layer among those of its model, and what a type depends on beside it.

    Attributes:
        layer: number of the layer.
        layers: number of layers.
        repeats: query heads that share a kv head.
        experts: experts of a layer; 0 in a dense model.
        weighed: rounding knows how much each input matters.
    """

    layer: int
    layers: int
    repeats: int = 1
    experts: int = 0
    weighed: bool = True

    def in_first(self, part: int) -> bool:
        """Whether the layer is in the first of so many parts."""
        return self.layer < self.layers // part

    @property
    def between_eighths(self) -> bool:
        """Whether the layer is neither in the first nor in the last eighth."""
        return self.layers // 8 <= self.layer < 7 * self.layers // 8

    @property
    def some(self) -> bool:
        """Whether the layer is in the first or last eighth, or a third one between."""
        eighth = self.layers // 8
        return (
            self.in_first(8) or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2
        )


def type_of(mixture: str, module: str, *, family: str, position: Position) -> str:
    """The type of a linear.

    Args:
        mixture: a key of MIXTURES.
        module: name of the linear inside a layer, as the checkpoint has it.
        family: transformers' model_type; in a family without names of llama.cpp's, every linear has
            the type of most.
        position: the linear's layer.
    """
    part = _part(module, family)
    if mixture in _OF_IQ2:
        return _in_iq2(mixture, part, position)
    if position.experts == 8:
        if part in (*_VALUES, "attn_k"):
            return "Q8_0"
        if part == "attn_output":
            return MIXTURES[mixture] if mixture in _PLAIN_OUTPUT else "Q5_K"
    if part in _VALUES:
        kind = _of_values(mixture, position)
        return "Q5_K" if kind in ("Q3_K", "Q4_K") and _is_large(family, position) else kind
    if part == "ffn_down":
        return _of_down(mixture, position)
    if part == "attn_output":
        return _OUTPUT.get(mixture, MIXTURES[mixture])
    if part in ("attn_q", "attn_k"):
        return _QUERIES_AND_KEYS.get(mixture, MIXTURES[mixture])
    if mixture == "IQ3_XS" and part in ("ffn_gate", "ffn_up") and position.between_eighths:
        return "IQ3_XXS"
    return MIXTURES[mixture]


def _in_iq2(mixture: str, part: str, position: Position) -> str:
    """The type of a linear in a mixture of IQ2."""
    larger = "IQ3_S" if mixture == "IQ2_M" else "Q2_K"
    if part in _VALUES:
        return "Q4_K" if position.repeats >= _SHARING or position.experts >= _MANY else larger
    if part == "attn_k" and position.experts == 8:
        return "Q4_K"
    if part == "ffn_down" and position.in_first(8):
        return larger
    if part == "attn_output":
        return "Q5_K" if position.experts == 8 else _OUTPUT.get(mixture, MIXTURES[mixture])
    return MIXTURES[mixture]


def _of_values(mixture: str, position: Position) -> str:
    """The type of the linear of values."""
    match mixture:
        case "Q2_K_S" if position.repeats >= _SHARING:
            return "Q4_K"
        case "IQ4_NL" | "IQ4_XS" if position.repeats >= _SHARING:
            return "Q5_K"
        case "IQ3_XXS" | "IQ3_XS" | "IQ3_S" if position.repeats >= _SHARING:
            return "Q4_K"
        case "IQ3_M":
            return "Q4_K"
        case "Q3_K_M":
            return "Q5_K" if position.layer < 2 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_S" if position.layer < 4:
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if position.some:
            return "Q6_K"
    return MIXTURES[mixture]


def _of_down(mixture: str, position: Position) -> str:
    """The type of a down projection."""
    match mixture:
        case "Q2_K_S" if position.in_first(8):
            return "Q4_K"
        case "IQ4_NL" | "IQ4_XS" if position.in_first(8) and not position.weighed:
            return "Q5_K"
        case "IQ3_M" if position.in_first(8) or (position.experts == 8 and position.some):
            return "Q4_K"
        case "Q3_K_M":
            return "Q5_K" if position.in_first(16) else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_S" if position.in_first(8):
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if position.some:
            return "Q6_K"
    return MIXTURES[mixture]


def _is_large(family: str, position: Position) -> bool:
    """Whether llama.cpp takes a model for one of 70 B, whose values are few and count more."""
    architecture = ARCHITECTURES.get(family)
    known = architecture is not None and architecture.name in ("llama", "qwen2")
    return known and position.layers == _LARGE and position.repeats > 1


def _part(module: str, family: str) -> str:
    """llama.cpp's name of a linear, that of a dense layer for an expert's; empty without one."""
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
    return next((part for part in _FEED_FORWARD if name.startswith(part)), name)
