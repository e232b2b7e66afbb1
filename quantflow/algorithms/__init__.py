"""Algorithms, by the name used in recipes. One file each; these tables are the only registry.

Those of ALGORITHMS quantize the linears that share an input. Those of BLOCK_ALGORITHMS go on from there, with all linears of a
decoder layer and the layer itself. `tune` works with all linears of the model, after either.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from quantflow.algorithms import gptq, hqq, rtn, rtn_mse, signround, tune, yaqa
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.numerics.trained_block import TrainedBlock

__all__ = ["ALGORITHMS", "BLOCK_ALGORITHMS", "TUNE", "Algorithm", "BlockAlgorithm", "tune"]


class Algorithm(Protocol):
    """What the file of an algorithm exports."""

    NEEDS: tuple[str, ...]
    """Names of the statistics that `quantize_group` reads: of the group's input, `gradient_sum` of each linear's output."""

    BY_ROW: bool
    """Whether a row of a weight with scales of its own follows from that row alone: then weights go from file to file."""

    VERSION: int
    """Counts the changes that give other results for the same inputs; part of the resume key."""

    def working_bytes(self, features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
        """Return the most memory that `quantize_group` takes beyond weights, statistics and results, in bytes."""
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
        """Quantize the linears that share an input; `in_place` where the statistics may be overwritten."""
        ...


class BlockAlgorithm(Protocol):
    """What the file of an algorithm exports that works with a whole decoder layer."""

    VERSION: int
    """As of an `Algorithm`."""

    def working_bytes(self, weights: int, scales: int, *, widest: int, workers: int = 1) -> int:
        """Return the most memory that `refine` takes beyond the layer, its runs, what it starts from and results, in bytes."""
        ...

    def runs(self, samples: int, *, iterations: int, sequences: int) -> int:
        """Return how many sequences `refine` runs through the layer, a way back counted as two."""
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
        """Go on from what an `Algorithm` made of the linears of a layer."""
        ...


ALGORITHMS: dict[str, Algorithm] = {"rtn": rtn, "rtn_mse": rtn_mse, "hqq": hqq, "gptq": gptq, "yaqa": yaqa}
BLOCK_ALGORITHMS: dict[str, BlockAlgorithm] = {"signround": signround}
TUNE = "tune"  # of quantflow.algorithms.tune, in recipes and records
