"""The model as the engine of a running batch sees it.

`Runner` is its protocol. `OneAtATime` is the simplest runner: any `Decoder`, one row after the
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantflow.runtime.batching.row import BatchRow, Scores
from quantflow.runtime.decoder import Decoder

_NO_POSITIONS = 1 << 20  # tokens of a row of a model whose positions nothing bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPart:
    """Positions of a row that a step computes, the first that have no keys and values yet.

    Attributes:
        row: row whose tokens from `row.computed` on are computed.
        count: number of these tokens.
        wanted: number of the last positions whose logits are needed.
    """

    row: BatchRow
    count: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class PoolCounters:
    """Memory of keys and values.

    Attributes:
        block_tokens: tokens of a block.
        blocks: number of blocks.
        used: blocks of running rows.
        cached: blocks kept for prompts that begin alike; they are free for whoever needs them.
        hit_tokens, asked_tokens: prompt tokens that were taken from shared blocks, and all prompt
            tokens, since the start.
    """

    block_tokens: int
    blocks: int
    used: int
    cached: int
    hit_tokens: int = 0
    asked_tokens: int = 0


class Runner(Protocol):
    """A model with keys and values of several rows.

    Attributes:
        vocab_size, positions: as in `quantflow.runtime.decoder.Decoder`.
        pool_tokens: tokens whose keys and values there is room for.
        most_rows: rows that may be open at once; None: any number.
        guesses: whether it computes guessed tokens, which may turn out wrong.
        adapters: names of the LoRA adapters that a row may have.
        why_not_invariant: why a row's bits may depend on the others, in a sentence; None: they do
            not.
    """

    vocab_size: int
    positions: int | None
    pool_tokens: int
    most_rows: int | None
    guesses: bool
    adapters: tuple[str, ...]
    why_not_invariant: str | None

    def open(self, row: BatchRow) -> None:
        """Begin a row."""

    def reuse(self, row: BatchRow) -> int:
        """The number of tokens of a row in prefill that have keys and values.

        It is `row.computed`, or more where others have computed them.
        """

    def forward(self, parts: Sequence[RowPart]) -> list[list[Scores]]:
        """Compute positions; the scores after the last `wanted` positions of each part.

        Rows are not changed.
        """

    def propose(self, rows: Sequence[BatchRow]) -> None:
        """Guess what follows the last tokens of rows, where it has something to guess with.

        It comes after `forward`, whose scores the rows have taken.
        """

    def close(self, row: BatchRow) -> None:
        """Give a row's memory back."""

    def rest(self) -> None:
        """Give back what the calling thread needs only while it computes."""

    def counters(self) -> PoolCounters:
        """The contents of the memory; any thread may call it."""


class OneAtATime:
    """A `Decoder` whose cache holds one row: the next one begins when it has ended."""

    def __init__(self, decoder: Decoder) -> None:
        """Take a decoder, whose cache nobody else uses from now on."""
        self._decoder = decoder
        self.vocab_size, self.positions = decoder.vocab_size, decoder.positions
        self.pool_tokens = decoder.positions or _NO_POSITIONS
        self.most_rows: int | None = 1
        self.guesses = False
        self.adapters: tuple[str, ...] = ()
        # there is no other row to depend on, but torch's products sum in another order for more
        # tokens at once
        self.why_not_invariant: str | None = (
            "the chunks of a prompt decide how many tokens torch multiplies at once"
        )
        self._used = 0

    def open(self, row: BatchRow) -> None:
        """Empty the cache."""
        self._decoder.begin(rows=1, capacity=row.total_tokens)
        self._used = 1

    def reuse(self, row: BatchRow) -> int:
        """The number of the row's own tokens: nothing is shared."""
        return row.computed

    def forward(self, parts: Sequence[RowPart]) -> list[list[Scores]]:
        """Compute the only part."""
        (part,) = parts
        row = part.row
        ids = torch.tensor(
            [row.tokens[row.computed : row.computed + part.count]], device=self._decoder.device
        )
        # [1 or T, V]
        logits = (
            self._decoder.forward(ids, last_only=part.wanted <= 1).cpu().view(-1, self.vocab_size)
        )
        return [[scored(logits[i : i + 1]) for i in range(len(logits) - part.wanted, len(logits))]]

    def propose(self, rows: Sequence[BatchRow]) -> None:
        """Guess nothing."""

    def close(self, row: BatchRow) -> None:
        """Nothing is kept: `open` empties the cache."""
        self._used = 0

    def rest(self) -> None:
        """Do nothing: torch's own loops wait as they always do."""

    def counters(self) -> PoolCounters:
        """One block, the cache."""
        return PoolCounters(block_tokens=self.pool_tokens, blocks=1, used=self._used, cached=0)


def scored(logits: Tensor) -> Scores:
    """Logits [1, V] float32 with the numbers that every row needs of them."""
    return Scores(
        logits=logits, best=int(logits.argmax()), log_total=float(logits.logsumexp(dim=-1))
    )
