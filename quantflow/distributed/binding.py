"""The cores of each of several processes: its own, of one NUMA node where they fit.

A process gets one thread of each core. Linux says where cores are (/sys/devices/system). Cores that
this process may not use, because of taskset or a container, are left out. The memory of a process
that keeps to the cores of one node is that node's: Linux puts a page where it is touched first.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from quantflow.errors import UnsupportedError, UsageError

_SYSTEM = Path("/sys/devices/system")


def cores_of(
    ranks: int, *, usable: Collection[int] | None = None, system: Path = _SYSTEM
) -> list[frozenset[int]]:
    """The processors of each rank: an even share of its node, for one rank the largest node.

    They are one thread of each core, or all threads where there are more ranks than cores.

    Args:
        ranks: number of ranks.
        usable: numbers of processors; None takes those of this process.
        system: folder in which Linux lists the threads of each core, and the cores of each node.

    Raises:
        UnsupportedError: a system without such sets of processors.
        UsageError: fewer processors than ranks.
    """
    if usable is None:
        if not hasattr(os, "sched_getaffinity"):
            raise UnsupportedError(
                "bind: this system binds no process to cores", "leave --bind out"
            )
        usable = os.sched_getaffinity(0)
    cores = _first_threads(usable, system)
    nodes = sorted(
        _nodes(cores if len(cores) >= ranks else sorted(usable), system), key=len, reverse=True
    )[:ranks]
    cores_of_ranks: list[frozenset[int]] = []
    for index, node in enumerate(nodes):
        share = ranks * (index + 1) // len(nodes) - ranks * index // len(nodes)
        if share > len(node):
            cause = (
                f"bind: {share} ranks on a NUMA node of {len(node)} processors, {ranks} ranks in "
                "all"
            )
            raise UsageError(cause, "use fewer ranks, or no --bind")
        cores_of_ranks += [
            frozenset(node[len(node) * i // share : len(node) * (i + 1) // share])
            for i in range(share)
        ]
    return cores_of_ranks


def _first_threads(usable: Collection[int], system: Path) -> list[int]:
    """The first usable thread of each core."""
    first = []
    for processor in sorted(usable):
        siblings = _numbers_in_file(
            system / f"cpu/cpu{processor}/topology/thread_siblings_list"
        ) or {processor}
        if processor == min(siblings & set(usable), default=processor):
            first.append(processor)
    return first


def _nodes(processors: Sequence[int], system: Path) -> list[list[int]]:
    """The processors of each NUMA node; all are of one where nothing says otherwise."""
    nodes = [_numbers_in_file(path) for path in sorted(system.glob("node/node*/cpulist"))]
    found = [
        inside
        for node in nodes
        if (inside := [processor for processor in processors if processor in node])
    ]
    return found if sum(map(len, found)) == len(processors) else [list(processors)]


def _numbers_in_file(path: Path) -> set[int]:
    """The numbers in a file such as `0-3,8`; none where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
