"""State of each observer, worked by hand and against plain float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS
from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics import output_blocks
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.channel_amax import ChannelAmaxObserver
from quantflow.observers.count import CountObserver
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.hessian import (
    COLUMNS,
    DEVICE_ROWS,
    HessianObserver,
    add_on_device_,
    observer_bytes,
    shrink_,
    whole_of,
)
from quantflow.observers.histogram import BINS, HistogramObserver, upper_edge
from quantflow.observers.mean_abs import MeanAbsObserver
from quantflow.observers.mean_square import MeanSquareObserver
from quantflow.observers.min_max import MinMaxObserver
from quantflow.observers.rows import RowSample

X = torch.tensor([[[1.0, -2.0, 0.0]], [[-3.0, 1.0, 0.5]]])  # two sequences of one token


def observed(observer, x=X):
    observer.update(x)
    return {key: value.tolist() for key, value in observer.state().items()}


def test_amax_is_the_largest_magnitude():
    assert observed(AmaxObserver(3)) == {"amax": 3.0}


def test_count_is_how_many_rows_there_were_whatever_they_hold():
    assert observed(CountObserver(3)) == {"count": 2}
    assert observed(CountObserver(3), torch.zeros(4, 2, 3)) == {"count": 8}


def test_amax_without_a_width_takes_tensors_of_any_width():
    observer = AmaxObserver()
    observer.update(torch.tensor([1.0, -7.0]))
    observer.update(torch.tensor([[5.0]]))
    assert observer.state()["amax"] == 7


def test_channel_amax_is_the_largest_magnitude_of_each_feature():
    assert observed(ChannelAmaxObserver(3)) == {"channel_amax": [3.0, 2.0, 0.5]}


def test_min_max_is_the_range_of_each_feature_and_holds_zero():
    assert observed(MinMaxObserver(3)) == {"min_val": [-3.0, -2.0, 0.0], "max_val": [1.0, 1.0, 0.5]}


def test_a_range_never_holds_negative_zero_because_equal_ranges_have_equal_bytes():
    observer = MinMaxObserver(17)  # wide enough for vector instructions, which return either zero
    observer.update(-torch.zeros(3, 17))
    assert not any(value.view(torch.int32).any() for value in observer.state().values())


def test_a_range_that_leaves_zero_out_is_refused():
    zeros = torch.zeros(2)
    for state in (
        {"min_val": zeros + 1, "max_val": zeros + 2},
        {"min_val": zeros - 2, "max_val": zeros - 1},
    ):
        with pytest.raises(
            StatisticsError,
            match=r"min_max: min_val up to .*, max_val down to .*, the range holds 0",
        ):
            MinMaxObserver.from_state(state)


def test_mean_abs_is_a_sum_and_a_count_of_rows():
    observer = MeanAbsObserver(3)
    assert observer.mean.tolist() == [0.0, 0.0, 0.0]
    assert observed(observer) == {"abs_sum": [4.0, 3.0, 0.5], "count": 2}
    assert observer.mean.tolist() == [2.0, 1.5, 0.25]
    assert observer.mean.dtype == torch.float64


def test_mean_square_is_a_sum_of_squares_and_a_count_of_rows():
    assert observed(MeanSquareObserver(3)) == {"power_sum": [10.0, 5.0, 0.25], "count": 2}


def test_fisher_is_a_sum_of_squares_and_a_count_of_rows():
    assert observed(FisherObserver(3)) == {"square_sum": [10.0, 5.0, 0.25], "count": 2}


def test_squares_of_small_gradients_are_not_lost():
    observer = FisherObserver(1)
    observer.update(torch.full((2, 1), 2.0**-80))  # whose square is zero in float32
    assert observer.state()["square_sum"].tolist() == [2.0**-159]


def test_sums_do_not_lose_small_values_beside_a_large_one():
    observer = MeanAbsObserver(1)
    observer.update(torch.tensor([[2.0**30]]))
    for _ in range(4):
        observer.update(torch.tensor([[0.25]]))  # lost in float32, whose step is 128 there
    assert observer.state()["abs_sum"].tolist() == [2.0**30 + 1]


def test_gradients_are_summed_as_outer_products_worked_by_hand():
    assert observed(GradientObserver(3)) == {
        "gradient_sum": [[10.0, -5.0, -1.5], [-5.0, 5.0, 0.5], [-1.5, 0.5, 0.25]],
        "count": 2,
    }


def test_gradients_of_many_outputs_are_summed_in_blocks_worked_by_hand(monkeypatch):
    monkeypatch.setattr(output_blocks, "MOST", 2)
    monkeypatch.setattr(output_blocks, "ALIGNED", 1)
    observer = GradientObserver(3)
    observer.update(torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]]))
    other = GradientObserver(3)
    other.update(torch.tensor([[1.0, 0.0, 2.0]]))
    assert observer.state()["gradient_sum"].tolist() == [[1.0, 2.0], [2.0, 5.0], [10.0, 0.0]]
    observer.merge(other)
    assert observer.state()["gradient_sum"].tolist() == [[2.0, 2.0], [2.0, 5.0], [14.0, 0.0]]
    again = GradientObserver.from_state(observer.state())
    assert torch.equal(again.state()["gradient_sum"], observer.state()["gradient_sum"])
    with pytest.raises(
        StatisticsError,
        match=r"gradient: gradient_sum is torch\.float32 \[3, 3\], expected .* \[3, 2\]",
    ):
        GradientObserver.from_state({"gradient_sum": torch.eye(3), "count": torch.tensor(1)})


def test_gradients_in_bfloat16_are_multiplied_in_it_and_summed_in_float32():
    generator = torch.Generator().manual_seed(0)
    observer, exact = GradientObserver(5), torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(30):
        x = torch.randn(40, 5, generator=generator).bfloat16()
        observer.update(x)
        exact += x.double().T @ x.double()
    found = observer.state()["gradient_sum"]
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found.double(), exact, rtol=2**-9, atol=2**-9 * 40)


def test_gradients_whose_square_overflows_are_refused_and_nothing_is_taken_in():
    observer = GradientObserver(2)
    observer.update(torch.tensor([[1e19, 1.0]]))
    before = observer.state()["gradient_sum"].clone()
    with pytest.raises(
        StatisticsError,
        match=r"gradient: gradient \[1, 2\] up to 1\.8e\+19, its square exceeds float32",
    ):
        observer.update(torch.tensor([[1.8e19, 1.0]]))
    assert torch.equal(observer.state()["gradient_sum"], before) and observer.state()["count"] == 1


def test_a_hessian_is_a_sum_of_outer_products_and_a_count_of_rows():
    observer = HessianObserver(2)
    assert observer.hessian.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    observer.update(torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    observer.update(torch.tensor([0.5, 0.0]))
    state = observer.state()
    assert state["hessian_sum"].tolist() == [[10.25, -1.0], [-1.0, 5.0]]
    assert state["hessian_sum"].dtype == torch.float32
    assert state["count"] == 3
    torch.testing.assert_close(observer.hessian, torch.tensor([[10.25, -1.0], [-1.0, 5.0]]) / 3)


def test_a_hessian_agrees_with_float64_and_is_symmetric_and_positive():
    x = torch.randn(5, 40, 16, generator=torch.Generator().manual_seed(0))
    observer = HessianObserver(16)
    for sequence in x:
        observer.update(sequence[None])
    rows = x.flatten(0, 1).double()
    torch.testing.assert_close(observer.hessian.double(), rows.T @ rows / 200, rtol=1e-5, atol=1e-6)
    assert torch.linalg.eigvalsh(observer.hessian).min() > 0


# around and beyond the blocks of rows it is computed in
@pytest.mark.parametrize("features", [255, 256, 257, 600])
def test_a_hessian_of_several_blocks_is_whole_and_exactly_symmetric_however_often_it_is_looked_at(
    features,
):
    x = torch.randn(4, 30, features, generator=torch.Generator().manual_seed(1)) + 0.5
    observer, other = HessianObserver(features), HessianObserver(features)
    for sequence in x[:2]:
        observer.update(sequence)
        observer.state()  # mirrors; what comes after must not count the mirrored half twice
    for sequence in x[2:]:
        other.update(sequence)
    observer.merge(other)
    state = observer.state()["hessian_sum"]
    rows = x.flatten(0, 1).double()
    torch.testing.assert_close(state.double(), rows.T @ rows, rtol=1e-5, atol=1e-4)
    assert torch.equal(state, state.T)


@pytest.mark.parametrize("features", [3, 256, 600])
def test_a_hessian_that_is_taken_is_the_one_that_is_looked_at_and_the_observer_begins_anew(
    features,
):
    x = torch.randn(3, 20, features, generator=torch.Generator().manual_seed(3))
    observer, fresh = HessianObserver(features), HessianObserver(features)
    observer.update(x[0])
    observer.update(x[1])
    seen, taken = observer.state(), observer.take()
    assert (
        torch.equal(taken["hessian_sum"], seen["hessian_sum"])
        and taken["count"] == seen["count"] == 40
    )
    assert not observer.state()["hessian_sum"].any() and observer.state()["count"] == 0
    for one in (observer, fresh):
        one.update(x[2])
    assert torch.equal(observer.state()["hessian_sum"], fresh.state()["hessian_sum"])


def test_a_hessian_is_the_float32_sum_of_float32_products_block_by_block():  # to the bit
    x = torch.randn(3, 20, 300, generator=torch.Generator().manual_seed(4))
    observer, wanted = HessianObserver(300), torch.zeros(300, 300)
    for rows in x:
        observer.update(rows)
        wanted[:256, :256] += rows[:, :256].T @ rows[:, :256]
        wanted[256:] += rows[:, 256:].T @ rows
    wanted = wanted.tril() + wanted.tril(-1).T
    assert torch.equal(observer.state()["hessian_sum"], wanted)


@pytest.mark.parametrize("features", [COLUMNS, COLUMNS + 1, 2 * COLUMNS + 300])
def test_a_hessian_that_is_made_of_several_products_is_exact_where_the_numbers_are_whole(features):
    x = torch.randint(-9, 10, (1, 7, features), generator=torch.Generator().manual_seed(0))
    observer = HessianObserver(features)
    observer.update(x.float())
    rows = x[0].numpy()
    assert (observer.state()["hessian_sum"].numpy() == rows.T @ rows).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_strips_of_a_device_have_the_sum_of_exact_products(dtype):
    features = DEVICE_ROWS + 300
    x = torch.randint(-9, 10, (7, features), generator=torch.Generator().manual_seed(1))
    strips = [torch.ones(DEVICE_ROWS, DEVICE_ROWS), torch.ones(300, features)]
    add_on_device_(strips, x.to(dtype))
    rows = x.numpy()
    whole = rows.T @ rows + 1
    assert (strips[0].numpy() == whole[:DEVICE_ROWS, :DEVICE_ROWS]).all()
    assert (strips[1].numpy() == whole[DEVICE_ROWS:]).all()
    joined = whole_of(reversed(strips), features, device=torch.device("cpu"))
    assert (joined.numpy() == whole).all()


def test_half_a_hessian_is_held():
    assert observer_bytes(5000, rows=2048) == 4 * (2048 * 2048 + 2048 * 4096 + 904 * 5000)
    assert observer_bytes(256) == 4 * 256 * 256
    assert observer_bytes(600) == 4 * (256 * 256 + 256 * 512 + 88 * 600)
    assert 4 * 5632**2 / 2 < observer_bytes(5632) < 0.53 * 4 * 5632**2


def test_a_state_that_is_changed_changes_no_observer():
    observer = HessianObserver.from_state({"hessian_sum": torch.eye(300), "count": torch.tensor(1)})
    observer.state()["hessian_sum"].zero_()
    assert torch.equal(observer.state()["hessian_sum"], torch.eye(300))


def test_many_sequences_leave_the_error_in_float32_that_the_docstring_states():
    # 64 sequences: sqrt(64) * 2^-24 = 4.8e-7 of an entry; as a matrix at most sqrt(K) times that,
    # of the diagonal.
    # a mean: the off-diagonal is large too
    x = torch.randn(64, 256, 48, generator=torch.Generator().manual_seed(2)) + 1.0
    observer = HessianObserver(48)
    for sequence in x:
        observer.update(sequence)
    rows = x.flatten(0, 1).double()
    error = observer.state()["hessian_sum"].double() - rows.T @ rows
    diagonal = rows.square().sum(0).mean()
    assert error.square().mean().sqrt() < 64**0.5 * 2**-24 * diagonal
    assert torch.linalg.matrix_norm(error, 2) < 48**0.5 * 64**0.5 * 2**-24 * diagonal


def test_a_sum_that_would_overflow_is_refused_before_anything_is_added():
    observer = HessianObserver(2)
    observer.update(torch.tensor([[1.5e19, 0.0]]))  # 2.25e38; float32 ends at 3.4e38
    before = observer.state()["hessian_sum"].clone()
    with pytest.raises(
        StatisticsError,
        match=r"hessian: input \[1, 2\] up to 1\.5e\+19, its square exceeds float32",
    ):
        observer.update(torch.tensor([[1.5e19, 1.0]]))
    assert torch.equal(observer.state()["hessian_sum"], before)
    assert observer.state()["count"] == 1


def test_samples_whose_square_overflows_are_refused_by_the_hessian():
    observer = HessianObserver(2)
    with pytest.raises(
        StatisticsError, match=r"hessian: input \[1, 2\] up to 1e\+30, its square exceeds float32"
    ):
        observer.update(torch.tensor([[1e30, 1.0]]))
    assert not observer.state()["hessian_sum"].any()


def test_there_are_eight_bins_a_binade_and_two_for_the_ends():
    assert BINS == 64 * 8 + 2
    assert upper_edge(0) == 2.0**-40
    assert [upper_edge(1 + part) for part in (0, 6, 7)] == [
        2.0**-40 * 1.125,
        2.0**-40 * 1.875,
        2.0**-39,
    ]
    assert upper_edge(1 + 40 * 8) == 1.125
    assert upper_edge(BINS - 2) == 2.0**24
    assert upper_edge(BINS - 1) == math.inf


@pytest.mark.parametrize(
    ("value", "index"),
    [
        (0.0, 0),
        (1e-45, 0),
        (2.0**-41, 0),
        (2.0**-40 * (1 - 2.0**-24), 0),
        (2.0**-40, 1),
        (2.0**-40 * 1.125, 2),
        (1.0, 321),
        (-1.0, 321),
        (1.1249, 321),
        (1.125, 322),
        (1.9999, 328),
        (2.0, 329),
        (2.0**24 - 1, 512),
        (2.0**24, 513),
        (3e38, 513),
    ],
)
def test_a_value_falls_between_its_edges_and_an_edge_belongs_above(value, index):
    counts = observed(HistogramObserver(1), torch.tensor([[value]]))["counts"]
    assert [where for where, count in enumerate(counts) if count] == [index]
    assert abs(value) < upper_edge(index)
    assert index == 0 or abs(value) >= upper_edge(index - 1)


def test_a_histogram_counts_every_element_once():
    assert sum(observed(HistogramObserver(3))["counts"]) == 6


@settings(max_examples=100)
@given(
    magnitudes=st.lists(
        st.floats(width=32, min_value=2.0**-40, max_value=2.0**23), min_size=1, max_size=30
    ),
    per_mille=st.integers(0, 1000),
)
def test_a_percentile_is_above_the_exact_one_by_at_most_an_eighth(magnitudes, per_mille):
    observer = HistogramObserver()
    observer.update(torch.tensor(magnitudes))
    rank = max(1, -(-len(magnitudes) * per_mille // 1000))
    exact = sorted(magnitudes)[rank - 1]
    assert exact < observer.percentile(per_mille / 10) <= exact * 9 / 8


def test_percentiles_of_a_thousand_values_fall_on_the_right_one():
    observer = HistogramObserver()
    observer.update(torch.cat([torch.full((999,), 1.0), torch.tensor([1000.0])]))
    assert observer.percentile(99.9) == 1.125  # exactly 999 of 1000 values are at most 1
    assert observer.percentile(99.91) == 1024.0
    assert observer.percentile(0) == 1.125


def test_percentiles_of_nothing_of_zeros_and_beyond_the_edges():
    observer = HistogramObserver()
    assert observer.percentile(99) == 0
    observer.update(torch.zeros(3))
    assert observer.percentile(100) == 2.0**-40
    observer.update(torch.tensor([1e9]))
    assert observer.percentile(75) == 2.0**-40
    with pytest.raises(
        StatisticsError,
        match=r"histogram: percentile 99 lies beyond the last edge, 2\^24; use amax",
    ):
        observer.percentile(99)


@pytest.mark.parametrize("q", [-1, 100.1, math.nan])
def test_a_percentile_is_given_in_percent(q):
    with pytest.raises(UsageError, match=r"percentile .* is not within 0\.\.100"):
        HistogramObserver().percentile(q)


def test_a_shrunk_hessian_has_the_mean_of_its_diagonal_on_its_diagonal_by_hand():
    hessian = torch.tensor([[1.0, 2.0], [2.0, 5.0]])
    shrink_(hessian)
    assert hessian.tolist() == [[4.0, 2.0], [2.0, 8.0]]
    nothing = torch.zeros(2, 2)
    shrink_(nothing)
    assert nothing.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_shrunk_a_hessian_of_as_many_samples_as_features_serves_gptq_where_it_did_harm():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=generator)
    # features that are independent
    seen, unseen = (torch.randn(count, 128, generator=generator) for count in (128, 4000))
    observer = HessianObserver(128)
    observer.update(seen)
    shrunk = observer.state()
    shrink_(shrunk["hessian_sum"])
    scheme = with_group_size(preset("W4A16"), 32)

    def error(algorithm, statistics):
        found = ALGORITHMS[algorithm].quantize_group(
            {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
        )
        return float((unseen @ (weight - found["w"].weight.dequantize()).T).square().sum())

    # rounds to nearest with scales that may be negative too, as gptq's
    alike = error("rtn_mse", {})
    # errors are made up for along correlations that are chance
    assert error("gptq", observer.state()) > 2 * alike
    assert error("gptq", shrunk) < 0.95 * error("rtn", {})


# of six rows the middle ones of the first and the second half
def test_rows_at_equal_distances_are_kept_in_order():
    sample = RowSample(1, each=2)
    sample.update(torch.arange(6.0).reshape(1, 6, 1))
    sample.update(torch.tensor([[[7.0]]]))
    assert sample.state()["rows"].flatten().tolist() == [1.0, 4.0, 7.0]


def test_of_calls_apart_the_second_gives_rows_and_the_others_the_range():
    sample = RowSample(1, each=1, apart=3)
    for value in (3.0, 90.0, -2.0, 5.0, -80.0, 1.0):
        sample.update(torch.tensor([[[value]]]))
    state = sample.state()
    assert state["rows"].flatten().tolist() == [90.0, -80.0]
    assert (state["seen_min"].tolist(), state["seen_max"].tolist()) == ([-2.0], [5.0])


def test_an_unseen_sample_has_no_rows():
    assert RowSample(3, each=2).state()["rows"].shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "message"), [(torch.ones(2, 4), "4 features"), (torch.full((1, 3), math.nan), "NaN")]
)
def test_a_sample_refuses_what_no_observer_takes(x, message):
    with pytest.raises(StatisticsError, match=message):
        RowSample(3, each=2).update(x)


@pytest.mark.parametrize("features", [3, 300])
def test_a_divided_hessian_is_that_of_divided_samples(features):
    x = torch.randn(50, features, generator=torch.Generator().manual_seed(0))
    factors = torch.linspace(0.5, 4, features)
    divided, expected = HessianObserver(features), HessianObserver(features)
    divided.update(x)
    divided.divide_(factors)
    expected.update(x / factors)
    assert torch.allclose(
        divided.state()["hessian_sum"], expected.state()["hessian_sum"], rtol=1e-5, atol=1e-5
    )
    assert divided.state()["count"] == 50


def test_an_unseen_hessian_can_be_divided():
    observer = HessianObserver(3)
    observer.divide_(torch.ones(3))
    assert not observer.state()["hessian_sum"].any()


def test_the_points_of_a_histogram_stand_for_its_values():
    # 1 and 1.1 lie in the bin from 1 to 1.125, 3 in that from 3 to 3.25; 0 is below the first edge,
    # 2^30 beyond the last.
    observer = HistogramObserver()
    observer.update(torch.tensor([[1.0, -1.1, 3.0, 0.0, -(2.0**30)]]))
    magnitudes, counts = observer.points()
    assert len(magnitudes) == len(counts) == 4 * (BINS - 2) + 1
    assert (magnitudes.diff() > 0).all()
    seen = {
        magnitude: count
        for magnitude, count in zip(magnitudes.tolist(), counts.tolist(), strict=True)
        if count
    }
    ones = [1 + 0.125 * (part + 0.5) / 4 for part in range(4)]
    threes = [3 + 0.25 * (part + 0.5) / 4 for part in range(4)]
    assert seen == {0.0: 1.0} | dict.fromkeys(ones, 0.5) | dict.fromkeys(threes, 0.25)
