"""The cards that quantize the layers of a model together: their shares of the work, and messages.

They share a layer's work, not its arithmetic, so that every bit is that of one process:

    sequence i      runs on card i % N, which alone keeps its hidden states
    group j         of linears that share an input is quantized by card j % N, or by the card that
                    `owners` names: it gets every sequence's input of the group, in sample order,
                    and adds them up as one process does
    the rest        is done by every card: smoothing, the canary, and the layer from all groups'
                    results

One card is a team too: it does everything, and nothing is sent. Only values go between cards, in
JSON and as raw bytes. How many tokens of a sequence reach a group is known to the card that ran it
alone, since routers choose, so cards tell each other first.

Tensors of a device go from card to card by torch's own backend of that device, NCCL of CUDA, and
those in host memory by gloo, in one process group: `cpu:gloo,cuda:nccl`. Where torch has none for
the device its tensors go through host memory. A backend such as NCCL matches sends and receives by
their order, and lets neither overtake the other. So `Team.gather` has one order of all transfers,
in which every card takes its turn.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from quantflow.core.device import HOST, Device, fetched
from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.distributed.launch import (
    LOST,
    STORE,
    launched_folder,
    launched_rank,
    store_address,
)
from quantflow.distributed.presence import await_all, watched
from quantflow.errors import ResourceError, first_line

# Time in which all cards have to be there. Machines of a cluster import torch at their own pace.
MEETING = timedelta(minutes=5)
# Cards wait for each other's arithmetic. A card that dies breaks its connections at once, and one
# that is silent is named by distributed/presence.py.
PATIENCE = timedelta(days=1)
GRACE = 3.0  # seconds in which torchrun ends the others of one that failed; it looks twice a second
HOST_BACKEND = "gloo"  # torch's backend of tensors in host memory

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Team:
    """One card's place among them, and its messages to the others.

    Attributes:
        rank, world: number of the card, and of all cards.
        group: torch's process group of all of them; None where there is one.
        owners: number of a group of linears -> number of its card; empty where the cards take
            turns.
        device: device of this card's tensors.
        direct: the group has a backend of the device, so that its tensors do not go through host
            memory.
    """

    rank: int = 0
    world: int = 1
    group: Any = None
    owners: Sequence[int] = ()
    device: Device = HOST
    direct: bool = True

    def owner(self, number: int) -> int:
        """The number of the card that quantizes a group of linears."""
        return self.owners[number] if self.owners else number % self.world

    def owns(self, number: int) -> bool:
        """Whether a group of linears is this card's to quantize."""
        return self.owner(number) == self.rank

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """The sequences that this card runs."""
        return items[self.rank :: self.world]

    def gather(
        self,
        inputs: dict[int, Tensor],
        features: Mapping[int, int],
        *,
        add: Callable[[int, Tensor], None],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Add up the inputs of this card's groups over the sequences that the cards have just run.

        The cards take turns, in order: in the turn of a card the others get its sequence's inputs,
        and everybody adds up its own groups' inputs of that sequence. Beside its own inputs one of
        another card's is in memory at a time.

        Args:
            inputs: group -> its input of this card's sequence, [..., K] on the device; emptied.
                A group that no token of the sequence reached is not there; nothing is where the
                card ran none.
            features: group -> K, of every group that somebody adds up.
            add: receiver of a group and its input of the next sequence, on the device.
            dtype: dtype of the inputs.
        """
        rows = [
            inputs[number].numel() // width if number in inputs else 0
            for number, width in features.items()
        ]
        sends: list[Any] = []
        for rank, of_groups in enumerate(self.exchange(rows)):
            reached = {
                number: count for number, count in zip(features, of_groups, strict=True) if count
            }
            if rank == self.rank:  # send first: the others wait for it
                sends = [
                    self._post(inputs.pop(number), number)
                    for number in reached
                    if not self.owns(number)
                ]
            for number in filter(self.owns, reached):
                if rank == self.rank:
                    add(number, inputs.pop(number))
                else:
                    shape = (1, reached[number], features[number])
                    add(number, self._receive(shape, rank, number, dtype=dtype))
        for send in sends:
            with connected():
                send.wait()

    def broadcast(
        self, tensors: Mapping[str, Tensor], about: Any, *, number: int, device: Device = HOST
    ) -> tuple[dict[str, Tensor], Any]:
        """The tensors and the JSON of a group's owner, on every card.

        Args:
            tensors: name -> tensor; read on the owner alone.
            about: JSON that belongs to them, read on the owner alone.
            number: number of the group.
            device: device of the tensors here and there, the team's or host memory.
        """
        if self.world == 1:
            return dict(tensors), about
        if not (device.is_host or self.direct):
            received, about = self.broadcast(fetched(tensors, device), about, number=number)
            return {name: device.put(tensor) for name, tensor in received.items()}, about
        owner = self.owner(number)
        mine = self.owns(number)
        specs = [
            [name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()
        ]
        text = bytearray(json.dumps([specs, about]).encode()) if mine else bytearray()
        size = self._from(owner, torch.tensor([len(text)]))
        head = self._from(
            owner,
            torch.frombuffer(text, dtype=torch.uint8)
            if mine
            else torch.empty(int(size), dtype=torch.uint8),
        )
        specs, about = json.loads(head.numpy().tobytes())
        received = {}
        for name, dtype, shape in specs:
            tensor = (
                tensors[name].contiguous()
                if mine
                else torch.empty(shape, dtype=DTYPES[dtype], device=device.kind)
            )
            self._from(owner, tensor.reshape(-1).view(torch.uint8))
            received[name] = tensor
        return received, about

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every card, in the order of the cards; each has as many."""
        if self.world == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64)
        of_cards = [torch.empty_like(own) for _ in range(self.world)]
        with connected():
            distributed.all_gather(of_cards, own, group=self.group)
        return [card.tolist() for card in of_cards]

    def span(self, value: int) -> tuple[int, int]:
        """The least and the greatest of the cards' values."""
        if self.world == 1:
            return value, value
        both = torch.tensor([value, -value])
        with connected():
            distributed.all_reduce(both, op=distributed.ReduceOp.MIN, group=self.group)
        return int(both[0]), -int(both[1])

    def all(self, holds: bool) -> bool:
        """Whether something holds on every card."""
        return self.span(int(holds))[0] == 1

    def wait(self) -> None:
        """Wait until every card has come here."""
        self.span(0)

    def _post(self, tensor: Tensor, number: int) -> Any:
        """Send a group's input to its owner; wait for the result before the tensor changes."""
        sent = tensor if self.direct else self.device.fetch(tensor)
        sent = sent.reshape(1, -1, sent.shape[-1]).contiguous()  # [1, S, K]
        with connected():
            return distributed.isend(sent, self.owner(number), group=self.group, tag=number)

    def _receive(
        self, shape: tuple[int, ...], rank: int, number: int, *, dtype: torch.dtype
    ) -> Tensor:
        """A group's input from the card that ran the sequence, on the device."""
        tensor = torch.empty(shape, dtype=dtype, device=(self.device if self.direct else HOST).kind)
        with connected():
            distributed.recv(tensor, rank, group=self.group, tag=number)
        return self.device.put(tensor)

    def _from(self, owner: int, tensor: Tensor) -> Tensor:
        with connected():
            distributed.broadcast(tensor, owner, group=self.group)
        return tensor


ALONE = Team()


def backend_of(device: Device) -> str | None:
    """Torch's backend between cards for a device's tensors, `nccl` of CUDA; None without one."""
    name = distributed.Backend.default_device_backend_map.get(device.kind.type)
    return name if name is not None and distributed.is_backend_available(name) else None


def meet(timeout: timedelta, device: Device = HOST) -> AbstractContextManager[None]:
    """Make torch's process group of the ranks, this process among them.

    They meet in their private folder, else where torchrun says.

    Args:
        timeout: time in which all have to be there.
        device: device whose tensors they exchange, beside those of host memory, where torch has a
            backend for it.

    Returns:
        A context in which a rank that is silent is named, and ends this one.

    Raises:
        ResourceError: a rank has not come in time.
    """
    own = backend_of(device)
    backend = HOST_BACKEND
    if not device.is_host and own is not None:
        backend = f"cpu:{HOST_BACKEND},{device.kind.type}:{own}"
    rank, world = launched_rank() or (0, 1)
    store = _store(rank, world, timeout)
    await_all(store, rank=rank, world=world, timeout=timeout)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout
    )
    return watched(store, rank=rank, world=world)


def _store(rank: int, world: int, timeout: timedelta) -> Any:
    """Torch's store of the ranks: a file of their private folder, else that of MASTER_ADDR.

    torchrun serves the latter itself. Without it, as under Slurm, the first rank does.
    """
    folder = launched_folder()
    if folder is not None:
        # FileStore is in torch's docs, not in its type hints.
        return distributed.FileStore(str(folder / STORE), world)  # type: ignore[attr-defined]
    address, port, served = store_address()
    try:
        return distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,  # await_all names who is missing
            multi_tenant=True,
        )
    except distributed.DistError as error:
        raise ResourceError(
            f"rank {rank} of {world}: no store at {address}:{port}, where rank 0 should be "
            f"({first_line(error)})",
            "look whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are its machine's; "
            "the same command continues",
        ) from error


@contextmanager
def together(*, rank: int, world: int, device: Device = HOST) -> Iterator[Team]:
    """Yield the team of the processes that were started together, this one among them.

    After an error nothing is closed: the others learn of it when this process ends, after it has
    reported its error.

    Args:
        rank: number of this process.
        world: number of processes.
        device: device of this one's tensors.
    """
    with device.current(), meet(MEETING, device):
        group = distributed.new_group(timeout=PATIENCE)
        direct = backend_of(device) is not None
        yield Team(rank=rank, world=world, group=group, device=device, direct=direct)
        distributed.destroy_process_group()


@contextmanager
def connected(verb: str = "quantize") -> Iterator[None]:
    """Turn a broken connection into an error that names it.

    Args:
        verb: verb of the command line.

    Raises:
        ResourceError: another card ended, and nobody ended this one because of it.
    """
    try:
        yield
    except RuntimeError as error:
        # torchrun names the rank that fails first: let it end this one
        if threading.current_thread() is threading.main_thread():  # others cannot
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)
        message = " ".join(str(error).split())
        raise ResourceError(
            f"{verb}: {LOST}: {message}", "look what it said; the same command continues"
        ) from error
