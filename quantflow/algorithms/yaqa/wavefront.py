"""Error feedback over columns and rows at once, with many weights rounded side by side.

Rows and columns are numbered in the order in which they are rounded, and E = W - Q. H = (I + U) D
(I + U)^T with U strictly upper triangular (quantflow/numerics/feedback.py), and G = (I + M)^T D'
(I + M) with M strictly lower triangular. Let F = E + M E: row i of F is the error of row i with the
share of the rows rounded before it. Then

    tr(G E H E^T) = sum_ij D'_i D_j * |F_ij + sum_{k<j} F_ik U_kj|^2.

So row i aims at w_i + sum_{k<i} M_ik e_k, and is rounded column by column for that aim. (This is
the form for blocks of one row. Rows of a larger block do not make up for each other: M is zero
within it.)

A weight waits for the same column of the rows before it and for the columns before it of its own
row, for nothing else. So blocks of rows and of columns make tiles, and all tiles on a diagonal are
rounded together. There are as many steps as blocks of rows and columns together, not times each
other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantflow.algorithms.yaqa.points import round_
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.feedback import Feedback
from quantflow.numerics.grid import Grid

_COLUMNS = 32  # columns of a tile; part of the result, because it orders the sums
Tile = tuple[slice, slice]  # places of its rows, places of its columns


def working_bytes_of(features: int, rows: int, *, length: int) -> int:
    """The most memory that `round_rows` takes beyond its arguments and its result, in bytes.

    Errors twice, qvalues, and on a diagonal of tiles eight tensors as large as these, and the
    factors that carry errors between their columns.

    Args:
        features: columns of the weight.
        rows: rows of the weight.
        length: most rows of a block.
    """
    tiles = min(-(-rows // length), -(-features // _COLUMNS))
    return (2 * 4 + 1) * features * rows + 4 * tiles * _COLUMNS * (8 * length + _COLUMNS)


def round_rows(
    weight: Tensor,
    grid: Grid,
    *,
    scheme: TensorScheme,
    rows: Feedback,
    parts: Sequence[Tensor],
    columns: Feedback,
) -> Tensor:
    """Round a weight with feedback over columns and rows.

    Args:
        weight: [O, I], any float dtype.
        grid: scales of its points and zero points, one or more for each row.
        scheme: scheme of the weight.
        rows: factor of G, in the order of `parts`; overwritten.
        parts: rows in blocks, int64 each, from the last to be rounded to the first; rows of a block
            do not make up for each other.
        columns: factor of H, with the part below its diagonal above it too (`mirror_`): there a
            column's part is contiguous.

    Returns:
        The points (quantflow/algorithms/yaqa/points.py), [O, I] int8.
    """
    wave = _Wave(weight, grid, scheme=scheme, rows=rows, parts=parts, columns=columns)
    down, across = len(wave.down), len(wave.across)
    for diagonal in range(down + across - 1):
        first, last = max(0, diagonal - across + 1), min(diagonal, down - 1)
        wave.round_(
            [(wave.down[block], wave.across[diagonal - block]) for block in range(first, last + 1)]
        )
    qvalue = torch.empty_like(wave.qvalue)
    qvalue[rows.order] = wave.qvalue.index_select(1, torch.argsort(columns.order))
    return qvalue


class _Wave:
    """A weight that is being rounded, with rows and columns in reverse order of rounding.

    The last place is rounded first.

    Attributes:
        down, across: places of the blocks of rows and of columns, in the order in which they are
            rounded.
        qvalue: [O, I] int8, in places.
    """

    def __init__(
        self,
        weight: Tensor,
        grid: Grid,
        *,
        scheme: TensorScheme,
        rows: Feedback,
        parts: Sequence[Tensor],
        columns: Feedback,
    ) -> None:
        """Put everything into its place."""
        outputs, inputs = weight.shape
        stops = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
        self.down = [slice(start, stop) for start, stop in zip(stops[:-1], stops[1:], strict=True)][
            ::-1
        ]
        self.across = [slice(max(0, stop - _COLUMNS), stop) for stop in range(inputs, 0, -_COLUMNS)]
        self.qvalue = torch.empty(outputs, inputs, dtype=torch.int8)
        self._scheme, self._upper = scheme, columns.lower
        self._height = max(map(len, parts))
        self._scales = grid.scale[rows.order].T.contiguous()  # [G, O]
        self._zero_points = (
            None if grid.zero_point is None else grid.zero_point[rows.order].T.float().contiguous()
        )
        self._groups = columns.order // (inputs // grid.scale.shape[1])  # [I]
        self._errors = torch.empty(inputs, outputs)
        # the weights; once rounded, what rounding left of their aims (F)
        self._left = torch.empty(outputs, inputs)
        for block, part in zip(self.down[::-1], parts, strict=True):
            self._left[block] = weight[part].index_select(1, columns.order).float()
        self._owed = owed_(rows.lower, self.down)

    def round_(self, tiles: Sequence[Tile]) -> None:
        """Round the tiles of a diagonal."""
        shape = (_COLUMNS, self._height, len(tiles))
        real, wanted, target = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        scales, points = torch.ones(shape), torch.zeros(shape)
        zero_points = None if self._zero_points is None else torch.zeros(shape)
        # factors by which the error of a column reaches another
        reach = torch.zeros(_COLUMNS, _COLUMNS, 1, len(tiles))
        for index, tile in enumerate(tiles):
            (rows, columns), (at, to) = tile, _inside(tile)
            weights = self._left[rows, columns].T
            aim = torch.addmm(
                weights, self._errors[columns, rows.stop :], self._owed[rows, rows.stop :].T
            )
            real[at, to, index], wanted[at, to, index] = weights, aim
            target[at, to, index] = aim.addmm_(
                self._upper[columns, columns.stop :], self._left[rows, columns.stop :].T
            )
            group = self._groups[columns]
            scales[at, to, index] = self._scales[:, rows].index_select(0, group)
            if zero_points is not None and self._zero_points is not None:
                zero_points[at, to, index] = self._zero_points[:, rows].index_select(0, group)
            reach[at, at, 0, index] = self._upper[columns, columns].T
        for i in range(_COLUMNS - 1, -1, -1):
            torch.div(target[i], scales[i], out=points[i])
            zero_point = None if zero_points is None else zero_points[i]
            round_(points[i], zero_point, self._scheme)
            step = points[i] if zero_point is None else points[i] - zero_point
            wanted[i] -= step * scales[i]
            target[:i].addcmul_(reach[i, :i], wanted[i])
        steps = points if zero_points is None else points - zero_points
        errors = real - steps * scales
        qvalue = points.to(torch.int8)
        for index, tile in enumerate(tiles):
            (rows, columns), (at, to) = tile, _inside(tile)
            self._left[rows, columns] = wanted[at, to, index].T
            self._errors[columns, rows] = errors[at, to, index]
            self.qvalue[rows, columns] = qvalue[at, to, index].T


def _inside(tile: Tile) -> Tile:
    """The columns and rows that a tile fills of a tile of full size."""
    rows, columns = tile
    return slice(_COLUMNS - (columns.stop - columns.start), _COLUMNS), slice(
        0, rows.stop - rows.start
    )


def owed_(lower: Tensor, blocks: Sequence[slice]) -> Tensor:
    """Write I + M above the diagonal of the factor of G, without the blocks' own parts.

    A block's columns are divided by the factor of the block itself, so that rows within it do not
    make up for each other.
    """
    for block in blocks:
        within = lower[block, block].tril(-1) + torch.eye(block.stop - block.start)
        part = lower[block.stop :, block]
        lower[block, block.stop :] = torch.linalg.solve_triangular(
            within, part, upper=False, left=False, unitriangular=True
        ).T
    return lower
