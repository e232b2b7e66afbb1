"""Methods to generate on any `Decoder`: greedy, sampled, beams, contrastive, and speculation.

    logits.py       filters and penalties: pure functions on [B, V]
    options.py      probabilities of Sampling, and what proposes; the other options are in
                    ../generate_job.py
    request.py      prompts with these options, and the steps that every method shares
    sequential.py   one token after the other
    beams.py        beam search; constrained.py: with words that must occur
    speculation.py  a draft model, the model's own layer ahead, the text itself or Medusa's heads
                    propose, the model confirms
    medusa.py       the heads
    contrastive.py  contrastive search
    text.py         stop strings, and text that is shown while it grows

A batch has its prompts padded on the left. The tokens of a row are those that it would have alone.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding.beams import beam_search
from quantflow.runtime.decoding.constrained import constrained_search
from quantflow.runtime.decoding.contrastive import contrastive_search
from quantflow.runtime.decoding.medusa import Medusa, load_medusa
from quantflow.runtime.decoding.options import Draft, Further, distribution
from quantflow.runtime.decoding.request import Counts, Request
from quantflow.runtime.decoding.sequential import decode
from quantflow.runtime.decoding.speculation import speculate
from quantflow.runtime.generate_job import Beams, Contrastive, Lookup, Rules, Sampling, require

__all__ = [
    "Beams",
    "Contrastive",
    "Counts",
    "Draft",
    "Further",
    "Lookup",
    "Medusa",
    "Method",
    "Rules",
    "Sampling",
    "distribution",
    "generate",
    "load_medusa",
]

Method = Beams | Contrastive | Draft | Further | Lookup | Medusa


def generate(
    model: nn.Module | Decoder,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    method: Method | None = None,
    sampling: Sampling | None = None,
    rules: Rules | None = None,
    padding: Tensor | None = None,
    returned: int = 1,
    eos_token_id: int | Collection[int] | None = None,
    pad_token_id: int | None = None,
    stop: Callable[[Sequence[int]], bool] | None = None,
    stream: Callable[[int], None] | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: a Hugging Face causal LM, one whose linears are QuantLinear, or a Decoder.
        input_ids: [B, S] int64, S at least 1.
        max_new_tokens: tokens that are added to each prompt, at most.
        method: one of the module's methods; None takes one token after the other.
        sampling: None takes the most likely token, or the best beams.
        rules: penalties and forbidden tokens.
        padding: [B] int64, number of padding tokens at the left of each prompt; None: none.
        returned: sequences per prompt, with sampling or beams.
        eos_token_id: stop after any of these; it is part of the result.
        pad_token_id: fills rows that ended; None takes the first end token, or 0.
        stop: function from the new tokens of a row to whether its text ends there.
        stream: called with each new token as soon as it is known; for one sequence, without beams.
        counts: numbers of proposed and taken tokens, which speculation adds to.

    Returns:
        [B * returned, S + n] int64, the prompts included.

    Raises:
        UsageError: shapes or counts that cannot be decoded, that exceed the model's positions, or
            that do not go together.
        InputError: the model's logits hold NaN.
    """
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
    request = Request(
        input_ids=input_ids,
        padding=None if padding is None or not bool(padding.any()) else padding,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        rules=rules or Rules(),
        ends=ends,
        stop=stop,
        pad=pad_token_id if pad_token_id is not None else (ends or (0,))[0],
        returned=returned,
        stream=stream,
        counts=counts,
    )
    if not isinstance(model, Decoder):
        # here: it imports transformers
        from quantflow.runtime.transformers_decoder import TransformersDecoder

        model = TransformersDecoder(model, crops=isinstance(method, Draft | Lookup | Medusa))
    _check(model, request, method)
    return _run(model, request, method)


@torch.inference_mode()
def _run(decoder: Decoder, request: Request, method: Method | None) -> Tensor:
    if method is None:
        return decode(decoder, request)
    if isinstance(method, Contrastive):
        return contrastive_search(decoder, request, method)
    if not isinstance(method, Beams):
        return speculate(decoder, request, method)
    if not method.force_words:
        return beam_search(decoder, request, method)[0]
    continued = []
    for index in range(request.input_ids.shape[0]):  # each row owes its own words
        one = request.row(index)
        new = constrained_search(decoder, one, method)[0]
        left = request.input_ids[index, : request.prompt_length - one.prompt_length]
        continued.append(torch.cat([left.expand(len(new), -1), new], dim=1))
    longest = max(rows.shape[1] for rows in continued)
    return torch.cat(
        [
            functional.pad(rows, (0, longest - rows.shape[1]), value=request.pad)
            for rows in continued
        ]
    )


def _check(decoder: Decoder, request: Request, method: Method | None) -> None:
    """Refuse a request that cannot be decoded.

    Raises:
        UsageError: naming the shape, the count, or the two options that disagree.
    """
    shape, padding, new = list(request.input_ids.shape), request.padding, request.max_new_tokens
    require(
        len(shape) == 2 and min(shape) >= 1,
        f"input_ids: shape {shape}, [B, S] is decoded",
        "give prompts of a token or more",
    )
    fits = padding is None or (
        padding.shape == (shape[0],) and bool(((padding >= 0) & (padding < shape[1])).all())
    )
    require(
        fits,
        f"padding={padding} of prompts {shape}",
        "give each row's count, smaller than its length",
    )
    require(new >= 1, f"max_new_tokens={new}", "use 1 or more")
    real = shape[1] - (0 if padding is None else int(padding.min()))
    positions = decoder.positions
    cause = f"prompt of {real} + max_new_tokens={new}: the model has {positions} positions"
    require(
        positions is None or real + new <= positions,
        cause,
        "shorten the prompt or use fewer new tokens",
    )
    most = (
        method.count
        if isinstance(method, Beams)
        else 1
        if request.sampling is None
        else request.returned
    )
    cause = f"returned={request.returned}: {most} sequences differ"
    require(1 <= request.returned <= most, cause, "sample, or use as many beams")
    alone = shape[0] * request.returned == 1 and not isinstance(method, Beams)
    require(
        request.stream is None or alone,
        "stream: more than one sequence grows",
        "stream one prompt, without beams",
    )
