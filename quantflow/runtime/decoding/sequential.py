"""One token after the other: the most likely, or one drawn."""

import torch
from torch import Tensor

from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.request import Request, allowed, choose, ended


def decode(decoder: Decoder, request: Request) -> Tensor:
    """Continue each prompt, greedily or sampled.

    The prompts are one forward, every further token is another. A row that has ended is filled with
    padding until all have.

    Returns:
        [B * returned, S + n] int64, sequences of a prompt one after the other.
    """
    decoder.begin(rows=request.input_ids.shape[0], capacity=request.capacity)
    logits = decoder.forward(request.input_ids, padding=request.padding)  # [B, V]
    if request.returned > 1:
        rows = torch.arange(logits.shape[0], device=logits.device).repeat_interleave(
            request.returned
        )
        decoder.keep(rows)
        logits, request = logits[rows], request.repeated(request.returned)
    generator, tokens = request.generator(), request.canvas()
    running = torch.ones_like(tokens[:, 0], dtype=torch.bool)
    for length in range(request.prompt_length, request.capacity):
        if length > request.prompt_length:
            logits = decoder.forward(tokens[:, length - 1 : length])
        chosen = choose(allowed(logits, tokens[:, :length], request), request, generator)
        tokens[:, length] = torch.where(running, chosen, request.pad)
        if request.stream is not None:
            request.stream(int(chosen[0]))
        running &= ~ended(tokens[:, : length + 1], request)
        if not running.any():
            return tokens[:, : length + 1]
    return tokens
