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
    spans       runs of a column's share, [[offset, length], ...], where there are several: `offset`
                is then the first's, `length` that of all
    unit        length along the axis that is never cut: head_dim where heads lie along it; 1 where
                it is left out
    copies      true where a unit goes to several cards when there are fewer units than cards: kv
                heads
    uneven      true where cards may have unequal numbers of units: query heads that all read the
                same key and value
    blocks      where several parts lie along the axis, how often they follow each other
    parts       these parts, in order, each cut by itself: [{units, copies, uneven}, ...]. Queries,
                keys and values of one linear are three; blocks go whole where there are enough
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

from quantflow.distributed.head_cut import units_of
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
    "spans",
    "unit",
    "copies",
    "uneven",
    "blocks",
    "parts",
    "experts",
    "plan",
    "bound",
}
# how an axis is cut, which every share of it says again
_CUT = ("output", "unit", "copies", "uneven", "blocks", "parts", "bound")
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
        "uneven": placement.get("uneven", False) in (False, True),
        "blocks": type(placement.get("blocks", 1)) is int and placement.get("blocks", 1) >= 1,
        "parts": _are_parts(placement.get("parts", [{"units": 1}])),
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
        if all(checks.values()) and "spans" in placement:
            checks["spans"] = _are_spans(placement["spans"], placement, size=shape[AXES[kind]])
    for field, right in checks.items():
        if not right:
            raise InputError(
                f"{where}: tensors.{name}: {field} does not fit {dict(placement)}", _AGAIN
            )
    if unknown := set(placement) - _KEYS:
        raise InputError(
            f"{where}: tensors.{name} has unknown fields {sorted(unknown)}", "use a newer quantflow"
        )


def _are_parts(parts: Any) -> bool:
    """Whether a record's parts of an axis can be read."""
    return (
        isinstance(parts, list)
        and bool(parts)
        and all(
            isinstance(part, Mapping)
            and not set(part) - {"units", "copies", "uneven"}
            and type(part.get("units")) is int
            and part["units"] >= 1
            and all(part.get(key, False) in (False, True) for key in ("copies", "uneven"))
            for part in parts
        )
    )


def _are_spans(spans: Any, placement: Placement, *, size: int) -> bool:
    """Whether a record's runs follow each other along an axis of `size`, and are its share."""
    if placement["kind"] != "column" or not isinstance(spans, list) or len(spans) < 2:
        return False
    if not all(
        isinstance(span, list)
        and len(span) == 2
        and all(type(each) is int for each in span)
        and span[1] >= 1
        for span in spans
    ):
        return False
    ends = [0, *(offset + length for offset, length in spans)]
    return (
        all(offset >= end for (offset, _), end in zip(spans, ends, strict=False))
        and ends[-1] <= size
        and spans[0][0] == placement["offset"]
        and sum(length for _, length in spans) == placement["length"]
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
        positions.setdefault(position if site == "query" else spans_of(placement), []).append(
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
    held = [spans_of(placement) for placement in placements]
    # neighbouring cards hold neighbouring shares, so that a group of them holds one
    whole = held == sorted(held)
    shared = any(part.get("copies") for part in first.get("parts", ()))
    lengths = sum(length for piece in dict.fromkeys(held) for _, length in piece)
    if not whole or _union(held) != ((0, size),) or (lengths != size and not shared):
        spans = ", ".join(
            " and ".join(f"{offset}-{offset + length}" for offset, length in piece)
            for piece in held[:8]
        )
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
    held = {spans_of(placement) for placement in parts}
    bound = {"bound": True} if len(held) > 1 and sharing(first, "output") == "partial" else {}
    spans = _union(held)
    if spans != ((0, first["full_shape"][AXES[first["kind"]]]),):
        kept = {key: value for key, value in first.items() if key != "spans"}
        return {**kept, **_as_share(spans), **bound}
    return {
        "kind": "replicated",
        "axis": None,
        "offset": 0,
        "full_shape": first["full_shape"],
        "plan": first["kind"],
        **{key: first[key] for key in _CUT if key in first},
        **bound,
    }


def is_elsewhere(placement: Placement) -> bool:
    """Whether a linear is an expert's that another card holds."""
    return placement["kind"] == "expert" and not placement["length"]


def holder_of(number: int, *, experts: int, cards: int) -> int:
    """The card that holds an expert: neighbouring experts lie on one card."""
    return number * cards // experts


def units_of_parts(
    parts: Sequence[Mapping[str, Any]], blocks: int, *, cards: int, card: int
) -> list[tuple[int, int]] | None:
    """The card's runs of units, (first, number), of parts that follow each other in blocks.

    A card has whole blocks, or where they are fewer than the cards a part of each part of one.

    Args:
        parts: see the placement's field.
        blocks: how often they follow each other.
        cards: number of cards.
        card: number of this card.

    Returns:
        The runs in order; None where blocks or parts do not divide.
    """
    size = sum(part["units"] for part in parts)
    if blocks % cards == 0:
        return [(card * (blocks // cards) * size, blocks // cards * size)]
    if cards % blocks:
        return None
    inside = cards // blocks
    block, place = divmod(card, inside)
    runs, begin = [], block * size
    for part in parts:
        held = units_of(
            part["units"],
            cards=inside,
            card=place,
            copies=part.get("copies", False),
            uneven=part.get("uneven", False),
        )
        if held is None:
            return None
        runs.append((begin + held[0], held[1]))
        begin += part["units"]
    return runs


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
    held = _held_units(whole, size // unit, cards=cards, card=card)
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
        **_as_share(_union([[(first * unit, count * unit) for first, count in held]])),
        "full_shape": whole["full_shape"],
        **{key: whole[key] for key in _CUT if key in whole},
    }
    return placement if plan == "column" else {"output": "reduced", **placement}


def _held_units(
    whole: Placement, count: int, *, cards: int, card: int
) -> list[tuple[int, int]] | None:
    """The card's runs of the `count` units of an axis; None where they do not divide."""
    if "parts" in whole:
        return units_of_parts(whole["parts"], whole.get("blocks", 1), cards=cards, card=card)
    held = units_of(
        count,
        cards=cards,
        card=card,
        copies=whole.get("copies", False),
        uneven=whole.get("uneven", False),
    )
    return None if held is None else [held]


def spans_of(placement: Placement) -> tuple[tuple[int, int], ...]:
    """The runs of a share along its axis, (offset, length) in order."""
    spans = placement.get("spans", [[placement["offset"], placement["length"]]])
    return tuple((offset, length) for offset, length in spans)


def _as_share(spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The fields of a placement that say where its share lies."""
    share_of = {"offset": spans[0][0], "length": sum(length for _, length in spans)}
    return share_of if len(spans) == 1 else {**share_of, "spans": [list(span) for span in spans]}


def _union(pieces: Iterable[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """The runs of several shares together, in order; neighbouring ones are one."""
    whole: list[tuple[int, int]] = []
    for offset, length in sorted(span for piece in pieces for span in piece):
        if whole and offset <= sum(whole[-1]):
            begin, held = whole.pop()
            offset, length = begin, max(held, offset + length - begin)
        whole.append((offset, length))
    return tuple(whole)
