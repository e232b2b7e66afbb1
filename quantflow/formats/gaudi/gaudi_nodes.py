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

Experts of mixtures are in experts.py. Attention with a compressed cache (MLA: `kv_a_proj_with_mqa`
and `kv_b_proj`) keeps the input of `kv_b_proj` beside the rotated part of the keys, which vLLM
calls A.mla_attn.mla_attn.impl.latent_cache_k. Its maximum is bounded by the larger of that input's
and the keys'; its products multiply values that are never made here, so they are left out.

The first input of matmul_av are probabilities. Their maximum is 1, exactly: the first token of a
sequence attends to itself alone. The second inputs of both products get the maxima of the caches,
so that no value is rescaled on its way out of a cache (the toolkit's postprocessing does the same).

Source: optimum-habana's modelling files and unify scripts, vllm-gaudi's attention layer; names
only.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.formats.gaudi import experts
from quantflow.formats.gaudi.row_parallel import ROW_PARALLEL
from quantflow.formats.gaudi.triple import Node
from quantflow.observers.amax import AMAX
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.observers.keys import Key, by_site

LINEAR, MATMUL, CACHE = "Linear", "Matmul", "KVCache"  # classes in optimum-habana's models
MIXTURE = "VllmMixtureOfExpertsOp"
SOFTMAX, ATTENTION, BLOCKS = "Softmax", "ModuleFusedSDPA", "B2BMatmul"
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_PART_OF = {part: whole for whole, parts in _FUSED.items() for part in parts}
_INSIDE_VLLM = ".attn.impl"
_INSIDE_MLA = (".mla_attn.mla_attn.impl", ".mla_attn.impl")  # the second in older releases
LATENT = "latent_cache_k"
_COMPRESSES, _EXPANDS = "kv_a_proj_with_mqa", "kv_b_proj"
_CACHES = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}
FUSED_ATTENTION = "fused_scaled_dot_product_attention"
_QUERIES_ALONE = {"query"}
_TYPES = {
    **dict.fromkeys(_CACHES, MATMUL),
    **dict.fromkeys((*_CACHES.values(), LATENT), CACHE),
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


def statistics_from(
    nodes: Mapping[str, Node], *, known: Collection[str] = ()
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """`<source name>|<site>|amax` of known nodes, and the names of the other nodes.

    Channels have `channel_amax` [C] as well. A linear that vLLM runs fused gives each of its parts
    the one input; the maximum of its weights belongs to none of them. The inputs of experts are
    those that their operator saw. What a compressed cache holds has no place among ours.

    Args:
        nodes: the measured nodes.
        known: names of the model's linears, where there is one.
    """
    statistics: dict[str, Tensor] = {}
    others = []
    for node, content in sorted(nodes.items()):
        owner, _, leaf = node.rpartition(".")
        owner = owner.removesuffix(_INSIDE_VLLM)
        operator = experts.inside_operator(node, nodes)
        if operator is not None:
            statistics |= _of_expert(node, content, nodes[operator], known)
        elif experts.is_operator(content):
            continue
        elif leaf in _TYPES and (owner.endswith(_INSIDE_MLA) or _is_mla(owner, nodes)):
            others.append(node)
        elif leaf in ("k_cache", "v_cache") and content.inputs:
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


def _of_expert(name: str, node: Node, operator: Node, known: Collection[str]) -> dict[str, Tensor]:
    """Statistics of an expert's linears from its node and that of its operator."""
    statistics: dict[str, Tensor] = {}
    parts, value = experts.source_names(name, known), experts.expert_inputs(name, operator)
    for part in parts:
        statistics |= _maxima(part, "input", value) if value is not None else {}
    if len(parts) == 1 and node.weight is not None:
        statistics |= _maxima(parts[0], "weight", node.weight)
    return statistics


def _is_mla(owner: str, nodes: Collection[str]) -> bool:
    """Whether an attention module keeps a compressed cache."""
    return f"{owner}.{_COMPRESSES}" in nodes and f"{owner}.{_EXPANDS}" in nodes


def _maxima(name: str, site: str, value: Tensor) -> dict[str, Tensor]:
    maxima = {str(Key(name, site, AMAX.name)): value.max()}
    if len(value) > 1 and site == "input":
        maxima[str(Key(name, site, CHANNEL_AMAX.name))] = value.flatten()
    return maxima


def postprocess(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes with the caches' maxima as the second inputs of attention's two products.

    The output of fused attention, which prompts alone go through, has at least the maximum that the
    linear behind it saw.

    Raises:
        StatisticsError: a product has fewer than two inputs.
    """
    completed = dict(nodes)
    for name, node in nodes.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == FUSED_ATTENTION and node.outputs:
            behind = _behind_attention(owner, nodes)
            largest = (node.outputs[0], *(one.inputs[0] for one in behind))
            output = torch.stack([value.max() for value in largest]).max().reshape(1, 1)
            completed[name] = replace(node, outputs=(output, *node.outputs[1:]))
        kept = LATENT if owner.endswith(_INSIDE_MLA) else _CACHES.get(leaf)
        cache = nodes.get(f"{owner}.{kept}") if leaf in _CACHES else None
        if cache is None or not cache.inputs or _is_mla(owner, nodes):
            continue
        if len(node.inputs) < 2:
            raise StatisticsError(
                f"{name}: {len(node.inputs)} inputs, a product has two", "measure again"
            )
        completed[name] = replace(node, inputs=(node.inputs[0], cache.inputs[0], *node.inputs[2:]))
    return completed


def _behind_attention(owner: str, nodes: Mapping[str, Node]) -> list[Node]:
    """The linear that reads what a fused attention writes, where it was measured."""
    for inside in (*_INSIDE_MLA, _INSIDE_VLLM):
        owner = owner.removesuffix(inside)
    names = (f"{owner}.{leaf}" for leaf in (*ROW_PARALLEL, "c_proj"))
    return [nodes[name] for name in names if name in nodes and len(nodes[name].inputs) == 1]


def without_outputs(nodes: Mapping[str, Node], *, but: Iterable[str] = ()) -> dict[str, Node]:
    """The nodes of a measurement that excludes outputs; the operators of mixtures keep theirs.

    Args:
        nodes: the measured nodes.
        but: last parts of the names of nodes that keep their outputs.
    """
    kept = tuple(but)
    return {
        name: node
        if name.rpartition(".")[2] in kept or experts.is_operator(node)
        else replace(node, outputs=())
        for name, node in nodes.items()
    }


def for_optimum_habana(
    nodes: Mapping[str, Node], *, patched: bool, counts: Mapping[str, int]
) -> dict[str, Node]:
    """The nodes of optimum-habana's model.

    Its MLA multiplies with the weight of `kv_b_proj` without calling it, and its caches hold parts
    that were not measured each: its own configurations leave these alone too.

    Args:
        nodes: nodes in our names.
        patched: see `experts.for_optimum_habana`.
        counts: see there.
    """
    kept = {
        name: node
        for name, node in nodes.items()
        if not (
            name.rpartition(".")[2] in (*_TYPES, _EXPANDS)
            and _is_mla(name.rpartition(".")[0], nodes)
        )
    }
    return experts.for_optimum_habana(kept, patched=patched, counts=counts)


def for_vllm(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes under the names of vLLM's model.

    vLLM runs q, k and v as one linear, and gate and up as another.
    """
    renamed: dict[str, Node] = {}
    for name, node in experts.for_vllm(nodes).items():
        owner, _, leaf = name.rpartition(".")
        mla = _is_mla(owner, nodes)
        if leaf in _TYPES and mla:
            if leaf == "k_cache":
                latent = torch.maximum(node.inputs[0], nodes[f"{owner}.{_EXPANDS}"].inputs[0])
                renamed[f"{owner}{_INSIDE_MLA[0]}.{LATENT}"] = Node(inputs=(latent,))
        elif mla and (
            leaf == "q_proj" or (leaf == _COMPRESSES and f"{owner}.q_a_proj" not in nodes)
        ):
            renamed[name] = node  # nothing to fuse it with
        elif leaf in (*_CACHES, *_CACHES.values()):
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
    return any(
        _INSIDE_VLLM in node
        or node.rpartition(".")[2] in (*_FUSED, LATENT)
        or experts.listed(node) is not None
        for node in nodes
    )


def parts_of(node: str, *, known: Collection[str] = ()) -> tuple[str, ...]:
    """Linears whose weights, one below the other, are the weight of a node.

    That is the node itself unless vLLM runs it fused, or lists it among experts.

    Args:
        node: its name.
        known: names of the model's linears, where there is one.
    """
    owner, _, leaf = node.rpartition(".")
    if leaf in _FUSED:
        return tuple(f"{owner}.{part}" for part in _FUSED[leaf])
    return experts.source_names(node, known)


def layer_type(name: str, node: Node) -> str:
    """Class of a node's module in optimum-habana's models; "" where nothing says it.

    Its name says it, or whether it has a weight and how many inputs and outputs.
    """
    leaf = name.rpartition(".")[2]
    if leaf in _TYPES:
        return _TYPES[leaf]
    if experts.is_operator(node):
        return experts.CLASSES.get(leaf, MIXTURE)
    return (
        LINEAR
        if node.weight is not None
        else _BY_COUNTS.get((len(node.inputs), len(node.outputs)), "")
    )


def maxima_of_inputs(name: str, node: Node) -> tuple[Tensor, ...] | None:
    """Maxima that the scales of a module's inputs are made of; None for an unknown module.

    A softmax has none. Some are of outputs: the last input of fused attention is the softmax inside
    it, and what is multiplied by a matrix of zeros and ones holds numbers that nobody reads. An
    operator of a mixture has, after its input, what lies inside each expert of the card.
    """
    if experts.is_operator(node) and name.rpartition(".")[2] not in _TYPES:
        return (*node.inputs, *node.outputs[1:])
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


def unmeasured(nodes: Collection[str]) -> tuple[str, ...]:
    """Last parts of attention's names that `nodes` lacks; the toolkit must not look for them."""
    present = {node.rpartition(".")[2] for node in nodes}
    missing = [leaf for leaf in (*_CACHES, *_CACHES.values()) if leaf not in present]
    if _COMPRESSES in present or "fused_qkv_a_proj" in present:
        missing += [leaf for leaf in (_EXPANDS, LATENT) if leaf not in present]
    return tuple(missing)
