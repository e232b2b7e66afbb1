"""One measurement made into those of several cards, which unified are it again."""

import random
from dataclasses import replace

import pytest
import torch

from quantflow.distributed.head_cut import units_of
from quantflow.distributed.placement import share
from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import read_measurement, write_measurement
from quantflow.unifying.expand import expand, planned

NO_HESSIAN = ("amax", "channel_amax", "min_val", "max_val", "abs_sum", "counts", "count")


def whole(simulation, *, tp, seed=0, wanted=NO_HESSIAN, experts=(), heads=0):
    """A measurement by one rank of a model whose plan cuts it over tp cards, and that model."""
    made = simulation(tp=tp, dp=1, samples=4, seed=seed, heads=heads)
    (merged,) = unify(made.ranks(wanted=wanted, experts=experts), [list(range(tp))])
    return made, merged


def expanded(measurement, ranks):
    return list(expand(measurement, placements=planned(measurement.meta["tensors"], ranks=ranks)))


@pytest.mark.parametrize("tp", [2, 4])
def test_each_card_gets_its_own_channels_and_their_maximum(simulation, tp):
    made, merged = whole(simulation, tp=tp)
    middles = torch.cat(made.middles)
    for card, one in enumerate(expanded(merged, tp)):
        mine = middles[:, 2 * card : 2 * card + 2]
        assert one.statistics["down|input|channel_amax"].tolist() == mine.abs().amax(dim=0).tolist()
        assert one.statistics["down|input|amax"] == mine.abs().max()
        assert torch.equal(one.statistics["down|input|abs_sum"], mine.double().abs().sum(dim=0))
        assert one.statistics["down|input|count"] == len(mine)
        weight = made.weights["up"][2 * card : 2 * card + 2]
        assert (
            one.statistics["up|weight|channel_amax"].tolist() == weight.abs().amax(dim=1).tolist()
        )
        assert one.meta["mesh"] == {"rank": card, "world": tp, "tp": tp, "dp": 1, "ep": 1}
        assert one.meta["tensors"]["up"] == made.placement("up", card)
        assert one.meta["tensors"]["down"] == made.placement("down", card)
        assert one.indices == merged.indices


FUSED = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [8, 3], "plan": "column"}
FUSED |= {"blocks": 1, "parts": [{"units": 4}, *[{"units": 2, "copies": True}] * 2]}


@pytest.mark.parametrize(
    ("cards", "rows"),
    [
        (2, [[0, 1, 4, 6], [2, 3, 5, 7]]),
        (4, [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]),  # four queries of two kv heads
    ],
)
def test_rows_of_one_linear_that_lie_apart_are_cut_out_and_put_back(simulation, cards, rows):
    values = torch.arange(1.0, 9.0)
    statistics = {"fused|output|channel_amax": values, "fused|output|amax": values.max()}
    statistics |= {"fused|weight|channel_amax": 2 * values}
    _, merged = whole(simulation, tp=2)
    meta = {**merged.meta, "tensors": {"fused": FUSED}}
    ranks = expanded(replace(merged, meta=meta, statistics=statistics), cards)
    for one, held in zip(ranks, rows, strict=True):
        assert one.statistics["fused|output|channel_amax"].tolist() == values[held].tolist()
        assert one.statistics["fused|output|amax"] == values[held].max()
        assert one.statistics["fused|weight|channel_amax"].tolist() == (2 * values[held]).tolist()
    (again,) = unify(ranks, [list(range(cards))])
    assert again.meta["tensors"] == meta["tensors"]
    assert {key: value.tolist() for key, value in again.statistics.items()} == {
        key: value.tolist() for key, value in statistics.items()
    }
    halves = unify(ranks, [list(range(cards // 2)), list(range(cards // 2, cards))])
    assert halves[1].statistics["fused|output|channel_amax"].tolist() == [3.0, 4.0, 6.0, 8.0]
    if cards == 4:
        other = {**ranks[1].statistics, "fused|output|channel_amax": torch.tensor([2.0, 5.5, 7.0])}
        ranks[1] = replace(ranks[1], statistics=other)
        with pytest.raises(
            StatisticsError, match=r"rank 1: fused\|output\|channel_amax\[1\] is 5.5"
        ):
            unify(ranks, [[0, 1, 2, 3]])


def test_what_has_no_experts_is_not_spread_by_them(simulation):
    _, merged = whole(simulation, tp=2)
    with pytest.raises(UsageError, match="none of .* tensors is an expert's"):
        planned(merged.meta["tensors"], ranks=2, expert_parallel=True)


def test_what_every_card_sees_is_kept_as_it_is(simulation):
    _, merged = whole(simulation, tp=2)
    for one in expanded(merged, 2):
        for key in [
            key
            for key in merged.statistics
            if key.startswith(("plain|", "up|input|", "down|output|"))
        ]:
            assert torch.equal(one.statistics[key], merged.statistics[key])


@pytest.mark.parametrize(
    ("heads", "tp"), [(8, 4), (2, 4)], ids=["two heads each", "two cards to a head"]
)
def test_each_card_gets_the_maxima_of_its_own_heads(simulation, heads, tp):
    made, merged = whole(simulation, tp=tp, heads=heads)
    largest = torch.cat([x.flatten(1) for x in made.caches], dim=1).abs().amax(dim=1)  # [heads]
    assert merged.statistics["attention|k_heads|channel_amax"].tolist() == largest.tolist()
    for card, one in enumerate(expanded(merged, tp)):
        span = made.head_span(card, card)
        assert one.statistics["attention|k_heads|channel_amax"].tolist() == largest[span].tolist()
        assert one.statistics["attention|k_cache|amax"] == largest.max()
    (again,) = unify(expanded(merged, tp), [list(range(tp))])
    assert again.statistics["attention|k_heads|channel_amax"].tolist() == largest.tolist()


def test_what_cannot_be_cut_by_channel_keeps_maxima_as_bounds_and_loses_sums(simulation):
    _, merged = whole(simulation, tp=2)
    for one in expanded(merged, 2):
        for name in ("amax", "channel_amax", "min_val", "max_val"):
            for site in ("attention|k_cache", "down|weight"):
                assert torch.equal(
                    one.statistics[f"{site}|{name}"], merged.statistics[f"{site}|{name}"]
                )
        for gone in (
            "attention|k_cache|abs_sum",
            "attention|k_cache|count",
            "down|weight|counts",
            "down|input|counts",
        ):
            assert gone not in one.statistics
        rules = {
            (row["statistic"], row["rule"]): row["count"] for row in one.meta["expanded"]["rules"]
        }
        # up's output and weight, down's input and weight, both caches
        assert rules["counts", "left out"] == 6
        assert rules["channel_amax", "cut"] == 4  # up's output and weight, down's input, the heads
        assert rules["channel_amax", "the whole's, which bounds it"] == 3


def test_an_amax_without_channels_bounds_that_of_each_share(simulation):
    made, merged = whole(simulation, tp=2, wanted=("amax",))
    for card, one in enumerate(expanded(merged, 2)):
        assert one.statistics["down|input|amax"] == merged.statistics["down|input|amax"]
        assert (
            one.statistics["down|input|amax"]
            >= torch.cat(made.middles)[:, 2 * card : 2 * card + 2].abs().max()
        )


def test_a_hessian_is_cut_to_the_block_of_each_card(simulation):
    made = simulation(tp=2, dp=1, samples=3, seed=1)
    (merged,) = unify(made.ranks(wanted=NO_HESSIAN), [[0, 1]])
    middles = torch.cat(made.middles)
    hessian = {"down|input|hessian_sum": middles.T @ middles}
    merged = replace(merged, statistics={**merged.statistics, **hessian})
    for card, one in enumerate(expanded(merged, 2)):
        mine = middles[:, 2 * card : 2 * card + 2]
        assert torch.equal(one.statistics["down|input|hessian_sum"], mine.T @ mine)


def test_shares_unified_again_have_every_maximum_of_the_whole(simulation):
    generator = random.Random(7)
    for _ in range(60):
        tp = generator.choice([1, 2, 4])
        ranks = generator.choice([2, 4]) if tp == 4 else 2
        made, merged = whole(
            simulation, tp=max(tp, ranks), seed=generator.randrange(1 << 30), experts=range(4)
        )
        (again,) = unify(expanded(merged, ranks), [list(range(ranks))])
        for key, value in merged.statistics.items():
            if (
                key.rpartition("|")[2] in ("amax", "channel_amax", "min_val", "max_val")
                or key in again.statistics
            ):
                assert torch.equal(again.statistics[key], value), key
        assert again.meta["tensors"] == merged.meta["tensors"]
        assert again.meta["unified"]["bounds"] == []


def test_experts_go_whole_to_neighbouring_cards(simulation):
    _, merged = whole(simulation, tp=4, experts=range(8))
    held = []
    for one in expanded(merged, 4):
        held.append(
            [number for number in range(8) if one.meta["tensors"][f"expert{number}"]["length"]]
        )
        assert {key.partition("|")[0] for key in one.statistics if "expert" in key} <= {
            f"expert{n}" for n in held[-1]
        }
        assert one.meta["mesh"]["ep"] == 4
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UsageError, match=r"expert0: 8 experts over 3 cards"):
        planned(
            {name: one for name, one in merged.meta["tensors"].items() if "expert" in name}, ranks=3
        )


def test_heads_that_are_fewer_than_the_cards_are_copied(simulation):
    _, merged = whole(simulation, tp=4, heads=2)
    spans = [
        (one.meta["tensors"]["attention"]["offset"], one.meta["tensors"]["attention"]["length"])
        for one in expanded(merged, 4)
    ]
    assert spans == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_a_bound_stays_a_bound(simulation):
    made = simulation(tp=2, dp=1, samples=3, seed=1, partial=True)
    (merged,) = unify(made.ranks(wanted=("amax",)), [[0, 1]])
    assert all(one.meta["tensors"]["down"]["bound"] is True for one in expanded(merged, 2))
    (again,) = unify(expanded(merged, 2), [[0, 1]])
    assert again.meta["unified"]["bounds"] == ["down|output|amax"]


def test_expanded_shares_are_written_and_read(simulation, tmp_path):
    _, merged = whole(simulation, tp=2, experts=range(4))
    read = []
    for rank, one in enumerate(expanded(merged, 2)):
        (tmp_path / str(rank)).mkdir()
        write_measurement(tmp_path / str(rank), one)
        read.append(read_measurement(tmp_path / str(rank)))
    assert unify(read, [[0, 1]])[0].meta["tensors"] == merged.meta["tensors"]


def test_only_one_rank_is_expanded(simulation):
    made = simulation(tp=2, dp=1, samples=3, seed=1)
    first = made.ranks(wanted=("amax",))[0]
    with pytest.raises(
        InputError, match=r"rank 0: one of 2 ranks, one alone is expanded; unify them first"
    ):
        list(expand(first, placements=[first.meta["tensors"]]))


def test_a_measurement_without_a_plan_or_too_few_cards_is_refused(simulation):
    _, merged = whole(simulation, tp=2)
    with pytest.raises(UsageError, match=r"expand to 1 ranks; give 2 or more"):
        planned(merged.meta["tensors"], ranks=1)
    with pytest.raises(UsageError, match=r"expand to 2 ranks: none of 1 tensors has a plan"):
        planned({"plain": merged.meta["tensors"]["plain"]}, ranks=2)


@pytest.mark.parametrize(
    ("whole_placement", "cards", "message"),
    [
        ({"plan": "column", "full_shape": [6, 4]}, 4, r"x: 6 rows over 4 cards"),
        ({"plan": "row", "full_shape": [6, 5]}, 4, r"x: 5 columns over 4 cards"),
        ({"plan": "column", "full_shape": [48, 4], "unit": 16}, 2, r"x: 3 heads over 2 cards"),
        ({"plan": "column", "full_shape": [48, 4], "unit": 16}, 6, r"x: 3 heads over 6 cards"),
        (
            {"plan": "column", "full_shape": [48, 4], "unit": 16, "copies": True},
            4,
            r"x: 3 heads over 4 cards",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(whole_placement, cards, message):
    base = {"kind": "replicated", "axis": None, "offset": 0}
    with pytest.raises(UsageError, match=message):
        share("x", {**base, **whole_placement}, cards=cards, card=0)


@pytest.mark.parametrize(
    ("count", "cards", "copies", "expected"),
    [
        (8, 4, False, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (2, 4, True, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 3, True, [(0, 1)] * 3),
        (4, 4, True, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (2, 4, False, [None] * 4),
        (3, 4, True, [None] * 4),
        (6, 4, True, [None] * 4),
    ],
)
def test_units_go_to_neighbouring_cards(count, cards, copies, expected):
    assert [
        units_of(count, cards=cards, card=card, copies=copies) for card in range(cards)
    ] == expected
