"""One option for each of several items: the least sum of one number under a limit of the other's.

The multiple-choice knapsack problem: an item is a group of linears, an option a scheme for it, with
its bits and the divergence that it is expected to cost. Either number can be the one that is
limited.

For a price per unit of the limited number the best options are each item's own affair. As the price
falls they walk along the lower convex hull of all combinations, one step of one item at a time
(`frontier`). Between two corners of the hull `solve_multiple_choice_knapsack` goes on from the
price at which the limit is reached: a combination better than the one at hand can only hold options
that lose less at that price than it is from the bound that the price gives. The other options are
searched item by item, keeping combinations that no other beats in both sums. Sources: Everett 1963,
"Generalized Lagrange multiplier method"; Kellerer, Pferschy, Pisinger 2004, "Knapsack problems",
chapter 11 (hull, bounds and fixing of options); Nemhauser, Ullmann 1969 (lists of undominated
sums).
"""

from collections.abc import Sequence
from typing import NamedTuple

Option = tuple[float, float]  # what is limited, what is to be small; each at least 0 and finite
# combinations that are kept after an item, those nearest to the bound; above it the result may be
# no optimum
MOST_SUMS = 2000


class _HullStep(NamedTuple):
    """A step from one option of an item to the next on its hull.

    `gain` is the saving per unit of the limited number.
    """

    gain: float
    item: int
    option: int


class _Sums(NamedTuple):
    """A combination of the options of the first items.

    Attributes:
        limited, small: sums of its numbers.
        loss: its loss at the price, compared with the best options.
        before, option: the combination that it extends, and by which option; None for no items.
    """

    limited: float
    small: float
    loss: float
    before: "_Sums | None"
    option: int


def frontier(items: Sequence[Sequence[Option]]) -> list[tuple[int, ...]]:
    """The combinations at the corners of the lower convex hull, in order of the limited number.

    Args:
        items: options of each, at least one.

    Returns:
        The option of every item, by number.
    """
    hulls = [_hull(options) for options in items]
    picks = [hull[0] for hull in hulls]
    corners = [tuple(picks)]
    for step in _steps(items, hulls):
        picks[step.item] = step.option
        corners.append(tuple(picks))
    return corners


def solve_multiple_choice_knapsack(
    items: Sequence[Sequence[Option]], limit: float
) -> tuple[int, ...] | None:
    """The combination with the smallest second sum among those whose first sum is at most `limit`.

    It is the best one as long as no more than MOST_SUMS combinations have to be kept after an item;
    then still at most one step of one item worse than the hull.

    Args:
        items: options of each, at least one.
        limit: limit of the sum of the options' first numbers.

    Returns:
        The option of every item, by number; None where even the smallest first numbers add up to
        more than `limit`.
    """
    hulls = [_hull(options) for options in items]
    picks = [hull[0] for hull in hulls]
    used = _sum(items, picks, 0)
    if used > limit:
        return None
    price = 0.0
    stopped = set()
    for step in _steps(items, hulls):
        more = items[step.item][step.option][0] - items[step.item][picks[step.item]][0]
        if step.item not in stopped and used + more <= limit:
            picks[step.item] = step.option
            used += more
        else:
            price = price or step.gain
            stopped.add(step.item)
    return _better(items, limit, tuple(picks), price) or tuple(picks)


def _better(
    items: Sequence[Sequence[Option]], limit: float, picks: tuple[int, ...], price: float
) -> tuple[int, ...] | None:
    """The best combination that is better than `picks`, or None where there is none.

    Args:
        items: see `solve_multiple_choice_knapsack`.
        limit: see `solve_multiple_choice_knapsack`.
        picks: a combination within the limit.
        price: price at which the hull crosses the limit.
    """
    best = [min(b + price * a for a, b in options) for options in items]
    gap = _sum(items, picks, 1) - (sum(best) - price * limit)
    rest = [0.0] * (len(items) + 1)  # what the items from here on take at least
    for index in range(len(items) - 1, -1, -1):
        rest[index] = rest[index + 1] + min(a for a, _ in items[index])
    sums = [_Sums(0, 0.0, 0.0, None, -1)]
    for index, options in enumerate(items):
        losses = [b + price * a - best[index] for a, b in options]
        useful = [
            (number, *options[number], loss) for number, loss in enumerate(losses) if loss < gap
        ]
        grown = [
            _Sums(before.limited + a, before.small + b, before.loss + loss, before, number)
            for before in sums
            for number, a, b, loss in useful
            if before.loss + loss < gap and before.limited + a + rest[index + 1] <= limit
        ]
        sums = _undominated(grown)
    smallest = min(sums, key=lambda one: one.small, default=None)
    if smallest is None or smallest.small >= _sum(items, picks, 1):
        return None
    return _options_of(smallest)


def _undominated(sums: list[_Sums]) -> list[_Sums]:
    """The combinations that no other beats in both sums, at most MOST_SUMS of them."""
    kept: list[_Sums] = []
    for one in sorted(sums, key=lambda one: (one.limited, one.small)):
        if not kept or one.small < kept[-1].small:
            kept.append(one)
    return sorted(kept, key=lambda one: one.loss)[:MOST_SUMS]


def _options_of(sums: _Sums) -> tuple[int, ...]:
    picks: list[int] = []
    while sums.before is not None:
        picks.append(sums.option)
        sums = sums.before
    return tuple(picks[::-1])


def _hull(options: Sequence[Option]) -> list[int]:
    """The options at the corners of their lower convex hull, from the least first number on.

    A line has two corners.
    """
    kept: list[int] = []
    for number in sorted(range(len(options)), key=lambda number: options[number]):
        if kept and options[number][1] >= options[kept[-1]][1]:
            continue
        while len(kept) > 1 and _gain(options, kept[-1], number) >= _gain(
            options, kept[-2], kept[-1]
        ):
            kept.pop()
        kept.append(number)
    return kept


def _steps(items: Sequence[Sequence[Option]], hulls: Sequence[Sequence[int]]) -> list[_HullStep]:
    """The steps along all hulls, by gain, the largest first; those of an item in its own order."""
    steps = [
        _HullStep(_gain(items[item], before, after), item, after)
        for item, hull in enumerate(hulls)
        for before, after in zip(hull, hull[1:], strict=False)
    ]
    return sorted(steps, key=lambda step: -step.gain)


def _gain(options: Sequence[Option], before: int, after: int) -> float:
    """The saving per unit of the limited number from one option to a larger one."""
    return (options[before][1] - options[after][1]) / (options[after][0] - options[before][0])


def _sum(items: Sequence[Sequence[Option]], picks: Sequence[int], number: int) -> float:
    return sum(options[pick][number] for options, pick in zip(items, picks, strict=True))
