"""Stand-ins of `quantflow.models.capture` for parts of the model, and their recorded calls."""

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantflow.core.device import HOST, Device
from quantflow.core.groups import spans
from quantflow.core.qtensor import QuantizedLinear
from quantflow.numerics.product import filled, operand, product

# The numbers of rows are part of the result's last digits, so they never change.
LINEAR_ROWS = 256  # rows of a linear's weight that are converted at once, in a core's cache
LINEAR_TOKENS = 512  # tokens of its input that are multiplied with these rows at once
HEAD_ROWS = 4096  # rows of the head that are converted at once
# Logits of a thread's backward pass through the head at once, 64 MiB; and the fewest tokens of it.
LOGITS, FEWEST = 2**24, 64


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one decoder layer's call besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self, argument: str | int, value: Any) -> "Call":
        """The call with another value of an argument, by its name or its place."""
        if isinstance(argument, str):
            return Call(args=self.args, kwargs=self.kwargs | {argument: value})
        return Call(
            args=(*self.args[:argument], value, *self.args[argument + 1 :]), kwargs=self.kwargs
        )


def _of(layer: nn.Module, name: str, error: AttributeError) -> Any:
    """An attribute of the layer that a stand-in replaces: some models ask a layer for its kind."""
    if name in layer._parameters:
        raise error
    return getattr(layer, name)


def as_returned(hidden: Tensor, count: int) -> Tensor | tuple[Tensor | None, ...]:
    """A hidden state as a layer returns it.

    It is the first of a tuple of `count`, or by itself where `count` is 0.
    """
    return (hidden, *[None] * (count - 1)) if count else hidden


class Recorded(Exception):
    """The last decoder layer was called: nothing that the model computes after it is needed."""


class Recorder(nn.Module):
    """A stand-in for a decoder layer that records its call and returns its input."""

    def __init__(self, layer: nn.Module, *, tuple_of: int = 0, last: bool = False) -> None:
        """Begin without a record.

        Args:
            layer: decoder layer that it replaces.
            tuple_of: count for `as_returned`.
            last: raise `Recorded` instead of returning.
        """
        super().__init__()
        self.__dict__["layer"] = layer  # not a part of this one
        self.tuple_of, self.last = tuple_of, last
        self.hidden = torch.empty(0)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """The layer's attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            return _of(self.layer, name, error)

    def forward(
        self, hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Record the call and return `hidden`, [1, S, H].

        Raises:
            Recorded: it is the last layer.
        """
        self.hidden, self.args, self.kwargs = hidden, args, kwargs
        if self.last:
            raise Recorded
        return as_returned(hidden, self.tuple_of)


class Given(nn.Module):
    """A stand-in for a decoder layer that returns the calling thread's hidden state.

    The arguments of the call do not matter.
    """

    def __init__(self, layer: nn.Module, mine: threading.local, *, tuple_of: int = 0) -> None:
        """Begin without a hidden state.

        Args:
            layer: decoder layer that it replaces.
            mine: holder of a thread's hidden state, the same for all layers of a model.
            tuple_of: count for `as_returned`.
        """
        super().__init__()
        self.__dict__["layer"] = layer  # not a part of this one
        self.tuple_of = tuple_of
        self._mine = mine

    def __getattr__(self, name: str) -> Any:
        """The layer's attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            return _of(self.layer, name, error)

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """The calling thread's hidden state."""
        hidden: Tensor = self._mine.hidden
        return as_returned(hidden, self.tuple_of)


@contextmanager
def giving(mine: threading.local, hidden: Tensor) -> Iterator[None]:
    """Set the hidden state [1, S, H] that every `Given` returns to this thread.

    It is set until the block ends.
    """
    mine.hidden = hidden
    try:
        yield
    finally:
        del mine.hidden


class NoEmbedding(nn.Module):
    """A stand-in for the embedding before replaced layers, none of which reads its output."""

    def __init__(self, embedding: Any, *, dtype: torch.dtype, device: Device) -> None:
        """Replace an embedding whose weight [V, E] is on meta.

        Args:
            embedding: the embedding.
            dtype: dtype of the output.
            device: device of the output.
        """
        super().__init__()
        nothing = torch.zeros((), dtype=dtype, device=device.kind)
        # takes no memory; families ask for its dtype, device and rows
        self.weight = nothing.expand(embedding.weight.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Zeros, [..., E] of ids [...]."""
        return self.weight.new_zeros((*ids.shape, self.weight.shape[1]))


class Rows(nn.Module):
    """A stand-in for an embedding that holds only the rows of some sequences.

    It computes what the embedding computes with them.
    """

    def __init__(
        self, ids: Tensor, weight: Tensor, embedding: Any, *, padding: int | None = None
    ) -> None:
        """Hold the rows of some ids.

        Args:
            ids: int64 [n], ascending.
            weight: [n, H], their rows.
            embedding: embedding [V, H] that it replaces; some multiply their output by a number.
            padding: one of the ids, whose row a model that reads images too asks for by itself.
        """
        super().__init__()
        self.ids, self.inner = ids, with_rows(embedding, weight)
        shown = weight[:1] if padding is None else weight[ids == padding]
        # [V, H], takes no memory; families ask for its dtype and device
        self.weight = shown.expand(embedding.num_embeddings, -1)

    def forward(self, ids: Tensor) -> Tensor:
        """The embedding's output for ids whose rows it holds, [..., H]."""
        found: Tensor = self.inner(torch.searchsorted(self.ids, ids))
        return found


def with_rows(embedding: Any, rows: Tensor) -> Any:
    """A copy of an embedding with other rows [n, H]; ids are numbers of these rows."""
    own = copy.copy(embedding)
    own._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    own.num_embeddings, own.padding_idx = len(rows), None
    return own


class HeadStandIn(nn.Module):
    """A stand-in for the head that keeps its weight as stored and converts a few rows at a time."""

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        """Hold the weight.

        Args:
            weight: [V, H], as stored.
            dtype: dtype of the computation.
            bias: [V] in `dtype`, or None.
        """
        super().__init__()
        self.rows, self.dtype, self.bias = weight, dtype, bias
        # families ask for its dtype
        self.weight = torch.empty(weight.shape, dtype=dtype, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of [..., H]."""
        logits: Tensor = _Projection.apply(hidden.to(self.dtype), self.rows, self.dtype)  # type: ignore[no-untyped-call]
        logits = logits.to(hidden.dtype)
        return logits if self.bias is None else logits + self.bias


class QuantizedHead(nn.Module):
    """A stand-in for a quantized head that dequantizes a few rows at a time; it has no gradient."""

    def __init__(
        self, linear: QuantizedLinear, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        """Hold the weight.

        Args:
            linear: quantized weight, [V, H], and the scheme of its input.
            dtype: dtype of the computation.
            bias: [V] in `dtype`, or None.
        """
        super().__init__()
        self.linear, self.dtype, self.bias = linear, dtype, bias
        # families ask for its dtype
        self.weight = torch.empty(linear.weight.qvalue.shape, dtype=dtype, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of [..., H]."""
        seen = self.linear.fake_quantize_input(hidden)
        weight = self.linear.weight
        parts = [
            functional.linear(seen, weight.rows(rows).dequantize().to(self.dtype))
            for rows in spans(len(weight.qvalue), HEAD_ROWS)
        ]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return logits if self.bias is None else logits + self.bias


class _Projection(torch.autograd.Function):
    """Product hidden @ weight.T with a few converted rows in memory, forwards and backwards.

    autograd would keep all converted rows.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Product [..., V] of hidden [..., H] and weight [V, H], computed in `dtype`."""
        ctx.save_for_backward(weight)
        ctx.dtype = dtype
        parts = [
            functional.linear(hidden, rows.to(dtype)) for rows in torch.split(weight, HEAD_ROWS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient by hidden, [..., H], from that by the output, [..., V].

        Weight and dtype have none.
        """
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        sums = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1], dtype=sums)
        for part, rows in zip(
            gradient.split(HEAD_ROWS, dim=-1), torch.split(weight, HEAD_ROWS), strict=True
        ):
            turned = torch.empty(rows.shape[::-1], dtype=ctx.dtype, device=rows.device).copy_(
                rows.t()
            )
            total += product(operand(part), turned)
        return total.to(gradient.dtype), None, None


def logit_rows(vocabulary: int) -> int:
    """The number of tokens with at most LOGITS logits, a multiple of FEWEST and no less."""
    return max(FEWEST, LOGITS // vocabulary // FEWEST * FEWEST)


@contextmanager
def in_parts(linears: Iterable[nn.Linear], *, dtype: torch.dtype) -> Iterator[None]:
    """Let linears compute in `dtype` from stored weights, a few rows at a time, in the block.

    Outputs are those of converted weights except for the order of sums
    (quantflow/numerics/product.py). They come as fast, since the converted rows stay in the cache.
    """
    chosen = list(linears)
    try:
        for linear in chosen:
            linear.forward = partial(_in_parts, linear, dtype)  # type: ignore[method-assign]
        yield
    finally:
        for linear in chosen:
            linear.__dict__.pop("forward", None)


def _in_parts(linear: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """The output [..., O] of [..., I]; a weight that is in `dtype` already needs no parts."""
    tokens = x.reshape(-1, x.shape[-1])  # [N, I]
    # a device converts the whole weight at once
    if linear.weight.dtype == dtype or linear.weight.device.type != "cpu":
        left = operand(filled(tokens.to(dtype)))
        output = product(left, linear.weight.to(dtype), linear.bias)[: len(tokens)]
        return output.reshape(*x.shape[:-1], linear.weight.shape[0])  # [..., O]
    output = torch.empty(len(tokens), linear.weight.shape[0], dtype=dtype, device=tokens.device)
    for some in spans(len(tokens), LINEAR_TOKENS):
        # a family may have converted its input to the dtype of the weight
        left = operand(filled(tokens[some].to(dtype)))
        for rows in spans(linear.weight.shape[0], LINEAR_ROWS):
            bias = None if linear.bias is None else linear.bias[rows]
            made = product(left, linear.weight[rows].to(dtype), bias)
            output[some, rows] = made[: some.stop - some.start]
    return output.reshape(*x.shape[:-1], linear.weight.shape[0])  # [..., O]


class TensorPool:
    """One copy of equal tensors.

    Masks and position embeddings repeat over layers and equally long sequences.
    """

    def __init__(self, device: Device = HOST) -> None:
        """Begin empty; shared tensors are on `device`."""
        self._device = device
        # dtype and shape -> pairs of a tensor in host memory and the same on the device
        self._kept: dict[tuple[torch.dtype, torch.Size], list[tuple[Tensor, Tensor]]] = {}

    def share(self, value: Any, seen: dict[int, Tensor]) -> Any:
        """The value with every tensor in it replaced by the kept one of equal content.

        Args:
            value: a tensor, a tuple or dict of values, or anything else.
            seen: id -> kept tensor, for the tensors of one forward, which are alive while it is
                used.
        """
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = self._keep(value)
            return seen[id(value)]
        if isinstance(value, tuple):
            return tuple(self.share(item, seen) for item in value)
        if isinstance(value, dict):
            return {name: self.share(item, seen) for name, item in value.items()}
        return value

    def _keep(self, value: Tensor) -> Tensor:
        kept = self._kept.setdefault((value.dtype, value.shape), [])
        for tensor, there in kept:
            if torch.equal(tensor, value):
                return there
        kept.append((value, self._device.put(value)))
        return kept[-1][1]
