"""What proposes tokens for all rows of a batch, from the model's final hidden states.

A row's guess is computed beside its last token in the next step, and kept as far as the model
chooses the same. So a draft changes the number of steps and no token.

    AheadDraft    the model's own layer that predicts further tokens (MTP)
    MedusaDraft   Medusa's heads
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from quantflow.runtime.batching.pool import BlockPool, Lease
from quantflow.runtime.batching.row import BatchRow
from quantflow.runtime.batching.runner import RowPart
from quantflow.runtime.decoding.medusa import Medusa
from quantflow.runtime.mtp import AheadLayer


class RowDraft(Protocol):
    """A draft of the rows in a pool of blocks."""

    def begin_blocks(self, *, blocks: int, columns: int, positions: int) -> int:
        """Reserve what is kept for each block; its bytes. Arguments: `LeanDecoder.begin_blocks`."""

    def open(self, row: BatchRow) -> None:
        """Begin a row."""

    def take_over(self, row: BatchRow, lease: Lease, computed: int) -> None:
        """Go on behind the `computed` tokens whose blocks others have filled."""

    def see(self, parts: Sequence[RowPart], leases: Sequence[Lease], states: Tensor) -> None:
        """Take the final hidden states [N, H] of the positions that a step computed.

        It comes before the blocks are shared and before the rows know which guesses were right.
        """

    def propose(self, rows: Sequence[BatchRow], leases: Sequence[Lease], pool: BlockPool) -> None:
        """Set the guesses of rows whose last token has no keys and values yet."""

    def close(self, row: BatchRow) -> None:
        """Forget a row."""


@dataclass(kw_only=True, eq=False)
class RowStates:
    """Final hidden states of a row's last positions.

    Attributes:
        first: position of the first of `states`.
        states: [n, H] float32; those of guesses that were wrong are the last.
        before: [1, H], the state at position first - 1; None where nobody asks for it.
        columns: number of the row's tokens that have columns in the layer ahead.
    """

    first: int = 0
    states: Tensor | None = None
    before: Tensor | None = None
    columns: int = 1  # the first token has none, since no state comes before it

    def between(self, begin: int, end: int) -> Tensor:
        """The states at positions from `begin`, first - 1 at least, to `end`, [end - begin, H]."""
        parts = []
        if begin < self.first:
            assert self.before is not None  # somebody has computed it
            parts.append(self.before)
        if self.states is not None:
            parts.append(self.states[max(0, begin - self.first) : end - self.first])
        return torch.cat(parts)

    def renew(self, first: int, states: Tensor) -> None:
        """Go on to the states from position `first` on."""
        if first:
            self.before = self.between(first - 1, first)
        self.first, self.states = first, states


class AheadDraft:
    """The model's layer that predicts further tokens, with columns in the model's blocks.

    The column of token t is made of the state before t and of t, so it depends on nothing after t,
    and whoever takes over the blocks of a prompt has the layer's columns too. The state at the end
    of each block is kept for the first column behind it.
    """

    def __init__(self, layer: AheadLayer, *, tokens: int) -> None:
        """Take a layer that nobody else uses from now on, and the number of proposed tokens."""
        self._layer, self._tokens = layer, tokens
        self._rows: dict[BatchRow, RowStates] = {}
        self._ends = torch.empty(0)  # state at the last column of each block, [blocks, H]
        self._size = 1

    def begin_blocks(self, *, blocks: int, columns: int, positions: int) -> int:
        """Reserve the layer's columns and the states at the ends of blocks."""
        self._size = columns
        self._ends = torch.empty(blocks, self._layer.width)
        cache = self._layer.begin_blocks(blocks=blocks, columns=columns, positions=positions)
        return cache.nbytes + self._ends.nbytes

    def open(self, row: BatchRow) -> None:
        """Begin a row without a column."""
        self._rows[row] = RowStates()

    def take_over(self, row: BatchRow, lease: Lease, computed: int) -> None:
        """Go on behind columns that others have computed."""
        end = lease.blocks[computed // self._size - 1]
        self._rows[row] = RowStates(
            first=computed, before=self._ends[end][None].clone(), columns=computed
        )

    def see(self, parts: Sequence[RowPart], leases: Sequence[Lease], states: Tensor) -> None:
        """Compute the columns of the tokens that are certain."""
        begin, known = 0, []
        for part, lease in zip(parts, leases, strict=True):
            row, first = part.row, part.row.computed
            self._rows[row].renew(first, states[begin : begin + part.count])
            known.append(min(first + part.count, len(row.tokens)))
            # at a guess too: if it turns out wrong, its place is computed again
            for last in range(-(first + 1) % self._size + first, first + part.count, self._size):
                self._ends[lease.blocks[last // self._size]] = states[begin + last - first]
            begin += part.count
        self._extend([part.row for part in parts], leases, known)

    def propose(self, rows: Sequence[BatchRow], leases: Sequence[Lease], pool: BlockPool) -> None:
        """Guess from the states after the last tokens, then from the layer's own states."""
        pairs = [(*pair, _room(pair[0], self._tokens)) for pair in zip(rows, leases, strict=True)]
        for row, lease, count in pairs:
            pool.grow(lease, len(row.tokens) + max(0, count - 1))
        # of all rows: the states of a step are known until the next one
        states = self._extend(rows, leases, [len(row.tokens) for row in rows])
        for number in range(self._tokens):
            left = [index for index, (*_, count) in enumerate(pairs) if count > number]
            if not left:
                break
            pairs, states = [pairs[index] for index in left], states[left]
            if number:
                states = self._columns(
                    states,
                    [row.guess[-1:] for row, *_ in pairs],
                    [len(row.tokens) + number - 1 for row, *_ in pairs],
                    [lease for _, lease, _ in pairs],
                )
            for (row, *_), token in zip(
                pairs, self._layer.logits(states).argmax(dim=-1).tolist(), strict=True
            ):
                row.guess.append(token)

    def close(self, row: BatchRow) -> None:
        """Forget a row."""
        del self._rows[row]

    def _extend(
        self, rows: Sequence[BatchRow], leases: Sequence[Lease], ends: Sequence[int]
    ) -> Tensor:
        """Compute the columns that rows lack of their first tokens.

        Args:
            rows: the rows.
            leases: their blocks.
            ends: number of first tokens of each.

        Returns:
            [rows that lack some, H], the layer's state at the last column of each.
        """
        hidden, tokens, starts, held = [], list[list[int]](), list[int](), []
        for row, lease, end in zip(rows, leases, ends, strict=True):
            known = self._rows[row]
            start, known.columns = known.columns, max(known.columns, end)
            if start < end:
                hidden.append(known.between(start - 1, end - 1))
                tokens.append(row.tokens[start:end])
                starts.append(start)
                held.append(lease)
        if not hidden:
            return self._ends[:0]
        return self._columns(torch.cat(hidden), tokens, starts, held)

    def _columns(
        self,
        hidden: Tensor,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        leases: Sequence[Lease],
    ) -> Tensor:
        """Append columns to rows; the layer's state at the last one of each, [B, H]."""
        first = torch.tensor([*accumulate(map(len, tokens), initial=0)])
        states = self._layer.forward_rows(
            hidden,
            torch.tensor([token for each in tokens for token in each]),
            first=first,
            start=torch.tensor(starts),
            table=block_table(leases),
        )
        return states[first[1:] - 1]


class MedusaDraft:
    """Medusa's heads: each guesses from the state that a row's last token came from."""

    def __init__(self, heads: Medusa) -> None:
        """Take the heads."""
        self._heads = heads
        self._rows: dict[BatchRow, RowStates] = {}

    def begin_blocks(self, *, blocks: int, columns: int, positions: int) -> int:
        """Heads keep nothing."""
        return 0

    def open(self, row: BatchRow) -> None:
        """Begin a row without a state."""
        self._rows[row] = RowStates()

    def take_over(self, row: BatchRow, lease: Lease, computed: int) -> None:
        """Do nothing: the last token of a prompt is never taken over."""

    def see(self, parts: Sequence[RowPart], leases: Sequence[Lease], states: Tensor) -> None:
        """Keep the states."""
        begin = 0
        for part in parts:
            known = self._rows[part.row]
            known.first, known.states = part.row.computed, states[begin : begin + part.count]
            begin += part.count

    def propose(self, rows: Sequence[BatchRow], leases: Sequence[Lease], pool: BlockPool) -> None:
        """Guess from the states before the last tokens."""
        for row in rows:
            last = len(row.tokens) - 1
            if count := _room(row, len(self._heads.heads)):
                (hidden,) = self._rows[row].between(last - 1, last)
                row.guess = self._heads.propose(hidden)[:count].tolist()

    def close(self, row: BatchRow) -> None:
        """Forget a row."""
        del self._rows[row]


def block_table(leases: Sequence[Lease]) -> Tensor:
    """The blocks of rows as `LeanDecoder.forward_rows` takes them, [B, W] int64."""
    width = max(len(lease.blocks) for lease in leases)
    return torch.tensor([lease.blocks + [0] * (width - len(lease.blocks)) for lease in leases])


def _room(row: BatchRow, tokens: int) -> int:
    """So many of `tokens` guesses as a row may still take, with one more of the model behind.

    A row with a lookup has guesses of its own.
    """
    request = row.stream.request
    left = request.max_new_tokens - row.new_tokens - 1
    return 0 if request.lookup is not None else min(tokens, left)
