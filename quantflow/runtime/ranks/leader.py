"""The leader of several processes that share a model: the others repeat its calls.

Prompts and the choice of tokens live in rank 0 alone. It holds a `Leader`, which is a `Decoder`
like any other, so that every way to generate runs as it does in one process. The other ranks
`follow`: they hear every call of rank 0's own decoder, repeat it, and drop its result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.distributed.communicator import Communicator
from quantflow.runtime.decoder import HiddenDecoder

_CALLS = ("end", "begin", "forward", "forward_hidden", "keep", "crop")
_WORDS = 64  # words of a message; a longer call has a second message


class Leader:
    """A decoder on rank 0 whose calls the other ranks repeat, in `follow`.

    Attributes:
        vocab_size, positions, device: fields of `Decoder`.
        own: rank 0's decoder.
    """

    def __init__(self, own: HiddenDecoder, communicator: Communicator) -> None:
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


def follow(decoder: HiddenDecoder, communicator: Communicator) -> None:
    """Do what rank 0's `Leader` does, until its end."""
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
        else:
            rows, columns, last_only = rest[:3].tolist()
            ids, padding = rest[3 : 3 + rows * columns], rest[3 + rows * columns :]
            options: Any = {"padding": padding if len(padding) else None}
            if call == "forward":
                decoder.forward(ids.view(rows, columns), last_only=bool(last_only), **options)
            else:
                decoder.forward_hidden(ids.view(rows, columns), **options)
