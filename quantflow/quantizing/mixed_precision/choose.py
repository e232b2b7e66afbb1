"""Schemes chosen by measured sensitivities, and the files that tell people of the choice.

recipe.yaml    the choice as a recipe: edit it and run it again
choice.json    every option of every group of linears with its bits and its predicted divergence;
               the manifest has it too
pareto.svg     predicted divergence against bits per weight: the best mixtures, uniform schemes,
               and the choice
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantflow.core.determinism import single_threaded
from quantflow.core.parallel import Workers
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import canonical_json, read_json
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.measuring.record import Measurement, statistic
from quantflow.models.graph import Graph
from quantflow.models.identity import identify
from quantflow.models.open import ModelFiles
from quantflow.planning.cost import need_choice
from quantflow.planning.file_size import bytes_beside
from quantflow.planning.plan import Plan, overridden
from quantflow.planning.recipe import ACTIVE, Candidate, Quantize, Resources
from quantflow.planning.resources import grant
from quantflow.planning.sizes import counted_bits, elements_of, model_size
from quantflow.progress import Progress
from quantflow.quantizing.job import SchemeChoice
from quantflow.quantizing.measurement_input import known_hashes, measurement_of, refuse_foreign
from quantflow.quantizing.mixed_precision import chosen_mixture
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture, recipe_text
from quantflow.quantizing.mixed_precision.knapsack import frontier
from quantflow.quantizing.mixed_precision.sensitivity import all_items, share_of
from quantflow.svg_plot import Point, curves

RECORD, RECIPE, PLOT = "choice.json", "recipe.yaml", "pareto.svg"
PARTS = (RECORD, RECIPE, PLOT)
COLUMNS = ("scheme", "group size", "linears", "weights", "bits per weight", "predicted KLD")


def mixture_of(
    folder: Path,
    entry: Quantize,
    plan: Plan,
    *,
    model: Path,
    measurement_path: Path | None,
    source: ModelFiles,
    graph: Graph,
    resources: Resources,
    parts: Sequence[str],
    progress: Progress,
) -> ChosenMixture:
    """The candidates of every linear, kept in the folder or computed from weights and measurement.

    Args:
        folder: the stage's folder.
        entry: the artifact's part of the recipe.
        plan: plan of the entry with its own scheme for every linear that is to be chosen for.
        model: the source folder.
        measurement_path: the measurement's folder.
        source: the model.
        graph: names of its linears.
        resources: memory and disk.
        parts: names that an unfinished folder may hold.
        progress: listener for each layer.

    Raises:
        StatisticsError: the measurement lacks a linear's sensitivities.
        UsageError: no measurement, or candidates that fit no linear.
        ResourceError: the memory does not suffice.
    """
    measured, measurement = measurement_of(
        measurement_path, plan, scheme=entry.scheme, source=source, graph=graph, progress=progress
    )
    assert measurement is not None  # the plan needs one
    with stage_folder.locked(folder), single_threaded():
        stage_folder.refuse_other_result(folder, {}, force=True, parts=parts)
        disk.make_folder(folder)
        fingerprint = identify(
            source.checkpoint, Digests(folder / HASHES, also=known_hashes(measured))
        )
        refuse_foreign(measurement, model=model, fingerprint=fingerprint, folder=measured)
        key = chosen_mixture.key_of(
            entry, model=fingerprint, measurement=measurement.meta["digest"]
        )
        mixture = chosen_mixture.read(folder, entry, graph, key=key)
        if mixture is None:
            need = need_choice(model_size(source.checkpoint.infos, source.config, graph))
            with Workers(grant(need, resources, folder=folder).workers) as workers:
                mixture = _worked_out(
                    entry,
                    plan,
                    key=key,
                    source=source,
                    graph=graph,
                    measurement=measurement,
                    workers=workers,
                    progress=progress,
                )
            chosen_mixture.write(folder, mixture)
        return mixture


def _worked_out(
    entry: Quantize,
    plan: Plan,
    *,
    key: str,
    source: ModelFiles,
    graph: Graph,
    measurement: Measurement,
    workers: Workers,
    progress: Progress,
) -> ChosenMixture:
    """The candidates of every linear, from the weights and the measurement."""
    infos = source.checkpoint.infos
    schemes = {name: scheme for name, scheme in plan.schemes.items() if scheme is not None}
    kept = sorted(overridden(entry, graph) & schemes.keys())
    wanted = [name for name in schemes if name not in kept]
    items = all_items(
        entry,
        graph,
        wanted,
        source=source,
        measurement=measurement,
        workers=workers,
        progress=progress,
    )
    shares: dict[str, float] = dict.fromkeys(kept, 1)
    if entry.bits_of == ACTIVE:
        for layer in graph.layers:
            mine = shares.keys() & set(layer.linears)
            shares |= {name: share_of(layer, name) for name in mine}
    return ChosenMixture(
        key=key,
        entry=entry,
        graph=graph,
        items=tuple(items),
        tokens=int(statistic(measurement, graph.linears[0], site="gradient", statistic="count")),
        fixed=(
            sum(elements_of(infos[f"{name}.weight"]) * shares[name] for name in kept),
            sum(
                counted_bits(name, schemes[name], infos[f"{name}.weight"]) * shares[name]
                for name in kept
            ),
        ),
        beside=(
            bytes_beside(entry, plan, wanted, source=source, graph=graph)
            if entry.target_size is not None
            else None
        ),
    )


def tell(
    folder: Path, mixture: ChosenMixture, *, model: Path, revision: str | None, seed: int
) -> None:
    """Write the choice, for people and for a manifest."""
    heading = f"Schemes chosen for {_asked(mixture.entry)}: {mixture.description}."
    recipe = recipe_text(
        mixture.resolved(), model=str(model), revision=revision, seed=seed, heading=heading
    )
    disk.write_atomic(folder / RECIPE, recipe.encode())
    disk.write_atomic(folder / RECORD, canonical_json(mixture.as_json()))
    disk.write_atomic(folder / PLOT, plot(mixture).encode())


def plot(mixture: ChosenMixture) -> str:
    """The Pareto curve as SVG: predictions, corrected by what was measured where that is known."""
    factor = mixture.ratio
    options = [list(item.options.items()) for item in mixture.items]
    corners = [
        tuple(options[position][pick][0] for position, pick in enumerate(corner))
        for corner in frontier([[pair for _, pair in of_item] for of_item in options])
    ]
    uniform = [
        (number, (number,) * len(mixture.items))
        for number in range(len(mixture.candidates))
        if all(number in item.options for item in mixture.items)
    ]
    marked = [
        Point(
            label=words(mixture.candidates[number]),
            x=mixture.bits_per_weight(picks),
            y=factor * mixture.predicted(picks),
        )
        for number, picks in uniform
    ]
    counted = "weight that a token reads" if mixture.active else "quantized weight"
    chosen = mixture.measured if mixture.measured is not None else mixture.predicted(mixture.picks)
    here = Point(label="chosen", x=mixture.bits_per_weight(mixture.picks), y=chosen)
    return curves(
        line=[
            (mixture.bits_per_weight(picks), factor * mixture.predicted(picks)) for picks in corners
        ],
        label="best mixtures, predicted",
        points={"uniform, predicted": marked, "chosen, measured": [here]},
        x=f"bits per {counted}, scales and zero points included",
        y="mean KL divergence, nats per token",
    )


def choice_in(folder: Path) -> SchemeChoice:
    """The schemes that were chosen, from the folder of quantized layers.

    Raises:
        InputError: none were.
    """
    table = rows(read_json(folder / RECORD))
    return SchemeChoice(columns=COLUMNS, rows=table, recipe=folder / RECIPE, plot=folder / PLOT)


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a choice from choice.json, with the columns of COLUMNS.

    It has one row per scheme, and one for all of them.
    """
    by_candidate: dict[int, list[tuple[int, int, float]]] = {}
    for item in record["items"]:
        option = next(one for one in item["options"] if one["candidate"] == item["chosen"])
        row_parts = by_candidate.setdefault(item["chosen"], [])
        row_parts.append((len(item["linears"]), option["bits"], option["predicted_kld"]))
    total = sum(bits for row_parts in by_candidate.values() for _, bits, _ in row_parts)
    table = []
    for number, row_parts in sorted(by_candidate.items()):
        candidate = Candidate(**record["candidates"][number])
        linears, bits, cost = (sum(column) for column in zip(*row_parts, strict=True))
        size = "" if candidate.group_size is None else str(candidate.group_size)
        table.append(
            (candidate.scheme, size, str(linears), f"{bits / total:.1%}", "", f"{cost:.3g}")
        )
    measured = record["measured_kld"]
    told = f"{record['predicted_kld']:.3g}" + (
        "" if measured is None else f", measured {measured:.3g}"
    )
    return [*table, ("all", "", "", "100.0%", f"{record['bits_per_weight']:.4f}", told)]


def words(candidate: Candidate) -> str:
    """A candidate as a label: `W4A16 g64`."""
    return (
        candidate.scheme
        if candidate.group_size is None
        else f"{candidate.scheme} g{candidate.group_size}"
    )


def _asked(entry: Quantize) -> str:
    ((key, value),) = entry.bounds.items()
    bound = f"{key} {value}"
    return f"{bound} of active bits" if entry.bits_of == ACTIVE else bound
