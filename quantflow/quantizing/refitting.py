"""Linears of a layer refitted, group by group, to the inputs that the quantized model hands them.

Before a group is quantized, the calibration text runs through the layer twice: the original's
hidden states through the layer as it is, those that left the quantized layers before it through the
layer with the linears quantized that are. Both runs end at the group. What they hand to it, and how
far the hidden state has drifted to which its outputs are added, is summed
(quantflow/algorithms/refit.py). So groups follow one after the other, in the order in which the
layer calls them, and its weights stay in memory until the last.

Which linears add to the hidden state a family's row says (quantflow/models/family.py), and the
canary proves it: the layer's output less its input has to be the sum of their outputs. Where it is
not (a norm or a factor lies between, the family has no row, experts add too), the drift is left to
the linears that read the hidden state.

Experts of a mixture come last, those of all experts at once
(quantflow/quantizing/refitting_experts.py).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor, nn

from quantflow.algorithms.refit import RefitSums, Refitted
from quantflow.core.parallel import Workers
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.capture import State
from quantflow.models.family import FAMILIES
from quantflow.models.graph import LinearGroup
from quantflow.models.hooks import watch
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.layer_error import relative_error
from quantflow.quantizing.open_layer import Execution, LayerText, OpenLayer, reference_linear
from quantflow.quantizing.refitting_experts import ExpertsRefit
from quantflow.runtime.linear import QuantLinear

# ||change - writers' outputs||^2 / ||change||^2 of the canary's hidden state: float32 sums in
# another order, not another function
_WRITTEN_TOLERANCE = 1e-6

# x [..., I] of a linear, and the hidden state [..., H] that its output is added to
_Seen = tuple[Tensor, Tensor | None]


class _ReachedError(Exception):
    """A run came to the linear whose input it was made for."""


class LayerRefit:
    """The groups of a layer, refitted one after the other."""

    def __init__(self, opened: OpenLayer, text: LayerText, *, writers: Sequence[str]) -> None:
        """Begin before the first group.

        Args:
            opened: the layer, all of its weights in memory.
            text: the sequences as they enter the original layer, and as the quantized layers leave
                them.
            writers: linears whose outputs the layer adds to the hidden state, in its order.
        """
        self._opened, self._text, self._writers = opened, text, tuple(writers)
        self._quantized: dict[str, QuantLinear] = {}
        self._experts = (
            ExpertsRefit(opened, text, installed=self._installed) if opened.layer.experts else None
        )

    def put(self, group: LinearGroup, linears: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let later groups read what a quantized group puts out; none reads what an expert does.

        Args:
            group: the group.
            linears: name -> its file's tensors.
        """
        opened = self._opened
        for name, tensors in linears.items() if opened.layer.turn(group) < 2 else ():
            scheme = opened.plan.schemes[name]
            if scheme is not None:
                quantized = FORMATS[DEFAULT].decode(name, tensors, scheme).to(opened.device.kind)
                self._quantized[name] = reference_linear(quantized, opened.child(name).bias)

    def begin(self, group: LinearGroup, *, execution: Execution) -> None:
        """Run the text for all experts, before the first of their groups of a turn.

        Args:
            group: the group that follows.
            execution: workers that run the sequences.

        Raises:
            StatisticsError: the quantized layers put out NaN or Inf.
        """
        if group.expert is not None and self._experts is not None:
            self._experts.begin(group, execution=execution)

    def refit(self, group: LinearGroup, *, execution: Execution) -> Refitted | None:
        """A group's weights as they aim at the original's outputs; None where they stay.

        Raises:
            StatisticsError: the quantized layers put out NaN or Inf.
        """
        opened = self._opened
        names = [name for name in group.linears if opened.plan.schemes[name] is not None]
        if not names:
            return None
        if group.expert is not None:
            return (
                None
                if self._experts is None
                else self._experts.refit(group, names, execution=execution)
            )
        sums = self._summed(group, execution=execution)
        statistics = sums.statistics()
        weights = sums.refitted(
            {name: opened.weight(name) for name in names},
            statistics,
            workers=execution.workers,
        )
        give_back_holes()
        return Refitted(weights=weights, statistics=statistics)

    def end(self, *, workers: Workers) -> None:
        """Bring the original's hidden states behind the layer, where its text says so."""
        self._quantized.clear()
        self._experts = None
        if self._text.keep_outputs:
            self._opened.stream.advance(self._opened.module, self._text.states, workers=workers)

    def _summed(self, group: LinearGroup, *, execution: Execution) -> RefitSums:
        """The sums of a group's input, over the sequences in order."""
        opened, text = self._opened, self._text
        first = group.linears[0]
        alone = len(group.linears) == 1 and first in self._writers
        before = self._writers[: self._writers.index(first)] if alone else None
        width, features = opened.weight(first).shape
        with opened.device.factories():
            sums = RefitSums(features=features, hidden=width if alone else 0)
        for start in range(0, len(text.states), execution.ahead):
            part = slice(start, start + execution.ahead)
            execution.progress.doing(
                f"to {opened.layer.relative(first)}: sequence {start + 1} of {len(text.states)}"
            )
            runs = partial(self._seen, first, before, execution=execution)
            originals = list(runs(text.states[part], quantized=False))
            for one, other in zip(originals, runs(text.again[part], quantized=True), strict=True):
                if one is not None and other is not None:
                    (x, hidden), (seen, drifted) = one, other
                    drift = None if hidden is None or drifted is None else hidden - drifted
                    sums.update(x, seen, drift)
        give_back_holes()
        return sums

    def _seen(
        self,
        first: str,
        before: Sequence[str] | None,
        states: Sequence[State],
        *,
        quantized: bool,
        execution: Execution,
    ) -> Iterator[_Seen | None]:
        """What sequences hand to a linear; None where the layer does not call it.

        Args:
            first: the linear.
            before: linears that add to the hidden state before it; None where it adds to none.
            states: the sequences.
            quantized: whether those linears run quantized that are.
            execution: workers that run the sequences.
        """
        opened = self._opened
        layer, stream = opened.layer, opened.stream
        seen = threading.local()  # hooks are the module's, and each thread runs its own sequence

        def remember(name: str, x: Tensor, y: Tensor) -> None:
            if name == first:
                seen.input = x
                raise _ReachedError
            seen.added = seen.added + y

        def unit(state: State) -> _Seen | None:
            seen.input, seen.added = None, stream.alone(state.hidden) if before is not None else 0.0
            with suppress(_ReachedError):
                stream.run(opened.module, state, cache=self._text.cache if quantized else None)
            x, hidden = seen.input, seen.added
            seen.input = seen.added = None
            return None if x is None else (x, None if before is None else hidden)

        watched = {
            layer.relative(name): partial(remember, name) for name in (first, *(before or ()))
        }
        with self._installed() if quantized else nullcontext(), watch(opened.module, watched):
            yield from execution.workers.stream(unit, states)

    @contextmanager
    def _installed(self) -> Iterator[Mapping[str, nn.Module]]:
        """Put the linears that are quantized into the layer until the block ends.

        Yields:
            Name -> the linear that was in its place.
        """
        module, layer = self._opened.module, self._opened.layer
        own: dict[str, nn.Module] = {name: self._opened.child(name) for name in self._quantized}
        try:
            for name, linear in self._quantized.items():
                module.set_submodule(layer.relative(name), linear)
            yield own
        finally:
            for name, former in own.items():
                module.set_submodule(layer.relative(name), former)


def writers_of(
    opened: OpenLayer, canary: State, *, outputs: Mapping[str, Tensor], output: Tensor
) -> tuple[str, ...]:
    """The linears whose outputs a layer adds to the hidden state, in its order; none if not proven.

    Args:
        opened: the layer before it is quantized.
        canary: the sequence that is the proof, where it enters the layer.
        outputs: linear -> its output on the canary.
        output: the layer's output on the canary, [1, S, H].
    """
    row = FAMILIES.get(opened.stream.graph.family.model_type)
    if row is None:
        return ()
    last = [row.names.output, row.names.down, *([] if row.delta is None else [row.delta.output])]
    names = {f"{opened.layer.prefix}.{name}" for name in last}
    writers = tuple(name for name in opened.layer.linears if name in names & outputs.keys())
    change = opened.stream.alone(output) - opened.stream.alone(canary.hidden)
    if not writers or any(outputs[name].shape != change.shape for name in writers):
        return ()
    written = sum((outputs[name] for name in writers), torch.zeros_like(change))
    missing = relative_error(change, written, name=opened.layer.prefix)
    return writers if missing <= _WRITTEN_TOLERANCE else ()
