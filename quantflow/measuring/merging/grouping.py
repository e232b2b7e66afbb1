"""The ranks that become one: groups as people write them, and whether they make sense on a mesh.

Rank r of a mesh of dp replicas with tp cards each is card r % tp of replica r // tp.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantflow.errors import UsageError

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Groups that are the ranks of a smaller mesh.

    Attributes:
        tp: cards of a replica afterwards.
        dp: replicas afterwards.
        groups: ranks that become each rank afterwards, one row per replica, cards in order.
    """

    tp: int
    dp: int
    groups: tuple[tuple[tuple[int, ...], ...], ...]


def parse_groups(text: Sequence[str], world: int) -> list[list[int]]:
    """Groups of ranks that are merged, from the way people write them.

    A group is a list of ranks and ranges, `0,1,2,3` or `4-7`. With at most ten ranks also digits
    alone: `0123` is ranks 0, 1, 2 and 3. With more than ten ranks `12` is rank 12, and `01` is
    refused.

    Args:
        text: one group each; a string may also hold several, separated by spaces or, as Gaudi's
            users write them, by `--`.
        world: number of ranks that measured.

    Returns:
        Groups in the order given, each sorted.

    Raises:
        UsageError: a group cannot be read; a rank is missing, named twice or unknown; groups differ
            in size.
    """
    words = [word for part in text for word in part.replace("--", " ").split()]
    groups = [_parse_group(word, world) for word in words]
    check_groups(groups, world)
    return [sorted(group) for group in groups]


def consecutive_groups(count: int, world: int) -> list[list[int]]:
    """`count` groups of neighbouring ranks.

    Raises:
        UsageError: the ranks do not divide into so many groups.
    """
    if count < 1 or world % count:
        divisors = [str(number) for number in range(1, world + 1) if world % number == 0]
        raise UsageError(
            f"{world} ranks into {count} groups of one size", f"use one of {', '.join(divisors)}"
        )
    size = world // count
    return [list(range(first, first + size)) for first in range(0, world, size)]


def check_groups(groups: Sequence[Sequence[int]], world: int) -> None:
    """Check that groups are of one size and hold every rank exactly once.

    Raises:
        UsageError: naming the ranks that are missing, named twice or unknown.
    """
    times = Counter(rank for group in groups for rank in group)
    faults = {
        "missing": [rank for rank in range(world) if rank not in times],
        "named twice": sorted(rank for rank, count in times.items() if count > 1),
        "unknown": sorted(rank for rank in times if not 0 <= rank < world),
    }
    problems = "; ".join(f"{fault} {some(ranks)}" for fault, ranks in faults.items() if ranks)
    if problems:
        raise UsageError(
            f"groups of {world} ranks: {problems}", "name every rank in exactly one group"
        )
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1 or not sizes[0]:
        raise UsageError(
            f"groups of {' and '.join(map(str, sizes)) or 'no'} ranks",
            "give every group as many ranks",
        )


def arrange(groups: Sequence[Sequence[int]], *, tp: int) -> Arrangement:
    """The smaller mesh whose ranks these groups are, group i being rank i.

    A group takes the same neighbouring cards from each of its replicas: a card of a smaller mesh
    holds neighbouring slices, so a group of cards 0 and 2 would measure what no card holds.
    Replicas may be grouped in any way.

    Args:
        groups: every rank exactly once, in groups of one size.
        tp: cards of a replica.

    Raises:
        UsageError: naming the group and the cards that do not fit.
    """
    labels = [f"group {index} ({some(group)})" for index, group in enumerate(groups)]
    rows = [_rows(group, tp, where) for group, where in zip(groups, labels, strict=True)]
    size = len(rows[0][0])
    parts = tp // size
    for index, (group, where) in enumerate(zip(rows, labels, strict=True)):
        held = [rank % tp for rank in group[0]]
        first = index % parts * size
        if tp % size or held != list(range(first, first + size)):
            due = (
                f"{first} to {first + size - 1} are due"
                if tp % size == 0
                else f"{size} do not divide {tp}"
            )
            raise UsageError(
                f"{where}: takes cards {some(held)} of the {tp} that hold one model, {due}",
                f"give neighbouring ranks, in order, such as {_example(tp, size)}",
            )
        replicas, beside = (
            [row[0] // tp for row in one] for one in (group, rows[index - index % parts])
        )
        if replicas != beside:
            raise UsageError(
                f"{where}: takes replicas {some(replicas)} of the model, the group before it "
                f"{some(beside)}",
                f"list the {parts} groups of the same replicas one after the other",
            )
    return Arrangement(tp=parts, dp=len(groups) // parts, groups=tuple(rows))


def some(values: Iterable[int] | Iterable[str]) -> str:
    """Up to eight values in ascending order, for a message."""
    listed = sorted(values)
    return (", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")) or "none"


def _parse_group(word: str, world: int) -> list[int]:
    if world <= 10 and re.fullmatch("[0-9]+", word):
        return [int(digit) for digit in word]
    ranks: list[int] = []
    for item in word.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if (
            not match
            or any(len(number) > 1 and number[0] == "0" for number in (first, last))
            or int(last) < int(first)
        ):
            raise UsageError(
                f"group {word!r}: {item!r} is neither a rank nor a range of ranks",
                "write ranks as 0,1,2,3 or 0-3"
                + (", and digits alone as 0123" if world <= 10 else ""),
            )
        if int(last) >= world:
            raise UsageError(
                f"group {word!r}: rank {last} does not exist", f"ranks are 0..{world - 1}"
            )
        ranks += range(int(first), int(last) + 1)
    return ranks


def _rows(group: Sequence[int], tp: int, where: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of a group, one row per replica; each row has to have the same cards."""
    rows: dict[int, list[int]] = {}
    for rank in sorted(group):
        rows.setdefault(rank // tp, []).append(rank)
    cards = {replica: [rank % tp for rank in row] for replica, row in rows.items()}
    first = min(cards)
    for replica, held in cards.items():
        if held != cards[first]:
            raise UsageError(
                f"{where}: holds cards {some(cards[first])} of replica {first} and {some(held)} "
                f"of replica {replica} (tp={tp})",
                "take the same cards from every replica of a group",
            )
    return tuple(tuple(row) for row in rows.values())


def _example(tp: int, size: int) -> str:
    size = size if tp % size == 0 else tp
    return " ".join(
        ",".join(str(rank) for rank in range(first, first + size)) for first in range(0, tp, size)
    )
