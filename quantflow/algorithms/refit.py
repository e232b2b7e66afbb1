"""Refitting: a weight makes up for what quantized linears before it did to the hidden state.

A linear of the quantized model receives x' where the original receives x, and what it puts out may
be added to a hidden state that has drifted by r. The weight W [O, I] aims at the original's sum all
the same:

    sum_t |W x_t + r_t - W* x'_t|^2 + damping |W* - W|^2

is least for

    W* = W + (W D + R) (C + damping I)^-1,
    D = sum_t (x_t - x'_t) x'_t^T,    R = sum_t r_t x'_t^T,    C = sum_t x'_t x'_t^T,

and a rounding Q of W* loses tr((W* - Q) C (W* - Q)^T) more, so it is rounded by C as its Hessian.
All sums are over the calibration text. The damping keeps W* near W in directions that the text
hardly has, and is the larger the fewer tokens there are: a share of `DAMPING` + I / N of C's mean
diagonal for N tokens, since W* has I numbers for each output to learn from them. Sources: Li et al.
2025, "GPTAQ", arXiv:2504.02692, and Zhang et al. 2025, "Qronos", arXiv:2505.11695, for D; Lin, Wan
2025, "LoaQ", arXiv:2509.06297, for R.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core.groups import spans
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.support import Refusal, Supports
from quantflow.errors import StatisticsError
from quantflow.numerics.cholesky import cholesky_
from quantflow.numerics.statistics import COUNT
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver, add_products_

NAME: str = "refit"
VERSION: int = 2
_LEAVE_OUT = "give `--no-refit`, in a recipe `refit: false`"
SUPPORTS = Supports(
    layer_inputs=Refusal(
        why="; it reads the inputs of both models", remedy="leave quantized_inputs out"
    ),
    ranks=Refusal(
        why="; it runs in one process", remedy=f"{_LEAVE_OUT}, or quantize with one process"
    ),
)

# A constant, since it is part of the result: the damping over C's mean diagonal, for many tokens.
# On tiny-llama at W2A16 0.03 and 0.3 are within 3 % of it (docs/accuracy.md).
DAMPING = 0.1
_ROWS = 256  # rows that are solved for at once


class RefitSums:
    """The sums C, D and R over the calibration text of an input that linears share."""

    def __init__(self, *, features: int, hidden: int = 0) -> None:
        """Begin without a token.

        Args:
            features: I, in_features of the linears.
            hidden: features of the hidden state to which their outputs are added; 0 where they are
                added to none, or how it drifted is not known.
        """
        self.moment = HessianObserver(features=features)
        self.drift = torch.zeros(features, features)
        self.residual = torch.zeros(hidden, features) if hidden else None

    def update(self, original: Tensor, quantized: Tensor, residual: Tensor | None) -> None:
        """Add a sequence.

        Args:
            original: x, [..., I], float32.
            quantized: x' of the same tokens.
            residual: r of the same tokens, [..., H]; None without.
        """
        rows = quantized.reshape(-1, quantized.shape[-1])
        self.moment.update(rows)
        add_products_(self.drift, original.reshape(rows.shape) - rows, rows)
        if self.residual is not None and residual is not None:
            add_products_(self.residual, residual.reshape(len(rows), -1), rows)

    def statistics(self) -> dict[str, Tensor]:
        """`hessian_sum` [I, I], which is C, and `count` []; C is taken out."""
        return self.moment.take()

    def solver(
        self, statistics: Mapping[str, Tensor], *, name: str, workers: Workers = SEQUENTIAL
    ) -> "Solver":
        """What solves for W* of the linears that share the input.

        Args:
            statistics: those that `statistics` returned.
            name: a linear, for errors.
            workers: factorize; how many there are changes nothing but the time.

        Raises:
            StatisticsError: the sums are not finite.
        """
        hessian_sum, tokens = statistics[HESSIAN_SUM.name], int(statistics[COUNT.name])
        diagonal = hessian_sum.diagonal().double()
        alive = diagonal > 0
        if not alive.any():
            return Solver(factor=None, drift=self.drift, residual=self.residual)
        factor = hessian_sum.clone()
        share = DAMPING + len(diagonal) / tokens
        factor.diagonal().add_(float(share * diagonal[alive].mean()))
        if not cholesky_(factor, workers=workers):
            raise StatisticsError(
                f"{name}: the second moment of its quantized inputs holds NaN or Inf",
                "look at the errors of the layers before it, or give `--no-refit`",
            )
        return Solver(factor=factor, drift=self.drift, residual=self.residual)

    def refitted(
        self,
        weights: Mapping[str, Tensor],
        statistics: Mapping[str, Tensor],
        *,
        workers: Workers = SEQUENTIAL,
    ) -> dict[str, Tensor]:
        """W* of linears, [O, I] float32 each.

        Args:
            weights: name -> W, [O, I], any float dtype.
            statistics: those that `statistics` returned.
            workers: run rows; how many there are changes nothing but the time.

        Raises:
            StatisticsError: the sums are not finite.
        """
        solver = self.solver(statistics, name=next(iter(weights)), workers=workers)
        return {
            name: solver.refitted(name, weight, workers=workers) for name, weight in weights.items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Solver:
    """The sums over the calibration text, ready for any weight that reads the input.

    Attributes:
        factor: Cholesky factor of C + damping I in its lower triangle, [I, I]; None where no token
            came.
        drift: D, [I, I].
        residual: R, [O, I] of the one linear that it is for; None without.
    """

    factor: Tensor | None
    drift: Tensor
    residual: Tensor | None

    def refitted(self, name: str, weight: Tensor, *, workers: Workers = SEQUENTIAL) -> Tensor:
        """W* of a linear, [O, I] float32.

        Args:
            name: the linear, for errors.
            weight: W, [O, I], any float dtype.
            workers: run rows; how many there are changes nothing but the time.

        Raises:
            StatisticsError: the result is not finite.
        """
        factor = self.factor
        if factor is None:
            return weight.float()
        result = torch.empty(weight.shape, device=weight.device)

        def solve(rows: slice) -> bool:
            own = weight[rows].float()
            aim = own @ self.drift
            if self.residual is not None:
                aim += self.residual[rows]
            aim = torch.linalg.solve_triangular(factor.T, aim, upper=True, left=False)
            moved = torch.linalg.solve_triangular(factor, aim, upper=False, left=False)
            result[rows] = own + moved
            return bool(torch.isfinite(moved).all())

        if not all(workers.map(solve, spans(len(weight), _ROWS))):
            raise StatisticsError(
                f"{name}: refitted to its quantized inputs it holds NaN or Inf",
                "look at the errors of the layers before it, or give `--no-refit`",
            )
        return result


@dataclass(frozen=True, kw_only=True)
class Refitted:
    """Linears that share an input, as they aim at the original's outputs.

    Attributes:
        weights: name -> W*, [O, I] float32.
        statistics: `hessian_sum` and `count` of the quantized model's input; empty where linears
            are rounded by the Hessian that they have.
    """

    weights: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]


def sums_bytes(features: int, *, hidden: int) -> int:
    """The bytes of D and R, which stand beside the Hessian."""
    return 4 * features * (features + hidden)


def working_bytes(features: int, rows: int, *, workers: int = 1) -> int:
    """The bytes that `refitted` takes: C's factor, results, and for each worker its rows thrice."""
    return 4 * features * (features + rows) + workers * 3 * 4 * _ROWS * features
