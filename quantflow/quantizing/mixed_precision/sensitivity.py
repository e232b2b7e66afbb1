"""The bits and the predicted cost of each scheme for each group of linears.

One pass over the weights computes them. Linears that runtimes fuse (q/k/v, gate/up) are one item,
any other is one by itself. All linears of a layer's experts are one item: engines have them in one
tensor. A shared expert's are none of them. llama.cpp fuses nothing, and has a tensor for each of
its experts' linears: among its types a linear is one item, for all experts of a layer together.

Of each weight a sample of rows is read, fewer of each expert where there are many, and an eighth
for types with a codebook, whose nearest entry takes a comparison with all of them. An expert's
sensitivity is that of the tokens that it was sent, so one that got none costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.dtypes import DTYPES
from quantflow.core.parallel import Workers
from quantflow.core.scheme import LinearScheme, preset
from quantflow.errors import UsageError
from quantflow.formats import DEFAULT, FORMATS
from quantflow.measuring.record import Measurement, statistic
from quantflow.models.graph import Graph, Layer
from quantflow.models.open import ModelFiles
from quantflow.models.reading import read_rows
from quantflow.numerics.grid import either_sign
from quantflow.numerics.sensitivity import ROWS, predicted_divergence, sampled_rows
from quantflow.observers.fisher import SQUARE_SUM
from quantflow.planning.recipe import Candidate, Quantize
from quantflow.planning.requirements import scheme_of
from quantflow.planning.sizes import counted_bits, elements_of
from quantflow.progress import Progress

FORMAT = FORMATS[DEFAULT]
BITS = (2, 3, 4, 5, 6)
GROUP_SIZES = (32, 64, 128)
_FEWEST = 16  # rows of a weight that stand for all


@dataclass(frozen=True, kw_only=True)
class ChoiceItem:
    """Linears that get one scheme.

    Attributes:
        linears: their names.
        weights: number of their weights.
        options: number of each candidate that fits -> bits stored, and the predicted divergence, in
            nats over all tokens.
        share: share of the weights that a token reads: of experts those that it is sent to, over
            all; 1 elsewhere.
    """

    linears: tuple[str, ...]
    weights: int
    options: Mapping[int, tuple[int, float]]
    share: float = 1


def candidates_of(entry: Quantize) -> tuple[Candidate, ...]:
    """The schemes to choose from: the entry's, or all with its inputs and zero points.

    Beside one of llama.cpp's types they are its types, without those of three points.

    Raises:
        UsageError: a candidate that rounds inputs, float8 among them, or that is no scheme; or
            llama.cpp's types beside others.
    """
    if entry.candidates is None and _of_llama_cpp(entry):
        return tuple(
            Candidate(scheme=name) for name, kind in BLOCK_TYPES.items() if len(kind.points) != 3
        )
    if entry.candidates is None:
        kind = "" if preset(entry.scheme).weights.symmetric else "_ASYM"
        grouped = [
            Candidate(scheme=f"W{bits}A16{kind}", group_size=size)
            for bits in BITS
            for size in GROUP_SIZES
        ]
        return (*grouped, Candidate(scheme="W8A16"))
    for candidate in entry.candidates:
        scheme = scheme_of(candidate.scheme, candidate.group_size)
        if (
            scheme.weights.kind != "int"
            or scheme.input is not None
            or scheme.weights.granularity == "per_tensor"
        ):
            raise UsageError(
                f"{entry.name}: candidate {candidate.scheme}",
                "choose from schemes of integer weights and inputs as they are",
            )
    of_llama_cpp = [each.scheme for each in entry.candidates if each.scheme in BLOCK_TYPES]
    others = [each.scheme for each in entry.candidates if each.scheme not in BLOCK_TYPES]
    if of_llama_cpp and others:
        raise UsageError(
            f"{entry.name}: candidates {of_llama_cpp[0]} and {others[0]}",
            f"choose among llama.cpp's types ({', '.join(BLOCK_TYPES)}) or among others: no file "
            "holds both",
        )
    return entry.candidates


def items_of(
    layer: Layer,
    wanted: Sequence[str],
    candidates: Sequence[Candidate],
    *,
    source: ModelFiles,
    measurement: Measurement,
    workers: Workers,
) -> list[ChoiceItem]:
    """The items of a layer with the bits and the cost of every candidate.

    Args:
        layer: the layer.
        wanted: the linears whose scheme is to be chosen.
        candidates: see `candidates_of`.
        source: the model.
        measurement: measurement with fisher's statistics.
        workers: threads that run linears.

    Raises:
        StatisticsError: the measurement lacks them.
        UsageError: no candidate's group size divides the inputs of an item.
    """
    schemes = {
        number: scheme_of(each.scheme, each.group_size) for number, each in enumerate(candidates)
    }
    items = []
    rows = _rows(layer.experts)
    apart = all(scheme.weights.block is not None for scheme in schemes.values())
    for members, expert in _units(layer, frozenset(wanted), apart=apart):
        infos = {name: source.checkpoint.infos[f"{name}.weight"] for name in members}
        fitting = {
            n: s
            for n, s in schemes.items()
            if all(_fits(s, info.shape[1]) for info in infos.values())
        }
        if not fitting:
            raise UsageError(
                f"{members[0]}: no candidate's group size divides "
                f"{infos[members[0]].shape[1]} inputs",
                "give candidates with others, or ignore the linear",
            )
        most = rows if expert else ROWS
        costs = workers.map(partial(_costs, fitting, source, measurement, most), members)
        items.append(
            ChoiceItem(
                linears=tuple(members),
                weights=sum(elements_of(info) for info in infos.values()),
                options={
                    number: (
                        sum(counted_bits(name, scheme, infos[name]) for name in members),
                        sum(cost[number] for cost in costs),
                    )
                    for number, scheme in fitting.items()
                },
                share=share_of(layer, members[0]),
            )
        )
    return items


def _units(
    layer: Layer, wanted: frozenset[str], *, apart: bool
) -> Iterator[tuple[list[str], bool]]:
    """Yield linears that get one scheme, and whether they are those of a layer's experts.

    `apart` is llama.cpp's way: nothing is fused.
    """
    experts: dict[str, list[str]] = {}
    for group in layer.groups:
        names = [name for name in group.linears if name in wanted]
        if group.expert is not None:
            for name in names:
                experts.setdefault(name.rpartition(".")[2] if apart else "", []).append(name)
        elif group.fused and names and not apart:
            yield names, False
        else:
            yield from (([name], False) for name in names)
    yield from ((names, True) for names in experts.values())


def share_of(layer: Layer, name: str) -> float:
    """The share of a linear's weights that a token reads on average, `ChoiceItem.share`."""
    expert = any(group.expert is not None for group in layer.groups if name in group.linears)
    return layer.chosen / layer.experts if expert else 1


def _rows(experts: int) -> int:
    """Rows that are sampled of each linear of as many experts: 4096 of all, and 16 at least."""
    return min(ROWS, max(_FEWEST, 8 * ROWS // max(experts, 1)))


def all_items(
    entry: Quantize,
    graph: Graph,
    wanted: Sequence[str],
    *,
    source: ModelFiles,
    measurement: Measurement,
    workers: Workers,
    progress: Progress,
) -> list[ChoiceItem]:
    """The items of every layer."""
    candidates = candidates_of(entry)
    wanted_names = set(wanted)
    items: list[ChoiceItem] = []
    for layer in progress.steps(graph.layers, stage=f"choose {entry.name}", unit="layer"):
        mine = [name for name in layer.linears if name in wanted_names]
        items += items_of(
            layer, mine, candidates, source=source, measurement=measurement, workers=workers
        )
    return items


def _fits(scheme: LinearScheme, in_features: int) -> bool:
    kind = scheme.weights.block
    size = scheme.weights.group_size if kind is None else kind.elements
    return in_features % (size or in_features) == 0


def _of_llama_cpp(entry: Quantize) -> bool:
    return preset(entry.scheme).weights.block is not None


def _costs(
    schemes: Mapping[int, LinearScheme],
    source: ModelFiles,
    measurement: Measurement,
    most: int,
    name: str,
) -> dict[int, float]:
    """The predicted cost of each scheme at a linear, from `most` of its rows, or from fewer."""
    file, info = source.checkpoint.tensors[f"{name}.weight"]
    fewer = max(min(most, _FEWEST), most // 8)
    samples = {
        count: read_rows(
            source.checkpoint.folder / file, info, sampled_rows(info.shape[0], most=count)
        )
        for count in {most, fewer}
    }
    factors = {
        "row_factors": statistic(measurement, name, site="gradient", statistic=SQUARE_SUM.name),
        "column_factors": statistic(
            measurement, name, site="guided_input", statistic=SQUARE_SUM.name
        ),
    }
    costs = {}
    for number, scheme in schemes.items():
        kind = scheme.weights.block
        count = fewer if kind is not None and kind.codebook is not None else most
        costs[number] = predicted_divergence(
            samples[count],
            scheme.weights,
            name=name,
            scale_dtype=FORMAT.scale_dtype(scheme, DTYPES[info.dtype]),
            either_sign=either_sign(scheme),
            most=count,
            **factors,
        )
    return costs
