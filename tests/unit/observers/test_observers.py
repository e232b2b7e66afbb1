"""Promises of every observer: its algebra, unseen state, refusals, and a complete state."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics.statistics import ADDED, LARGER, SMALLER
from quantflow.observers import OBSERVERS, observers_for, state_bytes, statistic_named

C = 4
NAMES = list(OBSERVERS)
EXACT = ["amax", "channel_amax", "min_max", "histogram", "count"]
IDEMPOTENT = ["amax", "channel_amax", "min_max"]
SUMS = ["mean_abs", "mean_square", "hessian", "fisher", "gradient"]
NEEDS_FEATURES = [
    "channel_amax",
    "min_max",
    "mean_abs",
    "mean_square",
    "hessian",
    "fisher",
    "gradient",
]

values = st.floats(width=32, min_value=-1024, max_value=1024)
batches = st.integers(1, 5).flatmap(lambda n: st.lists(values, min_size=n * C, max_size=n * C))


def seen(name, *batches):
    observer = OBSERVERS[name](C)
    for batch in batches:
        observer.update(torch.tensor(batch, dtype=torch.float32).reshape(-1, C))
    return observer


def copy(observer):
    return type(observer).from_state(
        {key: value.clone() for key, value in observer.state().items()}
    )


def merged(*observers):
    total = copy(observers[0])
    for observer in observers[1:]:
        total.merge(copy(observer))
    return total


def same(one, other):
    left, right = one.state(), other.state()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def close(one, other):
    left, right = one.state(), other.state()
    return all(
        torch.allclose(left[key], right[key], rtol=0, atol=rounding(left[key])) for key in left
    )


def rounding(value):
    """A few units in the last place of the largest entry: the effect of three terms' order."""
    return (
        4 * torch.finfo(value.dtype).eps * value.abs().max().item()
        if value.is_floating_point()
        else 0
    )


def test_the_table_has_every_observer_under_its_name_and_its_statistics():
    assert NAMES == [
        "amax",
        "channel_amax",
        "min_max",
        "mean_abs",
        "mean_square",
        "histogram",
        "hessian",
        "fisher",
        "gradient",
        "count",
    ]
    for name, kind in OBSERVERS.items():
        assert name == kind.NAME
        assert tuple(kind(C).state()) == tuple(kind.STATISTICS)


@pytest.mark.parametrize("name", NAMES)
def test_an_unseen_observer_is_all_zeros(name):
    assert all((value == 0).all() for value in OBSERVERS[name](C).state().values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, C), (2, 0, C)])
def test_a_batch_without_samples_changes_nothing(name, shape):
    observer = seen(name, [1, -2, 3, -4])
    before = copy(observer)
    observer.update(torch.empty(shape))
    assert same(observer, before)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(batch=batches)
def test_an_unseen_observer_is_neutral_in_a_merge(name, batch):
    observer, unseen = seen(name, batch), OBSERVERS[name](C)
    assert same(merged(observer, unseen), observer)
    assert same(merged(unseen, observer), observer)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=10)
@given(parts=st.lists(batches, min_size=3, max_size=3))
def test_maxima_and_counts_merge_to_the_same_bits_in_every_order(name, parts):
    observers = [seen(name, part) for part in parts]
    whole = seen(name, sum(parts, []))
    for order in itertools.permutations(observers):
        assert same(merged(*order), whole)
    one, two, three = observers
    assert same(merged(merged(one, two), three), merged(one, merged(two, three)))


@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=10)
@given(parts=st.lists(batches, min_size=3, max_size=3))
def test_sums_commute_exactly_associate_closely_and_fold_like_updates_in_order(name, parts):
    one, two, three = (seen(name, part) for part in parts)
    assert same(merged(one, two), merged(two, one))
    assert close(merged(merged(one, two), three), merged(one, merged(two, three)))
    assert same(merged(one, two, three), seen(name, *parts))
    assert one.state()["count"] + two.state()["count"] == merged(one, two).state()["count"]


@pytest.mark.parametrize("name", NAMES)
def test_merging_twice_changes_nothing_exactly_where_the_docstring_claims_it(name):
    one, two = seen(name, [1, 2, 3, 4]), seen(name, [-5, 0, 3, 9])
    again = merged(one, two, two)
    assert same(again, merged(one, two)) == (name in IDEMPOTENT)
    assert ("and idempotent" in OBSERVERS[name].__doc__) == (name in IDEMPOTENT)


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_leaves_the_other_as_it_was(name):
    one, two = seen(name, [1, 2, 3, 4]), seen(name, [-5, 0, 3, 9])
    before = copy(two)
    one.merge(two)
    one.update(torch.full((1, C), 100.0))
    assert same(two, before)


@pytest.mark.parametrize("name", NAMES)
def test_an_observer_made_from_a_state_does_not_change_that_state(name):
    state = seen(name, [1, 2, 3, 4]).state()
    before = {key: value.clone() for key, value in state.items()}
    observer = OBSERVERS[name].from_state(state)
    observer.update(torch.full((2, C), 50.0))
    observer.merge(seen(name, [7, 7, 7, 7]))
    assert all(torch.equal(state[key], before[key]) for key in state)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(first=batches, second=batches)
def test_a_state_is_everything_an_observer_knows(name, first, second):
    restored = copy(seen(name, first))
    restored.update(torch.tensor(second).reshape(-1, C))
    assert same(restored, seen(name, first, second))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_and_nothing_is_taken_in(name, bad):
    observer = seen(name, [1, 2, 3, 4])
    before = copy(observer)
    with pytest.raises(
        StatisticsError, match=rf"{name}: input \[2, 1, 4\] holds [01] NaN and [01] Inf; measure in"
    ):
        observer.update(torch.tensor([[[9.0, 9.0, 9.0, 9.0]], [[1.0, bad, 1.0, 1.0]]]))
    assert same(observer, before)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_another_width_are_refused(name):
    with pytest.raises(
        StatisticsError, match=rf"{name}: input \[2, 5\] has 5 features, the observer 4"
    ):
        OBSERVERS[name](C).update(torch.ones(2, 5))


@pytest.mark.parametrize("name", NEEDS_FEATURES)
def test_observers_of_different_widths_do_not_merge(name):
    with pytest.raises(
        StatisticsError,
        match=rf"{name}: shapes \[4(, 4)?\] and \[6(, 6)?\]; concatenate the shards",
    ):
        OBSERVERS[name](4).merge(OBSERVERS[name](6))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_with_a_missing_or_foreign_statistic_is_refused(name):
    state = OBSERVERS[name](C).state()
    first = next(iter(OBSERVERS[name].STATISTICS))
    with pytest.raises(StatisticsError, match=rf"{name}: state has .*, expected"):
        OBSERVERS[name].from_state({key: value for key, value in state.items() if key != first})
    with pytest.raises(StatisticsError, match=rf"{name}: state has .*other.*, expected"):
        OBSERVERS[name].from_state(state | {"other": torch.ones(1)})


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_another_dtype_or_rank_is_refused(name):
    state, first = OBSERVERS[name](C).state(), next(iter(OBSERVERS[name].STATISTICS))
    for wrong in (state[first].to(torch.float16), state[first][None]):
        with pytest.raises(StatisticsError, match=rf"{name}: {first} is torch.*, expected torch"):
            OBSERVERS[name].from_state(state | {first: wrong})


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_statistic_is_refused(name):
    state = seen(name, [1, 2, 3, 4]).state()
    for key in set(state) - {"min_val"}:
        with pytest.raises(StatisticsError, match=f"{name}: "):
            OBSERVERS[name].from_state(state | {key: -state[key] - 1})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_samples_of_any_float_dtype_count_as_their_float32_value(name, dtype):
    batch = torch.tensor([[0.5, -1.25, 3.0, 0.0]])
    other = OBSERVERS[name](C)
    other.update(batch.to(dtype))
    assert same(other, seen(name, batch.flatten().tolist()))


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_not_changed(name):
    batch = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    OBSERVERS[name](C).update(batch)
    assert batch.tolist() == [[-1.0, 2.0, -3.0, 4.0]]


@pytest.mark.parametrize(
    ("needs", "observers"),
    [
        ([], ()),
        (["channel_amax"], ("channel_amax",)),
        (["hessian_sum", "count"], ("hessian",)),
        (["count", "abs_sum"], ("mean_abs",)),
        (["max_val", "min_val", "amax"], ("amax", "min_max")),
        (["counts"], ("histogram",)),
        (["square_sum"], ("fisher",)),
        (["gradient_sum", "hessian_sum"], ("hessian", "gradient")),
    ],
)
def test_the_observers_for_what_algorithms_need(needs, observers):
    assert observers_for(needs) == observers


def test_a_need_that_no_observer_meets_is_refused():
    with pytest.raises(
        UsageError, match=r"statistics \['kurtosis'\] are unknown; use some of abs_sum, amax, "
    ):
        observers_for(["amax", "kurtosis"])


@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_says_of_itself_how_ranks_merge_what_its_observer_merges(name):
    folds = {LARGER: torch.maximum, SMALLER: torch.minimum, ADDED: torch.add}
    one, other = seen(name, [1, -2, 3, -4]), seen(name, [-5, 6, 0, 2])
    left, right = one.state(), other.state()
    told = {
        key: folds[statistic.fold](left[key], right[key])
        for key, statistic in OBSERVERS[name].STATISTICS.items()
    }
    total = merged(one, other).state()
    assert all(torch.equal(told[key], total[key]) for key in told)


@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_says_of_itself_its_shape_and_dtype_and_so_its_bytes(name):
    state, statistics = OBSERVERS[name](C).state(), OBSERVERS[name].STATISTICS
    assert all(tuple(value.shape) == statistics[key].shape(C) for key, value in state.items())
    assert all(value.dtype == statistics[key].dtype for key, value in state.items())
    assert (
        state_bytes(name, C)
        == sum(value.numel() * value.element_size() for value in state.values())
        > 0
    )


def test_what_no_observer_has_costs_no_zero_bytes_and_merges_by_no_maximum():
    with pytest.raises(UsageError, match="statistic 'amaxx' is unknown"):
        state_bytes("amaxx", C)
    with pytest.raises(StatisticsError, match="statistic 'kurtosis': no observer has it"):
        statistic_named("kurtosis")
