"""Each linear's input by the measurement: the scale of a static one, and notes for the record.

An importance matrix of llama.cpp's says of an input how much each of its features counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import StatisticsError
from quantflow.measuring.record import Measurement
from quantflow.models.graph import Graph, Layer
from quantflow.numerics.activations import clipped, least_error_reach, static_input, unseen
from quantflow.observers.amax import AMAX, AmaxObserver
from quantflow.observers.histogram import COUNTS, HistogramObserver
from quantflow.planning.experts import Policy
from quantflow.planning.requirements import GRADIENT_SUM
from quantflow.quantizing.undercalibrated import Short, of_layer, treat


@dataclass(frozen=True, kw_only=True)
class LinearInput:
    """The input of one linear.

    Attributes:
        scale, zero_point: see QuantizedLinear; None where the input is not static.
        decisions: notes for the layer's record.
        importance: [I] float32, the mean square of each feature by an importance matrix; None
            without one.
    """

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    importance: Tensor | None = None


UNKNOWN_INPUT = LinearInput()
PERCENTILE = 99.99  # of the magnitudes that were seen, which `input_observer: percentile` keeps


def input_of(name: str, scheme: LinearScheme, statistics: Mapping[str, Tensor]) -> LinearInput:
    """The static scale, and notes, of a linear's input.

    Raises:
        StatisticsError: the scheme has a static input, and a statistic that it needs is missing or
            damaged; names the linear.
    """
    decisions: dict[str, Any] = {}
    if AMAX.name in statistics:
        decisions["input_amax"] = float(statistics[AMAX.name])
    if scheme.input is None or not scheme.input.measured:
        return LinearInput(decisions=decisions)
    try:
        if scheme.input.observer != AmaxObserver.NAME and not unseen(statistics):
            decisions["input_reach"] = _reach(statistics, scheme.input)
            statistics = clipped(statistics, decisions["input_reach"])
        scale, zero_point = static_input(statistics, scheme.input)
    except StatisticsError as error:
        raise StatisticsError(f"{name}: {error.cause}", error.remedy) from error
    if unseen(statistics):
        decisions["input"] = "unseen in calibration, scale 1"
    return LinearInput(scale=scale, zero_point=zero_point, decisions=decisions)


def _reach(statistics: Mapping[str, Tensor], scheme: TensorScheme) -> float:
    """The end of a static input's range, by the counts of its magnitudes."""
    if COUNTS.name not in statistics:
        raise StatisticsError(
            "input: statistic counts is missing", "measure with --stats that include histogram"
        )
    seen = HistogramObserver.from_state({COUNTS.name: statistics[COUNTS.name]})
    if scheme.observer == "percentile":
        return seen.percentile(PERCENTILE)
    magnitudes, counts = seen.points()
    return least_error_reach(statistics, scheme, magnitudes=magnitudes, counts=counts)


def input_statistics(measurement: Measurement, layer: Layer) -> dict[str, Mapping[str, Tensor]]:
    """The statistics of each linear's input, for the linears of a layer."""
    by_linear: dict[str, dict[str, Tensor]] = {name: {} for name in layer.linears}
    for key in measurement.statistics:
        if not key.startswith(f"{layer.prefix}."):
            continue
        name, site, statistic = key.split("|")
        if site == "input" and name in by_linear:
            by_linear[name][statistic] = measurement.statistics[key]
    return dict(by_linear)


def gradient_sum(measurement: Measurement | None, name: str) -> Tensor | None:
    """The `gradient_sum` of a linear, read on demand and not kept; None where not measured."""
    return (
        None
        if measurement is None
        else measurement.statistics.get(f"{name}|gradient|{GRADIENT_SUM}")
    )


def inputs_of(
    measurement: Measurement | None,
    graph: Graph,
    schemes: Mapping[str, LinearScheme | None],
    *,
    policy: Policy | None = None,
    shorts: Sequence[Short] = (),
) -> dict[str, LinearInput]:
    """The static scale, and notes, of each quantized linear's input; a group's linears share them.

    Args:
        measurement: the measurement; None gives nothing.
        graph: names of the linears.
        schemes: scheme of each linear.
        policy: treatment of undercalibrated experts.
        shorts: the groups of experts that got too few tokens.
    """
    inputs: dict[str, LinearInput] = {}
    if measurement is None:
        return inputs
    for layer in graph.layers:
        statistics: Mapping[str, Mapping[str, Tensor]] = input_statistics(measurement, layer)
        decisions: Mapping[str, str] = {}
        if policy is not None:
            treatment = treat(layer, policy, statistics, of_layer(layer, shorts))
            statistics = treatment.statistics
            decisions = treatment.decisions
        for group in layer.groups:
            for name in group.linears:
                scheme = schemes[name]
                if scheme is not None:
                    seen = input_of(name, scheme, statistics[group.linears[0]])
                    treated = {"experts": decisions[name]} if name in decisions else {}
                    inputs[name] = replace(seen, decisions={**seen.decisions, **treated})
    return inputs
