"""A decoder that notes the time of each forward."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from quantflow.runtime.decoder import Decoder, HiddenDecoder


class Timed:
    """Another decoder with a clock.

    Attributes:
        seconds: seconds of each forward since the beginning, in order.
        starts: begin of each forward, on the clock of `time.perf_counter`.
        first: indices of the first forwards after a `begin`, which read a prompt.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Stand in for `decoder`; it shows hidden states if that one does."""
        self.vocab_size = decoder.vocab_size
        self.positions = decoder.positions
        self.device = decoder.device
        self.keep, self.crop = decoder.keep, decoder.crop
        self.forward: Any = self._timed(decoder.forward)
        if isinstance(decoder, HiddenDecoder):
            self.forward_hidden = self._timed(decoder.forward_hidden)
        if hasattr(decoder, "forward_states"):
            self.forward_states = self._timed(decoder.forward_states)
        self.seconds: list[float] = []
        self.starts: list[float] = []
        self.first: list[int] = []
        self._decoder = decoder

    def begin(self, *, rows: int, capacity: int) -> None:
        """Empty the cache; the next forward reads a prompt."""
        self.first.append(len(self.seconds))
        self._decoder.begin(rows=rows, capacity=capacity)

    def summary(self) -> dict[str, float | int | None]:
        """The number of forwards; mean seconds of those that read a prompt, and of the others."""
        prompts = [self.seconds[i] for i in self.first]
        others = [value for i, value in enumerate(self.seconds) if i not in set(self.first)]
        return {
            "forwards": len(self.seconds),
            "first_forward_seconds": fmean(prompts) if prompts else None,
            "next_forward_seconds": fmean(others) if others else None,
        }

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            self.starts.append(begin)
            result = call(*arguments, **options)
            self.seconds.append(time.perf_counter() - begin)
            return result

        return timed
