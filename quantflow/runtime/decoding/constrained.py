"""Beam search whose sequences contain given words: grid beam search (Hokamp and Liu 2017).

A sequence owes the tokens of its words that it has not said. Beside the likeliest continuations, of
all sequences and of each, every step tries those that say the next owed token; the beams are then
shared between banks of sequences that owe equally many (Post and Vilar 2018, section 3), so that
those that have begun a word do not lose at once to those that avoid it. A sequence that could no
longer say what it owes is dropped, one that owes anything does not end: whatever is returned
contains every word.
"""

import math
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from quantflow.errors import UsageError
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.logits import NEVER
from quantflow.runtime.decoding.request import Request, allowed, ended
from quantflow.runtime.generate_job import Beams, Words


@dataclass(frozen=True)
class ConstrainedLine:
    """A sequence of the search.

    Attributes:
        score: its log-probability.
        tokens: its new tokens.
        row: row of the cache that it continues.
        owed: number of tokens that it owes its words.
    """

    score: float
    tokens: tuple[int, ...]
    row: int
    owed: int


def progress(tokens: tuple[int, ...], words: Words) -> tuple[int, set[int]]:
    """The number of tokens that a text owes its words, and the tokens that would pay one.

    A word is said where its tokens stand one after the other. Of the words that are not said, the
    one whose beginning is the longest end of the text is under way, and only its next token pays.
    Where none is under way, every first token pays.
    """
    unsaid = [word for word in words if not _contains(tokens, word)]
    begun = [
        max(n for n in range(len(word)) if tokens[len(tokens) - n :] == word[:n]) for word in unsaid
    ]
    most = max(begun, default=0)
    return sum(len(word) for word in unsaid) - most, {
        w[n] for w, n in zip(unsaid, begun, strict=True) if n == most
    }


def constrained_search(decoder: Decoder, request: Request, beams: Beams) -> tuple[Tensor, Tensor]:
    """Continue a prompt by sequences that contain every word of `beams.force_words`.

    Args:
        decoder: decoder of the model.
        request: request of one row.
        beams: beams, with the words.

    Returns:
        tokens [returned, S + n] and scores [returned], as `beam_search`.

    Raises:
        UsageError: more tokens owed than may be generated, sampling, or fewer sequences than were
            asked for.
    """
    forced, limit, start = beams.force_words, request.max_new_tokens, request.prompt_length
    owed, _ = progress((), forced)
    if owed > limit or request.sampling is not None:
        cause = f"force_words: {owed} tokens, max_new_tokens={limit}, sampling={request.sampling}"
        raise UsageError(cause, "allow as many new tokens, and do not sample")
    decoder.begin(rows=1, capacity=request.capacity)
    logits = decoder.forward(request.input_ids)
    lines, finished = [ConstrainedLine(0.0, (), 0, owed)], list[tuple[float, tuple[int, ...]]]()
    for count in range(1, limit + 1):
        tokens = torch.tensor(
            [line.tokens for line in lines], dtype=torch.int64, device=logits.device
        )
        tokens = torch.cat(
            [request.input_ids.expand(len(lines), -1), tokens.view(len(lines), count - 1)], dim=1
        )
        steps = allowed(logits.log_softmax(dim=-1), tokens, request)
        candidates = [
            line
            for line in _candidates(steps, lines, request, beams=beams)
            if line.owed <= limit - count
        ]
        running = []
        for line in candidates:
            over = count == limit or _ends(line, request)
            if not over:
                running.append(line)
            elif line.owed == 0:
                finished.append((line.score / count**beams.length_penalty, line.tokens))
        finished = sorted(finished, key=lambda pair: -pair[0])[: beams.count]
        lines = _share(running, beams.count)
        if (
            not lines
            or len(finished) == beams.count
            and _settled(lines, finished[-1][0], count, limit=limit, beams=beams)
        ):
            break
        decoder.keep(torch.tensor([line.row for line in lines], device=logits.device))
        logits = decoder.forward(
            torch.tensor([[line.tokens[-1]] for line in lines], device=logits.device)
        )
    if len(finished) < request.returned:
        raise UsageError(
            f"force_words: {len(finished)} of {request.returned} sequences found", "use more beams"
        )
    best = finished[: request.returned]
    result = (
        request.canvas()
        .expand(len(best), -1)[:, : start + max(len(tokens) for _, tokens in best)]
        .clone()
    )
    for row, (_, new) in zip(result, best, strict=True):
        row[start : start + len(new)] = torch.tensor(new, device=row.device)
    return result, torch.tensor([score for score, _ in best], device=result.device)


def _candidates(
    steps: Tensor, lines: list[ConstrainedLine], request: Request, *, beams: Beams
) -> list[ConstrainedLine]:
    """The likeliest continuations of all lines and those that pay, best first.

    Args:
        steps: [N, V] log-probabilities.
        lines: the N sequences.
        request: ends of the text.
        beams: number of beams, and the words.
    """
    steps = steps.clone()
    owing = torch.tensor([line.owed > 0 for line in lines], device=steps.device)
    for end in request.ends:
        steps[:, end] = steps[:, end].masked_fill(owing, NEVER)
    totals = steps + torch.tensor([line.score for line in lines], device=steps.device)[:, None]
    width = min(max(2, 1 + len(request.ends)) * beams.count, totals.numel())
    best = totals.flatten().topk(width).indices.tolist()
    picks = {(pick // totals.shape[1], pick % totals.shape[1]) for pick in best}
    # a line that has paid is rarely among the likeliest
    own = totals.topk(min(beams.count, totals.shape[1])).indices.tolist()
    picks |= {(row, token) for row, tokens in enumerate(own) for token in tokens}
    for row, line in enumerate(lines):
        picks |= {(row, token) for token in progress(line.tokens, beams.force_words)[1]}
    candidates = []
    for row, token in picks:
        score, tokens = float(totals[row, token]), (*lines[row].tokens, token)
        if score > NEVER:
            candidates.append(
                ConstrainedLine(score, tokens, row, progress(tokens, beams.force_words)[0])
            )
    return sorted(candidates, key=lambda line: (-line.score, line.tokens))


def _share(lines: list[ConstrainedLine], count: int) -> list[ConstrainedLine]:
    """The `count` lines of the next step, drawn from the banks in turn.

    The best line of each bank comes first, those that owe least before others; then the second best
    of each, and so on.
    """
    banks = [
        [line for line in lines if line.owed == owed]
        for owed in sorted({line.owed for line in lines})
    ]
    turns = chain.from_iterable(zip_longest(*banks))
    return [line for line in turns if line is not None][:count]


def _settled(
    lines: list[ConstrainedLine], worst: float, generated: int, *, limit: int, beams: Beams
) -> bool:
    """Whether no line can enter a full pool any more, by the rule of `Beams.early_stopping`."""
    if beams.early_stopping is True:
        return True
    reach = limit if beams.early_stopping == "never" and beams.length_penalty > 0 else generated
    best = max(line.score for line in lines)
    return best / math.pow(reach, beams.length_penalty) <= worst


def _ends(line: ConstrainedLine, request: Request) -> bool:
    whole = torch.cat([request.input_ids, request.input_ids.new_tensor(line.tokens)[None]], dim=1)
    return bool(ended(whole, request)[0])


def _contains(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens) - len(word) + 1))
