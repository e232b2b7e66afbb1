"""SIGKILL at random moments over the whole of `quantflow run`, and a disk that gets full.

The disk takes any number of bytes first.
"""

import random

import pytest

pytestmark = pytest.mark.slow


def kill(command, generator: random.Random, *, wanted: int) -> int:
    """Kill runs until so many kills have landed; the number of runs.

    Each folder is killed as often as it takes to finish.
    """
    landed = runs = 0
    while landed < wanted:
        with command.folder() as folder:
            ended = -9
            while ended == -9 and landed < wanted:
                outcome = command.run(
                    folder, kill_after=generator.uniform(0.0, command.outcome.seconds)
                )
                ended, runs = outcome.code, runs + 1
                assert ended in (0, -9), outcome.stderr
                command.check_state(folder)
                landed += ended == -9
            command.check_continues(folder)
    return runs


def kills(command, *, wanted: int, seed: int) -> None:
    halves = [(wanted // 2, seed), (wanted - wanted // 2, seed + 1)]
    runs = sum(
        command.at_once(lambda half: kill(command, random.Random(half[1]), wanted=half[0]), halves)
    )
    print(
        f"run: {wanted} kills landed in {runs} runs; an uninterrupted run takes "
        f"{command.outcome.seconds:.1f} s"
    )


def test_eight_kills_at_random_moments_continue_to_the_same_bytes(commands):
    kills(commands("run"), wanted=8, seed=7)


@pytest.mark.sweep
def test_two_hundred_kills_at_random_moments_continue_to_the_same_bytes(commands):
    kills(commands("run"), wanted=200, seed=11)


def fill(command, size: int) -> str:
    with command.folder() as folder:
        outcome = command.run(folder, full=size)
        command.check_state(folder)
        assert outcome.code == 5, (size, outcome)
        cause, remedy = outcome.error
        assert cause.startswith(f"error: {folder}") and "No space left on device" in cause, (
            size,
            outcome.stderr,
        )
        assert remedy == "  fix: free some space; the same command continues", (
            size,
            outcome.stderr,
        )
        command.check_continues(folder)
        place = cause.removeprefix(f"error: {folder}/out").split(": ")[0].strip("/")
        return place.split("/")[0] or "the first folder"


def fills(command, count: int) -> None:
    sizes = [command.outcome.written * i // count for i in range(count)]
    where = command.at_once(lambda size: fill(command, size), sizes)
    told = {stage: where.count(stage) for stage in sorted(set(where))}
    print(
        f"run: writes {command.outcome.written} bytes; the disk was full after {count} sizes: "
        f"{told}"
    )


def test_a_disk_that_is_full_after_four_sizes_is_told_and_the_run_continues(commands):
    fills(commands("run"), 4)


@pytest.mark.sweep
def test_a_disk_that_is_full_after_fifty_sizes_is_told_and_the_run_continues(commands):
    fills(commands("run"), 50)
