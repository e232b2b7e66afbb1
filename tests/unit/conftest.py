"""A small model cut over a mesh of cards: the view of each rank, and of one that sees everything.

Values are small integers, so that every sum of floats is exact whatever its order. Statistics are
computed here by formula, not by observers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from quantflow.measuring.record import Measurement

EDGES = torch.tensor(
    [float(Fraction(2) ** (k // 8 - 40) * (1 + Fraction(k % 8, 8))) for k in range(513)]
)
STATISTICS = (
    "amax",
    "channel_amax",
    "min_val",
    "max_val",
    "abs_sum",
    "counts",
    "hessian_sum",
    "count",
)
EXTREMES = STATISTICS[:4]
IN, OUT, WIDTH = 3, 2, 2  # features that are never cut, and a head's


def statistics_of(x: Tensor) -> dict[str, Tensor]:
    """What there is to know about samples.  x: [N, C]."""
    size = x.abs()
    seen = len(x) > 0
    return {
        "amax": size.max() if x.numel() else torch.zeros(()),
        "channel_amax": size.amax(dim=0) if seen else torch.zeros(x.shape[1]),
        "min_val": x.amin(dim=0).clamp(max=0) + 0.0 if seen else torch.zeros(x.shape[1]),
        "max_val": x.amax(dim=0).clamp(min=0) + 0.0 if seen else torch.zeros(x.shape[1]),
        "abs_sum": size.double().sum(dim=0),
        "counts": torch.bincount(torch.bucketize(size.flatten(), EDGES, right=True), minlength=514),
        "hessian_sum": x.T @ x,
        "count": torch.tensor(len(x)),
    }


@dataclass(frozen=True)
class Site:
    """One place where tensors flow: which part of the whole each card sees, and what the whole is.

    `cut` takes (the whole of one sample, card) and returns what the card sees of it; `joined` (the
    whole, first card, last card) what neighbouring cards see together, or None where that is no
    statistic of anything.
    """

    name: str
    site: str
    whole: Any
    cut: Any
    joined: Any
    statistics: tuple[str, ...] = STATISTICS


class Simulation:
    """A model on dp replicas of tp cards.

    up is cut by rows, down by columns, plain not at all; attention has `heads` key and value heads,
    copied where the cards are more; experts are spread over the cards of a replica. `partial`:
    down's output is measured before the reduction.
    """

    def __init__(
        self, *, tp: int, dp: int, samples: int, seed: int, partial: bool = False, heads: int = 0
    ) -> None:
        self.tp, self.dp, self.samples, self.partial = tp, dp, samples, partial
        self.wide = 2 * tp  # the features that are cut
        self.heads = heads or 2 * tp
        self.experts = 2 * tp
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-9, 10, shape, generator=generator).float()

        self.weights = {
            "up": integers(self.wide, IN),
            "down": integers(OUT, self.wide),
            "plain": integers(OUT, IN),
        }
        lengths = torch.randint(1, 4, (samples,), generator=generator).tolist()
        self.tokens = [torch.arange(length) + 10 * index for index, length in enumerate(lengths)]
        self.inputs = [integers(length, IN) for length in lengths]
        self.middles = [integers(length, self.wide) for length in lengths]
        self.caches = [integers(self.heads, length, WIDTH) for length in lengths]
        self.routes = [
            torch.randint(0, self.experts, (length,), generator=generator) for length in lengths
        ]

    def span(self, first: int, last: int) -> slice:
        return slice(2 * first, 2 * last + 2)

    def head_span(self, first: int, last: int) -> slice:
        return slice(
            first * self.heads // self.tp,
            max(first * self.heads // self.tp + 1, (last + 1) * self.heads // self.tp),
        )

    def sites(self) -> list[Site]:
        """Every site but the experts'."""
        up, down, plain = (self.weights[name] for name in ("up", "down", "plain"))
        same = {"cut": lambda x, _card: x, "joined": lambda x, _first, _last: x}
        channels = {
            "cut": lambda x, card: x[:, self.span(card, card)],
            "joined": lambda x, first, last: x[:, self.span(first, last)],
        }
        heads = {
            "cut": lambda x, card: x[self.head_span(card, card)].flatten(0, 1),
            "joined": lambda x, first, last: x[self.head_span(first, last)].flatten(0, 1),
        }
        by_head = {
            "cut": lambda x, card: x[:, self.head_span(card, card)],
            "joined": lambda x, first, last: x[:, self.head_span(first, last)],
        }
        rows = {
            "cut": lambda x, card: x[self.span(card, card)],
            "joined": lambda x, first, last: x[self.span(first, last)],
        }
        summed = {
            "cut": lambda x, card: x[:, self.span(card, card)] @ down[:, self.span(card, card)].T,
            "joined": lambda _x, _first, _last: None,
        }
        found = [
            Site("up", "input", self.inputs, **same),
            Site("up", "output", [x @ up.T for x in self.inputs], **channels),
            Site("up", "weight", up.T, **channels),
            Site("down", "input", self.middles, **channels),
            Site("down", "weight", down.T, **rows),
            Site("plain", "input", self.inputs, **same),
            Site("plain", "output", [x @ plain.T for x in self.inputs], **same),
            Site("plain", "weight", plain.T, **same),
            Site("attention", "k_cache", self.caches, **heads),
            Site("attention", "v_cache", [2 * x for x in self.caches], **heads),
            Site(
                "attention",
                "k_heads",
                [x.flatten(1).T for x in self.caches],
                **by_head,
                statistics=("channel_amax",),
            ),
        ]
        if self.partial:
            return [*found, Site("down", "output", self.middles, **summed, statistics=EXTREMES)]
        return [*found, Site("down", "output", [x @ down.T for x in self.middles], **same)]

    def indices(self, replica: int) -> list[int]:
        """The samples of a replica."""
        return list(range(replica, self.samples, self.dp))

    def seen(self, site: Site, indices: Sequence[int], part: Any) -> Tensor | None:
        """What flows at a site over some samples, `part` of each."""
        if site.site == "weight":
            return part(site.whole)
        parts = [part(site.whole[index]) for index in indices]
        return None if any(one is None for one in parts) else torch.cat(parts)

    def expert_input(self, number: int, indices: Sequence[int]) -> Tensor:
        """The tokens that an expert gets of some samples, [n, IN]."""
        return torch.cat([self.inputs[i][self.routes[i] == number] for i in indices])

    def placement(self, name: str, card: int) -> dict[str, Any]:
        """The placement of a tensor on a card, as the record describes it."""
        if name.startswith("expert"):
            number = int(name[6:])
            held = int(number // 2 == card)
            shape = {
                "axis": None,
                "offset": number,
                "length": held,
                "experts": self.experts,
                "full_shape": [OUT, IN],
            }
            return {"kind": "expert", **shape}
        if name == "attention":
            span = self.head_span(card, card)
            cut, shape = (
                {"axis": 0, "offset": span.start, "length": span.stop - span.start},
                [self.heads, WIDTH],
            )
            return {"kind": "column", **cut, "full_shape": shape, "copies": True}
        if name == "plain":
            return {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [OUT, IN]}
        cut = {"offset": 2 * card, "length": 2}
        if name == "up":
            return {"kind": "column", "axis": 0, **cut, "full_shape": [self.wide, IN]}
        output = "partial" if self.partial else "reduced"
        return {"kind": "row", "axis": 1, **cut, "full_shape": [OUT, self.wide], "output": output}

    def rank(
        self,
        rank: int,
        *,
        sites: Sequence[Site],
        experts: Sequence[int] = (),
        wanted: Sequence[str] = STATISTICS,
    ) -> Measurement:
        """What a rank writes about these sites and experts."""
        replica, card = divmod(rank, self.tp)
        indices = self.indices(replica)
        found = {}
        for site in sites:
            x = self.seen(site, indices, lambda whole, site=site: site.cut(whole, card))
            found |= keyed(site.name, site.site, statistics_of(x), wanted, site.statistics)
        for number in experts:
            x = self.expert_input(number, indices)
            if number // 2 == card and len(x):
                found |= keyed(f"expert{number}", "input", statistics_of(x), wanted)
        names = [
            "up",
            "down",
            "plain",
            "attention",
            *(f"expert{number}" for number in range(self.experts) if experts),
        ]
        return Measurement(
            meta=self.meta(rank, indices, {name: self.placement(name, card) for name in names}),
            statistics=found,
            sequences=[self.tokens[index] for index in indices],
            indices=indices,
        )

    def meta(self, rank: int, indices: Sequence[int], tensors: dict[str, Any]) -> dict[str, Any]:
        world = self.tp * self.dp
        tokens = [len(one) for one in self.tokens]
        return {
            "layout_version": 1,
            "kind": "measurement",
            "model": {"name": "tiny", "fingerprint": "f" * 64, "family": "llama"},
            "mesh": {"rank": rank, "world": world, "tp": self.tp, "dp": self.dp, "ep": self.tp},
            "dtype": "float32",
            "seed": 0,
            "calibration": {
                "hash": "c" * 64,
                "samples": self.samples,
                "tokens": sum(tokens),
                "sequence_length": 8,
            },
            "observers": ["amax"],
            "tensors": tensors,
            "counts": {"samples": len(indices), "tokens": sum(tokens[index] for index in indices)},
            "tools": {"torch": "2"},
        }

    def ranks(self, **kept: Any) -> list[Measurement]:
        """What all ranks write, in order."""
        return [
            self.rank(rank, **{"sites": self.sites(), **kept}) for rank in range(self.tp * self.dp)
        ]


def keyed(
    name: str, site: str, values: dict[str, Tensor], *wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Statistics under their keys, those that every selection names; a count only beside a sum."""
    chosen = {
        key: value for key, value in values.items() if all(key in selection for selection in wanted)
    }
    if not {"abs_sum", "hessian_sum"} & set(chosen):
        chosen.pop("count", None)
    return {f"{name}|{site}|{key}": value for key, value in chosen.items()}


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    """The class; tests make their own meshes."""
    return Simulation


@pytest.fixture(scope="session")
def formulas() -> Any:
    """(statistics_of, keyed)."""
    return statistics_of, keyed
