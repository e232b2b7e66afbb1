"""The quantized linear layer of the runtime.

It runs one way: it has no mode, no gradient and no parameters.

Linears that receive the same tensor, such as queries, keys and values, round it to the same codes
where their inputs are quantized alike. `share_inputs_` has the first of them round it, and the
others take its codes: the bits are the same, and a third or half of the operators are left.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.backends.backend import Backend
from quantflow.core.orthogonal import mixed
from quantflow.core.qtensor import QuantizedLinear

RoundInput = Callable[[Tensor, Any], Any]


class SharedInput:
    """The rounded form of an input that several linears receive, for as long as that input lives.

    Nothing writes into an input between the first and the last of its linears.
    """

    def __init__(self) -> None:
        """Nothing is rounded yet."""
        self._kept: tuple[weakref.ref[Tensor], Any] | None = None

    def rounded(self, x: Tensor, round_input: RoundInput, prepared: Any) -> Any:
        """The form that `round_input` makes of x, or made of it for another linear."""
        kept = self._kept
        if kept is not None and kept[0]() is x:
            return kept[1]
        made = round_input(x, prepared)
        self._kept = (weakref.ref(x, self._forget), made)
        return made

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._kept is not None and self._kept[0] is gone:
            self._kept = None


class QuantLinear(nn.Module):
    """A linear whose weight is in a backend's layout.

    It stays on the device and takes inputs of the dtype that it was made for.

    Attributes:
        in_features, out_features: the shape of the weight.
        backend: the backend's name.
        shared: rounded input of linears that receive the same one (`share_inputs_`); None: each
            call rounds its own.
        bias: [out_features] in the dtype of the inputs, or None.
        weight: tensor without values, of the weight's shape and the inputs' dtype, for families
            that ask for them.
    """

    bias: Tensor | None

    def __init__(
        self,
        quantized: QuantizedLinear,
        *,
        bias: Tensor | None,
        backend: Backend,
        dtype: torch.dtype,
    ) -> None:
        """Prepare the weight.

        Args:
            quantized: weight, [out_features, in_features], and quantization of the input.
            bias: [out_features], or None.
            backend: a value of quantflow.backends.BACKENDS that can run this linear.
            dtype: the dtype of the inputs.
        """
        super().__init__()
        self.out_features, self.in_features = quantized.weight.qvalue.shape
        self.register_buffer("bias", None if bias is None else bias.to(dtype), persistent=False)
        self.weight = torch.empty(quantized.weight.qvalue.shape, dtype=dtype, device="meta")
        self.backend = backend.name
        self._linear = backend.linear
        self.shared: SharedInput | None = None
        self._rotation = quantized.scheme.rotation  # the Hadamard rotation of the inputs
        self._order = quantized.order
        self._prepared = backend.prepare(quantized, dtype)
        self._round_input = backend.round_input
        self._input_scheme = quantized.scheme.input
        self._input_numbers = (quantized.input_scale, quantized.input_zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """The product x @ W.T + bias.

        Args:
            x: [..., in_features].

        Returns:
            [..., out_features] in x's dtype.
        """
        # torch.compile finds what is computed twice by itself
        if self.shared is not None and not torch.compiler.is_compiling():
            assert self._round_input is not None  # `rounding` says so
            rounded = self.shared.rounded(x, self._round_input, self._prepared)
            return self._linear(x, self._prepared, self.bias, rounded)
        x = x if self._order is None else x[..., self._order]
        return self._linear(
            x if self._rotation is None else mixed(x, self._rotation), self._prepared, self.bias
        )

    def rounding(self) -> tuple[object, ...] | None:
        """What decides the rounded form of an input, equal where that is equal.

        None where nothing is rounded before the product, or inputs are reordered or mixed first.
        """
        if self._round_input is None or self._input_scheme is None:
            return None
        if self._order is not None or self._rotation is not None:
            return None
        numbers = (None if each is None else each.tolist() for each in self._input_numbers)
        # a scheme compares equal where only the rounding of its scales differs
        scheme = str(asdict(self._input_scheme))
        return (self._round_input, self.weight.dtype, scheme, *map(str, numbers))

    def extra_repr(self) -> str:
        """The shape and the backend, for print(model)."""
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, backend={self.backend}"


def share_inputs_(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Have the linears of a group that round their input alike round it once.

    Args:
        model: modified.
        groups: names of modules that receive the same tensor; those that are no QuantLinear stay
            as they are.
    """
    for group in groups:
        inputs: dict[tuple[object, ...], SharedInput] = {}
        for name in group:
            linear = model.get_submodule(name)
            if isinstance(linear, QuantLinear) and (rounding := linear.rounding()) is not None:
                linear.shared = inputs.setdefault(rounding, SharedInput())
