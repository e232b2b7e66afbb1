"""Algorithms, by the name used in recipes. One file each; this table is the only registry."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from quantflow.algorithms import gptq, hqq, rtn, rtn_mse, yaqa
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme


class Algorithm(Protocol):
    """What every file of this folder exports."""

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


ALGORITHMS: dict[str, Algorithm] = {"rtn": rtn, "rtn_mse": rtn_mse, "hqq": hqq, "gptq": gptq, "yaqa": yaqa}
