"""A decoder layer as an algorithm sees it that learns with the whole of it: something that runs with other weights."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

Run = Callable[[int], Tensor]
"""Takes the number of a calibration sequence; returns the layer's output, [1, S, H]. May be called from several threads."""


@dataclass(frozen=True, kw_only=True)
class TrainedBlock:
    """A decoder layer and the calibration text at it.

    Attributes:
        samples: how many sequences there are, at least 1.
        running: takes linear -> weight [O, I] float32; a context in which the layer runs with
            these, and whose value runs a sequence, as it comes from the quantized layers before.
            Gradients flow to the weights where they are enabled.
        target: returns what the original layer makes of a sequence as it comes from the original
            layers before, [1, S, H].
    """

    samples: int
    running: Callable[[Mapping[str, Tensor]], AbstractContextManager[Run]]
    target: Callable[[int], Tensor]
