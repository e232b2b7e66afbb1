"""Seconds that a decoder takes for the first token and for each further one, by any method.

Random prompts are others in every run, so that nothing that was computed before can answer them.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quantflow.benching.bench_job import PERCENTILES
from quantflow.errors import UsageError
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import Beams, Method, Sampling, generate
from quantflow.runtime.timed_decoder import Timed


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One batch, from its prompts to its last tokens.

    Attributes:
        first_seconds: seconds until the first token of every sequence is known.
        step_seconds: seconds of each further token of a sequence; 0 for one that was confirmed
            together with the one before it.
        requested: tokens that were asked for, over all sequences.
        produced: tokens up to the first end token of each sequence, that one included; all where
            ends are ignored.
    """

    first_seconds: float
    step_seconds: tuple[float, ...]
    requested: int
    produced: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.first_seconds + sum(self.step_seconds)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread of several measurements of the same thing.

    Attributes:
        average, lowest, highest: average and bounds of all measurements.
        percentiles: the PERCENTILES: element int(n * p / 100) of the n measurements, in the order
            in which they were given.
    """

    average: float
    lowest: float
    highest: float
    percentiles: tuple[float, ...]


def spread(values: Sequence[float], *, ordered: bool = True) -> Spread | None:
    """The spread of measurements, or None without any.

    Args:
        values: measurements in the order in which they were taken.
        ordered: sort them for the percentiles. Without it these are what text-generation-benchmark
            prints, which takes elements of the unsorted list: with 10 runs its p90 and p99 are the
            last run.
    """
    if not values:
        return None
    row = sorted(values) if ordered else list(values)
    at = [row[min(len(row) - 1, int(len(row) * p / 100))] for p in PERCENTILES]
    return Spread(
        average=sum(row) / len(row), lowest=min(row), highest=max(row), percentiles=tuple(at)
    )


def random_prompts(rows: int, length: int, *, vocab_size: int, seed: int) -> Tensor:
    """Token ids [rows, length] int64, uniform over the vocabulary."""
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def time_run(
    decoder: Decoder,
    prompts: Tensor,
    *,
    new_tokens: int,
    ends: Collection[int] = (),
    span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
) -> TimedRun:
    """Continue prompts greedily and time every token.

    Args:
        decoder: its cache is emptied first, which is not timed.
        prompts: [B, S] int64.
        new_tokens: tokens added to each sequence, 1 or more.
        ends: tokens at which a sequence ends; the run ends when all have. Empty: none is looked
            for.
        span: entered around the prompt and around each token, with their names; for a profiler.

    Raises:
        UsageError: no token is asked for, or more than the decoder has positions for.
    """
    rows, length = prompts.shape
    if new_tokens < 1 or (
        decoder.positions is not None and length + new_tokens > decoder.positions
    ):
        raise UsageError(
            f"{length} prompt tokens + {new_tokens} new ones: the model has {decoder.positions} "
            "positions",
            "ask for one new token or more, and for fewer than that together",
        )
    decoder.begin(rows=rows, capacity=length + new_tokens)
    prompts, stop = prompts.to(decoder.device), torch.tensor(sorted(ends), device=decoder.device)
    running = torch.ones(rows, dtype=torch.bool, device=decoder.device)
    seconds: list[float] = []
    produced, step = 0, prompts
    with torch.inference_mode():
        while len(seconds) < new_tokens and running.any():
            begin = time.perf_counter()
            with span("token" if seconds else "prompt"):
                step = decoder.forward(step).argmax(dim=-1, keepdim=True)  # [B, 1]
                produced += int(running.sum())
            seconds.append(time.perf_counter() - begin)
            running &= ~torch.isin(step[:, 0], stop)
    return TimedRun(
        first_seconds=seconds[0],
        step_seconds=tuple(seconds[1:]),
        requested=rows * new_tokens,
        produced=produced,
    )


def time_generation(
    decoder: Decoder,
    prompts: Tensor,
    *,
    new_tokens: int,
    method: Method | None = None,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
) -> TimedRun:
    """Continue prompts by a way to generate and time every token, choosing and proposing included.

    The clock starts with the first forward. A token of a single sequence is known when it is
    streamed; one of several sequences or of beams is known when the next forward begins.

    Args:
        decoder: its cache is emptied first, which is not timed.
        prompts: [B, S] int64; speculation continues one after the other, so that B has to be 1.
        new_tokens: tokens added to each sequence, 1 or more.
        method: a method of `quantflow.runtime.decoding`; None takes one token after the other.
        sampling: None takes the most likely token, or the best beams.
        ends: tokens at which a sequence ends.

    Raises:
        UsageError: the prompts cannot be decoded by this method.
    """
    rows, length = prompts.shape
    timed, arrivals = Timed(decoder), list[float]()
    alone = rows == 1 and not isinstance(method, Beams)
    outputs = generate(
        timed,
        prompts.to(decoder.device),
        max_new_tokens=new_tokens,
        method=method,
        sampling=sampling,
        eos_token_id=tuple(ends),
        stream=(lambda _: arrivals.append(time.perf_counter())) if alone else None,
    )
    stamps = arrivals if alone else [*timed.starts[1:], time.perf_counter()]
    first, *further = [after - before for before, after in pairwise([timed.starts[0], *stamps])]
    stop = torch.tensor(sorted(ends), device=outputs.device)
    ended = torch.isin(outputs[:, length:], stop).long()  # [B, n]
    produced = int((ended.cumsum(dim=1) - ended == 0).sum())
    return TimedRun(
        first_seconds=first,
        step_seconds=tuple(further),
        requested=rows * new_tokens,
        produced=produced,
    )
