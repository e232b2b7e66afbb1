"""Transformers' modules that run rows together, in padded batches: a `Runner`.

A step of the engine is at most one forward of all decoding rows, and one for each group of new
prompts. Prompts of like lengths share a group. A row that ends leaves its slot, and the last row
moves there, so that a step has as few rows as its bucket allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quantflow.errors import ResourceError
from quantflow.process_memory import available_bytes
from quantflow.runtime.batch_shapes import Buckets
from quantflow.runtime.batching.limits import BatchLimits
from quantflow.runtime.batching.row import BatchRow, Scores
from quantflow.runtime.batching.runner import PoolCounters, RowPart, scored
from quantflow.runtime.row_modules import PROMPT, RowModules, Shape

_SHARE = 0.8  # share of the free memory that slots take, where nobody says how much
_LONGEST = 4096  # tokens of a row of a model whose positions nothing bounds


@dataclass(frozen=True, kw_only=True)
class BatchShapes:
    """Shapes that batches have run in.

    Attributes:
        run: shape -> forwards in it, those of the warm-up too.
        warmed: shapes that the warm-up ran.
        compilations: graphs that torch.compile made, and of these those after the warm-up; None
            where it makes none.
    """

    run: dict[Shape, int]
    warmed: frozenset[Shape]
    compilations: tuple[int, int] | None

    @property
    def line(self) -> str:
        """The numbers in words."""
        prompts = sum(kind == PROMPT for kind, *_ in self.run)
        line = (
            f"{prompts} shapes of prompts and {len(self.run) - prompts} of steps were run, "
            f"{len(self.run.keys() - self.warmed)} of them not warmed up"
        )
        if self.compilations is None:
            return line
        made, later = self.compilations
        return f"{line}; torch.compile made {made} graphs, {later} of them after the warm-up"


class BucketRunner:
    """A `Runner` on transformers' modules.

    Attributes:
        vocab_size, positions, pool_tokens, most_rows, guesses, adapters, why_not_invariant: as in
            `quantflow.runtime.batching.runner.Runner`.
    """

    def __init__(
        self,
        modules: RowModules,
        *,
        buckets: Buckets,
        limits: BatchLimits,
        kv_memory: int | None,
    ) -> None:
        """Decide how many rows there are.

        Args:
            modules: modules that nobody else uses from now on.
            buckets: sizes that were asked for.
            limits: limits, not resolved yet.
            kv_memory: bytes that slots may take; None: on a CPU four fifths of what is free, else
                any number.

        Raises:
            ResourceError: the memory holds no row of the longest length.
        """
        self._modules, self._buckets = modules, buckets
        self.vocab_size, self.positions = modules.vocab_size, modules.positions
        self.guesses = False
        self.adapters: tuple[str, ...] = ()
        self.why_not_invariant: str | None = (
            "torch's products sum in another order for another batch"
        )
        tokens = limits.max_total_tokens or min(modules.positions or _LONGEST, _LONGEST)
        total = limits.max_batch_total_tokens
        wanted = limits.rows
        if limits.max_batch_size is None and total is not None:
            wanted = max(1, min(wanted, total // tokens))
        memory = kv_memory
        if memory is None and modules.device.type == "cpu":
            memory = int(available_bytes() * _SHARE)
        nbytes = modules.token_bytes() * tokens
        rows = wanted
        if memory is not None:
            held = memory // nbytes - 1  # one slot more takes what padding makes
            multiple = buckets.step_multiple(modules.device.type)
            rows = min(wanted, held if multiple == 1 else held // multiple * multiple)
        if rows < 1 or (limits.max_batch_size is not None and rows < wanted):
            raise ResourceError(
                f"kv memory of {memory} bytes: {max(rows, 0)} rows of {tokens} tokens, "
                f"{wanted} are asked for",
                "give it more, or lower max_batch_size and max_total_tokens",
            )
        self._tokens = tokens
        self.most_rows: int | None = rows
        self.pool_tokens = max(rows * tokens, total or 0)
        self._rows: list[BatchRow] = []  # the row of each slot
        self._before = 0  # compilations at the end of the warm-up
        self._warmed: frozenset[Shape] = frozenset()

    def settle(self, limits: BatchLimits) -> BatchLimits:
        """Take memory and warm up, under resolved limits.

        Returns:
            The limits, of which `prefill_chunk` lets no prompt be computed in parts.

        Raises:
            UsageError: prompts are shorter than what they are padded to.
        """
        assert limits.max_input_tokens is not None and limits.max_batch_prefill_tokens is not None
        self._rules = self._buckets.rules(
            self._modules.device.type,
            rows=limits.rows,
            longest=limits.max_input_tokens,
            prefill_tokens=limits.max_batch_prefill_tokens,
        )
        self._modules.begin(slots=self._rules.slots, tokens=self._tokens)
        if self._buckets.warm_up:
            self._warm_up()
        return replace(limits, prefill_chunk=limits.max_batch_prefill_tokens)

    def _warm_up(self) -> None:
        """Run every shape of prompts and steps once, over empty slots."""
        for rows, columns in self._rules.every_prompt():
            self._modules.prompts([], [], rows=rows, columns=columns)
        for rows in self._rules.steps():
            self._modules.step([], [], rows=rows)
        self._warmed = frozenset(self._modules.shapes)
        self._before = self._modules.compilations() if self._modules.compilations else 0

    def shapes(self) -> BatchShapes:
        """The shapes that have been run; any thread may call it."""
        count = self._modules.compilations
        made = None if count is None else count()
        return BatchShapes(
            run=dict(self._modules.shapes),
            warmed=self._warmed,
            compilations=None if made is None else (made, made - self._before),
        )

    def open(self, row: BatchRow) -> None:
        """Give a row the first free slot."""
        self._rows.append(row)

    def reuse(self, row: BatchRow) -> int:
        """The number of the row's own tokens: nothing is shared."""
        return row.computed

    def forward(self, parts: Sequence[RowPart]) -> list[list[Scores]]:
        """Compute new prompts in groups, and all decoding rows in one forward."""
        found: dict[BatchRow, list[Scores]] = {}
        # steps come first: what they write into the slots of new prompts is written over
        if steps := [part.row for part in parts if not part.row.in_prefill]:
            found |= self._step(steps)
        new = sorted((part for part in parts if part.row.in_prefill), key=lambda part: part.count)
        for start in range(0, len(new), self._rules.together):
            found |= self._prompts(new[start : start + self._rules.together])
        return [found[part.row] for part in parts]

    def _prompts(self, parts: Sequence[RowPart]) -> dict[BatchRow, list[Scores]]:
        prompts = [part.row.tokens for part in parts]
        rows, columns = self._rules.prompts(len(parts), max(map(len, prompts)))
        every = any(part.wanted > 1 for part in parts)
        slots = [self._rows.index(part.row) for part in parts]
        logits = self._modules.prompts(prompts, slots, rows=rows, columns=columns, every=every)
        return {
            part.row: _scores(logits[index, logits.shape[1] - part.wanted :])
            for index, part in enumerate(parts)
        }

    def _step(self, rows: Sequence[BatchRow]) -> dict[BatchRow, list[Scores]]:
        places = [0 if row.in_prefill else row.computed for row in self._rows]
        tokens = [row.tokens[place] for row, place in zip(self._rows, places, strict=True)]
        logits = self._modules.step(tokens, places, rows=self._rules.step(len(self._rows)))
        return {row: _scores(logits[self._rows.index(row)][None]) for row in rows}

    def propose(self, rows: Sequence[BatchRow]) -> None:
        """Guess nothing."""

    def close(self, row: BatchRow) -> None:
        """Move the last row into the slot of one that ends."""
        slot, last = self._rows.index(row), self._rows.pop()
        if last is not row:
            self._modules.move(len(self._rows), slot)
            self._rows[slot] = last

    def rest(self) -> None:
        """Do nothing: torch's own loops wait as they always do."""

    def counters(self) -> PoolCounters:
        """A block for each slot."""
        return PoolCounters(
            block_tokens=self._tokens, blocks=self.most_rows or 0, used=len(self._rows), cached=0
        )


def _scores(logits: torch.Tensor) -> list[Scores]:
    """The scores of logits [T, V]."""
    return [scored(logits[i : i + 1]) for i in range(len(logits))]
