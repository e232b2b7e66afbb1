"""`generate`, `bench`, `serve`, the tasks of `validate` by processes that share a model.

A job that cannot be shared is refused before anything is started. Rank 0 reads the prompts, drives
the others (quantflow.runtime.ranks.leader) and writes to the same stdout as the process that
started it. A rank that ends takes the others with it, and the error names it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed

from quantflow import cpu_threads
from quantflow.distributed.binding import cores_of
from quantflow.distributed.communicator import Communicator
from quantflow.distributed.launch import (
    die_with_parent,
    launch,
    launched_folder,
    launched_rank,
    require_trust,
)
from quantflow.distributed.shared_memory import nearest
from quantflow.distributed.team import Team, connected, together
from quantflow.errors import UnsupportedError, UsageError
from quantflow.progress import Progress
from quantflow.runtime import lean
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import Loaded
from quantflow.runtime.ranks.leader import Leader, follow
from quantflow.runtime.ranks.tensor_parallel import spans_of
from quantflow.runtime.step_trace import StepTrace

Result = TypeVar("Result")


class RankedJob(Protocol):
    """A job that several ranks can do: a record that names an artifact, and how it is run."""

    def run(self, progress: Progress) -> object:
        """Do it, in each rank."""

    @property
    def artifact(self) -> Path:
        """The artifact's folder."""
        ...

    @property
    def backend(self) -> str:
        """Backend of the linears, as for `open_artifact`."""
        ...

    @property
    def dtype(self) -> str:
        """A dtype of torch, by its name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """A `Communicator` over torch's process group.

    Attributes:
        verb: verb that runs, for messages.
        team: rank of this process, and the group.
    """

    verb: str
    team: Team

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.team.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.team.world

    def gather(self, part: Tensor) -> Tensor:
        """See `Communicator.gather`."""
        parts = part.new_empty(self.world, *part.shape)
        with connected(self.verb):
            distributed.all_gather(list(parts.unbind()), part, group=self.team.group)
        return parts

    def broadcast(self, numbers: Tensor) -> None:
        """See `Communicator.broadcast`."""
        with connected(self.verb):
            distributed.broadcast(numbers, 0, group=self.team.group)


def world_of(verb: str, ranks: int, *, trusted: bool, without: Mapping[str, bool]) -> int:
    """The number of processes that share the model: as asked for, or as torchrun started them.

    Args:
        verb: verb, for messages.
        ranks: number that was asked for.
        trusted: whether the ranks may meet at the address of somebody's torchrun.
        without: feature that several processes do not have -> whether it was asked for.

    Raises:
        UsageError: a number below 1, or not torchrun's; several processes with one of `without`.
    """
    launched = launched_rank()
    require_trust(verb, trusted=trusted)
    if ranks < 1:
        raise UsageError(f"{verb}: ranks={ranks}", "use 1 or more")
    if launched is not None and ranks not in (1, launched[1]):
        raise UsageError(
            f"{verb}: ranks={ranks}, torchrun started {launched[1]}",
            "leave --ranks out under torchrun",
        )
    world = ranks if launched is None else launched[1]
    flags = [name for name, asked in without.items() if asked]
    if world > 1 and flags:
        raise UsageError(
            f"{verb}: {world} ranks with {flags[0]}",
            "leave one of them out: ranks share the lean decoder, on cpu",
        )
    return world


def starts(world: int) -> bool:
    """Whether this process is to start the ranks, and is none of them."""
    return world > 1 and launched_rank() is None


def start(
    verb: str,
    job: RankedJob,
    *,
    world: int,
    progress: Progress,
    stream: Callable[[str], None] | None = None,
    bind: bool = False,
    serving: bool = False,
) -> dict[str, Any] | None:
    """Do a job in several ranks; its result.

    Headers are checked first, so that no rank starts with an artifact that it cannot run.

    Args:
        verb: verb, for messages.
        job: job of every rank.
        world: number of ranks.
        progress: progress of the ranks.
        stream: takes the text that rank 0 writes, piece by piece.
        bind: each rank keeps to cores of its own (quantflow/distributed/binding.py).
        serving: see `launch`.

    Raises:
        UnsupportedError: an artifact that the lean decoder does not run.
        UsageError: one that cannot be cut so.
        QuantflowError: a rank failed.
    """
    check(verb, job, world=world)
    threads = max(1, cpu_threads.tell_torch() // world)
    result: dict[str, Any] | None = launch(
        verb,
        job,
        ranks=world,
        progress=progress,
        stream=stream,
        threads=threads,
        cores=cores_of(world) if bind else None,
        serving=serving,
        again="run the same command again",
    )
    return result


def check(verb: str, job: RankedJob, *, world: int) -> None:
    """Refuse an artifact that ranks cannot share, by the headers of its files.

    Args:
        verb: verb, for messages.
        job: job that every rank would do.
        world: number of ranks.

    Raises:
        UnsupportedError: an artifact that the lean decoder does not run.
        UsageError: one that cannot be cut so.
    """
    opened = open_folder(
        job.artifact, backend=job.backend, dtype=getattr(torch, job.dtype), verify=False
    )
    reason = lean.why_not(opened)
    if reason is not None:
        raise UnsupportedError(
            f"{verb}: {world} ranks share the lean decoder: {reason}", "leave --ranks out"
        )
    spans_of(opened, world)


@contextmanager
def bound(verb: str, *, asked: bool) -> Iterator[None]:
    """Keep a process of its own to the cores of one NUMA node until the block ends.

    It has a thread for each core. Ranks that `start` started are bound already.

    Args:
        verb: verb, for messages.
        asked: whether anything is done.

    Raises:
        UsageError: somebody's torchrun started this process, which alone knows what else runs on
            this machine.
    """
    if not asked or launched_folder() is not None:
        yield
        return
    if launched_rank() is not None:
        raise UsageError(
            f"{verb}: bind under torchrun", "leave --bind out, and bind the processes from outside"
        )
    (cores,) = cores_of(1)
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


@contextmanager
def joined(verb: str, world: int) -> Iterator[Communicator | None]:
    """Yield the communicator to the ranks that torchrun started; None for a process of its own."""
    launched = launched_rank()
    if launched is None or world == 1:
        yield None
        return
    die_with_parent()
    with together(rank=launched[0], world=world) as team:
        yield nearest(verb, Gloo(verb=verb, team=team))


def drive(
    loaded: Loaded,
    communicator: Communicator | None,
    work: Callable[[Loaded], Result],
    *,
    trace: StepTrace | None = None,
) -> Result | None:
    """Run `work` on rank 0, or alone; the other ranks follow until rank 0 is done.

    Args:
        loaded: loaded artifact with this rank's part of the decoder.
        communicator: communicator of `joined`.
        work: function that calls the decoder at will.
        trace: trace of the steps that this rank follows; rank 0 has none here.

    Returns:
        The result of `work`; None on the other ranks.
    """
    if communicator is None:
        return work(loaded)
    decoder: Any = loaded.decoder
    assert isinstance(decoder, LeanDecoder)  # `check` has refused others
    if communicator.rank:
        follow(decoder, communicator, trace=trace)
        return None
    leader = Leader(decoder, communicator)
    result = work(replace(loaded, decoder=leader))
    leader.end()
    return result
