"""What observers saw of many sequences, added up in an order that ranks share.

Vectors of float64 are kept for each of the sixteen parts of the calibration set
(quantflow/numerics/fixed_tree.py), so that 2, 4, 8 or 16 replicas have the sums of one process. A
matrix is too large to be there so often: it is added up in the order of the sequences.
"""

from typing import Any

from quantflow.numerics.fixed_tree import PARTS, folded, leaf_of
from quantflow.observers import summed_in_parts

Observers = dict[str, list[Any]]  # `<source name>|<site>` -> observers


class Totals:
    """Observers of all sequences so far."""

    def __init__(self) -> None:
        """Begin without sequences."""
        # by site and place among its observers: leaf of the tree -> observer; one leaf where the
        # order of the sequences counts, or none does
        self._leaves: dict[str, list[dict[int, Any]]] = {}

    def add(self, index: int, observers: Observers) -> None:
        """Take in what one sequence showed; `observers` is empty afterwards.

        Args:
            index: number of the sequence in the whole calibration set.
            observers: the sequence's own.
        """
        for site in list(observers):
            seen = observers.pop(site)
            places = self._leaves.setdefault(site, [{} for _ in seen])
            for leaves, more in zip(places, seen, strict=True):
                leaf = leaf_of(index) if summed_in_parts(more.NAME) else 0
                if leaf in leaves:
                    leaves[leaf].merge(more)
                else:
                    leaves[leaf] = more

    def take(self) -> Observers:
        """The observers of all sequences, after which this has none."""
        whole = {
            site: [
                folded([leaves.get(leaf) for leaf in range(PARTS)], _merged) for leaves in places
            ]
            for site, places in self._leaves.items()
        }
        self._leaves = {}
        return whole


def _merged(kept: Any | None, more: Any | None) -> Any:
    """Two subtrees' observer; a subtree without sequences has none."""
    if kept is None or more is None:
        return more if kept is None else kept
    kept.merge(more)
    return kept
