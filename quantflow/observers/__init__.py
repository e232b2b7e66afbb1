"""What to remember about a tensor while data flows, one class per file, small enough to merge over ranks.

An observer is shown samples (`update`), folds in what another one saw (`merge`), and is a dict of named tensors
(`state`, `from_state`); the names are the statistic names in measurement files. It refuses NaN and Inf. The state lives
on the CPU whatever device the samples are on. An unseen observer is all zeros, and merging it changes nothing.

| observer     | statistics                    | merge over ranks                |
|--------------|-------------------------------|---------------------------------|
| amax         | amax []                       | exact, in any order             |
| channel_amax | channel_amax [C]              | exact, in any order             |
| min_max      | min_val [C], max_val [C]      | exact, in any order             |
| mean_abs     | abs_sum [C], count []         | sums in rank order, count exact |
| histogram    | counts [514]                  | exact, in any order             |
| hessian      | hessian_sum [K, K], count []  | sums in rank order, count exact |
| fisher       | square_sum [C], count []      | sums in rank order, count exact |
| gradient     | gradient_sum [C, W], count [] | sums in rank order, count exact |
| count        | count []                      | exact, in any order             |
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

from torch import Tensor

from quantflow.errors import UsageError
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.channel_amax import ChannelAmaxObserver
from quantflow.observers.count import CountObserver
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.hessian import HessianObserver
from quantflow.observers.histogram import HistogramObserver
from quantflow.observers.mean_abs import MeanAbsObserver
from quantflow.observers.min_max import MinMaxObserver


class Observer(Protocol):
    """What every class of this package offers; its docstring states its algebra."""

    NAME: ClassVar[str]
    STATISTICS: ClassVar[tuple[str, ...]]

    def __init__(self, features: int) -> None:
        """Make an observer of tensors [..., features] that has seen nothing."""

    def update(self, x: Tensor) -> None:
        """Take in samples.  x: [..., features], any float dtype."""

    def merge(self, other: Self) -> None:
        """Take in what `other` has seen."""

    def state(self) -> dict[str, Tensor]:
        """Return everything there is to remember: statistic name -> tensor."""
        ...

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Make the observer that had this state."""
        ...


OBSERVERS: Mapping[str, type[Observer]] = MappingProxyType(
    {
        AmaxObserver.NAME: AmaxObserver,
        ChannelAmaxObserver.NAME: ChannelAmaxObserver,
        MinMaxObserver.NAME: MinMaxObserver,
        MeanAbsObserver.NAME: MeanAbsObserver,
        HistogramObserver.NAME: HistogramObserver,
        HessianObserver.NAME: HessianObserver,
        FisherObserver.NAME: FisherObserver,
        GradientObserver.NAME: GradientObserver,
        CountObserver.NAME: CountObserver,
    }
)


def observers_for(needs: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the observers that give the statistics an algorithm needs, in the order of OBSERVERS.

    `count` comes with every sum and asks for no observer of its own.

    Args:
        needs: statistic names, the `NEEDS` of algorithms and transforms.

    Raises:
        UsageError: no observer gives one of them.
    """
    wanted = set(needs)
    known = {statistic for observer in OBSERVERS.values() for statistic in observer.STATISTICS}
    if not wanted <= known:
        raise UsageError(f"statistics {sorted(wanted - known)} are unknown", f"use some of {', '.join(sorted(known))}")
    return tuple(
        name for name, observer in OBSERVERS.items() if wanted & {own for own in observer.STATISTICS if own != "count"}
    )
