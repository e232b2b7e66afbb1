"""Medusa's heads of a folder, for a loaded artifact."""

from pathlib import Path

import torch
from torch import Tensor

from quantflow.errors import InputError
from quantflow.runtime.decoding.medusa import Medusa, load_medusa
from quantflow.runtime.load import Loaded


def medusa_heads(
    loaded: Loaded, folder: str | Path, *, device: str | torch.device = "cpu"
) -> Medusa:
    """The heads, read, of the model's own shapes.

    Args:
        loaded: loaded artifact.
        folder: folder of the heads.
        device: device of the heads.

    Raises:
        InputError: heads of another model, or see `load_medusa`.
    """
    medusa, width = load_medusa(folder, device=device), loaded.artifact.width
    for number, head in enumerate(medusa.heads):
        place = f"{folder}: head {number}"
        for at, (weight, bias) in enumerate(head.blocks):
            _require(f"{place}, weight of block {at}", weight, [width, width])
            _require(f"{place}, bias of block {at}", bias, [width])
        _require(place, head.projection, [loaded.decoder.vocab_size, width])
    return medusa


def _require(what: str, tensor: Tensor, own: list[int]) -> None:
    """Refuse a tensor of another shape than the model's own.

    Raises:
        InputError: naming both shapes.
    """
    if list(tensor.shape) != own:
        raise InputError(
            f"{what} is {list(tensor.shape)}, the model's is {own}",
            "give heads that were trained for this model",
        )
