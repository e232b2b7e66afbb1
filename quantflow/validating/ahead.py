"""How often a model takes the guesses of its layer that predicts further tokens (MTP).

Along a text the layer guesses each next token but one, from the model's hidden state and the token
that follows. A guess counts as taken where it is the model's own likeliest token there: then greedy
speculation takes it too. Quantization moves both, so the share says what is left of the speed.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantflow.runtime.decoder import HiddenDecoder
from quantflow.runtime.load import load
from quantflow.runtime.loaded_mtp import layer_ahead


def acceptance(
    folder: Path, sequences: Sequence[Tensor], *, exact: bool, rounded_inputs: bool = False
) -> dict[str, float]:
    """The guesses of a model along a text: `guesses`, `taken` and `acceptance`.

    Args:
        folder: an artifact, or a model that is not quantized.
        sequences: the text, [1, S] int64 each.
        exact: inputs that the schemes leave alone are never rounded.
        rounded_inputs: they are, as for `quantflow.load`.

    Raises:
        UnsupportedError: the model has no such layer, or none of its own kind.
        InputError: no sequence is long enough for a guess.
    """
    loaded = load(folder, decoder="auto", exact=exact, rounded_inputs=rounded_inputs)
    layer, guesses, taken = layer_ahead(loaded), 0, 0
    assert isinstance(loaded.decoder, HiddenDecoder)  # `layer_ahead` refuses others
    with torch.inference_mode():
        for sequence in sequences:
            length = sequence.shape[-1]
            if length < 2:
                continue
            tokens = sequence.reshape(1, length)
            loaded.decoder.begin(rows=1, capacity=length)
            layer.begin(length)
            logits, states = loaded.decoder.forward_hidden(tokens)
            guess = layer.logits(layer.forward(states[0, :-1], tokens[0, 1:])).argmax(dim=-1)
            taken += int((guess == logits[0, 1:].argmax(dim=-1)).sum())
            guesses += length - 1
    return {"guesses": guesses, "taken": taken, "acceptance": taken / max(1, guesses)}


def first_tokens(sequences: Sequence[Tensor], count: int) -> list[Tensor]:
    """The sequences up to so many tokens of all."""
    kept = []
    for sequence in sequences:
        if count > 0:
            kept.append(sequence[..., :count])
            count -= sequence.shape[-1]
    return kept
