"""The cheapest mend of an artifact, as a recipe: another scheme for its costliest linears.

    {"linears", "scheme", "bytes", "mean_kld", "gain",
     "tried": [{"scheme", "bytes", "mean_kld"}], "recipe"}

Runtimes run some linears as one (q/k/v, gate/up), which then have one scheme; so the MENDED groups
with the largest gains are mended together. Each scheme that is finer than theirs is tried on all of
them at once: rounded to nearest from the source, in the artifact's other weights. These are probes
of "all but these", so interactions are in them, which sums of gains would miss. The cheapest in
bytes that reaches ENOUGH of the best one's gain is taken. `mean_kld` and `gain` are predictions for
all of the text: the artifact's divergence there, times what the probes' windows say. `scheme` null
leaves the linears as in the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from quantflow.algorithms import rtn
from quantflow.backends import reference
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import SchemeError, UnsupportedError, UsageError
from quantflow.models.graph import Graph
from quantflow.models.load import Source
from quantflow.planning.plan import Plan, resolve
from quantflow.planning.recipe import Override, Quantize, recipe_from
from quantflow.planning.sizes import FORMAT, quantized_bytes
from quantflow.quantizing.mixed_precision.chosen_mixture import recipe_text
from quantflow.runtime.linear import QuantLinear
from quantflow.validating.diagnosis_table import mend_words
from quantflow.validating.probes import Probed, Prober, SwapUnit
from quantflow.validating.swaps import CANDIDATE, Swap

MENDED = 3  # groups of linears that runtimes fuse, or linears
SCHEMES = ("W5A16", "W6A16", "W8A16")  # tried where they are finer; then the source's own weights
ENOUGH = 0.9  # of the largest gain
WORTH = 0.01  # of the artifact's divergence: a gain below it is none
RECIPE = "mend.yaml"


@dataclass(frozen=True, kw_only=True)
class ArtifactToMend:
    """An artifact that may be mended.

    Attributes:
        manifest: content of quantflow.json.
        source: model of the artifact.
        graph: linears of the model.
        units: units of its linears, probed or not.
        probed: cost of each probed unit.
        sampled_kld: divergence over the probes' windows, nats per token.
        kld: divergence over all of the text, nats per token.
    """

    manifest: Mapping[str, Any]
    source: Source
    graph: Graph
    units: Sequence[SwapUnit]
    probed: Sequence[Probed]
    sampled_kld: float
    kld: float

    @property
    def entry(self) -> Quantize:
        """The recipe's entry that it was made with."""
        known, recipe = {item.name for item in fields(Quantize)}, self.manifest["recipe"]
        words = {key: value for key, value in recipe.items() if key in known}
        (entry,) = recipe_from(
            {"model": self.manifest["source"]["name"], "quantize": [words]}
        ).quantize
        return entry

    def plan(self, entry: Quantize) -> Plan:
        """The scheme of each linear.

        Raises:
            UsageError, UnsupportedError, SchemeError: the entry does not fit the model.
        """
        return resolve(
            entry,
            self.graph,
            {name: info.shape for name, info in self.source.checkpoint.infos.items()},
            unused={name: one.info.shape for name, one in self.source.checkpoint.unused.items()},
        )

    def nbytes(self, plan: Plan, linears: Sequence[str]) -> int:
        """The bytes that linears take."""
        infos = self.source.checkpoint.infos
        total = 0
        for name in linears:
            info, scheme = infos[f"{name}.weight"], plan.schemes[name]
            total += info.nbytes if scheme is None else quantized_bytes(name, scheme, info)
        return total


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A scheme for some linears, None for the source's own weights, as a recipe's entry."""

    scheme: str | None
    entry: Quantize
    plan: Plan
    bytes: int


def cheapest(
    to_mend: ArtifactToMend, prober: Prober, *, model: str, seed: int
) -> tuple[dict[str, Any], str] | None:
    """The mend, see the module's head, and its recipe; None where no linear's gain is worth it.

    Args:
        to_mend: artifact that is mended.
        prober: runner of the tries.
        model: folder of the source, for the recipe.
        seed: seed for the recipe.
    """
    units = _costliest(to_mend)
    linears = [name for unit in units for name in unit.linears]
    if not units:
        return None
    by_scheme = [_remedy(to_mend, linears, scheme) for scheme in (*SCHEMES, None)]
    remedies = [remedy for remedy in by_scheme if remedy is not None]
    if not remedies:
        return None
    modules = tuple(name for unit in units for name in unit.modules)
    swaps = {
        f"mend {remedy.scheme}: {', '.join(linears)}": Swap(
            base=CANDIDATE, taken=modules, made=_made(to_mend.source, remedy.plan, linears)
        )
        for remedy in remedies
    }
    tried = dict(
        zip((remedy.scheme for remedy in remedies), prober.klds(swaps).values(), strict=True)
    )
    best = to_mend.sampled_kld - min(tried.values())
    if best <= WORTH * to_mend.sampled_kld:
        return None
    enough = [
        remedy for remedy in remedies if to_mend.sampled_kld - tried[remedy.scheme] >= ENOUGH * best
    ]
    chosen = min(enough, key=lambda remedy: remedy.bytes)
    predicted = to_mend.kld * tried[chosen.scheme] / to_mend.sampled_kld
    record = {
        "linears": linears,
        "scheme": chosen.scheme,
        "bytes": chosen.bytes,
        "mean_kld": predicted,
        "gain": to_mend.kld - predicted,
        "tried": [
            {"scheme": each.scheme, "bytes": each.bytes, "mean_kld": tried[each.scheme]}
            for each in remedies
        ],
        "recipe": RECIPE,
    }
    heading = (
        f"{to_mend.entry.name} with {mend_words(record)}: mean KLD {to_mend.kld:.4g}, "
        f"predicted {predicted:.4g}."
    )
    return record, recipe_text(chosen.entry, model=model, revision=None, seed=seed, heading=heading)


def _costliest(to_mend: ArtifactToMend) -> list[SwapUnit]:
    """The units whose linears are worth most, at most MENDED groups.

    A group holds the linears that runtimes fuse with one another.
    """
    unit_of = {name: unit for unit in to_mend.units if not unit.whole for name in unit.linears}
    groups: list[list[SwapUnit]] = []
    for layer in to_mend.graph.layers:
        for group in layer.groups:
            for names in [group.linears] if group.fused else [(name,) for name in group.linears]:
                members = list(dict.fromkeys(unit_of[name] for name in names if name in unit_of))
                touched = [other for other in groups if any(unit in other for unit in members)]
                for other in touched:  # smoothing tied them together
                    groups.remove(other)
                    members += [unit for unit in other if unit not in members]
                groups += [members] if members else []
    gains = {each.unit: max(0.0, each.gain) for each in to_mend.probed}
    worth = [(sum(gains.get(unit, 0.0) for unit in members), members) for members in groups]
    chosen = sorted(
        (pair for pair in worth if pair[0] > WORTH * to_mend.sampled_kld), key=lambda pair: -pair[0]
    )[:MENDED]
    return [unit for _, members in chosen for unit in members]


def _remedy(to_mend: ArtifactToMend, linears: Sequence[str], scheme: str | None) -> Remedy | None:
    """A scheme for linears; None where it is not finer, or does not go with the rest."""
    entry = to_mend.entry
    if scheme is None:
        changed = replace(entry, ignore=(*entry.ignore, *linears))
    else:
        changed = replace(
            entry,
            overrides=(
                *entry.overrides,
                *(Override(match=name, scheme=scheme) for name in linears),
            ),
        )
    now = to_mend.plan(entry)
    try:
        plan = to_mend.plan(replace(changed, name=f"{entry.name}-mended"))
    except (
        UsageError,
        UnsupportedError,
        SchemeError,
    ):  # nothing is left to quantize, or the algorithm does not take it
        return None
    pairs = [(now.schemes[name], plan.schemes[name]) for name in linears]
    if scheme is not None and not all(
        new is not None and old is not None and _finer(new, old) for old, new in pairs
    ):
        return None
    more = to_mend.nbytes(plan, linears) - to_mend.nbytes(now, linears)
    return Remedy(
        scheme=scheme, entry=replace(changed, name=f"{entry.name}-mended"), plan=plan, bytes=more
    )


def _finer(new: LinearScheme, old: LinearScheme) -> bool:
    """Whether a scheme keeps more of a linear: more bits, or as many and its inputs as they are."""
    bits = new.weights.num_bits - old.weights.num_bits
    return bits > 0 or (bits == 0 and old.input is not None and new.input is None)


def _made(source: Source, plan: Plan, linears: Sequence[str]) -> dict[str, nn.Module]:
    """The linears of the source with a plan's schemes, rounded to nearest."""
    rounded_linears: dict[str, nn.Module] = {}
    for name in linears:
        scheme = plan.schemes[name]
        if scheme is None:
            continue
        (weight,) = source.read([f"{name}.weight"]).values()
        dtype = FORMAT.scale_dtype(scheme, weight.dtype)
        result = rtn.quantize_group({name: weight}, scheme, statistics={}, scale_dtype=dtype)[name]
        biases = [bias for bias in (f"{name}.bias",) if bias in source.names]
        bias = source.read(biases, torch.float32)[biases[0]] if biases else None
        quantized = QuantizedLinear(weight=result.weight, scheme=scheme)
        rounded_linears[name] = QuantLinear(
            quantized, bias=bias, backend=reference.BACKEND, dtype=torch.float32
        )
    return rounded_linears
