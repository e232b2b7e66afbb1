"""Mixtures of experts between our statistics and Gaudi's nodes.

A Gaudi runs all experts of a layer in one operator. The toolkit sees its input once, and one
maximum per expert of what lies between the expert's linears, as outputs of the operator:

| ours                                | optimum-habana          | vLLM                          |
|-------------------------------------|-------------------------|-------------------------------|
| X.experts.N.gate_proj, .up_proj     | the same names          | X.experts.moe_op.w13_list.n   |
| X.experts.N.down_proj               | the same name           | X.experts.moe_op.w2_list.n    |
| inputs of all gate_proj and up_proj | X input 0               | X.experts.moe_op input 0      |
| outputs of all down_proj            | X output 0              | X.experts.moe_op output 0     |
| input of expert N's down_proj       | X output 1 + N          | X.experts.moe_op output 1 + n |

N counts the experts of the model, n those of a card. vLLM's newest releases put the experts into a
module of their own, X.experts.routed_experts.moe_op; files have both names. The operator of
optimum-habana is patched in Mixtral (X is `block_sparse_moe`) and DeepSeek-V3 (`mlp`) alone; other
mixtures keep their experts in bfloat16 there.

The toolkit sees nothing flow through a linear of an expert, so its files have inputs of 0 there.
Ours have what was measured; no runtime reads either. Where weights add up to at most 1, the largest
output of an expert bounds the operator's, of which a scale is made that multiplies nothing.

Source: vllm-gaudi's `extension/ops.py`, optimum-habana's modelling files, and
neural_compressor.torch.algorithms.fp8_quant, `_quant_common/helper_modules.py`; names only.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.formats.gaudi.triple import Node
from quantflow.models.family import FAMILIES, Mixture

Experts = Mapping[int, Mapping[str, Node]]  # number -> role -> linear

ROUTERS = r"\.(gate|router|shared_expert_gate)$"  # never quantized, so the toolkit must not look
LINEARS = r"\.experts\.\d+\."
PATCHED_FAMILIES = ("mixtral", "deepseek_v3")  # whose operator optimum-habana's toolkit patches
CLASSES = {
    "block_sparse_moe": "GaudiMixtralSparseMoeBlock",
    "mlp": "GaudiDeepseekV3MoE",
    "moe_op": "VllmMixtureOfExpertsOp",
}
_GATE, _UP, _DOWN = "gate", "up", "down"
_OPERATOR = "moe_op"
_NEWEST = "routed_experts"
_MIXTURES = (Mixture(), *(row.mixture for row in FAMILIES.values() if row.mixture is not None))
_ROLES = {
    linear: role
    for mixture in _MIXTURES
    for linear, role in zip(mixture.linears, (_GATE, _UP, _DOWN), strict=True)
}
_EXPERT = re.compile(
    rf"(?P<experts>.+\.experts)\.(?P<number>0|[1-9]\d*)\.(?P<linear>{'|'.join(_ROLES)})"
)
_LISTED = re.compile(r"(?P<operator>.+)\.(?P<list>w13_list|w2_list)\.(?P<number>0|[1-9]\d*)")


def mixtures(nodes: Mapping[str, Node]) -> dict[str, dict[int, dict[str, Node]]]:
    """`X.experts` -> number -> role -> the linear, of nodes in our names."""
    found: dict[str, dict[int, dict[str, Node]]] = {}
    for name, node in nodes.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            experts = found.setdefault(match["experts"], {})
            experts.setdefault(int(match["number"]), {})[_ROLES[match["linear"]]] = node
    return found


def untold(nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """`X.experts.N` of the experts that saw no token: the input of their last linear is 0."""
    return tuple(
        f"{name}.{number}"
        for name, experts in mixtures(nodes).items()
        for number, linears in sorted(experts.items())
        if _DOWN in linears and not linears[_DOWN].inputs[0].any()
    )


def totals(ranks: Iterable[Mapping[str, Node]]) -> dict[str, int]:
    """`X.experts` -> number of experts over all ranks."""
    counted: dict[str, int] = {}
    for nodes in ranks:
        for name, experts in mixtures(nodes).items():
            counted[name] = max(counted.get(name, 0), max(experts) + 1)
    return counted


def for_optimum_habana(
    nodes: Mapping[str, Node], *, patched: bool, counts: Mapping[str, int]
) -> dict[str, Node]:
    """Nodes with the operators of optimum-habana's model; without experts where it has none.

    Args:
        nodes: nodes in our names.
        patched: whether the toolkit patches the family's operator.
        counts: `X.experts` -> number of experts of the model; of those of other cards the maximum
            is 0, as in the toolkit's files.
    """
    found = mixtures(nodes)
    if not patched:
        return {name: node for name, node in nodes.items() if _EXPERT.fullmatch(name) is None}
    operators = {
        name.removesuffix(".experts"): _operator(name, experts, range(counts[name]))
        for name, experts in found.items()
    }
    return {**nodes, **operators}


def for_vllm(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Nodes with vLLM's operators and the lists of their experts' weights."""
    renamed = {name: node for name, node in nodes.items() if _EXPERT.fullmatch(name) is None}
    for name, experts in mixtures(nodes).items():
        numbers = sorted(experts)
        for operator in (f"{name}.{_OPERATOR}", f"{name}.{_NEWEST}.{_OPERATOR}"):
            renamed[operator] = _operator(name, experts, numbers)
            for local, number in enumerate(numbers):
                linears = experts[number]
                entry = [linears[role] for role in (_GATE, _UP) if role in linears]
                renamed[f"{operator}.w13_list.{local}"] = _largest(entry)
                renamed[f"{operator}.w2_list.{local}"] = replace(linears[_DOWN], outputs=())
    return renamed


def _operator(name: str, experts: Experts, numbers: Iterable[int]) -> Node:
    """The operator's node, with an output for each expert of `numbers`.

    An expert that saw no token has the largest maximum of its layer: the toolkit would make of 0
    the smallest of scales, or none.

    Raises:
        StatisticsError: an expert without its last linear, or a layer whose experts saw nothing.
    """
    for number, linears in experts.items():
        if not {_UP, _DOWN} <= linears.keys():
            raise StatisticsError(
                f"{name}.{number}: {', '.join(sorted(linears))} measured, an expert has up and "
                "down linears",
                "measure again",
            )
    entries = [linears[role] for linears in experts.values() for role in linears if role != _DOWN]
    inside = {number: linears[_DOWN].inputs[0] for number, linears in experts.items()}
    widest = _maximum(inside.values())
    if not widest.any():
        raise StatisticsError(f"{name}: no expert saw a token", "measure with more text")
    seen = {number: value if value.any() else widest for number, value in inside.items()}
    outputs = [output for linears in experts.values() for output in linears[_DOWN].outputs[:1]]
    return Node(
        inputs=(_maximum(node.inputs[0] for node in entries),),
        outputs=(
            _maximum(outputs or [widest]),
            *(seen.get(number, torch.zeros(1, 1)) for number in numbers),
        ),
    )


def _largest(parts: Iterable[Node]) -> Node:
    """One node in the place of linears that share an input, without outputs."""
    listed = list(parts)
    weights = [node.weight for node in listed if node.weight is not None]
    return Node(
        inputs=(_maximum(node.inputs[0] for node in listed),),
        weight=_maximum(weights) if weights else None,
    )


def _maximum(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).amax(dim=0)


def is_operator(node: Node) -> bool:
    """Whether a node is a mixture's operator, by its one input and its outputs, two or more."""
    return node.weight is None and len(node.inputs) == 1 and len(node.outputs) > 1


def listed(name: str) -> tuple[str, str, int] | None:
    """Operator, list and number in the name of an expert's weight in vLLM; None for other names."""
    match = _LISTED.fullmatch(name)
    return None if match is None else (match["operator"], match["list"], int(match["number"]))


def with_number(name: str, number: int) -> str:
    """The name of an expert's weight in vLLM with another number."""
    return f"{name.rpartition('.')[0]}.{number}"


def inside_operator(name: str, nodes: Collection[str]) -> str | None:
    """The operator among `nodes` that runs the expert whose linear is `name`; None without one."""
    if (entry := listed(name)) is not None:
        return entry[0] if entry[0] in nodes else None
    match = _EXPERT.fullmatch(name)
    block = None if match is None else match["experts"].removesuffix(".experts")
    return block if block in nodes else None


def expert_inputs(name: str, operator: Node) -> Tensor | None:
    """The maximum of the input of an expert's linear, which its operator saw; None without one."""
    entry, match = listed(name), _EXPERT.fullmatch(name)
    if entry is not None:
        role, number = _DOWN if entry[1] == "w2_list" else _UP, entry[2]
    elif match is not None:
        role, number = _ROLES[match["linear"]], int(match["number"])
    else:
        return None
    if role != _DOWN:
        return operator.inputs[0]
    return operator.outputs[1 + number] if 1 + number < len(operator.outputs) else None


def source_names(name: str, known: Collection[str] = ()) -> tuple[str, ...]:
    """Our names of the linears whose weights lie in an expert's weight of vLLM's.

    Args:
        name: its name in vLLM; any other is returned as it is.
        known: names of the model's linears, which say how its experts' are called. Without them the
            name of the block does.
    """
    entry = listed(name)
    if entry is None:
        return (name,)
    operator, kind, number = entry
    experts = operator.removesuffix(f".{_OPERATOR}").removesuffix(f".{_NEWEST}")
    block = experts.removesuffix(".experts").rpartition(".")[2]

    def linears(mixture: Mixture) -> tuple[str, ...]:
        gate, up, down = (f"{experts}.{number}.{leaf}" for leaf in mixture.linears)
        return (down,) if kind == "w2_list" else (gate, up)

    of_model = [mixture for mixture in _MIXTURES if set(linears(mixture)) & set(known)]
    of_block = [mixture for mixture in _MIXTURES if mixture.block == block]
    return linears((*of_model, *of_block, Mixture())[0])
