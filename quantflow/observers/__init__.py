"""Observers: statistics of a tensor while data flows, one class per file, mergeable over ranks.

An observer takes samples (`update`), takes in another observer's samples (`merge`), and is a dict
of named tensors (`state`, `from_state`); the names are the statistic names in measurement files. It
refuses NaN and Inf. Its state is on the device where it was made (`Device.factories`), and so are
its samples. An unseen observer is all zeros, and merging it changes nothing.

Each class declares its statistics (`STATISTICS`): how ranks merge them, how cards cut and join
them, their bytes. `quantflow/measuring` and `quantflow/planning` read these declarations, and a
statistic of no observer is refused.

| observer     | statistics                    | merge over ranks                |
|--------------|-------------------------------|---------------------------------|
| amax         | amax []                       | exact, in any order             |
| channel_amax | channel_amax [C]              | exact, in any order             |
| min_max      | min_val [C], max_val [C]      | exact, in any order             |
| mean_abs     | abs_sum [C], count []         | sums in a tree, count exact     |
| mean_square  | power_sum [C], count []       | sums in a tree, count exact     |
| histogram    | counts [514]                  | exact, in any order             |
| hessian      | hessian_sum [K, K], count []  | sums in a tree, count exact     |
| fisher       | square_sum [C], count []      | sums in a tree, count exact     |
| gradient     | gradient_sum [C, W], count [] | sums in a tree, count exact     |
| count        | count []                      | exact, in any order             |

The tree is that of quantflow/numerics/fixed_tree.py.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

from torch import Tensor

from quantflow.errors import StatisticsError, UsageError, nearest
from quantflow.numerics.statistics import COUNT, Statistic, stored_bytes
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.channel_amax import ChannelAmaxObserver
from quantflow.observers.count import CountObserver
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.hessian import HessianObserver
from quantflow.observers.histogram import HistogramObserver
from quantflow.observers.mean_abs import MeanAbsObserver
from quantflow.observers.mean_square import MeanSquareObserver
from quantflow.observers.min_max import MinMaxObserver


class Observer(Protocol):
    """Members of every class of this package; each class's docstring states its algebra."""

    NAME: ClassVar[str]

    STATISTICS: ClassVar[Mapping[str, Statistic]]
    """Statistics of its state, by name."""

    SITES: ClassVar[tuple[str, ...]]
    """Sites whose tensors it takes.

    They are a linear's `input`, the `gradient` of the loss by its output, the `guided_input`; or
    `routed`.
    """

    def __init__(self, features: int) -> None:
        """Make an observer of tensors [..., features] without samples."""

    def update(self, x: Tensor) -> None:
        """Take in samples x [..., features], any float dtype."""

    def merge(self, other: Self) -> None:
        """Take in the samples of `other`."""

    @classmethod
    def live_bytes(cls, features: int) -> int:
        """The bytes of an observer that has seen samples."""
        ...

    @staticmethod
    def update_bytes(features: int, samples: int) -> int:
        """The bytes that an update takes beside its samples and the observer."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The whole state: statistic name -> tensor."""
        ...

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """The observer that had this state."""
        ...


OBSERVERS: Mapping[str, type[Observer]] = MappingProxyType(
    {
        AmaxObserver.NAME: AmaxObserver,
        ChannelAmaxObserver.NAME: ChannelAmaxObserver,
        MinMaxObserver.NAME: MinMaxObserver,
        MeanAbsObserver.NAME: MeanAbsObserver,
        MeanSquareObserver.NAME: MeanSquareObserver,
        HistogramObserver.NAME: HistogramObserver,
        HessianObserver.NAME: HessianObserver,
        FisherObserver.NAME: FisherObserver,
        GradientObserver.NAME: GradientObserver,
        CountObserver.NAME: CountObserver,
    }
)

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        name: statistic
        for observer in OBSERVERS.values()
        for name, statistic in observer.STATISTICS.items()
    }
)
# sites of the backward pass
ON_THE_WAY_BACK = frozenset({"gradient", "guided_input"})
MEASURED = (AmaxObserver, ChannelAmaxObserver, MinMaxObserver, MeanAbsObserver, HistogramObserver)
# observers of `measure` by default
DEFAULT = tuple(observer.NAME for observer in MEASURED)


def observer_named(name: str) -> type[Observer]:
    """The class of an observer.

    Raises:
        UsageError: no observer has that name.
    """
    if name not in OBSERVERS:
        raise UsageError(f"statistic {name!r} is unknown", nearest(name, list(OBSERVERS)))
    return OBSERVERS[name]


def statistic_named(name: str) -> Statistic:
    """The record of a statistic.

    Raises:
        StatisticsError: no observer has it.
    """
    if name not in STATISTICS:
        raise StatisticsError(
            f"statistic {name!r}: no observer has it, so none says how it merges", "measure again"
        )
    return STATISTICS[name]


def of_gradients(name: str) -> bool:
    """Whether an observer takes gradients, which need a backward pass through the model.

    Raises:
        UsageError: no observer has that name.
    """
    return not ON_THE_WAY_BACK.isdisjoint(observer_named(name).SITES)


def goes_back(names: Iterable[str]) -> bool:
    """Whether one of these observers takes gradients."""
    return any(map(of_gradients, names))


def holds_matrix(name: str) -> bool:
    """Whether an observer's state is a matrix, which is read by itself."""
    return any(statistic.is_matrix for statistic in observer_named(name).STATISTICS.values())


def summed_in_parts(name: str) -> bool:
    """Whether an observer has a sum of floats that is small enough to be kept in parts."""
    return any(
        statistic.is_sum and statistic.dtype.is_floating_point and not statistic.is_matrix
        for statistic in observer_named(name).STATISTICS.values()
    )


def state_bytes(name: str, features: int) -> int:
    """The bytes of an observer's state."""
    return stored_bytes(observer_named(name).STATISTICS, features)


def observers_for(needs: Iterable[str]) -> tuple[str, ...]:
    """The names of the observers of an algorithm's statistics, in the order of OBSERVERS.

    `count` comes with every sum and needs no observer of its own.

    Args:
        needs: statistic names, the `NEEDS` of algorithms and transforms.

    Raises:
        UsageError: no observer has one of them.
    """
    wanted = set(needs)
    if not wanted <= set(STATISTICS):
        unknown = sorted(wanted - set(STATISTICS))
        raise UsageError(
            f"statistics {unknown} are unknown", f"use some of {', '.join(sorted(STATISTICS))}"
        )
    return tuple(
        name
        for name, observer in OBSERVERS.items()
        if wanted & (set(observer.STATISTICS) - {COUNT.name})
    )
