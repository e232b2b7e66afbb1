"""The engine: a loop that runs requests together (continuous batching).

Rows join and leave between steps, and prompts are computed beside decoding rows.

    request.py    a request, and the events that come back
    stream.py     the events on their way to the reader
    limits.py     the most that runs at once
    scheduler.py  the rows that run, and the tokens of each that a step computes
    row.py        the tokens of a request, and the choice of the next one
    runner.py     the model as the engine sees it; paged.py: the lean decoder; pool.py: its blocks;
                  buckets.py: transformers' modules in padded batches
    drafts.py     what proposes tokens for all rows: the layer ahead (MTP), Medusa's heads

A request's tokens and log-probabilities are the same bits alone, in any batch, in whatever chunks
its prompt is computed and whether it shares a prefix, unless `Engine.why_not_invariant` has a
reason.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from quantflow.errors import EngineError, OverloadedError
from quantflow.runtime.batch_shapes import NO_BUCKETS, Buckets
from quantflow.runtime.batching.buckets import BatchShapes, BucketRunner
from quantflow.runtime.batching.drafts import RowDraft
from quantflow.runtime.batching.limits import BatchLimits
from quantflow.runtime.batching.paged import BlockRunner
from quantflow.runtime.batching.request import BatchRequest, FinishReason, PromptToken, TokenEvent
from quantflow.runtime.batching.row import BatchRow, Scores, StopCheck
from quantflow.runtime.batching.runner import OneAtATime, PoolCounters, RowPart, Runner
from quantflow.runtime.batching.scheduler import Scheduler
from quantflow.runtime.batching.stream import Readers, Stream
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.text import stop_string
from quantflow.runtime.generate_job import require
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.ranks.leader import Leader
from quantflow.runtime.row_modules import RowModules
from quantflow.runtime.step_trace import StepTrace, TracedSteps


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Numbers for a server's metrics, of one moment or since the start.

    Attributes:
        waiting, running: requests now.
        prefill_tokens, reserved_tokens: tokens of running requests that max_batch_prefill_tokens
            and max_batch_total_tokens bound.
        submitted, finished, cancelled, failed: requests since the start; each that was submitted
            ends in one of the others.
        steps, step_seconds, busy_seconds: steps since the start, the last one's seconds, those of
            all together.
        last_batch_size: rows of the last step.
        batch_sizes: rows -> steps that had so many.
        prompt_tokens, generated_tokens: computed since the start; a prompt's shared prefix is not
            computed.
        proposed_tokens, taken_tokens: guesses of speculation since the start, and those that the
            model chose too.
        pool: memory of keys and values.
    """

    waiting: int
    running: int
    prefill_tokens: int
    reserved_tokens: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    steps: int
    step_seconds: float
    busy_seconds: float
    last_batch_size: int
    batch_sizes: Mapping[int, int]
    prompt_tokens: int
    generated_tokens: int
    proposed_tokens: int
    taken_tokens: int
    pool: PoolCounters


_NOTHING = {
    name: 0 for name in ("submitted", "finished", "cancelled", "failed", "steps", "last_batch_size")
}
_NOTHING |= {f"{kind}_tokens": 0 for kind in ("prompt", "generated", "proposed", "taken")}


class Engine:
    """Runs requests on one decoder, in a thread of its own.

    Every method may be called from any thread. The decoder belongs to the engine until `close`.

    Attributes:
        limits: without None, see `BatchLimits.resolved`.
        why_not_invariant: why a request's bits may depend on what else runs, in a sentence; None:
            they do not.
        failed: the exception that killed the thread; None while it is well. Every request has then
            ended with it.
    """

    def __init__(
        self,
        decoder: Decoder | RowModules,
        *,
        limits: BatchLimits | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_memory: int | None = None,
        traced: TracedSteps | None = None,
        draft: RowDraft | None = None,
        buckets: Buckets = NO_BUCKETS,
    ) -> None:
        """Start the thread.

        Args:
            decoder: decoder of the model, as `quantflow.runtime.load.load` returns it, or its
                modules where they run rows together.
            limits: the most that runs at once; the defaults fit the model and its memory.
            tokenizer: needed by requests with stop strings.
            kv_memory: bytes that keys and values may take; None: four fifths of what is free, at
                most what the largest batch needs. Only the lean decoder has a pool.
            traced: steps of which a trace is written; None: none.
            draft: what proposes tokens for every request without a lookup; only the lean decoder
                has one. Tokens and their log-probabilities are the same without it.
            buckets: sizes that batches on modules are padded to.

        Raises:
            UsageError: limits that the model cannot keep.
            ResourceError: limits that its memory cannot keep.
        """
        limits = limits or BatchLimits()
        self._runner: Runner = (
            BlockRunner(decoder, limits=limits, kv_memory=kv_memory, draft=draft)
            if isinstance(decoder, LeanDecoder | Leader)
            else BucketRunner(decoder, buckets=buckets, limits=limits, kv_memory=kv_memory)
            if isinstance(decoder, RowModules)
            else OneAtATime(decoder)
        )
        limits = limits.resolved(
            positions=self._runner.positions, pool_tokens=self._runner.pool_tokens
        )
        if self._runner.most_rows is not None:
            limits = replace(limits, max_batch_size=min(limits.rows, self._runner.most_rows))
        if isinstance(self._runner, BucketRunner):
            limits = self._runner.settle(limits)
        self.limits = limits
        self.why_not_invariant = self._runner.why_not_invariant
        self.failed: BaseException | None = None
        self._tokenizer = tokenizer
        self._trace = None if traced is None else StepTrace(traced)
        self._scheduler: Scheduler[BatchRow] = Scheduler(limits)
        self._readers = Readers()
        self._changed = threading.Condition()  # guards what follows
        self._arrived: list[BatchRow] = []
        self._cancelled: list[Stream] = []
        self._open: dict[Stream, BatchRow] = {}  # what has not ended
        self._accepting, self._closing = True, False
        self._counts = dict(_NOTHING)
        self._batch_sizes = Counter[int]()
        self._step_seconds, self._busy_seconds = 0.0, 0.0
        self._runner.rest()  # from here on another thread computes
        self._thread = threading.Thread(target=self._run, name="quantflow-engine", daemon=True)
        self._thread.start()

    def submit(self, request: BatchRequest) -> Stream:
        """Queue a request.

        Raises:
            UsageError: more tokens or stop strings than the limits allow, a token that the model
                does not have, an adapter that the engine was not given, stop strings without a
                tokenizer.
            OverloadedError: max_concurrent_requests wait or run already, or the engine drains.
            EngineError: it has failed or was closed.
        """
        stop = self._check(request)
        stream = Stream(request, on_cancel=self._cancel)
        row = BatchRow(stream, vocab_size=self._runner.vocab_size, stop=stop)
        with self._changed:
            if self.failed is not None:
                raise EngineError(f"the engine has failed: {self.failed!r}", "start another")
            if self._closing:
                raise EngineError("the engine was closed", "start another")
            if not self._accepting:
                raise OverloadedError(
                    "the engine drains and takes no more requests", "ask another server"
                )
            most = self.limits.max_concurrent_requests
            if len(self._open) >= most:
                raise OverloadedError(
                    f"{len(self._open)} requests wait or run, {most} may", "try again later"
                )
            self._open[stream] = row
            self._arrived.append(row)
            self._counts["submitted"] += 1
            self._changed.notify_all()
        return stream

    def prompt_logprobs(
        self, input_ids: tuple[int, ...], *, adapter: str | None = None
    ) -> tuple[PromptToken, ...]:
        """Wait for the log-probability of every token of a text; see `Stream.prompt`.

        Raises:
            UsageError, OverloadedError, EngineError: as `submit`.
            Exception: what the request failed with.
        """
        stream = self.submit(
            BatchRequest(
                input_ids=input_ids, max_new_tokens=0, prompt_logprobs=True, adapter=adapter
            )
        )
        for event in stream:
            if event.error is not None:
                raise event.error
        return stream.prompt

    def counters(self) -> EngineCounters:
        """The numbers of this moment."""
        pool = self._runner.counters()
        with self._changed:
            return EngineCounters(
                waiting=len(self._open) - len(self._scheduler.running),
                running=len(self._scheduler.running),
                prefill_tokens=self._scheduler.prefill_tokens,
                reserved_tokens=self._scheduler.reserved_tokens,
                step_seconds=self._step_seconds,
                busy_seconds=self._busy_seconds,
                pool=pool,
                batch_sizes=dict(self._batch_sizes),
                **self._counts,
            )

    def shapes(self) -> BatchShapes | None:
        """The shapes that batches have run in; None where they are not padded."""
        return self._runner.shapes() if isinstance(self._runner, BucketRunner) else None

    def drain(self, seconds: float) -> int:
        """Take no more requests and wait until those that there are have ended.

        Args:
            seconds: time after which requests that still wait or run are cancelled.

        Returns:
            The number of requests that were cancelled.
        """
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: not self._open, timeout=seconds)
            left = list(self._open)
            self._cancelled += left
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open)
        return len(left)

    def close(self) -> None:
        """Cancel all requests and end the thread; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Engine":
        """Begin a block that ends the engine."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _check(self, request: BatchRequest) -> StopCheck | None:
        """Refuse a request beyond the limits; the check of its stop strings."""
        limits, prompt_tokens, new = self.limits, len(request.input_ids), request.max_new_tokens
        # resolved
        assert limits.max_input_tokens is not None and limits.max_total_tokens is not None
        require(
            prompt_tokens <= limits.max_input_tokens,
            f"prompt of {prompt_tokens} tokens: {limits.max_input_tokens} may be",
            "shorten it",
        )
        cause = (
            f"prompt of {prompt_tokens} tokens + max_new_tokens={new}: {limits.max_total_tokens} "
            "may be"
        )
        require(
            request.total_tokens <= limits.max_total_tokens,
            cause,
            "shorten the prompt or use fewer new tokens",
        )
        vocabulary = range(self._runner.vocab_size)
        for token in (*request.input_ids, *request.logit_bias):
            require(
                token in vocabulary,
                f"token {token}: the model has {len(vocabulary)}",
                "use the model's tokenizer",
            )
        adapters = self._runner.adapters
        cause = f"adapter {request.adapter!r}: the engine has {', '.join(adapters) or 'none'}"
        require(
            request.adapter is None or request.adapter in adapters,
            cause,
            "name one of them, or leave it out",
        )
        if not request.stop:
            return None
        count, most = len(request.stop), limits.max_stop_sequences
        require(count <= most, f"stop: {count} strings, {most} may be", "use fewer")
        if self._tokenizer is None:
            require(False, "stop: the engine has no tokenizer", "give it one")
        return stop_string(self._tokenizer, request.stop, prompt=request.input_ids)

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            if stream in self._open:
                self._cancelled.append(stream)
                self._changed.notify_all()

    @torch.inference_mode()
    def _run(self) -> None:
        """Step until closed."""
        # torch tells OpenMP its number in every thread, but not before it is asked
        torch.get_num_threads()
        try:
            while self._take_in():
                begin = time.perf_counter()
                self._step()
                self._step_seconds = time.perf_counter() - begin
                self._busy_seconds += self._step_seconds
        except BaseException as error:  # whatever it is: nobody may wait for a thread that is dead
            self._fail(error)
        finally:
            self._readers.wake()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failed = error
            rows, self._open = list(self._open.values()), {}
            self._counts["failed"] += len(rows)
            self._changed.notify_all()
        failure = EngineError(f"the engine has failed: {error!r}", "start another")
        for row in rows:
            row.stream.put(
                TokenEvent(index=row.new_tokens, finish=FinishReason.ERROR, error=failure),
                self._readers,
            )

    def _take_in(self) -> bool:
        """Wait for work, take new requests and cancellations.

        Returns:
            False when the engine is closed.
        """
        with self._changed:
            if not self._open:
                self._readers.wake()
                self._runner.rest()
            self._changed.wait_for(lambda: self._open or self._closing)
            arrived, self._arrived = self._arrived, []
            gone = list(self._open) if self._closing else self._cancelled
            self._cancelled = []
            for row in arrived:
                self._scheduler.add(row)
            rows = [self._open[stream] for stream in dict.fromkeys(gone) if stream in self._open]
        for row in rows:
            self._end(row, TokenEvent(index=row.new_tokens, finish=FinishReason.CANCELLED))
        return not self._closing

    def _step(self) -> None:
        scheduler = self._scheduler
        with self._changed:
            joined = scheduler.admit()
        for row in joined:
            row.stream.times.admitted = time.monotonic()
            self._runner.open(row)
        for row in scheduler.running:
            if row.in_prefill:
                before, row.computed = row.computed, self._runner.reuse(row)
                row.stream.cached_tokens += row.computed - before
        parts = [
            RowPart(row=row, count=count, wanted=row.wanted(count))
            for row, count in scheduler.plan()
        ]
        self._readers.wake()  # readers of the last step's events, whose work runs beside this step
        if not parts:
            return
        logits = (
            self._runner.forward(parts)
            if self._trace is None
            else self._trace.step(lambda: self._runner.forward(parts))
        )
        with self._changed:
            self._counts["steps"] += 1
            self._counts["last_batch_size"] = len(parts)
            self._batch_sizes[len(parts)] += 1
            self._counts["prompt_tokens"] += sum(
                part.count for part in parts if part.row.in_prefill
            )
        going_on = [
            part.row
            for part, scores in zip(parts, logits, strict=True)
            if self._advance(part, scores)
        ]
        self._runner.propose(going_on)

    def _advance(self, part: RowPart, scores: list[Scores]) -> bool:
        """Take the scores of a part; an exception of this row ends this row alone.

        Returns:
            Whether the row has a new token and another one may follow.
        """
        row = part.row
        try:
            if row.in_prefill and row.stream.request.prompt_logprobs:
                row.prompt_scores(scores, first=row.computed)
            guess, row.guess = row.guess, []
            row.computed += part.count - len(guess)
            if row.left:
                return False
            self._counts["proposed_tokens"] += len(guess)
            for index, after in enumerate(scores[len(scores) - 1 - len(guess) :]):
                event = row.next(after)
                if event.id is not None:
                    self._counts["generated_tokens"] += 1
                right = index < len(guess) and event.id == guess[index]
                self._counts["taken_tokens"] += right
                if event.finish is not None:
                    break
                row.stream.put(event, self._readers)
                if not right:
                    break
                row.computed += 1  # the guess was right, so its keys and values are the text's
            if event.finish is None and self._runner.guesses:
                row.propose()
        except Exception as error:  # the request's own mask, rules or sampling raised it
            self._end(row, TokenEvent(index=row.new_tokens, finish=FinishReason.ERROR, error=error))
            return False
        if event.finish is not None:
            self._end(row, event)
        return event.finish is None

    def _end(self, row: BatchRow, event: TokenEvent) -> None:
        """Free a row's memory, then send its last event."""
        with self._changed:
            if row in self._scheduler.running:
                self._runner.close(row)
            self._scheduler.remove(row)
            del self._open[row.stream]
            kind = {FinishReason.CANCELLED: "cancelled", FinishReason.ERROR: "failed"}.get(
                event.finish or FinishReason.EOS
            )
            self._counts[kind or "finished"] += 1
            self._changed.notify_all()
        row.stream.put(event, self._readers)
