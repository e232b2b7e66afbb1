"""The part of each linear, embedding and KV cache that a card of a tensor-parallel mesh holds.

Which linears are cut by rows and which by columns comes from transformers' own plan
(`config.base_model_tp_plan`), and is checked against the shapes of the weights and the numbers of
heads. Heads go whole; the rows of the families (`quantflow.models.family`) say in which linear they
lie. The result is data that goes into measurement.json (`quantflow.distributed.placement`), so no
stage after measure needs a model to know it. Nothing here imports transformers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantflow.distributed.placement import share
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.models.family import FAMILIES, FamilyRow, attention_heads
from quantflow.models.graph import UNTRACED, text_config
from quantflow.models.open import graph_for

WEIGHT = ".weight"


def _leaf(name: str) -> str:
    """The last part of a name."""
    return name.rpartition(".")[2]


# A model whose family has no row is cut by the names that the rows have for the same parts.
#
# Styles that transformers adds to the plan of a configuration: to the embedding where `tp_plan` is
# made (distributed/mixin.py), to the head in each class's `_tp_plan`.
_OUTSIDE = {
    "embed_tokens": "embedding_rowwise",
    **{_leaf(row.names.head): "colwise_gather_output" for row in FAMILIES.values()},
}
# Style -> (kind, part of the output on each card). Styles that are not here cut fused or
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
# Linear of an attention -> (key that counts the heads along the cut axis, multiple of head_dim).
_HEADS = {
    _leaf(linear): heads
    for row in FAMILIES.values()
    for linear, heads in attention_heads(row).items()
}


def _key_linears(row: FamilyRow) -> set[str]:
    """The linear that makes the keys which the KV cache holds, where its rows are of heads."""
    linears = row.names.qkv
    keys = linears[1] if len(linears) == 3 else linears[0]
    return {_leaf(keys)} if keys in attention_heads(row) else set()


_KEYS_OF = {row.model_type: _key_linears(row) for row in FAMILIES.values()}
_KEYS = set().union(*_KEYS_OF.values())
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<linear>\w+)")
# A checkpoint has a linear per expert; the plan speaks of the tensors that transformers stacks them
# into.
_STACKED = {
    linear: stacked
    for mixture in (row.mixture for row in FAMILIES.values() if row.mixture is not None)
    for linear, stacked in zip(
        mixture.linears, ("gate_up_proj", "gate_up_proj", "down_proj"), strict=True
    )
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
    """The part of every linear, embedding and KV cache that one rank holds.

    Args:
        config: the model's configuration as transformers has it.
        shapes: source tensor name -> shape, from the shard headers.
        tp: number of cards that a replica is cut over.
        rank: number of the process; its card is rank % tp, its share of the experts rank % ep.
        ep: number of ranks that whole experts are spread over; 1 cuts every expert over the cards.
            Beside experts, a linear that no plan cuts in a known way is then whole on every card.
        copy_kv_heads: several cards hold the same kv heads where there are fewer heads than cards,
            as in runtimes; transformers does not.
        row_output: output that is measured of a linear that is cut by columns: `partial` before the
            cards' summands are added up, `reduced` after it.

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
    key_linears = _KEYS_OF.get(config.model_type, _KEYS)
    attentions = {name.rpartition(".")[0] for name in linears if _leaf(name) in key_linears}
    # layers of a heterogeneous model have heads of different sizes
    uneven = bool(getattr(config, "is_heterogeneous", False))
    # and the heads of a family without a graph in its row may hold a gate too
    if not uneven and tp == 1 and config.model_type not in UNTRACED:
        inside = {
            name: shape for name, shape in linears.items() if name.rpartition(".")[0] in attentions
        }
        uneven = not all(_by_heads(name, shape, plan, config) for name, shape in inside.items())
    # the plan of a model of more than text speaks of its other parts too
    if tp == 1 and (whole_model is not config or uneven):
        plan = {}
    if not plan and tp > 1 and ep == 1:
        raise UnsupportedError(
            f"model_type {config.model_type!r}: transformers has no tensor-parallel plan",
            "use --tp 1",
        )
    if ep > 1 or tp > 1:
        _refuse_stacked_experts(shapes)
    experts = _count_experts(linears) if ep > 1 else {}
    held: dict[str, dict[str, Any]] = {}
    for name, shape in linears.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None and ep > 1:
            whole = _expert(expert, shape, experts=experts)
            held[name] = share(name, whole, cards=ep, card=rank % ep)
            continue
        whole = _whole(name, shape, plan, strict=tp > 1 and ep == 1, row_output=row_output)
        parent, _, linear = name.rpartition(".")
        if parent in attentions and "plan" in whole and (tp > 1 or linear in _HEADS):
            whole |= _heads(name, whole, config, copy_kv_heads=copy_kv_heads)
        held[name] = (
            _vocabulary_share(whole, tp, rank % tp)
            if linear in _OUTSIDE
            else share(name, whole, cards=tp, card=rank % tp)
        )
        if linear in key_linears and not uneven:
            cache = _cache(config, cut="plan" in whole, copy_kv_heads=copy_kv_heads)
            held[parent] = share(f"{parent}: KV cache", cache, cards=tp, card=rank % tp)
    # attentions of these have any name for the linear that makes keys, so the trace says where
    if tp == 1 and config.model_type not in UNTRACED:
        for layer in graph_for(whole_model).layers:
            shape = [layer.kv_heads, layer.head_dim]
            if layer.attention is not None:
                held.setdefault(
                    layer.attention,
                    {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shape},
                )
    return held


def whole_experts(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The placements of a mixture's linears where a card holds some of the experts, here all.

    Args:
        tensors: placements of a measurement of one rank.

    Returns:
        Those of experts alone; empty where there are none.
    """
    experts = _count_experts(tensors)
    return {
        name: _expert(match, list(placement["full_shape"]), experts=experts)
        for name, placement in tensors.items()
        if (match := _EXPERT.fullmatch(name)) is not None
    }


def _expert(
    match: re.Match[str], shape: list[int], *, experts: Mapping[str, int]
) -> dict[str, Any]:
    """The placement of a linear of one expert on a card that holds it."""
    return {
        "kind": "expert",
        "axis": None,
        "offset": int(match["number"]),
        "length": 1,
        "experts": experts[match["experts"]],
        "full_shape": shape,
    }


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return name.endswith(WEIGHT) and len(shape) == 2


def _whole(
    name: str, shape: list[int], plan: Mapping[str, str], *, strict: bool, row_output: str
) -> dict[str, Any]:
    """The placement of a linear on a single card, with the plan for several.

    Args:
        name: source name of the linear.
        shape: [O, I].
        plan: transformers' plan.
        strict: refuse a style that is not known here.
        row_output: see `placements`.
    """
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
    """Style of transformers for a linear: `replicate` where its plan does not speak of it."""
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
        styles += [_OUTSIDE[_leaf(name)]] if plan and _leaf(name) in _OUTSIDE else []
    return styles[0] if styles else "replicate"


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a plan, `layers.*.mlp.up_proj`, is the end of a source name."""
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(wanted) == len(parts) and all(
        part.isdecimal() if each == "*" else part == each
        for each, part in zip(wanted, parts, strict=True)
    )


def _vocabulary_share(whole: Mapping[str, Any], cards: int, card: int) -> dict[str, Any]:
    """A card's share of the vocabulary, as transformers cuts it.

    The last cards have fewer rows where the cards do not divide them.
    """
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
    """The unit of a linear of an attention, whose weight is checked to have the heads."""
    linear = _leaf(name)
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
    """Whether a linear of an attention has the configuration's heads; true where none are known."""
    linear = _leaf(name)
    whole = _whole(name, list(shape), plan, strict=False, row_output="reduced")
    if linear not in _HEADS or "plan" not in whole:
        return True
    _, heads, width = _heads_of(linear, config)
    return _cut_size(whole) == heads * width


def _heads_of(linear: str, config: Any) -> tuple[str, int, int]:
    """The key that counts a linear's heads, their number, and the rows or columns of each."""
    field, multiple = _HEADS[linear]
    return field, _count(config, field), multiple * _head_dim(config)


def _cut_size(whole: Mapping[str, Any]) -> int:
    """The length of the axis that a plan cuts."""
    size: int = whole["full_shape"][0 if whole["plan"] == "column" else 1]
    return size


def _cache(config: Any, *, cut: bool, copy_kv_heads: bool) -> dict[str, Any]:
    """The placement of a KV cache on a single card: [kv heads, head_dim]."""
    shape = [_count(config, "num_key_value_heads"), _head_dim(config)]
    whole: dict[str, Any] = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shape}
    if not cut:
        return whole
    return {**whole, "plan": "column", **({"copies": True} if copy_kv_heads else {})}


def _count(config: Any, field: str) -> int:
    return int(getattr(config, field, None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _count_experts(linears: Iterable[str]) -> dict[str, int]:
    """Name of a mixture's experts -> their number."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.fullmatch, linears)):
        numbers.setdefault(match["experts"], set()).add(int(match["number"]))
    for name, present in numbers.items():
        if present != set(range(len(present))):
            missing = min(set(range(max(present))) - present)
            raise InputError(
                f"{name}: {len(present)} experts up to number {max(present)}, {missing} is missing",
                "check the weights",
            )
    return {name: len(present) for name, present in numbers.items()}


def _refuse_stacked_experts(shapes: Mapping[str, Sequence[int]]) -> None:
    for name, shape in shapes.items():
        if len(shape) == 3 and ".experts." in name:
            raise UnsupportedError(
                f"{name}: {list(shape)}, all experts in one tensor; statistics are one linear's",
                "use a checkpoint with a tensor per expert, or measure with --tp 1",
            )
