"""Threads of this process: how many there are, and how long one waits for others before it sleeps.

Threads that compute one token wait for each other at the end of every loop, some hundred times a
token. Torch's libgomp lets a thread that waits read memory in a circle for milliseconds. On cores
that other programs use too, it reads away the time of the very thread that it waits for: a token
takes a hundred times as long. So a thread of torch reads for some microseconds here, longer than a
loop's threads are usually apart, and sleeps then. Our own compiled loops have a team that waits for
nobody who has not begun (quantflow/backends/team.c).

libgomp reads the environment when torch is imported. A process that imports torch before quantflow
keeps libgomp's own patience, unless its environment says something.
"""

import math
import os

from quantflow import control_group

# Reads before a thread sleeps, some hundred microseconds. benchmarks/busy.py compares.
READS = "10000"
_LIBGOMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # what decides how long a thread waits

_given: int | None = None


def sleep_soon() -> None:
    """Make threads that wait sleep after a short time, unless the environment decides it."""
    if not any(name in os.environ for name in _LIBGOMP):
        os.environ["GOMP_SPINCOUNT"] = READS


def usable_cores() -> int:
    """Number of processors that this process may use at once.

    That is the number that `take` was given; else the processors that it may run on, or the quota
    of its control group where that is less. A part of a core counts as one: two threads use a quota
    of 1.5 cores up, one would leave a third of it.
    """
    if _given is not None:
        return _given
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = control_group.cpu_quota()
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def take(count: int) -> None:
    """Let this process compute with `count` threads, 1 or more, from now on."""
    global _given
    _given = count


def tell_torch() -> int:
    """Tell torch the number of threads where its own is another; the number.

    What OMP_NUM_THREADS or the caller gave to torch stays, but a container's quota is unknown to
    both: more threads than it allows would stop in the middle of a loop, with all that wait.
    """
    import torch  # not before the environment is set

    count, own = usable_cores(), torch.get_num_threads()
    if _given is not None or (own > count and "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(count)
    return torch.get_num_threads()


def line() -> str:
    """The line that says at a program's start with how many threads it computes."""
    return f"threads: {tell_torch()} of {usable_cores()} usable cores"
