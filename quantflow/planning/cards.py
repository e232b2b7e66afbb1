"""Seconds of the stages on GPUs, and bytes that a decoded token moves, by arithmetic.

No GPU is asked. A card is the figures of its maker's data sheet; what a stage computes and moves
follows from shapes. Each rate is the data sheet's peak, and launches, waits and activations are
left out, so the seconds are the least that a card can take. `plan --probe` times a card instead.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from quantflow import cpu_threads
from quantflow.algorithms import ALGORITHMS
from quantflow.backends.backend import is_e4m3, is_int
from quantflow.core.scheme import LinearScheme
from quantflow.numerics.feedback import BLOCK
from quantflow.observers import OBSERVERS
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver
from quantflow.planning.durations import GptqSpeed, Speed
from quantflow.planning.plan import Plan
from quantflow.planning.sizes import (
    FLOAT,
    LayerSize,
    ModelSize,
    elements_of,
    head_file_bytes,
    quantized_bytes,
)

# Assumed of the host, which no data sheet of a card says: bytes a second of one NVMe disk, read or
# written, and of sha256 on one core.
DISK, HASH = 2.0e9, 1.5e9
_BFLOAT16 = 2  # bytes
# Instructions for a weight and a column of its block, in the kernel of gptq's columns: a choice and
# an addition that find the column, a product and an addition that hand its error on.
_PER_COLUMN = 4


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU by its data sheet.

    Attributes:
        memory: bytes.
        bandwidth: bytes a second.
        float32: operations a second of float32, a multiply-add counted as two, without TF32.
        bfloat16: those of dense products of bfloat16 with float32 sums.
    """

    memory: float
    bandwidth: float
    float32: float
    bfloat16: float


# As secondary pages quote the makers' data sheets; the sheets themselves were not opened. NVIDIA:
# "A100 Tensor Core GPU" (80 GB SXM), "L40S", "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU"
# (SXM) and "HGX B200"; AMD: "Instinct MI300X". Figures with sparsity are halved.
CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "A100": Card(memory=80e9, bandwidth=2.039e12, float32=19.5e12, bfloat16=312e12),
        "L40S": Card(memory=48e9, bandwidth=0.864e12, float32=91.6e12, bfloat16=362e12),
        "H100": Card(memory=80e9, bandwidth=3.35e12, float32=67e12, bfloat16=989e12),
        "H200": Card(memory=141e9, bandwidth=4.8e12, float32=67e12, bfloat16=989e12),
        "B200": Card(memory=180e9, bandwidth=8.0e12, float32=80e12, bfloat16=2250e12),
        "MI300X": Card(memory=192e9, bandwidth=5.3e12, float32=163.4e12, bfloat16=1307e12),
    }
)


def speed_of(
    card: Card,
    model: ModelSize,
    plans: Sequence[Plan],
    *,
    dtype: torch.dtype,
    narrow: Collection[str] = (),
) -> Speed:
    """The least seconds of a card's work, as rates.

    Args:
        card: the card.
        model: sizes of the model.
        plans: plans of the artifacts.
        dtype: dtype in which measure and validate run layers.
        narrow: artifacts whose calibration text runs in bfloat16; that of others is float32.
    """
    layers = [layer for layer in model.layers if layer.groups]
    operations = 2 * sum(map(_weights_of_a_token, layers)) / len(model.layers)
    squares = sum(
        share * k * k
        for layer in layers
        for (_, _, k), share in zip(layer.groups, layer.shares, strict=True)
    )
    read_once = FLOAT / card.bandwidth
    # both halves of x^T x are equal: a multiply-add for each pair of features
    hessian = 1 / card.float32
    observed = dict.fromkeys(OBSERVERS, read_once)
    observed[HessianObserver.NAME] = hessian * squares / sum(layer.features for layer in layers)
    nearest = 2 * read_once  # a weight is read and its code written, both as float32 at most
    columns = GptqSpeed(
        cubic=1 / 3 / card.float32,  # Cholesky
        linear=2 * _PER_COLUMN * BLOCK / card.float32,  # a data sheet counts an instruction as two
        square=1 / card.float32,  # errors of a block to the columns after it
    )
    return Speed(
        cores=cpu_threads.usable_cores(),
        units=1,
        ahead=True,
        read=1 / DISK,
        written=1 / DISK,
        hashed=1 / HASH,
        token=operations / card.float32,
        run=operations / (card.bfloat16 if dtype == torch.bfloat16 else card.float32),
        observed=observed,
        hessian=hessian,
        gradient=2 / card.float32,
        narrow=dict.fromkeys(narrow, (operations / card.bfloat16, 1 / card.bfloat16)),
        rounded={plan.name: nearest for plan in plans},
        gptq={
            plan.name: columns
            for plan in plans
            if HESSIAN_SUM.name in ALGORITHMS[plan.algorithm].NEEDS
        },
    )


def known(plan: Plan) -> bool:
    """Whether a card does what the plan's algorithm does: yaqa's descent is the host's."""
    return ALGORITHMS[plan.algorithm].ON_DEVICE


def _weights_of_a_token(layer: LayerSize) -> float:
    """Weights of linears that a token goes through, on average."""
    return sum(
        share * sum(outputs) * k
        for (_, outputs, k), share in zip(layer.groups, layer.shares, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes that decoding one token reads on a GPU, in bfloat16.

    Attributes:
        weights: of the layers that it goes through, and of the head.
        position: of keys and values, for each position before it.
    """

    weights: float
    position: int

    def least_seconds(self, card: Card, *, positions: int) -> float:
        """Seconds in which a card reads them."""
        return (self.weights + positions * self.position) / card.bandwidth


def token_bytes(model: ModelSize, plan: Plan) -> TokenBytes:
    """Bytes that a token of an artifact moves.

    A weight that a GPU's kernel takes is read as it is stored, any other as the bfloat16 that the
    reference makes of it once. Experts count by the share of tokens that go to one. Keys and values
    are in bfloat16 in the cache of a GPU.
    """
    weights = float(head_file_bytes(model, plan.head) or model.head[1])
    for layer in model.layers:
        if not layer.groups:
            continue
        weights += layer.stored
        for (names, _, _), share in zip(layer.groups, layer.shares, strict=True):
            for name in names:
                scheme, info = plan.schemes[name], model.infos[f"{name}.weight"]
                read = float(info.nbytes)
                if scheme is not None and has_kernel(scheme):
                    read = quantized_bytes(name, scheme, info)
                elif scheme is not None:
                    read = _BFLOAT16 * elements_of(info)
                weights += share * read - info.nbytes
    attending = sum(bool(layer.groups) for layer in model.layers)
    position = 2 * model.kv_heads * model.head_dim * _BFLOAT16 * attending
    return TokenBytes(weights=weights, position=position)


def has_kernel(scheme: LinearScheme) -> bool:
    """Whether a kernel of some GPU multiplies a scheme's codes, as docs/gpu.md has them."""
    weights, inputs = scheme.weights, scheme.input
    if is_e4m3(weights):
        return weights.granularity != "per_group" and is_e4m3(inputs)
    if is_int(weights, 8) and weights.symmetric:
        return inputs is None or (is_int(inputs, 8) and weights.granularity != "per_group")
    of_rows = weights.granularity in ("per_group", "per_channel")
    return is_int(weights, 4) and inputs is None and of_rows
