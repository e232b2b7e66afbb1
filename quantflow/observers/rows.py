"""Some of a linear's input rows as they are: what a search of smoothing factors tries its candidates on."""

import torch
from torch import Tensor

from quantflow.core import statistics

NAME = "rows"


class RowSample:
    """Rows at equal distances out of each call's.

    It lives for one layer and is in no measurement: its rows are worth as much as the text that they come from.
    The order of the calls is the order of the rows: one call per sequence, in sample order, is the canonical one.

    Args:
        features: size K of the last dimension of every x.
        each: how many rows are kept of a call, all of one that has fewer.
    """

    def __init__(self, features: int, *, each: int) -> None:
        """Start with nothing seen."""
        self._features, self._each = features, each
        self._kept: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        """Keep some of the rows.  x: [..., K], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf.
        """
        rows = statistics.finite_rows(x, self._features, observer=NAME)
        count = min(self._each, len(rows))
        chosen = (torch.arange(count) * 2 + 1) * len(rows) // (2 * max(1, count))
        self._kept.append(rows[chosen].cpu())

    def state(self) -> dict[str, Tensor]:
        """Return {"rows": [R, K] float32}."""
        return {NAME: torch.cat(self._kept) if self._kept else torch.zeros(0, self._features)}
