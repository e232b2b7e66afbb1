"""The linears of a decoder layer that share an input, as one product where their weights allow it.

The rows of weights that are quantized alike are put below each other, and so are those of weights that are not quantized;
what a row gives does not depend on the others. Where they differ each linear is computed on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantflow.backends import Backend
from quantflow.core import joining
from quantflow.core.qtensor import QuantizedLinear
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.linear import QuantLinear
from quantflow.runtime.operations import Operations

Projection = Callable[[Tensor], Tensor]  # [N, I] float32 -> [N, sum of O] float32, contiguous


def projection(artifact: Artifact, names: Sequence[str], operations: Operations) -> Projection:
    """Read linears and return the function from their input to their outputs, side by side in the order of `names`.

    Args:
        artifact: where they are.
        names: source names, without `.weight`.
        operations: runs the linears that are not quantized.

    Raises:
        InputError: see `Artifact.decode`.
    """
    quantized = {name in artifact.linears for name in names}
    if quantized == {False}:
        return _plain(artifact, names, operations)
    if quantized == {True}:
        joined = _join(artifact, [artifact.decode(name) for name in names], names)
        if joined is not None:
            linear, backend = joined
            bias = _bias([artifact.bias(name) for name in names], [artifact.linears[name].shape[0] for name in names])
            return _in_dtype(QuantLinear(linear, bias=bias, backend=backend, dtype=artifact.dtype), artifact.dtype)
    parts = [projection(artifact, [name], operations) for name in names]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def plain_weight(artifact: Artifact, name: str, operations: Operations) -> Tensor:
    """Return a matrix that is not quantized, in the dtype that it is held in.

    That is the artifact's dtype; what is stored in bfloat16 may stay so under float32: the same numbers in half the bytes.
    """
    weight = artifact.read([name])[name]
    return weight if weight.dtype == torch.bfloat16 and operations.WIDENS else weight.to(artifact.dtype)


def plain(weight: Tensor, bias: Tensor | None, operations: Operations) -> Projection:
    """Return the function from an input to x @ weight.T + bias.  weight: [O, I]; bias: [O] float32, or None."""
    return lambda x: operations.product(x, weight, bias)


def _in_dtype(linear: QuantLinear, dtype: torch.dtype) -> Projection:
    if dtype == torch.float32:
        return linear.forward
    return lambda x: linear.forward(x.to(dtype)).float()


def _plain(artifact: Artifact, names: Sequence[str], operations: Operations) -> Projection:
    weights = [plain_weight(artifact, f"{name}.weight", operations) for name in names]
    stored = [f"{name}.bias" for name in names]
    biases = [artifact.read([name], torch.float32)[name] if name in artifact.checkpoint.tensors else None for name in stored]
    bias = _bias(biases, [len(weight) for weight in weights])
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return plain(weight, bias, operations)


def _bias(biases: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Return the biases below each other, zeros where a linear has none; None when none has one."""
    found = [bias for bias in biases if bias is not None]
    if not found:
        return None
    return torch.cat([found[0].new_zeros(n) if bias is None else bias for bias, n in zip(biases, lengths, strict=True)])


def _join(
    artifact: Artifact, linears: Sequence[QuantizedLinear], names: Sequence[str]
) -> tuple[QuantizedLinear, Backend] | None:
    """Return linears as one and what runs it, or None where they are quantized differently or no longer fit a kernel."""
    first, placement = linears[0], artifact.linears[names[0]]
    backend = placement.backend
    if len(linears) == 1:
        return first, backend
    scheme = first.scheme
    weights = scheme.weights
    whole = weights.granularity == "per_tensor"
    alike = all(
        linear.scheme == scheme
        and artifact.linears[name].backend is backend
        and _same(linear.input_scale, first.input_scale)
        and _same(linear.input_zero_point, first.input_zero_point)
        and (not whole or _same(linear.weight.scale, first.weight.scale))
        for name, linear in zip(names, linears, strict=True)
    )
    shape = (sum(len(linear.weight.qvalue) for linear in linears), placement.shape[1])
    if not alike or weights.granularity == "per_block" or (whole and not weights.symmetric):
        return None
    if backend.why_not(scheme, artifact.device, shape=shape, dtype=artifact.dtype) is not None:
        return None
    weight = joining.join_rows([linear.weight for linear in linears], scale=first.weight.scale if whole else None).weight
    return replace(first, weight=weight), backend


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
