"""A decoder layer that runs with other weights, for algorithms that learn over a whole layer."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

Run = Callable[[int], Tensor]
"""From the number of a calibration sequence to the layer's output, [1, S, H]; thread-safe."""


@dataclass(frozen=True, kw_only=True)
class TrainedBlock:
    """A decoder layer and the calibration text at it.

    Attributes:
        samples: number of sequences, at least 1.
        running: from linear -> weight [O, I] float32 to a context in which the layer runs with
            these weights. The context's value runs a sequence, which comes from the quantized
            layers before. Gradients flow to the weights where they are enabled.
        target: from a sequence's number to the original layer's output, [1, S, H]; its input comes
            from the original layers before.
    """

    samples: int
    running: Callable[[Mapping[str, Tensor]], AbstractContextManager[Run]]
    target: Callable[[int], Tensor]
