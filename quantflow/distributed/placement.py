"""The part of a tensor that a rank holds, as data, and its meaning for the statistics around it.

A placement is one entry of `tensors` in measurement.json, about the linear or attention of that
source name:

    kind        replicated   every rank holds all of it
                column       a share of the rows of the weight [O, I], the output features: axis 0
                row          a share of its columns, the input features: axis 1
                expert       one of the experts of a mixture, held whole by some ranks
    full_shape  shape of the weight in the source, [O, I]; of K and V: [heads, head_dim]
    axis        0 of a column, 1 of a row, else null
    offset      start of the share along the axis; number of an expert; else 0
    length      length of the share along the axis; of an expert 1 on the ranks that hold it, 0 on
                the others
    output      of a row: `partial`, measured before the shares' products are added up, or
                `reduced`, after it;
                of a column: `sliced` (the default), or `gathered` or `reduced` where every rank has
                all of the output;
                of a replicated tensor: its value where the model is cut
    unit        length along the axis that is never cut: head_dim where heads lie along it; 1 where
                it is left out
    copies      true where a unit goes to several cards when there are fewer units than cards: kv
                heads
    experts     number of experts, of an expert
    plan        of a replicated tensor: its kind where a model is cut over several cards
    bound       true where the statistics of the output bound it from above and were not seen

From it follow the values that the ranks of one replica, which all run the same tokens, saw at each
site:

    site              replicated  column    row               expert
    input             same        same      channels          samples
    output            same        channels  partial or same   samples
    weight            same        channels  samples           samples
    k_cache, v_cache  same        samples
    k_heads, v_heads  same        channels
    query             same        samples
    gradient          same        channels  same              samples
    guided_input      same        same      channels          samples
    routed            same        same      same              samples

same: every rank all of it. channels: each rank its own channels. samples: each rank all channels of
its own samples (heads of queries and caches are samples of head_dim channels). partial: each rank a
summand of every sample. The channels of a weight are its rows, the output features; those of
k_heads and v_heads are heads; those of any other site are the last dimension of its tensor. Source:
Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.observers.keys import HEADS

KINDS = ("replicated", "column", "row", "expert")
OUTPUTS = {"column": ("sliced", "gathered", "reduced"), "row": ("partial", "reduced")}
AXES = {"column": 0, "row": 1}
Sharing = Literal["same", "channels", "samples", "partial"]
Placement = Mapping[str, Any]

_KEYS = {
    "kind",
    "axis",
    "offset",
    "length",
    "full_shape",
    "output",
    "unit",
    "copies",
    "experts",
    "plan",
    "bound",
}
_AGAIN = "measure again, or copy the folder again from where it was measured"


def check_placement(name: str, placement: Any, *, where: str) -> None:
    """Check one entry of `tensors`.

    Args:
        name: the source name.
        placement: the entry as it was read.
        where: the file or folder, for the message.

    Raises:
        InputError: naming the field and its value.
    """
    kind = placement.get("kind") if isinstance(placement, Mapping) else None
    if kind not in KINDS:
        raise InputError(
            f"{where}: tensors.{name} has kind {kind!r}, expected one of {', '.join(KINDS)}", _AGAIN
        )
    offset, length, shape = (placement.get(key) for key in ("offset", "length", "full_shape"))
    cut = str(placement.get("plan")) if kind == "replicated" else kind
    checks = {
        "full_shape": isinstance(shape, list)
        and len(shape) == 2
        and all(type(size) is int and size >= 0 for size in shape),
        "axis": placement.get("axis") == AXES.get(kind),
        "unit": type(placement.get("unit", 1)) is int and placement.get("unit", 1) >= 1,
        "copies": placement.get("copies", False) in (False, True),
        "plan": placement.get("plan") in (None, "column", "row"),
        "output": placement.get("output")
        in (*OUTPUTS.get(cut, ()), *(() if kind == "row" else (None,))),
        "bound": placement.get("bound", False) in (False, True),
    }
    if kind == "expert":
        experts = placement.get("experts")
        checks["experts"] = type(experts) is int and experts >= 1
        checks["offset"] = type(offset) is int and type(experts) is int and 0 <= offset < experts
        checks["length"] = type(length) is int and length in (0, 1)
    elif kind != "replicated":
        checks["length"] = type(length) is int and length >= 0
        checks["offset"] = type(offset) is int and offset >= 0
        if all(checks.values()):
            checks["offset + length"] = offset + length <= shape[AXES[kind]]
    for field, right in checks.items():
        if not right:
            raise InputError(
                f"{where}: tensors.{name}: {field} does not fit {dict(placement)}", _AGAIN
            )
    if unknown := set(placement) - _KEYS:
        raise InputError(
            f"{where}: tensors.{name} has unknown fields {sorted(unknown)}", "use a newer quantflow"
        )


def sharing(placement: Placement, site: str) -> Sharing:
    """The sharing of a site among the ranks of a replica; see the table above."""
    kind = placement["kind"]
    if kind == "replicated" or (site == "routed" and kind != "expert"):
        return "same"
    if site in HEADS:
        return "channels"
    if kind == "expert" or site not in ("input", "output", "weight", "gradient", "guided_input"):
        return "samples"
    if site == "output":
        if placement.get("output") in ("gathered", "reduced"):
            return "same"
        return "partial" if kind == "row" else "channels"
    if site == "weight":
        return "channels" if kind == "column" else "samples"
    if site == "gradient":  # of the output after it is added up
        return "channels" if kind == "column" else "same"
    return "same" if kind == "column" else "channels"


def channels(placement: Placement, site: str) -> int:
    """The number of channels that the statistics of this rank have at a site."""
    outputs, inputs = placement["full_shape"]
    if sharing(placement, site) == "channels":
        return int(placement["length"])
    return int(outputs if site in ("output", "weight", "gradient", *HEADS) else inputs)


def shares(placements: Sequence[Placement], site: str) -> list[list[int]]:
    """The positions in `placements` of cards that saw the same, together, in card order."""
    first = placements[0]
    if sharing(first, site) == "same" or first["kind"] == "expert":
        return [list(range(len(placements)))]
    positions: dict[Any, list[int]] = {}
    for position, placement in enumerate(placements):
        # Query heads are never copied, not even where cards share the key and value heads that the
        # placement is about.
        positions.setdefault(position if site == "query" else _piece(placement), []).append(
            position
        )
    return list(positions.values())


def check_cover(name: str, placements: Sequence[Placement]) -> None:
    """Refuse a replica's shares that are not the whole tensor, in order and each part once.

    Raises:
        StatisticsError: naming the shares.
    """
    first = placements[0]
    if first["kind"] not in AXES:
        return
    size = first["full_shape"][AXES[first["kind"]]]
    position = 0
    held = [_piece(placement) for placement in placements]
    # neighbouring cards hold neighbouring shares, so that a group of them holds one
    whole = held == sorted(held)
    for offset, length in dict.fromkeys(held):
        whole = whole and offset == position
        position += length
    if not whole or position != size:
        spans = ", ".join(f"{offset}-{offset + length}" for offset, length in held[:8])
        raise StatisticsError(
            f"{name}: {len(placements)} cards hold {spans} of {size} along axis "
            f"{AXES[first['kind']]}, in turn",
            "measure again; shares follow each other without hole or overlap, copies beside each "
            "other",
        )


def joined(placements: Iterable[Placement]) -> dict[str, Any]:
    """The placement of several ranks' shares together.

    Args:
        placements: placements of one tensor, on each of the ranks; neighbouring shares and copies.
    """
    parts = list(placements)
    first = parts[0]
    if first["kind"] == "replicated":
        return dict(first)
    if first["kind"] == "expert":
        return {**first, "length": max(placement["length"] for placement in parts)}
    held = list(dict.fromkeys(_piece(placement) for placement in parts))
    bound = {"bound": True} if len(held) > 1 and sharing(first, "output") == "partial" else {}
    offset, length = held[0][0], sum(length for _, length in held)
    if length < first["full_shape"][AXES[first["kind"]]]:
        return {**first, "offset": offset, "length": length, **bound}
    return {
        "kind": "replicated",
        "axis": None,
        "offset": 0,
        "full_shape": first["full_shape"],
        "plan": first["kind"],
        **{key: first[key] for key in ("output", "unit", "copies", "bound") if key in first},
        **bound,
    }


def is_elsewhere(placement: Placement) -> bool:
    """Whether a linear is an expert's that another card holds."""
    return placement["kind"] == "expert" and not placement["length"]


def holder_of(number: int, *, experts: int, cards: int) -> int:
    """The card that holds an expert: neighbouring experts lie on one card."""
    return number * cards // experts


def units_of(count: int, *, cards: int, card: int, copies: bool = False) -> tuple[int, int] | None:
    """The card's part of `count` units, (first, number of units), or None where they do not divide.

    Neighbouring units go to one card. With `copies`, units that are fewer than the cards go to
    several neighbouring ones, as runtimes do with kv heads.
    """
    if count % cards == 0:
        return card * (count // cards), count // cards
    if copies and cards % count == 0:
        return card * count // cards, 1
    return None


def share(name: str, whole: Placement, *, cards: int, card: int) -> dict[str, Any]:
    """The placement of one card's share of a tensor that a single rank holds, as its `plan` says.

    Args:
        name: its source name, for the message.
        whole: its placement on the single rank: replicated, or an expert. Its `output` is that on
            the cards; a row without one is taken to be `reduced`.
        cards: number of cards.
        card: number of this card.

    Raises:
        UsageError: naming the tensor and the numbers that do not divide.
    """
    if whole["kind"] == "expert":
        number, experts = whole["offset"], whole["experts"]
        if experts % cards:
            raise UsageError(
                f"{name}: {experts} experts over {cards} cards",
                "use a number of cards that divides them",
            )
        holder = holder_of(number, experts=experts, cards=cards)
        return {**whole, "length": int(holder == card)}
    plan = whole.get("plan")
    if cards == 1 or plan is None:
        return dict(whole)
    size = whole["full_shape"][AXES[plan]]
    unit = whole.get("unit", 1)
    held = units_of(size // unit, cards=cards, card=card, copies=whole.get("copies", False))
    if held is None:
        what = (
            f"{size // unit} heads"
            if unit > 1
            else f"{size} {'rows' if plan == 'column' else 'columns'}"
        )
        raise UsageError(
            f"{name}: {what} over {cards} cards", "use a number of cards that divides them"
        )
    placement = {
        "kind": plan,
        "axis": AXES[plan],
        "offset": held[0] * unit,
        "length": held[1] * unit,
        "full_shape": whole["full_shape"],
        **{key: whole[key] for key in ("output", "unit", "copies", "bound") if key in whole},
    }
    return placement if plan == "column" else {"output": "reduced", **placement}


def _piece(placement: Placement) -> tuple[int, int]:
    return placement["offset"], placement["length"]
