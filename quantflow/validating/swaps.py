"""The origin of a divergence: a model with some modules of another one, run beside both.

    only = Swap(base=BASELINE, taken=("model.layers.3.mlp.down_proj",))         this one quantized
    others = Swap(base=CANDIDATE, taken=("model.layers.3.mlp.down_proj",))      all but this

Until the first layer that a swap takes a module of, its hidden states are its base's. So a pass
over the layers runs both models once, and every swap from its own layer on. In memory are one layer
of both models, hidden states of the swaps that run together, and for each worker the logits of one
window. The divergence is KL(baseline || swap) of `divergence.token_kld`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quantflow.core.parallel import Workers
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Layer
from quantflow.numerics.divergence import token_kld
from quantflow.process_memory import give_back_holes
from quantflow.progress import Progress
from quantflow.validating.layerwise import BASELINE

CANDIDATE = "candidate"
# bytes of the baseline's logits that wait for all swaps of a pass; more are computed for each
KEPT = 2**28


@dataclass(frozen=True, kw_only=True)
class Swap:
    """One of two models with some modules of the other.

    Attributes:
        base: model of all other modules, BASELINE or CANDIDATE.
        taken: full source names of the modules, in layers or the head.
        made: full source name -> module that stands there instead of the other model's.
    """

    base: str
    taken: tuple[str, ...]
    made: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def other(self) -> str:
        """The model that modules are taken from."""
        return CANDIDATE if self.base == BASELINE else BASELINE


@dataclass(frozen=True, kw_only=True)
class Swapping:
    """Two models of one graph, and the windows over which swaps are scored.

    Attributes:
        streams: BASELINE and CANDIDATE; their hidden states have one basis.
        sequences: token ids, int64 [S] each, S at least 2.
        stage: name of the work in progress.
        workers: number of windows at once.
        at_once: number of swaps whose hidden states are in memory together, at least 1.
    """

    streams: Mapping[str, LayerStream]
    sequences: Sequence[Tensor]
    stage: str
    progress: Progress
    workers: int
    at_once: int

    @property
    def _layers(self) -> tuple[Layer, ...]:
        return self.streams[BASELINE].graph.layers

    @torch.no_grad()
    def klds(self, swaps: Sequence[Swap]) -> list[float]:
        """The mean divergence of each swap from the baseline, nats per token.

        The number of workers changes no bit of it.
        """
        means: list[float] = []
        with Workers(self.workers) as workers:
            for first in range(0, len(swaps), self.at_once):
                means += self._pass(swaps[first : first + self.at_once], workers)
        return means

    def _pass(self, swaps: Sequence[Swap], workers: Workers) -> list[float]:
        states = {name: stream.begin(self.sequences) for name, stream in self.streams.items()}
        bases = {name: [state.hidden for state in states[name]] for name in states}
        hidden: dict[int, list[Tensor]] = {}
        starts = [self._start(swap) for swap in swaps]
        runs = [
            (index, which)
            for index in range(len(self._layers))
            for which in (
                *(number for number, start in enumerate(starts) if start <= index),
                *bases,
            )
        ]
        steps = self.progress.steps(
            runs, stage=self.stage, unit="layer", samples=len(self.sequences)
        )
        for layer in self._layers:
            with ExitStack() as stack:
                modules = {
                    name: stack.enter_context(stream.layer(layer.index))
                    for name, stream in self.streams.items()
                }
                for number, swap in enumerate(swaps):
                    if starts[number] <= layer.index:
                        next(steps)
                        with _with_taken(layer, swap, modules):
                            entering = hidden.get(number, bases[swap.base])
                            hidden[number] = self._run(
                                modules[swap.base], swap.base, states[swap.base], entering, workers
                            )
                for name in bases:
                    next(steps)
                    bases[name] = self._run(modules[name], name, states[name], bases[name], workers)
            give_back_holes()
        for _ in steps:  # ends the last one
            pass
        return self._scores(swaps, bases, hidden, workers)

    def _start(self, swap: Swap) -> int:
        """The first layer that a swap has a module of, or the number of layers."""
        return next(
            (layer.index for layer in self._layers if _taken_of(layer, swap)), len(self._layers)
        )

    def _run(
        self,
        module: nn.Module,
        name: str,
        states: Sequence[State],
        hidden: Sequence[Tensor],
        workers: Workers,
    ) -> list[Tensor]:
        return workers.map(
            partial(_forward, self.streams[name], module), zip(states, hidden, strict=True)
        )

    def _scores(
        self,
        swaps: Sequence[Swap],
        bases: Mapping[str, Sequence[Tensor]],
        hidden: Mapping[int, Sequence[Tensor]],
        workers: Workers,
    ) -> list[float]:
        head = self.streams[BASELINE].graph.family.head
        tokens = sum(len(sequence) - 1 for sequence in self.sequences)
        means = []
        with ExitStack() as heads:
            for stream in self.streams.values():
                heads.enter_context(stream.head())
            expected: Callable[[int], Tensor] = partial(self._logits, BASELINE, bases[BASELINE])
            one = expected(0)
            if one.nbytes * sum(map(len, self.sequences)) <= KEPT * len(self.sequences[0]):
                baseline_logits = [one, *workers.map(expected, range(1, len(self.sequences)))]
                expected = baseline_logits.__getitem__
            for number, swap in enumerate(swaps):
                name = swap.other if head in swap.taken else swap.base
                logits_of = partial(self._logits, name, hidden.get(number, bases[swap.base]))
                means.append(
                    sum(
                        workers.map(
                            partial(_total, expected, logits_of), range(len(self.sequences))
                        )
                    )
                    / tokens
                )
        return means

    def _logits(self, name: str, hidden: Sequence[Tensor], number: int) -> Tensor:
        """The logits of a window that predict its tokens, [S - 1, V]."""
        return self.streams[name].finish(hidden[number])[0, :-1].float()


@torch.no_grad()  # each thread has its own
def _forward(stream: LayerStream, module: nn.Module, window: tuple[State, Tensor]) -> Tensor:
    return stream.forward(module, *window)


def _total(
    expected: Callable[[int], Tensor], logits_of: Callable[[int], Tensor], number: int
) -> float:
    return float(token_kld(expected(number), logits_of(number)).sum())


def _taken_of(layer: Layer, swap: Swap) -> list[str]:
    return [name for name in swap.taken if name.startswith(f"{layer.prefix}.")]


@contextmanager
def _with_taken(layer: Layer, swap: Swap, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Run the block with a swap's modules in the place of its base's; both models' are given."""
    base, other = modules[swap.base], modules[swap.other]
    names = {name: layer.relative(name) for name in _taken_of(layer, swap)}
    own = {name: base.get_submodule(place) for name, place in names.items()}
    try:
        for name, place in names.items():
            base.set_submodule(
                place, swap.made[name] if name in swap.made else other.get_submodule(place)
            )
        yield
    finally:
        for name, place in names.items():
            base.set_submodule(place, own[name])
