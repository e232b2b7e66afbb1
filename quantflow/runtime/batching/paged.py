"""The lean decoder over one pool of blocks: a step is one forward of all rows.

The scores of a row have the same bits whatever else the step computes: the products and the
attention of kernels.c and decode.c sum every output in an order of its own. Where an artifact's
linears run in torch's kernels, `why_not_invariant` says so.

A gated delta net has a state for each row, in a slot of the row's own. Keys and values of a prompt
that others have computed are of no use to such a model without the state at their end, so rows
share no blocks; and a state that a wrong guess has changed cannot be taken back, so no token is
guessed.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from quantflow.errors import ResourceError, UnsupportedError
from quantflow.process_memory import available_bytes
from quantflow.runtime.batching.drafts import RowDraft, block_table
from quantflow.runtime.batching.limits import BatchLimits
from quantflow.runtime.batching.pool import BlockPool, Lease
from quantflow.runtime.batching.row import BatchRow, Scores
from quantflow.runtime.batching.runner import PoolCounters, RowPart
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.operations import argmax_logsumexp, release_threads
from quantflow.runtime.ranks.leader import Leader

BLOCK_TOKENS = 32  # a multiple of kv_cache.LANES; the smallest prefix that is shared
_SHARE = 0.8  # share of the free memory that the pool takes, where nobody says how much


class BlockRunner:
    """A `Runner` on the lean decoder.

    Attributes:
        vocab_size, positions, pool_tokens, most_rows, guesses, adapters, why_not_invariant: as in
            `quantflow.runtime.batching.runner.Runner`.
    """

    def __init__(
        self,
        decoder: LeanDecoder | Leader,
        *,
        limits: BatchLimits,
        kv_memory: int | None,
        draft: RowDraft | None = None,
    ) -> None:
        """Reserve the pool; what is never written takes no memory.

        The pool has room for max_batch_total_tokens where the limits give them. Otherwise it has
        room for the largest batch, or as much as fits into the memory.

        Args:
            decoder: decoder that nobody else uses from now on.
            limits: limits, not resolved yet.
            kv_memory: bytes that the pool may take, in all processes that share the model; None:
                four fifths of what is free.
            draft: what proposes tokens, with room of its own in each block.

        Raises:
            ResourceError: the memory does not hold the tokens that the limits ask for, or not one
                row.
            UnsupportedError: a draft of a model whose state a wrong guess would change for good.
        """
        if draft is not None and decoder.stateful:
            raise UnsupportedError(
                "speculation: a gated delta net cannot take a wrong guess back out of its state",
                "serve it without --speculate",
            )
        self._decoder, self._draft = decoder, draft
        self.vocab_size, self.positions = decoder.vocab_size, decoder.positions
        self.most_rows: int | None = None
        self.guesses, self.adapters = not decoder.stateful, decoder.adapters
        self.why_not_invariant = decoder.why_not_invariant
        longest = (
            limits.max_total_tokens or decoder.positions or limits.max_batch_total_tokens or 4096
        )
        memory = int(available_bytes() * _SHARE) if kv_memory is None else kv_memory
        rows = limits.rows  # each may leave the rest of its last block empty
        self._most_open = rows
        nbytes = self._reserve(blocks=1, positions=1)
        memory = max(0, memory - decoder.state_bytes)
        asked = limits.max_batch_total_tokens
        tokens = rows * longest if asked is None else asked
        blocks = min(-(-tokens // BLOCK_TOKENS) + rows, memory // nbytes)
        self.pool_tokens = (
            (blocks - rows) * BLOCK_TOKENS
            if asked is None
            else min(asked, (blocks - rows) * BLOCK_TOKENS)
        )
        least = longest if limits.max_total_tokens else 2
        needed = least if asked is None else asked
        if self.pool_tokens < needed:
            cause = (
                f"kv memory of {memory} bytes: {max(0, self.pool_tokens)} tokens for {rows} rows, "
                f"{needed} are asked for"
            )
            raise ResourceError(
                cause, "give it more, or lower max_batch_size and max_batch_total_tokens"
            )
        self._reserve(blocks=blocks, positions=min(longest, self.pool_tokens))
        self._pool = BlockPool(blocks=blocks, block_tokens=BLOCK_TOKENS)
        self._leases: dict[BatchRow, Lease] = {}
        self._shares = not decoder.stateful
        self._slots: dict[BatchRow, int] = {}
        self._free_slots = list(range(rows))
        self._hits, self._asked = 0, 0

    def open(self, row: BatchRow) -> None:
        """Begin a row without a block; the scheduler has kept room for all that it may need."""
        self._leases[row] = Lease(salt=row.stream.request.adapter or "")
        self._slots[row] = self._free_slots.pop()
        self._asked += len(row.tokens)
        if self._draft is not None:
            self._draft.open(row)

    def reuse(self, row: BatchRow) -> int:
        """Take over the blocks in which others have computed the row's prompt by now.

        Returns:
            The number of the row's tokens that are computed.
        """
        lease, held = self._leases[row], row.computed // BLOCK_TOKENS
        if (
            not self._shares
            or row.stream.request.prompt_logprobs
            or row.computed % BLOCK_TOKENS
            or not held == len(lease.blocks) == len(lease.digests)
        ):
            return row.computed
        self._pool.take_over(lease, row.tokens)
        taken = (len(lease.blocks) - held) * BLOCK_TOKENS
        self._hits += taken
        if taken and self._draft is not None:
            self._draft.take_over(row, lease, row.computed + taken)
        return row.computed + taken

    def forward(self, parts: Sequence[RowPart]) -> list[list[Scores]]:
        """Compute positions of rows, all in one forward."""
        ids: list[int] = []
        first, wanted, leases = [0], list[int](), [self._leases[part.row] for part in parts]
        for part, lease in zip(parts, leases, strict=True):
            end = part.row.computed + part.count
            self._pool.grow(lease, end)
            # a guess comes with all tokens before it
            ids += [*part.row.tokens[part.row.computed : end], *part.row.guess]
            first.append(len(ids))
            wanted += range(len(ids) - part.wanted, len(ids))
        positions: dict[str, Any] = {
            "first": torch.tensor(first),
            "start": torch.tensor([part.row.computed for part in parts]),
            "table": block_table(leases),
            "wanted": torch.tensor(wanted, dtype=torch.int64),
            "slots": torch.tensor([self._slots[part.row] for part in parts]),
            "adapters": [part.row.stream.request.adapter for part in parts],
        }
        if self._draft is None:
            logits = self._decoder.forward_rows(torch.tensor(ids), **positions)
        else:
            logits, states = self._decoder.forward_rows_states(torch.tensor(ids), **positions)
            self._draft.see(parts, leases, states)
        for part, lease in zip(parts, leases, strict=True) if self._shares else ():
            self._pool.publish(
                lease,
                part.row.tokens,
                computed=min(part.row.computed + part.count, len(part.row.tokens)),
            )
        pairs = zip(*argmax_logsumexp(logits), strict=True)
        scores = [
            Scores(logits=logits[i : i + 1], best=best, log_total=total)
            for i, (best, total) in enumerate(pairs)
        ]
        ends = accumulate((part.wanted for part in parts), initial=0)
        return [scores[begin:end] for begin, end in pairwise(ends)]

    def propose(self, rows: Sequence[BatchRow]) -> None:
        """Let the draft guess."""
        if self._draft is not None and rows:
            self._draft.propose(rows, [self._leases[row] for row in rows], self._pool)

    def close(self, row: BatchRow) -> None:
        """Free the row's blocks; those that are full may still be taken over."""
        self._pool.free(self._leases.pop(row))
        self._free_slots.append(self._slots.pop(row))
        if self._draft is not None:
            self._draft.close(row)

    def rest(self) -> None:
        """Give back the threads of the calling thread's loops, which would slow those of others."""
        release_threads()

    def counters(self) -> PoolCounters:
        """The blocks of the pool."""
        pool = self._pool
        return PoolCounters(
            block_tokens=pool.block_tokens,
            blocks=pool.blocks,
            used=pool.used,
            cached=pool.cached,
            hit_tokens=self._hits,
            asked_tokens=self._asked,
        )

    def _reserve(self, *, blocks: int, positions: int) -> int:
        """Make room for so many blocks; its bytes in all processes."""
        size: dict[str, int] = {"blocks": blocks, "columns": BLOCK_TOKENS, "positions": positions}
        cache = self._decoder.begin_blocks(**size, sequences=self._most_open)
        nbytes = cache.nbytes * self._decoder.processes  # each process has as much
        return nbytes if self._draft is None else nbytes + self._draft.begin_blocks(**size)
