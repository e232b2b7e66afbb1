"""A sample of a linear's input rows, for a search of smoothing factors.

A static range clips nothing of the text that it was measured on, whatever the factors are. So rows
and ranges come from different calls: some calls give rows, the others the range of each feature.
"""

import torch
from torch import Tensor

from quantflow.numerics import statistics

NAME = "rows"


class RowSample:
    """Rows at equal distances out of each call's.

    It lives for one layer and is in no measurement, since its rows are as confidential as the text
    that they come from. The order of the calls is the order of the rows: one call per sequence, in
    sample order, is the canonical one.

    Args:
        features: size K of the last dimension of every x.
        each: number of rows that are kept of a call; a call of fewer rows gives all.
        apart: length of a cycle of calls, of which the second gives rows and the others ranges; 1
            takes rows of all calls.
    """

    def __init__(self, features: int, *, each: int, apart: int = 1) -> None:
        """Begin without samples."""
        self._features, self._each, self._apart = features, each, apart
        self._kept: list[Tensor] = []
        self._ranges: list[Tensor] = []  # lowest and highest of each feature, [2, K]
        self._calls = 0

    def update(self, x: Tensor) -> None:
        """Keep some of the rows, or widen the ranges.

        Args:
            x: samples, [..., K], any float dtype.

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
        """The rows, "rows" [R, K] float32, and the ranges, "seen_min" and "seen_max" [K].

        Ranges are there where a call gave one. After a first call that gives a range there are no
        rows.
        """
        rows = torch.cat(self._kept) if self._kept else torch.zeros(0, self._features)
        ranges = {
            name: ends
            for pair in self._ranges
            for name, ends in zip(("seen_min", "seen_max"), pair, strict=True)
        }
        return {NAME: rows, **ranges}
