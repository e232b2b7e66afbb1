"""Between our statistics and Gaudi's nodes: names, attention's inputs, and what scales are made of.

| ours                         | optimum-habana, TGI                    | vLLM                     |
|------------------------------|----------------------------------------|--------------------------|
| A.q_proj, A.k_proj, A.v_proj | the same names                         | A.qkv_proj               |
| M.gate_proj, M.up_proj       | the same names                         | M.gate_up_proj           |
| A (k_cache)                  | A.k_cache input 0, A.matmul_qk input 1 | A.attn.impl.k_cache,     |
|                              |                                        | A.attn.impl.matmul_qk    |
| A (v_cache)                  | A.v_cache input 0, A.matmul_av input 1 | A.attn.impl.v_cache,     |
|                              |                                        | A.attn.impl.matmul_av    |
| A (query)                    | A.matmul_qk input 0                    | A.attn.impl.matmul_qk    |

The first input of matmul_av are probabilities. Their maximum is 1, exactly: the first token of a
sequence attends to itself alone. The second inputs of both products get the maxima of the caches,
so that no value is rescaled on its way out of a cache (the toolkit's postprocessing does the same).

Source: optimum-habana's modelling files and unify scripts, vllm-gaudi's attention layer; names
only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.formats.gaudi.triple import Node
from quantflow.observers.amax import AMAX
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.observers.keys import Key, by_site

LINEAR, MATMUL, CACHE = "Linear", "Matmul", "KVCache"  # classes in optimum-habana's models
SOFTMAX, ATTENTION, BLOCKS = "Softmax", "ModuleFusedSDPA", "B2BMatmul"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PART_OF = {part: whole for whole, parts in _FUSED.items() for part in parts}
ROW_PARALLEL = (
    "o_proj",
    "down_proj",
    "dense",
    "dense_4h_to_h",
    "out_proj",
    "fc_out",
    "fc2",
    "w2",
)  # their products are added up over cards
_INSIDE_VLLM = ".attn.impl"
_CACHES = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}
FUSED_ATTENTION = "fused_scaled_dot_product_attention"
_QUERIES_ALONE = {"query"}
_TYPES = {
    **dict.fromkeys(_CACHES, MATMUL),
    **dict.fromkeys(_CACHES.values(), CACHE),
    "softmax": SOFTMAX,
    FUSED_ATTENTION: ATTENTION,
    **dict.fromkeys(("batch2block_matmul", "block2batch_matmul"), BLOCKS),
}
# (number of inputs, of outputs) of a module without weights -> its class. Other modules with one or
# two inputs have outputs.
_BY_COUNTS = {(1, 0): CACHE, (2, 0): MATMUL, (3, 2): ATTENTION}


def nodes_from(statistics: Mapping[str, Tensor]) -> dict[str, Node]:
    """Nodes of optimum-habana's model from our statistics.

    Linears have the maxima of their outputs too. An attention module whose keys and values were
    not measured is left out: nothing is known of the second inputs of its products.

    Args:
        statistics: `<source name>|<site>|amax` -> float32 []; other keys are not read.

    Raises:
        StatisticsError: a linear without the amax of its input or weight.
    """
    nodes: dict[str, Node] = {}
    sites: dict[str, dict[str, Tensor]] = {}
    for (name, site), by_statistic in by_site(statistics).items():
        if AMAX.name in by_statistic:
            sites.setdefault(name, {})[site] = by_statistic[AMAX.name].reshape(1, 1)
    for name, seen in sites.items():
        if "k_cache" in seen or "v_cache" in seen:
            nodes |= _attention(name, seen)
            continue
        if seen.keys() == _QUERIES_ALONE:
            continue
        missing = [site for site in ("input", "weight") if site not in seen]
        if missing:
            raise StatisticsError(
                f"{name}: the measurement has no amax of its {missing[0]}",
                "measure with --stats amax",
            )
        outputs = (seen["output"],) if "output" in seen else ()
        nodes[name] = Node(inputs=(seen["input"],), outputs=outputs, weight=seen["weight"])
    return nodes


def without_cache(statistics: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The attention modules of whose inputs queries alone were measured."""
    sites: dict[str, set[str]] = {}
    for name, site in by_site(statistics):
        sites.setdefault(name, set()).add(site)
    return tuple(name for name, seen in sites.items() if seen == _QUERIES_ALONE)


def _attention(name: str, seen: Mapping[str, Tensor]) -> dict[str, Node]:
    """Caches of an attention module, and its two products where their inputs are known."""
    nodes = {
        f"{name}.{site}": Node(inputs=(seen[site],))
        for site in ("k_cache", "v_cache")
        if site in seen
    }
    if "v_cache" in seen:
        nodes[f"{name}.matmul_av"] = Node(inputs=(torch.ones(1, 1), seen["v_cache"]))
    if "query" in seen and "k_cache" in seen:
        nodes[f"{name}.matmul_qk"] = Node(inputs=(seen["query"], seen["k_cache"]))
    return nodes


def statistics_from(nodes: Mapping[str, Node]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """`<source name>|<site>|amax` of known nodes, and the names of the other nodes.

    Channels have `channel_amax` [C] as well. A linear that vLLM runs fused gives each of its parts
    the one input; the maximum of its weights belongs to none of them.
    """
    statistics: dict[str, Tensor] = {}
    others = []
    for node, content in sorted(nodes.items()):
        owner, _, leaf = node.rpartition(".")
        owner = owner.removesuffix(_INSIDE_VLLM)
        if leaf in ("k_cache", "v_cache") and content.inputs:
            statistics |= _maxima(owner, leaf, content.inputs[0])
        elif leaf == "matmul_qk" and content.inputs:
            statistics |= _maxima(owner, "query", content.inputs[0])
        elif leaf == "matmul_av":
            continue
        elif content.weight is None or len(content.inputs) != 1:
            others.append(node)
        else:
            for part in _FUSED.get(leaf, (leaf,)):
                statistics |= _maxima(
                    f"{owner}.{part}" if owner else part, "input", content.inputs[0]
                )
            if leaf not in _FUSED:
                statistics |= _maxima(node, "weight", content.weight)
                statistics |= _maxima(node, "output", content.outputs[0]) if content.outputs else {}
    return statistics, tuple(others)


def _maxima(name: str, site: str, value: Tensor) -> dict[str, Tensor]:
    maxima = {str(Key(name, site, AMAX.name)): value.max()}
    if len(value) > 1 and site == "input":
        maxima[str(Key(name, site, CHANNEL_AMAX.name))] = value.flatten()
    return maxima


def postprocess(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes with the caches' maxima as the second inputs of attention's two products.

    Raises:
        StatisticsError: a product has fewer than two inputs.
    """
    completed = dict(nodes)
    for name, node in nodes.items():
        owner, _, leaf = name.rpartition(".")
        cache = nodes.get(f"{owner}.{_CACHES[leaf]}") if leaf in _CACHES else None
        if cache is None or not cache.inputs:
            continue
        if len(node.inputs) < 2:
            raise StatisticsError(
                f"{name}: {len(node.inputs)} inputs, a product has two", "measure again"
            )
        completed[name] = replace(node, inputs=(node.inputs[0], cache.inputs[0], *node.inputs[2:]))
    return completed


def without_outputs(nodes: Mapping[str, Node], *, but: Iterable[str] = ()) -> dict[str, Node]:
    """The nodes of a measurement that excludes outputs.

    Args:
        nodes: the measured nodes.
        but: last parts of the names of nodes that keep their outputs.
    """
    kept = tuple(but)
    return {
        name: node if name.rpartition(".")[2] in kept else replace(node, outputs=())
        for name, node in nodes.items()
    }


def for_vllm(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes under the names of vLLM's model.

    vLLM runs q, k and v as one linear, and gate and up as another.
    """
    renamed: dict[str, Node] = {}
    for name, node in nodes.items():
        owner, _, leaf = name.rpartition(".")
        if leaf in (*_CACHES, *_CACHES.values()):
            renamed[f"{owner}{_INSIDE_VLLM}.{leaf}"] = node
        elif leaf in _PART_OF:
            whole = f"{owner}.{_PART_OF[leaf]}"
            renamed[whole] = _larger(renamed[whole], node) if whole in renamed else node
        elif leaf in ROW_PARALLEL and node.outputs:  # before and after the sum over cards
            renamed[name] = replace(node, outputs=(node.outputs[0], node.outputs[0]))
        else:
            renamed[name] = node
    return renamed


def _larger(left: Node, right: Node) -> Node:
    return Node(
        inputs=tuple(torch.maximum(a, b) for a, b in zip(left.inputs, right.inputs, strict=True)),
        outputs=tuple(
            torch.maximum(a, b) for a, b in zip(left.outputs, right.outputs, strict=True)
        ),
        weight=None
        if left.weight is None or right.weight is None
        else torch.maximum(left.weight, right.weight),
    )


def are_vllms(nodes: Iterable[str]) -> bool:
    """Whether names are of vLLM's model, whose files are numbered even where there is one rank."""
    return any(_INSIDE_VLLM in node or node.rpartition(".")[2] in _FUSED for node in nodes)


def parts_of(node: str) -> tuple[str, ...]:
    """Linears whose weights, one below the other, are the weight of a node.

    That is the node itself unless vLLM runs it fused.
    """
    owner, _, leaf = node.rpartition(".")
    return tuple(f"{owner}.{part}" for part in _FUSED[leaf]) if leaf in _FUSED else (node,)


def layer_type(name: str, node: Node) -> str:
    """Class of a node's module in optimum-habana's models; "" where nothing says it.

    Its name says it, or whether it has a weight and how many inputs and outputs.
    """
    leaf = name.rpartition(".")[2]
    if leaf in _TYPES:
        return _TYPES[leaf]
    return (
        LINEAR
        if node.weight is not None
        else _BY_COUNTS.get((len(node.inputs), len(node.outputs)), "")
    )


def maxima_of_inputs(name: str, node: Node) -> tuple[Tensor, ...] | None:
    """Maxima that the scales of a module's inputs are made of; None for an unknown module.

    A softmax has none. Some are of outputs: the last input of fused attention is the softmax inside
    it, and what is multiplied by a matrix of zeros and ones holds numbers that nobody reads. Of a
    mixture (`dynamic_moe`) the files do not say how many experts a card has.
    """
    kind, inputs, outputs = layer_type(name, node), node.inputs, node.outputs
    if (
        kind in (LINEAR, CACHE)
        and len(inputs) == 1
        and (kind == LINEAR) == (node.weight is not None)
    ):
        return inputs
    if kind == MATMUL and len(inputs) == 2:
        return inputs
    if kind == SOFTMAX and len(outputs) == 1:
        return ()
    if kind == ATTENTION and (len(inputs), len(outputs)) == (3, 2):
        return (*inputs, outputs[1])
    if kind == BLOCKS and (len(inputs), len(outputs)) == (2, 1):
        return (inputs[0], outputs[0])
    return None


def is_row_parallel(node: str) -> bool:
    """Whether a node is a linear that is cut along its inputs.

    Each card has a summand of its output then.
    """
    return node.rpartition(".")[2] in ROW_PARALLEL


def unmeasured(nodes: Iterable[str]) -> tuple[str, ...]:
    """Last parts of attention's names that `nodes` lacks; the toolkit must not look for them."""
    present = {node.rpartition(".")[2] for node in nodes}
    return tuple(leaf for leaf in (*_CACHES, *_CACHES.values()) if leaf not in present)
