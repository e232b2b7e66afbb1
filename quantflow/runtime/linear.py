"""The quantized linear layer of the runtime.

It runs one way: it has no mode, no gradient and no parameters.
"""

import torch
from torch import Tensor, nn

from quantflow.backends.backend import Backend
from quantflow.core.orthogonal import mixed
from quantflow.core.qtensor import QuantizedLinear


class QuantLinear(nn.Module):
    """A linear whose weight is in a backend's layout.

    It stays on the device and takes inputs of the dtype that it was made for.

    Attributes:
        in_features, out_features: the shape of the weight.
        backend: the backend's name.
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
        self._rotation = quantized.scheme.rotation  # the Hadamard rotation of the inputs
        self._order = quantized.order
        self._prepared = backend.prepare(quantized, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product x @ W.T + bias.

        Args:
            x: [..., in_features].

        Returns:
            [..., out_features] in x's dtype.
        """
        x = x if self._order is None else x[..., self._order]
        return self._linear(
            x if self._rotation is None else mixed(x, self._rotation), self._prepared, self.bias
        )

    def extra_repr(self) -> str:
        """The shape and the backend, for print(model)."""
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, backend={self.backend}"
