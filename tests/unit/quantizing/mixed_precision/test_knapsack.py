"""The knapsack of schemes against all combinations, against dynamic programming, and by hand."""

import itertools
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.quantizing.mixed_precision.knapsack import frontier, solve_multiple_choice_knapsack

# Bits and cost of a group in 2, 4 and 8 bits, of a sensitive and of a patient group.
SENSITIVE = [(2, 100.0), (4, 10.0), (8, 0.0)]
PATIENT = [(2, 4.0), (4, 1.0), (8, 0.0)]


def every_combination(items):
    """(first sum, second sum, picks) of all combinations."""
    for picks in itertools.product(*(range(len(options)) for options in items)):
        chosen = [options[pick] for options, pick in zip(items, picks, strict=True)]
        yield sum(a for a, _ in chosen), sum(b for _, b in chosen), picks


def sums(items, picks):
    chosen = [options[pick] for options, pick in zip(items, picks, strict=True)]
    return sum(a for a, _ in chosen), sum(b for _, b in chosen)


@pytest.mark.parametrize(
    ("limit", "picks"),
    [
        (3, None),  # both in 2 bits take 4
        (4, (0, 0)),
        (5, (0, 0)),  # no step fits
        (6, (1, 0)),  # the sensitive one saves 90 with 2 bits, the patient one 3
        (8, (1, 1)),
        (10, (2, 0)),  # 10 saved against 10 and 1: (8, 2) costs 4, (4, 4) costs 11
        (11, (2, 0)),
        (12, (2, 1)),
        (16, (2, 2)),
        (99, (2, 2)),
    ],
)
def test_two_groups_worked_by_hand(limit, picks):
    assert solve_multiple_choice_knapsack([SENSITIVE, PATIENT], limit) == picks


def test_the_frontier_of_two_groups_worked_by_hand():
    # gains per bit: sensitive 45, then 2.5; patient 1.5, then 0.25
    assert frontier([SENSITIVE, PATIENT]) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_either_number_can_be_the_one_that_is_limited():
    swapped = [[(b, a) for a, b in options] for options in (SENSITIVE, PATIENT)]
    # 8 bits are the fewest with a cost of at most 11; (8, 2) costs 4 and takes 10
    assert solve_multiple_choice_knapsack(swapped, 11.0) == (1, 1)
    assert solve_multiple_choice_knapsack(swapped, 4.0) == (2, 0)
    assert solve_multiple_choice_knapsack(swapped, 0.0) == (2, 2)


def test_between_corners_of_the_hull_the_best_combination_is_kept_where_no_step_fits():
    # From (0, 0) the best step per unit, 30 for 6, does not fit into 5, and after it nothing does;
    # 20 for 5 does.
    items = [[(0, 30.0), (6, 0.0)], [(0, 20.0), (5, 0.0)], [(0, 1.0), (1, 0.0)]]
    assert solve_multiple_choice_knapsack(items, 5) == (0, 1, 0)
    assert solve_multiple_choice_knapsack(items, 6) == (1, 0, 0)
    # The steepest step takes 6 of 10, beside which neither of the others fits; these two together
    # save more.
    assert solve_multiple_choice_knapsack(
        [[(0, 30.0), (6, 0.0)], [(0, 20.0), (5, 0.0)], [(0, 19.0), (5, 0.0)]], 10
    ) == (
        0,
        1,
        1,
    )


def test_an_option_that_is_on_no_hull_can_be_the_best():
    assert solve_multiple_choice_knapsack([[(0, 10.0), (4, 8.0), (8, 0.0)]], 5) == (1,)
    assert frontier([[(0, 10.0), (4, 8.0), (8, 0.0)]]) == [(0,), (2,)]


def test_options_that_cost_more_for_more_are_never_taken():
    assert solve_multiple_choice_knapsack([[(3, 1.0), (1, 1.0), (2, 5.0)]], 10) == (1,)
    assert frontier([[(3, 1.0), (1, 1.0), (2, 5.0)]]) == [(1,)]


def test_no_items_take_nothing():
    assert solve_multiple_choice_knapsack([], 0) == ()
    assert solve_multiple_choice_knapsack([], -1) is None
    assert frontier([]) == [()]


OPTION = st.tuples(st.integers(0, 12), st.integers(0, 50).map(float))
ITEMS = st.lists(st.lists(OPTION, min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=400)
@given(items=ITEMS, limit=st.integers(0, 40))
def test_no_combination_within_the_limit_is_better(items, limit):
    within = [b for a, b, _ in every_combination(items) if a <= limit]
    found = solve_multiple_choice_knapsack(items, limit)
    if not within:
        assert found is None
        return
    assert found is not None
    limited, small = sums(items, found)
    assert limited <= limit
    assert small == min(within)


def by_dynamic_programming(items, limit):
    """The least cost for every number of bits, item by item (Kellerer et al., section 11.5)."""
    least_cost = [0.0] * (limit + 1)
    for options in items:
        least_cost = [
            min((least_cost[bits - a] + b for a, b in options if a <= bits), default=math.inf)
            for bits in range(limit + 1)
        ]
    return least_cost[limit]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), share=st.floats(0.05, 0.95))
def test_forty_items_cost_what_dynamic_programming_finds(seed, share):
    """16^40 combinations, of costs that fall by about 4 with each bit, as those of schemes do."""
    generator = random.Random(seed)
    items = []
    for _ in range(40):
        weights, sensitivity = generator.randint(1, 6), generator.lognormvariate(0, 2)
        options = [
            (weights * bits + generator.randint(0, 2), sensitivity * 4.0**-bits)
            for bits in range(2, 10)
            for _ in "ab"
        ]
        items.append([(a, b * generator.uniform(0.7, 1.3)) for a, b in options])
    fewest, most = (sum(pick(a for a, _ in options) for options in items) for pick in (min, max))
    limit = int(fewest + share * (most - fewest))
    found = solve_multiple_choice_knapsack(items, limit)
    assert found is not None
    limited, small = sums(items, found)
    assert limited <= limit
    assert small == pytest.approx(by_dynamic_programming(items, limit), rel=1e-12)


@settings(max_examples=200)
@given(items=ITEMS, price=st.floats(0.01, 20))
def test_at_every_price_a_corner_of_the_frontier_is_best(items, price):
    best = min(b + price * a for a, b, _ in every_combination(items))
    corners = [sums(items, picks) for picks in frontier(items)]
    assert min(b + price * a for a, b in corners) == pytest.approx(best)
    assert all(a1 < a2 and b1 > b2 for (a1, b1), (a2, b2) in itertools.pairwise(corners))


@pytest.mark.slow
def test_a_large_model_is_chosen_for_within_seconds_and_nearly_as_well_as_the_hull_allows():
    """80 layers of 4 groups, 16 candidates each; no combination is below the hull's lines."""
    generator = random.Random(0)
    items = []
    for _ in range(320):
        weights, sensitivity = (
            generator.choice([4096, 11008, 14336]) * 4096,
            generator.lognormvariate(0, 2),
        )
        widths = [bits + 16 / size for bits in (2, 3, 4, 5, 6) for size in (32, 64, 128)] + [8.1]
        items.append(
            [
                (int(weights * w), weights * sensitivity * 4.0**-w * generator.uniform(0.8, 1.2))
                for w in widths
            ]
        )
    limit = int(4.25 * sum(min(a for a, _ in options) for options in items) / 2.125)
    begin = time.process_time()  # not the clock's: the machine may be busy
    limited, small = sums(items, solve_multiple_choice_knapsack(items, limit))
    assert time.process_time() - begin < 10
    corners = [sums(items, picks) for picks in frontier(items)]
    (a1, b1), (a2, b2) = next(
        (left, right) for left, right in itertools.pairwise(corners) if left[0] <= limit < right[0]
    )
    bound = b1 + (b2 - b1) * (limit - a1) / (a2 - a1)
    assert limited <= limit
    assert bound <= small * (1 + 1e-12)
    assert small <= min(b1, bound * 1.001)
