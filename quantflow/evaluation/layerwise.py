"""Several models over the same text, one layer of one of them in memory at a time, then window by window their scores.

    <folder>/<model>/00012.hidden    the hidden states that enter layer 12, so that a run that is stopped goes on there

The logits are those of the whole models: each layer and the head compute what they compute there, window by window.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact.canonical import digest_of
from quantflow.core.parallel import Workers
from quantflow.evaluation.divergence import Comparison, join, score
from quantflow.models.capture import LayerStream, State
from quantflow.models.hidden import HiddenStates
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress

BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Models that are compared with one of them.

    Attributes:
        streams: name -> model; the one called `baseline` is what the others are compared with.
        sequences: token ids, int64 [S] each.
        folder: private, for hidden states; whoever made it removes it.
        key: what the comparison is made from; hidden states of another key are not used.
        stage: how progress calls it.
        workers: how many units run at once.
    """

    streams: Mapping[str, LayerStream]
    sequences: Sequence[Tensor]
    folder: Path
    key: str
    stage: str
    progress: Progress
    workers: int

    @torch.no_grad()
    def scores(self) -> dict[str, Comparison]:
        """Return each model's comparison with the baseline; the number of workers changes no bit of it."""
        hidden = {name: HiddenStates(len(self.sequences), folder=self.folder / name) for name in self.streams}
        try:
            with Workers(self.workers) as workers:
                self._layers(hidden, workers)
                return self._windows(hidden, workers)
        finally:
            for states in hidden.values():
                states.close()

    def _layers(self, hidden: Mapping[str, HiddenStates], workers: Workers) -> None:
        """Bring every model's hidden states to the end of its last layer."""
        steps = []
        for name, stream in self.streams.items():
            count, key = len(stream.graph.layers), self._key(name)
            start = next((index for index in range(count, -1, -1) if hidden[name].restore(index, key=key)), 0)
            steps += [(name, index) for index in range(start, count)]
        states: dict[str, list[State]] = {}
        for name, index in self.progress.steps(steps, stage=self.stage, unit="layer", samples=len(self.sequences)):
            stream = self.streams[name]
            if name not in states:
                states = {name: stream.begin(self.sequences, hidden=hidden[name])}
                if not hidden[name].restored:
                    hidden[name].commit(0, key=self._key(name))
            self.progress.doing(f"layer {index} of the {name}")
            with stream.layer(index) as module:
                stream.advance(module, states[name], workers=workers)
            hidden[name].commit(index + 1, key=self._key(name))
            give_back_holes()

    def _windows(self, hidden: Mapping[str, HiddenStates], workers: Workers) -> dict[str, Comparison]:
        """Put the heads on and score, with the logits of one window in memory."""
        parts: dict[str, list[Comparison]] = {name: [] for name in self.streams if name != BASELINE}
        numbers = range(len(self.sequences))
        with ExitStack() as heads:
            for stream in self.streams.values():
                heads.enter_context(stream.head())
            for number in self.progress.steps(numbers, stage=self.stage, unit="window"):
                # finish() is for one thread at a time: a model is one unit, so its own calls never overlap.
                expected, *others = workers.map(partial(self._logits, hidden, number), [BASELINE, *parts])
                for name, found in zip(parts, others, strict=True):
                    parts[name].append(score(expected, found, self.sequences[number]))
        return {name: join(comparisons) for name, comparisons in parts.items()}

    def _logits(self, hidden: Mapping[str, HiddenStates], number: int, name: str) -> Tensor:
        """Return one model's logits of one window, [S, V] float32."""
        return self.streams[name].finish(hidden[name].get(number))[0].float()

    def _key(self, name: str) -> str:
        return digest_of([self.key, name])
