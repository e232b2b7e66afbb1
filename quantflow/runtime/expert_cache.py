"""Experts of a mixture that stays on disk: those that routers chose last are kept in memory.

A token goes to a few experts of each layer. An expert that is not in memory when it is chosen is
read then, all missing ones of a layer at once by several threads. The one that was chosen least
recently makes room for it (LRU), over all layers together.
"""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantflow import process_memory
from quantflow.errors import ResourceError
from quantflow.units import parse_size
from quantflow.units import size as text_of

HOLES = 64 << 20  # bytes that are read before the holes of the heap go back to the system
READERS = 8  # threads that read at once; most of their time is the disk's
DEFAULT_SHARE = 10  # without --max-memory, a tenth of the machine's memory

Multiply = Callable[[Tensor], Tensor]  # [..., I] -> [..., rows]


class ExpertKey(NamedTuple):
    """The name of an expert.

    Attributes:
        layer: name of the module that holds the experts of its layer.
        number: its number among them.
    """

    layer: str
    number: int


class CachedLinear(nn.Module):
    """A linear of an expert; it has its weight between `read` and `forget`."""

    def __init__(self, make: Callable[[], Multiply]) -> None:
        """Begin without the weight.

        Args:
            make: function that reads and prepares the weight; called in any thread.
        """
        super().__init__()
        self._make = make
        self._multiply: Multiply | None = None

    def read(self) -> None:
        """Read and prepare the weight."""
        self._multiply = self._make()

    def forget(self) -> None:
        """Let go of the weight."""
        self._multiply = None

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weight in memory."""
        return tensor_bytes(self._multiply)

    def forward(self, x: Tensor) -> Tensor:
        """The product x @ W.T + bias, [..., O] of x [..., I]."""
        assert self._multiply is not None  # the cache fetched it
        return self._multiply(x)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedExpert:
    """An expert whose weights are in memory at times.

    Attributes:
        module: its module, whose linears are `linears`.
        linears: its linears.
        stored: bytes of its weights on disk.
        kind: schemes and shapes of its linears; experts of one kind take equally much memory.
    """

    module: nn.Module
    linears: tuple[CachedLinear, ...]
    stored: int
    kind: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes in memory; at least those on disk, since a backend may hide its tensors."""
        return max(self.stored, sum(linear.nbytes for linear in self.linears))

    def forget(self) -> None:
        """Let go of its weights."""
        for linear in self.linears:
            linear.forget()


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The bytes that this process may have.

    Attributes:
        nbytes: their number.
        words: what limits them.
        asked: whether somebody asked for this limit.
    """

    nbytes: int
    words: str
    asked: bool

    @classmethod
    def of(cls, max_memory: str | None) -> "MemoryLimit":
        """The limit of `--max-memory`, else a tenth of the machine's memory.

        Raises:
            UsageError: no size.
        """
        if max_memory is None:
            tenth = process_memory.total_bytes() // DEFAULT_SHARE
            return cls(nbytes=tenth, words="a tenth of the memory", asked=False)
        words = f"--max-memory {max_memory}"
        return cls(nbytes=parse_size(max_memory), words=words, asked=True)

    def left(self, held: int, *, beside: int) -> int:
        """The bytes that experts may have: what the limit, and the machine, leave of now.

        Args:
            held: bytes of experts that are in memory.
            beside: bytes that will be needed beside experts and what is resident.
        """
        resident = process_memory.usage().resident
        most = min(self.nbytes, resident + process_memory.available_bytes())
        return most - (resident - held) - beside

    def require(self, left: int, needed: int, what: str) -> None:
        """Refuse a limit that somebody asked for and that leaves too little.

        Args:
            left: bytes that are left; negative where others need more than the limit.
            needed: bytes that are needed of them.
            what: words for what needs them.

        Raises:
            ResourceError: with both numbers.
        """
        if self.asked and left < needed:
            others = self.nbytes - left
            raise ResourceError(
                f"generate: {what} need {needed} bytes ({text_of(needed)}) beside {others} "
                f"({text_of(others)}) of everything else, {self.words} leaves {max(0, left)}",
                f"give --max-memory {-(-(others + needed) // 10**6)}MB or more",
            )


class ExpertCache:
    """The experts that are in memory, the least recently chosen first; one thread asks for them.

    Attributes:
        hits, misses: numbers of chosen experts that were in memory, and that were read.
        bytes_read: bytes of those that were read, as stored.
        budget: bytes that experts may have in memory.
    """

    def __init__(
        self,
        experts: Mapping[ExpertKey, CachedExpert],
        *,
        budget: int,
        left: Callable[[int], int],
        chosen: int,
    ) -> None:
        """Begin with no expert in memory.

        One of each kind is read, to know what it takes.

        Args:
            experts: every expert, in the order of the layers.
            budget: bytes that experts may have in memory in the first forward.
            left: function from the bytes of experts in memory to the bytes that they may have;
                called when a later forward begins, since what else is in memory grows with the
                text.
            chosen: number of experts of a layer that a token goes to.

        Raises:
            InputError, IntegrityError: an expert holds what it must not.
        """
        self.hits = self.misses = self.bytes_read = 0
        self._experts, self._left = experts, left
        self._read_since = 0  # bytes since holes were given back
        self._began = False
        self._held: OrderedDict[ExpertKey, int] = OrderedDict()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="experts")
        self._first = next(iter(experts)).layer
        self._size_of_kind: dict[Hashable, int] = {}
        for expert in experts.values():
            if expert.kind not in self._size_of_kind:
                for linear in expert.linears:
                    linear.read()
                self._size_of_kind[expert.kind] = expert.nbytes
                expert.forget()
        # bytes of the experts of one token in one layer: without them nothing runs
        self.least = chosen * max(self._size_of_kind.values())
        self.budget = budget

    def summary(self) -> dict[str, Any]:
        """What was counted, as plain data; bytes, and the share of hits (None without a choice)."""
        asked = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / asked if asked else None,
            "bytes_read": self.bytes_read,
            "expert_bytes": sum(self._held.values()),
            "most_expert_bytes": max(self.budget, self.least),
        }

    def fetch(self, layer: str, numbers: Sequence[int]) -> Iterator[nn.Module]:
        """Modules of chosen experts in the order of `numbers`, each with its weights.

        Where not all of them fit at once, as those of a long prompt, a module may lose its weights
        when the next is asked for.

        Args:
            layer: name of the module that holds the layer's experts.
            numbers: numbers of the experts, each once.
        """
        if layer == self._first:
            self._give_back()
            if self._began:
                self.budget = self._left(sum(self._held.values()))
            self._began = True
        waiting = deque(ExpertKey(layer, number) for number in numbers)
        while waiting:
            group = self._group(waiting)
            missing = [key for key in group if key not in self._held]
            self.hits += len(group) - len(missing)
            self.misses += len(missing)
            self._make_room(group, sum(map(self._size, missing)))
            if self._read_since > HOLES:
                self._give_back()
            reading = {
                key: [self._pool.submit(linear.read) for linear in self._experts[key].linears]
                for key in missing
            }
            for key in group:
                for future in reading.get(key, ()):
                    future.result()
                self._use(key)
                yield self._experts[key].module

    def _give_back(self) -> None:
        """Return to the system what preparing weights has left between them in the heap."""
        process_memory.give_back_holes()
        self._read_since = 0

    def _size(self, key: ExpertKey) -> int:
        """Bytes of an expert in memory."""
        return self._held.get(key) or self._size_of_kind[self._experts[key].kind]

    def _group(self, waiting: deque[ExpertKey]) -> list[ExpertKey]:
        """Take the next experts that fit into memory together, one at least."""
        group = [waiting.popleft()]
        room = max(self.budget, self.least) - self._size(group[0])
        while waiting and self._size(waiting[0]) <= room:
            room -= self._size(waiting[0])
            group.append(waiting.popleft())
        return group

    def _make_room(self, group: Sequence[ExpertKey], needed: int) -> None:
        """Let go of experts outside a group, the least recently chosen first."""
        held, most = sum(self._held.values()), max(self.budget, self.least)
        for key in [key for key in self._held if key not in set(group)]:
            if held + needed <= most:
                return
            held -= self._held.pop(key)
            self._experts[key].forget()

    def _use(self, key: ExpertKey) -> None:
        """Note that an expert was chosen, and that it is in memory."""
        if key in self._held:
            self._held.move_to_end(key)
            return
        self.bytes_read += self._experts[key].stored
        self._read_since += self._experts[key].stored
        self._held[key] = self._experts[key].nbytes


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors that a value holds: in records, containers and modules, each once."""
    storages: dict[int, int] = {}
    _collect(value, storages)
    return sum(storages.values())


def _collect(value: Any, storages: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            storage: torch.UntypedStorage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, nn.Module):
        _collect(vars(value), storages)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _collect([getattr(value, field.name) for field in dataclasses.fields(value)], storages)
    elif isinstance(value, Mapping):
        _collect(list(value.values()), storages)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, storages)
