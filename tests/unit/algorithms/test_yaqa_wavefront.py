"""Feedback on both sides, tile by tile, against one weight after another in float64."""

import pytest
import torch

from quantflow.algorithms.yaqa import wavefront
from quantflow.algorithms.yaqa.descent import apart
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.cholesky import mirror_
from quantflow.numerics.feedback import feedback_of
from quantflow.numerics.grid import Grid

INT4 = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=8)


def second_moment(size, seed):
    x = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed)) * torch.logspace(
        -0.4, 0.4, size
    )
    x += x.roll(1, dims=1)
    return x.T @ x


def damped(matrix, by):
    matrix = matrix.double()
    return matrix + by * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)


def one_by_one(weight, grid, outputs, inputs, parts):
    """Round every weight by itself: in a block of rows the rows owe each other nothing."""
    order = torch.argsort(inputs.diagonal(), descending=True, stable=True)
    columns, rows = damped(inputs, 0.01)[order][:, order], damped(outputs, 0.03)
    size = weight.shape[1] // grid.scale.shape[1]
    qvalue, errors = torch.zeros(weight.shape), torch.zeros(weight.shape, dtype=torch.float64)
    done: list[int] = []
    for part in reversed(parts):
        for row in part.tolist():
            # The change of the row that the errors of rounded ones call for, if all that are free
            # could be any real number.
            free = [
                row,
                *(other for other in range(len(weight)) if other not in done and other != row),
            ]
            owed = torch.linalg.solve(rows[free][:, free], rows[free][:, done])[0] @ errors[done]
            left = torch.zeros(weight.shape[1], dtype=torch.float64)
            for at, column in enumerate(order.tolist()):
                fixed, open_ = list(range(at)), list(range(at, len(order)))
                push = (
                    torch.linalg.solve(columns[open_][:, open_], columns[open_][:, fixed])[0]
                    if at
                    else left[:0]
                )
                wanted = weight[row, column].double() + owed[column] + push @ left[order[fixed]]
                scale, zero = grid.scale[row, column // size].double(), 0.0
                if grid.zero_point is not None:
                    zero = grid.zero_point[row, column // size].double()
                q = (wanted / scale + zero).round().clamp(-8, 7)
                qvalue[row, column] = q
                real = scale * (q - zero)
                left[column] = weight[row, column].double() + owed[column] - real
                errors[row, column] = weight[row, column].double() - real
        done += part.tolist()
    return qvalue.to(torch.int8)


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("rows", "columns", "length"), [(1, 8, 8), (5, 40, 2), (9, 8, 4), (13, 72, 8), (20, 32, 1)]
)
def test_every_weight_is_rounded_as_one_after_the_other(rows, columns, length, zero_points):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator)
    count = columns // 8
    scale = 0.2 + 0.2 * torch.rand(rows, count, generator=generator)
    scale[:, ::2] *= 1 if zero_points else -1
    zero_point = (
        torch.randint(-3, 4, (rows, count), generator=generator).to(torch.int8)
        if zero_points
        else None
    )
    grid = Grid(scale=scale, zero_point=zero_point, zero_groups=0)
    outputs, inputs = second_moment(rows, 1), second_moment(columns, 2)
    parts = apart(rows, length)
    given = feedback_of(inputs, name="w")
    mirror_(given.lower.T)
    sides = feedback_of(outputs, name="w", dampings=[0.03], order=torch.cat(parts))
    found = wavefront.round_rows(weight, grid, scheme=INT4, rows=sides, parts=parts, columns=given)
    assert torch.equal(found, one_by_one(weight, grid, outputs, inputs, parts))


def test_the_memory_of_a_diagonal_is_that_of_its_tiles():
    small, large = (wavefront.working_bytes_of(256, rows, length=8) for rows in (64, 128))
    # errors twice and qvalues; eight tiles across are on a diagonal of either
    assert large - small == 64 * 256 * 9
