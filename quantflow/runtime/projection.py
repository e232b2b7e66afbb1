"""The linears of a decoder layer that share an input, as one product where their weights allow it.

The rows of weights that are quantized alike are put below each other, and so are those of weights
that are not quantized; what a row gives does not depend on the others. Where they differ each
linear is computed on its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import kernels
from quantflow.backends.backend import Backend, Case
from quantflow.core.qtensor import PackedLinear, QuantizedLinear
from quantflow.distributed import joining
from quantflow.errors import IntegrityError
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.operations import Projection, product
from quantflow.runtime.packed import Pack


def projection(
    artifact: Artifact,
    names: Sequence[str],
    pack: Pack | None = None,
    *,
    order: Tensor | None = None,
) -> Projection:
    """Read linears as one function from their input to their outputs, side by side.

    The outputs come in the order of `names`.

    Args:
        artifact: artifact of the linears.
        names: source names, without `.weight`.
        pack: file where weights are looked for first, and kept.
        order: int64 [O], output that comes at each place; None leaves them as they are. For one
            model it is always the same.

    Raises:
        InputError: see `Artifact.decode`.
    """
    if any(name in artifact.linears and artifact.linears[name].reordered for name in names):
        pack = None  # it has no place for an order of inputs
    quantized = {name in artifact.linears for name in names}
    if quantized == {False}:
        return _plain(artifact, names, pack, order)
    blocks = order is not None and any(
        artifact.linears[name].scheme.weights.granularity == "per_block"
        for name in names
        if name in artifact.linears
    )
    product = (
        _quantized(artifact, names, pack, order) if quantized == {True} and not blocks else None
    )
    if product is not None:
        return product
    if order is not None:
        whole, places = projection(artifact, names, pack), order
        return lambda x: whole(x)[:, places].contiguous()
    parts = [projection(artifact, [name], pack) for name in names]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def plain_weight(artifact: Artifact, name: str, pack: Pack | None) -> Tensor:
    """A matrix that is not quantized, in the dtype that it is held in.

    That is the artifact's dtype; a weight that is stored in bfloat16 stays so under float32: the
    same numbers in half the bytes.
    """

    def make() -> dict[str, Tensor]:
        weight = artifact.read([name])[name]
        return {"weight": weight if weight.dtype == torch.bfloat16 else weight.to(artifact.dtype)}

    if pack is None:
        return make()["weight"]
    kept, shape = pack.get(name, make).get("weight"), artifact.checkpoint.infos[name].shape
    if kept is None or kept.shape != shape or kept.dtype not in (torch.bfloat16, artifact.dtype):
        problem = "nothing" if kept is None else f"{kept.dtype} {list(kept.shape)}"
        raise IntegrityError(
            f"{pack.path}: {name}: {problem} where {list(shape)} belongs",
            "remove the pack; it is made again",
        )
    return kept


def _plain(
    artifact: Artifact, names: Sequence[str], pack: Pack | None, order: Tensor | None
) -> Projection:
    weights = [plain_weight(artifact, f"{name}.weight", pack) for name in names]
    bias = _bias(artifact, names, [len(weight) for weight in weights], torch.float32, order)
    weight = weights[0]
    if len(weights) > 1:
        rows = sum(map(len, weights))
        weight = kernels.lasting(rows, weight.shape[1], dtype=weight.dtype)
        torch.cat(weights, out=weight)
    return partial(
        product, weight=weight if order is None else weight[order], bias=bias, dtype=artifact.dtype
    )


def _quantized(
    artifact: Artifact, names: Sequence[str], pack: Pack | None, order: Tensor | None
) -> Projection | None:
    """Quantized linears as one product, or None where they cannot be one."""
    key, backend, dtype = "+".join(names), artifact.linears[names[0]].backend, artifact.dtype
    if pack is not None and key in pack:
        rows, columns = (
            sum(artifact.linears[name].shape[0] for name in names),
            artifact.linears[names[0]].shape[1],
        )
        prepared: Any = kernels.restore(pack.get(key, dict), dtype, shape=(rows, columns))
        inputs = None
    elif order is None and (packed := _packed(artifact, names)) is not None:
        assert backend.prepare_packed is not None  # `_packed` says so
        prepared, inputs = backend.prepare_packed(packed, dtype), None
        if pack is not None:
            pack.get(key, lambda: kernels.dump(prepared))
    else:
        joined = _join(artifact, [artifact.decode(name) for name in names], names)
        if joined is None:
            return None
        prepared, inputs = (
            backend.prepare(joined if order is None else _ordered(joined, order), dtype),
            joined.order,
        )
        if pack is not None and isinstance(prepared, kernels.Prepared):
            pack.get(key, lambda: kernels.dump(prepared))
    ours = isinstance(prepared, kernels.Prepared)
    bias_dtype = torch.float32 if ours else dtype  # ours round inputs themselves
    bias = _bias(
        artifact, names, [artifact.linears[name].shape[0] for name in names], bias_dtype, order
    )
    linear: Any = backend.linear
    if ours:
        return partial(linear, prepared=prepared, bias=bias, order=inputs)
    return lambda x: linear(
        (x if inputs is None else x[..., inputs]).to(dtype), prepared, bias
    ).float()


def _packed(artifact: Artifact, names: Sequence[str]) -> list[PackedLinear] | None:
    """Linears that become one with their codes packed; None where they are to be decoded."""
    placements = [artifact.linears[name] for name in names]
    first = placements[0]
    shape = (sum(placement.shape[0] for placement in placements), first.shape[1])
    case = Case(scheme=first.scheme, device=artifact.device, shape=shape, dtype=artifact.dtype)
    if (
        first.backend.prepare_packed is None
        or any((each.scheme, each.backend) != (first.scheme, first.backend) for each in placements)
        or first.backend.why_not(case) is not None
    ):
        return None
    linears = []
    for name in names:
        linear = artifact.packed(name)
        if linear is None:
            return None
        linears.append(linear)
    return linears


def _ordered(linear: QuantizedLinear, order: Tensor) -> QuantizedLinear:
    """The linear with its outputs in another order.

    Its scales are of rows, or of the whole weight.
    """
    weight = linear.weight
    rows = len(weight.qvalue)
    scale = weight.scale[order] if len(weight.scale) == rows else weight.scale
    zero = weight.zero_point
    zero = zero[order] if zero is not None and len(zero) == rows else zero
    return replace(
        linear, weight=replace(weight, qvalue=weight.qvalue[order], scale=scale, zero_point=zero)
    )


def _bias(
    artifact: Artifact,
    names: Sequence[str],
    lengths: Sequence[int],
    dtype: torch.dtype,
    order: Tensor | None,
) -> Tensor | None:
    """The biases below each other, zeros where a linear has none; None when none has one."""
    biases = [artifact.bias(name, dtype) for name in names]
    if all(bias is None for bias in biases):
        return None
    whole = torch.cat(
        [
            torch.zeros(n, dtype=dtype) if bias is None else bias
            for bias, n in zip(biases, lengths, strict=True)
        ]
    )
    return whole if order is None else whole[order]


def _join(
    artifact: Artifact, linears: Sequence[QuantizedLinear], names: Sequence[str]
) -> QuantizedLinear | None:
    """Linears as one, or None where they are quantized differently or do not fit their kernel."""
    first, placement = linears[0], artifact.linears[names[0]]
    if len(linears) == 1:
        return first
    weights, whole = first.scheme.weights, first.scheme.weights.granularity == "per_tensor"
    kinds = [
        _kind(linear, artifact.linears[name].backend)
        for name, linear in zip(names, linears, strict=True)
    ]
    if (
        kinds != kinds[:1] * len(kinds)
        or weights.granularity == "per_block"
        or (whole and not weights.symmetric)
    ):
        return None
    shape = (sum(len(linear.weight.qvalue) for linear in linears), placement.shape[1])
    case = Case(scheme=first.scheme, device=artifact.device, shape=shape, dtype=artifact.dtype)
    if placement.backend.why_not(case) is not None:
        return None
    weight = joining.join_rows(
        [linear.weight for linear in linears], scale=first.weight.scale if whole else None
    ).weight
    return replace(first, weight=weight)


def _kind(linear: QuantizedLinear, backend: Backend) -> tuple[object, ...]:
    """The properties that linears of one product share."""
    one = linear.weight.scale if linear.scheme.weights.granularity == "per_tensor" else None
    numbers = (linear.input_scale, linear.input_zero_point, one, linear.order)
    return (
        linear.scheme,
        backend,
        *(None if number is None else number.tolist() for number in numbers),
    )
