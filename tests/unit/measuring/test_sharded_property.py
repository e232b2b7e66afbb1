"""Statistics of shares, unified in any valid way, are those of the whole, bit for bit."""

import random

import pytest
import torch

from quantflow.measuring.merging.ranks import unify

CASES, PARTS, QUICK = 1200, 6, 2
OBSERVERS = (("amax",), ("channel_amax",), ("min_val", "max_val"), ("abs_sum",), ("counts",))
NO_HESSIAN = (*(name for names in OBSERVERS for name in names), "count")


def draw(random, simulation):
    """A mesh, a grouping of it, and what is measured."""
    tp, dp = random.choice([(t, d) for t in range(1, 5) for d in range(1, 5) if t * d <= 8])
    wide = random.choice([size for size in range(1, tp + 1) if tp % size == 0])  # cards of a group
    # replicas of a group
    deep = random.choice([size for size in range(1, dp + 1) if dp % size == 0])
    replicas = random.sample(range(dp), dp)
    sets = [sorted(replicas[first : first + deep]) for first in range(0, dp, deep)]
    runs = [range(first, first + wide) for first in range(0, tp, wide)]
    groups = [(held, run) for held in sets for run in runs]
    made = simulation(
        tp=tp,
        dp=dp,
        samples=random.randint(dp, 2 * dp),
        seed=random.randrange(1 << 30),
        partial=random.random() < 0.5,
        heads=random.choice([2 * tp, tp, *(heads for heads in range(1, tp) if tp % heads == 0)]),
    )
    sites = random.sample(made.sites(), random.randint(1, 4))
    experts = random.sample(range(made.experts), random.randint(0, 2))
    observers = [
        *random.sample(OBSERVERS, random.randint(1, 5)),
        *([("hessian_sum",)] if wide == 1 else []),
    ]
    return made, groups, sites, experts, [*(name for names in observers for name in names), "count"]


def bounds(made, site, replicas, run):
    """Extremes that summands allow: the sum over each replica's cards, then over replicas."""
    found = {"amax": [], "channel_amax": [], "min_val": [], "max_val": []}
    for replica in replicas:
        parts = [
            made.seen(site, made.indices(replica), lambda x, card=card: site.cut(x, card))
            for card in run
        ]
        found["amax"].append(sum(part.abs().max() for part in parts))
        found["channel_amax"].append(sum(part.abs().amax(dim=0) for part in parts))
        found["max_val"].append(sum(part.amax(dim=0).clamp(min=0) for part in parts))
        found["min_val"].append(-sum(part.amin(dim=0).clamp(max=0) for part in parts))
    largest = {name: torch.stack(values).amax(dim=0) for name, values in found.items()}
    return {**largest, "min_val": -largest["min_val"] + 0.0}


def expected(made, site, replicas, run, statistics_of):
    indices = [index for replica in replicas for index in made.indices(replica)]
    whole = made.seen(site, indices, lambda x: site.joined(x, run[0], run[-1]))
    return bounds(made, site, replicas, run) if whole is None else statistics_of(whole)


def check(random, simulation, statistics_of, keyed):
    made, groups, sites, experts, wanted = draw(random, simulation)
    ranks = made.ranks(sites=sites, experts=experts, wanted=wanted)
    random.shuffle(ranks)
    numbers = [
        [replica * made.tp + card for replica in held for card in run] for held, run in groups
    ]
    for rank, (merged, (held, run)) in enumerate(zip(unify(ranks, numbers), groups, strict=True)):
        due = {}
        for site in sites:
            due |= keyed(
                site.name,
                site.site,
                expected(made, site, held, run, statistics_of),
                wanted,
                site.statistics,
            )
        for number in experts:
            got = made.expert_input(
                number, [index for replica in held for index in made.indices(replica)]
            )
            if number // 2 in run and len(got):
                due |= keyed(f"expert{number}", "input", statistics_of(got), wanted)
        assert merged.statistics.keys() == due.keys()
        for key, value in due.items():
            assert merged.statistics[key].dtype == value.dtype, key
            assert torch.equal(merged.statistics[key], value), key
        assert merged.meta["mesh"]["rank"] == rank
        assert merged.meta["mesh"]["tp"] == made.tp // len(run)
        assert merged.indices == sorted(
            index for replica in held for index in made.indices(replica)
        )


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.slow] * (part >= QUICK)) for part in range(PARTS)],
)
def test_shares_unified_over_any_mesh_and_grouping_are_the_whole(part, simulation, formulas):
    generator = random.Random(part)
    for _ in range(CASES // PARTS):
        check(generator, simulation, *formulas)


def test_unifying_in_two_steps_is_unifying_in_one(simulation, formulas):
    generator = random.Random(99)
    for _ in range(60):
        tp, dp = generator.choice([(4, 1), (2, 2), (4, 2)])
        made = simulation(tp=tp, dp=dp, samples=2 * dp, seed=generator.randrange(1 << 30))
        sites, world = made.sites(), tp * dp
        ranks = made.ranks(sites=sites, experts=range(made.experts), wanted=NO_HESSIAN)
        halves = unify(ranks, [[rank, rank + 1] for rank in range(0, world, 2)])
        (whole,), (direct,) = (
            unify(halves, [list(range(world // 2))]),
            unify(ranks, [list(range(world))]),
        )
        assert whole.statistics.keys() == direct.statistics.keys()
        assert all(
            torch.equal(whole.statistics[key], value) for key, value in direct.statistics.items()
        )
        assert whole.meta["tensors"] == direct.meta["tensors"]
        assert whole.indices == direct.indices
