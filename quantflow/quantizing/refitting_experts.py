"""Experts of a layer, refitted to the tokens that the quantized model's router sends to them.

Gate and up of all experts read one tensor. The quantized model may send a token to other experts
than the original, but what that tensor has lost is much the same function of it whichever expert
reads it. So one D and C, over all tokens, serve all of them, and an expert with few tokens has them
too. Down has sums for each expert: over the tokens that the quantized router sends there, what its
quantized gate and up make of them, and what the original's make of the same tokens of the original.
The drift of the hidden state is left to the layers behind.

An expert's rounding keeps the Hessian of the original's inputs, which the policy for few tokens
treats (quantflow/planning/experts.py). Down keeps its weights where the router sends no token;
experts that read scaled inputs (Llama 4) keep all of theirs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quantflow.algorithms.refit import RefitSums, Refitted, Solver
from quantflow.models.capture import State
from quantflow.models.experts import Experts, ScaledInputs
from quantflow.models.graph import LinearGroup
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.open_layer import Execution, LayerText, OpenLayer

# puts quantized linears into the layer, and yields name -> the linear that was there
Installed = Callable[[], AbstractContextManager[Mapping[str, nn.Module]]]
# x [T, H] of a layer's experts, and the numbers [T, k] of those that each token is sent to
_Sent = tuple[Tensor, Tensor]
# number of an expert -> what its down reads: in the original, and in the quantized model
_Inner = dict[int, tuple[Tensor, Tensor]]

Result = TypeVar("Result")


class _ReachedError(Exception):
    """A run came to the experts, whose input it was made for."""


class ExpertsRefit:
    """The experts of a layer: all gates and ups, then all downs."""

    def __init__(self, opened: OpenLayer, text: LayerText, *, installed: Installed) -> None:
        """Begin before the first group of an expert.

        Args:
            opened: the layer, all of its weights in memory.
            text: the sequences as they enter the original layer, and as the quantized layers leave
                them.
            installed: puts the linears into the layer that are quantized.
        """
        self._opened, self._text, self._installed = opened, text, installed
        layer = opened.layer
        # linears that read what all experts read -> the expert's own name of each, by its number
        self._readers = [
            {
                name: layer.relative(name).rpartition(".")[2]
                for group in layer.groups
                if group.expert == expert and layer.turn(group) == 1
                for name in group.linears
            }
            for expert in layer.gates
        ]
        place = layer.relative(next(iter(self._readers[0]))).rsplit(".", 2)[0]
        self._experts: Experts = opened.module.get_submodule(place)  # type: ignore[assignment]
        block = opened.module.get_submodule(place.rpartition(".")[0])
        self._keeps = isinstance(block, ScaledInputs)
        self._read: Solver | None = None
        self._inner: dict[str, RefitSums] | None = None

    def begin(self, group: LinearGroup, *, execution: Execution) -> None:
        """Run the text for all experts, before the first group of its kind.

        Args:
            group: the group that follows.
            execution: workers that run the sequences.

        Raises:
            StatisticsError: the quantized layers put out NaN or Inf.
        """
        first = group.linears[0]
        turn = 0 if self._keeps else self._opened.layer.turn(group)
        if turn == 1 and self._read is None:
            sums = self._sums_of_all(first, execution=execution)
            self._read = sums.solver(sums.statistics(), name=first, workers=execution.workers)
        elif turn == 2 and self._inner is None:
            self._read = None
            self._inner = self._sums_of_each(first, execution=execution)
        give_back_holes()

    def refit(
        self, group: LinearGroup, names: Sequence[str], *, execution: Execution
    ) -> Refitted | None:
        """Weights of a group of an expert; None where they stay.

        Raises:
            StatisticsError: the quantized layers put out NaN or Inf.
        """
        solver = self._read
        if self._opened.layer.turn(group) == 2:
            sums = None if self._inner is None else self._inner.pop(group.expert or "", None)
            solver = (
                None
                if sums is None
                else sums.solver(sums.statistics(), name=names[0], workers=execution.workers)
            )
        if solver is None:
            return None
        weights = {
            name: solver.refitted(name, self._opened.weight(name), workers=execution.workers)
            for name in names
        }
        return Refitted(weights=weights, statistics={})

    def _features(self, name: str) -> int:
        return self._opened.weight(name).shape[1]

    def _parts(self, execution: Execution, *, what: str) -> Iterator[slice]:
        count = len(self._text.states)
        for start in range(0, count, execution.ahead):
            execution.progress.doing(f"{what}: sequence {start + 1} of {count}")
            yield slice(start, start + execution.ahead)

    def _sums_of_all(self, first: str, *, execution: Execution) -> RefitSums:
        """The sums of what all experts read, over all tokens."""
        with self._opened.device.factories():
            sums = RefitSums(features=self._features(first))
        for part in self._parts(execution, what="to the experts"):
            originals = list(self._original(part, execution=execution))
            with self._installed():
                again = self._run(self._text.again[part], _input, execution=execution)
                for x, seen in zip(originals, again, strict=True):
                    sums.update(x, seen, None)
        return sums

    def _sums_of_each(self, last: str, *, execution: Execution) -> dict[str, RefitSums]:
        """Expert -> the sums of what its down reads, over the tokens that are sent there."""
        names = list(self._opened.layer.gates)
        with self._opened.device.factories():
            sums = [RefitSums(features=self._features(last)) for _ in names]
        seen: set[int] = set()
        for part in self._parts(execution, what="through the experts"):
            originals = list(self._original(part, execution=execution))
            with self._installed() as own:
                inner = partial(self._inner_of_each, originals, own)
                arrived = list(self._run(self._text.again[part], inner, execution=execution))
            reached = sorted(set().union(*arrived))
            execution.workers.map(partial(_add, sums, arrived), reached)
            seen.update(reached)
        return {names[number]: sums[number] for number in sorted(seen)}

    @torch.no_grad()
    def _inner_of_each(
        self, originals: Sequence[Tensor], own: Mapping[str, nn.Module], place: int, sent: _Sent
    ) -> _Inner:
        """What down of each expert reads of the tokens sent to it, [n, I] twice.

        Args:
            originals: the original's input of sequences, [T, H].
            own: the original's linears that are replaced.
            place: number of the sequence among them.
            sent: the quantized model's input, and where its router sends it.
        """
        x, (quantized, numbers) = originals[place], sent
        pairs = {}
        for number in torch.unique(numbers).tolist():
            if number < len(self._experts):  # some routers name one more than there are: no expert
                expert: Any = self._experts[number]
                readers = self._readers[number]
                others = {leaf: own[name] for name, leaf in readers.items() if name in own}
                _, tokens = torch.where((numbers == number).T)
                pairs[number] = expert.inner(x[tokens], others), expert.inner(quantized[tokens], {})
        return pairs

    def _original(self, part: slice, *, execution: Execution) -> Iterator[Tensor]:
        """What the original's experts read, [T, H] of each sequence."""
        states = self._text.states[part]
        return self._run(states, _input, execution=execution, quantized=False)

    def _run(
        self,
        states: Sequence[State],
        then: Callable[[int, _Sent], Result],
        *,
        execution: Execution,
        quantized: bool = True,
    ) -> Iterator[Result]:
        """Run sequences to the experts; yields what `then` makes of each one's place and input."""
        opened = self._opened
        seen = threading.local()  # hooks are the module's, and each thread runs its own sequence

        def remember(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hidden, numbers = args[:2]
            seen.sent = hidden.reshape(-1, hidden.shape[-1]), numbers
            raise _ReachedError

        def unit(place: int) -> Result:
            with suppress(_ReachedError):
                opened.stream.run(
                    opened.module, states[place], cache=self._text.cache if quantized else None
                )
            sent, seen.sent = seen.sent, None
            return then(place, sent)

        hook = self._experts.register_forward_pre_hook(remember)
        try:
            yield from execution.workers.stream(unit, range(len(states)))
        finally:
            hook.remove()


def _input(_place: int, sent: _Sent) -> Tensor:
    return sent[0]


def _add(sums: Sequence[RefitSums], arrived: Sequence[_Inner], number: int) -> None:
    """Add to an expert's sums what some sequences send it, in their order."""
    for pairs in arrived:
        if number in pairs:
            original, quantized = pairs[number]
            sums[number].update(original, quantized, None)
