"""Groups as people write them, and which of them are the ranks of a smaller mesh."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import UsageError
from quantflow.measuring.merging.grouping import (
    arrange,
    check_groups,
    consecutive_groups,
    parse_groups,
)


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
        (
            ["a"],
            2,
            r"group 'a': 'a' is neither a rank nor a range of ranks; write ranks as .*, and "
            r"digits alone as 0123",
        ),
        (["0,,1"], 2, r"group '0,,1': '' is neither"),
        (["0-1-2"], 3, r"'0-1-2' is neither"),
        (["3-0"], 4, r"'3-0' is neither"),
        (["-1"], 2, r"'-1' is neither"),
        (["0,1.5"], 2, r"'1\.5' is neither"),
        (["²"], 3, r"'²' is neither"),
        (
            ["01", "23"],
            12,
            r"group '01': '01' is neither a rank nor a range of ranks; write ranks as 0,1,2,3 or "
            r"0-3$",
        ),
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


@settings(max_examples=150)
@given(size=st.integers(1, 6), count=st.integers(1, 6), data=st.data())
def test_every_partition_reads_back_in_every_way_of_writing_it(size, count, data):
    world = size * count
    order = data.draw(st.permutations(range(world)))
    groups = [order[first : first + size] for first in range(0, world, size)]
    text = [
        written(group, data.draw(st.sampled_from(["digits", "ranges", "commas"])), world=world)
        for group in groups
    ]
    assert parse_groups(text, world) == [sorted(group) for group in groups]
    assert parse_groups([" ".join(text)], world) == [sorted(group) for group in groups]


@settings(max_examples=100)
@given(
    text=st.lists(st.text(alphabet="0123456789,- ab", max_size=8), max_size=4),
    world=st.integers(1, 14),
)
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


@pytest.mark.parametrize(
    ("count", "world", "groups"),
    [
        (1, 4, [[0, 1, 2, 3]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 12, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    ],
)
def test_so_many_groups_are_of_neighbouring_ranks(count, world, groups):
    assert consecutive_groups(count, world) == groups


@pytest.mark.parametrize(("count", "world"), [(3, 4), (0, 4), (-1, 4), (8, 4), (5, 12)])
def test_so_many_groups_that_do_not_divide_are_refused_with_what_does(count, world):
    divisors = {4: "1, 2, 4", 12: "1, 2, 3, 4, 6, 12"}[world]
    with pytest.raises(
        UsageError, match=rf"{world} ranks into {count} groups of one size; use one of {divisors}"
    ):
        consecutive_groups(count, world)


@pytest.mark.parametrize(
    ("groups", "tp", "mesh", "rows"),
    [
        ([[0, 1, 2, 3]], 1, (1, 1), [((0,), (1,), (2,), (3,))]),
        ([[0, 1, 2, 3]], 4, (1, 1), [((0, 1, 2, 3),)]),
        ([[0, 1], [2, 3]], 4, (2, 1), [((0, 1),), ((2, 3),)]),
        ([[0, 1], [2, 3]], 2, (1, 2), [((0, 1),), ((2, 3),)]),
        ([[2, 3], [0, 1]], 2, (1, 2), [((2, 3),), ((0, 1),)]),
        ([[0, 2], [1, 3]], 2, (2, 1), [((0,), (2,)), ((1,), (3,))]),
        ([[0, 1, 2, 3]], 2, (1, 1), [((0, 1), (2, 3))]),
        ([[0], [1], [2], [3]], 2, (2, 2), [((0,),), ((1,),), ((2,),), ((3,),)]),
        (
            [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
            4,
            (2, 2),
            [((0, 1), (8, 9)), ((2, 3), (10, 11)), ((4, 5), (12, 13)), ((6, 7), (14, 15))],
        ),
    ],
)
def test_groups_of_neighbouring_cards_are_a_smaller_mesh(groups, tp, mesh, rows):
    found = arrange(groups, tp=tp)
    assert ((found.tp, found.dp), list(found.groups)) == (mesh, rows)


@pytest.mark.parametrize(
    ("groups", "tp", "message"),
    [
        (
            [[0, 2], [1, 3]],
            4,
            r"group 0 \(0, 2\): takes cards 0, 2 of the 4 that hold one model, 0 to 1 are due; "
            r"give neighbouring ranks, in order, such as 0,1 2,3",
        ),
        (
            [[2, 3], [0, 1]],
            4,
            r"group 0 \(2, 3\): takes cards 2, 3 of the 4 that hold one model, 0 to 1 are due",
        ),
        (
            [[0, 3], [1, 2]],
            2,
            r"group 0 \(0, 3\): holds cards 0 of replica 0 and 1 of replica 1 \(tp=2\); take the "
            r"same",
        ),
        (
            [[0, 1, 2], [3, 4, 5]],
            2,
            r"group 0 \(0, 1, 2\): holds cards 0, 1 of replica 0 and 0 of replica 1",
        ),
        (
            [[0, 1, 2, 3], [4, 5, 10, 11], [6, 7, 8, 9]],
            6,
            r"group 0 .*: takes cards 0, 1, 2, 3 .*, 4 do not divide 6",
        ),
        (
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
            6,
            r"group 1 .*: holds cards 4, 5 of replica 0 and 0, 1 of replica 1",
        ),
        (
            [[0, 1], [2, 4], [3, 5], [6, 7]],
            2,
            r"group 1 \(2, 4\): takes cards 0 of the 2 .*, 0 to 1 are due",
        ),
        (
            [[0, 2], [5, 7], [4, 6], [1, 3]],
            2,
            r"group 1 \(5, 7\): takes replicas 2, 3 of the model, the group before it 0, 1",
        ),
    ],
)
def test_groups_that_no_card_would_hold_are_refused_with_the_cards(groups, tp, message):
    with pytest.raises(UsageError, match=message):
        arrange(groups, tp=tp)


@settings(max_examples=150)
@given(data=st.data(), tp=st.integers(1, 4), dp=st.integers(1, 4))
def test_any_partition_is_a_mesh_of_runs_of_cards_or_refused(data, tp, dp):
    world = tp * dp
    order = data.draw(st.permutations(range(world)))
    size = data.draw(st.sampled_from([size for size in range(1, world + 1) if world % size == 0]))
    groups = [order[first : first + size] for first in range(0, world, size)]
    try:
        found = arrange(groups, tp=tp)
    except UsageError:
        return
    assert found.tp * found.dp == len(groups)
    for index, (rows, group) in enumerate(zip(found.groups, groups, strict=True)):
        assert sorted(rank for row in rows for rank in row) == sorted(group)
        cards = {tuple(rank % tp for rank in row) for row in rows}
        first = index % found.tp * (tp // found.tp)
        assert cards == {tuple(range(first, first + tp // found.tp))}
