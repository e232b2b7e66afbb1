"""Several models over the same text, one layer of one model in memory at a time.

    <folder>/<model>/00012.hidden    hidden states before layer 12, where a stopped run goes on
    <kept>/00030.hidden              the baseline's hidden states after its last layer, for later

The logits are those of the whole models: each layer and the head compute what they compute there,
window by window. Windows are independent, so several run at once; in memory are the logits of every
model for each of them.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.device import Device
from quantflow.core.parallel import Workers
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.models.hidden import HiddenStates
from quantflow.numerics.divergence import Comparison, brought_back, join, scores
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress

BASELINE = "baseline"

# (number of a window, name -> logits [S, V]) -> name -> its comparison over that window
Judge = Callable[[int, dict[str, Tensor]], Mapping[str, Comparison]]


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Models that are compared with one of them.

    Attributes:
        streams: name -> model, all on one device; the others are compared with `baseline`, or all
            of them by `judge`.
        sequences: token ids, int64 [S] each.
        folder: private folder of hidden states; whoever made it removes it.
        keys: name -> digest of the inputs of that model's hidden states; states of another key
            are not used.
        kept: folder of the hidden states after the baseline's last layer, which are read if they
            are there and written otherwise; None keeps nothing. Several processes may share it.
        judge: what becomes of the logits of a window, in any order and on several threads; None
            compares them with the baseline's.
        stage: name of the work in progress.
        workers: number of units that run at once.
    """

    streams: Mapping[str, LayerStream]
    sequences: Sequence[Tensor]
    folder: Path
    keys: Mapping[str, str]
    stage: str
    progress: Progress
    workers: int
    kept: Path | None = None
    judge: Judge | None = None

    @torch.no_grad()
    def scores(self) -> dict[str, Comparison]:
        """Each model's comparison; the number of workers changes no bit of it."""
        opened = partial(HiddenStates, len(self.sequences), device=self._device)
        hidden = {name: opened(folder=self.folder / name) for name in self.streams}
        if self.kept is not None:
            kept = opened(folder=self.kept, keep=True)
            if kept.restore(len(self._layers_of(BASELINE)), key=self.keys[BASELINE]):
                hidden[BASELINE] = kept
        try:
            with Workers(self.workers) as workers:
                self._layers(hidden, workers)
                comparisons = self._windows(hidden, workers)
            if self.kept is not None:
                hidden[BASELINE].move(self.kept)
            return comparisons
        finally:
            for states in hidden.values():
                states.close()

    @torch.no_grad()
    def seconds(self, *, kept: Collection[str] = ()) -> float:
        """The seconds that `scores` will take, from one window through a layer and every head.

        Products alone would promise too little: of a small model attention, the softmax over the
        vocabulary and the reading of layers take most of the time.

        Args:
            kept: models whose hidden states after the last layer are there already.
        """
        window = max(self.sequences, key=len)
        once = each = 0.0
        logits = {}
        for name, stream in self.streams.items():
            layers = self._layers_of(name)
            (state,) = stream.begin([window], hidden=HiddenStates(1, device=self._device))
            moments = [time.perf_counter()]
            with stream.layer(next(i for i, layer in enumerate(layers) if not layer.skipped)) as at:
                moments.append(time.perf_counter())
                stream.run(at, state)  # the first is slower
                moments.append(time.perf_counter())
                hidden = stream.run(at, state)
                moments.append(time.perf_counter())
            if name not in kept:
                once += len(layers) * (moments[1] - moments[0])
                each += len(layers) * (moments[3] - moments[2])
            began = time.perf_counter()
            with stream.head():
                once += time.perf_counter() - began
                began = time.perf_counter()
                logits[name] = stream.finish(hidden)[0].float()
                each += time.perf_counter() - began
        began = time.perf_counter()
        scores(logits.pop(BASELINE), logits, self._device.put(window))
        each += time.perf_counter() - began
        return once + each * sum(map(len, self.sequences)) / len(window) / self.workers

    @property
    def _device(self) -> Device:
        return next(iter(self.streams.values())).device

    def _layers_of(self, name: str) -> Sequence[Layer]:
        return self.streams[name].graph.layers

    def _layers(self, hidden: Mapping[str, HiddenStates], workers: Workers) -> None:
        """Bring every model's hidden states to the end of its last layer."""
        steps = []
        for name in self.streams:
            count, key = len(self._layers_of(name)), self.keys[name]
            start = next(
                (index for index in range(count, -1, -1) if hidden[name].restore(index, key=key)), 0
            )
            steps += [(name, index) for index in range(start, count)]
        states: dict[str, list[State]] = {}
        for name, index in self.progress.steps(
            steps, stage=self.stage, unit="layer", samples=len(self.sequences)
        ):
            stream = self.streams[name]
            if name not in states:
                states = {name: stream.begin(self.sequences, hidden=hidden[name])}
                if not hidden[name].restored:
                    hidden[name].commit(0, key=self.keys[name])
            self.progress.doing(f"layer {index} of the {name}")
            with stream.layer(index) as module:
                stream.advance(module, states[name], workers=workers)
            hidden[name].commit(index + 1, key=self.keys[name])
            give_back_holes()

    def _windows(
        self, hidden: Mapping[str, HiddenStates], workers: Workers
    ) -> dict[str, Comparison]:
        """Put the heads on and score."""
        parts: dict[str, list[Comparison]] = {}
        with ExitStack() as heads:
            for stream in self.streams.values():
                heads.enter_context(stream.head())
            windows = workers.stream(partial(self._scored, hidden), range(len(self.sequences)))
            steps = self.progress.steps(range(len(self.sequences)), stage=self.stage, unit="window")
            for _, scored in zip(steps, windows, strict=True):
                for name, comparison in scored.items():
                    parts.setdefault(name, []).append(comparison)
        return {name: join(comparisons) for name, comparisons in parts.items()}

    def _scored(self, hidden: Mapping[str, HiddenStates], number: int) -> dict[str, Comparison]:
        """Each model's comparison over one window.

        It is computed on the device and then moved to host memory.
        """
        # [S, V]
        logits = {
            name: self.streams[name].finish(hidden[name].get(number))[0].float()
            for name in self.streams
        }
        if self.judge is not None:
            return dict(self.judge(number, logits))
        found = scores(logits.pop(BASELINE), logits, self._device.put(self.sequences[number]))
        return {name: brought_back(comparison, self._device) for name, comparison in found.items()}
