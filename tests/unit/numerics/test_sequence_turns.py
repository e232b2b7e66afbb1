"""Sequences have their turn far apart, and those that stand for all lie at equal distances."""

from quantflow.numerics.sequence_turns import spread, turns


def test_sequences_have_their_turn_far_apart():
    assert turns(6, 3) == [[0, 2, 4], [1, 3, 5]]
    assert turns(5, 2) == [[0, 3], [1, 4], [2]]
    assert turns(3, 8) == [[0, 1, 2]]


def test_some_that_stand_for_all_lie_at_equal_distances():
    assert spread(3, 32) == [0, 1, 2]
    assert spread(64, 4) == [0, 16, 32, 48]
