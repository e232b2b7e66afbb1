"""Evaluation text as windows of token ids."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantflow.errors import InputError, UsageError


def evaluation_sequences(
    documents: Sequence[Sequence[int]], *, tokens: int, sequence_length: int
) -> list[Tensor]:
    """Cut documents into consecutive windows, in their order, until `tokens` token ids are used.

    Windows do not overlap and do not cross documents; a window continues its document without a new
    BOS. A remainder of one token predicts nothing and is left out, so the lengths can sum to less
    than `tokens`.

    Args:
        documents: token ids of each document.
        tokens: at most so many token ids in total; all of the text when it is shorter.
        sequence_length: at most so many token ids per window.

    Returns:
        int64 tensors of 2..sequence_length token ids.

    Raises:
        UsageError: tokens or sequence_length is below 2.
        InputError: no document holds two tokens.
    """
    if tokens < 2 or sequence_length < 2:
        raise UsageError(
            f"evaluation: tokens={tokens}, sequence_length={sequence_length}",
            "use 2 or more, one token predicts nothing",
        )
    sequences: list[Tensor] = []
    left = tokens
    for document in documents:
        for start in range(0, len(document), sequence_length):
            window = document[start : start + min(sequence_length, left)]
            if len(window) >= 2:
                sequences.append(torch.tensor(window, dtype=torch.int64))
                left -= len(window)
        if left < 2:
            break
    if not sequences:
        raise InputError(
            f"evaluation: {len(documents)} documents hold no two consecutive tokens",
            "give a longer evaluation text",
        )
    return sequences
