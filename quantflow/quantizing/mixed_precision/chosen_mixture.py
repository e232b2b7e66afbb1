"""Mixed precision: a scheme for each linear, so that bits or divergence keep to a limit.

    target_bpw    the least predicted divergence with at most so many bits per quantized weight
    target_size   the same with at most so many bytes of the weights' files
    max_kld       the fewest bits with at most so much divergence: predictions are corrected by the
                  measured divergence of the choice, and schemes are chosen again until measured and
                  wanted agree

The bits and the cost of every scheme of every linear are computed once
(quantflow/quantizing/mixed_precision/sensitivity.py) and kept in <o>/.choice-KEY.json, beside the
divergence measured in each round, so that a run that was stopped goes on there. A choice is also a
list of overrides of a recipe: a pattern for equal linears of several layers, for people to read and
edit.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantflow.core.scheme import MIXTURES, preset
from quantflow.errors import GateError, InputError, UsageError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of, read_json
from quantflow.models.graph import Graph, Layer
from quantflow.planning.recipe import ACTIVE, Candidate, Override, Quantize
from quantflow.quantizing.mixed_precision.knapsack import solve_multiple_choice_knapsack
from quantflow.quantizing.mixed_precision.sensitivity import ChoiceItem, candidates_of
from quantflow.units import parse_size

VERSION = 1  # of what is predicted and how it is chosen
ROUNDS = 6  # of quantizing and measuring, after which the best of them is taken
CLOSE = 0.9  # of the divergence that is allowed: nearer to it no bits are looked for
AIM = 0.97  # of it, once predictions are corrected: what is left of their error goes both ways


@dataclass(frozen=True, kw_only=True)
class Round:
    """One choice that was quantized and measured.

    Attributes:
        picks: the option of each item, by number.
        predicted: mean divergence as predicted, uncorrected, nats per token.
        measured: mean divergence as measured, nats per token.
        accepted: the choice stays.
    """

    picks: tuple[int, ...]
    predicted: float
    measured: float
    accepted: bool


@dataclass(frozen=True, kw_only=True)
class ChosenMixture:
    """The candidates of every linear, and the rounds of choosing among them.

    Attributes:
        key: digest of its inputs.
        entry: the artifact's part of the recipe.
        graph: the model's linears.
        items: linears that get one scheme, with the bits and the cost of each candidate.
        tokens: number of tokens that the divergence was predicted over.
        fixed: weights and bits of the linears that overrides name, counted as the entry counts.
        beside: bytes of the weights' files beside the items, which a size bounds as well; None
            where no size is given.
        rounds: rounds of earlier choices.
    """

    key: str
    entry: Quantize
    graph: Graph
    items: tuple[ChoiceItem, ...]
    tokens: int
    fixed: tuple[float, float]
    beside: int | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The schemes that are chosen from."""
        return candidates_of(self.entry)

    @property
    def active(self) -> bool:
        """Whether weights and bits count by the share of them that a token reads."""
        return self.entry.bits_of == ACTIVE

    @property
    def weights(self) -> float:
        """The number of quantized weights, as the entry counts them."""
        return self.fixed[0] + sum(item.weights * self._share(item) for item in self.items)

    def bits_per_weight(self, picks: Sequence[int]) -> float:
        """The bits per weight of a choice, scales and zero points included, as the entry counts."""
        bits = sum(
            item.options[pick][0] * self._share(item)
            for item, pick in zip(self.items, picks, strict=True)
        )
        return (self.fixed[1] + bits) / self.weights

    def _share(self, item: ChoiceItem) -> float:
        return item.share if self.active else 1

    def predicted(self, picks: Sequence[int]) -> float:
        """The mean divergence that a choice is predicted to cost, nats per token, uncorrected."""
        return (
            sum(item.options[pick][1] for item, pick in zip(self.items, picks, strict=True))
            / self.tokens
        )

    @property
    def settled(self) -> bool:
        """Whether the latest round was accepted."""
        return bool(self.rounds) and self.rounds[-1].accepted

    @property
    def measured(self) -> float | None:
        """The mean divergence of the latest round, nats per token; None before the first."""
        return self.rounds[-1].measured if self.rounds else None

    @property
    def description(self) -> str:
        """The choice in a few words."""
        before = self.rounds[:-1] if self.settled else self.rounds
        count = "active bits" if self.active else "bits"
        text = f"{self.bits_per_weight(self.picks):.4f} {count} per weight, predicted mean KLD "
        text += f"{_ratio(before) * self.predicted(self.picks):.4g}"
        return f"{text}, measured {self.measured:.4g} on calibration text" if self.settled else text

    @property
    def ratio(self) -> float:
        """Measured to predicted, of the latest round; 1 before the first."""
        return _ratio(self.rounds)

    @cached_property
    def picks(self) -> tuple[int, ...]:
        """The candidate of every item, by number.

        Raises:
            UsageError: no choice keeps to the limit.
            GateError: none that was measured does.
        """
        if self.settled:
            return self.rounds[-1].picks
        if self.entry.max_kld is None:
            return self._within_bits()
        if len(self.rounds) < ROUNDS:
            return self._within_divergence(self.entry.max_kld)
        holding = [one for one in self.rounds if one.measured <= self.entry.max_kld]
        if not holding:
            rounds = ", ".join(
                f"{self.bits_per_weight(one.picks):.3f} bits: {one.measured:.4g}"
                for one in self.rounds
            )
            raise GateError(
                f"{self.entry.name}: max_kld={self.entry.max_kld}, measured {rounds}",
                "allow more, or give finer candidates",
            )
        return min(holding, key=lambda one: self.bits_per_weight(one.picks)).picks

    def with_round(self, measured: float) -> "ChosenMixture":
        """The mixture after its choice was measured; the round says whether it is accepted."""
        now = Round(
            picks=self.picks, predicted=self.predicted(self.picks), measured=measured, accepted=True
        )
        if self.entry.max_kld is None:
            return replace(self, rounds=(*self.rounds, now))
        then = replace(self, rounds=(*self.rounds, replace(now, accepted=False)))
        holds = measured <= self.entry.max_kld
        if holds and (
            len(self.rounds) >= ROUNDS
            or measured >= CLOSE * self.entry.max_kld
            or not then._saves(now.picks)
        ):
            return replace(self, rounds=(*self.rounds, now))
        return then

    def resolved(self) -> Quantize:
        """The entry that spells the choice out, as a recipe that is run again has it."""
        size = self.entry.group_size or preset(self.entry.scheme).weights.group_size
        # a mixture of llama.cpp's gives linears types by their role, so that each is spelled out
        mixes = self.entry.scheme in MIXTURES
        base = None if mixes else Candidate(scheme=self.entry.scheme, group_size=size)
        chosen = {
            name: self.candidates[pick]
            for item, pick in zip(self.items, self.picks, strict=True)
            for name in item.linears
        }
        overrides: tuple[Override, ...] = (
            *self.entry.overrides,
            *overrides_for(chosen, base, self.graph),
        )
        return replace(
            self.entry,
            overrides=overrides,
            target_bpw=None,
            target_size=None,
            max_kld=None,
            bits_of=None,
            candidates=None,
        )

    def as_json(self) -> dict[str, Any]:
        """The choice and everything that it was made from, as the manifest holds it."""
        return {
            "target_bpw": self.entry.target_bpw,
            "max_kld": self.entry.max_kld,
            **({} if self.beside is None else {"target_size": self.entry.target_size}),
            **({"bits_of": ACTIVE} if self.active else {}),
            "tokens": self.tokens,
            "bits_per_weight": self.bits_per_weight(self.picks),
            "predicted_kld": self.predicted(self.picks),
            "measured_kld": self.measured,
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "items": [
                {
                    "linears": list(item.linears),
                    "chosen": pick,
                    "options": [
                        {"candidate": number, "bits": bits, "predicted_kld": cost / self.tokens}
                        for number, (bits, cost) in item.options.items()
                    ],
                }
                for item, pick in zip(self.items, self.picks, strict=True)
            ],
            "rounds": [
                {
                    "bits_per_weight": self.bits_per_weight(one.picks),
                    "predicted_kld": one.predicted,
                    "measured_kld": one.measured,
                }
                for one in self.rounds
            ],
        }

    def _saves(self, picks: Sequence[int]) -> bool:
        """Whether the corrected choice takes fewer bits than another that holds."""
        return self.bits_per_weight(self.picks) < self.bits_per_weight(picks)

    @property
    def _limit(self) -> float:
        """The bits that the items may take together, as the entry counts them."""
        if self.beside is not None:
            assert self.entry.target_size is not None
            return 8 * (parse_size(self.entry.target_size) - self.beside)
        assert self.entry.target_bpw is not None  # otherwise nothing is to be chosen
        return int(self.entry.target_bpw * self.weights) - self.fixed[1]

    def _within_bits(self) -> tuple[int, ...]:
        picks = self._least(
            [
                {n: (bits * self._share(item), cost) for n, (bits, cost) in item.options.items()}
                for item in self.items
            ],
            self._limit,
        )
        if picks is None:
            smallest = [
                min(item.options.items(), key=lambda pair: pair[1][0])[0] for item in self.items
            ]
            if self.beside is not None:
                bits = sum(item.options[n][0] for item, n in zip(self.items, smallest, strict=True))
                raise UsageError(
                    f"{self.entry.name}: target_size={self.entry.target_size}, the smallest "
                    f"candidates take {bits // 8:,} bytes and the rest of the files "
                    f"{self.beside:,}",
                    "give a larger size, or smaller candidates",
                )
            raise UsageError(
                f"{self.entry.name}: target_bpw={self.entry.target_bpw}, the smallest candidates "
                f"take {self.bits_per_weight(smallest):.4f}",
                "give more bits, or smaller candidates",
            )
        return picks

    def _within_divergence(self, limit: float) -> tuple[int, ...]:
        allowed = limit * self.tokens if not self.rounds else AIM * limit * self.tokens / self.ratio
        picks = self._least(
            [
                {n: (cost, bits * self._share(item)) for n, (bits, cost) in item.options.items()}
                for item in self.items
            ],
            allowed,
        )
        if picks is None:
            finest = [
                min(item.options.items(), key=lambda pair: pair[1][1])[0] for item in self.items
            ]
            raise UsageError(
                f"{self.entry.name}: max_kld={limit}, the finest candidates are predicted to cost "
                f"{self.ratio * self.predicted(finest):.4g}",
                "allow more, or give finer candidates",
            )
        return picks

    def _least(
        self, items: Sequence[Mapping[int, tuple[float, float]]], limit: float
    ) -> tuple[int, ...] | None:
        """The candidate of every item, by number."""
        found = solve_multiple_choice_knapsack([list(options.values()) for options in items], limit)
        return (
            None
            if found is None
            else tuple(list(options)[pick] for options, pick in zip(items, found, strict=True))
        )


def _ratio(rounds: Sequence[Round]) -> float:
    return (
        rounds[-1].measured / rounds[-1].predicted if rounds and rounds[-1].predicted > 0 else 1.0
    )


def key_of(entry: Quantize, *, model: str, measurement: str) -> str:
    """The digest of what a choice is made from."""
    # which older choices do not name
    later = ("scale_method", "scale_arithmetic", "bits_of", "imatrix", "target_size")
    given = {key: value for key, value in asdict(entry).items() if key not in later or value}
    words = {key: value for key, value in given.items() if key not in ("name", "expect")}
    return digest_of([VERSION, words, model, measurement])


def path_of(folder: Path, key: str) -> Path:
    """The file that keeps a choice; choices of other inputs have others.

    A finished result may need its own again.
    """
    return folder / f".choice-{key[:16]}.json"


def write(folder: Path, mixture: ChosenMixture) -> None:
    """Keep what was worked out and measured."""
    items = [
        {
            "linears": list(item.linears),
            "weights": item.weights,
            "share": item.share,
            "options": {str(n): list(o) for n, o in item.options.items()},
        }
        for item in mixture.items
    ]
    rounds = [asdict(one) for one in mixture.rounds]
    record = {
        "key": mixture.key,
        "items": items,
        "tokens": mixture.tokens,
        "fixed": list(mixture.fixed),
        "beside": mixture.beside,
        "rounds": rounds,
    }
    disk.write_atomic(path_of(folder, mixture.key), canonical_json(record))


def read(folder: Path, entry: Quantize, graph: Graph, *, key: str) -> ChosenMixture | None:
    """The mixture that the folder keeps; None where it is missing, damaged or of other inputs."""
    path = path_of(folder, key)
    if not path.is_file():
        return None
    try:
        record = read_json(path)
        if record["key"] != key:
            return None
        return ChosenMixture(
            key=key,
            entry=entry,
            graph=graph,
            items=tuple(
                ChoiceItem(
                    linears=tuple(item["linears"]),
                    weights=item["weights"],
                    share=item["share"],
                    options={
                        int(number): (bits, cost)
                        for number, (bits, cost) in item["options"].items()
                    },
                )
                for item in record["items"]
            ),
            tokens=record["tokens"],
            fixed=(record["fixed"][0], record["fixed"][1]),
            beside=record.get("beside"),
            rounds=tuple(
                Round(**{**one, "picks": tuple(one["picks"])}) for one in record["rounds"]
            ),
        )
    except (InputError, KeyError, TypeError, ValueError, json.JSONDecodeError):  # made again
        return None


def overrides_for(
    chosen: Mapping[str, Candidate], base: Candidate | None, graph: Graph
) -> list[Override]:
    """Overrides that give every linear its candidate; linears that get `base` need none.

    Args:
        chosen: linear -> candidate.
        base: the entry's own scheme and group size; None where each linear needs an override.
        graph: the model's linears.
    """
    layers: dict[tuple[str, Candidate], list[int]] = {}
    for layer in graph.layers:
        by_candidate: dict[Candidate, list[str]] = {}
        for name, pattern in _patterns(layer, chosen).items():
            if chosen[name] != base:
                by_candidate.setdefault(chosen[name], []).append(pattern)
        for candidate, names in by_candidate.items():
            for pattern in dict.fromkeys(names):
                layers.setdefault((pattern, candidate), []).append(layer.index)
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


def _patterns(layer: Layer, chosen: Mapping[str, Candidate]) -> dict[str, str]:
    """A pattern of each chosen linear of a layer; one for all experts that have one candidate."""
    leaves: dict[str, set[Candidate | None]] = {}
    for group in layer.groups:
        for name in group.linears if group.expert is not None else ():
            leaves.setdefault(name.rpartition(".")[2], set()).add(chosen.get(name))
    patterns = {}
    for group in layer.groups:
        for name in (name for name in group.linears if name in chosen):
            inside = layer.inside(name)
            pattern = re.escape(inside).replace("\\.", "[.]")
            if group.expert is not None and len(leaves[name.rpartition(".")[2]]) == 1:
                stem, _, leaf = inside.rpartition(".")
                experts = re.escape(stem.rpartition(".")[0]).replace("\\.", "[.]")
                pattern = f"{experts}[.][0-9]+[.]{re.escape(leaf)}"
            patterns[name] = pattern
    return patterns


def recipe_text(
    entry: Quantize, *, model: str, revision: str | None, seed: int, heading: str
) -> str:
    """The recipe that quantizes with the choice, as YAML.

    Args:
        entry: the choice, spelled out.
        model: the source folder.
        revision: revision of the source.
        seed: seed of the run.
        heading: sentence about the choice for the head of the file.
    """
    lines = [
        f"# {heading}",
        "# Edit it and run it again: quantflow quantize MODEL -o DIR --recipe recipe.yaml "
        "--measurement MEASUREMENT",
        f"model: {json.dumps(model)}",
        *([] if revision is None else [f"revision: {json.dumps(revision)}"]),
        f"seed: {seed}",
        "quantize:",
    ]
    usual = {each.name: each.default for each in fields(entry)}
    settings = {
        key: value
        for key, value in asdict(entry).items()
        if value != usual[key] and key != "overrides"
    }
    for position, (key, value) in enumerate(settings.items()):
        lines.append(f"  {'-' if position == 0 else ' '} {key}: {json.dumps(value)}")
    if entry.overrides:
        lines.append("    overrides:")
    for override in entry.overrides:
        override_settings = {
            key: value for key, value in asdict(override).items() if value is not None
        }
        lines.append(
            "      - {"
            + ", ".join(f"{key}: {json.dumps(value)}" for key, value in override_settings.items())
            + "}"
        )
    return "\n".join(lines) + "\n"
