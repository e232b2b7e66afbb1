"""Ranks that hold shares of a model: what is merged by which rule, and what is refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from quantflow.distributed.placement import channels, shares, sharing
from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import read_measurement, write_measurement

PLAIN = ("amax", "channel_amax", "min_val", "max_val", "abs_sum", "counts", "count")


def site(made, name, where):
    return next(one for one in made.sites() if (one.name, one.site) == (name, where))


def changed(measurement, key, value):
    return replace(measurement, statistics={**measurement.statistics, key: value})


def placed(measurement, name, **fields):
    meta = deepcopy(measurement.meta)
    meta["tensors"][name] |= fields
    return replace(measurement, meta=meta)


@pytest.fixture
def made(simulation):
    """Two replicas of two cards."""
    return simulation(tp=2, dp=2, samples=5, seed=3)


def test_each_channel_of_a_sharded_output_keeps_its_own_maximum(simulation):
    """Taking the larger of two lists, or the first channel's maximum, gives another answer."""
    made = simulation(tp=2, dp=1, samples=1, seed=0)
    first, second = made.ranks(sites=[site(made, "up", "output")], wanted=("channel_amax",))
    first = changed(first, "up|output|channel_amax", torch.tensor([1.0, 9.0]))
    second = changed(second, "up|output|channel_amax", torch.tensor([5.0, 2.0]))
    (merged,) = unify([first, second], [[0, 1]])
    assert merged.statistics["up|output|channel_amax"].tolist() == [1.0, 9.0, 5.0, 2.0]


def test_weights_cut_by_rows_are_concatenated_and_weights_cut_by_columns_are_maxed(simulation):
    made = simulation(tp=2, dp=1, samples=1, seed=0)
    ranks = made.ranks(
        sites=[site(made, "up", "weight"), site(made, "down", "weight")], wanted=("channel_amax",)
    )
    (merged,) = unify(ranks, [[0, 1]])
    up, down = made.weights["up"], made.weights["down"]
    assert merged.statistics["up|weight|channel_amax"].tolist() == up.abs().amax(dim=1).tolist()
    assert merged.statistics["down|weight|channel_amax"].tolist() == down.abs().amax(dim=1).tolist()
    assert [len(merged.statistics[f"{name}|weight|channel_amax"]) for name in ("up", "down")] == [
        4,
        2,
    ]


def test_gradients_and_guided_inputs_are_shared_as_outputs_and_inputs_are(made):
    """The gradient by a row's output is that of the sum, which every card has."""
    column, row = made.placement("up", 0), made.placement("down", 0)
    assert [sharing(column, where) for where in ("gradient", "guided_input")] == [
        "channels",
        "same",
    ]
    assert [sharing(row, where) for where in ("gradient", "guided_input")] == ["same", "channels"]
    assert [channels(column, "gradient"), channels(row, "gradient")] == [2, 2]
    assert [channels(column, "guided_input"), channels(row, "guided_input")] == [3, 2]


def test_sums_that_every_card_has_are_taken_once_and_not_added_up(made):
    (merged,) = unify(made.ranks(sites=[site(made, "up", "input")]), [[0, 1, 2, 3]])
    everything = torch.cat(made.inputs)
    assert merged.statistics["up|input|count"] == len(everything)
    assert torch.equal(merged.statistics["up|input|abs_sum"], everything.double().abs().sum(dim=0))
    assert merged.statistics["up|input|counts"].sum() == everything.numel()
    assert torch.equal(merged.statistics["up|input|hessian_sum"], everything.T @ everything)


def test_the_cards_of_a_replica_run_the_same_samples_and_they_are_listed_once(made):
    (merged,) = unify(made.ranks(wanted=PLAIN), [[0, 1, 2, 3]])
    assert merged.indices == [0, 1, 2, 3, 4]
    assert merged.meta["counts"] == {"samples": 5, "tokens": sum(map(len, made.tokens))}
    assert [one.tolist() for one in merged.sequences] == [one.tolist() for one in made.tokens]


def test_heads_that_cards_hold_copies_of_are_counted_once(simulation):
    made = simulation(tp=4, dp=1, samples=3, seed=1, heads=2)
    (merged,) = unify(made.ranks(sites=[site(made, "attention", "k_cache")]), [[0, 1, 2, 3]])
    rows = torch.cat([cache.flatten(0, 1) for cache in made.caches])
    assert merged.statistics["attention|k_cache|count"] == len(rows)
    assert torch.equal(
        merged.statistics["attention|k_cache|abs_sum"], rows.double().abs().sum(dim=0)
    )


def test_query_heads_are_each_cards_own_where_key_heads_are_copies(simulation):
    made = simulation(tp=4, dp=1, samples=1, seed=1, heads=2)
    cards = [made.placement("attention", card) for card in range(4)]
    assert shares(cards, "k_cache") == [[0, 1], [2, 3]]
    assert shares(cards, "query") == [[0], [1], [2], [3]]
    assert sharing(cards[0], "query") == "samples"
    assert sharing(cards[0], "routed") == "same"  # a router sends the same tokens on every card


def test_a_full_group_is_replicated_with_a_plan_and_a_part_of_one_knows_its_place(made):
    (whole,) = unify(made.ranks(wanted=PLAIN), [[0, 1, 2, 3]])
    assert whole.meta["mesh"] == {"rank": 0, "world": 1, "tp": 1, "dp": 1, "ep": 1}
    base = {"kind": "replicated", "axis": None, "offset": 0}
    assert whole.meta["tensors"]["up"] == {**base, "full_shape": [4, 3], "plan": "column"}
    assert whole.meta["tensors"]["down"] == {
        **base,
        "full_shape": [2, 4],
        "plan": "row",
        "output": "reduced",
    }
    assert whole.meta["tensors"]["plain"] == {**base, "full_shape": [2, 3]}
    halves = unify(made.ranks(), [[0, 2], [1, 3]])
    assert [half.meta["mesh"] for half in halves] == [
        {"rank": rank, "world": 2, "tp": 2, "dp": 1, "ep": 1} for rank in (0, 1)
    ]
    assert [half.meta["tensors"]["up"]["offset"] for half in halves] == [0, 2]
    assert [half.indices for half in halves] == [[0, 1, 2, 3, 4]] * 2


def test_neighbouring_cards_become_a_wider_card(simulation):
    made = simulation(tp=4, dp=1, samples=2, seed=5)
    left, right = unify(made.ranks(wanted=PLAIN), [[0, 1], [2, 3]])
    shape = {"kind": "column", "axis": 0, "length": 4, "full_shape": [8, 3]}
    assert left.meta["tensors"]["up"] == {**shape, "offset": 0}
    assert right.meta["tensors"]["up"] == {**shape, "offset": 4}
    assert right.meta["mesh"] == {"rank": 1, "world": 2, "tp": 2, "dp": 1, "ep": 1}


def test_cards_that_are_no_neighbours_are_refused_with_the_cards(simulation):
    made = simulation(tp=4, dp=1, samples=2, seed=5)
    with pytest.raises(
        UsageError, match=r"group 0 \(0, 2\): takes cards 0, 2 of the 4 that hold one model"
    ):
        unify(made.ranks(wanted=PLAIN), [[0, 2], [1, 3]])


def test_summands_are_bounded_by_the_sum_of_their_maxima_and_marked(simulation):
    """The maximum of the summands is smaller than what their sum reaches."""
    made = simulation(tp=2, dp=1, samples=3, seed=2, partial=True)
    one = site(made, "down", "output")
    ranks = made.ranks(sites=[one], wanted=("amax", "channel_amax"))
    (merged,) = unify(ranks, [[0, 1]])
    key = "down|output|amax"
    summands = [rank.statistics[key] for rank in ranks]
    assert merged.statistics[key] == summands[0] + summands[1]
    reached = (torch.cat(made.middles) @ made.weights["down"].T).abs().max()
    assert max(summands) < reached <= merged.statistics[key]
    assert merged.meta["unified"]["bounds"] == ["down|output|amax", "down|output|channel_amax"]
    assert merged.meta["tensors"]["down"]["bound"] is True
    assert "bound" not in merged.meta["tensors"]["up"]
    assert {"statistic": "amax", "rule": "bounded by the sum", "count": 1} in merged.meta[
        "unified"
    ]["merged"]


def test_a_bound_is_never_rounded_below_what_it_bounds(simulation):
    made = simulation(tp=2, dp=1, samples=1, seed=2, partial=True)
    wanted = ("amax", "min_val", "max_val")
    first, second = made.ranks(sites=[site(made, "down", "output")], wanted=wanted)
    tiny = 2.0**-24
    for rank in (first, second):
        value = 1.0 if rank is first else tiny
        rank.statistics["down|output|amax"] = torch.tensor(value)
        rank.statistics["down|output|max_val"] = torch.full((2,), value)
        rank.statistics["down|output|min_val"] = torch.full((2,), -value)
    (merged,) = unify([first, second], [[0, 1]])
    assert torch.tensor(1.0) + torch.tensor(tiny) == 1.0  # to the nearest even
    assert merged.statistics["down|output|amax"].item() == 1.0 + 2.0**-23
    assert merged.statistics["down|output|max_val"].tolist() == [1.0 + 2.0**-23] * 2
    assert merged.statistics["down|output|min_val"].tolist() == [-1.0 - 2.0**-23] * 2


def test_a_bound_stays_one_when_replicas_are_merged_later(simulation):
    made = simulation(tp=2, dp=2, samples=4, seed=2, partial=True)
    halves = unify(
        made.ranks(sites=[site(made, "down", "output")], wanted=("amax",)), [[0, 1], [2, 3]]
    )
    (whole,) = unify(halves, [[0, 1]])
    assert whole.statistics["down|output|amax"] == max(
        half.statistics["down|output|amax"] for half in halves
    )
    assert whole.meta["unified"]["bounds"] == ["down|output|amax"]
    assert whole.meta["tensors"]["down"]["bound"] is True


@pytest.mark.parametrize("wanted", [("abs_sum", "count"), ("counts",), ("hessian_sum", "count")])
def test_sums_of_summands_are_refused_because_nothing_follows_from_them(
    simulation, formulas, wanted
):
    made = simulation(tp=2, dp=1, samples=2, seed=2, partial=True)
    one = replace(site(made, "down", "output"), statistics=wanted)
    with pytest.raises(
        StatisticsError,
        match=rf"down\|output\|{wanted[0] if len(wanted) == 1 else ''}.*summands of the output",
    ):
        unify(made.ranks(sites=[one], wanted=wanted), [[0, 1]])


@pytest.mark.parametrize(("name", "where"), [("down", "input"), ("up", "output"), ("up", "weight")])
def test_blocks_of_a_hessian_are_never_passed_off_as_the_whole(made, name, where):
    ranks = made.ranks(sites=[site(made, name, where)], wanted=("hessian_sum", "count"))
    with pytest.raises(StatisticsError) as caught:
        unify(ranks, [[0, 1, 2, 3]])
    assert caught.value.cause == (
        f"{name}|{where}|hessian_sum: each card has the products of its own channels, those "
        "between cards were measured by none"
    )
    assert caught.value.remedy.startswith(
        "measure with --stats without hessian; quantize accumulates Hessians itself"
    )


def test_a_card_that_stays_one_card_keeps_its_block_of_the_hessian(made):
    halves = unify(
        made.ranks(sites=[site(made, "down", "input")], wanted=("hessian_sum", "count")),
        [[0, 2], [1, 3]],
    )
    whole = torch.cat(made.middles)
    for card, half in enumerate(halves):
        mine = whole[:, 2 * card : 2 * card + 2]
        assert torch.equal(half.statistics["down|input|hessian_sum"], mine.T @ mine)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "up|input|amax",
            lambda x: x * 2,
            r"rank 1: up\|input\|amax is \d+\.0, \d+\.0 on rank 0, which saw the same",
        ),
        (
            "up|input|channel_amax",
            lambda x: x.nextafter(torch.zeros(())),
            r"rank 1: up\|input\|channel_amax\[\d\] is [\d.]+, ",
        ),
        (
            "up|input|max_val",
            lambda x: x + 0.5,
            r"rank 1: up\|input\|max_val\[0\] is \d+\.5, \d+\.0 on rank 0",
        ),
        ("up|input|count", lambda x: x + 1, r"rank 1: up\|input\|count is \d+, \d+ on rank 0"),
        (
            "up|input|counts",
            lambda x: x.roll(1),
            r"rank 1: up\|input\|counts\[\d+\] is \d+, \d+ on rank 0",
        ),
        (
            "up|input|abs_sum",
            lambda x: x * 1.001,
            r"rank 1: up\|input\|abs_sum\[\d\] is [\d.]+, [\d.]+ on rank 0",
        ),
        ("down|input|count", lambda x: x + 1, r"rank 1: down\|input\|count is \d+, \d+ on rank 0"),
    ],
)
def test_cards_that_saw_the_same_must_say_the_same(made, key, change, message):
    ranks = made.ranks(wanted=PLAIN)
    ranks[1] = changed(ranks[1], key, change(ranks[1].statistics[key]))
    with pytest.raises(StatisticsError, match=message):
        unify(ranks, [[0, 1, 2, 3]])


def test_sums_of_the_same_may_differ_by_rounding_and_the_lowest_ranks_is_taken(made):
    ranks = made.ranks(sites=[site(made, "up", "input")])
    for key in ("up|input|abs_sum", "up|input|hessian_sum"):
        ranks[1] = changed(ranks[1], key, ranks[1].statistics[key] * (1 + 5e-6))
    (merged,) = unify(ranks, [[0, 1, 2, 3]])
    everything = torch.cat(made.inputs)
    assert torch.equal(merged.statistics["up|input|hessian_sum"], everything.T @ everything)
    assert torch.equal(merged.statistics["up|input|abs_sum"], everything.double().abs().sum(dim=0))


def test_replicas_must_hold_the_same_weight(made):
    ranks = made.ranks(sites=[site(made, "up", "weight")], wanted=("amax",))
    ranks[2] = changed(ranks[2], "up|weight|amax", torch.tensor(99.0))
    with pytest.raises(
        StatisticsError,
        match=r"rank 2: up\|weight\|amax is 99\.0, \d\.0 on rank 0, which saw the same",
    ):
        unify(ranks, [[0, 2], [1, 3]])


def test_a_hole_between_shares_is_refused_with_the_spans(simulation):
    made = simulation(tp=2, dp=1, samples=2, seed=0)
    first, second = made.ranks(wanted=PLAIN)
    with pytest.raises(
        StatisticsError,
        match=r"up: 2 cards hold 0-2, 3-4 of 4 along axis 0, in turn; .* without hole or overlap",
    ):
        unify([first, placed(second, "up", offset=3, length=1)], [[0, 1]])
    with pytest.raises(StatisticsError, match=r"up: 2 cards hold 0-2, 1-3 of 4"):
        unify([first, placed(second, "up", offset=1)], [[0, 1]])
    with pytest.raises(StatisticsError, match=r"up: 2 cards hold 0-2, 0-2 of 4"):
        unify([first, placed(second, "up", offset=0)], [[0, 1]])


@pytest.mark.parametrize("offsets", [(2, 0, 4, 6), (0, 4, 2, 6), (6, 4, 2, 0), (0, 4, 0, 4)])
def test_shares_that_do_not_follow_the_cards_are_refused(simulation, offsets):
    """Neighbouring cards would become one share that has a hole."""
    made = simulation(tp=4, dp=1, samples=2, seed=0)
    length = 4 if offsets[2] == 0 and offsets[0] == 0 else 2
    ranks = [
        placed(one, "up", offset=offset, length=length)
        for one, offset in zip(
            made.ranks(sites=[site(made, "plain", "input")], wanted=("amax",)), offsets, strict=True
        )
    ]
    with pytest.raises(
        StatisticsError,
        match=rf"up: 4 cards hold {offsets[0]}-{offsets[0] + length}, "
        r".* of 8 along axis 0, in turn",
    ):
        unify(ranks, [[0, 1], [2, 3]])


def test_statistics_of_another_width_than_the_share_are_refused(simulation):
    made = simulation(tp=2, dp=1, samples=2, seed=0)
    first, second = made.ranks(wanted=PLAIN)
    wrong = changed(second, "up|output|channel_amax", torch.ones(4))
    with pytest.raises(
        StatisticsError, match=r"rank 1: up\|output\|channel_amax is .* \[4\], .* \[2\] is expected"
    ):
        unify([first, wrong], [[0, 1]])


def test_shares_of_tensors_of_different_shapes_or_kinds_are_refused(made):
    ranks = made.ranks(wanted=PLAIN)
    with pytest.raises(
        InputError, match=r"rank 1: tensors\.up is .*\[6, 3\].*, on rank 0 .*\[4, 3\]"
    ):
        unify([ranks[0], placed(ranks[1], "up", full_shape=[6, 3]), *ranks[2:]], [[0, 1, 2, 3]])
    with pytest.raises(
        InputError,
        match=r"rank 3: tensors\.up is .*'offset': 0.*, on the same card of another replica",
    ):
        unify([*ranks[:3], placed(ranks[3], "up", offset=0)], [[0, 1, 2, 3]])
    with pytest.raises(InputError, match=r"rank 1: tensors\.plain is .*'row'"):
        unify([ranks[0], placed(ranks[1], "plain", kind="row"), *ranks[2:]], [[0, 1, 2, 3]])


def test_cards_of_a_replica_with_other_samples_are_refused(made):
    ranks = made.ranks(wanted=PLAIN)
    other = replace(ranks[1], indices=[1, 3], sequences=ranks[2].sequences)
    with pytest.raises(
        InputError,
        match=r"rank 1: samples 1, 3, on rank 0 0, 2, 4; .*cards of a replica run the same",
    ):
        unify([ranks[0], other, *ranks[2:]], [[0, 1, 2, 3]])
    other = replace(ranks[1], sequences=[sequence + 1 for sequence in ranks[1].sequences])
    with pytest.raises(InputError, match=r"rank 1: other token ids than on rank 0"):
        unify([ranks[0], other, *ranks[2:]], [[0, 1, 2, 3]])


def test_a_mesh_that_is_not_its_world_is_refused(made):
    ranks = [
        replace(one, meta={**one.meta, "mesh": {**one.meta["mesh"], "tp": 3}})
        for one in made.ranks(wanted=PLAIN)
    ]
    with pytest.raises(InputError, match=r"rank 0: mesh is .*'tp': 3.*; world is tp \* dp"):
        unify(ranks, [[0, 1, 2, 3]])


def test_a_missing_replica_may_be_allowed_and_a_missing_card_never(made):
    ranks = made.ranks(wanted=PLAIN)
    (merged,) = unify(ranks[:2], [[0, 1, 2, 3]], allow_missing=True)
    assert merged.meta["unified"]["missing"] == [2, 3]
    assert merged.indices == [0, 2, 4]
    assert torch.equal(
        merged.statistics["down|input|channel_amax"],
        torch.cat([made.middles[i] for i in (0, 2, 4)]).abs().amax(dim=0),
    )
    with pytest.raises(
        InputError,
        match=r"replica 1 \(ranks 2 to 3\): 3 missing beside rank 2, "
        "whose tensors are then without",
    ):
        unify(ranks[:3], [[0, 1, 2, 3]], allow_missing=True)
    with pytest.raises(InputError, match=r"missing 2, 3"):
        unify(ranks[:2], [[0, 1, 2, 3]])


def test_a_linear_on_one_rank_alone_is_refused_whichever_rank_it_is(made):
    """Taking the first rank's names drops it in silence, or fails without a name."""
    ranks = made.ranks(wanted=("amax",))
    for place in (0, 3):
        more = list(ranks)
        more[place] = placed(more[place], "plain")
        more[place].meta["tensors"]["extra"] = more[place].meta["tensors"]["plain"]
        with pytest.raises(InputError, match=r"tensors\.extra is "):
            unify(more, [[0, 1, 2, 3]])
        more = list(ranks)
        more[place] = changed(more[place], "plain|input|channel_amax", torch.ones(3))
        with pytest.raises(
            StatisticsError, match=rf"plain\|input\|channel_amax is on rank {place} alone"
        ):
            unify(more, [[0, 1, 2, 3]])


def test_experts_that_one_rank_alone_saw_survive(simulation):
    made = simulation(tp=2, dp=2, samples=6, seed=4)
    ranks = made.ranks(sites=[], experts=range(4))
    (merged,) = unify(ranks, [[0, 1, 2, 3]])
    for number in range(4):
        tokens = made.expert_input(number, range(6))
        holders = [rank for rank in ranks if f"expert{number}|input|amax" in rank.statistics]
        assert len(holders) < len(ranks)
        assert merged.statistics[f"expert{number}|input|count"] == len(tokens)
        assert merged.statistics[f"expert{number}|input|amax"] == tokens.abs().max()
    assert merged.meta["mesh"]["ep"] == 1
    assert merged.meta["unified"]["unseen"] == []
    assert merged.meta["tensors"]["expert3"]["length"] == 1


def test_experts_that_no_rank_saw_are_named(simulation):
    made = simulation(tp=2, dp=1, samples=2, seed=4)
    made.routes = [torch.zeros_like(route) for route in made.routes]  # all tokens to the first
    (merged,) = unify(made.ranks(sites=[], experts=range(4)), [[0, 1]])
    assert merged.meta["unified"]["unseen"] == ["expert1", "expert2", "expert3"]
    assert {key.partition("|")[0] for key in merged.statistics} == {"expert0"}


def test_an_observer_that_saw_nothing_counts_as_unseen(simulation):
    made = simulation(tp=2, dp=1, samples=2, seed=4)
    ranks = made.ranks(sites=[], experts=range(4), wanted=("amax",))
    ranks[0] = replace(ranks[0], statistics={"expert0|input|amax": torch.zeros(())})
    (merged,) = unify(ranks, [[0, 1]])
    assert "expert0" in merged.meta["unified"]["unseen"]


def test_experts_stay_on_their_ranks_where_groups_are_parts_of_a_replica(simulation):
    made = simulation(tp=4, dp=1, samples=8, seed=4)
    halves = unify(made.ranks(sites=[], experts=range(8)), [[0, 1], [2, 3]])
    assert [half.meta["mesh"]["ep"] for half in halves] == [2, 2]
    held = [
        sorted(
            name
            for name, one in half.meta["tensors"].items()
            if one.get("length") and "expert" in name
        )
        for half in halves
    ]
    assert held == [
        [f"expert{number}" for number in range(4)],
        [f"expert{number}" for number in range(4, 8)],
    ]


def test_an_expert_that_no_given_rank_holds_or_another_rank_measured_is_refused(simulation):
    made = simulation(tp=2, dp=1, samples=6, seed=4)
    ranks = made.ranks(sites=[], experts=range(4))
    nobody = [placed(rank, "expert3", length=0) for rank in ranks]
    for rank in nobody:
        for key in [key for key in rank.statistics if key.startswith("expert3")]:
            del rank.statistics[key]
    with pytest.raises(InputError, match=r"expert3: an expert that none of 2 ranks holds"):
        unify(nobody, [[0, 1]])
    with pytest.raises(
        StatisticsError, match=r"rank 0: expert3\|input\|amax of an expert that is on other ranks"
    ):
        unify([changed(ranks[0], "expert3|input|amax", torch.ones(())), ranks[1]], [[0, 1]])


def test_an_expert_that_ranks_measured_in_different_ways_is_refused(simulation):
    made = simulation(tp=1, dp=2, samples=8, seed=4)
    first, second = made.ranks(sites=[], experts=[0], wanted=("amax", "channel_amax"))
    kept = {
        key: value for key, value in second.statistics.items() if not key.endswith("channel_amax")
    }
    assert kept and len(kept) < len(second.statistics)
    with pytest.raises(
        StatisticsError,
        match=r"rank 1: expert0\|input\|channel_amax is missing, other ranks have it",
    ):
        unify([first, replace(second, statistics=kept)], [[0, 1]])


def test_shares_are_written_read_and_unified(made, tmp_path):
    read = []
    for rank, one in enumerate(made.ranks(wanted=PLAIN, experts=range(4))):
        (tmp_path / str(rank)).mkdir()
        write_measurement(tmp_path / str(rank), one)
        read.append(read_measurement(tmp_path / str(rank)))
    (merged,) = unify(read, [[0, 1, 2, 3]])
    (tmp_path / "whole").mkdir()
    write_measurement(tmp_path / "whole", merged)
    again = read_measurement(tmp_path / "whole")
    assert again.meta["tensors"] == merged.meta["tensors"]
    assert all(
        torch.equal(again.statistics[key], value) for key, value in merged.statistics.items()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": 3}, r"tensors\.up: offset \+ length does not fit"),
        ({"offset": -1}, r"tensors\.up: offset does not fit"),
        ({"length": None}, r"tensors\.up: length does not fit"),
        ({"axis": 1}, r"tensors\.up: axis does not fit"),
        ({"full_shape": [4]}, r"tensors\.up: full_shape does not fit"),
        ({"full_shape": [4, True]}, r"tensors\.up: full_shape does not fit"),
        ({"output": "partial"}, r"tensors\.up: output does not fit"),
        ({"unit": 0}, r"tensors\.up: unit does not fit"),
        ({"plan": "diagonal"}, r"tensors\.up: plan does not fit"),
        ({"colour": 1}, r"tensors\.up has unknown fields \['colour'\]"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_when_it_is_written(made, tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        write_measurement(tmp_path, placed(made.ranks(wanted=PLAIN)[0], "up", **fields))


def test_a_row_must_say_what_its_output_is_and_an_expert_its_number(made, tmp_path):
    measurement = made.ranks(wanted=PLAIN, experts=[0])[0]
    for name, field in (("down", "output"), ("expert0", "experts"), ("expert0", "offset")):
        wrong = placed(measurement, name)
        del wrong.meta["tensors"][name][field]
        with pytest.raises(InputError, match=rf"tensors\.{name}: {field} does not fit"):
            write_measurement(tmp_path, wrong)
