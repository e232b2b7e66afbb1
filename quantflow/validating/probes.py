"""The cost of each linear: it alone quantized, and all but it, as swaps of artifact and source.

    {"tokens", "windows", "mean_kld", "asked", "run",
     "units": [{"name", "layer", "whole", "linears", "only_this", "all_but_this", "gain"}]}

`mean_kld` is the artifact's over the windows of the probes, `only_this` the divergence where
nothing else is quantized, and `all_but_this` where this alone is not; `gain` is `mean_kld -
all_but_this`. Neither column adds up to `mean_kld`: errors of one layer are amplified or cancelled
by those of others. `gain` has these interactions in it, so the mend is looked for by `gain`.

A unit is what can be swapped alone: a linear, or the linears and norms of a layer that smoothing
tied together, since a factor that was divided out of one is in the other. Whole layers come first,
then the units of those layers that cost most.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, read_json
from quantflow.models.graph import Graph, Layer
from quantflow.validating.layerwise import BASELINE
from quantflow.validating.swaps import CANDIDATE, Swap, Swapping

SAMPLE = 2048  # tokens of the windows that probes run over, at most
FOR_MENDS = 4  # probes that are left for them
FACTOR = "largest_factor"  # what a transform says of a linear whose input it smoothed


@dataclass(frozen=True, kw_only=True)
class SwapUnit:
    """Modules that are swapped together.

    Attributes:
        name: name of the linear, several with commas, or of the layer.
        layer: index of the layer; None for the head.
        whole: whether it is all of a layer that has several units.
        linears: quantized linears, by their names in the artifact.
        modules: swapped modules: the linears, and what smoothing tied to them.
    """

    name: str
    layer: int | None
    whole: bool
    linears: tuple[str, ...]
    modules: tuple[str, ...]

    def only(self) -> Swap:
        """The source with nothing but this quantized."""
        return Swap(base=BASELINE, taken=self.modules)

    def others(self) -> Swap:
        """The artifact with all but this quantized."""
        return Swap(base=CANDIDATE, taken=self.modules)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A unit, and the mean divergences of its two swaps, nats per token.

    `gain` is the worth of leaving the unit alone.
    """

    unit: SwapUnit
    only_this: float
    all_but_this: float
    gain: float

    def record(self) -> dict[str, Any]:
        """The unit as validation.json has it."""
        unit = self.unit
        about = {
            "name": unit.name,
            "layer": unit.layer,
            "whole": unit.whole,
            "linears": list(unit.linears),
        }
        return {
            **about,
            "only_this": self.only_this,
            "all_but_this": self.all_but_this,
            "gain": self.gain,
        }


@dataclass(frozen=True, kw_only=True)
class Prober:
    """Runs swaps and keeps their divergences, so that a stopped validation goes on after them.

    Attributes:
        swapping: runner of the swaps.
        path: file of the divergences.
        key: digest of artifact, source and windows.
    """

    swapping: Swapping
    path: Path
    key: str

    def klds(self, swaps: Mapping[str, Swap]) -> dict[str, float]:
        """The mean divergence of each swap, nats per token, by its name in this and later calls."""
        divergences = self._kept()
        left = [name for name in swaps if name not in divergences]
        for first in range(0, len(left), self.swapping.at_once):
            some = left[first : first + self.swapping.at_once]
            divergences |= zip(
                some, self.swapping.klds([swaps[name] for name in some]), strict=True
            )
            disk.make_folder(self.path.parent)
            disk.write_atomic(self.path, canonical_json({"key": self.key, "found": divergences}))
        return {name: divergences[name] for name in swaps}

    def of_units(self, units: Sequence[SwapUnit], *, whole: float) -> list[Probed]:
        """The cost of units.

        Args:
            units: units to run.
            whole: divergence of the artifact.
        """
        swaps = {f"only {unit.name}": unit.only() for unit in units}
        swaps |= {f"all but {unit.name}": unit.others() for unit in units}
        divergences = self.klds(swaps)
        pairs = [
            (divergences[f"only {unit.name}"], divergences[f"all but {unit.name}"])
            for unit in units
        ]
        return [
            Probed(unit=unit, only_this=only, all_but_this=others, gain=whole - others)
            for unit, (only, others) in zip(units, pairs, strict=True)
        ]

    def _kept(self) -> dict[str, float]:
        try:
            record = read_json(self.path)
            kept: dict[str, float] = dict(record["found"])
            return kept if record["key"] == self.key else {}
        except (
            InputError,
            KeyError,
            TypeError,
            ValueError,
        ):  # missing or damaged: run again, never used
            return {}


def run_probes(
    prober: Prober, units: Sequence[SwapUnit], *, whole: float, count: int
) -> list[Probed]:
    """The cost of layers and linears, as many as a number of probes reaches.

    Args:
        prober: runner of the probes.
        units: result of `units_of`.
        whole: divergence of the artifact over the windows.
        count: probes; half of them may go to whole layers, which are spread evenly where there are
            more. FOR_MENDS are left.
    """
    pairs = max(1, (count - FOR_MENDS) // 2)
    layers = [unit for unit in units if unit.whole]
    alone = [unit for unit in units if not unit.whole]
    enough = len(layers) + len(alone) <= pairs
    most = len(layers) if enough else min(len(layers), pairs // 2)
    first = prober.of_units(
        [layers[number * len(layers) // most] for number in range(most)] if most else [],
        whole=whole,
    )
    gains = {probed.unit.layer: probed.gain for probed in first}
    # stable: layers that were not probed, by their order
    order = sorted(alone, key=lambda unit: -gains.get(unit.layer, 0.0))
    chosen = order[: pairs - len(first)]
    return [*first, *prober.of_units([unit for unit in alone if unit in chosen], whole=whole)]


def sampled(sequences: Sequence[Tensor]) -> list[int]:
    """The numbers of windows, evenly spread, of SAMPLE tokens together, or the first of them."""
    count = max(1, len(sequences) * SAMPLE // max(SAMPLE, sum(map(len, sequences))))
    return [number * len(sequences) // count for number in range(count)]


def units_of(
    graph: Graph, quantized: Collection[str], *, folded: Collection[str], head: str
) -> list[SwapUnit]:
    """The units of a model: of each layer the whole, then its parts; the head last.

    Args:
        graph: linears of the model.
        quantized: names of the quantized linears in the artifact.
        folded: linears whose inputs were smoothed.
        head: name of the head in the artifact.
    """
    units: list[SwapUnit] = []
    for layer in graph.layers:
        parts = [_unit(layer, modules, quantized) for modules in _tied(layer, folded)]
        parts = [part for part in parts if part.linears]
        if len(parts) > 1:
            linears = tuple(name for part in parts for name in part.linears)
            modules = tuple(name for part in parts for name in part.modules)
            units.append(
                SwapUnit(
                    name=layer.prefix,
                    layer=layer.index,
                    whole=True,
                    linears=linears,
                    modules=modules,
                )
            )
        units += parts
    if head in quantized:
        units.append(
            SwapUnit(
                name=head, layer=None, whole=False, linears=(head,), modules=(graph.family.head,)
            )
        )
    return units


def _unit(layer: Layer, modules: Sequence[str], quantized: Collection[str]) -> SwapUnit:
    linears = tuple(name for name in modules if name in quantized)
    return SwapUnit(
        name=", ".join(linears),
        layer=layer.index,
        whole=False,
        linears=linears,
        modules=tuple(modules),
    )


def _tied(layer: Layer, folded: Collection[str]) -> list[list[str]]:
    """The linears of a layer in call order, smoothed ones with what the factors went into."""
    sets = [[name] for name in layer.linears]
    for group in layer.groups:
        source = group.norm or group.feeder
        if source is not None and any(name in folded for name in group.linears):
            names = {source, *group.linears}
            joined = [one for one in sets if names.intersection(one)]
            members = [name for one in joined for name in one]
            members = members if source in members else [source, *members]
            sets = [
                members if one is joined[0] else one
                for one in sets
                if one is joined[0] or one not in joined
            ]
    return sets
