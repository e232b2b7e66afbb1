"""Sums in a tree of sixteen parts have one order, however many replicas add up."""

import pytest
import torch

from quantflow.measuring.totals import Totals
from quantflow.numerics.fixed_tree import folded, leaf_of, sequences_of
from quantflow.observers import OBSERVERS, summed_in_parts
from quantflow.observers.amax import AmaxObserver
from quantflow.observers.gradient import GradientObserver
from quantflow.observers.mean_abs import MeanAbsObserver


def written(items):
    return folded(items, lambda first, second: f"({first}+{second})")


def test_halves_are_summed_first_and_the_first_half_is_a_power_of_two():
    assert written(list("a")) == "a"
    assert written(list("abcd")) == "((a+b)+(c+d))"
    assert written(list("abc")) == "((a+b)+c)"
    assert written(list("abcdef")) == "(((a+b)+(c+d))+(e+f))"


def test_leaves_are_parts_with_their_bits_in_reverse():
    leaves = [leaf_of(index) for index in range(16)]
    assert leaves == [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]
    assert [leaf_of(index + 32) for index in range(16)] == leaves


def test_neighbouring_replicas_have_together_what_one_of_half_as_many_has():
    assert [sequences_of(replica, replicas=4, samples=10) for replica in range(4)] == [
        [0, 4, 8],
        [2, 6],
        [1, 5, 9],
        [3, 7],
    ]
    for count in (2, 4, 8, 16):
        for replica in range(count // 2):
            pair = [
                index
                for one in (2 * replica, 2 * replica + 1)
                for index in sequences_of(one, replicas=count, samples=100)
            ]
            assert sorted(pair) == sequences_of(replica, replicas=count // 2, samples=100)


@pytest.mark.parametrize("replicas", [3, 12, 32])
def test_other_numbers_of_replicas_share_alternately(replicas):
    shares = [sequences_of(replica, replicas=replicas, samples=70) for replica in range(replicas)]
    assert shares == [list(range(replica, 70, replicas)) for replica in range(replicas)]


def summed(values, indices):
    """The state of an observer that saw a sequence of one row for each index."""
    totals = Totals()
    for index in indices:
        own = MeanAbsObserver(values.shape[1])
        own.update(values[index : index + 1])
        totals.add(index, {"x": [own]})
    taken = totals.take()
    assert totals.take() == {}
    return taken["x"][0].state() if indices else MeanAbsObserver(values.shape[1]).state()


@pytest.mark.parametrize("samples", [1, 5, 16, 37, 100])
def test_replicas_have_the_bits_of_one_process(samples):
    generator = torch.Generator().manual_seed(samples)
    values = torch.randn(samples, 64, generator=generator)
    values *= 10 ** torch.linspace(-6, 6, samples)[torch.randperm(samples)][:, None]
    whole = summed(values, range(samples))
    assert int(whole["count"]) == samples
    for count in (2, 4, 8, 16):
        states = [
            summed(values, sequences_of(replica, replicas=count, samples=samples))
            for replica in range(count)
        ]
        found = folded([state["abs_sum"] for state in states], torch.add)
        assert torch.equal(found, whole["abs_sum"])
    if samples > 16:  # so the order counts
        alternately = [summed(values, range(replica, samples, 4)) for replica in range(4)]
        in_rank_order = sum(state["abs_sum"] for state in alternately)
        assert not torch.equal(in_rank_order, whole["abs_sum"])


def test_matrices_are_added_up_in_the_order_of_the_sequences():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 3, 8, generator=generator)
    totals, expected = Totals(), GradientObserver(8)
    for index in range(40):
        own, other = GradientObserver(8), GradientObserver(8)
        own.update(values[index])
        other.update(values[index])
        totals.add(index, {"x": [own]})
        expected.merge(other)
    found = totals.take()["x"][0].state()
    assert all(torch.equal(found[name], value) for name, value in expected.state().items())


def test_several_observers_of_a_site_stay_apart():
    totals = Totals()
    for index, value in enumerate((1.0, -3.0, 2.0)):
        seen = [AmaxObserver(1), MeanAbsObserver(1)]
        for observer in seen:
            observer.update(torch.tensor([[value]]))
        totals.add(index, {"x": seen})
    largest, mean = totals.take()["x"]
    assert largest.state()["amax"] == 3.0 and mean.state()["abs_sum"] == 6.0


def test_sums_of_vectors_alone_are_kept_in_parts():
    assert {name for name in OBSERVERS if summed_in_parts(name)} == {
        "mean_abs",
        "mean_square",
        "fisher",
    }
