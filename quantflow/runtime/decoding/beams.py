"""Beam search: several sequences of each prompt are followed; the likeliest are returned.

The arithmetic is that of transformers' vectorized search, so that the same sequences come out: of
the best 2 x count continuations (more with several end tokens) those that end join the finished
ones, and the best others run on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.options import filtered
from quantflow.runtime.decoding.request import Request, allowed, ended
from quantflow.runtime.generate_job import Beams

_OUT = -1.0e9  # below every score and still finite, so that its sums are numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """K sequences of each prompt, best first.

    Attributes:
        tokens: [B, K, L] int64.
        lengths: [B, K] int64, number of columns of each sequence.
        scores: [B, K] float32.
        real: [B, K] bool; False is an empty place.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    real: Tensor

    def with_best_of(self, tokens: Tensor, length: int, *, scores: Tensor, real: Tensor) -> "Pool":
        """The best K of these and of other sequences.

        Args:
            tokens: [B, M, L], the others.
            length: number of columns of the others.
            scores: [B, M].
            real: [B, M].
        """
        every = torch.cat([self.scores, scores], dim=1)
        lengths = torch.cat([self.lengths, torch.full_like(real, length, dtype=torch.int64)], dim=1)
        best = every.topk(self.scores.shape[1]).indices
        return Pool(
            tokens=_take(torch.cat([self.tokens, tokens], dim=1), best),
            lengths=lengths.gather(1, best),
            scores=every.gather(1, best),
            real=torch.cat([self.real, real], dim=1).gather(1, best),
        )


def beam_search(decoder: Decoder, request: Request, beams: Beams) -> tuple[Tensor, Tensor]:
    """Continue each prompt by the sequences of the highest score.

    Returns:
        tokens [B * returned, S + n] int64, sequences of a prompt one after the other, best first,
        and their scores [B * returned] float32: log-probability / (new tokens ** length_penalty).
    """
    prompts, count, start = request.input_ids.shape[0], beams.count, request.prompt_length
    decoder.begin(rows=prompts, capacity=request.capacity)
    logits = decoder.forward(request.input_ids, padding=request.padding)
    rows = torch.arange(prompts, device=logits.device).repeat_interleave(count)
    decoder.keep(rows)
    logits, request = logits[rows], request.repeated(count)
    generator, running = request.generator(), request.canvas().view(prompts, count, -1)  # [B, K, L]
    scores = torch.full((prompts, count), _OUT, device=logits.device)
    scores[:, 0] = 0  # the beams of a prompt are still equal: one of them counts
    empty = torch.zeros_like(scores, dtype=torch.bool)
    pool = Pool(
        tokens=running,
        lengths=empty.long() + start,
        scores=torch.full_like(scores, _OUT),
        real=empty,
    )
    hopeful = torch.ones_like(empty[:, :1])  # [B, 1] whether a running beam may still win
    width = max(2, 1 + len(request.ends)) * count
    leading = torch.arange(width, device=logits.device) < count
    for length in range(start, request.capacity):
        flat = running.view(prompts * count, -1)
        if length > start:
            logits = decoder.forward(flat[:, length - 1 : length])
        totals = _totals(logits, flat[:, :length], request, scores=scores)
        values, source, tokens = _continuations(
            totals, running, length, width=width, generator=generator
        )
        over = ended(tokens.flatten(0, 1)[:, : length + 1], request).view(prompts, width)  # [B, M]
        if length + 1 == request.capacity:
            over = torch.ones_like(over)
        closed = ~hopeful | (pool.real.all(dim=1, keepdim=True) & (beams.early_stopping is True))
        final = (
            values / (length + 1 - start) ** beams.length_penalty
            + _OUT * (~(over & leading)).float()
            + _OUT * closed.float()
        )
        pool = pool.with_best_of(tokens, length + 1, scores=final, real=over & leading)
        live = values + _OUT * over.float()
        best = live.topk(count).indices
        scores, running = live.gather(1, best), _take(tokens, best)
        decoder.keep(
            (
                source.gather(1, best) + count * torch.arange(prompts, device=best.device)[:, None]
            ).flatten()
        )
        hopeful = hopeful & _may_win(scores, pool, length + 1 - start, request=request, beams=beams)
        settled = bool(pool.real.all()) and beams.early_stopping is True
        if settled or not bool(hopeful.any()) or bool(over.all()):
            break
    longest = int(pool.lengths[:, : request.returned].max())
    return pool.tokens[:, : request.returned, :longest].flatten(0, 1), pool.scores[
        :, : request.returned
    ].flatten()


def _totals(logits: Tensor, tokens: Tensor, request: Request, *, scores: Tensor) -> Tensor:
    """The score of each continuation of each beam, [B, K * V]. scores: [B, K]."""
    steps = allowed(logits.log_softmax(dim=-1), tokens, request)  # [B * K, V]
    if request.sampling is not None:
        # one may go on whatever ends
        steps = filtered(steps, request.sampling, least=max(2, 1 + len(request.ends)))
    return (steps.view(*scores.shape, -1) + scores[:, :, None]).flatten(1)


def _continuations(
    totals: Tensor, running: Tensor, length: int, *, width: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations, or those that were drawn.

    Returns:
        Scores [B, M], the beams that they continue [B, M], and their tokens [B, M, L].
    """
    if generator is None:
        values, picks = totals.topk(width)
    else:
        picks = torch.multinomial(totals.softmax(dim=-1), width, generator=generator)
        values = totals.gather(1, picks)
    vocab_size = totals.shape[1] // running.shape[1]
    source = picks // vocab_size
    tokens = _take(running, source)
    tokens[:, :, length] = picks % vocab_size
    return values, source, tokens


def _may_win(
    scores: Tensor, pool: Pool, generated: int, *, request: Request, beams: Beams
) -> Tensor:
    """Whether the best running beam of each prompt could still enter the pool, [B, 1]."""
    reach = (
        request.max_new_tokens
        if beams.early_stopping == "never" and beams.length_penalty > 0
        else generated
    )
    worst = pool.scores.amin(dim=1, keepdim=True).where(pool.real, _OUT)
    best = scores[:, :1] / math.pow(reach, beams.length_penalty)
    return (best > worst).any(dim=1, keepdim=True)


def _take(sequences: Tensor, index: Tensor) -> Tensor:
    """The sequences [B, K, L] at index [B, M]: [B, M, L], a copy."""
    return sequences.gather(1, index[:, :, None].expand(-1, -1, sequences.shape[2]))
