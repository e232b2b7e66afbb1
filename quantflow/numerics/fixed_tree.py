"""Sums whose order does not depend on how many ranks add up: sixteen parts, in a tree.

Sequence i of a calibration set is in part i mod 16. A part is summed in the order of its sequences,
and the parts are the leaves of a tree of pairs:

    (((0 + 8) + (4 + 12)) + ((2 + 10) + (6 + 14))) + (((1 + 9) + (5 + 13)) + ...)

Of 2, 4, 8 or 16 replicas each has the sequences of one subtree (`sequences_of`), whose sum is what
the replica writes; neighbouring replicas are siblings, so merging pairs of neighbours goes on up
the tree. The sum of floats is then that of one process, bit for bit. Other numbers of replicas
share sequences alternately, and their sums have an order of their own.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

PARTS = 16

Item = TypeVar("Item")


def leaf_of(index: int) -> int:
    """The place of a sequence's part among the leaves: the bits of index mod 16 in reverse."""
    return _reversed(index % PARTS, PARTS)


def sequences_of(replica: int, *, replicas: int, samples: int) -> list[int]:
    """The numbers of the sequences of a replica, those of one subtree where there is one."""
    one_each = replicas <= PARTS and replicas & (replicas - 1) == 0
    first = _reversed(replica, replicas) if one_each else replica
    return list(range(first, samples, replicas))


def folded(items: Sequence[Item], add: Callable[[Item, Item], Item]) -> Item:
    """The sum of items, the halves of which are summed first.

    Args:
        items: at least one, in the order of leaves or replicas.
        add: sum of two; may return its first argument, modified.
    """
    if len(items) == 1:
        return items[0]
    half = 1 << (len(items) - 1).bit_length() - 1  # the largest power of two below their number
    return add(folded(items[:half], add), folded(items[half:], add))


def _reversed(number: int, count: int) -> int:
    """A number below `count`, a power of two, with its bits in reverse."""
    bits = count.bit_length() - 1
    return sum((number >> bit & 1) << bits - 1 - bit for bit in range(bits))
