"""What `quantflow.models.capture` puts in the place of parts of the model, and what it keeps of their calls."""

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
from quantflow.numerics.product import operand, product

# of a linear's weight that are converted at once: few enough for a core's cache; it never changes
# either
LINEAR_ROWS = 256
LINEAR_TOKENS = 512  # of its input that are multiplied with these at once
# of the head that are converted at once; part of the result's last digits, so it never changes
HEAD_ROWS = 4096
# that a thread brings back through the head at once, 64 MiB; and tokens whose logits these are
LOGITS, FEWEST = 2**24, 64


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the model hands to one decoder layer besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self, argument: str | int, value: Any) -> "Call":
        """Return the call with another value of an argument: its name, or its place."""
        if isinstance(argument, str):
            return Call(args=self.args, kwargs=self.kwargs | {argument: value})
        return Call(
            args=(*self.args[:argument], value, *self.args[argument + 1 :]), kwargs=self.kwargs
        )


def _of(layer: nn.Module, name: str, error: AttributeError) -> Any:
    """Return what a layer that is stood for says of itself: some models ask a layer of which kind it is."""
    if name in layer._parameters:
        raise error
    return getattr(layer, name)


def as_returned(hidden: Tensor, count: int) -> Tensor | tuple[Tensor | None, ...]:
    """Return a hidden state as a layer returns it: as the first of a tuple of `count`, by itself where that is 0."""
    return (hidden, *[None] * (count - 1)) if count else hidden


class Recorder(nn.Module):
    """Stands for a decoder layer: remembers what it was called with and returns its input."""

    def __init__(self, layer: nn.Module, *, tuple_of: int = 0) -> None:
        """Start with nothing recorded; `tuple_of`: as `as_returned` takes it."""
        super().__init__()
        self.__dict__["layer"] = layer  # not a part of this one
        self.tuple_of = tuple_of
        self.hidden = torch.empty(0)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the layer says of itself."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            return _of(self.layer, name, error)

    def forward(
        self, hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Record and return `hidden`, [1, S, H]."""
        self.hidden, self.args, self.kwargs = hidden, args, kwargs
        return as_returned(hidden, self.tuple_of)


class Given(nn.Module):
    """Stands for a decoder layer: returns what the calling thread was given, whatever it is called with."""

    def __init__(self, layer: nn.Module, mine: threading.local, *, tuple_of: int = 0) -> None:
        """Start with nothing given.

        Args:
            layer: what it stands for.
            mine: where a thread's hidden state is, the same for all layers of a model.
            tuple_of: as `as_returned` takes it.
        """
        super().__init__()
        self.__dict__["layer"] = layer  # not a part of this one
        self.tuple_of = tuple_of
        self._mine = mine

    def __getattr__(self, name: str) -> Any:
        """Return what the layer says of itself."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            return _of(self.layer, name, error)

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return the hidden state that this thread was given."""
        hidden: Tensor = self._mine.hidden
        return as_returned(hidden, self.tuple_of)


@contextmanager
def giving(mine: threading.local, hidden: Tensor) -> Iterator[None]:
    """Answer every call of a `Given` by this thread with `hidden`, [1, S, H], until the block ends."""
    mine.hidden = hidden
    try:
        yield
    finally:
        del mine.hidden


class NoEmbedding(nn.Module):
    """Stands for the embedding before layers that were stood for: what it returns is read by none of them."""

    def __init__(self, embedding: Any, *, dtype: torch.dtype, device: Device) -> None:
        """Take the place of an embedding whose weight [V, E] is on meta; `dtype`, `device`: of what it returns."""
        super().__init__()
        nothing = torch.zeros((), dtype=dtype, device=device.kind)
        # no memory; families ask for its dtype, device and rows
        self.weight = nothing.expand(embedding.weight.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return zeros, [..., E] of ids [...]."""
        return self.weight.new_zeros((*ids.shape, self.weight.shape[1]))


class Rows(nn.Module):
    """Stands for an embedding: holds the rows that some sequences need, and does with them what the embedding does."""

    def __init__(
        self, ids: Tensor, weight: Tensor, embedding: Any, *, padding: int | None = None
    ) -> None:
        """Answer for these ids.

        Args:
            ids: int64 [n], ascending.
            weight: [n, H], their rows.
            embedding: what it stands for, of [V, H]; some multiply what they return by a number.
            padding: one of the ids, whose row a model that reads images too asks for by itself.
        """
        super().__init__()
        self.ids, self.inner = ids, with_rows(embedding, weight)
        shown = weight[:1] if padding is None else weight[ids == padding]
        # [V, H], no memory; families ask for its dtype and device
        self.weight = shown.expand(embedding.num_embeddings, -1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return what the embedding makes of ids whose rows it holds, [..., H]."""
        found: Tensor = self.inner(torch.searchsorted(self.ids, ids))
        return found


def with_rows(embedding: Any, rows: Tensor) -> Any:
    """Return an embedding that is another one but for its rows [n, H], so ids are numbers of these."""
    own = copy.copy(embedding)
    own._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    own.num_embeddings, own.padding_idx = len(rows), None
    return own


class HeadStandIn(nn.Module):
    """Stands for the head: keeps its weight as it is stored, and converts a few rows of it at a time."""

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        """Hold the weight.

        Args:
            weight: [V, H], as stored.
            dtype: what is computed in.
            bias: [V] in it, or None.
        """
        super().__init__()
        self.rows, self.dtype, self.bias = weight, dtype, bias
        # families ask for its dtype
        self.weight = torch.empty(weight.shape, dtype=dtype, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of [..., H]."""
        logits: Tensor = _Projection.apply(hidden.to(self.dtype), self.rows, self.dtype)  # type: ignore[no-untyped-call]
        logits = logits.to(hidden.dtype)
        return logits if self.bias is None else logits + self.bias


class QuantizedHead(nn.Module):
    """Stands for a head that is quantized: keeps its qvalues, and dequantizes a few rows at a time. It has no gradient."""

    def __init__(
        self, linear: QuantizedLinear, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        """Hold the weight.

        Args:
            linear: the weight, [V, H], and what happens to its input.
            dtype: what is computed in.
            bias: [V] in it, or None.
        """
        super().__init__()
        self.linear, self.dtype, self.bias = linear, dtype, bias
        # families ask for its dtype
        self.weight = torch.empty(linear.weight.qvalue.shape, dtype=dtype, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of [..., H]."""
        seen, weight = self.linear.fake_quantize_input(hidden), self.linear.weight
        parts = [
            functional.linear(seen, weight.rows(rows).dequantize().to(self.dtype))
            for rows in spans(len(weight.qvalue), HEAD_ROWS)
        ]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return logits if self.bias is None else logits + self.bias


class _Projection(torch.autograd.Function):
    """hidden @ weight.T, forwards and backwards with a few converted rows in memory; autograd would keep all of them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [..., V] of hidden [..., H] and weight [V, H], computed in `dtype`."""
        ctx.save_for_backward(weight)
        ctx.dtype = dtype
        parts = [
            functional.linear(hidden, rows.to(dtype)) for rows in torch.split(weight, HEAD_ROWS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient by hidden, [..., H], of that by the output, [..., V]; weight and dtype have none."""
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
    """Return how many tokens' logits are LOGITS at most, a multiple of FEWEST and no less."""
    return max(FEWEST, LOGITS // vocabulary // FEWEST * FEWEST)


@contextmanager
def in_parts(linears: Iterable[nn.Linear], *, dtype: torch.dtype) -> Iterator[None]:
    """Let linears compute in `dtype` from weights in any other, a few rows at a time, until the block ends.

    Outputs are those of converted weights but for the order of sums
    (quantflow/numerics/product.py); and they come as fast, since the rows that are converted stay
    in the cache.
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
    """Return the output [..., O] of [..., I]; a weight that is in `dtype` already needs no parts."""
    # a device converts the whole weight at once
    if linear.weight.dtype == dtype or linear.weight.device.type != "cpu":
        return product(operand(x.to(dtype)), linear.weight.to(dtype), linear.bias)
    tokens = x.reshape(-1, x.shape[-1])  # [N, I]
    output = torch.empty(len(tokens), linear.weight.shape[0], dtype=dtype, device=tokens.device)
    for some in spans(len(tokens), LINEAR_TOKENS):
        # a family may have turned it to the dtype of the weight
        left = operand(tokens[some].to(dtype))
        for rows in spans(linear.weight.shape[0], LINEAR_ROWS):
            bias = None if linear.bias is None else linear.bias[rows]
            output[some, rows] = product(left, linear.weight[rows].to(dtype), bias)
    return output.reshape(*x.shape[:-1], linear.weight.shape[0])  # [..., O]


class TensorPool:
    """Keeps one copy of equal tensors: masks and position embeddings repeat over layers and equally long sequences."""

    def __init__(self, device: Device = HOST) -> None:
        """Start empty; what is shared is on `device`."""
        self._device = device
        # in host memory, on the device
        self._kept: dict[tuple[torch.dtype, torch.Size], list[tuple[Tensor, Tensor]]] = {}

    def share(self, value: Any, seen: dict[int, Tensor]) -> Any:
        """Return `value` with every tensor in it replaced by the kept one of equal content.

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
