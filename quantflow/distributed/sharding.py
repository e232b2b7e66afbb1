"""The part of each linear, embedding and KV cache that a card of a tensor-parallel mesh holds.

Which linears are cut by rows and which by columns comes from transformers' own plan
(`config.base_model_tp_plan`), or where it has none that is known here from the row of the family
(`quantflow.models.family`): what makes heads and what goes up by rows, what reads either by
columns. Both are checked against the shapes of the weights and the numbers of heads. Heads go
whole, and lie in the linears as `quantflow.distributed.head_cut` says. The result is data that goes
into measurement.json (`quantflow.distributed.placement`), so no stage after measure needs a model
to know it. Nothing here imports transformers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantflow.distributed.head_cut import units_in
from quantflow.distributed.placement import AXES, share
from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.models import architecture
from quantflow.models.architecture import Blueprint
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
# Attention's last linears, which are cut by columns.
_OUTPUTS = {_leaf(row.names.output) for row in FAMILIES.values()}


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


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """How a model is cut over cards.

    Attributes:
        plan: pattern of linears -> style; see `_STYLES`.
        units: linear -> the fields of its placement that say what of it goes whole, and the length
            of the axis that is cut, which they make; only where the linear is cut.
        caches: attention -> shape of its KV cache, [heads, head_dim], and the fields of its
            placement that say how its heads go to the cards.
        mixed: layers have heads of different sizes, or others than the configuration says: nothing
            is known of them.
    """

    plan: Mapping[str, str]
    units: Mapping[str, "_Units"]
    caches: Mapping[str, tuple[list[int], dict[str, Any]]]
    mixed: bool = False


@dataclass(frozen=True, kw_only=True)
class _Units:
    """What goes whole of an axis.

    Attributes:
        fields: fields of a placement.
        size: length of the axis.
        why: what config.json has, for a message.
    """

    fields: Mapping[str, Any]
    size: int
    why: str


def placements(
    config: Any,
    shapes: Mapping[str, Sequence[int]],
    *,
    tp: int,
    rank: int,
    ep: int = 1,
    row_output: str = "reduced",
) -> dict[str, dict[str, Any]]:
    """The part of every linear, embedding and KV cache that one rank holds.

    Several cards hold the same kv heads where there are fewer heads than cards.

    Args:
        config: the model's configuration as transformers has it.
        shapes: source tensor name -> shape, from the shard headers.
        tp: number of cards that a replica is cut over.
        rank: number of the process; its card is rank % tp, its share of the experts rank % ep.
        ep: number of ranks that whole experts are spread over; 1 cuts every expert over the cards.
            Beside experts, a linear that no plan cuts in a known way is then whole on every card.
        row_output: output that is measured of a linear that is cut by columns: `partial` before the
            cards' summands are added up, `reduced` after it.

    Returns:
        Source name without `.weight`, or that of an attention for its KV cache -> placement. With
        one card everything is replicated and `plan` says how it would be cut.

    Raises:
        UsageError: heads, rows, columns or experts do not divide; names the tensor and the numbers.
        InputError: a weight's shape contradicts the configuration.
        UnsupportedError: transformers has no plan for the family, or one that cuts tensors in a way
            that is not known here, and its row says none either.
    """
    if tp < 1 or ep < 1:
        raise UsageError(f"tp={tp}, ep={ep}", "give 1 or more")
    whole_model, config = config, text_config(config)
    linears = {
        name.removesuffix(WEIGHT): list(shape)
        for name, shape in shapes.items()
        if _is_linear(name, shape)
    }
    cuts = _cuts(config, linears, alone=whole_model is config, tp=tp, ep=ep)
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
        whole = _whole(name, shape, cuts.plan, strict=tp > 1 and ep == 1, row_output=row_output)
        if "plan" in whole and name in cuts.units:
            whole |= _checked(name, whole, cuts.units[name])
        held[name] = (
            _vocabulary_share(whole, tp, rank % tp)
            if _leaf(name) in _OUTSIDE
            else share(name, whole, cards=tp, card=rank % tp)
        )
    for name, (heads, fields) in cuts.caches.items():
        cache: dict[str, Any] = {
            "kind": "replicated",
            "axis": None,
            "offset": 0,
            "full_shape": heads,
        }
        whole = {**cache, "plan": "column", **fields} if cuts.plan else cache
        held[name] = share(f"{name}: KV cache", whole, cards=tp, card=rank % tp)
    # attentions of these have any name for the linear that makes keys, so the trace says where
    if tp == 1 and config.model_type not in UNTRACED:
        for layer in graph_for(whole_model).layers:
            heads = [layer.kv_heads, layer.head_dim]
            if layer.attention is not None:
                held.setdefault(
                    layer.attention,
                    {"kind": "replicated", "axis": None, "offset": 0, "full_shape": heads},
                )
    return held


def runs_on_shares(config: Any, tensors: Mapping[str, Mapping[str, Any]], *, cards: int) -> bool:
    """Whether transformers' modules run on a card's own heads and rows alone.

    They do where transformers has the plan and every card has as much as the others, each of it
    once. Elsewhere they are given all heads and rows, of which the others' are zeros.

    Args:
        config: the model's configuration as transformers has it.
        tensors: placements of the linears and KV caches on one of the cards.
        cards: number of cards.
    """
    plan = _own_plan(config)
    inside = {name: one for name, one in tensors.items() if _leaf(name) not in _OUTSIDE}
    return bool(plan) and all(
        _style(name, plan) in _STYLES
        and "spans" not in placement
        and (
            placement["kind"] not in AXES
            or placement["length"] * cards == placement["full_shape"][placement["axis"]]
        )
        for name, placement in inside.items()
    )


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


def _own_plan(config: Any) -> Mapping[str, str]:
    """Transformers' plan for a configuration; empty where there is none."""
    return getattr(text_config(config), "base_model_tp_plan", None) or {}


def _cuts(config: Any, linears: Mapping[str, list[int]], *, alone: bool, tp: int, ep: int) -> _Cuts:
    """How a model is cut.

    Args:
        config: transformers' configuration of the language model.
        linears: linear -> [O, I].
        alone: it is all of the model; others have parts that plans speak of too.
        tp: number of cards that a replica is cut over; with one nothing is refused that is whole.
        ep: number of ranks that experts are spread over.

    Raises:
        UnsupportedError: see `placements`.
    """
    plan = _own_plan(config)
    blueprint = architecture.read(config.to_dict()) if alone else "it is a part of a model"
    known = blueprint if isinstance(blueprint, Blueprint) and _is_plain(blueprint) else None
    if not plan or any(_style(name, plan) not in _STYLES for name in linears):
        if known is not None and not any(known.sparse):
            plan = _row_plan(known)
        elif not plan and tp > 1 and ep == 1:
            because = f" ({blueprint})" if isinstance(blueprint, str) else ""
            raise UnsupportedError(
                f"model_type {config.model_type!r}: transformers has no tensor-parallel plan, and "
                f"its row has none{because}",
                "use --tp 1",
            )
    cuts = (
        _of_names(config, linears, plan, tp=tp) if known is None else _of_row(known, linears, plan)
    )
    if tp > 1:
        return cuts
    # the heads of a family without a graph in its row may hold a gate too
    mixed = cuts.mixed or (
        config.model_type not in UNTRACED
        and not all(
            _cut_size(whole) == units.size
            for name, units in cuts.units.items()
            if "plan" in (whole := _whole(name, linears[name], plan, strict=False, row_output=""))
        )
    )
    if not alone or mixed:
        return replace(cuts, plan={}, mixed=mixed, caches={} if mixed else cuts.caches)
    return cuts


def _is_plain(blueprint: Blueprint) -> bool:
    """Whether an attention has linears of heads, each of which goes through it by itself."""
    heads = blueprint.heads
    return not (heads.output_gate or heads.whole_norms or blueprint.latent or any(blueprint.linear))


def _row_plan(blueprint: Blueprint) -> dict[str, str]:
    """The plan of a dense family by its row."""
    names = blueprint.names
    by_rows, by_columns = (*names.qkv, *names.up), (names.output, names.down)
    return {
        f"{names.layers}.*.{name}": style
        for style, linears in (("colwise", by_rows), ("rowwise", by_columns))
        for name in linears
    }


def _of_row(
    blueprint: Blueprint, linears: Mapping[str, list[int]], plan: Mapping[str, str]
) -> _Cuts:
    """The cuts of a model whose row says how heads lie in which linear."""
    heads, names = blueprint.heads, blueprint.names
    counts = {
        **dict.fromkeys((names.output, *names.qkv), ("num_attention_heads", heads.num_heads)),
        **dict.fromkeys(names.qkv[1:], ("num_key_value_heads", heads.num_kv_heads)),
    }
    units: dict[str, _Units] = {}
    for part, fields in units_in(blueprint).items():
        key, count = counts[part]
        axis = "columns" if part == names.output else "rows"
        unit = fields["unit"]
        size, why = count * unit, f"{key}={count} of {unit} {axis} each"
        if "parts" in fields:
            size = fields["blocks"] * sum(each["units"] for each in fields["parts"]) * unit
            kv_heads = heads.num_kv_heads
            why = f"{count} heads, {kv_heads} of keys and {kv_heads} of values, of {unit} rows each"
        units |= {
            f"{names.layers}.{index}.{part}": _Units(fields=fields, size=size, why=why)
            for index in range(blueprint.layers)
        }
    if blueprint.form.gated and len(names.up) == 1:
        for name in {f"{names.layers}.{index}.{names.up[0]}" for index in range(blueprint.layers)}:
            if name in linears:
                half = {"units": linears[name][0] // 2}
                gate_and_up = "gate and up of as many rows"
                units[name] = _Units(
                    fields={"parts": [half, half]}, size=2 * half["units"], why=gate_and_up
                )
    cached = heads.num_heads if blueprint.repeated_cache else heads.num_kv_heads
    fields = {} if blueprint.repeated_cache else {"copies": True}
    return _Cuts(
        plan=plan,
        units={name: one for name, one in units.items() if name in linears},
        caches={
            f"{names.layers}.{index}.{names.attention}": ([cached, heads.head_dim], fields)
            for index in range(blueprint.layers)
            if f"{names.layers}.{index}.{names.qkv[0]}" in linears
        },
    )


def _of_names(
    config: Any, linears: Mapping[str, list[int]], plan: Mapping[str, str], *, tp: int
) -> _Cuts:
    """The cuts of a model whose linears have the names that the rows have for the same parts.

    Raises:
        UnsupportedError: a linear of an attention has another name, and is cut over several cards.
    """
    # layers of a heterogeneous model have heads of different sizes
    if tp == 1 and getattr(config, "is_heterogeneous", False):
        return _Cuts(plan=plan, units={}, caches={}, mixed=True)
    key_linears = _KEYS_OF.get(config.model_type, _KEYS)
    attentions = {name.rpartition(".")[0] for name in linears if _leaf(name) in key_linears}
    units, caches = {}, {}
    for name in linears:
        parent, _, linear = name.rpartition(".")
        if parent not in attentions:
            continue
        if linear in _HEADS:
            units[name] = _units_by_name(linear, config)
        elif tp > 1 and _STYLES.get(_style(name, plan), (None, None))[0] is not None:
            raise UnsupportedError(
                f"{name}: it is not known how heads lie in it", "measure this model with --tp 1"
            )
        if linear in key_linears:
            heads = [_count(config, "num_key_value_heads"), _head_dim(config)]
            caches[parent] = (heads, {"copies": True})
    return _Cuts(plan=plan, units=units, caches=caches)


def _units_by_name(linear: str, config: Any) -> _Units:
    """What goes whole of a linear of an attention, by the last part of its name."""
    field, multiple = _HEADS[linear]
    count, unit = _count(config, field), multiple * _head_dim(config)
    fields = {"unit": unit, **({"copies": True} if field == "num_key_value_heads" else {})}
    axis = "columns" if linear in _OUTPUTS else "rows"
    return _Units(fields=fields, size=count * unit, why=f"{field}={count} of {unit} {axis} each")


def _checked(name: str, whole: Mapping[str, Any], units: _Units) -> dict[str, Any]:
    """The fields of a linear's units, whose weight is checked to have them."""
    size = _cut_size(whole)
    if size != units.size:
        axis = "rows" if whole["plan"] == "column" else "columns"
        raise InputError(
            f"{name}: {size} {axis}, config.json has {units.why}",
            "check that config.json belongs to these weights",
        )
    return dict(units.fields)


def _cut_size(whole: Mapping[str, Any]) -> int:
    """The length of the axis that a plan cuts."""
    size: int = whole["full_shape"][AXES[whole["plan"]]]
    return size


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
