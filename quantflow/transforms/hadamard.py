"""Hadamard rotation: spread outliers over all channels, folded into weights; same function.

    residual     x Q             an RMSNorm commutes with a rotation once its weight is folded
                                 into the linears that read it
    reads it     W diag(g) Q     g is the norm's weight, which becomes 1; in a mixture also routers,
                                 every expert's gate and up, and what a shared expert reads
    writes it    Q^T W, b Q      in a mixture also every expert's down
    values       v R, per head   rows of the value projection R^T W, columns of the output
                                 projection W R

    down         z H, at run time, and columns of the down projection W H; only where the
                 recipe says `down: true`

Q is of the size of the residual, R of that of a head; both are Hadamard matrices with random signs
(quantflow/core/orthogonal.py). They cost nothing at run time. A gate stands before the down
projection, so nothing can be folded in there: H is applied while the model runs, in blocks of the
largest power of two that divides its inputs and without signs, a form that `transform_config` of
compressed-tensors can express. QuaRot's rotation of queries and keys is left out. Sources: Ashkboos
et al. 2024, arXiv:2404.00456 (QuaRot), section 4, stages 1a, 1b, 1c; Liu et al. 2024,
arXiv:2405.16406 (SpinQuant), R1, R2 and R4, here not learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.cast import WIDER_MODEL, Cast
from quantflow.core.orthogonal import (
    HadamardRotation,
    mixed,
    rotate_columns_,
    rotate_rows_,
    rotated,
    rotation,
)
from quantflow.core.support import AS_MEASURED, AS_MEASURED_HISTOGRAMS, Refusal, Supports
from quantflow.errors import UsageError

NAME: str = "hadamard"
VERSION: int = 1
SUPPORTS = Supports(
    histograms=AS_MEASURED_HISTOGRAMS,
    chosen_schemes=AS_MEASURED,
    centred_norms=Refusal(
        why="; the norms of family {family} subtract the mean, which no rotation commutes with",
        remedy="leave hadamard out, or use a family with RMSNorm",
        unsupported=True,
    ),
    ranks=Refusal(remedy="quantize with one process, or leave hadamard out"),
)
# the option by which a KV cache's values change, so that measured scales do not fit
CHANGES_VALUES = "heads"
MIXES_INPUTS = "down"  # the option by which inputs are mixed while the model runs
OPTIONS: Mapping[str, Any] = {"seed": 0, "heads": True, "down": False}


@dataclass(frozen=True, kw_only=True)
class Rotations:
    """The rotations of a model.

    Attributes:
        residual: rotation of the hidden state between layers, which every linear reads or writes.
        head: rotation of the values of each head; None where they stay.
    """

    residual: HadamardRotation
    head: HadamardRotation | None


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's options, checked.

    Args:
        options: `seed` of the signs, a number from 0 on; `heads`, whether values are rotated too;
            `down`, whether the input of the down projection is, while the model runs.

    Raises:
        UsageError: an option has no meaning.
    """
    seed = options["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 32:
        raise UsageError(f"hadamard seed={seed!r}", "give a whole number from 0 to 4294967295")
    for key in ("heads", "down"):
        if not isinstance(options[key], bool):
            raise UsageError(f"hadamard {key}={options[key]!r}", "give true or false")
    return dict(options)


def needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The statistics that the rotation reads: none.

    Those of other methods are measured after it.
    """
    del options
    return ()


def solve(*, hidden: int, head_dim: int, options: Mapping[str, Any]) -> Rotations:
    """The rotations of a model.

    Args:
        hidden: features of its hidden state.
        head_dim: features of a value head.
        options: result of `checked`.
    """
    chosen = checked(options)
    head = rotation(head_dim, seed=chosen["seed"], sequence=1) if chosen["heads"] else None
    return Rotations(residual=rotation(hidden, seed=chosen["seed"]), head=head)


def reader(
    weight: Tensor,
    norm_weight: Tensor,
    by: HadamardRotation,
    *,
    dtype: torch.dtype,
    name: str = "the weight",
) -> Tensor:
    """The weight of a linear that reads the residual through a norm: W diag(g) Q, in `dtype`.

    Args:
        weight: [O, H], any float dtype.
        norm_weight: [H], which is 1 afterwards.
        by: rotation of the residual.
        dtype: dtype of the result.
        name: name of the weight, for messages.

    Raises:
        UsageError: a value that the dtype does not hold.
    """
    target, cast = torch.empty(weight.shape, dtype=dtype), Cast(name, dtype)
    for rows in groups.row_units(weight):
        target[rows] = cast(rotated(weight[rows].float() * norm_weight.float(), by))
    cast.require_held(WIDER_MODEL)
    return target


def writer(weight: Tensor, by: HadamardRotation, *, dtype: torch.dtype) -> Tensor:
    """The weight [H, I] of a linear that writes the residual, Q^T W, rounded to `dtype`.

    A bias [H] becomes b Q.
    """
    if weight.ndim == 1:
        return rotated(weight, by).to(dtype)
    return rotate_columns_(torch.empty(weight.shape, dtype=dtype), weight, by)


def values(weight: Tensor, by: HadamardRotation) -> Tensor:
    """The value projection with each head rotated, float32.

    It is a weight [heads * d, I] or a bias [heads * d].
    """
    if weight.ndim == 1:
        return rotated(weight, by)
    heads = weight.reshape(-1, by.size, weight.shape[1])  # [heads, d, I]
    return torch.cat([rotate_columns_(torch.empty(head.shape), head, by) for head in heads])


def value_reader(weight: Tensor, by: HadamardRotation) -> Tensor:
    """The weight [O, heads * d] of the output projection after its inputs' rotation, float32.

    Inputs are rotated head by head.
    """
    return rotate_rows_(torch.empty(weight.shape), weight, by)


def block_of(features: int) -> int:
    """The number of inputs of a down projection that are mixed together.

    It is the largest power of two that divides them.
    """
    return features & -features


def mixed_reader(weight: Tensor, block: int) -> Tensor:
    """The weight [O, I] of a linear whose inputs are mixed at run time, float32."""
    target = torch.empty(weight.shape)
    for rows in groups.row_units(weight):
        target[rows] = mixed(weight[rows].float(), block)
    return target


def residual(hidden: Tensor, by: HadamardRotation) -> Tensor:
    """A hidden state [..., H] of the rotated model."""
    return rotated(hidden, by)
