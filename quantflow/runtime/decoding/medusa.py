"""Medusa's heads (Cai et al. 2024, section 2.1).

Each guesses a token further ahead, from the model's last hidden state.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.errors import InputError
from quantflow.models.reading import read_file

HEADS_FILE = "medusa_lm_head.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class MedusaHead:
    """One head: residual blocks x + SiLU(W x + b), then a projection to the vocabulary.

    Attributes:
        blocks: weight [H, H] and bias [H] of each block.
        projection: projection to the vocabulary, [V, H].
    """

    blocks: tuple[tuple[Tensor, Tensor], ...]
    projection: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits [V] of a hidden state [H]."""
        for weight, bias in self.blocks:
            hidden = hidden + functional.silu(functional.linear(hidden, weight, bias))
        return functional.linear(hidden, self.projection)


@dataclass(frozen=True, kw_only=True, eq=False)
class Medusa:
    """Speculation by heads.

    Attributes:
        heads: the first guesses the token after the model's own next one.
    """

    heads: tuple[MedusaHead, ...]

    def propose(self, hidden: Tensor) -> Tensor:
        """The likeliest token of each head, [heads] int64. hidden: [H] float32."""
        return torch.stack([head(hidden).argmax() for head in self.heads])


def load_medusa(folder: str | Path, *, device: str | torch.device = "cpu") -> Medusa:
    """Read the heads of a folder.

    The tensors are `{head}.{block}.linear.weight`, `.bias` and last `{head}.{blocks}.weight`.

    Args:
        folder: folder with HEADS_FILE.
        device: device of the heads.

    Raises:
        InputError: no such file, a damaged one, or names that are not those of heads.
    """
    path = Path(folder) / HEADS_FILE
    tensors = {name: tensor.float().to(device) for name, tensor in read_file(path).items()}
    heads: list[MedusaHead] = []
    while any(name.startswith(f"{len(heads)}.") for name in tensors):
        number, blocks = len(heads), list[tuple[Tensor, Tensor]]()
        while f"{number}.{len(blocks)}.linear.weight" in tensors:
            stem = f"{number}.{len(blocks)}.linear"
            blocks.append((tensors.pop(f"{stem}.weight"), _take(tensors, f"{stem}.bias", path)))
        heads.append(
            MedusaHead(
                blocks=tuple(blocks),
                projection=_take(tensors, f"{number}.{len(blocks)}.weight", path),
            )
        )
    if tensors or not heads:
        listed = ", ".join(sorted(tensors)[:3]) or "no tensor"
        raise InputError(
            f"{path}: {listed} beside {len(heads)} heads",
            "convert the heads to names such as 0.0.linear.weight",
        )
    return Medusa(heads=tuple(heads))


def _take(tensors: dict[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise InputError(
            f"{path}: no {name}", "convert the heads to names such as 0.0.linear.weight"
        )
    return tensors.pop(name)
