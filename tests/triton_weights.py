"""Random weights for the tests of Triton's kernels."""

import torch

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import preset, with_group_size

# scheme, group size or None, (outputs, inputs)
WEIGHTS = [
    ("W4A16", 32, (1, 32)),
    ("W4A16", 64, (33, 192)),
    ("W4A16", 128, (100, 384)),
    ("W4A16", 256, (65, 512)),
    ("W4A16_ASYM", 32, (65, 160)),
    ("W4A16_ASYM", 128, (100, 256)),
    ("W8A16", None, (1, 3)),
    ("W8A16", None, (70, 129)),
    ("W8A16", None, (97, 640)),
]
IDS = [f"{name}-{size}-{shape[0]}x{shape[1]}" for name, size, shape in WEIGHTS]


def drawn(name, size, shape, *, rounded=True):
    """A linear of random codes; scales that bfloat16 holds, where `rounded`."""
    scheme = preset(name) if size is None else with_group_size(preset(name), size)
    generator = torch.Generator().manual_seed(sum(shape))
    high = 2 ** (scheme.weights.num_bits - 1)
    qvalue = torch.randint(-high, high, shape, generator=generator).to(torch.int8)
    scale = torch.rand(shape[0], shape[1] // (size or shape[1]), generator=generator) / 64 + 0.01
    zero = None
    if not scheme.weights.symmetric:
        zero = torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
    weight = QTensor(
        qvalue=qvalue,
        scale=scale.bfloat16().float() if rounded else scale,
        zero_point=zero,
        scheme=scheme.weights,
    )
    return QuantizedLinear(weight=weight, scheme=scheme)


def by_definition(x, linear, bias):
    return x.double() @ linear.dequantize().double().T + (0 if bias is None else bias.double())


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())
