"""A tensor cut by any plan over any mesh: its shares unified are its statistics, bit for bit.

Values are random floats. Every statistic but a sum is exact whatever the order; sums of floats are
compared in test_sharded_property.py, on values that add up exactly.
"""

import random

import pytest
import torch

from quantflow.distributed.placement import share
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import Measurement

CASES, PARTS = 600, 4
WANTED = ("amax", "channel_amax", "min_val", "max_val", "counts")


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


class Tensors:
    """A linear that a plan cuts over tp cards, on dp replicas, and all values around it."""

    def __init__(self, draw):
        self.tp, self.dp = draw.randint(1, 8), draw.randint(1, 3)
        self.plan = draw.choice(["column", "row", None])
        self.copied = self.plan == "column" and draw.random() < 0.3
        self.unit = draw.randint(1, 4)
        units = draw.choice(divisors(self.tp)) if self.copied else self.tp * draw.randint(1, 3)
        other = draw.randint(1, 9)
        self.shape = (
            [units * self.unit, other] if self.plan == "column" else [other, units * self.unit]
        )
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        scale = 10.0 ** draw.randint(-3, 3)
        self.weight = scale * torch.randn(*self.shape, generator=generator)
        self.lengths = [draw.randint(1, 4) for _ in range(draw.randint(self.dp, 2 * self.dp))]
        self.inputs = [
            torch.randn(length, self.shape[1], generator=generator) for length in self.lengths
        ]
        self.outputs = [
            torch.randn(length, self.shape[0], generator=generator) for length in self.lengths
        ]
        self.whole = {
            "kind": "replicated",
            "axis": None,
            "offset": 0,
            "full_shape": self.shape,
            "unit": self.unit,
        }
        if self.plan is not None:
            self.whole |= {
                "plan": self.plan,
                "output": "sliced" if self.plan == "column" else "reduced",
            }
        if self.copied:
            self.whole["copies"] = True

    def indices(self, replicas):
        return [index for index in range(len(self.lengths)) if index % self.dp in replicas]

    def seen(self, replicas, cards, statistics_of):
        """Every statistic of these cards' and replicas' share, computed from the whole."""
        held = [share("linear", self.whole, cards=self.tp, card=card) for card in cards]
        axis = {"column": 0, "row": 1}.get(self.plan)
        channels = slice(None)
        if axis is not None and self.tp > 1:
            channels = slice(held[0]["offset"], held[-1]["offset"] + held[-1]["length"])
        indices = self.indices(replicas)
        inputs, outputs = (
            torch.cat([whole[index] for index in indices]) for whole in (self.inputs, self.outputs)
        )
        sites = {
            "input": inputs[:, channels] if axis == 1 else inputs,
            "output": outputs[:, channels] if axis == 0 else outputs,
            "weight": (
                self.weight[channels]
                if axis == 0
                else self.weight[:, channels]
                if axis == 1
                else self.weight
            ).T,
        }
        return {
            f"linear|{site}|{name}": value
            for site, x in sites.items()
            for name, value in statistics_of(x.contiguous()).items()
            if name in WANTED
        }

    def rank(self, rank, statistics_of):
        replica, card = divmod(rank, self.tp)
        indices = self.indices([replica])
        mesh = {"rank": rank, "world": self.tp * self.dp, "tp": self.tp, "dp": self.dp, "ep": 1}
        calibration = {
            "hash": "c",
            "samples": len(self.lengths),
            "tokens": sum(self.lengths),
            "sequence_length": 4,
        }
        meta = {
            "model": {"name": "one", "fingerprint": "f", "family": "llama"},
            "mesh": mesh,
            "dtype": "float32",
            "seed": 0,
            "calibration": calibration,
            "observers": ["amax"],
            "tensors": {"linear": share("linear", self.whole, cards=self.tp, card=card)},
            "counts": {
                "samples": len(indices),
                "tokens": sum(self.lengths[index] for index in indices),
            },
            "tools": {},
        }
        return Measurement(
            meta=meta,
            statistics=self.seen([replica], [card], statistics_of),
            sequences=[torch.arange(self.lengths[index]) for index in indices],
            indices=indices,
        )


def grouping(draw, tp, dp):
    """Replicas in sets of one size, and cards in runs of one length: [(replicas, cards)]."""
    deep, wide = draw.choice(divisors(dp)), draw.choice(divisors(tp))
    replicas = draw.sample(range(dp), dp)
    sets = [sorted(replicas[first : first + deep]) for first in range(0, dp, deep)]
    return [
        (held, list(range(first, first + wide))) for held in sets for first in range(0, tp, wide)
    ]


def check(draw, statistics_of):
    made = Tensors(draw)
    groups = grouping(draw, made.tp, made.dp)
    ranks = [made.rank(rank, statistics_of) for rank in range(made.tp * made.dp)]
    draw.shuffle(ranks)
    numbers = [
        [replica * made.tp + card for replica in held for card in cards] for held, cards in groups
    ]
    for merged, (held, cards) in zip(unify(ranks, numbers), groups, strict=True):
        due = made.seen(held, cards, statistics_of)
        assert merged.statistics.keys() == due.keys()
        for key, value in due.items():
            assert merged.statistics[key].dtype == value.dtype and torch.equal(
                merged.statistics[key], value
            ), key
        assert merged.indices == made.indices(held)


@pytest.mark.parametrize("part", range(PARTS))
def test_shares_of_one_tensor_are_the_tensor_whatever_its_shape_plan_and_groups(part, formulas):
    statistics_of, _ = formulas
    draw = random.Random(1000 + part)
    for _ in range(CASES // PARTS):
        check(draw, statistics_of)
