"""Trials: the output error of a fold that is smoothed and quantized, for a search over candidates.

Weights are rounded to nearest by the scheme, whatever the algorithm that comes later: its error is
smaller, and follows that of rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.scheme import LinearScheme
from quantflow.numerics.activations import static_input
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded
from quantflow.numerics.smoothing import Fold, smooth_statistics

# weights that take part: a square matrix of 2,896, so that a search costs less than GPTQ
ELEMENTS = 1 << 23
_BLOCK = 128  # rows that stay together, since they may share the scales of a block
_LEAST = 256  # fewest rows that take part, however long these are


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fold whose candidates are compared.

    Attributes:
        fold: linears of the trial.
        parts: name -> rows of its weight that stand for all, [o, I] float32.
    """

    fold: Fold
    parts: Mapping[str, Tensor]

    def weights(self, factors: Tensor) -> dict[str, Tensor]:
        """The parts, smoothed, rounded and divided by the factors again, [o, I] each.

        They multiply the input as it was.
        """
        return {name: weight.div_(factors) for name, weight in self._rounded(factors).items()}

    def weight_loss(self, factors: Tensor, hessian: Tensor) -> float:
        """Loss ||X (W' - W)^T||^2 over all outputs and samples X, with only weights quantized.

        Args:
            factors: [I].
            hessian: X^T X, [I, I] float32.
        """
        loss = 0.0
        for name, approximation in self.weights(factors).items():
            error = approximation.sub_(self.parts[name])
            loss += float((error @ hessian).mul_(error).sum(dtype=torch.float64))
        return loss

    def output_loss(self, factors: Tensor, rows: Tensor) -> float:
        """Loss ||Q(X / s) Q(W s)^T - X W^T||^2 over all outputs, with inputs and weights quantized.

        A static range comes from other text than X where such a range was measured. A range taken
        from X clips none of it, and so hides a cost: the more channels reach their largest value at
        the same step, the more of other text would be clipped.

        Args:
            factors: [I].
            rows: X, [R, I] float32.
        """
        loss = 0.0
        inputs = {}
        statistics = smooth_statistics(self.fold.statistics, factors)
        for name, weight in self._rounded(factors).items():
            scheme = self.fold.schemes[name]
            if scheme.input not in inputs:
                inputs[scheme.input] = _quantized(rows / factors, scheme, statistics)
            difference = (inputs[scheme.input] @ weight.T).sub_(rows @ self.parts[name].T)
            loss += float(difference.square_().sum(dtype=torch.float64))
        return loss

    def power(self, rows: Tensor) -> float:
        """Power ||X W^T||^2 of rows X [R, I] float32."""
        return sum(
            float((rows @ part.T).square_().sum(dtype=torch.float64))
            for part in self.parts.values()
        )

    def weight_power(self, hessian: Tensor) -> float:
        """Power ||X W^T||^2 from X^T X [I, I]."""
        return sum(
            float((part @ hessian).mul_(part).sum(dtype=torch.float64))
            for part in self.parts.values()
        )

    def _rounded(self, factors: Tensor) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for scheme in dict.fromkeys(self.fold.schemes[name] for name in self.parts):
            scaled = {
                name: part * factors
                for name, part in self.parts.items()
                if self.fold.schemes[name] == scheme
            }
            dtype = self.fold.scale_dtypes[next(iter(scaled))]
            grids = weight_grids(scaled, scheme.weights, scale_dtype=dtype)
            weights |= {
                name: weight.dequantize()
                for name, weight in rounded(scaled, grids, scheme.weights).items()
            }
        return {name: weights[name] for name in self.parts}


def trial(fold: Fold) -> Trial:
    """The trial of a fold: all of its rows, or blocks of many rows at equal distances."""
    features = fold.features
    total = sum(len(weight) for weight in fold.weights.values())
    limit = max(_LEAST, ELEMENTS // features)
    if total <= limit:
        return Trial(
            fold=fold, parts={name: weight.float() for name, weight in fold.weights.items()}
        )
    parts = {}
    for name, weight in fold.weights.items():
        blocks = groups.spans(len(weight), _BLOCK)
        count = max(1, len(blocks) * limit // total)
        chosen = [blocks[index * len(blocks) // count] for index in range(count)]
        parts[name] = torch.cat([weight[rows].float() for rows in chosen])
    return Trial(fold=fold, parts=parts)


def working_bytes(features: int, rows: int, *, samples: int, workers: int) -> int:
    """The most memory that a search takes beyond weights and statistics, in bytes.

    The parts, where they are not all rows; for each worker their smoothed copy, qvalues, rounded
    weights and a product with them, and the samples, quantized, with their outputs twice.

    Args:
        features: I of the fold.
        rows: out_features of the fold, all linears together.
        samples: rows of the input that are tried; 0 where the Hessian is enough.
        workers: number of candidates that are compared at once.
    """
    limit = max(_LEAST, ELEMENTS // features) + 2 * _BLOCK
    taken = min(rows, limit)
    parts = 0 if rows <= limit else 4 * features * taken
    each = (
        features * taken * (4 + 1 + 4 + 4)
        + 4 * samples * (2 * features + 2 * taken)
        + groups.unit_bytes(features)
    )
    return parts + workers * each


def _quantized(rows: Tensor, scheme: LinearScheme, statistics: Mapping[str, Tensor]) -> Tensor:
    scale = zero_point = None
    if scheme.input is not None and scheme.input.measured:
        if "seen_min" in statistics:
            low, high = statistics["seen_min"], statistics["seen_max"]
            statistics = {"min_val": low, "max_val": high, "amax": torch.maximum(high, -low).amax()}
        scale, zero_point = static_input(statistics, scheme.input)
    return affine.fake_quantize_input(rows, scheme.input, scale, zero_point)
