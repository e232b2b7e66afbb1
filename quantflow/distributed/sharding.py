"""How the cards of a tensor-parallel mesh share a model: for each linear, embedding and KV cache, which part is whose.

Which linears are cut by rows and which by columns comes from transformers' own plan
(`config.base_model_tp_plan`), and is checked against the shapes of the weights and the numbers of
heads. Heads go whole. The result is data that goes into measurement.json
(`quantflow.distributed.placement`), so nothing after measure needs a model to know it. Nothing here
imports transformers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantflow.distributed.placement import share
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.models.graph import FAMILIES, graph_for, text_config

WEIGHT = ".weight"
# What transformers gives its models beside the configuration's plan: to the embedding where
# `tp_plan` is made (distributed/mixin.py), to the head in each class's `_tp_plan`. GPT-NeoX calls
# the head embed_out in its files.
_OUTSIDE = {
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    "embed_out": "colwise_gather_output",
}
# Style -> (kind, what of the output is on each card). Styles that are not here cut fused or
# sequence-sharded tensors.
_STYLES: dict[str, tuple[str | None, str | None]] = {
    "colwise": ("column", None),
    "colwise_gather_output": ("column", "gathered"),
    "colwise_rep": ("column", "gathered"),
    "embedding_rowwise": ("column", "reduced"),
    "rowwise": ("row", "reduced"),
    "replicate": (None, None),
    "replicated_with_grad_allreduce": (None, None),
    "mla_kv_a_proj": (None, None),
}
_KEYS = ("k_proj", "query_key_value")  # what makes the keys that the cache holds
# Linears of an attention -> (which heads lie along the cut axis, how many head_dim each takes).
_HEADS = {
    "q_proj": ("num_attention_heads", 1),
    "k_proj": ("num_key_value_heads", 1),
    "v_proj": ("num_key_value_heads", 1),
    "query_key_value": ("num_attention_heads", 3),  # by head: its query, its key, its value
    "o_proj": ("num_attention_heads", 1),
    "dense": ("num_attention_heads", 1),
}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<linear>\w+)")
# A checkpoint has a linear per expert; the plan speaks of the tensors that transformers stacks them
# into.
_STACKED = {
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w2": "down_proj",
    "down_proj": "down_proj",
}
_STACKED_STYLES = {"packed_colwise": "colwise", "rowwise": "rowwise"}


def placements(
    config: Any,
    shapes: Mapping[str, Sequence[int]],
    *,
    tp: int,
    rank: int,
    ep: int = 1,
    copy_kv_heads: bool = False,
    row_output: str = "reduced",
) -> dict[str, dict[str, Any]]:
    """Return what one rank holds of every linear, embedding and KV cache.

    Args:
        config: the model's configuration as transformers has it.
        shapes: source tensor name -> shape, from the shard headers.
        tp: over how many cards a replica is cut.
        rank: of the process; its card is rank % tp, its share of the experts that of rank % ep.
        ep: over how many ranks whole experts are spread; 1 cuts every expert over the cards.
        copy_kv_heads: let several cards hold the same key and value heads where there are fewer
            heads than cards, as runtimes do; transformers does not.
        row_output: what is measured of a linear that is cut by columns: `partial` before the cards'
            summands are added up, `reduced` after it.

    Returns:
        Source name without `.weight`, or that of an attention for its KV cache -> placement. With
        one card everything is replicated and `plan` says how it would be cut.

    Raises:
        UsageError: heads, rows, columns or experts do not divide; names the tensor and the numbers.
        InputError: a weight's shape contradicts the configuration.
        UnsupportedError: the family has no plan, or one that cuts tensors in a way that is not
            known here.
    """
    if tp < 1 or ep < 1:
        raise UsageError(f"tp={tp}, ep={ep}", "give 1 or more")
    whole_model, config = config, text_config(config)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    linears = {
        name.removesuffix(WEIGHT): list(shape)
        for name, shape in shapes.items()
        if _is_linear(name, shape)
    }
    attentions = {name.rpartition(".")[0] for name in linears if name.rpartition(".")[2] in _KEYS}
    # its layers have heads of different sizes
    uneven = bool(getattr(config, "is_heterogeneous", False))
    # or heads that hold a gate too
    if not uneven and tp == 1 and config.model_type not in FAMILIES:
        inside = {
            name: shape for name, shape in linears.items() if name.rpartition(".")[0] in attentions
        }
        uneven = not all(_by_heads(name, shape, plan, config) for name, shape in inside.items())
    # the plan speaks of what lies beside the language model too
    if tp == 1 and (whole_model is not config or uneven):
        plan = {}
    if not plan and tp > 1:
        raise UnsupportedError(
            f"model_type {config.model_type!r}: transformers has no tensor-parallel plan",
            "use --tp 1",
        )
    if ep > 1 or tp > 1:
        _refuse_stacked_experts(shapes)
    experts = _count_experts(linears) if ep > 1 else {}
    found: dict[str, dict[str, Any]] = {}
    for name, shape in linears.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None and ep > 1:
            number = int(expert["number"])
            whole = {
                "kind": "expert",
                "axis": None,
                "offset": number,
                "length": 1,
                "experts": experts[expert["experts"]],
            }
            found[name] = share(name, {**whole, "full_shape": shape}, cards=ep, card=rank % ep)
            continue
        whole = _whole(name, shape, plan, strict=tp > 1, row_output=row_output)
        parent, _, linear = name.rpartition(".")
        if parent in attentions and "plan" in whole and (tp > 1 or linear in _HEADS):
            whole |= _heads(name, whole, config, copy_kv_heads=copy_kv_heads)
        found[name] = (
            _uneven(whole, tp, rank % tp)
            if linear in _OUTSIDE
            else share(name, whole, cards=tp, card=rank % tp)
        )
        if linear in _KEYS and not uneven:
            cache = _cache(config, cut="plan" in whole, copy_kv_heads=copy_kv_heads)
            found[parent] = share(f"{parent}: KV cache", cache, cards=tp, card=rank % tp)
    # whose attentions call what makes keys what they like
    if tp == 1 and config.model_type not in FAMILIES:
        for layer in graph_for(whole_model).layers:
            shape = [layer.kv_heads, layer.head_dim]
            if layer.attention is not None:
                found.setdefault(
                    layer.attention,
                    {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shape},
                )
    return found


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return name.endswith(WEIGHT) and len(shape) == 2


def _whole(
    name: str, shape: list[int], plan: Mapping[str, str], *, strict: bool, row_output: str
) -> dict[str, Any]:
    """Return the placement of a linear on a single card, with the plan for several; `strict` refuses an unknown plan."""
    style = _style(name, plan)
    if style not in _STYLES and strict:
        raise UnsupportedError(
            f"{name}: transformers cuts it as {style!r}, known are {', '.join(_STYLES)}",
            "measure this model with --tp 1",
        )
    kind, output = _STYLES.get(style, (None, None))
    whole: dict[str, Any] = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shape}
    if kind is not None:
        whole["plan"] = kind
        whole |= {"output": row_output if kind == "row" else output} if output else {}
    return whole


def _style(name: str, plan: Mapping[str, str]) -> str:
    """Return how transformers cuts a linear: `replicate` where its plan does not speak of it."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        stacked = f".experts.{_STACKED.get(expert['linear'])}"
        styles = [
            _STACKED_STYLES.get(style, style)
            for pattern, style in plan.items()
            if pattern.endswith(stacked)
        ]
    else:
        styles = [style for pattern, style in plan.items() if _matches(pattern, name)]
        styles += (
            [_OUTSIDE[name.rpartition(".")[2]]]
            if plan and name.rpartition(".")[2] in _OUTSIDE
            else []
        )
    return styles[0] if styles else "replicate"


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of a plan, `layers.*.mlp.up_proj`, means a source name: its end, `*` being a number."""
    words = pattern.split(".")
    parts = name.split(".")[-len(words) :]
    return len(words) == len(parts) and all(
        part.isdecimal() if word == "*" else part == word
        for word, part in zip(words, parts, strict=True)
    )


def _uneven(whole: Mapping[str, Any], cards: int, card: int) -> dict[str, Any]:
    """Return a card's share of the vocabulary, the last cards' smaller where it does not divide, as transformers cuts it."""
    if cards == 1 or "plan" not in whole:
        return dict(whole)
    rows = whole["full_shape"][0]
    each = -(-rows // cards)
    offset = min(card * each, rows)
    length = min(each, rows - offset)
    kept = {key: whole[key] for key in ("full_shape", "output")}
    return {"kind": "column", "axis": 0, "offset": offset, "length": length, **kept}


def _heads(
    name: str, whole: Mapping[str, Any], config: Any, *, copy_kv_heads: bool
) -> dict[str, Any]:
    """Return the unit of a linear of an attention, after checking that its weight has the configuration's heads."""
    linear = name.rpartition(".")[2]
    if linear not in _HEADS:
        raise UnsupportedError(
            f"{name}: it is not known how heads lie in it", "measure this model with --tp 1"
        )
    field, heads, width = _heads_of(linear, config)
    size = _cut_size(whole)
    if size != heads * width:
        axis = "rows" if whole["plan"] == "column" else "columns"
        raise InputError(
            f"{name}: {size} {axis}, config.json has {field}={heads} of {width} {axis} each",
            "check that config.json belongs to these weights",
        )
    copies = copy_kv_heads and field == "num_key_value_heads"
    return {"unit": width, **({"copies": True} if copies else {})}


def _by_heads(name: str, shape: Sequence[int], plan: Mapping[str, str], config: Any) -> bool:
    """Return whether a linear of an attention has the configuration's heads, as far as it is known how they lie in it."""
    linear, whole = (
        name.rpartition(".")[2],
        _whole(name, list(shape), plan, strict=False, row_output="reduced"),
    )
    if linear not in _HEADS or "plan" not in whole:
        return True
    _, heads, width = _heads_of(linear, config)
    return _cut_size(whole) == heads * width


def _heads_of(linear: str, config: Any) -> tuple[str, int, int]:
    """Return the key of the configuration that counts a linear's heads, how many there are, and the rows or columns of each."""
    field, times = _HEADS[linear]
    return field, _count(config, field), times * _head_dim(config)


def _cut_size(whole: Mapping[str, Any]) -> int:
    """Return how long the axis is that a plan cuts."""
    size: int = whole["full_shape"][0 if whole["plan"] == "column" else 1]
    return size


def _cache(config: Any, *, cut: bool, copy_kv_heads: bool) -> dict[str, Any]:
    """Return the placement of a KV cache on a single card: [heads, head_dim]."""
    shape = [_count(config, "num_key_value_heads"), _head_dim(config)]
    whole: dict[str, Any] = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shape}
    return (
        {**whole, "plan": "column", **({"copies": True} if copy_kv_heads else {})} if cut else whole
    )


def _count(config: Any, field: str) -> int:
    return int(getattr(config, field, None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _count_experts(linears: Iterable[str]) -> dict[str, int]:
    """Return name of a mixture's experts -> how many there are."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.fullmatch, linears)):
        numbers.setdefault(match["experts"], set()).add(int(match["number"]))
    for name, found in numbers.items():
        if found != set(range(len(found))):
            missing = min(set(range(max(found))) - found)
            raise InputError(
                f"{name}: {len(found)} experts up to number {max(found)}, {missing} is missing",
                "check the weights",
            )
    return {name: len(found) for name, found in numbers.items()}


def _refuse_stacked_experts(shapes: Mapping[str, Sequence[int]]) -> None:
    for name, shape in shapes.items():
        if len(shape) == 3 and ".experts." in name:
            raise UnsupportedError(
                f"{name}: {list(shape)}, all experts in one tensor; statistics are one linear's",
                "use a checkpoint with a tensor per expert, or measure with --tp 1",
            )
