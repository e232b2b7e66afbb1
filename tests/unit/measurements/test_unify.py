"""Ranks merged into fewer: as if one observer had seen all data, or refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.measurements.contributions import contributions, outliers
from quantflow.measurements.record import Measurement, read_measurement, write_measurement
from quantflow.measurements.unify import check_groups, parse_groups, unify
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
    observers = {site: [kind(C) for kind in OBSERVERS.values()] for site in ((Q, "input"), (Q, "output"), (K, "k_cache"))}
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
        "tensors": {name: {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [C, C]} for name in (Q, K)},
        "counts": {"samples": len(indices), "tokens": sum(map(len, sequences))},
        "tools": {"torch": "2"},
    }
    return Measurement(meta=meta, statistics=statistics, sequences=sequences, indices=list(indices))


def ranks(world, samples):
    """Sample i is on rank i % world."""
    return [measure(range(rank, samples, world), rank=rank, world=world, samples=samples) for rank in range(world)]


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
            few_ulp = 4 * torch.finfo(value.dtype).eps  # of float64, or of float32 for a Hessian: sums in another order
            torch.testing.assert_close(merged.statistics[key], value, rtol=few_ulp, atol=few_ulp * value.abs().max().item())
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
        assert torch.equal(merged.statistics[f"{K}|k_cache|counts"], alone.statistics[f"{K}|k_cache|counts"])
    assert left.meta["unified"] == {"world": 4, "ranks": [1, 3], "digests": [None, None]}


def test_sums_are_folded_in_rank_order_whatever_order_is_given():
    merged = unify(ranks(4, 9), [[0, 1, 2, 3]])[0].statistics
    again = unify(reversed(ranks(4, 9)), [[3, 1, 0, 2]])[0].statistics
    by_hand = [one.statistics[f"{Q}|input|hessian_sum"] for one in ranks(4, 9)]
    assert torch.equal(merged[f"{Q}|input|hessian_sum"], ((by_hand[0] + by_hand[1]) + by_hand[2]) + by_hand[3])
    assert all(torch.equal(merged[key], again[key]) for key in merged)


def test_a_unified_measurement_is_written_read_and_unified_again(tmp_path):
    digests = []
    given = ranks(4, 6)
    read = []
    for one in given:
        folder = tmp_path / f"rank-{one.meta['mesh']['rank']}"
        folder.mkdir()
        digests.append(write_measurement(folder, one))
        read.append(read_measurement(folder))
    halves = unify(read, [[0, 1], [2, 3]])
    assert halves[1].meta["unified"] == {"world": 4, "ranks": [2, 3], "digests": digests[2:]}
    (tmp_path / "half").mkdir()
    write_measurement(tmp_path / "half", halves[0])
    (whole,) = unify([read_measurement(tmp_path / "half"), halves[1]], [[0, 1]])
    direct = unify(given, [[0, 1, 2, 3]])[0]
    assert whole.indices == direct.indices
    assert torch.equal(whole.statistics[f"{Q}|output|counts"], direct.statistics[f"{Q}|output|counts"])


def test_the_measurements_that_are_merged_stay_as_they_were():
    given = ranks(2, 4)
    before = [{key: value.clone() for key, value in one.statistics.items()} for one in given]
    unify(given, [[0, 1]])
    assert all(torch.equal(one.statistics[key], old[key]) for one, old in zip(given, before, strict=True) for key in old)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.fingerprint", "e" * 64, r"rank 1: model\.fingerprint is 'e+', on rank 0 'f+'; give the ranks of one"),
        ("model.family", "qwen3", r"rank 1: model\.family is 'qwen3', on rank 0 'llama'"),
        ("calibration.hash", "d" * 64, r"rank 1: calibration\.hash is 'd+', on rank 0 'c+'"),
        ("calibration.samples", 7, r"rank 1: calibration\.samples is 7, on rank 0 4"),
        ("dtype", "bfloat16", r"rank 1: dtype is 'bfloat16', on rank 0 'float32'"),
        ("seed", 1, r"rank 1: seed is 1, on rank 0 0"),
        ("observers", ["amax"], r"rank 1: observers is \['amax'\]"),
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
    with pytest.raises(InputError, match=r"measurements of 3 ranks: missing 1, twice none; give every rank's once"):
        unify([first, third], [[0, 1, 2]])
    with pytest.raises(InputError, match=r"measurements of 3 ranks: missing none, twice 1"):
        unify([first, second, third, second], [[0, 1, 2]])
    with pytest.raises(InputError, match=r"measurements: none was given"):
        unify([], [])


def test_groups_that_do_not_cover_the_ranks_are_refused():
    with pytest.raises(UsageError, match=r"groups of 2 ranks: missing 1"):
        unify(ranks(2, 4), [[0]])


def test_ranks_with_different_statistics_are_refused():
    first, second = ranks(2, 4)
    key = f"{Q}|input|amax"
    fewer = replace(second, statistics={name: value for name, value in second.statistics.items() if name != key})
    with pytest.raises(StatisticsError) as caught:
        unify([first, fewer], [[0, 1]])
    assert caught.value.cause == f"rank 1: {key} is on rank 0 alone (1 such statistics)"
    more = replace(second, statistics=second.statistics | {f"{K}|input|amax": torch.ones(())})
    with pytest.raises(StatisticsError, match=r"rank 1: .*k_proj\.weight\|input\|amax is on rank 1 alone"):
        unify([first, more], [[0, 1]])


def test_statistics_of_different_shapes_are_refused_with_the_tensor():
    first, second = ranks(2, 4)
    wider = replace(second, statistics=second.statistics | {f"{Q}|input|channel_amax": torch.ones(C + 1)})
    with pytest.raises(StatisticsError, match=rf"{Q}\|input: channel_amax: shapes \[3\] and \[4\]; concatenate"):
        unify([first, wider], [[0, 1]])


def test_the_same_weight_must_look_the_same_on_every_rank():
    first, second = ranks(2, 4)
    other = replace(second, statistics=second.statistics | {f"{Q}|weight|amax": torch.tensor(2.5)})
    with pytest.raises(StatisticsError, match=rf"{Q}\|weight: amax differs between ranks that hold the same weight"):
        unify([first, other], [[0, 1]])


def test_statistics_of_a_weight_are_taken_once_and_not_added_up():
    sums = {f"{Q}|weight|abs_sum": torch.ones(C).double(), f"{Q}|weight|count": torch.tensor(4)}
    (merged,) = unify([replace(one, statistics=one.statistics | sums) for one in ranks(2, 4)], [[0, 1]])
    assert merged.statistics[f"{Q}|weight|count"] == 4


@pytest.mark.parametrize("kind", ["column", "row", "expert"])
def test_sharded_tensors_are_unsupported(kind):
    given = [changed(one, "tensors.X", {"kind": kind}) for one in ranks(2, 4)]
    with pytest.raises(UnsupportedError, match=rf"X is {kind} .*: sharded statistics are not unified yet"):
        unify(given, [[0, 1]])


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_sharded_mesh_is_unsupported(axis):
    given = [changed(one, f"mesh.{axis}", 2) for one in ranks(2, 4)]
    with pytest.raises(UnsupportedError, match=rf"the model was sharded \(.*{axis}=2.*\): sharded statistics are not"):
        unify(given, [[0, 1]])


def test_samples_seen_twice_or_by_nobody_are_named():
    twice = [measure(indices, rank=rank, world=2, samples=4) for rank, indices in enumerate(([0, 1, 2], [2, 3]))]
    with pytest.raises(InputError, match=r"samples of the calibration set: on no rank none, on two ranks 2"):
        unify(twice, [[0, 1]])
    missing = [measure(indices, rank=rank, world=2, samples=12) for rank, indices in enumerate(([0], [11]))]
    with pytest.raises(InputError, match=r"on no rank 1, 2, 3, 4, 5, 6, 7, 8, \.\.\., on two ranks none"):
        unify(missing, [[0, 1]])


def test_token_counts_that_do_not_add_up_are_refused():
    given = [changed(one, "calibration.tokens", 99) for one in ranks(2, 4)]
    with pytest.raises(InputError, match=r"the ranks saw \d+ tokens, the calibration set has 99"):
        unify(given, [[0, 1]])


@pytest.mark.parametrize(
    ("text", "world", "groups"),
    [
        (["0123", "4567"], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["0123 4567"], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["0,1,2,3", "4-7"], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["0-7"], 8, [list(range(8))]),
        (["0"], 1, [[0]]),
        (["10"], 2, [[0, 1]]),
        (["3,1", "0,2"], 4, [[1, 3], [0, 2]]),
        (["0123456789"], 10, [list(range(10))]),
        (["0-3,6-7", "4,5,8-11"], 12, [[0, 1, 2, 3, 6, 7], [4, 5, 8, 9, 10, 11]]),
        ([str(rank) for rank in range(12)], 12, [[rank] for rank in range(12)]),
    ],
)
def test_groups_read_as_people_write_them(text, world, groups):
    assert parse_groups(text, world) == groups


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        (["01", "2"], 4, r"groups of 4 ranks: missing 3; name every rank in exactly one group"),
        (["0-9,11"], 12, r"groups of 12 ranks: missing 10"),
        (["01", "12"], 3, r"groups of 3 ranks: named twice 1"),
        (["0123", "4"], 4, r"groups of 4 ranks: unknown 4"),
        (["0145"], 4, r"groups of 4 ranks: missing 2, 3; unknown 4, 5"),
        (["0,9"], 4, r"group '0,9': rank 9 does not exist; ranks are 0\.\.3"),
        (["0-999999"], 4, r"rank 999999 does not exist"),
        (["0123", "45"], 6, r"groups of 2 and 4 ranks; give every group as many ranks"),
        ([], 2, r"groups of 2 ranks: missing 0, 1"),
        ([""], 2, r"missing 0, 1"),
        (["a"], 2, r"group 'a': 'a' is neither a rank nor a range of ranks; write ranks as .*, and digits alone as 0123"),
        (["0,,1"], 2, r"group '0,,1': '' is neither"),
        (["0-1-2"], 3, r"'0-1-2' is neither"),
        (["3-0"], 4, r"'3-0' is neither"),
        (["-1"], 2, r"'-1' is neither"),
        (["0,1.5"], 2, r"'1\.5' is neither"),
        (["²"], 3, r"'²' is neither"),
        (["01", "23"], 12, r"group '01': '01' is neither a rank nor a range of ranks; write ranks as 0,1,2,3 or 0-3$"),
        (["0-" + "9" * 5000], 4, r"is neither"),
    ],
)
def test_groups_that_cannot_be_are_refused_with_the_ranks(text, world, message):
    with pytest.raises(UsageError, match=message):
        parse_groups(text, world)


def written(ranks, style, *, world):
    if style == "digits" and world <= 10:
        return "".join(map(str, ranks))
    if style == "ranges":
        runs = []
        for rank in sorted(ranks):
            if runs and runs[-1][-1] == rank - 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    else:
        text = ",".join(map(str, ranks))
    return text


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 6), count=st.integers(1, 6), data=st.data())
def test_every_partition_reads_back_in_every_way_of_writing_it(size, count, data):
    world = size * count
    order = data.draw(st.permutations(range(world)))
    groups = [order[first : first + size] for first in range(0, world, size)]
    text = [written(group, data.draw(st.sampled_from(["digits", "ranges", "commas"])), world=world) for group in groups]
    assert parse_groups(text, world) == [sorted(group) for group in groups]
    assert parse_groups([" ".join(text)], world) == [sorted(group) for group in groups]


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.text(alphabet="0123456789,- ab", max_size=8), max_size=4), world=st.integers(1, 14))
def test_any_text_gives_groups_that_cover_every_rank_once_or_a_usage_error(text, world):
    try:
        groups = parse_groups(text, world)
    except UsageError:
        return
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert len({len(group) for group in groups}) == 1


def test_empty_groups_are_refused():
    with pytest.raises(UsageError, match=r"groups of 0 and 2 ranks"):
        check_groups([[0, 1], []], 2)


def with_amax(values):
    key = f"{Q}|input|amax"
    return [
        replace(one, statistics=one.statistics | {key: torch.tensor(value)})
        for one, value in zip(ranks(len(values), 4), values, strict=True)
    ]


def test_a_contribution_names_the_rank_that_set_each_maximum_the_lowest_of_equals():
    found = contributions(reversed(with_amax([1.0, 5.0, 5.0, 2.0])))
    assert found[f"{Q}|input|amax"] == 1
    assert found[f"{Q}|weight|amax"] == 0
    assert found[f"{Q}|output|amax"] == 3  # sample i is i + 1 times as large, and rank 3 has the last
    assert set(found) == {f"{Q}|input|amax", f"{Q}|weight|amax", f"{Q}|output|amax", f"{K}|k_cache|amax"}


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
def test_a_rank_that_saw_eight_times_the_median_is_an_outlier(values, flagged):
    found = [one for one in outliers(with_amax(values)) if one.key == f"{Q}|input|amax"]
    assert [one.rank for one in found] == flagged
    assert all(one.amax == values[one.rank] for one in found)
