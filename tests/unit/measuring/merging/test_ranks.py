"""Ranks merged into fewer: as if one observer had seen all data, or refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.measuring.merging.contributions import contributor, outliers
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import (
    Measurement,
    open_measurements,
    read_measurement,
    read_meta,
    write_measurement,
)
from quantflow.observers import OBSERVERS

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
C = 3


def sample(index):
    """Token ids of a sample, and what its tensors were."""
    generator = torch.Generator().manual_seed(index)
    length = 2 + index % 3
    return torch.arange(length) + 10 * index, {
        (name, site): torch.randn(length, C, generator=generator) * (1 + index)
        for name, site in ((Q, "input"), (Q, "output"), (K, "k_cache"))
    }


def measure(indices, *, rank, world, samples):
    """What a rank that saw these samples writes."""
    observers = {
        site: [kind(C) for kind in OBSERVERS.values()]
        for site in ((Q, "input"), (Q, "output"), (K, "k_cache"))
    }
    for index in indices:
        for site, x in sample(index)[1].items():
            for observer in observers[site]:
                observer.update(x)
    statistics = {
        f"{name}|{site}|{statistic}": value
        for (name, site), group in observers.items()
        for observer in group
        for statistic, value in observer.state().items()
    }
    statistics[f"{Q}|weight|amax"] = torch.tensor(2.0)
    sequences = [sample(index)[0] for index in indices]
    everything = [sample(index)[0] for index in range(samples)]
    meta = {
        "layout_version": 1,
        "kind": "measurement",
        "model": {"name": "tiny", "fingerprint": "f" * 64, "family": "llama"},
        "mesh": {"rank": rank, "world": world, "tp": 1, "dp": world, "ep": 1},
        "dtype": "float32",
        "seed": 0,
        "calibration": {
            "hash": "c" * 64,
            "samples": samples,
            "tokens": sum(map(len, everything)),
            "sequence_length": 8,
        },
        "observers": list(OBSERVERS),
        "tensors": {
            name: {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [C, C]}
            for name in (Q, K)
        },
        "counts": {"samples": len(indices), "tokens": sum(map(len, sequences))},
        "tools": {"torch": "2"},
    }
    return Measurement(meta=meta, statistics=statistics, sequences=sequences, indices=list(indices))


def ranks(world, samples):
    """Sample i is on rank i % world."""
    return [
        measure(range(rank, samples, world), rank=rank, world=world, samples=samples)
        for rank in range(world)
    ]


def changed(measurement, path, value):
    meta = deepcopy(measurement.meta)
    *parents, last = path.split(".")
    table = meta
    for parent in parents:
        table = table[parent]
    table[last] = value
    return replace(measurement, meta=meta)


@pytest.mark.parametrize(("world", "samples"), [(1, 3), (2, 5), (4, 9), (4, 2)])
def test_all_ranks_in_one_group_are_one_rank_that_saw_everything(world, samples):
    (merged,) = unify(reversed(ranks(world, samples)), [list(range(world))])
    whole = measure(range(samples), rank=0, world=1, samples=samples)
    assert merged.statistics.keys() == whole.statistics.keys()
    for key, value in whole.statistics.items():
        if key.endswith("_sum"):
            # of float64, or of float32 for a Hessian: sums in another order
            few_ulp = 4 * torch.finfo(value.dtype).eps
            torch.testing.assert_close(
                merged.statistics[key], value, rtol=few_ulp, atol=few_ulp * value.abs().max().item()
            )
        else:
            assert torch.equal(merged.statistics[key], value), key
        assert merged.statistics[key].dtype == value.dtype
    assert merged.indices == list(range(samples))
    assert [one.tolist() for one in merged.sequences] == [one.tolist() for one in whole.sequences]
    assert {key: value for key, value in merged.meta.items() if key != "unified"} == whole.meta


def test_each_group_is_what_its_own_samples_give_and_samples_are_interleaved_again():
    left, right = unify(ranks(4, 10), [[3, 1], [0, 2]])
    assert (left.indices, right.indices) == ([1, 3, 5, 7, 9], [0, 2, 4, 6, 8])
    assert [one[0] for one in left.sequences] == [10, 30, 50, 70, 90]
    for rank, (merged, indices) in enumerate(((left, [1, 3, 5, 7, 9]), (right, [0, 2, 4, 6, 8]))):
        alone = measure(indices, rank=rank, world=2, samples=10)
        assert merged.meta["mesh"] == {"rank": rank, "world": 2, "tp": 1, "dp": 2, "ep": 1}
        assert merged.meta["counts"] == alone.meta["counts"]
        key = f"{Q}|input|channel_amax"
        assert torch.equal(merged.statistics[key], alone.statistics[key])
        assert torch.equal(
            merged.statistics[f"{K}|k_cache|counts"], alone.statistics[f"{K}|k_cache|counts"]
        )
    about = {
        key: left.meta["unified"][key] for key in ("world", "mesh", "ranks", "digests", "missing")
    }
    assert about == {
        "world": 4,
        "mesh": {"tp": 1, "dp": 4, "ep": 1},
        "ranks": [1, 3],
        "digests": [None, None],
        "missing": [],
    }


def test_sums_are_folded_in_a_tree_of_ranks_whatever_order_is_given():
    def with_sums(order):
        # sums of which no two orders have the same bits
        found = ranks(4, 9)
        for one, value in zip(found, (1.0, 2.0**-24, 2.0**-24, 2.0**-24), strict=True):
            one.statistics[f"{Q}|input|hessian_sum"] = torch.full((C, C), value)
        return [found[rank] for rank in order]

    merged = unify(with_sums([0, 1, 2, 3]), [[0, 1, 2, 3]])[0].statistics
    again = unify(with_sums([3, 1, 0, 2]), [[3, 1, 0, 2]])[0].statistics
    # (0 + 1) + (2 + 3); one after the other these stay 1
    assert torch.equal(merged[f"{Q}|input|hessian_sum"], torch.full((C, C), 1.0 + 2.0**-23))
    assert all(torch.equal(merged[key], again[key]) for key in merged)


def test_a_unified_measurement_is_written_read_and_unified_again(tmp_path):
    given = ranks(4, 6)
    read = []
    for one in given:
        folder = tmp_path / f"rank-{one.meta['mesh']['rank']}"
        folder.mkdir()
        write_measurement(folder, one)
        read.append(read_measurement(folder))
    halves = unify(read, [[0, 1], [2, 3]])
    about = halves[1].meta["unified"]
    assert (about["ranks"], about["digests"]) == ([2, 3], [one.meta["digest"] for one in read[2:]])
    (tmp_path / "half").mkdir()
    write_measurement(tmp_path / "half", halves[0])
    (whole,) = unify([read_measurement(tmp_path / "half"), halves[1]], [[0, 1]])
    direct = unify(given, [[0, 1, 2, 3]])[0]
    assert whole.indices == direct.indices
    assert torch.equal(
        whole.statistics[f"{Q}|output|counts"], direct.statistics[f"{Q}|output|counts"]
    )


def test_the_measurements_that_are_merged_stay_as_they_were():
    given = ranks(2, 4)
    before = [{key: value.clone() for key, value in one.statistics.items()} for one in given]
    unify(given, [[0, 1]])
    assert all(
        torch.equal(one.statistics[key], old[key])
        for one, old in zip(given, before, strict=True)
        for key in old
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "model.fingerprint",
            "e" * 64,
            r"rank 1: model\.fingerprint is 'e+', on rank 0 'f+'; give the ranks of one",
        ),
        ("model.family", "qwen3", r"rank 1: model\.family is 'qwen3', on rank 0 'llama'"),
        ("calibration.hash", "d" * 64, r"rank 1: calibration\.hash is 'd+', on rank 0 'c+'"),
        ("calibration.samples", 7, r"rank 1: calibration\.samples is 7, on rank 0 4"),
        ("dtype", "bfloat16", r"rank 1: dtype is 'bfloat16', on rank 0 'float32'"),
        ("seed", 1, r"rank 1: seed is 1, on rank 0 0"),
        ("observers", ["amax"], r"rank 1: observers is \['amax'\]"),
        ("tools.torch", "1", r"rank 1: tools\.torch is '1', on rank 0 '2'"),
        ("device", "gaudi3", r"rank 1: device is 'gaudi3', on rank 0 None"),
        ("mesh.tp", 2, r"rank 1: mesh is .*'tp': 2.*, on rank 0 .*'tp': 1.*; world is tp \* dp"),
        ("tensors", {}, rf"rank 1: tensors\.{K} is None, on rank 0 "),
    ],
)
def test_a_foreign_rank_is_refused_and_named(path, value, message):
    first, second = ranks(2, 4)
    with pytest.raises(InputError, match=message):
        unify([first, changed(second, path, value)], [[0, 1]])


def test_the_same_model_under_another_name_is_not_foreign():
    first, second = ranks(2, 4)
    (merged,) = unify([first, changed(second, "model.name", "/elsewhere/tiny")], [[0, 1]])
    assert merged.meta["model"]["name"] == "tiny"


def test_ranks_of_another_world_size_are_refused():
    with pytest.raises(InputError, match=r"measurements: made by 2, 4 ranks"):
        unify([ranks(2, 4)[0], ranks(4, 4)[1]], [[0, 1]])


def test_a_missing_rank_and_a_rank_given_twice_are_named():
    first, second, third = ranks(3, 6)
    with pytest.raises(
        InputError, match=r"measurements of 3 ranks: missing 1, twice none; give every rank's once"
    ):
        unify([first, third], [[0, 1, 2]])
    with pytest.raises(InputError, match=r"measurements of 3 ranks: missing none, twice 1"):
        unify([first, second, third, second], [[0, 1, 2]])
    with pytest.raises(InputError, match=r"measurements: none was given"):
        unify([], [])


@pytest.mark.parametrize("world", [1, 2, 8, 16, 64])
def test_whichever_rank_is_missing_or_given_twice_is_named(world):
    whole = ranks(world, world)
    for rank in range(world):
        others = whole[:rank] + whole[rank + 1 :]
        missing = (
            rf"measurements of {world} ranks: missing {rank}, twice none"
            if others
            else "measurements: none was given"
        )
        with pytest.raises(InputError, match=missing):
            unify(others, [list(range(world))])
        with pytest.raises(
            InputError, match=rf"measurements of {world} ranks: missing none, twice {rank}"
        ):
            unify([*whole, whole[rank]], [list(range(world))])


def test_groups_that_do_not_cover_the_ranks_are_refused():
    with pytest.raises(UsageError, match=r"groups of 2 ranks: missing 1"):
        unify(ranks(2, 4), [[0]])


def test_ranks_with_different_statistics_are_refused():
    first, second = ranks(2, 4)
    key = f"{Q}|input|amax"
    fewer = replace(
        second, statistics={name: value for name, value in second.statistics.items() if name != key}
    )
    with pytest.raises(StatisticsError) as caught:
        unify([first, fewer], [[0, 1]])
    assert caught.value.cause == f"rank 1: {key} is on rank 0 alone (1 such statistics)"
    more = replace(second, statistics=second.statistics | {f"{K}|input|amax": torch.ones(())})
    with pytest.raises(
        StatisticsError, match=r"rank 1: .*k_proj\.weight\|input\|amax is on rank 1 alone"
    ):
        unify([first, more], [[0, 1]])


def test_statistics_of_different_shapes_are_refused_with_the_tensor():
    first, second = ranks(2, 4)
    wider = replace(
        second, statistics=second.statistics | {f"{Q}|input|channel_amax": torch.ones(C + 1)}
    )
    with pytest.raises(
        StatisticsError,
        match=rf"rank 1: {Q}\|input\|channel_amax is torch.float32 \[4\], .*\[3\] is expected",
    ):
        unify([first, wider], [[0, 1]])


def test_the_same_weight_must_look_the_same_on_every_rank():
    first, second = ranks(2, 4)
    other = replace(second, statistics=second.statistics | {f"{Q}|weight|amax": torch.tensor(2.5)})
    with pytest.raises(
        StatisticsError,
        match=rf"rank 1: {Q}\|weight\|amax is 2\.5, 2\.0 on rank 0, which saw the same",
    ):
        unify([first, other], [[0, 1]])


def test_statistics_of_a_weight_are_taken_once_and_not_added_up():
    sums = {f"{Q}|weight|abs_sum": torch.ones(C).double(), f"{Q}|weight|count": torch.tensor(4)}
    (merged,) = unify(
        [replace(one, statistics=one.statistics | sums) for one in ranks(2, 4)], [[0, 1]]
    )
    assert merged.statistics[f"{Q}|weight|count"] == 4


def test_samples_seen_twice_or_by_nobody_are_named():
    twice = [
        measure(indices, rank=rank, world=2, samples=4)
        for rank, indices in enumerate(([0, 1, 2], [2, 3]))
    ]
    with pytest.raises(
        InputError, match=r"samples of the calibration set: on no rank none, on two ranks 2"
    ):
        unify(twice, [[0, 1]])
    missing = [
        measure(indices, rank=rank, world=2, samples=12) for rank, indices in enumerate(([0], [11]))
    ]
    with pytest.raises(
        InputError, match=r"on no rank 1, 2, 3, 4, 5, 6, 7, 8, \.\.\., on two ranks none"
    ):
        unify(missing, [[0, 1]])


def test_token_counts_that_do_not_add_up_are_refused():
    given = [changed(one, "calibration.tokens", 99) for one in ranks(2, 4)]
    with pytest.raises(InputError, match=r"the ranks saw \d+ tokens, the calibration set has 99"):
        unify(given, [[0, 1]])


def with_amax(values):
    key = f"{Q}|input|amax"
    return [
        replace(one, statistics=one.statistics | {key: torch.tensor(value)})
        for one, value in zip(ranks(len(values), 4), values, strict=True)
    ]


def test_unified_names_the_rank_that_set_each_maximum_the_lowest_of_equals():
    given = with_amax([1.0, 5.0, 5.0, 2.0])
    (merged,) = unify(reversed(given), [[0, 1, 2, 3]])
    caches = [one.statistics[f"{K}|k_cache|amax"].item() for one in given]
    assert merged.meta["unified"]["maxima"] == {
        f"{Q}|input|amax": 1,
        f"{Q}|weight|amax": 0,
        f"{Q}|output|amax": 3,  # sample i is i + 1 times as large, and rank 3 has the last
        f"{K}|k_cache|amax": caches.index(max(caches)),
    }
    halves = unify(with_amax([1.0, 5.0, 5.0, 2.0]), [[0, 3], [1, 2]])
    assert [half.meta["unified"]["maxima"][f"{Q}|input|amax"] for half in halves] == [3, 1]
    assert contributor({4: 0.0, 2: 0.0}) == 2


@pytest.mark.parametrize(
    ("values", "flagged"),
    [
        ([1.0, 1.0, 1.0, 8.0], [3]),
        ([1.0, 1.0, 1.0, 7.9], []),
        ([1.0, 9.0], [1]),
        ([5.0], []),
        ([0.0, 0.0, 0.0, 3.0], []),
        ([20.0, 1.0, 2.0, 30.0, 1.0], [0, 3]),
    ],
)
def test_a_rank_that_saw_eight_times_the_median_of_its_group_is_an_outlier(values, flagged):
    (merged,) = unify(with_amax(values), [list(range(len(values)))])
    found = [one for one in merged.meta["unified"]["outliers"] if one["key"] == f"{Q}|input|amax"]
    assert [(one["rank"], one["amax"]) for one in found] == [
        (rank, values[rank]) for rank in flagged
    ]
    assert [one.rank for one in outliers("x", dict(enumerate(values)))] == flagged


def test_unified_counts_what_was_merged_by_which_rule():
    (merged,) = unify(ranks(2, 4), [[0, 1]])
    found = {
        (row["statistic"], row["rule"]): row["count"] for row in merged.meta["unified"]["merged"]
    }
    assert found == {
        ("abs_sum", "added"): 3,
        ("square_sum", "added"): 3,
        ("power_sum", "added"): 3,
        ("amax", "maximum"): 3,
        ("amax", "taken once"): 1,  # of the weight
        ("channel_amax", "maximum"): 3,
        ("count", "added"): 3,
        ("counts", "added"): 3,
        ("hessian_sum", "added"): 3,
        ("gradient_sum", "added"): 3,
        ("max_val", "maximum"): 3,
        ("min_val", "minimum"): 3,
    }
    assert sum(found.values()) == len(merged.statistics)


@pytest.mark.parametrize(
    ("statistic", "value", "message"),
    [
        ("amax", torch.tensor(float("nan")), r"amax holds 1 NaN and 0 Inf"),
        ("amax", torch.tensor(float("inf")), r"amax holds 0 NaN and 1 Inf"),
        ("amax", torch.tensor(-1.0), r"amax holds -1\.0, it is at least 0"),
        (
            "channel_amax",
            torch.tensor([1.0, float("nan"), 2.0]),
            r"channel_amax holds 1 NaN and 0 Inf",
        ),
        (
            "abs_sum",
            torch.tensor([1.0, -2.0, 0.0]).double(),
            r"abs_sum holds -2\.0, it is at least 0",
        ),
        ("min_val", torch.tensor([0.0, 0.5, -1.0]), r"min_val holds 0\.5, it is at most 0"),
        ("max_val", torch.tensor([0.0, -0.5, 1.0]), r"max_val holds -0\.5, it is at least 0"),
        ("count", torch.tensor(-3), r"count holds -3, it is at least 0"),
        ("counts", -torch.ones(514, dtype=torch.int64), r"counts holds -1, it is at least 0"),
        (
            "hessian_sum",
            -torch.eye(3),
            r"hessian_sum holds -1\.0 on its diagonal, which is at least 0",
        ),
        ("hessian_sum", torch.full((3, 3), float("inf")), r"hessian_sum holds 0 NaN and 9 Inf"),
        (
            "abs_sum",
            torch.ones(3),
            r"abs_sum is torch\.float32 \[3\], torch\.float64 \[3\] is expected",
        ),
        (
            "counts",
            torch.ones(3, dtype=torch.int64),
            r"counts is torch\.int64 \[3\], torch\.int64 \[514\] is expected",
        ),
    ],
)
@pytest.mark.parametrize("place", [1, 2])
def test_a_value_that_cannot_be_is_refused_with_its_rank_wherever_it_stands(
    statistic, value, message, place
):
    given = ranks(3, 6)
    key = f"{Q}|output|{statistic}"
    given[place] = replace(
        given[place], statistics={**given[place].statistics, key: value}, origin="here/rank"
    )
    with pytest.raises(StatisticsError, match=rf"here/rank: rank {place}: {Q}\|output\|{message}"):
        unify(given, [[0, 1, 2]])


@pytest.mark.parametrize("change", [{"more": 1.0}, {"amax": None}])
def test_statistics_that_no_observer_has_are_refused(change):
    given = []
    for one in ranks(2, 4):
        kept = {key: value for key, value in one.statistics.items() if key != f"{Q}|input|count"}
        more = {f"{Q}|input|kurtosis": torch.ones(())} if "more" in change else {}
        given.append(replace(one, statistics={**(one.statistics if more else kept), **more}))
    with pytest.raises(StatisticsError, match=rf"{Q}\|input: no observer has the state"):
        unify(given, [[0, 1]])


def test_a_statistic_of_a_tensor_that_is_not_listed_is_refused():
    given = [
        replace(one, statistics={**one.statistics, "other|input|amax": torch.ones(())})
        for one in ranks(2, 4)
    ]
    with pytest.raises(
        StatisticsError, match=r"rank 0: other\|input was measured, `tensors` does not list it"
    ):
        unify(given, [[0, 1]])


def test_ranks_read_one_statistic_at_a_time_give_what_ranks_in_memory_give(tmp_path):
    given = ranks(3, 7)
    for rank, one in enumerate(given):
        (tmp_path / str(rank)).mkdir()
        write_measurement(tmp_path / str(rank), one)
    (merged,) = unify(
        open_measurements(
            {tmp_path / str(rank): read_meta(tmp_path / str(rank)) for rank in range(3)}
        ),
        [[0, 1, 2]],
    )
    (direct,) = unify(given, [[0, 1, 2]])
    assert merged.statistics.keys() == direct.statistics.keys()
    assert all(
        torch.equal(merged.statistics[key], value) for key, value in direct.statistics.items()
    )


def test_a_rank_without_a_replica_to_spare_is_missed_unless_that_is_allowed():
    first, _, third = ranks(3, 7)
    with pytest.raises(
        InputError, match=r"missing 1, twice none; give every rank's once, or pass --allow-missing"
    ):
        unify([first, third], [[0, 1, 2]])
    (merged,) = unify([first, third], [[0, 1, 2]], allow_missing=True)
    assert merged.meta["unified"]["missing"] == [1]
    assert merged.meta["unified"]["ranks"] == [0, 2]
    assert merged.indices == [0, 2, 3, 5, 6]
    assert merged.meta["counts"]["samples"] == 5
    alone = [first.statistics[f"{Q}|input|abs_sum"], third.statistics[f"{Q}|input|abs_sum"]]
    assert torch.equal(merged.statistics[f"{Q}|input|abs_sum"], alone[0] + alone[1])
    with pytest.raises(InputError, match=r"group 1 \(1\): none of its ranks is there"):
        unify([first, third], [[0], [1], [2]], allow_missing=True)


def test_what_was_made_without_a_rank_can_be_unified_again_and_still_says_so():
    first, second, _, fourth = ranks(4, 8)
    halves = unify([first, second, fourth], [[0, 1], [2, 3]], allow_missing=True)
    assert [half.meta["unified"]["missing"] for half in halves] == [[], [2]]
    (whole,) = unify(halves, [[0, 1]])
    assert whole.indices == [0, 1, 3, 4, 5, 7]


def test_allowing_missing_ranks_changes_nothing_where_none_is():
    (strict,), (lenient,) = (
        unify(ranks(2, 4), [[0, 1]], allow_missing=allow) for allow in (False, True)
    )
    assert strict.meta == lenient.meta


def test_ranks_that_are_all_there_must_have_seen_every_sample():
    given = [
        measure(indices, rank=rank, world=2, samples=4)
        for rank, indices in enumerate(([0, 2], [1]))
    ]
    with pytest.raises(InputError, match=r"on no rank 3"):
        unify(given, [[0, 1]], allow_missing=True)
