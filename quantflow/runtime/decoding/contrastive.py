"""Contrastive search (Su et al. 2022): of the likeliest tokens, one that is unlike the text."""

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.errors import UsageError
from quantflow.runtime.decoder import Decoder, HiddenDecoder
from quantflow.runtime.decoding.request import Request, allowed, ended
from quantflow.runtime.generate_job import Contrastive


def contrastive_search(decoder: Decoder, request: Request, method: Contrastive) -> Tensor:
    """Continue each prompt; every step runs all candidates of a row to see their hidden states.

    A candidate's score is (1 - alpha) * probability - alpha * (its state's largest cosine
    similarity with an earlier state).

    Returns:
        [B, S + n] int64.

    Raises:
        UsageError: a decoder that shows no hidden states, sampling, or several returned sequences.
    """
    if not isinstance(decoder, HiddenDecoder):
        raise UsageError(
            f"contrastive: {type(decoder).__name__} shows no hidden states",
            "use transformers' modules",
        )
    if request.sampling is not None or request.returned > 1:
        raise UsageError(
            "contrastive: its choice is certain, there is nothing to draw or to rank",
            "ask for one sequence",
        )
    rows, start = request.input_ids.shape[0], request.prompt_length
    decoder.begin(rows=rows, capacity=request.capacity)
    every, states = decoder.forward_hidden(request.input_ids, padding=request.padding)
    logits, said = every[:, -1], functional.normalize(states, dim=-1)  # [B, V], [B, L, H]
    if request.padding is not None:
        hidden_columns = torch.arange(start, device=said.device) < request.padding[:, None]
        # padding was not said: nothing is like it
        said = said.masked_fill(hidden_columns[:, :, None], float("nan"))
    tokens, running = request.canvas(), torch.ones_like(request.input_ids[:, 0], dtype=torch.bool)
    spread = torch.arange(rows, device=tokens.device).repeat_interleave(method.top_k)
    for length in range(start, request.capacity):
        # [B, k]
        likely = allowed(logits, tokens[:, :length], request).softmax(dim=-1).topk(method.top_k)
        decoder.keep(spread)
        # [B * k, 1, V], [B * k, 1, H]
        ahead, states = decoder.forward_hidden(likely.indices.reshape(-1, 1))
        states = functional.normalize(states, dim=-1).view(rows, method.top_k, -1)
        alike = (states @ said.transpose(1, 2)).nan_to_num(nan=-1.0).amax(dim=-1)  # [B, k]
        # [B, 1]
        best = ((1 - method.alpha) * likely.values - method.alpha * alike).argmax(
            dim=-1, keepdim=True
        )
        chosen = torch.arange(rows, device=best.device) * method.top_k + best[:, 0]
        decoder.keep(chosen)
        logits, said = (
            ahead[chosen, 0],
            torch.cat([said, states.flatten(0, 1)[chosen, None]], dim=1),
        )
        tokens[:, length] = torch.where(running, likely.indices.gather(1, best)[:, 0], request.pad)
        if request.stream is not None:
            request.stream(int(tokens[0, length]))
        running &= ~ended(tokens[:, : length + 1], request)
        if not running.any():
            return tokens[:, : length + 1]
    return tokens
