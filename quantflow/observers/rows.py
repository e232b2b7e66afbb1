"""Some of a linear's input rows as they are: what a search of smoothing factors tries its candidates on.

A static range that is tried on text which it was taken from clips nothing, whatever the factors
are. So there the rows are of some calls, and the range of each feature is of the others.
"""

import torch
from torch import Tensor

from quantflow.numerics import statistics

NAME = "rows"


class RowSample:
    """Rows at equal distances out of each call's.

    It lives for one layer and is in no measurement: its rows are worth as much as the text that
    they come from. The order of the calls is the order of the rows: one call per sequence, in
    sample order, is the canonical one.

    Args:
        features: size K of the last dimension of every x.
        each: how many rows are kept of a call, all of one that has fewer.
        apart: of that many calls the second gives rows, and the others ranges; 1 takes rows of all
            of them.
    """

    def __init__(self, features: int, *, each: int, apart: int = 1) -> None:
        """Start with nothing seen."""
        self._features, self._each, self._apart = features, each, apart
        self._kept: list[Tensor] = []
        self._ranges: list[Tensor] = []  # lowest and highest of each feature, [2, K]
        self._calls = 0

    def update(self, x: Tensor) -> None:
        """Keep some of the rows, or widen the ranges.  x: [..., K], any float dtype.

        Raises:
            StatisticsError: x has other features, or holds NaN or Inf.
        """
        rows = statistics.finite_rows(x, self._features, observer=NAME)
        self._calls += 1
        if self._apart > 1 and self._calls % self._apart != 2 % self._apart:
            if len(rows):
                seen = torch.cat([*self._ranges, rows])
                self._ranges = [torch.stack([seen.amin(0), seen.amax(0)])]  # [2, K]
            return
        count = min(self._each, len(rows))
        chosen = (
            (torch.arange(count, device=rows.device) * 2 + 1) * len(rows) // (2 * max(1, count))
        )
        self._kept.append(rows[chosen])

    def state(self) -> dict[str, Tensor]:
        """Return {"rows": [R, K] float32}, and of the other calls {"seen_min": [K], "seen_max": [K]}.

        Where only the first call has been, which gives a range, there are no rows.
        """
        rows = torch.cat(self._kept) if self._kept else torch.zeros(0, self._features)
        ranges = {
            name: ends
            for pair in self._ranges
            for name, ends in zip(("seen_min", "seen_max"), pair, strict=True)
        }
        return {NAME: rows, **ranges}
