"""Cores of ranks on machines that a folder describes, and a process that is bound."""

import os
import subprocess
import sys

import pytest

from quantflow.distributed.binding import cores_of
from quantflow.errors import UsageError


@pytest.fixture
def machine(tmp_path):
    """Write what Linux says of a machine: processors of its nodes, and threads of its cores."""

    def write(nodes, siblings=()):
        for number, text in enumerate(nodes):
            (tmp_path / f"node/node{number}").mkdir(parents=True)
            (tmp_path / f"node/node{number}/cpulist").write_text(f"{text}\n")
        for text in siblings:
            for processor in text.split(","):
                folder = tmp_path / f"cpu/cpu{processor}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(f"{text}\n")
        return tmp_path

    return write


# two nodes of four cores of two threads
TWO = (["0-3,8-11", "4-7,12-15"], [f"{core},{core + 8}" for core in range(8)])


@pytest.mark.parametrize(
    ("ranks", "usable", "expected"),
    [
        (1, range(16), [{0, 1, 2, 3}]),
        (2, range(16), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, range(16), [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (3, range(16), [{0, 1, 2, 3}, {4, 5}, {6, 7}]),
        (8, range(16), [{core} for core in range(8)]),
        # every thread
        (
            16,
            range(16),
            [{core} for core in (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)],
        ),
        # the other threads, where taskset leaves those alone
        (2, range(8, 16), [{8, 9, 10, 11}, {12, 13, 14, 15}]),
        (2, range(4), [{0, 1}, {2, 3}]),  # one node
        (1, [0, 8, 4, 12, 5], [{4, 5}]),  # the node that has more
    ],
)
def test_a_rank_has_cores_of_one_node_and_one_thread_of_each(machine, ranks, usable, expected):
    assert cores_of(ranks, usable=usable, system=machine(*TWO)) == expected


def test_without_a_word_about_nodes_and_threads_all_processors_are_cores_of_one_node(tmp_path):
    assert cores_of(2, usable=range(5), system=tmp_path) == [{0, 1}, {2, 3, 4}]


def test_a_processor_that_no_node_names_makes_them_one_node(machine):
    assert cores_of(2, usable=range(4), system=machine(["0", "2"])) == [{0, 1}, {2, 3}]


def test_more_ranks_than_processors_are_refused(machine):
    with pytest.raises(
        UsageError,
        match="bind: 9 ranks on a NUMA node of 8 processors, 17 ranks in all; use fewer ranks",
    ):
        cores_of(17, usable=range(16), system=machine(*TWO))


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores"
)
def test_this_machine_has_cores_for_one_rank_that_this_process_may_use():
    (cores,) = cores_of(1)
    assert cores and cores <= os.sched_getaffinity(0)
    program = (
        f"import os; os.sched_setaffinity(0, {set(cores)}); "
        f"print(os.sched_getaffinity(0) == {set(cores)})"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )
