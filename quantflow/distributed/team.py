"""The cards that quantize the layers of a model together: who does what, and how they tell each other.

They share a layer's work, not its arithmetic, so that every bit is that of one process:

    sequence i      runs on card i % N, which alone keeps its hidden states
    group j         of the linears that share an input is quantized by card j % N: it gets every sequence's input of the
                    group, in sample order, and adds them up as one process does
    the rest        every card does: smoothing, the canary, and the layer from what all groups became

One card is a team too: it does everything, and nothing is sent. Only values go between cards, in JSON and as raw bytes.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.distributed.launch import LOST, STORE, launched_folder, launched_rank
from quantflow.errors import ResourceError

MEETING = timedelta(seconds=60)  # in which all cards have to be there
PATIENCE = timedelta(days=1)  # cards wait for each other's arithmetic; one that dies breaks its connections at once
GRACE = 3.0  # seconds in which torchrun ends the others of one that failed; it looks twice a second

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Team:
    """One card's place among them, and what it says to the others.

    Attributes:
        rank, world: which card of how many.
        group: torch's process group of all of them; None where there is one.
    """

    rank: int = 0
    world: int = 1
    group: Any = None

    def owns(self, number: int) -> bool:
        """Return whether a group of linears is this card's to quantize."""
        return number % self.world == self.rank

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return which of all sequences this card runs."""
        return items[self.rank :: self.world]

    def gather(
        self,
        inputs: dict[int, Tensor],
        features: Mapping[int, int],
        *,
        tokens: Sequence[int],
        add: Callable[[int, Tensor], None],
    ) -> None:
        """Add up the inputs of this card's groups, of the sequences that the cards have just run, in their order.

        Beside its own inputs one of another card's is in memory at a time.

        Args:
            inputs: group -> its input of this card's sequence, [1, S, K] float32; emptied. Nothing where it ran none.
            features: group -> K, of every group that somebody adds up.
            tokens: S of each card's sequence; the cards after these ran none.
            add: takes a group and its input of the next sequence.
        """
        sends = [self._post(inputs.pop(number).contiguous(), number) for number in list(inputs) if not self.owns(number)]
        for rank, length in enumerate(tokens):
            for number in filter(self.owns, features):
                if rank == self.rank:
                    if number in inputs:  # no token of the sequence may have reached an expert
                        add(number, inputs.pop(number))
                else:
                    add(number, self._receive(torch.empty(1, length, features[number]), rank, number))
        for send in sends:
            with connected():
                send.wait()

    def broadcast(self, tensors: Mapping[str, Tensor], about: Any, *, number: int) -> tuple[dict[str, Tensor], Any]:
        """Return what the owner of a group gives, on every card.

        Args:
            tensors: name -> tensor; read on the owner alone.
            about: JSON that belongs to them; likewise.
            number: the group.
        """
        if self.world == 1:
            return dict(tensors), about
        owner, mine = number % self.world, self.owns(number)
        specs = [[name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
        text = bytearray(json.dumps([specs, about]).encode()) if mine else bytearray()
        size = self._from(owner, torch.tensor([len(text)]))
        head = self._from(
            owner, torch.frombuffer(text, dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
        )
        specs, about = json.loads(head.numpy().tobytes())
        found = {}
        for name, dtype, shape in specs:
            tensor = tensors[name].contiguous() if mine else torch.empty(shape, dtype=DTYPES[dtype])
            self._from(owner, tensor.reshape(-1).view(torch.uint8))
            found[name] = tensor
        return found, about

    def span(self, value: int) -> tuple[int, int]:
        """Return the least and the greatest of the cards' values."""
        if self.world == 1:
            return value, value
        both = torch.tensor([value, -value])
        with connected():
            distributed.all_reduce(both, op=distributed.ReduceOp.MIN, group=self.group)
        return int(both[0]), -int(both[1])

    def all(self, holds: bool) -> bool:
        """Return whether something holds on every card."""
        return self.span(int(holds))[0] == 1

    def wait(self) -> None:
        """Return when every card has come here."""
        self.span(0)

    def _post(self, tensor: Tensor, number: int) -> Any:
        with connected():
            return distributed.isend(tensor, number % self.world, group=self.group, tag=number)

    def _receive(self, tensor: Tensor, rank: int, number: int) -> Tensor:
        with connected():
            distributed.recv(tensor, rank, group=self.group, tag=number)
        return tensor

    def _from(self, owner: int, tensor: Tensor) -> Tensor:
        with connected():
            distributed.broadcast(tensor, owner, group=self.group)
        return tensor


ALONE = Team()


def meet(timeout: timedelta) -> None:
    """Make torch's process group of the ranks, this process among them: in their private folder, else where torchrun says."""
    folder, launched = launched_folder(), launched_rank()
    if folder is None or launched is None:
        distributed.init_process_group("gloo", timeout=timeout)
        return
    rank, world = launched
    store = distributed.FileStore(str(folder / STORE), world)  # type: ignore[attr-defined]  # torch names it in its docs alone
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


@contextmanager
def together(*, rank: int, world: int) -> Iterator[Team]:
    """Yield the team of the processes that were started together, this one among them.

    After an error nothing is closed: the others learn of it when this process ends, after it has said what was wrong.
    """
    meet(MEETING)
    yield Team(rank=rank, world=world, group=distributed.new_group(timeout=PATIENCE))
    distributed.destroy_process_group()


@contextmanager
def connected(verb: str = "quantize") -> Iterator[None]:
    """Give a connection that breaks its name.

    Args:
        verb: what runs.

    Raises:
        ResourceError: another card ended, and nobody ended this one because of it.
    """
    try:
        yield
    except RuntimeError as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun names the rank that fails first: let it end this one
        time.sleep(GRACE)
        told = " ".join(str(error).split())
        raise ResourceError(f"{verb}: {LOST}: {told}", "look what it said; the same command continues") from error
