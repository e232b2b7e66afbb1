"""Workers: the order of results, laziness, errors, and that one worker is the caller itself."""

import threading

import pytest
import torch

from quantflow.core.parallel import SEQUENTIAL, Workers

PATIENCE = 10.0  # seconds until a test that waits for another thread gives up


def test_one_worker_runs_in_the_callers_thread_one_item_after_the_other():
    seen = []
    results = Workers(1).map(
        lambda item: seen.append((item, threading.current_thread())) or item * item, range(4)
    )
    assert results == [0, 1, 4, 9]
    assert seen == [(item, threading.current_thread()) for item in range(4)]


def test_two_workers_run_two_units_at_once():
    both = threading.Barrier(2, timeout=PATIENCE)  # breaks unless two units wait at the same time
    with Workers(2) as workers:
        assert workers.map(lambda item: both.wait() >= 0 and item, [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_every_thread_is_told_anew_how_many_threads_a_product_takes(monkeypatch):
    # It is a setting of each thread: what a stage says in its own reaches no other, and a product
    # on two has other bits.
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda number: told.append((threading.get_ident(), number))
    )
    with Workers(2) as workers:
        both = threading.Barrier(2, timeout=PATIENCE)
        ran = workers.map(lambda _: both.wait() >= 0 and threading.get_ident(), range(2))
    assert sorted(told) == sorted((thread, 7) for thread in ran)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_items_even_if_the_first_takes_longest(count):
    last_is_done = threading.Event()

    def unit(item):
        if item == 0 and count > 1:
            assert last_is_done.wait(PATIENCE)
        if item == 1:
            last_is_done.set()
        return item

    with Workers(count) as workers:
        assert workers.map(unit, range(6)) == [0, 1, 2, 3, 4, 5]


def test_the_first_error_in_the_order_of_the_items_is_raised_and_the_workers_stay_usable():
    second_failed = threading.Event()

    def unit(item):
        if item == 0:
            assert second_failed.wait(PATIENCE)
            raise ValueError("first")
        second_failed.set()
        raise KeyError("second")

    with Workers(2) as workers:
        with pytest.raises(ValueError, match="first"):
            workers.map(unit, [0, 1])
        assert workers.map(str, [1]) == ["1"]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_ends_the_rest(count):
    started = []

    def unit(item):
        started.append(item)
        raise ValueError(item)

    with Workers(count) as workers, pytest.raises(ValueError, match="0"):
        workers.map(unit, range(100))
    assert len(started) <= count


@pytest.mark.parametrize(("ahead", "taken"), [(None, 2), (3, 3), (0, 1)])
def test_items_are_taken_no_further_ahead_than_asked_for(ahead, taken):
    items = iter(range(100))
    with Workers(2) as workers:
        results = workers.stream(lambda item: item, items, ahead=ahead)
        assert next(results) == 0
        assert next(items) == taken  # 0 .. taken - 1 were begun
        results.close()


def test_one_worker_takes_an_item_only_when_its_result_is_wanted():
    items = iter(range(100))
    results = SEQUENTIAL.stream(lambda item: item, items)
    assert next(results) == 0
    assert next(items) == 1


def test_a_stream_that_is_left_early_begins_nothing_more():
    begun, go_on = [], threading.Event()

    def unit(item):
        begun.append(item)
        return go_on.wait(PATIENCE)

    with Workers(2) as workers:
        results = workers.stream(unit, range(50), ahead=10)
        go_on.set()
        next(results)
        results.close()
    assert len(begun) <= 11  # what was handed out, and nothing after it


def test_leaving_the_block_waits_for_what_runs_and_ends_the_threads():
    before = set(threading.enumerate())  # some may end meanwhile
    with Workers(2) as workers:
        workers.map(lambda item: item, range(4))
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("count", [0, -3])
def test_there_is_always_one_worker(count):
    assert Workers(count).count == 1


@pytest.mark.parametrize("count", [1, 2])
def test_no_items_give_no_results(count):
    with Workers(count) as workers:
        assert workers.map(str, []) == []
