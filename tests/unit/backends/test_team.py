"""The team that shares loops: each unit is done once, whoever calls and however many threads."""

import ctypes
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantflow.backends import native
from quantflow.errors import UnsupportedError

if not any(shutil.which(name) for name in ("gcc", "cc")):
    pytest.skip("no C compiler here", allow_module_level=True)

SOURCE = """
#include "team.h"
#include <stdatomic.h>
struct context { _Atomic(int32_t) *done; _Atomic(int64_t) *sum; int64_t inner; };
static void unit(const void *context, int64_t at) {
    const struct context *t = context;
    atomic_fetch_add(&t->done[at], 1);
    atomic_fetch_add(t->sum, at);
}
static void outer(const void *context, int64_t at) {
    const struct context *t = context;
    struct context own = {t->done + at * t->inner, t->sum, 0};
    team_share(unit, &own, t->inner, 1);
}
/* The sum of the units of `loops` loops. */
int64_t share(void *done, int64_t units, int64_t piece, int64_t loops, int64_t inner) {
    _Atomic(int64_t) sum = 0;
    struct context context = {done, &sum, inner};
    for (int64_t i = 0; i < loops; i++) team_share(inner ? outer : unit, &context, units, piece);
    return sum;
}
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory):
    """A C function that shares loops whose units count."""
    path = tmp_path_factory.mktemp("team") / "count.c"
    path.write_text(SOURCE)
    function = native.library(path).share
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    return function


@pytest.fixture(autouse=True)
def threads():
    """Leave torch as it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("units", [0, 1, 2, 5, 64, 1001])
def test_every_unit_is_done_once(share, threads, count, piece, units):
    threads(count)
    done = torch.zeros(max(1, units), dtype=torch.int32)
    assert share(done.data_ptr(), units, piece, 1, 0) == units * (units - 1) // 2
    assert done[:units].eq(1).all()


def test_loops_that_follow_each_other_closely_share_nothing(share, threads):
    threads(4)  # more than cores: members come late, with the number of a loop that is over
    done = torch.zeros(9, dtype=torch.int32)
    assert share(done.data_ptr(), 9, 1, 20_000, 0) == 36 * 20_000
    assert done.eq(20_000).all()


def test_callers_at_once_do_their_own_loops(share):
    def call(_):
        torch.set_num_threads(3)
        done = torch.zeros(50, dtype=torch.int32)
        total = share(done.data_ptr(), 50, 1, 500, 0)
        return total == 1225 * 500 and bool(done.eq(500).all())

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(8)))


def test_a_unit_may_share_a_loop_itself(share, threads):
    threads(3)
    done = torch.zeros(20 * 6, dtype=torch.int32)
    assert share(done.data_ptr(), 20, 1, 10, 6) == 20 * 10 * 15
    assert done.eq(10).all()


def test_a_forked_process_has_a_team_of_its_own(share, threads):
    threads(3)
    done = torch.zeros(30, dtype=torch.int32)
    share(done.data_ptr(), 30, 1, 1, 0)  # the team's threads run
    child = os.fork()
    if not child:
        os._exit(share(done.data_ptr(), 30, 1, 100, 0) != 435 * 100)
    assert os.waitpid(child, 0)[1] == 0


def test_a_source_without_the_team_s_compiler_says_why(tmp_path, monkeypatch):
    native._attempt.cache_clear()
    monkeypatch.setenv("QUANTFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "missing-compiler")
    path = tmp_path / "other.c"
    path.write_text(SOURCE)
    with pytest.raises(UnsupportedError, match="no C compiler"):
        native.library(path)
    native._attempt.cache_clear()
