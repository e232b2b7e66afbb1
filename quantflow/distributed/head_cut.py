"""The heads that each of several cards holds, and how they lie in the linears of an attention.

One description for all that cut a model: ranks that run an artifact (`quantflow.runtime.ranks`),
ranks that measure, and a measurement that says how cards would share it
(`quantflow.distributed.sharding`). It follows from a model's blueprint, hence from the row of its
family: which linears make heads, how many of queries, keys and values there are, and in which order
the rows of one linear of all three lie.

Query heads go to the cards in order. So do kv heads; fewer than the cards are held by several.
Where all queries read one key and value, as in Falcon 7B with its 71 heads, cards may have unequal
numbers of heads.
"""

from collections.abc import Sequence
from typing import Any

from quantflow.models.architecture import Blueprint

Spans = Sequence[tuple[int, int]]  # the first head or row of each card, and how many it holds


def units_of(
    count: int, *, cards: int, card: int, copies: bool = False, uneven: bool = False
) -> tuple[int, int] | None:
    """The card's part of `count` units, (first, number of units), or None where they do not divide.

    Neighbouring units go to one card. With `copies`, units that are fewer than the cards go to
    several neighbouring ones, as runtimes do with kv heads. With `uneven`, some cards may have one
    more than others.
    """
    if count % cards == 0 or (uneven and count >= cards):
        first = card * count // cards
        return first, (card + 1) * count // cards - first
    if copies and cards % count == 0:
        return card * count // cards, 1
    return None


def query_heads(blueprint: Blueprint, cards: int) -> Spans:
    """The first query head of each card and how many it holds."""
    count = blueprint.heads.num_heads
    return [
        held
        for card in range(cards)
        if (held := units_of(count, cards=cards, card=card, uneven=True)) is not None
    ]


def kv_heads(blueprint: Blueprint, cards: int) -> Spans:
    """The first kv head of each card and how many it holds; several hold one where they are few."""
    count = blueprint.heads.num_kv_heads
    return [
        held
        for card in range(cards)
        if (held := units_of(count, cards=cards, card=card, copies=True)) is not None
    ]


def go_whole(blueprint: Blueprint, cards: int) -> bool:
    """Whether every card has heads of its own, and the keys and values that they need."""
    heads = blueprint.heads
    if may_be_uneven(blueprint):
        return cards <= heads.num_heads
    return heads.num_heads % cards == 0 and len(kv_heads(blueprint, cards)) == cards


def may_be_uneven(blueprint: Blueprint) -> bool:
    """Whether cards may have unequal numbers of query heads: all read the same key and value."""
    heads = blueprint.heads
    return heads.num_kv_heads == 1 and blueprint.latent is None and not heads.whole_norms


def blocks_of(blueprint: Blueprint) -> int:
    """The number of blocks that heads lie in; 1 where nothing is fused."""
    return 1 if blueprint.fused.blocks is None else blueprint.fused.blocks


def heads_of_block(blueprint: Blueprint) -> dict[str, int]:
    """The number of queries, keys and values in a block of heads."""
    heads, blocks = blueprint.heads, blocks_of(blueprint)
    kv_heads = heads.num_kv_heads // blocks
    return {"q": heads.num_heads // blocks, "k": kv_heads, "v": kv_heads}


def units_in(blueprint: Blueprint) -> dict[str, dict[str, Any]]:
    """How heads lie along the axis on which each linear of an attention is cut.

    Args:
        blueprint: a model whose linears make queries, keys and values of heads.

    Returns:
        Name inside a layer -> the fields of a placement that say it: `unit`, `copies`, `uneven`,
        `blocks` and `parts` (`quantflow.distributed.placement`).
    """
    names, width = blueprint.names, blueprint.heads.head_dim
    uneven = {"uneven": True} if may_be_uneven(blueprint) else {}
    queries = {"unit": width, **uneven}
    if len(names.qkv) == 3:
        query, *others = names.qkv
        copied = {"unit": width, "copies": True}
        return {query: queries, **dict.fromkeys(others, copied), names.output: queries}
    counts, blocks = heads_of_block(blueprint), blocks_of(blueprint)
    if blocks == blueprint.heads.num_heads:  # a head's three lie together, and go together
        return {names.qkv[0]: {"unit": sum(counts.values()) * width}, names.output: queries}
    parts = [
        {"units": counts[part], **(uneven if part == "q" else {"copies": True})}
        for part in blueprint.fused.order
    ]
    fused = {"unit": width, "blocks": blocks, "parts": parts}
    return {names.qkv[0]: fused, names.output: queries}
