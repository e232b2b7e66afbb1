"""The leader of several processes that share a model: the others repeat its calls.

Prompts and the choice of tokens live in rank 0 alone. It holds a `Leader`, which is a `Decoder`
like any other, so that every way to generate runs as it does in one process. The other ranks
`follow`: they hear every call of rank 0's own decoder, repeat it, and drop its result.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.distributed.communicator import Communicator
from quantflow.runtime.kv_cache import KVCache
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.step_trace import StepTrace

_CALLS = (
    *("end", "begin", "forward", "forward_hidden", "keep", "crop"),
    *("begin_blocks", "forward_rows"),
)
_WORDS = 64  # words of a message; a longer call has a second message


class Leader:
    """A decoder on rank 0 whose calls the other ranks repeat, in `follow`.

    Attributes:
        vocab_size, positions, device: fields of `Decoder`.
        own: rank 0's decoder.
        adapters: names of LoRA adapters; ranks have none.
        stateful, state_bytes: see `LeanDecoder`; ranks share no such model.
    """

    adapters: tuple[str, ...] = ()
    stateful, state_bytes = False, 0

    def __init__(self, own: LeanDecoder, communicator: Communicator) -> None:
        """Speak for all ranks; nothing is said yet."""
        self.vocab_size, self.positions, self.device = own.vocab_size, own.positions, own.device
        self.own, self._communicator = own, communicator

    def begin(self, *, rows: int, capacity: int) -> None:
        """See `Decoder.begin`."""
        self._tell("begin", rows, capacity)
        self.own.begin(rows=rows, capacity=capacity)

    def forward(
        self, input_ids: Tensor, *, padding: Tensor | None = None, last_only: bool = True
    ) -> Tensor:
        """See `Decoder.forward`."""
        self._tell("forward", *input_ids.shape, last_only, input_ids, padding)
        return self.own.forward(input_ids, padding=padding, last_only=last_only)

    def forward_hidden(
        self, input_ids: Tensor, *, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `HiddenDecoder.forward_hidden`."""
        self._tell("forward_hidden", *input_ids.shape, False, input_ids, padding)
        return self.own.forward_hidden(input_ids, padding=padding)

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._tell("keep", rows)
        self.own.keep(rows)

    def crop(self, length: int) -> None:
        """See `Decoder.crop`."""
        self._tell("crop", length)
        self.own.crop(length)

    @property
    def processes(self) -> int:
        """The number of ranks."""
        return self._communicator.world

    @property
    def why_not_invariant(self) -> str | None:
        """See `LeanDecoder`; what lies between the ranks' parts of a sum is put side by side."""
        return self.own.why_not_invariant

    def begin_blocks(
        self, *, blocks: int, columns: int, positions: int, sequences: int = 1
    ) -> KVCache:
        """See `LeanDecoder.begin_blocks`; the rank's own part of the cache."""
        del sequences  # they have no states
        self._tell("begin_blocks", blocks, columns, positions)
        return self.own.begin_blocks(blocks=blocks, columns=columns, positions=positions)

    def forward_rows(
        self,
        input_ids: Tensor,
        *,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        wanted: Tensor,
        slots: Tensor | None = None,
        adapters: Sequence[str | None] = (),
    ) -> Tensor:
        """See `LeanDecoder.forward_rows`; no sequence has an adapter or a state."""
        del slots
        assert not any(adapters)  # `adapters` of this class has none
        self._tell_rows(input_ids, first, start, table, wanted)
        return self.own.forward_rows(
            input_ids, first=first, start=start, table=table, wanted=wanted
        )

    def forward_rows_states(
        self,
        input_ids: Tensor,
        *,
        first: Tensor,
        start: Tensor,
        table: Tensor,
        wanted: Tensor,
        slots: Tensor | None = None,
        adapters: Sequence[str | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `LeanDecoder.forward_rows_states`; every rank has all of the hidden states."""
        del slots
        assert not any(adapters)
        self._tell_rows(input_ids, first, start, table, wanted)
        return self.own.forward_rows_states(
            input_ids, first=first, start=start, table=table, wanted=wanted
        )

    def _tell_rows(
        self, input_ids: Tensor, first: Tensor, start: Tensor, table: Tensor, wanted: Tensor
    ) -> None:
        parts = (input_ids, first, start, table, wanted)
        self._tell("forward_rows", len(input_ids), *table.shape, *parts)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        self._tell("end")

    def _tell(self, call: str, *parts: int | Tensor | None) -> None:
        """Broadcast a call: its number, the number of its words, and the words."""
        flat = [
            torch.tensor([part]) if isinstance(part, int) else part.reshape(-1)
            for part in parts
            if part is not None
        ]
        rest = torch.cat([torch.empty(0, dtype=torch.int64), *flat])
        message = functional.pad(
            torch.cat([torch.tensor([_CALLS.index(call), len(rest)]), rest]), (0, _WORDS)
        )
        self._communicator.broadcast(message[:_WORDS].contiguous())
        if len(rest) > _WORDS - 2:
            self._communicator.broadcast(message[_WORDS : len(rest) + 2].contiguous())


def follow(
    decoder: LeanDecoder, communicator: Communicator, *, trace: StepTrace | None = None
) -> None:
    """Do what rank 0's `Leader` does, until its end.

    Args:
        decoder: decoder of this rank.
        communicator: connection to rank 0.
        trace: trace of the steps of a running batch; None: there is none.
    """
    while True:
        message = torch.empty(_WORDS, dtype=torch.int64)
        communicator.broadcast(message)
        number, length = message[:2].tolist()
        if length > _WORDS - 2:
            remainder = torch.empty(length - (_WORDS - 2), dtype=torch.int64)
            communicator.broadcast(remainder)
            message = torch.cat([message, remainder])
        call, rest = _CALLS[number], message[2 : length + 2]
        if call == "end":
            return
        if call == "begin":
            decoder.begin(rows=int(rest[0]), capacity=int(rest[1]))
        elif call == "keep":
            decoder.keep(rest)
        elif call == "crop":
            decoder.crop(int(rest[0]))
        elif call == "begin_blocks":
            blocks, columns, positions = rest.tolist()
            decoder.begin_blocks(blocks=blocks, columns=columns, positions=positions)
        elif call == "forward_rows":
            tokens, rows, width = rest[:3].tolist()
            lengths = (tokens, rows + 1, rows, rows * width)
            ids, first, start, table, wanted = rest[3:].tensor_split(
                torch.tensor(lengths).cumsum(0)
            )
            step = partial(
                decoder.forward_rows,
                ids,
                first=first,
                start=start,
                table=table.view(rows, width),
                wanted=wanted,
            )
            step() if trace is None else trace.step(step)
        else:
            rows, columns, last_only = rest[:3].tolist()
            ids, padding = rest[3 : 3 + rows * columns], rest[3 + rows * columns :]
            options: Any = {"padding": padding if len(padding) else None}
            if call == "forward":
                decoder.forward(ids.view(rows, columns), last_only=bool(last_only), **options)
            else:
                decoder.forward_hidden(ids.view(rows, columns), **options)
