"""Tune: the scales of a whole model follow the gradient of its divergence; its integers stay.

Minimised is the divergence of the quantized model's predictions from the original's on the
calibration text, over the tokens of a few sequences at a time:

    loss = mean_t KL(p_t || p'_t)

with p the softmax of the original's logits and p' that of the quantized model's. Integers and zero
points are those that another algorithm chose. Each scale is multiplied by exp(u), u = 0 at first,
and

    weight = scale * (qvalue - zero_point),    scale = stored(scale_start * exp(u))

where stored() rounds to the dtype in which the layout keeps scales. Gradients pass stored() as if
it were not there. Adam takes the steps; their length falls to zero in a straight line.

A linear by itself knows only its own error. Here the scales of all linears make up for the errors
of all of them, so tuning gains the more the fewer bits there are (docs/accuracy.md has its gains
over yaqa at 2, 3 and 4 bits). Source: Chen et al. 2024, "EfficientQAT", arXiv:2407.11062, section
3.3 (scales alone, end to end; there towards labels, here towards the original as Hinton et al.
2015, arXiv:1503.02531, section 2); Kingma, Ba 2014, arXiv:1412.6980, algorithm 1.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.qtensor import QTensor
from quantflow.core.support import Refusal, Supports
from quantflow.errors import SchemeError, StatisticsError

NAME: str = "tune"
VERSION: int = 2
_LEAVE_OUT = "leave `tune` out, or give `--tune 0`"
_OTHER_WEIGHTS = Refusal(
    why="; it tunes scales per channel or group of integer weights, inputs as they are",
    remedy=_LEAVE_OUT,
)
SUPPORTS = Supports(
    float8=_OTHER_WEIGHTS,
    float4=_OTHER_WEIGHTS,
    shared_scale=_OTHER_WEIGHTS,
    quantized_inputs=_OTHER_WEIGHTS,
    rotations=Refusal(why="; it runs the layers of the model as it is", remedy=_LEAVE_OUT),
    ranks=Refusal(
        why="; it runs in one process", remedy=f"{_LEAVE_OUT}, or quantize with one process"
    ),
)

# Constants, since they are part of the result.
RATE = 0.02  # longest step, as a share of the distance of two integers at the end of the range
BETAS, EPSILON = (0.9, 0.95), 1e-8  # Adam's
CHECKED = 8  # sequences whose divergence decides whether the tuned scales are kept
# logits whose divergences are added at once: 4 MiB, which stay mapped
_LOGITS = 2**20
_WARM_UP = 5  # steps until RATE is reached: Adam's first means rest on few gradients


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """The tuned values of one linear, all [O, G] float32.

    Attributes:
        u: logarithm of the factor of the scale.
        mean, square: Adam's running means of the gradients by u and of their squares.
    """

    u: Tensor
    mean: Tensor
    square: Tensor


def state_bytes(scales: int) -> int:
    """The bytes of `Tuned` for so many scales: three float32 of each."""
    return 3 * 4 * scales


def begin(name: str, start: QTensor) -> Tuned:
    """The tuned values that stand for the start's own scales.

    Raises:
        SchemeError: the start is float8, or one scale stands for several rows.
    """
    scheme = start.scheme
    if scheme.kind != "int" or scheme.granularity not in ("per_channel", "per_group"):
        raise SchemeError(
            f"{name}: tune with {scheme.kind} {scheme.granularity}",
            "choose integers with scales per channel or group",
        )
    return Tuned(
        u=torch.zeros_like(start.scale),
        mean=torch.zeros_like(start.scale),
        square=torch.zeros_like(start.scale),
    )


def made(start: QTensor, tuned: Tuned, *, scale_dtype: torch.dtype) -> QTensor:
    """The weight with its tuned scales, as a loader will see them.

    Where u is 0 the scales are the start's.
    """
    scale = affine.stored_scale(start.scale * tuned.u.exp(), start.scheme, scale_dtype)
    zero_point = start.zero_point
    if zero_point is not None:
        zero_point = affine.moved_zero_point(zero_point, scale, start.scheme)
    return replace(start, scale=scale, zero_point=zero_point)


def slope(start: QTensor, tuned: Tuned, gradient: Tensor) -> Tensor:
    """The gradient by u, [O, G] float32.

    Args:
        start: weight whose scales are tuned.
        tuned: its u.
        gradient: gradient by the weight, [O, I] float32.
    """
    size = gradient.shape[1] // start.scale.shape[1]
    result = torch.empty_like(start.scale)
    for rows in groups.row_units(gradient):  # a few rows at a time are in float32
        part = start.rows(rows)
        points = groups.to_groups(part.qvalue.float(), size)  # [R, G, g]
        if part.zero_point is not None:
            points -= part.zero_point[..., None]
        result[rows] = (groups.to_groups(gradient[rows], size) * points).sum(-1)
    return result.mul_(start.scale * tuned.u.exp())


def rate(num_bits: int, *, step: int, steps: int) -> float:
    """The length of a step of u: the fewer bits, the longer.

    Args:
        num_bits: bits of the qvalues: there are 2^num_bits points, half of them on either side of
            zero.
        step: 0 .. steps - 1.
        steps: number of steps.
    """
    return math.ldexp(RATE, 1 - num_bits) * (1 - step / steps) * min(1.0, (step + 1) / _WARM_UP)


def stepped(start: QTensor, tuned: Tuned, gradient: Tensor, *, step: int, steps: int) -> Tuned:
    """The tuned values after a step of Adam.

    Args:
        start: weight whose scales are tuned.
        tuned: values before the step.
        gradient: gradient by u, [O, G].
        step: 0 .. steps - 1.
        steps: number of steps.
    """
    keep, keep_square = BETAS
    mean = tuned.mean.mul(keep).add_(gradient, alpha=1 - keep)
    square = tuned.square.mul(keep_square).addcmul_(gradient, gradient, value=1 - keep_square)
    direction = (mean / (1 - keep ** (step + 1))).div_(
        (square / (1 - keep_square ** (step + 1))).sqrt_().add_(EPSILON)
    )
    longest = rate(start.scheme.code_bits, step=step, steps=steps)
    return Tuned(u=tuned.u.sub(direction, alpha=longest), mean=mean, square=square)


def divergence(logits: Tensor, original: Tensor) -> tuple[float, Tensor]:
    """The sum over tokens of KL(original || quantized) in nats, and its gradient by the logits.

    Args:
        logits: logits of the quantized model, [S, V].
        original: logits of the original model, [S, V].

    Raises:
        StatisticsError: the divergence is not finite.
    """
    total = 0.0
    gradient = torch.empty_like(logits, dtype=torch.float32)
    for part in groups.spans(len(logits), max(1, _LOGITS // logits.shape[1])):
        predicted, target = (
            logits[part].float().log_softmax(-1),
            original[part].float().log_softmax(-1),
        )
        weights = target.exp()
        total += float(target.sub_(predicted).mul_(weights).sum(dtype=torch.float64))
        gradient[part] = predicted.exp_().sub_(weights)
    if not math.isfinite(total):
        raise StatisticsError(
            f"tune: the divergence of a sequence is {total}",
            "look at the quantized layers' errors, or leave tune out",
        )
    return total, gradient


def working_bytes(weights: int, scales: int, *, workers: int = 1) -> int:
    """The most memory that tuning a layer takes beyond the layer itself and its runs, in bytes.

    Each weight takes a float32 (the weight that runs) and a qvalue; each scale five (its own, u,
    the means, the gradients' sum); each worker the gradients of a sequence, and a unit of rows.

    Args:
        weights: number of weights of all quantized linears.
        scales: number of their scales.
        workers: number of workers.
    """
    return (
        5 * weights
        + 5 * 4 * scales
        + workers * (4 * weights + 4 * scales + 2 * 4 * groups.UNIT_ELEMENTS)
    )


def runs(samples: int, *, steps: int, sequences: int) -> int:
    """The number of sequences that run through every layer, a backward pass counted as two.

    Both steps and checks are in it.
    """
    return 4 * steps * min(sequences, samples) + 2 * min(CHECKED, samples)
