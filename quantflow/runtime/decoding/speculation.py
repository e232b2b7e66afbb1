"""Speculation: tokens are proposed cheaply, and one forward of the model confirms some of them.

Greedily, a proposal is taken where it is the model's own choice, so the tokens are those of greedy
decoding. Sampled, the rule of speculative sampling (Leviathan et al. 2023, algorithm 1) makes them
distributed as the model's own.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.errors import UnsupportedError, UsageError
from quantflow.runtime.decoder import Decoder, HiddenDecoder, StateDecoder
from quantflow.runtime.decoding.medusa import Medusa
from quantflow.runtime.decoding.options import Draft, Further, distribution
from quantflow.runtime.decoding.request import Request, allowed, choose, ended
from quantflow.runtime.generate_job import Lookup

Speculation = Draft | Further | Lookup | Medusa


class Proposer(Protocol):
    """A source of guesses for the next tokens."""

    def propose(
        self, tokens: Tensor, count: int, *, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guess.

        Args:
            tokens: [1, L], text so far.
            count: most tokens to guess.
            hidden: [H], final state of the model at position L - 2, from which the last token came;
                None where the decoder shows none, or at first.

        Returns:
            [k] int64 tokens, k from 0 to `count`, and the probabilities [k, V] that each was drawn
            from; None: it was not drawn.
        """


def speculate(decoder: Decoder, request: Request, method: Speculation) -> Tensor:
    """Continue each prompt, one after the other, by proposals that the model confirms.

    Returns:
        [B * returned, S + n] int64.

    Raises:
        UsageError: a draft of another vocabulary, or Medusa heads on a decoder that shows no hidden
            states.
        UnsupportedError: a decoder whose state a wrong guess would change for good.
    """
    deciding = [decoder, *([method.decoder] if isinstance(method, Draft) else [])]
    if any(getattr(each, "stateful", False) for each in deciding):
        raise UnsupportedError(
            "speculation: a gated delta net cannot take a wrong guess back out of its state",
            "use --decoder transformers, which keeps the states from before a guess, or generate "
            "one token after the other",
        )
    if isinstance(method, Draft) and method.decoder.vocab_size != decoder.vocab_size:
        cause = (
            f"draft: a vocabulary of {method.decoder.vocab_size}, the model's has "
            f"{decoder.vocab_size}"
        )
        raise UsageError(cause, "use a draft model with the same tokenizer")
    if isinstance(method, Medusa) and not isinstance(decoder, HiddenDecoder):
        raise UsageError(
            f"medusa: {type(decoder).__name__} shows no hidden states", "use transformers' modules"
        )
    if isinstance(method, Further) and not isinstance(decoder, StateDecoder):
        raise UsageError(
            f"mtp: {type(decoder).__name__} shows no hidden states alone", "use another decoder"
        )
    generator, outputs = request.generator(), list[Tensor]()
    for index in range(request.input_ids.shape[0]):
        one = request.row(index)
        for _ in range(request.returned):
            new = _speculate(decoder, one, _proposer(method, one, generator), generator=generator)
            outputs.append(torch.cat([request.input_ids[index], new]))
    longest = max(len(row) for row in outputs)
    return torch.stack(
        [functional.pad(row, (0, longest - len(row)), value=request.pad) for row in outputs]
    )


def _speculate(
    decoder: Decoder, request: Request, proposer: Proposer, *, generator: torch.Generator | None
) -> Tensor:
    """The new tokens of a prompt, [n]."""
    tokens, start, cached = request.input_ids, request.prompt_length, 0
    hidden: Tensor | None = None
    decoder.begin(rows=1, capacity=request.capacity)
    # logits of the whole prompt would be large; from here on a forward has few positions
    if start > 1:
        if isinstance(proposer, _Ahead) and isinstance(decoder, StateDecoder):
            proposer.see(decoder.forward_states(tokens[:, :-1])[0], tokens[0, 1:])
        else:
            decoder.forward(tokens[:, :-1])
        cached = start - 1
    while tokens.shape[1] < request.capacity:
        guess, drawn_from = proposer.propose(
            tokens, request.capacity - tokens.shape[1] - 1, hidden=hidden
        )
        step = torch.cat([tokens[:, cached:], guess[None]], dim=1)  # [1, 1 + k]
        if isinstance(decoder, HiddenDecoder) and isinstance(proposer, _Heads | _Ahead):
            logits, states = decoder.forward_hidden(step)
        else:
            logits, states = decoder.forward(step, last_only=False), None
        tried = torch.cat([tokens, guess[None]], dim=1)
        confirmed = tokens.shape[1]
        # [1 + k, V]
        scores = torch.cat(
            [
                allowed(logits[:, i], tried[:, : confirmed + i], request)
                for i in range(len(guess) + 1)
            ]
        )
        taken = _confirm(scores, guess, drawn_from, request=request, generator=generator)
        if request.counts is not None:
            request.counts.proposed += len(guess)
            request.counts.taken += len(taken) - 1
        for token in taken:
            tokens = torch.cat([tokens, token[None, None]], dim=1)
            if request.stream is not None:
                request.stream(int(token))
            if ended(tokens, request)[0]:
                return tokens[0, start:]
        cached = tokens.shape[1] - 1
        decoder.crop(cached)
        hidden = None if states is None else states[0, len(taken) - 1]
        if isinstance(proposer, _Ahead) and states is not None:
            proposer.see(states[0, : len(taken)], taken)
    return tokens[0, start:]


def _confirm(
    scores: Tensor,
    guess: Tensor,
    drawn_from: Tensor | None,
    *,
    request: Request,
    generator: torch.Generator | None,
) -> Tensor:
    """The tokens that are taken: proposals up to the first refused one, then one of the model's.

    Args:
        scores: [k + 1, V], logits of the model after the text and after each proposal.
        guess: [k], the proposals.
        drawn_from: [k, V], probabilities of the proposals, or None for those that were certain.
        request: sampling.
        generator: generator of the draws; None greedily.

    Returns:
        [1..k + 1] tokens.
    """
    count = len(guess)
    if request.sampling is None:
        chosen = scores.argmax(dim=-1)
        agreed = int((chosen[:count] == guess).cumprod(dim=0).sum())
        return chosen[: agreed + 1]
    own = distribution(scores, request.sampling)
    theirs = functional.one_hot(guess, own.shape[1]).float() if drawn_from is None else drawn_from
    at = guess[:, None]
    draws = torch.rand(count, generator=generator, device=scores.device)
    agrees = draws * theirs.gather(1, at)[:, 0] < own[:count].gather(1, at)[:, 0]
    agreed = int(agrees.cumprod(dim=0).sum())
    # the refused proposal's place is drawn from what the model has above the draft, which makes
    # the tokens distributed as the model's own
    rest = own[agreed] if agreed == count else (own[agreed] - theirs[agreed]).clamp(min=0)
    return torch.cat([guess[:agreed], torch.multinomial(rest, 1, generator=generator)])


def _proposer(method: Speculation, request: Request, generator: torch.Generator | None) -> Proposer:
    if isinstance(method, Draft):
        return _Drafter(method, request, generator)
    if isinstance(method, Further):
        return _Ahead(method, request, generator)
    return _Finder(method) if isinstance(method, Lookup) else _Heads(method)


class _Drafter:
    """Proposes what a draft model says, by the same rules and the same sampling."""

    def __init__(self, method: Draft, request: Request, generator: torch.Generator | None) -> None:
        """Begin a text."""
        self._decoder, self._count = method.decoder, method.tokens
        self._request, self._generator = request, generator
        self._seen = request.input_ids[:, :0]  # what the draft's cache holds
        self._decoder.begin(rows=1, capacity=request.capacity)

    def propose(
        self, tokens: Tensor, count: int, *, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guess, from a cache cropped to what was confirmed."""
        confirmed = tokens.shape[1]
        common = min(self._seen.shape[1], confirmed - 1)
        same = int((self._seen[0, :common] == tokens[0, :common]).cumprod(dim=0).sum())
        if same < self._seen.shape[1]:
            self._decoder.crop(same)
        tried, cached, drawn_from = tokens, same, []
        for _ in range(min(self._count, count)):
            scores = allowed(self._decoder.forward(tried[:, cached:]), tried, self._request)
            cached = tried.shape[1]
            if self._request.sampling is not None:
                drawn_from.append(distribution(scores, self._request.sampling))
            tried = torch.cat([tried, choose(scores, self._request, self._generator)[None]], dim=1)
        self._seen = tried[:, :cached]
        return tried[0, confirmed:], torch.cat(drawn_from) if drawn_from else None


class _Ahead:
    """Proposes what the model's layer that predicts further tokens says."""

    def __init__(
        self, method: Further, request: Request, generator: torch.Generator | None
    ) -> None:
        """Begin a text."""
        self._layer, self._count = method.layer, method.tokens
        self._request, self._generator = request, generator
        self._seen = 0  # columns of confirmed tokens
        self._state: Tensor | None = None  # state after the last of them, [1, H]
        self._layer.begin(request.capacity)

    def see(self, hidden: Tensor, tokens: Tensor) -> None:
        """Take confirmed tokens [n], and the model's hidden states before each of them [n, H]."""
        self._layer.crop(self._seen)
        self._state = self._layer.forward(hidden, tokens)[-1:]
        self._seen += len(tokens)

    def propose(
        self, tokens: Tensor, count: int, *, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guess from the state after the last token, then from the layer's own states."""
        confirmed, state, drawn_from, tried = tokens.shape[1], self._state, list[Tensor](), tokens
        if state is None:
            return tokens[0, :0], None
        for number in range(min(self._count, count)):
            if number:
                state = self._layer.forward(state, tried[0, -1:])
            scores = allowed(self._layer.logits(state), tried, self._request)
            if self._request.sampling is not None:
                drawn_from.append(distribution(scores, self._request.sampling))
            tried = torch.cat([tried, choose(scores, self._request, self._generator)[None]], dim=1)
        return tried[0, confirmed:], torch.cat(drawn_from) if drawn_from else None


class _Finder:
    """Proposes what followed the last tokens where they first stood."""

    def __init__(self, method: Lookup) -> None:
        """Take the lengths."""
        self._method = method

    def propose(
        self, tokens: Tensor, count: int, *, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guess, by the longest end of the text that stood before."""
        return look_up(tokens[0], self._method, count), None


def look_up(text: Tensor, method: Lookup, count: int) -> Tensor:
    """The tokens that followed the longest end of a text where it first stood before.

    Args:
        text: [L] int64.
        method: length of the ends that are looked for, and number of proposed tokens.
        count: most tokens, 0 or more.
    """
    for size in range(min(method.ngram, len(text) - 1), 0, -1):
        places = (text.unfold(0, size, 1)[:-1] == text[-size:]).all(dim=1).nonzero()
        if len(places):
            begin = int(places[0, 0]) + size
            return text[begin : begin + min(method.tokens, count)]
    return text[:0]


class _Heads:
    """Proposes what Medusa's heads say."""

    def __init__(self, method: Medusa) -> None:
        """Take the heads."""
        self._method = method

    def propose(
        self, tokens: Tensor, count: int, *, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Guess from the state that the last token came from.

        Head i is i + 1 tokens ahead of it.
        """
        return (tokens[0, :0] if hidden is None else self._method.propose(hidden)[:count]), None
