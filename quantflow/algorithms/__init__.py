"""Algorithms, by the name used in recipes. One file each; these tables are the only registry.

ALGORITHMS quantize the linears that share an input. BLOCK_ALGORITHMS go on from there, with all
linears of a decoder layer and the layer itself. `refit` changes the weights that an algorithm
rounds, before it. `tune` works with all linears of the model, after either. COMBINATIONS are words
of recipes that stand for several of them, by scheme.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantflow.algorithms import gptq, hqq, refit, rtn, rtn_mse, signround, tune, yaqa
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.core.support import Supports
from quantflow.numerics.trained_block import TrainedBlock

__all__ = [
    "ALGORITHMS",
    "BLOCK_ALGORITHMS",
    "COMBINATIONS",
    "LEARNING",
    "NEAREST",
    "REFIT",
    "TUNE",
    "Algorithm",
    "BlockAlgorithm",
    "Combination",
    "refit",
    "supports_of",
    "tune",
]


class Algorithm(Protocol):
    """Names that the module of an algorithm exports."""

    NAME: str
    """Its name in recipes."""

    NEEDS: tuple[str, ...]
    """Names of the statistics that `quantize_group` reads.

    `gradient_sum` is a statistic of each linear's output, all others are of the group's input.
    """

    BY_ROW: bool
    """Whether a row of a weight with scales of its own follows from that row alone.

    Weights then go from file to file.
    """

    VERSION: int
    """Number of the changes that give other results for the same inputs; part of the resume key."""

    TO_NEAREST: bool
    """Whether it takes the whole range of a weight and rounds to nearest.

    Ranks then round slices of a weight, and a transform may clip ranges.
    """

    ON_DEVICE: bool
    """Whether `quantize_group` computes where its tensors are; else they are in host memory."""

    SUPPORTS: Supports
    """Schemes and settings that it can be combined with."""

    def working_bytes(
        self, features: int, rows: int, *, workers: int = 1, in_place: bool = False
    ) -> int:
        """The most memory that `quantize_group` takes beyond arguments and results, in bytes."""
        ...

    def quantize_group(
        self,
        weights: Mapping[str, Tensor],
        scheme: LinearScheme,
        *,
        statistics: Mapping[str, Tensor],
        scale_dtype: torch.dtype,
        workers: Workers = SEQUENTIAL,
        in_place: bool = False,
    ) -> dict[str, GroupResult]:
        """Quantize the linears that share an input.

        `in_place` allows to overwrite the statistics.
        """
        ...


class BlockAlgorithm(Protocol):
    """Names that the module of an algorithm of whole decoder layers exports."""

    NAME: str
    """Its name in recipes."""

    VERSION: int
    """Number of the changes that give other results for the same inputs; part of the resume key."""

    SUPPORTS: Supports
    """Schemes and settings that it can be combined with."""

    def working_bytes(self, weights: int, scales: int, *, widest: int, workers: int = 1) -> int:
        """The most memory that `refine` takes, in bytes.

        The layer, its runs, the weights that it starts from and the results are not counted.
        """
        ...

    def runs(self, samples: int, *, iterations: int, sequences: int) -> int:
        """The number of sequences that `refine` runs through the layer.

        A backward pass counts as two.
        """
        ...

    def refine(
        self,
        block: TrainedBlock,
        weights: Mapping[str, Tensor],
        starts: Mapping[str, QTensor],
        *,
        scale_dtypes: Mapping[str, torch.dtype],
        iterations: int,
        sequences: int,
        workers: Workers = SEQUENTIAL,
        tell: Callable[[str], object] = str,
    ) -> dict[str, GroupResult]:
        """Refine an `Algorithm`'s result for the linears of a layer."""
        ...


_GROUPS: tuple[Algorithm, ...] = (rtn, rtn_mse, hqq, gptq, yaqa)
_BLOCKS: tuple[BlockAlgorithm, ...] = (signround,)
ALGORITHMS: dict[str, Algorithm] = {algorithm.NAME: algorithm for algorithm in _GROUPS}
BLOCK_ALGORITHMS: dict[str, BlockAlgorithm] = {algorithm.NAME: algorithm for algorithm in _BLOCKS}
LEARNING = signround.NAME  # the block algorithm that recipes have settings for
TUNE = tune.NAME
REFIT = refit.NAME
# the baseline of every other algorithm, and the substitute where another cannot be used
NEAREST = rtn.NAME


TUNED_BITS = 2  # the most bits of refitted weights whose scales are still worth tuning


@dataclass(frozen=True, kw_only=True)
class Combination:
    """The algorithms that a word of recipes stands for.

    Tuning gains more from steps than from sequences: on tiny-llama at W4A16 from rtn_mse, with 128
    tokens a sequence, KLD falls from 0.02365 to 0.01827 in 32 steps of 8, 0.01868 in 32 of 4,
    0.01927 in 32 of 2 and 0.01991 in 16 of 4.

    Attributes:
        rounding: algorithm of weights of less than 8 bits.
        searches: whether the smoothing is searched where neither scheme nor recipe names a
            transform.
        steps: steps of `tune` afterwards, where weights are integers of less than 8 bits, or of 2
            where they are refitted, and inputs are not quantized.
        sequences: sequences of each step.
    """

    rounding: str
    searches: bool
    steps: int
    sequences: int

    def algorithm(self, weights: TensorScheme) -> str:
        """The algorithm that rounds such weights; gptq for 8 bits and float8."""
        return self.rounding if _few_bits(weights) else gptq.NAME

    def smooths(self, scheme: LinearScheme) -> bool:
        """Whether the smoothing is searched.

        It is not for floats of 8 bits, whose steps follow the values, nor for weights of e2m1
        alone: on tiny-llama the KLD is then 0.00552 instead of 0.00548 (NVFP4A16), 0.00920 instead
        of 0.00907 (MXFP4A16). It is for inputs of e2m1.
        """
        return self.searches and (
            scheme.weights.kind == "int" or (_few_bits(scheme.weights) and scheme.input is not None)
        )

    def refits(self, scheme: LinearScheme) -> bool:
        """Whether weights are fitted to the inputs of the quantized model, before the rounding."""
        return _few_bits(scheme.weights)

    def tunes(self, scheme: LinearScheme, *, rotated: bool, refits: bool) -> bool:
        """Whether scales are tuned afterwards.

        Where weights make up for the layers before them, tuned scales gain 0.5 % at 3 bits and
        nothing at 4 (docs/accuracy.md).
        """
        if refits and scheme.weights.code_bits > TUNED_BITS:
            return False
        refused = tune.SUPPORTS.scheme(scheme) is not None or (
            rotated and tune.SUPPORTS.rotations is not None
        )
        return _few_bits(scheme.weights) and not refused


COMBINATIONS: dict[str, Combination] = {
    "best": Combination(rounding=yaqa.NAME, searches=True, steps=32, sequences=4),
    "good": Combination(rounding=gptq.NAME, searches=True, steps=32, sequences=2),
}


def supports_of(name: str) -> Supports:
    """The combinations that an algorithm of any table supports, or `refit` or `tune`."""
    if name in ALGORITHMS:
        return ALGORITHMS[name].SUPPORTS
    if name in BLOCK_ALGORITHMS:
        return BLOCK_ALGORITHMS[name].SUPPORTS
    return refit.SUPPORTS if name == REFIT else tune.SUPPORTS


def _few_bits(weights: TensorScheme) -> bool:
    return weights.code_bits < 8
