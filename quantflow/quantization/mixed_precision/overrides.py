"""A choice of schemes as overrides of a recipe: a pattern for equal linears of several layers, for people to read and edit."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields

from quantflow.models.graph import Graph
from quantflow.planning.recipe import Candidate, Override, Quantize


def overrides_for(chosen: Mapping[str, Candidate], base: Candidate, graph: Graph) -> list[Override]:
    """Return overrides that give every linear its candidate; those that get `base` need none.

    Args:
        chosen: linear -> candidate.
        base: the entry's own scheme and group size.
        graph: the model's linears.
    """
    layers: dict[tuple[str, Candidate], list[int]] = {}
    for layer in graph.layers:
        by_candidate: dict[Candidate, list[str]] = {}
        for name in layer.linears:
            if name in chosen and chosen[name] != base:
                by_candidate.setdefault(chosen[name], []).append(re.escape(layer.relative(name)).replace("\\.", "[.]"))
        for candidate, names in by_candidate.items():
            for name in names:
                layers.setdefault((name, candidate), []).append(layer.index)
    together: dict[tuple[Candidate, tuple[int, ...]], list[str]] = {}
    for (name, candidate), indices in layers.items():
        together.setdefault((candidate, tuple(indices)), []).append(name)
    prefix = graph.family.layers.replace(".", "[.]")
    return [
        Override(
            match=f"re:{prefix}[.]({'|'.join(map(str, indices))})[.]({'|'.join(names)})$",
            scheme=candidate.scheme,
            group_size=candidate.group_size,
        )
        for (candidate, indices), names in together.items()
    ]


def recipe_text(entry: Quantize, *, model: str, revision: str | None, seed: int, told: str) -> str:
    """Return the recipe that quantizes with the choice, as YAML.

    Args:
        entry: the choice, spelled out.
        model: the source folder.
        revision: of the source.
        seed: of the run.
        told: what the choice is, a sentence for the head of the file.
    """
    lines = [
        f"# {told}",
        "# Edit it and run it again: quantflow quantize MODEL -o DIR --recipe recipe.yaml --measurement MEASUREMENT",
        f"model: {json.dumps(model)}",
        *([] if revision is None else [f"revision: {json.dumps(revision)}"]),
        f"seed: {seed}",
        "quantize:",
    ]
    usual = {each.name: each.default for each in fields(entry)}
    given = {key: value for key, value in asdict(entry).items() if value != usual[key] and key != "overrides"}
    for position, (key, value) in enumerate(given.items()):
        lines.append(f"  {'-' if position == 0 else ' '} {key}: {json.dumps(value)}")
    if entry.overrides:
        lines.append("    overrides:")
    for override in entry.overrides:
        words = {key: value for key, value in asdict(override).items() if value is not None}
        lines.append("      - {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in words.items()) + "}")
    return "\n".join(lines) + "\n"
